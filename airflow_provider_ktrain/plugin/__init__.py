"""The training page in Airflow's UI. Airflow loads the plugin by the entry point `airflow.plugins`.

Airflow imports it in every process, so the application imports nothing until its first request. Whether a triggerer
follows a deferred task, or is gone, is `followed` of `compat_server.TaskRecord`.

`views` makes the page of one training, `trainings` and `training_table` the list. They show XComs of `status_writer.py`
and `operators/summaries.py`, which `compat_server.py` reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_provider_ktrain import compat, compat_server
from airflow_provider_ktrain.links.training import PAGE_PATH, PREFIX, TASK_QUERY

OPERATORS = (
    "PyTorchJobOperator", "MPIJobOperator", "TrainJobOperator", "@task.pytorchjob", "@task.mpijob", "@task.trainjob",
)  # fmt: skip
Message = MutableMapping[str, Any]


class LazyApplication:
    """An ASGI application that builds the real one at its first request."""

    def __init__(self) -> None:
        self._application: Any = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer one request."""
        if self._application is None:
            from airflow_provider_ktrain.plugin.application import build

            self._application = build()
        await self._application(scope, receive, send)


def registered_views(base: str, *, scoped: bool, everywhere: bool) -> list[dict[str, Any]]:
    """The table of trainings, and the training page as a tab of a task.

    :param scoped: whether Airflow can limit a tab to the tasks of some operators.
    :param everywhere: whether all tasks have the tab otherwise.
    """
    found: list[dict[str, Any]] = [
        {
            "name": "Trainings",
            "href": f"{base}{PREFIX}/trainings",
            "destination": "nav",
            "category": "browse",
            "url_route": "ktrain-trainings",
        }
    ]
    tab = {
        "name": "Training",
        "href": f"{base}{PAGE_PATH}?{TASK_QUERY}",
        "destination": "task_instance",
        "url_route": "ktrain-training",
    }
    if scoped:
        found.append({**tab, "applies_to": {"operator_name": list(OPERATORS)}})
    elif everywhere:
        found.append(tab)
    return found


class KtrainPlugin(AirflowPlugin):
    """Registers the training page and the table of trainings."""

    name = "ktrain"
    fastapi_apps: list[Any] = [{"app": LazyApplication(), "name": "ktrain", "url_prefix": PREFIX}]  # noqa: RUF012 - as Airflow declares it
    external_views: list[Any] = registered_views(
        compat.base_path(), scoped=compat_server.scopes_tabs(), everywhere=compat_server.shows_tab_everywhere()
    )
