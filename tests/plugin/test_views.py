"""What the training page shows, without Airflow's database and without a browser."""

from __future__ import annotations

import html
import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Environment, PackageLoader

from airflow_provider_ktrain.compat_server import Listed, TaskRecord
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus
from airflow_provider_ktrain.core.state.accelerators import GPU
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics
from airflow_provider_ktrain.plugin.stored_texts import HIDDEN_CAUSE, printable
from airflow_provider_ktrain.plugin.training_table import training_row
from airflow_provider_ktrain.plugin.views import training_view

KEY = TaskInstanceId("dag", "run+1", "train")
TEMPLATES = Environment(loader=PackageLoader("airflow_provider_ktrain.plugin"), autoescape=True)
TEMPLATES.globals.update(root="/ktrain", airflow="")


def record(state: str = "deferred", try_number: int = 1, followed: bool | None = None) -> TaskRecord:
    return TaskRecord(KEY, state, try_number, 0.0, None if state == "deferred" else 200.0, followed)


def status(**fields: Any) -> dict[str, Any]:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 1, "loss": 0.5}', 1.0)
    required: dict[str, Any] = {
        "job": {"kind": "PyTorchJob", "namespace": "ml", "name": "mnist", "uid": "u"},
        "try_number": 1,
        "written_at": 100.0,
        "host": "trigger",
        "phases": [("Pending", 10.0), ("Running", 40.0)],
        "rows": [["Master", 0, "mnist-master-0", "n1", 8, "Running", 0], ["Worker", 0, "w", "", 8, "Pending", 1]],
        "metrics": metrics,
        "last_lines": {"Master 0": "epoch 1"},
        "usage": {"held": 3600.0},
        "limits": [{"name": "startup_timeout", "due": 160.0, "seconds": 60.0}],
    }
    return TrainingStatus(**required | fields).to_dict()


def view(found: Any = None, *, state: str = "deferred", now: float = 110.0, **fields: Any) -> SimpleNamespace:
    given = status(**fields) if found is None else found
    return training_view(record(state), given, {}, with_logs=True, now=now)


def row(found: Any, summary: Any = None, *, state: str = "deferred") -> dict[str, Any]:
    return training_row(Listed("", record(state), summary or {}), found, with_logs=True, now=110.0)


def page(shown: SimpleNamespace) -> str:
    text = TEMPLATES.get_template("training.html").render(view=shown)
    text.encode()  # as the response does
    return text


def test_page_of_a_running_training() -> None:
    shown = view()
    assert (shown.phase, shown.age, shown.stale, list(shown.notes)) == ("Running", "10 s", False, [])
    lengths = {part["phase"]: part["lasted"] for part in shown.timeline}
    assert lengths == {"Pending": "30 s", "Running": "1 min 10 s"}
    assert shown.facts == [("PyTorchJob", "ml/mnist"), ("Replicas", "1 Running, 1 Pending"), ("GPUs", "16")]
    assert shown.usage == [("Held", "1 h")]
    assert shown.limits == [("startup_timeout", "50 s")]
    text = page(shown)
    for runs_on in ("The data is", "expires in", '<span class="quiet">'):
        assert f'{runs_on} <span data-at="' in text or f'{runs_on}<span data-at="' in text
    assert shown.series == {"loss": [[1], [0.5]]}
    assert "kubectl get pytorchjobs.kubeflow.org mnist --namespace ml --output yaml" in shown.commands
    assert "kubectl logs --namespace ml w --all-containers --follow" in shown.commands, "the replica that is not fine"
    assert shown.log_path == "/dags/dag/runs/run%2B1/tasks/train"


def test_steps_are_grouped_by_thousands() -> None:
    metrics = {"loss": {"last": 1, "step": 16580, "best": 0.5, "best_step": "NaN"}}
    (row,) = view(status() | {"metrics": metrics}).metrics
    assert row == {"name": "loss", "last": "1", "step": "16,580", "best": "0.5", "best_step": "NaN"}


@pytest.mark.parametrize(("state", "changes"), [("deferred", True), ("failed", False)])
def test_durations_of_a_training_that_runs_are_updated(state: str, changes: bool) -> None:
    """A job in a queue has no new status for hours, and the page polls only what has changed."""
    given = status(phases=[("Queued", 10.0)])
    first, later = (view(given, state=state, now=now) for now in (110.0, 3710.0))
    assert (first.timeline != later.timeline) is (first.data != later.data) is changes
    assert view(given, state=state, now=3715.0).data == later.data


