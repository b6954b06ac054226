"""What each test process has for itself: a directory for temporary files, and a home of Airflow.

`tests/conftest.py` and the one of the embedded cluster call `own_directories` before anything imports Airflow, which
reads its home when it is imported. Child processes inherit both. Worker processes of pytest-xdist have theirs below
the directory of the process that started them. Names are short: the address of a unix socket has about 100 bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_made: dict[int, Path] = {}  # by process: a forked one has none of its own


def own_directories() -> Path:
    """The directory for temporary files of this process, removed at its end. It is set in TMPDIR at the first call.

    pytest keeps the directories of `tmp_path` of some runs where it did before.
    """
    if (made := _made.get(os.getpid())) is not None:
        return made
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    made = _made[os.getpid()] = Path(tempfile.mkdtemp(prefix="kt"))
    made.chmod(0o711)  # PostgreSQL runs as another user
    tempfile.tempdir = os.environ["TMPDIR"] = str(made)
    home = made / "airflow"
    home.mkdir()
    (made / "pods").mkdir()
    os.environ["AIRFLOW_HOME"] = str(home)
    atexit.register(_remove, os.getpid(), made)
    return made


@contextlib.contextmanager
def directory_of_pods() -> Iterator[None]:
    """Processes that are started now have another directory for temporary files.

    The pods of an embedded cluster share one. What they leave there would be gone with a real pod.
    """
    own = own_directories()
    os.environ["TMPDIR"] = str(own / "pods")
    try:
        yield
    finally:
        os.environ["TMPDIR"] = str(own)


def _remove(pid: int, made: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(made, ignore_errors=True)
