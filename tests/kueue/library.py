"""The recordings of Kueue that tests replay: those in this directory, or those in the folder KTRAIN_TEST_RECORDINGS."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from .recording import Recording, load

KEPT = Path(__file__).parent / "recordings"
FOLDER = Path(os.path.expanduser(os.environ.get("KTRAIN_TEST_RECORDINGS", "") or KEPT))


def names() -> list[str]:
    """The names of all recordings with a queue."""
    return sorted(path.parent.name for path in FOLDER.glob("*/setup.yaml"))


@functools.cache
def recording(name: str) -> Recording:
    """The recording with that name; other folders may lack those that some tests need."""
    return load((FOLDER if (FOLDER / name).exists() else KEPT) / name)