def test_lines_of_the_log_need_the_right_to_read_it() -> None:
    quote = "a line of the log"
    cause = {"summary": f"failed: {quote}", "detail": quote, "resolution": "Read it.", "category": "user code"}
    tries = [{"try_number": 1, "cause": f"failed: {quote}"}, {"try_number": 2, "cause": ""}]
    shown = training_view(record("failed"), status(cause=cause), {"tries": tries}, with_logs=False, now=110.0)
    text = page(shown)
    assert quote not in text
    assert "epoch 1" not in text
    assert shown.lines_hidden
    assert text.count(html.escape(HIDDEN_CAUSE)) == 2, "of this try and of the earlier one"
    assert "Read it." in text
    assert "user code" in text
    assert shown.tries[0]["cause"] == "succeeded"
    assert quote in page(
        training_view(record("failed"), status(cause=cause), {"tries": tries}, with_logs=True, now=110.0)
    )


@pytest.mark.parametrize(
    ("found", "state", "now", "note"),
    [
        ({}, "queued", 0.0, "has not begun"),
        ({}, "deferred", 0.0, "no data yet"),
        ({}, "failed", 0.0, "left no data"),
        ({}, "failed", 0.0, "ended at 1970-01-01 00:03:20 UTC"),
        (None, "deferred", 1000.0, "may be gone"),
        (None, "failed", 110.0, "killed"),
    ],
)
def test_page_shows_what_is_unknown(found: Any, state: str, now: float, note: str) -> None:
    assert note in " ".join(view(found, state=state, now=now).notes)


@pytest.mark.parametrize("phase", ["Queued", "Running"])
@pytest.mark.parametrize(("followed", "count"), [(True, 0), (None, 0), (False, 1)])
def test_page_says_that_no_triggerer_follows_the_training(phase: str, followed: bool | None, count: int) -> None:
    given = status(phases=[(phase, 10.0)])
    shown = training_view(record(followed=followed), given, {}, with_logs=True, now=120.0)
    assert "".join(shown.notes).count("No triggerer follows") == len(shown.notes) == count
    shown = training_view(record(followed=False), given, {}, with_logs=True, now=5000.0)
    assert len(shown.notes) == 1, "the data is old for this reason"
    shown = training_view(record(followed=False), None, {}, with_logs=True, now=120.0)
    assert "No triggerer follows" in shown.notes[0]


@pytest.mark.parametrize(
    ("due", "now", "stale"), [(None, 270.0, False), (None, 290.0, True), (300.0, 410.0, False), (300.0, 430.0, True)]
)
def test_data_is_old_when_the_next_status_is_late(due: float | None, now: float, stale: bool) -> None:
    """A triggerer with many trainings writes each one's status less often. Without `next_due`, it is a minute."""
    given = status() | ({} if due is None else {"next_due": due})
    shown = view(given, now=now)
    assert (shown.stale, len(shown.notes)) == (stale, stale)


def test_held_time_runs_on_while_all_pods_start() -> None:
    rows = [["Master", 0, "m", "n", 8, "ContainerCreating", 0], ["Worker", 0, "w", "n", 8, "Running", 0]]
    starting = view(rows=rows, phases=[("Starting", 10.0)])
    assert 'data-rate="16"' in page(starting)
    assert view(rows=rows, phases=[("Starting", 10.0)], now=500.0).stale
    assert 'data-rate="16"' not in page(view(rows=rows, phases=[("Pending", 10.0)])), "who has a node isn't known"


def test_data_of_a_training_that_waits_is_not_called_old() -> None:
    """Nothing is written while nothing changes."""
    shown = view(phases=[("Queued", 10.0)], queue="Pending: insufficient unused quota", now=5000.0)
    assert (shown.stale, list(shown.notes)) == (False, [])


def test_timeline_of_an_ended_training_ends_with_its_last_phase() -> None:
    shown = view(state="failed", phases=[("Running", 40.0), ("Failed", 100.0)], ended=True)
    assert [(part["phase"], part["lasted"], part["ends"]) for part in shown.timeline] == [
        ("Running", "1 min", False),
        ("Failed", "0 s", True),
    ]
    assert "Failed from" in page(shown)
    assert "0 s" not in page(shown)
    assert not shown.age, "the data of an ended training doesn't age"


