"""What Airflow loads in every process, and what it shows in its UI."""

from __future__ import annotations

import subprocess
import sys

from airflow_provider_ktrain.decorators import mpijob, pytorchjob, trainjob
from airflow_provider_ktrain.operators import training
from airflow_provider_ktrain.plugin import OPERATORS, KtrainPlugin, registered_views

NEW_MODULES = """
import sys
from airflow import plugins_manager
from airflow.sdk import BaseOperatorLink

known = set(sys.modules)
import airflow_provider_ktrain.plugin
print(*sorted(sys.modules.keys() - known))
"""
HEAVY = ("fastapi", "jinja2", "kubernetes", "aiohttp", "sqlalchemy", "airflow.models", "airflow_provider_ktrain.engine")


def test_plugin_loads_nothing_for_pages_until_the_first_request() -> None:
    """Airflow imports it in schedulers, workers and triggerers, too."""
    done = subprocess.run([sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "airflow_provider_ktrain.plugin" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
    assert "airflow_provider_ktrain.plugin.application" not in loaded


def test_list_is_in_the_navigation_below_the_path_of_the_server() -> None:
    (entry,) = registered_views("/airflow", scoped=False, everywhere=False)
    assert (entry["href"], entry["destination"], entry["category"]) == ("/airflow/ktrain/trainings", "nav", "browse")
    assert KtrainPlugin.fastapi_apps[0]["url_prefix"] == "/ktrain"


def test_tab_is_limited_to_our_operators_where_airflow_can_do_so() -> None:
    _, tab = registered_views("/airflow", scoped=True, everywhere=True)
    assert tab["destination"] == "task_instance"
    assert tab["href"].startswith("/airflow/ktrain/training?dag_id={DAG_ID}&run_id={RUN_ID}&task_id={TASK_ID}")
    assert tab["applies_to"] == {"operator_name": list(OPERATORS)}


def test_tab_of_older_airflow_is_shown_only_if_it_is_configured() -> None:
    _, tab = registered_views("", scoped=False, everywhere=True)
    assert "applies_to" not in tab
    assert len({view["url_route"] for view in registered_views("", scoped=False, everywhere=True)}) == 2


def test_tab_is_shown_on_the_tasks_of_all_operators_and_decorators() -> None:
    operators = (training.PyTorchJobOperator, training.MPIJobOperator, training.TrainJobOperator)
    decorated = (
        pytorchjob._PyTorchJobDecoratedOperator, mpijob._MPIJobDecoratedOperator, trainjob._TrainJobDecoratedOperator,
    )  # fmt: skip
    names = {operator.__name__ for operator in operators} | {operator.custom_operator_name for operator in decorated}
    assert set(OPERATORS) == names
