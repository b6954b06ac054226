"""The expectations hold on what a real cluster did: that is what makes them worth meeting elsewhere."""

import json
from pathlib import Path

import pytest

from .match import differences, nested
from .scenario import HERE, Scenario, load_all

pytestmark = pytest.mark.thorough
SCENARIOS = load_all()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_recording_meets_the_expectations(scenario: Scenario) -> None:
    recorded = json.loads(scenario.recording.read_text())
    found = differences(scenario.expect, recorded)
    for step in scenario.steps:
        if "answer" in step:
            verb = next(verb for verb in ("create", "patch", "delete", "http", "kubectl", "logs") if verb in step)
            if verb == "logs":
                answer = {"lines": recorded["logs"][step["logs"]]}
            else:
                kind = "kubectl" if verb == "kubectl" else "answers"
                answer = recorded[kind][step.get("name", verb)].pop(0)
            found += nested(repr(step.get("name", verb)), step["answer"], answer)
    assert not found, "\n".join(found)


def test_every_recording_has_a_scenario() -> None:
    assert {p.stem for p in Path(HERE / "recorded").glob("*.json")} == {s.recording.stem for s in SCENARIOS}
