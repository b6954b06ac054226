"""Both wheels, built as a release builds them, without the network: their files, entry points and dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
#: Names of distributions that differ from what is imported.
DISTRIBUTIONS = {"airflow": "apache-airflow", "ktrain_embedded": "ktrain-cluster", "yaml": "pyyaml"}
#: Modules that are imported only where Airflow runs, which brings them, or where what they belong to is installed.
WITH_AIRFLOW = {"attrs", "fastapi", "jinja2", "openlineage", "pytest", "sqlalchemy", "starlette", "structlog"}


class Project(NamedTuple):
    """A distribution of this repository: its folder, where its package is, and what may be imported without a pin."""

    folder: Path
    package: Path
    brought: frozenset[str] = frozenset()


class Wheel(NamedTuple):
    """A built wheel: its project, its declared metadata, its files, and its own metadata."""

    project: Project
    declared: dict[str, Any]
    files: set[str]
    metadata: Distribution


PROJECTS = (
    Project(ROOT, ROOT / "airflow_provider_ktrain", frozenset(WITH_AIRFLOW)),
    Project(ROOT / "embedded_cluster", ROOT / "embedded_cluster" / "src" / "ktrain_embedded"),
)


@pytest.fixture(scope="module", params=PROJECTS, ids=lambda project: project.package.name)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    project: Project = request.param
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=project.folder, check=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
        files = set(archive.namelist())
    (metadata,) = (folder / "unpacked").glob("*.dist-info")
    declared = tomllib.loads((project.folder / "pyproject.toml").read_text())["project"]
    return Wheel(project, declared, files, Distribution.at(metadata))


def test_wheel_has_all_files_of_its_package_and_no_others(wheel: Wheel) -> None:
    package = wheel.project.package
    expected = {
        PurePosixPath(package.name, file.relative_to(package)).as_posix()
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    metadata = {file for file in wheel.files if ".dist-info/" in file}
    assert wheel.files - metadata == expected
    assert f"{package.name}/py.typed" in expected
    assert {PurePosixPath(file).name for file in metadata} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE",
    }  # fmt: skip


def test_entry_points_are_those_of_the_project_and_can_be_loaded(wheel: Wheel) -> None:
    declared = {"console_scripts": wheel.declared["scripts"], **wheel.declared.get("entry-points", {})}
    expected = {EntryPoint(name, value, group) for group, of in declared.items() for name, value in of.items()}
    assert set(wheel.metadata.entry_points) == expected
    for entry_point in expected:
        path = entry_point.module.replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & wheel.files
        assert entry_point.load()


def test_dependencies_are_those_of_the_project(wheel: Wheel) -> None:
    required = wheel.metadata.requires or []
    assert len([one for one in required if "extra ==" not in one]) == len(wheel.declared["dependencies"])
    assert set(wheel.metadata.metadata.get_all("Provides-Extra") or ()) == set(
        wheel.declared.get("optional-dependencies", {})
    )
    assert wheel.metadata.metadata["Requires-Python"] == wheel.declared["requires-python"]
    assert wheel.metadata.name == wheel.declared["name"]


@pytest.mark.thorough
def test_what_the_package_imports_is_a_dependency(wheel: Wheel) -> None:
    nodes = [node for file in wheel.project.package.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    known = {*sys.stdlib_module_names, *wheel.project.brought, wheel.project.package.name, "sitecustomize"}
    imported = {module.partition(".")[0] for module in modules} - known
    extras = wheel.declared.get("optional-dependencies", {})
    declared = [*wheel.declared["dependencies"], *extras.get("local", ())]
    names = {re.split(r"[<>=~\[]", requirement)[0] for requirement in declared}
    assert {DISTRIBUTIONS.get(name, name) for name in imported} == names - {"apache-airflow-providers-cncf-kubernetes"}