def test_training_that_a_limit_has_ended_is_not_called_running() -> None:
    cause = {"category": "hang", "summary": "No step for 30 min"}
    assert "Ended while Running" in page(view(state="failed", cause=cause))
    assert "Ended while Running" not in page(view(state="deferred", cause=cause)), "its pods are being deleted"
    assert "Ended while" not in page(view(state="failed", cause=cause, phases=[("Failed", 100.0)]))


def test_gpu_time_is_not_shown_before_there_is_any() -> None:
    assert view(usage={"held": 0.0, "queued": 0.0}).usage == []


@pytest.mark.parametrize(
    ("used", "shown"),
    [
        ({"repeated_steps": 1200, "repeated": 90.0}, "1,200 in 1 min 30 s"),
        ({"repeated_steps": 1, "repeated": 0.0}, "1 in 0 s"),
        ({"repeated_steps": 0, "repeated": 0.0}, "none"),
        ({"repeated_steps": 7}, "7"),
        ({"repeated_steps": float("nan"), "repeated": 1.0}, None),
        ({"repeated_steps": "7"}, None),
        ({}, None),
    ],
)
def test_what_a_retry_repeats_is_a_part_of_the_gpu_time(used: dict[str, Any], shown: str | None) -> None:
    found = dict(view(status() | {"usage": {"held": 3600.0, **used}}).usage)
    assert found == {"Held": "1 h"} | ({} if shown is None else {"Repeated steps": shown})


def test_gpu_time_in_a_queue_grows_while_nothing_is_written() -> None:
    given = status(phases=[("Queued", 10.0)], usage={"queued": 30.0, "held": 0.0}, rows=[], requested={GPU: 24})
    shown = view(given, now=160.0)
    assert ("GPUs requested", "24") in shown.facts
    assert dict(shown.usage) == {
        "Held": "0 s", "Waiting for GPUs": "24 min 30 s", "Requested": "24 min",
    }  # fmt: skip
    assert dict(view(given, state="failed", now=160.0).usage)["Waiting for GPUs"] == "30 s"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m \x1b[1;38;5;9mbold\x1b[m", "red bold"),
        ("\x1b]0;title\x07text \x1b]8;;http://a\x1b\\link", "text link"),
        ("a\tb\nc", "a\tb\nc"),
        ("50%\r100%\x00\x08", "50%\ufffd100%\ufffd\ufffd"),
        ("\x1b", "\ufffd"),
    ],
)
def test_terminal_control_sequences_are_left_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_control_sequences_in_names_are_left_out() -> None:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 1, "\\u001b[31mloss": 0.5}', 1.0)
    shown = view(metrics=metrics, job={"kind": "PyTorchJob", "namespace": "n", "name": "a\x1b[1mb"})
    assert list(shown.series) == ["loss"] == [row["name"] for row in shown.metrics]
    assert shown.facts[0] == ("PyTorchJob", "n/ab")


def test_a_cut_off_log_line_ends_with_an_ellipsis() -> None:
    shown = view(last_lines={"Master 0": "x" * 500, "Worker 0": "y"})
    assert dict(shown.last_lines) == {"Master 0": "x" * 120 + "…", "Worker 0": "y"}


def test_task_that_has_not_begun_has_no_phase() -> None:
    shown = view({}, state="queued")
    assert shown.phase == ""
    assert "No data" in page(shown)
    assert "Task state: queued." in page(shown)


def test_parts_of_the_page_have_names_that_differ() -> None:
    """The script replaces a part of the page by its id."""
    given = status(cause={"summary": "failed", "detail": "d"}, queue="waits")
    text = page(training_view(record(try_number=2), given, {"tries": [{"cause": "c"}]}, with_logs=True, now=5000.0))
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {"cause-section", "notes", "phase-section", "metrics-section", "replicas-section", "cards"} <= set(ids)


def test_data_of_an_earlier_try_is_marked() -> None:
    shown = training_view(record(try_number=2), status(), {}, with_logs=True, now=110.0)
    assert "of try 1" in shown.notes[0]


