"""From an Airflow connection to the engine's API client: one per event loop and connection, rebuilt on 401."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

    from airflow_provider_ktrain.engine.api import Api

_shared: dict[tuple[Hashable, ...], tuple[Api, int]] = {}


class TrainingHook:
    """The clients of one `kubernetes` connection.

    :param conn_id: id of a connection of type `kubernetes`; where `kubernetes_default` does not exist, the default
        kubeconfig (KUBECONFIG, ~/.kube/config) is used, as Airflow's own hook does.
    :param cluster_context: context of the kubeconfig; None is its current one, or the connection's.
    """

    def __init__(self, conn_id: str = "kubernetes_default", cluster_context: str | None = None) -> None:
        self.conn_id = conn_id
        self.cluster_context = cluster_context
        self._extras: dict[str, Any] | None = None

    def load(self) -> None:
        """Read the connection now, synchronously: in a worker, before an event loop runs, so that none of its calls
        (a kill among them) has to ask Airflow for it."""
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

        self._extras = dict(KubernetesHook.get_connection(self.conn_id).extra_dejson)

    async def make_client(self) -> ApiClient:
        """A new client with credentials as they are now."""
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook

        hook = AsyncKubernetesHook(
            conn_id=self.conn_id, cluster_context=self.cluster_context, connection_extras=self._extras
        )
        stack = contextlib.AsyncExitStack()
        client: ApiClient = await stack.enter_async_context(hook.get_conn())
        return client

    @contextlib.asynccontextmanager
    async def api(self) -> AsyncIterator[Api]:
        """The API client of this connection in the running event loop, shared by all who use it there."""
        from airflow_provider_ktrain.engine.api import Api

        identity = (self.conn_id, self.cluster_context)
        key = (id(asyncio.get_running_loop()), *identity)
        api, users = _shared.get(key) or (Api(self.make_client, identity), 0)
        _shared[key] = (api, users + 1)
        try:
            yield api
        finally:
            api, users = _shared[key]
            if users > 1:
                _shared[key] = (api, users - 1)
            else:
                del _shared[key]
                await api.close()
