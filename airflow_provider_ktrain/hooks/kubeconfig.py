"""The client configuration of a `kubernetes` connection, as Airflow's KubernetesHook understands it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import hashlib
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.threads import in_thread

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

T = TypeVar("T")
Extras = Mapping[str, Any]
Credential = Mapping[str, Any]  #: `status` of an ExecCredential: token, certificate and key, expirationTimestamp.

BUILD_TIMEOUT = 30.0  #: Seconds for everything, an exec plugin included.
EXPIRY_MARGIN_SECONDS = 60.0  #: How long before its expiry a credential is no longer given to a new client.
EXTRAS = ("in_cluster", "kube_config_path", "kube_config", "cluster_context", "disable_verify_ssl", "namespace")
SOURCES = ("in_cluster", "kube_config_path", "kube_config")
FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_credentials: dict[str, Credential] = {}  # of exec plugins, by the content of their `exec` section


def effective(extras: Extras) -> dict[str, Any]:
    """The extras that have a value, by their current names.

    Airflow's form stores an empty string for an empty field. Before Airflow 2.3, names had the prefix
    `extra__kubernetes__`.
    """
    values = {name: extras[name] if name in extras else extras.get(f"extra__kubernetes__{name}") for name in EXTRAS}
    return {name: value for name, value in values.items() if value}


def files(extras: Extras) -> list[Path]:
    """The files that a client is built from: kubeconfigs, and what they refer to. Reads them.

    Not the token of a service account: kubernetes_asyncio reads that again every minute.
    """
    from kubernetes_asyncio.config.incluster_config import SERVICE_CERT_FILENAME

    if extras.get("in_cluster"):
        return [Path(SERVICE_CERT_FILENAME)]
    if inline := extras.get("kube_config"):
        return list(_referred(inline, Path()))
    paths = kubeconfigs(extras)
    if "kube_config_path" not in extras and _in_cluster():
        return [Path(SERVICE_CERT_FILENAME)]
    found = list(paths)
    for path in paths:
        with contextlib.suppress(OSError):
            found += _referred(path.read_text(), path.parent)
    return found


def kubeconfigs(extras: Extras) -> list[Path]:
    """The kubeconfigs that a connection leads to: its own, or the default ones."""
    from kubernetes_asyncio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

    paths = str(extras.get("kube_config_path") or KUBE_CONFIG_DEFAULT_LOCATION).split(os.pathsep)
    return [Path(path).expanduser() for path in paths if path]


def _referred(kubeconfig: Any, folder: Path) -> Iterator[Path]:
    """The files that a kubeconfig names, as far as it can be read."""
    import yaml

    try:
        content = yaml.safe_load(kubeconfig) if isinstance(kubeconfig, str) else kubeconfig
        parts = [e.get("cluster") or {} for e in content.get("clusters") or ()]
        parts += [e.get("user") or {} for e in content.get("users") or ()]
        names = [str(part[name]) for part in parts for name in FILES if part.get(name)]
    except Exception:  # values of tags raise errors of any type; whoever builds the client reports them
        return
    yield from (folder / name for name in names)


def digest(paths: Iterable[Path]) -> str:
    """A hash of the content of files; one that can't be read counts as empty."""
    content = hashlib.sha256()
    for path in paths:
        data = b""
        with contextlib.suppress(OSError):
            data = path.read_bytes()
        content.update(hashlib.sha256(data).digest())
    return content.hexdigest()


def _in_cluster() -> bool:
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import ConfigException, load_incluster_config

    try:
        load_incluster_config(client_configuration=Configuration())
    except ConfigException:
        return False
    return True


async def configuration(
    conn_id: str, cluster_context: str | None, extras: Extras, *, renew: bool = False
) -> Configuration:
    """The client configuration of a connection, built in a thread: nothing that it reads or runs blocks this loop.

    :param cluster_context: context of the kubeconfig; None is the connection's, or the current one.
    :raises AccessError: no configuration can be built within 30 s, or the connection has no address of a cluster.
    """
    context = cluster_context or extras.get("cluster_context")
    try:
        return await _in_thread_with_loop(lambda: _build(conn_id, context, extras, renew))
    except AccessError:
        raise
    except TimeoutError as error:
        raise AccessError(
            f"The connection {conn_id!r} can't be used: its exec plugin did not end within {BUILD_TIMEOUT:.0f} s and "
            "was killed. Run the command in `users` of its kubeconfig by hand"
        ) from error
    except Exception as error:  # the libraries that read kubeconfigs and run plugins raise errors of any type
        where = extras.get("kube_config_path") or ", ".join((*SOURCES[::-1], "KUBECONFIG"))
        raise AccessError(
            f"The connection {conn_id!r} can't be used. Check its kubeconfig ({where}) and cluster_context "
            f"({context or 'not set'}).\n{error}"
        ) from error