def test_conclusion_is_shown_until_the_status_has_a_cause() -> None:
    concluded = {"uid": "u", "category": "hang", "summary": "no log line for 30 min", "limit": "log_stall_timeout"}
    shown = training_view(record(), status() | {"conclusion": concluded}, {}, with_logs=True, now=110.0)
    assert shown.cause == {"category": "hang", "summary": "no log line for 30 min"}
    given = status(cause={"summary": "Master 0 failed"}) | {"conclusion": concluded}
    assert training_view(record(), given, {}, with_logs=True, now=110.0).cause["summary"] == "Master 0 failed"


def test_tries_are_listed_with_their_causes_newest_first() -> None:
    tries = [
        {"try_number": 1, "started_at": "2026-11-22T10:00:00Z", "ended_at": "2026-11-22T10:05:00Z", "cause": "OOM"},
        {"try_number": 2, "started_at": "2026-11-22T10:06:00Z", "ended_at": "2026-11-22T10:09:00Z"},
    ]
    shown = training_view(record("success", try_number=2), status(), {"tries": tries}, with_logs=True, now=110.0)
    assert [(one["number"], one["began"], one["cause"]) for one in shown.tries] == [
        ("2", "2026-11-22 10:06:00", "succeeded"),
        ("1", "2026-11-22 10:00:00", "OOM"),
    ]


@pytest.mark.parametrize(("try_number", "known"), [(1, True), (2, False)])
def test_page_says_that_earlier_tries_are_not_known(try_number: int, known: bool) -> None:
    """Below Airflow 3.3 they are not stored."""
    text = page(training_view(record(try_number=try_number), status(), {}, with_logs=True, now=110.0))
    assert ("Nothing is known about the earlier tries" in text) is not known


def test_nothing_that_is_shown_is_markup() -> None:
    evil = '<script>alert(1)</script><img src=x onerror=alert(2)>"\x1b[31m\ud800'
    given = status(
        job={"kind": "PyTorchJob", "namespace": evil, "name": evil, "uid": evil},
        phases=[(evil, 1.0)],
        rows=[[evil, 0, evil, evil, 1, evil, 0]],
        last_lines={evil: evil * 10000},
        queue=evil,
        cause=dict.fromkeys(("summary", "detail", "resolution", "category"), evil),
    )
    given["metrics"] = {evil: {"last": evil, "step": 1}}
    given["series"] = {evil: [[1, evil]]}
    text = page(
        training_view(record(), given, {"tries": [{"cause": evil, "try_number": evil}]}, with_logs=True, now=110.0)
    )
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    listed = TEMPLATES.get_template("trainings_body.html").render(view={"rows": [row(given)], "sums": {}})
    assert "<script>alert" not in listed


texts = st.text(alphabet="a1<", max_size=3)
ODD_NUMBERS = [0.5, 1e300, 10**400, float("inf"), float("nan")]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 10)
    | st.sampled_from([0.5, 1e300, 10**400, float("inf"), float("nan")])
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=6,
)
fields = st.sampled_from(sorted(status()))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(fields, json_values, max_size=4))
def test_a_status_of_another_release_never_breaks_the_page(found: dict[str, Any]) -> None:
    odd = replace(record("failed"), summary={**BEGUN, "try_number": 1, **found})
    page(training_view(odd, None, {}, with_logs=True, now=110.0))
    for given_status in (found, status() | found):
        shown = view(given_status)
        page(shown)
        json.dumps(shown.series)
        row(given_status)
        row({}, given_status, state="failed")


@pytest.mark.parametrize(("text", "index"), [("3", 3), ("-1", -1), ("{MAP_INDEX}", -1), ("--5", -1), ("9" * 12, -1)])
def test_map_index_of_a_request(text: str, index: int) -> None:
    from airflow_provider_ktrain.plugin.application import task_key

    assert task_key("dag", "run", "task", text).map_index == index


