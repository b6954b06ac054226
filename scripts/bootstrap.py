"""Create a virtual environment and install this project with one extra into it: `bootstrap.py VENV EXTRA`.

It also installs the embedded cluster, a distribution of its own in this repository. It uses the standard library only.
If something is missing on the machine, it prints what to do.
"""

import importlib.util
import pathlib
import subprocess
import sys
import time
from typing import NoReturn

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def fail(problem: str, remedy: str) -> NoReturn:
    sys.exit(f"[setup] {problem}\n[setup] What to do: {remedy}")


def check_python() -> None:
    if sys.version_info < (3, 11):
        fail(
            f"found Python {sys.version.split()[0]}, expected 3.11 or newer",
            "install a newer Python and run: make PYTHON=python3.11 demo",
        )
    if sys.platform == "win32":
        fail("Windows is not supported", "use the Windows Subsystem for Linux")


def make_venv(venv: pathlib.Path) -> None:
    if (venv / "bin" / "python").exists():
        return
    say(f"creating a virtual environment in {venv} (Python {sys.version.split()[0]})")
    if importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(
            "this Python has no ensurepip, which `python3 -m venv` needs",
            f"on Debian or Ubuntu: sudo apt-get install python{version}-venv. Without root: use another Python, "
            "e.g. make PYTHON=$HOME/.pyenv/versions/3.11.7/bin/python3 demo",
        )
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode:
        fail(
            f"the virtual environment could not be created: {(made.stderr or made.stdout).strip()}",
            f"check that {venv.parent} is writable and has 2 GB of free space",
        )


def pip(venv: pathlib.Path, *args: str, quiet: bool = False) -> int:
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *args]
    out = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, cwd=ROOT, stdout=out, stderr=out).returncode


def install_torch(venv: pathlib.Path) -> None:
    """Install the CPU build from the index that pip is configured for, otherwise from PyTorch's index of CPU builds."""
    requirement = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
    say(f"installing {requirement} (about 200 MB; only the demo and the tests need it)")
    if pip(venv, "install", "-q", requirement, quiet=True) == 0:
        return
    if pip(venv, "install", "-q", requirement, "--extra-index-url", TORCH_CPU_INDEX):
        fail(
            f"{requirement} could not be installed",
            f"check that {TORCH_CPU_INDEX} can be reached, or install that wheel into {venv} and run make again",
        )


def main() -> None:
    venv, extra = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2]
    check_python()
    begun = time.monotonic()
    make_venv(venv)
    if extra in ("demo", "test"):
        install_torch(venv)
    say(f"installing Airflow, this provider with its extra [{extra}], and the embedded cluster (a minute or two)")
    requirements = ["-e", "./embedded_cluster", "-e", f".[{extra}]"]
    if pip(venv, "install", "-q", "-c", "constraints.txt", *requirements):
        fail(
            "pip could not install the project (its message is above)",
            "check that this machine can reach its package index",
        )
    (venv / f".{extra}").touch()
    say(f"ready after {time.monotonic() - begun:.0f} s; the next run skips this")


if __name__ == "__main__":
    main()
