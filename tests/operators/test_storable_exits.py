"""All data that this process sends can be stored, independent of the text that it received: UTF-8 without NUL.

PostgreSQL rejects NUL in JSONB; this ended one triggerer after the other. Airflow's log rejects half of a surrogate
pair.
"""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.errors import KtrainError, ManifestError
from airflow_provider_ktrain.engine.api.answers import ApiStatusError, ApiUnavailable, interpret
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingUserCodeError, as_airflow_errors, failure
from airflow_provider_ktrain.triggers.reaper import SecondLookTrigger
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.operators.task_instance import Instance, Store, Ti, of_each_kind

TEXT = st.text(st.characters(exclude_categories=()), max_size=10) | st.sampled_from(["\0", "\ud800", "a\0b", "\udcff"])
JSON = st.recursive(
    TEXT | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=5
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)


def check(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    assert "\\u0000" not in text


@given(OBJECT, TEXT)
def test_events_and_trigger_arguments_are_storable(value: dict[str, Any], text: str) -> None:
    outcome = Outcome(text, False, cause=value, released=text, release_error=text, kept={text: text}, usage=value)
    check(outcome.to_dict())
    check(Handover(value, {}, text, value).to_dict())
    trigger = TrainingJobTrigger(job={text: text}, options=value, handover=value, kubernetes_conn_id=text)
    check(trigger.serialize()[1])
    check(SecondLookTrigger(candidates={text: text}, due=0).serialize()[1])


@given(TEXT, JSON)
def test_xcoms_and_task_state_are_storable(key: str, value: Any) -> None:
    ti, store = Ti("run", 1, 1), Store()
    context: Any = {"ti": ti, "task_state_store": store}
    compat.push(context, "key", value)
    compat.remember(context, "key", {key: value})
    check(ti.xcoms)
    check(store)


def error_of(body: bytes) -> KtrainError:
    """The error for a response 403."""
    with pytest.raises((ApiStatusError, ApiUnavailable)) as caught:
        interpret("GET", "/api/v1/namespaces/ns/pods", None, 403, body)
    return caught.value


@given(TEXT, OBJECT)
def test_error_messages_are_storable(text: str, value: dict[str, Any]) -> None:
    cause = {"category": "user code", "summary": text, "detail": text, "resolution": text}
    status = json.dumps({"kind": "Status", "status": "Failure", "reason": text, "message": text, "details": value})
    errors = [
        KtrainError(text), ManifestError(text, found=text), error_of(status.encode()), TrainingJobError(text),
        error_of(text.encode(errors="surrogatepass")), failure(cause, text),
    ]  # fmt: skip
    check([str(error) for error in errors])
    check([error.message for error in errors if isinstance(error, ApiStatusError)])
    check([error.details for error in errors if isinstance(error, ApiStatusError)])


@of_each_kind
def test_cause_with_nul_is_raised_without_it(instance: Instance) -> None:
    instance.execute()
    cause = {"category": "user code", "summary": "a\0b"}
    with pytest.raises(TrainingUserCodeError, match="a\ufffdb"):
        instance.resume({"outcome": {"phase": "Failed", "succeeded": False, "cause": cause}})


@given(TEXT)
def test_tracebacks_of_a_task_are_storable(text: str) -> None:
    """Airflow logs the whole chain of exceptions."""

    def fails(error: type[Exception]) -> None:
        try:
            raise OSError(text)
        except OSError as e:
            raise error(text) from e

    for error in (KtrainError, ManifestError, TrainingJobError, ValueError):
        with pytest.raises(Exception) as raised, as_airflow_errors():  # noqa: PT011
            fails(error)
        check("".join(traceback.format_exception(raised.value)))


def test_chain_of_errors_is_kept_if_it_can_be_logged() -> None:
    with pytest.raises(TrainingJobError) as raised, as_airflow_errors():
        raise KtrainError("no luck")
    assert isinstance(raised.value.__cause__, KtrainError)


@given(TEXT, JSON)
def test_log_lines_are_storable(text: str, value: Any) -> None:
    with structlog.testing.capture_logs() as lines:
        log = compat.storable_log(structlog.get_logger())
        log.info(text, key=value)
        log.warning("%s", KeyError(text))
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("Failed: %s", text)
    check(lines)
    assert [line["log_level"] for line in lines] == ["info", "warning", "error"]
    assert "ValueError" in lines[2]["event"]


def test_log_line_names_the_code_that_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    add_place = structlog.processors.CallsiteParameterAdder([structlog.processors.CallsiteParameter.FUNC_NAME])
    below = structlog.wrap_logger(
        structlog.PrintLogger(),
        processors=[add_place, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.BoundLogger,
    )
    compat.storable_log(below).info("hello")
    assert json.loads(capsys.readouterr().out)["func_name"] == "test_log_line_names_the_code_that_wrote_it"


@pytest.mark.virtual_time
async def test_event_of_a_failed_trigger_is_storable() -> None:
    """A proxy's binary error page made the trigger fail: one such event stopped every triggerer of an Airflow."""
    text = "\x1f\x8b\0\udcff"
    job = dict.fromkeys(("kind", "version", "namespace", "name", "uid"), text)
    trigger = TrainingJobTrigger(job=job, options={"release": False}, kubernetes_conn_id=text)

    event = (await anext(aiter(trigger.run()))).payload
    assert "error" in event
    check(event)