def test_other_accelerators_are_named() -> None:
    tpus, slices = {"google.com/tpu": 4}, {"nvidia.com/mig-1g.5gb": 2}
    rows = [["Master", 0, "m", "n", tpus, "Running", 0], ["Worker", 0, "w", "n", slices, "Running", 0]]
    other = {"requested": 3.0, "queued": 0.0, "held": 3.0, "wasted": 0.0, "gpus": 2}
    used = {"held": 60.0, "resource": "google.com/tpu", "others": {"nvidia.com/mig-1g.5gb": other}, "unknown_claims": 1}
    given = status(rows=rows, usage=used, requested=tpus)
    seen = view(given)
    assert ("Accelerators", "2 MIG 1g.5gb slices and 4 TPUs") in seen.facts
    assert [row["gpus"] for row in seen.replicas] == ["4 TPUs", "2 MIG 1g.5gb slices"]
    assert (seen.gpus_name, seen.unit) == ("Accelerators", ("TPU", "TPUs"))
    assert ("Held", "1 min") in seen.usage or ("Held", "1 min 0 s") in seen.usage
    assert ("Held: MIG 1g.5gb slices", "3 s") in seen.usage
    assert ("Devices of ResourceClaims", "not counted") in seen.usage


def test_megabytes_that_something_else_stored_are_cut_before_secrets_are_hidden() -> None:
    text = "auth={x\\'\n" * 100_000
    began = time.thread_time()
    listed = row({"phase": text, "replicas": {"count": text}})
    shown = view({"phase": text, "notice": text, "last_lines": {"Master 0": text}})
    assert time.thread_time() - began < 5.0
    assert len(listed["state"]) < 40_000
    assert "characters ..." in shown.phase


@pytest.mark.parametrize("step", [1e300, 2**60, "text", None, {}])
def test_point_whose_step_can_be_none_is_not_drawn(step: Any) -> None:
    assert view({"series": {"loss": [[1, 0.5], [step, 0.4]]}}).series == {"loss": [[1], [0.5]]}


def test_curves_of_all_tries_since_the_last_clear_are_in_one_chart() -> None:
    tries = [
        {"try_number": 1, "max_tries": 0, "series": {"loss": [[0, 9.0], [1, 8.0]]}, "usage": {"held": 0.0}},
        {
            "try_number": 2,
            "max_tries": 3,
            "series": {"loss": [[0, 3.0], [10, 2.0]]},
            "usage": {"held": 60.0},
            "step": 10,
        },
        {"try_number": 3, "max_tries": 3, "series": {}, "usage": {"held": 30.0}},
    ]
    current = replace(record(try_number=4), max_tries=3)
    given = status(try_number=4) | {"series": {"loss": [[10, 2.1], [20, 1.0]]}}
    shown = training_view(current, given, {"tries": tries}, with_logs=True, now=110.0)
    assert shown.labels == ["try 2", "this try"]
    assert shown.series == {"loss": [[0, 10, 20], [3.0, 2.0, None], [None, 2.1, 1.0]]}, "repeated steps overlay"
    assert [(one["number"], one["step"], one["held"]) for one in shown.tries[1:]] == [
        ("2", "10", "1 min"),
        ("1", "", "0 s"),
    ]
    assert ("Held in all tries", "1 h 1 min") in shown.usage
    page(shown)


@pytest.mark.parametrize(
    ("earlier", "state", "own", "held"),
    [
        ([{"held": 60.0}, {"held": 60.0}], "success", True, "1 h 2 min"),
        ([{"held": 60.0}, {"held": 60.0}], "running", False, "1 h 2 min"),
        ([{"held": 60.0}], "success", True, "at least 1 h 1 min"),
        ([{"held": 60.0}, None], "success", True, "at least 1 h 1 min"),
        ([{"held": 60.0}, {"held": 60.0}], "failed", False, "at least 1 h 2 min"),
    ],
    ids=["all are known", "it runs", "one isn't stored", "nobody knows the usage of one", "it was killed"],
)
def test_usage_of_all_tries_says_when_some_is_not_known(earlier: list[Any], state: str, own: bool, held: str) -> None:
    tries = [{"try_number": n, **({} if used is None else {"usage": used})} for n, used in enumerate(earlier, 1)]
    given = status(try_number=3, ended=own)
    shown = training_view(record(state, try_number=3), given, {"tries": tries}, with_logs=True, now=110.0)
    assert dict(shown.usage)["Held in all tries"] == held


