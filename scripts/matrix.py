"""Run the tests with other versions of Airflow: `matrix.py [--quick | --browser] [NAME ...]`.

NAME is a file in tests/matrix without its suffix, such as 3.2.2; default: all, oldest first. Each gets a virtual
environment of its own in .venv-matrix, and all print one table at the end. The newest also runs what needs to run once:
PostgreSQL with two triggerers, and the questions to the package index. Standard library only.
"""

import argparse
import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
PINS = ROOT / "tests" / "matrix"
VENVS = ROOT / ".venv-matrix"
WORKERS = str(min(3, os.cpu_count() or 1))
POSTGRESQL = {"KTRAIN_TEST_DATABASE": "postgresql"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the tests.

    :param name: as the table has it.
    :param command: arguments of Python, without those for a report.
    :param env: additional environment variables.
    :param quick: whether `--quick` runs it.
    :param newest: whether only the newest environment runs it.
    """

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    quick: bool = False
    newest: bool = False


def pytest(*arguments: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-rs", *arguments)


SHORT = ("-m", "not thorough and not index", "-n", WORKERS, "--dist", "loadgroup")
PARTS = (
    Part("operators, triggers, imports", pytest("tests/operators", "tests/test_import.py", *SHORT), quick=True),
    Part("features", pytest("tests/e2e/test_features.py"), quick=True),
    Part("core, kills", pytest("tests/core", "tests/e2e/test_kills.py", "-n", WORKERS, "--dist", "loadgroup")),
    Part("chaos", pytest("tests/e2e", "-m", "chaos")),
    Part("kills on PostgreSQL", pytest("tests/e2e/test_kills.py"), env=POSTGRESQL, newest=True),
    Part("chaos on PostgreSQL", pytest("tests/e2e", "-m", "chaos"), env=POSTGRESQL, newest=True),
    Part("soak on PostgreSQL", ("-m", "tests.e2e.soak", "--trainings", "100"), env=POSTGRESQL, newest=True),
    Part("package index", pytest("tests/matrix", "-m", "index"), newest=True),
)
BROWSER = Part("browser", pytest("tests/browser", "-m", "browser"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: the result of one part of the tests in one environment."""

    environment: str
    part: str
    result: str
    passed: bool
    seconds: float

    def __str__(self) -> str:
        return f"| {self.environment} | {self.part} | {self.result} | {self.seconds:.0f} |"


def say(text: str) -> None:
    print(f"[matrix] {text}", flush=True)


def environment(name: str) -> pathlib.Path:
    """The Python of the environment `name`, made where it is missing or its pins have changed."""
    pins, venv = PINS / f"{name}.txt", VENVS / name
    python, stamp = venv / "bin" / "python", venv / ".made-of"
    projects = [ROOT / "pyproject.toml", ROOT / "embedded_cluster" / "pyproject.toml"]
    made_of = hashlib.sha256(b"".join(file.read_bytes() for file in (pins, *projects))).hexdigest()
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    say(f"{name}: making {venv.relative_to(ROOT)}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    subprocess.run([*pip, "-r", str(pins), "-e", "./embedded_cluster", "-e", ".[browser]"], cwd=ROOT, check=True)
    stamp.write_text(made_of)
    return python


def run(name: str, part: Part, python: pathlib.Path) -> Row:
    """Run one part of the tests in one environment."""
    report = VENVS / f"{name}.xml"
    report.unlink(missing_ok=True)
    say(f"{name}: {part.name}")
    env = {**os.environ, **part.env, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    reported = (f"--junitxml={report}",) if "pytest" in part.command else ()
    began = time.monotonic()
    status = subprocess.run([python, *part.command, *reported], cwd=ROOT, env=env).returncode
    result = counted(report) if report.exists() else "failed" if status else "passed"
    return Row(name, part.name, result, status == 0, time.monotonic() - began)


def counted(report: pathlib.Path) -> str:
    """The numbers of a JUnit report."""
    (suite,) = (element.attrib for element in ET.parse(report).getroot().findall("testsuite"))
    bad = int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    numbers = {"passed": int(suite["tests"]) - bad - skipped, "failed": bad, "skipped": skipped}
    return ", ".join(f"{number} {what}" for what, number in numbers.items() if number or what == "passed")


def versions(name: str, python: pathlib.Path) -> str:
    """The versions that an environment has, for the table's legend."""
    names = ("apache-airflow", "apache-airflow-providers-cncf-kubernetes", "kubernetes", "kubernetes_asyncio")
    program = (
        "import sys, importlib.metadata as m;"
        f"print('Python ' + sys.version.split()[0], *(f', {{n}} {{m.version(n)}}' for n in {names}), sep='')"
    )
    return f"{name}: {subprocess.check_output([python, '-c', program], text=True).strip()}"


def main() -> None:
    known = sorted(p.stem for p in PINS.glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"environments: {', '.join(known)}")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", action="store_true", help="run operators, triggers, imports and the features only")
    only.add_argument("--browser", action="store_true", help="run the browser tests only, which the others leave out")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(known):
        parser.error(f"unknown environment {', '.join(unknown)}; there are: {', '.join(known)}")
    rows, legend = [], []
    for name in asked.names or known:
        python = environment(name)
        legend.append(versions(name, python))
        for part in (BROWSER,) if asked.browser else PARTS:
            if (part.quick or not asked.quick) and (name == known[-1] or not part.newest):
                rows.append(run(name, part, python))
    print("\n".join(legend))
    print("\n| environment | part | tests | seconds |\n|---|---|---|---|")
    print("\n".join(map(str, rows)), flush=True)
    sys.exit(not all(row.passed for row in rows))


if __name__ == "__main__":
    main()
