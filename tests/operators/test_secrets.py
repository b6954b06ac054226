"""No text that we compose or quote has a secret, wherever it goes; the user's own values arrive unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from airflow.sdk import Asset, TaskInstanceState
from airflow.sdk.execution_time.context import OutletEventAccessors
from airflow.sdk.log import mask_secret
from hypothesis import given

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.cli import main
from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.formats import OUTCOME_STATE, STATUS_XCOM, TRIES_STATE
from airflow_provider_ktrain.core.reporting.asset_events import event_extra
from airflow_provider_ktrain.core.reporting.conclusion import Conclusion
from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus
from airflow_provider_ktrain.core.text.output import Verbatim, clean, masked_log
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.exceptions import TrainingJobError, as_airflow_errors, failure
from airflow_provider_ktrain.operators import openlineage, task_store
from airflow_provider_ktrain.operators.asset_events import add_training
from airflow_provider_ktrain.plugin.stored_texts import printable
from airflow_provider_ktrain.status_writer import WORKER, TaskStatusSink
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.core.manifests import pytorchjob
from tests.operators.task_instance import Instance, Store, Supervisor, Ti, supervised
from tests.secrets import EXAMPLES, SECRET, texts_with_a_secret

OF_A_CONNECTION = "pa55word-of-a-connection"  # which Airflow itself hides


@pytest.fixture(autouse=True)
def masked() -> None:
    mask_secret(OF_A_CONNECTION)


def check(*values: Any) -> None:
    text = json.dumps(values, default=str)
    assert SECRET not in text
    assert OF_A_CONNECTION not in text


def failed(text: str) -> Outcome:
    """An outcome whose texts all have a secret, as one of an older release."""
    cause = Cause(Category.USER_CODE, "").as_dict() | dict.fromkeys(("summary", "detail", "resolution"), text)
    return Outcome(
        "Failed", False, cause=cause, released=text, release_error=text, result_error=text, status={"a": text}
    )


def status(text: str) -> dict[str, Any]:
    cause = Cause(Category.USER_CODE, text, text, text).as_dict()
    return TrainingStatus(
        job={"name": text}, try_number=1, written_at=0.0, host="worker", phases=[("Failed", 0.0)],
        rows=[["Master", 0, text, text, 1, text, 0]], last_lines={text: text}, queue=text, cause=cause,
    ).to_dict()  # fmt: skip


def conclusion(text: str) -> Conclusion:
    cause = Cause(Category.USER_CODE, text, text, text, text, {text: text})
    return Conclusion("uid", "ti", "s", cause, text, text)


@given(texts_with_a_secret())
def test_events_task_state_and_errors_have_no_secrets(text: str) -> None:
    text = f"{text} {OF_A_CONNECTION}"
    outcome, store = failed(text), Store()
    context: Any = {"ti": Ti("run", 1, 1), "task_state_store": store}
    task_store.write_outcome(context, outcome)
    assert {OUTCOME_STATE, TRIES_STATE} <= store.keys()
    assert outcome.cause is not None
    error = failure(outcome.cause, text)
    check(store, event_of(outcome), event_of(text), str(error), error.cause, str(KtrainError(text)))
    check(str(TrainingJobError(text)), status(text), printable(text), conclusion(text).to_dict())


@given(texts_with_a_secret())
def test_log_and_terminal_show_no_secrets(text: str) -> None:
    text = f"{text} {OF_A_CONNECTION}"
    with structlog.testing.capture_logs() as lines:
        log = compat.storable_log(structlog.get_logger())
        log.info(text)
        log.warning("%s", text)
        try:
            raise OSError(text)
        except OSError:
            log.exception("Failed")
    of_no_task, out, console = masked_log("airflow_provider_ktrain.a_module"), io.StringIO(), Console()
    handler = logging.StreamHandler(out)
    of_no_task.addHandler(handler)
    try:
        of_no_task.warning("%s\n%s", text, OSError(text))
        raise OSError(text)
    except OSError:
        of_no_task.exception("Failed")
    finally:
        of_no_task.removeHandler(handler)
    assert "OSError: " in out.getvalue().rpartition("Traceback")[2]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        console.info(text)
        console.error("%s", text)
    check(lines, out.getvalue())
    assert len(lines) == 3


@given(texts_with_a_secret())
def test_commands_name_invalid_values_without_secrets(text: str) -> None:
    manifest = pytorchjob()
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] = f"{text} {OF_A_CONNECTION}"
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        file = Path(folder, "job.yaml")
        file.write_text(yaml.safe_dump(manifest))
        assert main(["run", str(file)]) == 2
        assert main(["check", str(file)]) == main(["check", "--output", "json", str(file)]) == 1
    assert out.getvalue().count("restart-policy") == 3
    check(out.getvalue())


def test_lines_of_containers_are_logged_as_they_are() -> None:
    """They are the user's output. Airflow's own masker applies to them."""
    with structlog.testing.capture_logs() as lines:
        compat.storable_log(structlog.get_logger()).info(Verbatim("token=abc"))
    assert [line["event"] for line in lines] == ["token=abc"]


def test_lines_of_containers_are_not_searched_for_secrets() -> None:
    """That would take as long as to log them."""
    log, called = compat.storable_log(structlog.get_logger()), set[str]()
    with structlog.testing.capture_logs():
        sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name))
        try:
            log.info(Verbatim("line 1"), logger="Worker 0")
        finally:
            sys.setprofile(None)
    assert clean.__name__ in called
    assert compat.masked_by_airflow.__name__ not in called


@given(texts_with_a_secret())
def test_chain_of_an_error_has_no_secrets(text: str) -> None:

    def fails() -> None:
        try:
            raise OSError(f"{text} {OF_A_CONNECTION}")
        except OSError as e:
            raise KtrainError("no luck") from e

    with pytest.raises(TrainingJobError) as raised, as_airflow_errors():
        fails()
    check("".join(traceback.format_exception(raised.value)))


@given(texts_with_a_secret())
def test_lineage_and_asset_events_have_no_secrets(text: str) -> None:
    pytest.importorskip("airflow.providers.openlineage")
    text = f"{text} {OF_A_CONNECTION}"
    requested = {"job": {"name": text}, "images": {"Master": text}}
    facet = openlineage.at_end(requested, {}, failed(text), declares_datasets=False).run_facets["ktrain_training"]
    check(str(facet))
    values = {"result": {text: text}, "metrics": {text: 1.0}, "checkpoint_dir": text, "job": {"name": text}}
    check(event_extra(values))


def test_asset_event_has_the_result_without_secrets() -> None:
    model = Asset("s3://bucket/model")
    context: Any = {"outlet_events": OutletEventAccessors(), "task_state_store": Store()}
    outcome = Outcome("Succeeded", True, result={"note": list(EXAMPLES), "of": OF_A_CONNECTION})
    add_training(context, [model], outcome, structlog.get_logger())
    extra = context["outlet_events"][model].extra
    assert extra["result"]["of"] == "***"
    check(extra)


@pytest.mark.parametrize("build", [status, lambda text: {"queue": text, text: [text]}], ids=["document", "any"])
async def test_status_is_written_without_secrets(build: Any) -> None:
    """Whatever it is built of: the writer itself hides them."""
    written = threading.Event()

    class Written(Ti):
        def xcom_push(self, key: str, value: Any) -> None:
            super().xcom_push(key, value)
            written.set()

    ti = Written("run", 1, 1)
    async with TaskStatusSink(ti, WORKER) as sink:
        sink.offer(lambda: lambda: build(f"{EXAMPLES} {OF_A_CONNECTION}"), urgent=True)
        async with asyncio.timeout(240):
            while not written.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.01)
        check(ti.xcoms)
        written.clear()
        assert await sink.store_conclusion(conclusion(f"{EXAMPLES} {OF_A_CONNECTION}").to_dict())
    assert ti.xcoms[STATUS_XCOM]["conclusion"]["summary"]
    assert ti.xcoms[STATUS_XCOM]["queue"]
    check(ti.xcoms)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with supervised(Supervisor(TaskInstanceState.DEFERRED)) as answers:
        yield answers


@pytest.mark.programs("a program prints all characters")
@pytest.mark.parametrize("deferrable", [False, True])
def test_values_of_the_user_arrive_unchanged(instance: Instance, supervisor: Supervisor, deferrable: bool) -> None:
    """A result with secrets of each kind, and metrics and a model that look like them."""
    value = {"texts": [*EXAMPLES, OF_A_CONNECTION], "model_uri": f"s3://bucket/m?sig={SECRET}", "DB_PASS": SECRET}
    metric = json.dumps({"step": 1, f"token={SECRET}": 0.5})
    program = f"print('KTRAIN_METRIC ' + {metric!r})\nprint('KTRAIN_RESULT ' + {json.dumps(value)!r}, flush=True)"
    if deferrable:
        program = f"import time\ntime.sleep(5)\n{program}"
    returned = instance.execute(command=["python3", "-c", program], deferrable=deferrable)
    if deferrable:
        check(returned.trigger.serialize(), instance.store)
        trigger = TrainingJobTrigger(**returned.trigger.serialize()[1])

        async def followed() -> Any:
            return (await anext(aiter(trigger.run()))).payload

        event = asyncio.run(followed())
        assert event["outcome"]["result"] == value
        returned = instance.resume(event)
    assert returned == value
    assert instance.ti is not None
    assert instance.ti.xcoms["return_value"] == value
    assert list(instance.ti.xcoms["metrics"]) == [f"token={SECRET}"]
    assert instance.store[OUTCOME_STATE]["outcome"]["result"] == value, "for the next try"
    check(instance.ti.xcoms[STATUS_XCOM])
