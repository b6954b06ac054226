"""From an Airflow connection to the engine's API client: one per event loop and connection, rebuilt on 401."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.errors import AccessError, ManifestError

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

    from airflow_provider_ktrain.core.identity import JobRef
    from airflow_provider_ktrain.engine.api import Api

_Key = tuple[str, str | None, str]
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, tuple[Api, int]]] = WeakKeyDictionary()


class TrainingHook:
    """The client of one `kubernetes` connection.

    :param conn_id: id of a connection of type `kubernetes`; where `kubernetes_default` does not exist, the default
        kubeconfig (KUBECONFIG, ~/.kube/config) is used, as Airflow's own hook does.
    :param cluster_context: context of the kubeconfig; None is its current one, or the connection's.
    """

    def __init__(self, conn_id: str = "kubernetes_default", cluster_context: str | None = None) -> None:
        self.conn_id = conn_id
        self.cluster_context = cluster_context
        self._extras: dict[str, Any] | None = None
        self._open: list[contextlib.AsyncExitStack] = []  # a context that is let go of closes its client

    def load(self) -> None:
        """Read the connection now, synchronously: in a worker, before an event loop runs.

        So nothing that follows, a kill in a signal handler least of all, has to ask Airflow for it.

        :raises ManifestError: there is no such connection.
        """
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            self._extras = dict(KubernetesHook.get_connection(self.conn_id).extra_dejson)
        except AirflowNotFoundException as e:
            raise ManifestError(
                "kubernetes_conn_id",
                found=repr(self.conn_id),
                expected="a connection of type `kubernetes`",
                remedy=f"airflow connections add {self.conn_id} --conn-type kubernetes",
            ) from e

    @property
    def namespace(self) -> str | None:
        """The connection's namespace, once `load` has read it."""
        extras = self._extras or {}
        return extras.get("namespace") or extras.get("extra__kubernetes__namespace") or None

    async def make_client(self) -> ApiClient:
        """A new client with credentials as they are now.

        :raises AccessError: the connection's kubeconfig, or its context, is not there or cannot be read.
        """
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
        from kubernetes_asyncio.config import ConfigException

        hook = AsyncKubernetesHook(
            conn_id=self.conn_id, cluster_context=self.cluster_context, connection_extras=self._extras
        )
        stack = contextlib.AsyncExitStack()
        try:
            client: ApiClient = await stack.enter_async_context(hook.get_conn())
        except (ConfigException, OSError) as e:
            extras = self._extras or {}
            path = extras.get("kube_config_path") or "kube_config_path, kube_config, in_cluster, KUBECONFIG"
            raise AccessError(
                f"the connection {self.conn_id!r} gives no client: {e}. Check its kubeconfig ({path}) and "
                f"cluster_context ({self.cluster_context or 'not set'})"
            ) from e
        self._open.append(stack)
        return client

    async def _read(self) -> Mapping[str, Any]:
        """The connection's extras: what `load` has read, else as they are now."""
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook

        if self._extras is not None:
            return self._extras
        extras: Mapping[str, Any] = await AsyncKubernetesHook(self.conn_id).get_conn_extras()
        return extras

    @contextlib.asynccontextmanager
    async def api(self, ref: JobRef | None = None) -> AsyncIterator[Api]:
        """The API of this connection, as it is now, in the running event loop; closed by the last who uses it there.

        :param ref: a job that is to be dealt with.
        :raises AccessError: the connection means another cluster than that job's by now.
        """
        from airflow_provider_ktrain.engine.api import Api
        from airflow_provider_ktrain.engine.submit import check_cluster

        key = (self.conn_id, self.cluster_context, _content(await self._read()))
        apis = _shared.setdefault(asyncio.get_running_loop(), {})
        api, users = apis.get(key) or (Api(self.make_client), 0)
        apis[key] = (api, users + 1)
        try:
            await api.cluster()  # its client is built now, by what was read
            if ref is not None:
                await check_cluster(api, ref)
            yield api
        finally:
            api, users = apis[key]
            if users > 1:
                apis[key] = (api, users - 1)
            else:
                del apis[key]
                await api.close()


def _content(extras: Mapping[str, Any]) -> str:
    """A hash of the connection and of the kubeconfig that it leads to: either may come to mean another cluster."""
    content = hashlib.sha256(json.dumps(extras, sort_keys=True, default=str).encode())
    path = extras.get("kube_config_path") or extras.get("extra__kubernetes__kube_config_path")
    for file in str(path or os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep):
        with contextlib.suppress(OSError):
            content.update(Path(file).expanduser().read_bytes())
    return content.hexdigest()
