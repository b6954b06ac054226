"""From an Airflow connection to the engine's API client: one per event loop and connection."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.engine.api.threads import in_thread
from airflow_provider_ktrain.hooks import kubeconfig

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from kubernetes_asyncio.client import ApiClient

    from airflow_provider_ktrain.engine.api.client import Api

_Key = tuple[str, str | None, str]
_reading: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[Mapping[str, Any]]]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, tuple[Api, int]]] = WeakKeyDictionary()


class TrainingHook:
    """The client of one `kubernetes` connection.

    :param conn_id: id of a connection of type `kubernetes`; where `kubernetes_default` does not exist, the service
        account of the pod is used, or outside of a cluster the default kubeconfig (KUBECONFIG, ~/.kube/config), as
        Airflow's own hook does. Default: kubernetes_default.
    :param cluster_context: context of the kubeconfig; None is its current one, or the connection's.
    """

    def __init__(self, conn_id: str = "kubernetes_default", cluster_context: str | None = None) -> None:
        self.conn_id = conn_id
        self.cluster_context = cluster_context
        self._extras: dict[str, Any] | None = None
        self._files: list[Path] = []  # that the last client was built from
        self._digest = ""  # of their content

    def load(self) -> None:
        """Read the connection synchronously: in a worker, before an event loop runs.

        Later code, in particular the handling of a kill in a signal handler, then needs no request to Airflow.

        :raises AccessError: there is no such connection.
        """
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
        from airflow.sdk.exceptions import AirflowNotFoundException

        try:
            self._extras = dict(KubernetesHook.get_connection(self.conn_id).extra_dejson)
        except AirflowNotFoundException as e:
            raise self._missing() from e

    def _missing(self) -> AccessError:
        """The error for a connection that Airflow doesn't have."""
        return AccessError(
            f"There is no connection {self.conn_id!r}. Add it: airflow connections add {self.conn_id} --conn-type "
            """kubernetes --conn-extra '{"kube_config_path": "/path/to/kubeconfig"}'"""
        )

    @property
    def namespace(self) -> str | None:
        """The connection's namespace, once `load` has read it."""
        return kubeconfig.effective(self._extras or {}).get("namespace")

    async def make_client(self, *, renew: bool = False) -> ApiClient:
        """A new client with credentials as they are now.

        :raises AccessError: no client can be built from the connection, or not in time.
        """
        from airflow_provider_ktrain.engine.api.auth_client import AuthClient

        extras = kubeconfig.effective(await self._read())
        files = await in_thread(lambda: kubeconfig.files(extras))
        self._files, self._digest = files, await in_thread(lambda: kubeconfig.digest(files))
        return AuthClient(await kubeconfig.configuration(self.conn_id, self.cluster_context, extras, renew=renew))

    def _new_api(self) -> Api:
        """An API whose first client may reuse an exec plugin's credential. A rebuilt one doesn't: it may be refused."""
        from airflow_provider_ktrain.engine.api.client import Api

        built = itertools.count()
        return Api(lambda: self.make_client(renew=next(built) > 0), self.changed)

    async def changed(self) -> bool:
        """Whether the files that the last client was built from have changed since."""
        return await in_thread(lambda: kubeconfig.digest(self._files)) != self._digest

    async def _read(self) -> Mapping[str, Any]:
        """The connection's extras: what `load` has read, else as they are now.

        Callers during one request share its result. In a triggerer, each request occupies Airflow's supervisor, and
        hundreds of triggers start at the same time.

        :raises AccessError: there is no such connection.
        """
        if self._extras is not None:
            return self._extras
        readings = _reading.setdefault(asyncio.get_running_loop(), {})
        if self.conn_id not in readings:
            reading = asyncio.get_running_loop().create_task(self._request(), context=Context())

            def end(done: asyncio.Task[Mapping[str, Any]]) -> None:
                del readings[self.conn_id]
                if not done.cancelled():
                    done.exception()  # those who wait for it raise it

            reading.add_done_callback(end)
            readings[self.conn_id] = reading
        return await asyncio.shield(readings[self.conn_id])

    async def _request(self) -> Mapping[str, Any]:
        from airflow.sdk.exceptions import AirflowNotFoundException

        airflow_hook = await in_thread(_import_airflow_hook)
        try:  # by keyword: the first parameter of AsyncKubernetesHook is another one than KubernetesHook's
            extras: Mapping[str, Any] = await airflow_hook(conn_id=self.conn_id).get_conn_extras()
        except AirflowNotFoundException as e:
            raise self._missing() from e
        return extras

    @contextlib.asynccontextmanager
    async def api(self) -> AsyncIterator[Api]:
        """The API of this connection, as it is now, in the running event loop; the last user there closes it."""
        key = (self.conn_id, self.cluster_context, await _content(await self._read()))
        apis = _shared.setdefault(asyncio.get_running_loop(), {})
        api, users = apis.get(key) or (self._new_api(), 0)
        apis[key] = (api, users + 1)
        try:
            await api.cluster()  # its client is built now, by what was read
            yield api
        finally:
            api, users = apis[key]
            if users > 1:
                apis[key] = (api, users - 1)
            else:
                del apis[key]
                await api.close()


def _import_airflow_hook() -> type[AsyncKubernetesHook]:
    """Import Airflow's hook. This takes more than a second of CPU time, so a triggerer does it in a thread."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook

    hook: type[AsyncKubernetesHook] = AsyncKubernetesHook
    return hook


async def _content(extras: Mapping[str, Any]) -> str:
    """A hash of the connection and of its kubeconfig, because a change of either may lead to another cluster."""
    paths = kubeconfig.kubeconfigs(kubeconfig.effective(extras))
    content = json.dumps(extras, sort_keys=True, default=str) + await in_thread(lambda: kubeconfig.digest(paths))
    return hashlib.sha256(content.encode()).hexdigest()
