"""Importing needs only Python: no network, home directory, kubeconfig or connection."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "example_dags"
UNWRITABLE = "/proc/nowhere"  # even root can't create this directory
LOAD_ALL = """
import importlib, pkgutil, sys

def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"{event}{args} during an import")

import airflow_provider_ktrain
names = [m.name for m in pkgutil.walk_packages(airflow_provider_ktrain.__path__, "airflow_provider_ktrain.")]
sys.addaudithook(refuse)
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization

bag = DagBag(sys.argv[1], load_op_links=False)
for dag in bag.dags.values():
    DagSerialization.to_dict(dag)
print(len(names), len(bag.dags), bag.import_errors)
"""
MODULES_OF_A_DAG_FILE = """
import sys
from airflow.sdk import DAG, BaseOperator, task

known = set(sys.modules)
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

ours = ("airflow_provider_ktrain.", "openlineage", "airflow.providers.openlineage")
print(*sorted(name for name in sys.modules.keys() - known if name.startswith(ours)))
"""
#: What only a running task needs, and what checks only a manifest.
FOR_RUNNING_TASKS = (
    "airflow.providers.openlineage", "checks.job", "diagnosis", "engine", "hooks", "manifest.job_request",
    "manifest.loader", "manifest.overlay", "manifest.schema", "openlineage", "operators.openlineage", "reporting",
    "state", "text.xcom_values", "triggers", "worker_host",
)  # fmt: skip
MAX_MODULES = 39


def environment(airflow_home: pathlib.Path) -> dict[str, str]:
    """Without connections, a kubeconfig and a home directory; Airflow keeps its own files in `airflow_home`."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "LANG")}
    settings = {
        "AIRFLOW_HOME": str(airflow_home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLES),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "300",  # on a loaded machine, 30 s are not enough
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{airflow_home}/airflow.db",
    }
    return {**kept, **settings, "HOME": UNWRITABLE, "KUBECONFIG": f"{UNWRITABLE}/kubeconfig"}


def run(*command: str, home: pathlib.Path) -> str:
    done = subprocess.run([sys.executable, *command], env=environment(home), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_modules_and_dags_are_loaded_without_network_home_and_kubeconfig(tmp_path: pathlib.Path) -> None:
    """Loading a DAG file reads no connection: there is no database from which Airflow could."""
    names, dags, errors = run("-c", LOAD_ALL, str(EXAMPLES), home=tmp_path).splitlines()[-1].split(maxsplit=2)
    assert int(names) > 100
    assert int(dags) >= len(list(EXAMPLES.glob("*.py")))
    assert errors == "{}"


def test_a_dag_file_imports_nothing_that_only_a_running_task_needs(tmp_path: pathlib.Path) -> None:
    names = run("-c", MODULES_OF_A_DAG_FILE, home=tmp_path).split()
    short = [name.removeprefix("airflow_provider_ktrain.").removeprefix("core.") for name in names]
    assert "operators.training" in short
    assert [name for name in short if name.startswith(FOR_RUNNING_TASKS)] == []
    assert len(names) <= MAX_MODULES, names
