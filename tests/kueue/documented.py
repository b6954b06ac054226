"""The table of README.md: what the log contains about the queue in each recording.

The lines are those for which `test_provider` looks in the log of the replay. Write the table into the page:

    python -m tests.kueue.documented
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from airflow_provider_ktrain.engine.kueue import queue_of

from . import library
from .recording import JOBS, Actor
from .test_provider import Expected, expected

PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- recordings: begin (python -m tests.kueue.documented) -->\n", "<!-- recordings: end -->\n"


def table() -> str:
    """A row for each job of the recordings in tests/kueue/recordings."""
    rows = ["| recording | job | how it ends | log |", "|---|---|---|---|"]
    for folder in sorted(library.KEPT.iterdir()):
        recording = library.load(folder)
        title = yaml.safe_load((folder / "scenario.yaml").read_text())["title"]
        shown = f"{folder.name.partition('-')[0]}: {title}"
        for step in recording.steps:
            if step.actor is Actor.CLIENT and step.verb == "create" and step.about[0] in JOBS and queue_of(step.body):
                job = step.about[1]
                rows.append(_row(shown, job, expected(recording, job, job)))
                shown = ""
    return "\n".join(rows) + "\n"


def _row(title: str, job: str, wanted: Expected) -> str:
    lines = "<br>".join(f"`{line}`" for line in wanted.lines)
    counts = [f"{number} {name}" for number, name in (
        (wanted.evictions - wanted.preemptions, "evicted"), (wanted.preemptions, "preempted"),
    ) if number]  # fmt: skip
    return f"| {title} | `{job}` | {', '.join([wanted.outcome, *counts])} | {lines} |"


def written(page: str) -> str:
    """The page with the table."""
    return re.sub(f"(?s){re.escape(BEGIN)}.*{re.escape(END)}", lambda _: BEGIN + table() + END, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
