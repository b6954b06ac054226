"""The cluster of a command: a kubeconfig, a context and a namespace, chosen as kubectl chooses them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from airflow_provider_ktrain.cli.arguments import namespace
from airflow_provider_ktrain.core.errors import ClusterError

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient


@dataclass(frozen=True)
class Target:
    """A cluster, and the namespace in which a command works.

    :param namespace: of the option or the context; empty if neither sets one.
    :param explicit: whether the option set the namespace, which then overrides a manifest's.
    :param make_client: builds a client, as `engine.api.client.Api` calls it.
    """

    namespace: str
    explicit: bool
    make_client: Callable[[], Awaitable[ApiClient]]

    def namespace_of(self, manifest: dict[str, Any]) -> str:
        """The namespace of a job: the option's, else the manifest's, else the context's, else `default`."""
        metadata = manifest.get("metadata")
        own = metadata.get("namespace") if isinstance(metadata, dict) else None
        return (self.explicit and self.namespace) or own or self.namespace or "default"


def add_options(group: Any) -> None:
    """Add the options that choose the cluster to a group of a parser."""
    group.add_argument("--kubeconfig", metavar="PATH", help="default: KUBECONFIG, else ~/.kube/config")
    group.add_argument("--context", help="context of the kubeconfig; default: its current context")
    group.add_argument(
        "--namespace", "-n", type=namespace, help="default: the manifest's, else the context's, else default"
    )


def target(args: argparse.Namespace) -> Target:
    """The cluster that the options of `add_options` choose.

    :raises ClusterError: the kubeconfig or context does not exist.
    """
    from kubernetes_asyncio import client, config

    from airflow_provider_ktrain.engine.api.auth_client import AuthClient

    place = args.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    remedy = "set --kubeconfig or KUBECONFIG"
    if not any(os.path.exists(os.path.expanduser(path)) for path in place.split(os.pathsep)):
        raise ClusterError(f"the kubeconfig {place} does not exist: {remedy}")
    try:
        contexts, current = config.list_kube_config_contexts(place)
    except (config.ConfigException, yaml.YAMLError, TypeError) as e:
        raise ClusterError(f"the kubeconfig {place} is invalid: {e}: {remedy}") from None
    chosen = next((c for c in contexts if c["name"] == args.context), None) if args.context else current
    if chosen is None:
        names = ", ".join(c["name"] for c in contexts)
        raise ClusterError(f"--context: found {args.context!r}, expected one of {names}")

    async def make_client() -> ApiClient:
        configuration = client.Configuration()
        await config.load_kube_config(place, chosen["name"], client_configuration=configuration)
        return AuthClient(configuration)

    default = args.namespace or chosen["context"].get("namespace") or ""
    return Target(default, bool(args.namespace), make_client)
