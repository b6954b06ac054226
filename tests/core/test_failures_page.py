"""docs/how-to/failures.md: each first line under a category is one that the diagnosis produces in this category."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose, diagnose_limit
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.end_rules import Event, Situation, decide, task_of, why_ended
from airflow_provider_ktrain.core.state.limits import Limit

from .test_diagnosis import RECORDINGS, cause_of, recording
from .test_failures import CASES

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/failures.md").read_text()
SECTION = re.compile(r"^### (.+?)$(?:(?!^##).)*?```text\n(.*?)```", re.M | re.S)
QUOTED = {title: block.strip().splitlines() for title, block in SECTION.findall(PAGE)}


def produced() -> Iterator[tuple[str, str]]:
    """Category and first line of each recorded failure, of those of the tests, of limits and of kills."""
    for path in RECORDINGS.glob("[0-9]*.json"):
        cause = cause_of(recording(path.stem))
        yield cause.category, cause.summary
    for case in CASES.values():
        yield case.get("category", Category.USER_CODE), case["first"]
    held = recording("14-pt-suspend-create-at-3s")
    for limit, seconds, job in ((Limit.QUEUE, 60, held["job"]), (Limit.LOG_STALL, 600, job_named("train"))):
        cause = diagnose_limit(limit, seconds, make_evidence(job, []))
        yield cause.category, cause.summary
    cause = diagnose_limit(Limit.PROGRESS, 600, make_evidence(job_named("train"), []), step=4200)
    yield cause.category, cause.summary
    cause = diagnose(make_evidence(job_named("train"), []))
    yield cause.category, cause.summary
    for state in ("failed", "running"):
        text = decide(Situation(Event.KILL, task=task_of(state), hurried=True)).text
        yield Category.KILLED, text.format(job="PyTorchJob default/train", why=why_ended(Event.KILL, state))


def job_named(name: str) -> dict[str, object]:
    return {"kind": "PyTorchJob", "metadata": {"name": name}}


PRODUCED = set(produced())


@pytest.mark.parametrize("category", Category, ids=str)
def test_each_first_line_of_the_guide_is_produced_in_its_category(category: Category) -> None:
    assert QUOTED[category]
    assert [line for line in QUOTED[category] if (category, line) not in PRODUCED] == []
