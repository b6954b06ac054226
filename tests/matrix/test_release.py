"""What a release must meet, asked of pip and the package index: `make test-matrix` runs this, `make test` doesn't."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

pytestmark = [pytest.mark.index, pytest.mark.timeout(1800)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENTS = sorted(pathlib.Path(__file__).parent.glob("*.txt"))


def pip(python: pathlib.Path, *arguments: str | pathlib.Path) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"pip {' '.join(map(str, arguments))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def resolved(tools: pathlib.Path, *requirements: str | pathlib.Path) -> dict[str, str]:
    """The versions that pip would install into an empty environment, by normalized name."""
    report = json.loads(pip(tools, "install", "-qq", "--dry-run", "--ignore-installed", "--report", "-", *requirements))
    found: list[dict[str, Any]] = [entry["metadata"] for entry in report["install"]]
    return {normalized(package["name"]): package["version"] for package in found}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: pathlib.Path) -> dict[str, str]:
    lines = (line.partition("#")[0].strip().partition("==") for line in file.read_text().splitlines())
    return {normalized(name): version for name, equal, version in lines if equal}


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Python with the newest pip, build and twine."""
    venv = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    pip(python, "install", "-qq", "--upgrade", "pip", "build", "twine")
    return python


@pytest.fixture(scope="session")
def dist(tools: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the sdists and the wheels that a release uploads: of the embedded cluster and the provider."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT / "embedded_cluster", ROOT):
        subprocess.run([tools, "-m", "build", "--outdir", folder, project], check=True, capture_output=True)
    subprocess.run([tools, "-m", "twine", "check", "--strict", *folder.iterdir()], check=True)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: pathlib.Path) -> pathlib.Path:
    (found,) = dist.glob("airflow_provider_ktrain-*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The programs of an environment that had nothing before both wheels were installed."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip(venv / "bin" / "python", "install", "-qq", "--find-links", wheel.parent, f"{wheel}[local]")
    return venv / "bin"


def run_installed(folder: pathlib.Path, *command: str | pathlib.Path) -> str:
    """What a program prints that knows nothing of this checkout."""
    env = {"AIRFLOW_HOME": str(folder / "airflow"), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", ENVIRONMENTS, ids=lambda file: file.stem)
def test_wheel_resolves_beside_the_versions_of_an_environment(
    file: pathlib.Path, tools: pathlib.Path, wheel: pathlib.Path
) -> None:
    found = resolved(tools, "-r", file, wheel)
    assert {name: found[name] for name in pins(file)} == pins(file)
    assert found["airflow-provider-ktrain"]


@pytest.mark.parametrize("cloud", ["amazon", "google", "microsoft-azure"])
def test_constraints_resolve_beside_the_newest_provider_of_a_cloud(
    cloud: str, tools: pathlib.Path, wheel: pathlib.Path
) -> None:
    name = f"apache-airflow-providers-{cloud}"
    newest = resolved(tools, "--no-deps", name)[name]
    assert resolved(tools, "-c", ROOT / "constraints.txt", wheel, f"{name}=={newest}")[name] == newest


def test_extras_resolve(tools: pathlib.Path, wheel: pathlib.Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = resolved(tools, "--find-links", wheel.parent, f"{wheel}[{','.join(extras)}]")
    assert {"torch", "mpi4py", "ktrain-cluster", "mkdocs", "pytest"} <= found.keys()
    assert not any("+" in version for name, version in pins(ROOT / "constraints.txt").items())


def test_airflow_lists_the_provider_that_is_installed_into_an_empty_environment(
    installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    python = installed / "python"
    listed = run_installed(tmp_path, python, "-m", "airflow", "providers", "list", "--output", "json")
    (ours,) = [p for p in json.loads(listed) if p["package_name"] == "airflow-provider-ktrain"]
    assert "https://pypi.org/project/airflow-provider-ktrain/" in ours["description"]


def test_both_wheels_run_a_training_on_the_embedded_cluster(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    program = ("sh", "-c", "echo trained by $HOSTNAME")
    printed = run_installed(tmp_path, installed / "ktrain", "run", "--local", "--workers", "0", "--", *program)
    assert "[Master 0] trained by " in printed


def test_the_embedded_cluster_runs_without_the_provider(
    tools: pathlib.Path, dist: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (wheel,) = dist.glob("ktrain_cluster-*.whl")
    assert "apache-airflow" not in resolved(tools, wheel)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    pip(programs / "python", "install", "-qq", wheel)
    code = re.findall(r"^```python\n(.*?)^```$", (ROOT / "embedded_cluster/README.md").read_text(), re.M | re.S)
    assert run_installed(tmp_path, programs / "python", "-c", *code) == "['ktrain-node-0', 'ktrain-node-1']\n"
    assert run_installed(tmp_path, programs / "ktrain-cluster", "start").startswith("The cluster is running")
    assert run_installed(tmp_path, programs / "ktrain-cluster", "stop") == "The cluster is stopped.\n"
