"""Make an image with the real Horovod for the embedded cluster: `horovod_image.py DIR`.

Use it by `--image horovod/horovod=DIR`.

PyPI has no wheel of Horovod. The first call builds one (2 to 5 minutes on two cores) for this Python and its torch, and
keeps it in $XDG_CACHE_HOME/ktrain-horovod (~/.cache/ktrain-horovod). DIR is examples/horovod_torch with a virtual
environment in usr/local, which finds torch where this Python does.
"""

import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from importlib import metadata
from typing import NoReturn

VERSION = "0.28.1"
SOURCE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "horovod_torch"
# CMake 4 refuses the CMakeLists.txt of gloo; setup.py imports pkg_resources, which setuptools 82 has removed
BUILD = ("setuptools<80", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi", "cmake<4")
RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")
# PyTorch's headers are C++17, and Horovod asks for C++14
CPP_14, CPP_17 = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"
OPTIONS = {
    "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1", "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1", "MAKEFLAGS": f"-j{os.cpu_count() or 1}", "LDFLAGS": "-s",
}  # fmt: skip


def fail(problem: str, remedy: str) -> NoReturn:
    sys.exit(f"[horovod] {problem}\n[horovod] What to do: {remedy}")


def run(*command: object, **environment: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, env={**os.environ, **environment}, stdin=subprocess.DEVNULL).returncode:
        fail(f"failed: {' '.join(words)}", "see the command's output above")


def torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        fail(f"{sys.executable} has no torch", "run: make test-horovod, or install torch for this Python")


def check_compiler() -> None:
    if not shutil.which(os.environ.get("CXX", "g++")):
        fail("Horovod is built from source, and there is no g++", "on Debian or Ubuntu: sudo apt-get install g++ make")
    if not shutil.which("make"):
        fail("Horovod is built from source, and there is no make", "on Debian or Ubuntu: sudo apt-get install make")
    header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        fail(f"Horovod is built from source, and {header} is missing", "install your Python's headers: python3-dev")


def environment(directory: pathlib.Path) -> pathlib.Path:
    """Create a virtual environment that also sees the packages of this Python. Return its packages' directory."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return packages


def install(python: pathlib.Path, *requirements: object) -> None:
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--ignore-installed")
    run(python, *pip, "--prefix", python.parent.parent, "--no-warn-script-location", *requirements)


def build(wheels: pathlib.Path) -> None:
    check_compiler()
    print(f"[horovod] building horovod {VERSION} for torch {torch_version()}, once (2 to 5 minutes)", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        here = pathlib.Path(scratch)
        environment(here / "env")
        python = here / "env" / "bin" / "python"
        install(python, *BUILD)
        pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
        # without build isolation, which would lack torch
        sdist = ("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-d", here)
        path = f"{python.parent}:{os.environ['PATH']}"
        run(*pip, *sdist, f"horovod=={VERSION}", PATH=path)
        with tarfile.open(next(here.glob("horovod-*.tar.gz"))) as archive:
            archive.extractall(here, filter="data")
        source = here / f"horovod-{VERSION}"
        for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
            text = (source / name).read_text()
            if CPP_14 not in text:
                fail(f"{name} of horovod {VERSION} has no {CPP_14!r}", "correct scripts/horovod_image.py")
            (source / name).write_text(text.replace(CPP_14, CPP_17))
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", here / "out", source, PATH=path, **OPTIONS)
        wheels.mkdir(parents=True, exist_ok=True)
        for wheel in (here / "out").glob("*.whl"):
            shutil.copy(wheel, wheels / f"{wheel.name}.part")
            (wheels / f"{wheel.name}.part").rename(wheels / wheel.name)


def wheel() -> pathlib.Path:
    """Horovod's wheel for this Python and its torch, from the cache or built."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "ktrain-horovod")
    wheels = cache / f"{sys.implementation.cache_tag}-torch-{torch_version()}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(wheels.glob(f"horovod-{VERSION}-*.whl")):
            build(wheels)
    return next(wheels.glob(f"horovod-{VERSION}-*.whl"))


def main() -> None:
    image = pathlib.Path(sys.argv[1]).absolute()
    built = wheel()
    shutil.copytree(SOURCE, image, dirs_exist_ok=True)
    environment(image / "usr" / "local")
    install(image / "usr" / "local" / "bin" / "python", "--no-deps", built, *RUNTIME)
    shutil.copy(SOURCE / "usr" / "local" / "bin" / "horovodrun", image / "usr" / "local" / "bin")  # pip writes its own
    print(f"[horovod] {image} has horovod {VERSION}: --image horovod/horovod={image}", flush=True)


if __name__ == "__main__":
    main()