@pytest.mark.parametrize("state", ["deferred", "success"])
def test_usage_that_is_a_bound_says_so(state: str) -> None:
    assert ("Held at least", "1 h") in view(state=state, usage={"held": 3600.0, "at_least": True}).usage
    given = status(try_number=2, ended=True, usage={"held": 3600.0, "at_least": True})
    earlier = {"tries": [{"try_number": 1, "usage": {"held": 60.0}}]}
    shown = training_view(record(state, try_number=2), given, earlier, with_logs=True, now=110.0)
    assert dict(shown.usage)["Held in all tries"] == "at least 1 h 1 min"
    earlier = {"tries": [{"try_number": 1, "usage": {"held": 60.0, "at_least": True}}]}
    shown = training_view(
        record(state, try_number=2), status(try_number=2, ended=True), earlier, with_logs=True, now=110.0
    )
    assert dict(shown.usage)["Held in all tries"] == "at least 1 h 1 min"


@pytest.mark.parametrize(
    ("stored", "missing"),
    [([1, 2, 3], ""), ([2], "1, 3"), ([3], "1, 2"), ([], "")],
    ids=["all are", "two are not", "the first are not", "none is: the page says why"],
)
def test_page_names_the_tries_of_which_nothing_is_stored(stored: list[int], missing: str) -> None:
    tries = {"tries": [{"try_number": number} for number in stored]}
    shown = training_view(record(try_number=4), status(try_number=4), tries, with_logs=True, now=110.0)
    assert shown.tries_missing == missing
    assert (f"Nothing is stored about: try {missing}." in page(shown)) is bool(missing)
    older = training_view(record(try_number=4), status(), {**tries, "older": {"tries": 1}}, with_logs=True, now=110.0)
    assert "1" not in older.tries_missing, "it isn't listed any more"


def test_usage_says_that_earlier_tries_are_not_counted() -> None:
    """Below Airflow 3.3 they are not stored."""
    shown = training_view(record(try_number=2), status(try_number=2), {}, with_logs=True, now=110.0)
    assert ("Of earlier tries", "not known: this try only") in shown.usage
    assert len(view().usage) == 1, "the first try is the only one"


@pytest.mark.parametrize(
    ("state", "phase"), [("failed", "Failed"), ("up_for_retry", "Failed"), ("success", "Succeeded")]
)
def test_task_that_failed_never_shows_a_success(state: str, phase: str) -> None:
    rows = [["Master", 0, "m", "n", 1, "Succeeded", 0], ["Worker", 0, "w", "n", 1, "Error", 0]]
    shown = view(state=state, phases=[("Running", 1.0), ("Succeeded", 50.0)], rows=rows, ended=True)
    assert shown.shown_phase == phase
    assert any("result could not be returned" in note for note in shown.notes) is (phase == "Failed")
    text = page(shown)
    assert f'phase-{phase}">{phase}<' in text
    assert f'data-phase="{phase}"' in text, "page.js reads it out"
    assert ("<span>Succeeded</span>" in text) is (phase == "Succeeded"), "in the timeline"
    assert [(one["state"], one["fine"]) for one in shown.replicas] == [
        ("Succeeded", True),
        ("stopped after the success", True),
    ]
    assert ("Replicas", "1 Succeeded, 1 stopped after the success") in shown.facts


def test_replica_that_failed_keeps_its_state() -> None:
    states = ["OOMKilled", "Terminating", "ContainerCreating", "NodeNotReady", "Error"]
    rows = [["Worker", n, f"w{n}", "n", 1, state, 0] for n, state in enumerate(states)]
    stopped = "stopped after the failure"
    shown = view(state="failed", phases=[("Failed", 50.0)], rows=rows, ended=True)
    assert [one["state"] for one in shown.replicas] == ["OOMKilled", stopped, stopped, "NodeNotReady", "Error"]
    shown = view(state="failed", phases=[("Running", 50.0)], rows=rows[1:2], ended=True)
    assert [one["state"] for one in shown.replicas] == ["stopped with the training"], "by a limit or a kill"
    shown = view(state="success", phases=[("Succeeded", 50.0)], rows=rows, ended=True)
    assert [(one["state"], one["fine"]) for one in shown.replicas][:1] == [("OOMKilled", False)]
    running = view(rows=rows)
    assert [one["state"] for one in running.replicas] == states


def test_task_whose_end_nobody_stored_names_the_command_that_ends_its_job() -> None:
    delete = "kubectl delete pytorchjobs.kubeflow.org mnist --namespace ml"
    killed = view(state="failed")
    assert killed.commands[0] == delete
    assert "may still hold GPUs" in " ".join(killed.notes)
    assert all("delete" not in command for command in view().commands), "the task runs"
    stored = status(ended=True)
    assert delete not in view(stored, state="failed").commands
    assert view(stored | {"job_deleted": True}, state="failed").commands == []


