"""The import paths for users."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import airflow_provider_ktrain
import ktrain_embedded
from airflow_provider_ktrain import manifests, volumes

LISTED = re.findall(
    r"^- `(airflow_provider_ktrain\.[\w.]+)`: (.*)$", airflow_provider_ktrain.__doc__ or "", re.MULTILINE
)


@pytest.mark.parametrize(("module", "names"), LISTED, ids=[module for module, _ in LISTED])
def test_listed_modules_have_the_listed_names(module: str, names: str) -> None:
    imported = importlib.import_module(module)
    for name in re.findall(r"`(\w+)`", names):
        assert hasattr(imported, name), f"{module} has no {name}"


def test_package_without_its_modules_imports_nothing() -> None:
    code = "import sys; before = set(sys.modules); import airflow_provider_ktrain; print(set(sys.modules) - before)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "{'airflow_provider_ktrain'}"


@pytest.mark.parametrize(
    "module",
    ["airflow_provider_ktrain.volumes", "airflow_provider_ktrain.manifests", "airflow_provider_ktrain.core.checks"],
)
def test_public_helpers_import_no_airflow(module: str) -> None:
    code = f"import sys, {module}; print('airflow' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize("module", [volumes, manifests])
def test_everything_in_all_exists(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_both_distributions_of_a_release_have_the_same_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert airflow_provider_ktrain.__version__ == ktrain_embedded.__version__ == project["version"]
