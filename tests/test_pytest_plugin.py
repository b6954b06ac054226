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


@pytest.mark.e2e
@pytest.mark.embedded("starts a cluster by the pytest plugin")
def test_the_example_of_the_how_to_passes(tmp_path: Path) -> None:
    texts = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in zip(FILES, texts, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # the plugin by its module, whether or not the installed package has the entry point already
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:ktrain", "-p", MODULE, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