def test_try_whose_worker_was_lost_says_so_while_its_retry_waits() -> None:
    """The next try takes the job over, after `retry_delay`."""
    shown = view(state="up_for_retry")
    assert [note for note in shown.notes if "may still hold GPUs" in note and "up for retry" in note]
    assert shown.active, "the page shows the next try when it begins"
    (note,) = view({}, state="up_for_retry").notes
    assert note.startswith("This try left no data")
    for waits in ("scheduled", "queued", "restarting"):
        assert view(state=waits).notes == []


BEGUN = {
    "version": 1, "try_number": 2, "state": "running", "parameters": {"lr": "0.1", "layers": "4"},
    "job": {"kind": "PyTorchJob", "namespace": "ml", "name": "mnist", "cluster": "https://k8s:6443"},
}  # fmt: skip


def test_try_without_a_status_shows_what_its_summary_has() -> None:
    """Its worker was lost before it wrote the first status: whether it has created its job isn't known."""
    lost = replace(record("failed", try_number=2), summary=BEGUN)
    tries = {"tries": [{"try_number": 1, "usage": {"held": 60.0}}]}
    shown = training_view(lost, None, tries, with_logs=True, now=110.0)
    assert shown.facts == [
        ("PyTorchJob", "ml/mnist"), ("Cluster", "https://k8s:6443"), ("Parameters", "lr=0.1, layers=4"),
    ]  # fmt: skip
    (note,) = shown.notes
    assert "its worker was lost" in note
    assert "may still hold GPUs" in note
    assert shown.commands[0] == "kubectl delete pytorchjobs.kubeflow.org mnist --namespace ml"
    assert dict(shown.usage)["Held in all tries"] == "at least 1 min"
    page(shown)
    running = training_view(replace(lost, state="running"), None, {}, with_logs=True, now=110.0)
    assert "no data yet" in running.notes[0]
    assert running.facts == shown.facts
    assert training_view(lost, status(), {}, with_logs=True, now=110.0).facts[0] == shown.facts[0]
    assert "Cluster" not in dict(training_view(lost, status(), {}, with_logs=True, now=110.0).facts)


def test_summary_of_another_try_is_not_shown() -> None:
    shown = training_view(replace(record("failed", try_number=3), summary=BEGUN), None, {}, with_logs=True, now=110.0)
    assert not shown.facts
    assert "left no data" in shown.notes[0]


@pytest.mark.parametrize("with_logs", [True, False])
def test_end_of_a_try_without_a_status_is_that_of_its_summary(with_logs: bool) -> None:
    """Its last status could not be stored."""
    summary = {**BEGUN, "state": "failed", "cause": "ValueError: no data", "category": "user code"}
    ended = replace(record("failed", try_number=2), summary=summary)
    shown = training_view(ended, None, {}, with_logs=with_logs, now=110.0)
    assert shown.cause["summary"] == ("ValueError: no data" if with_logs else HIDDEN_CAUSE)
    assert shown.cause["category"] == "user code"
    assert not shown.notes
    assert not any("delete" in command for command in shown.commands)


def test_curves_of_earlier_tries_are_shown_before_this_one_has_any() -> None:
    tries = [{"try_number": 1, "max_tries": 1, "series": {"loss": [[0, 3.0], [10, 2.0]]}, "usage": {"held": 60.0}}]
    given = status(try_number=2, metrics=TrainingMetrics())
    current = replace(record(try_number=2), max_tries=1)
    text = page(training_view(current, given, {"tries": tries}, with_logs=True, now=110.0))
    assert '<div class="charts">' in text
    assert "Last and best values" not in text


def test_try_without_a_job_shows_its_cause_and_no_phase() -> None:
    """What `operators.summaries` stores of a task that failed before it had a job."""
    cause = {"category": "configuration", "summary": "invalid YAML", "detail": ""}
    shown = view({"try_number": 1, "written_at": 5.0, "ended": True, "cause": cause}, state="failed")
    text = page(shown)
    assert "invalid YAML" in text
    assert 'phase-Failed">Failed<' in text
    assert "Ended while" not in text
    assert not shown.notes
