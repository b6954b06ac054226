"""The arguments of a trigger fit into the column of MySQL, whatever a program has printed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk.serde import serialize
from cryptography.fernet import Fernet
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.reporting.trigger_arguments import MAX_BYTES
from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

MYSQL_TEXT_BYTES = 65_535
JOB = JobRef("PyTorchJob", "v1", "n" * 63, "j" * 63, "u" * 36, "o" * 36, "d" * 63, "s" * 63, "https://" + "h" * 253)
OPTIONS = Options(logs={"Master": [0], "Worker": list(range(1000))}, deadline=1e9, conditions=("Running", "Ready"))
FROM = {"pod": "train-master-0", "container": "pytorch", "time": "2026-11-22T08:40:04.000000000Z"}

texts = st.text(max_size=50) | st.builds(
    lambda character, count: character * count,
    st.sampled_from(["x", "\0", '"', "\u0451", "\u20ac", "\U0001f600", "\ud800"]),
    st.integers(0, 60_000),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | st.integers() | numbers | texts
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10)
objects = st.dictionaries(texts, values, max_size=5)


def cursor(containers: int) -> Cursor:
    found = Cursor()
    for number in range(containers):
        second = f"2026-11-22T{number % 24:02}:{number % 60:02}:{number * 7 % 60:02}"
        found.position(f"uid-{number}", "main").advance(f"{second}.{number * 7919 % 10**9:09d}Z")
        found.names[Cursor.key(f"uid-{number}", "main")] = f"train-worker-{number}/main"
    return found


handovers = st.builds(
    Handover,
    cursor=objects | st.integers(0, 800).map(lambda containers: cursor(containers).to_dict()),
    metrics=st.dictionaries(texts, numbers),
    result_line=texts,
    result_from=st.sampled_from([{}, FROM]),
    pod_history=objects,
    handed_over_at=numbers,
    training_metrics=objects | st.builds(lambda series: {"series": series}, objects),
    phases=st.lists(st.tuples(texts, numbers).map(list), max_size=20),
)


def stored(deferral: Deferral) -> str:
    """The arguments as Airflow stores them."""
    return json.dumps(serialize(TrainingJobTrigger(**deferral.to_dict()).serialize()[1]))


@given(handovers)
def test_arguments_fit_and_name_the_job(handover: Handover) -> None:
    deferral = Deferral(JOB, OPTIONS, handover, "connection", "context", 2)
    text = stored(deferral)
    assert len(text) <= MAX_BYTES
    read = Deferral.from_dict(json.loads(text))
    assert (read.job, read.options) == (JOB, OPTIONS)
    assert (read.kubernetes_conn_id, read.cluster_context, read.failures) == ("connection", "context", 2)


def test_encrypted_arguments_fit() -> None:
    assert len(Fernet(Fernet.generate_key()).encrypt(b"x" * MAX_BYTES)) <= MYSQL_TEXT_BYTES


def fitted(**fields: Any) -> Handover:
    return Deferral.from_dict(Deferral(JOB, Options(), Handover(**fields)).to_dict()).handover


def test_arguments_that_fit_are_not_changed() -> None:
    fields: dict[str, Any] = {
        "result_line": "x" * 30_000,
        "cursor": cursor(100).to_dict(),
        "training_metrics": {"step": 1},
    }
    assert fitted(**fields) == Handover(**fields)


def test_points_are_left_out_first() -> None:
    series = {"loss": {"source": "Master 0", "at": 1.0, "points": [[1, 0.5]] * 400, "best": [1, 0.5]}}
    line = "x" * 44_000
    found = fitted(result_line=line, result_from=FROM, training_metrics={"series": series, "step": 7})
    assert found.result_line == line
    assert found.training_metrics == {"series": {"loss": {**series["loss"], "points": []}}, "step": 7}


@pytest.mark.parametrize("containers", [0, 100])
def test_result_line_is_left_out_if_it_can_be_read_again(containers: int) -> None:
    positions = cursor(containers).to_dict()
    found = fitted(result_line="\u0451" * 20_000, result_from=FROM, cursor=positions, metrics={"log.lines": 1.0})
    assert found == Handover(result_from=FROM, cursor=positions, metrics={"log.lines": 1.0})


def test_cursor_is_shortened_before_a_result_that_cannot_be_read_again_is_lost() -> None:
    line = "x" * 44_000
    found = fitted(result_line=line, cursor=cursor(800).to_dict())
    assert found.result_line == line
    read = Cursor.from_dict(found.cursor)
    assert read.omitted
    assert len(read.positions) + read.omitted == 800
