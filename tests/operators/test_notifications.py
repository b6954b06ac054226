"""The callbacks of docs/how-to/notifications.md. tests/e2e/test_features.py has the calls by Airflow's processes."""

from __future__ import annotations

import importlib
import pathlib
import re
import types
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingOutOfMemoryError
from tests.operators.task_instance import Instance, of_each_kind
from tests.smtp import mailbox

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "notifications.md"
MAIL, FUNCTION = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
FAILS = ["sh", "-c", "echo 'ValueError: <b>expected</b>' >&2; exit 3"]


def load(code: str, **names: Any) -> dict[str, Any]:
    names = {"__name__": "documented", **names}
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    return names


def context_of(instance: Instance, error: BaseException | None) -> Any:
    """What Airflow's worker passes to a callback; without an error, what its DAG processor passes."""
    assert instance.ti is not None
    ti = types.SimpleNamespace(dag_id=instance.ti.dag_id, task_id=instance.ti.task_id, log_url="http://airflow/log")
    return {"ti": ti, "dag": DAG("dag", schedule=None), **({} if error is None else {"exception": error})}


@of_each_kind
@pytest.mark.parametrize("deferrable", [False, True])
def test_mail_has_the_cause(instance: Instance, deferrable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs() -> None:
        instance.resume(instance.event(instance.execute(command=FAILS, deferrable=deferrable)))

    with pytest.raises(TrainingJobError) as raised:
        runs()
    with mailbox() as box:
        monkeypatch.setenv("AIRFLOW_CONN_SMTP_DEFAULT", box.connection)
        load(MAIL)["MAIL"](context_of(instance, raised.value))
    (subject,) = box.subjects("dag.train: ")
    assert subject == f"{instance.replica} failed: ValueError: <b>expected</b> (exit code 3)"
    (text,) = (part.get_content() for part in box.messages[0].walk() if part.get_content_type() == "text/html")
    assert "&lt;b&gt;expected" in text
    assert " has ended." in text
    assert "http://airflow/log" in text


@pytest.mark.parametrize("error", [None, ""], ids=["none", "empty"])
def test_mail_without_an_exception(instance: Instance, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the DAG processor sends it when Airflow has lost the worker."""
    instance.execute(command=["true"], deferrable=False)
    with mailbox() as box:
        monkeypatch.setenv("AIRFLOW_CONN_SMTP_DEFAULT", box.connection)
        load(MAIL)["MAIL"](context_of(instance, error))
    assert box.subjects("dag.train: ") == ["Airflow lost the worker, see the log"]


def test_function_decides_by_the_category(capsys: pytest.CaptureFixture[str]) -> None:
    parameters: dict[str, Any] = {"task_id": "train", "image": "train:1"}
    page = load(FUNCTION, PyTorchJobOperator=lambda **_: parameters)["page_if_infrastructure"]
    lost = TrainingJobError("Worker 0 was evicted")
    lost.cause = {"category": "infrastructure", "summary": "Worker 0 was evicted", "resolution": "Retry the task."}
    for error in (None, ValueError("no cause"), TrainingOutOfMemoryError("no cause"), lost):
        page({} if error is None else {"exception": error})
    assert capsys.readouterr().out == "Worker 0 was evicted Retry the task.\n"


def test_named_notifiers_take_the_named_arguments() -> None:
    """The other rows of the table, as far as their providers are installed."""
    found = re.findall(r"`(\w+)\((\w+=.*?)\)` of `([\w.]+)`", PAGE.read_text())
    assert [name for name, *_ in found] == ["SlackWebhookNotifier", "PagerdutyNotifier"]
    cause = load(MAIL)["CAUSE"]
    for name, arguments, module in found:
        try:
            notifier = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            continue
        made = eval(f"notifier({arguments})", {"notifier": notifier, "CAUSE": cause})  # noqa: S307
        made.render_template_fields({"exception": TrainingJobError("Worker 0 failed\nmore")})
        assert "Worker 0 failed" in (getattr(made, "text", ""), getattr(made, "summary", ""))