async def _build(conn_id: str, context: str | None, extras: Extras, renew: bool) -> Configuration:
    """As KubernetesHook does: AsyncKubernetesHook ignores disable_verify_ssl, and the pod that it runs in."""
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.config import load_incluster_config

    sources = [name for name in SOURCES if name in extras]
    if len(sources) > 1:
        raise ValueError(f"Invalid connection configuration: {' and '.join(sources)} are mutually exclusive")
    built = Configuration()
    if "in_cluster" in extras or (not sources and _in_cluster()):
        load_incluster_config(client_configuration=built)
    elif not sources and not any(path.exists() for path in kubeconfigs(extras)):
        raise AccessError(
            f"No cluster is configured: the connection {conn_id!r} is missing or empty, there is no kubeconfig "
            f"({os.pathsep.join(map(str, kubeconfigs(extras)))}), and this process does not run in a pod.\n"
            f"Add the connection: airflow connections add {conn_id} --conn-type kubernetes "
            """--conn-extra '{"kube_config_path": "/path/to/kubeconfig"}'"""
        )
    else:
        await _load(built, extras, context, renew)
    if str(extras.get("disable_verify_ssl", "")).strip().lower() == "true":
        built.verify_ssl = False
    return built


async def _load(built: Configuration, extras: Extras, context: str | None, renew: bool) -> None:
    """Fill a client configuration from the connection's kubeconfig. The output of an exec plugin replaces its user."""
    from kubernetes_asyncio.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

    if inline := extras.get("kube_config"):
        content = _parsed(inline) if isinstance(inline, str) else copy.deepcopy(inline)
        config = ConfigNode("kube_config", content)
    else:
        config = KubeConfigMerger(os.pathsep.join(map(str, kubeconfigs(extras)))).config
    options = {"active_context": context, "config_base_path": None}
    loader = KubeConfigLoader(config, **options)
    name = loader.current_context["context"].get("user")
    entry = config["users"].get_with_name(name, safe=True) if name and config.safe_get("users") else None
    if entry is not None and "exec" in (entry.value.get("user") or {}):
        entry.value["user"] = _user(await _credential(entry["user"]["exec"], renew), entry.value["user"])
        loader = KubeConfigLoader(config, **options)
    await loader.load_and_set(built)


def _parsed(inline: str) -> Any:
    """The kubeconfig in a connection. It contains secrets, so an error has only its place, and not the text there.

    :raises ValueError: it isn't valid YAML.
    """
    import yaml

    try:
        return yaml.safe_load(inline)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"kube_config is not valid YAML: {type(e).__name__}{place}") from None
    except Exception as e:  # a value of a tag, such as `!!int`, raises errors of any type, which quote it
        raise ValueError(f"kube_config is not valid YAML: {type(e).__name__}") from None


async def _credential(section: Any, renew: bool) -> Credential:
    """The credential of an exec plugin, which runs if none is known that is still valid.

    As in kubectl, a credential without an expiry is valid until the API server refuses it. It stays in memory.

    :param section: `exec` of a user in a kubeconfig, as a ConfigNode.
    """
    from kubernetes_asyncio.config.exec_provider import ExecProvider

    key = json.dumps(section.value, sort_keys=True, default=str)
    known = None if renew else _credentials.get(key)
    if known is not None and _lasts(known):
        return known
    _credentials.pop(key, None)
    made: Credential = await ExecProvider(section).run() or {}
    if not made.get("token") and not {"clientCertificateData", "clientKeyData"} <= made.keys():
        raise ValueError("exec: the plugin returned neither a token nor a certificate with its key")
    _credentials[key] = made
    return made


def _lasts(credential: Credential) -> bool:
    expiry = credential.get("expirationTimestamp")
    return not expiry or (epoch_seconds(expiry) or 0.0) > timing.epoch() + EXPIRY_MARGIN_SECONDS


def _user(credential: Credential, user: Mapping[str, Any]) -> dict[str, Any]:
    """A user of a kubeconfig with what its exec plugin has returned."""
    found = {name: value for name, value in user.items() if name.startswith("client-")}
    if token := credential.get("token"):
        found["token"] = token
    for name, key in (("client-certificate-data", "clientCertificateData"), ("client-key-data", "clientKeyData")):
        if data := credential.get(key):
            found[name] = base64.b64encode(data.encode()).decode()
    return found


class _PluginLoop(asyncio.SelectorEventLoop):
    """An event loop that can kill the subprocesses it has started: the exec plugins of kubeconfigs."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[asyncio.Task[tuple[asyncio.SubprocessTransport, Any]]] = []

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        """Start a subprocess in its own process group, without this process's stdin: a worker gets responses there.

        A start goes on when its caller is canceled. asyncio would kill the subprocess alone, without its children,
        and wait forever for pipes that were not connected yet (https://github.com/python/cpython/issues/133536).
        """
        kwargs |= {"stdin": asyncio.subprocess.DEVNULL, "start_new_session": True}
        start = self.create_task(super().subprocess_exec(*args, **kwargs))
        self._starts.append(start)
        return await asyncio.shield(start)

    async def kill_plugins(self) -> None:
        """Kill the subprocesses that still run, with all their children."""
        started = await asyncio.gather(*self._starts, return_exceptions=True)
        plugins = [start[0] for start in started if not isinstance(start, BaseException)]
        for plugin in plugins:
            if plugin.get_returncode() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(plugin.get_pid(), signal.SIGKILL)
        for plugin in plugins:
            while plugin.get_returncode() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            plugin.close()


async def _in_thread_with_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in its own event loop and thread, and kill the subprocesses that it has started."""

    async def bounded(loop: _PluginLoop) -> T:
        try:
            async with asyncio.timeout(BUILD_TIMEOUT):
                return await work()
        finally:
            await loop.kill_plugins()

    def run() -> T:
        loop = _PluginLoop()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(bounded(loop))

    return await in_thread(run)
