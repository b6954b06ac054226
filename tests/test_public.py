"""The import paths for users."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import ModuleType

import pytest

import airflow_provider_ktrain
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
