"""README.md of this folder contains what the log contains in each recording."""

from __future__ import annotations

import pytest

from . import library
from .documented import BEGIN, PAGE, written


@pytest.mark.skipif(library.FOLDER != library.KEPT, reason="the page contains the recordings of tests/kueue/recordings")
def test_the_documented_log_lines_are_those_of_the_replays() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert written(page) == page, "run python -m tests.kueue.documented"
