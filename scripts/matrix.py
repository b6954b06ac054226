"""Run the tests with other versions of Airflow: `matrix.py [--quick] [NAME ...]`.

NAME is a file in tests/matrix without its suffix, such as 3.2.2; default: all of them, oldest first. Each gets a virtual
environment of its own in .venv-matrix, and all print one table at the end. `--quick` leaves out chaos and the package
index. Standard library only.
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
#: part -> arguments of pytest
UNIT = ("tests/core", "tests/operators", "-n", WORKERS, "--dist", "loadgroup")
QUICK = {"core, operators, triggers": UNIT, "kills": ("tests/e2e/test_kills.py",)}
FULL = {**QUICK, "chaos": ("tests/e2e", "-m", "chaos"), "package index": ("tests/matrix", "-m", "index")}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: what one part of the tests gave in one environment."""

    environment: str
    part: str
    tests: int
    failed: int
    skipped: int
    seconds: float

    def __str__(self):
        found = f"{self.tests - self.failed - self.skipped} passed"
        found += f", {self.failed} failed" if self.failed else ""
        found += f", {self.skipped} skipped" if self.skipped else ""
        return f"| {self.environment} | {self.part} | {found} | {self.seconds:.0f} |"


def say(text):
    print(f"[matrix] {text}", flush=True)


def environment(name):
    """The Python of the environment `name`, made where it is missing or its pins have changed."""
    pins, venv = PINS / f"{name}.txt", VENVS / name
    python, stamp = venv / "bin" / "python", venv / ".made-of"
    made_of = hashlib.sha256(pins.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    say(f"{name}: making {venv.relative_to(ROOT)}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    subprocess.run([*pip, "-r", pins, "-e", ".[pytest]"], cwd=ROOT, check=True)
    stamp.write_text(made_of)
    return python


def run(name, part, python, arguments):
    """Run one part of the tests; None where pytest gave no report."""
    report = VENVS / f"{name}.xml"
    report.unlink(missing_ok=True)
    say(f"{name}: {part}")
    began = time.monotonic()
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "KTRAIN_MATRIX": name}
    command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
    subprocess.run(command, cwd=ROOT, env=env)
    seconds = time.monotonic() - began
    if not report.exists():
        return Row(name, part, 1, 1, 0, seconds)
    suite = ET.parse(report).getroot().find("testsuite").attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    return Row(name, part, int(suite["tests"]), failed, int(suite["skipped"]), seconds)


def versions(name, python):
    """The versions that an environment has, for the table's legend."""
    names = ("apache-airflow", "apache-airflow-providers-cncf-kubernetes", "kubernetes", "kubernetes_asyncio")
    program = (
        "import sys, importlib.metadata as m;"
        f"print('Python ' + sys.version.split()[0], *(f', {{n}} {{m.version(n)}}' for n in {names}), sep='')"
    )
    return f"{name}: {subprocess.check_output([python, '-c', program], text=True).strip()}"


def main():
    known = sorted(p.stem for p in PINS.glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"environments: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="leave out chaos and the package index")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(known):
        parser.error(f"unknown environment {', '.join(unknown)}; there are: {', '.join(known)}")
    rows, legend = [], []
    for name in asked.names or known:
        python = environment(name)
        legend.append(versions(name, python))
        rows += [run(name, part, python, how) for part, how in (QUICK if asked.quick else FULL).items()]
    print("\n".join(legend))
    print("\n| environment | part | tests | seconds |\n|---|---|---|---|")
    print("\n".join(map(str, rows)), flush=True)
    sys.exit(any(row.failed or not row.tests for row in rows))


if __name__ == "__main__":
    main()
