"""The pytest plugin: cheap to load, and the complete example of its how-to runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "test-your-dags.md"
FILES = ("dags/train.py", "image/train.py", "conftest.py", "test_train.py")
MODULE = "airflow_provider_ktrain.pytest_plugin"
TESTS_WITH_THE_FIXTURE = """
import json
import os

import pytest
from kubernetes import client, config

namespaces = []


@pytest.fixture(scope="session", autouse=True)
def checked_at_the_end():
    yield
    assert len(set(namespaces)) == 2
    assert "AIRFLOW_CONN_KUBERNETES_DEFAULT" not in os.environ


@pytest.fixture(scope="session")
def ktrain_cluster_options():
    return {"gpus_per_node": 3}


@pytest.mark.parametrize("number", [1, 2])
def test_cluster(ktrain_cluster, number):
    assert os.environ["AIRFLOW_CONN_KUBERNETES_DEFAULT"] == ktrain_cluster.connection
    extra = json.loads(ktrain_cluster.connection)["extra"]
    assert extra == {"kube_config_path": str(ktrain_cluster.kubeconfig), "namespace": ktrain_cluster.namespace}
    api = client.CoreV1Api(config.new_client_from_config(str(ktrain_cluster.kubeconfig)))
    ktrain_cluster.create_namespace("shared")
    ktrain_cluster.create_namespace("shared")
    names = {n.metadata.name for n in api.list_namespace().items if n.metadata.deletion_timestamp is None}
    assert {ktrain_cluster.namespace, "shared"} <= names
    assert not names & set(namespaces)
    assert {node.status.allocatable["nvidia.com/gpu"] for node in api.list_node().items} == {"3"}
    namespaces.append(ktrain_cluster.namespace)
"""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTEST"))}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "embedded_cluster" / "src")))
    # on a loaded machine, a DAG may need longer than 30 s to be imported
    return {**kept, "PYTHONPATH": paths, "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "300"}


def test_the_entry_point_names_the_module() -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entry_points["pytest11"] == {"ktrain": MODULE}


def test_loading_the_plugin_imports_neither_airflow_nor_the_cluster() -> None:
    program = (
        f"import sys, {MODULE}\nprint([n for n in sys.modules if n.partition('.')[0] == 'airflow' or 'ktrain.' in n])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == str([MODULE]), done.stderr


def run_pytest(folder: Path) -> str:
    """Run the tests of a folder with the plugin. Returns the output; all must pass."""
    # the plugin by its module, whether or not the installed package has the entry point already
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:ktrain", "-p", MODULE, "-p", "no:cacheprovider"]
    own = folder / "tmp"  # clients of Kubernetes leave files there
    own.mkdir()
    env = environment() | {"TMPDIR": str(own)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.embedded("starts a cluster by the pytest plugin")
def test_each_test_has_a_namespace_and_a_connection_to_it(tmp_path: Path) -> None:
    (tmp_path / "test_cluster.py").write_text(TESTS_WITH_THE_FIXTURE)
    assert "2 passed" in run_pytest(tmp_path)


@pytest.mark.thorough
@pytest.mark.e2e
@pytest.mark.embedded("starts a cluster by the pytest plugin")
def test_the_example_of_the_how_to_passes(tmp_path: Path) -> None:
    texts = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in zip(FILES, texts, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert "1 passed" in run_pytest(tmp_path)
