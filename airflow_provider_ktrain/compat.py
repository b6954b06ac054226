"""Everything that depends on Airflow's version, in one place: 3.2.2 and newer.

Branches for Airflow below 3.3 say so: "below 3.3" finds all that can be deleted once 3.3 is required.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import structlog

from airflow_provider_ktrain.core.formats import DEFERRAL_STATE, JOB_STATE
from airflow_provider_ktrain.core.text import clean

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from airflow.sdk import BaseOperator, BaseSensorOperator, Context
    from airflow.sdk.types import TaskInstanceKey

DEFAULT_WORKER_SECONDS = 10.0
TRIGGER_FAILED = "__fail__"  #: `next_method` of a task whose trigger failed or whose deferral timed out
DEFERRAL_TIMEOUT = "Trigger timeout"  #: `error` of its `next_kwargs` in the second case, and only there
SUCCEEDED_JOB_TTL = 3600  #: below 3.3; seconds after which the cluster deletes a job that its task has kept
#: below 3.3
WHO_DELETES_IT = "Its operator deletes a PyTorchJob an hour after its end; the reaper deletes any other kind"
RESUME_STATE = (JOB_STATE, DEFERRAL_STATE)  #: below 3.3; keys of the XComs that stand for task state
#: seconds a trigger keeps its event: 3.3 fails a task whose event comes while its worker still reports the deferral (2
#: of 20 within 5 s)
EARLIEST_EVENT = 10.0
#: remote log storage to which Airflow uploads a log file when its process or trigger ends
UPLOADED_LOGS = ("s3://", "gs://", "wasb", "oss://", "hdfs://")


def deployment_id() -> str:
    """`[ktrain] deployment_id`, or a short hash of the API server's base URL: tells Airflows on one cluster apart."""
    if said := explicit_deployment_id():
        return said
    return "d" + hashlib.sha256((_server_url() or "airflow").encode()).hexdigest()[:10]


def is_common_deployment_id() -> bool:
    """Whether our deployment id is that of every Airflow where nobody set anything.

    Airflow has nothing else that all its parts share and no other Airflow does: workers need no fernet key, and each
    machine that has none makes one up.
    """
    url = _server_url()
    return not explicit_deployment_id() and (not url or urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1"))


def _server_url() -> str:
    from airflow.sdk.configuration import conf

    url = conf.get("api", "base_url", fallback="") or conf.get("core", "execution_api_server_url", fallback="")
    return str(url or "")


def worker_seconds() -> float:
    """`[ktrain] worker_seconds`: how long a deferrable task follows its job in the worker before it defers."""
    from airflow.sdk.configuration import conf

    return float(conf.getfloat("ktrain", "worker_seconds", fallback=DEFAULT_WORKER_SECONDS))


def job_url() -> str:
    """`[ktrain] job_url`: the template of a page about a job; an empty string where it is not set."""
    from airflow.sdk.configuration import conf

    return str(conf.get("ktrain", "job_url", fallback="") or "")


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int | None) -> str:
    """The state of a task instance, asked of Airflow.

    `none` where it has no state (a clear has reset it), `absent` where there is no such task instance.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    index = map_index if map_index is not None and map_index >= 0 else None
    states = RuntimeTaskInstance.get_task_states(dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=index)
    found = states.get(run_id) or {}
    key = task_id if index is None else f"{task_id}_{index}"
    return str(getattr(found[key], "value", found[key]) or "none") if key in found else "absent"


def context_keys() -> frozenset[str]:
    """The names in Airflow's task context, which `@task` passes to a function's parameters of the same name."""
    from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

    return frozenset(KNOWN_CONTEXT_KEYS)


def xcom_of(ti_key: TaskInstanceKey, key: str) -> Any:
    """The XCom of a task instance, read outside of the task; None if there is none.

    :param ti_key: of the task instance.
    :param key: the XCom's key.
    """
    from airflow.sdk.execution_time.xcom import XCom

    return XCom.get_one(
        key=key, dag_id=ti_key.dag_id, run_id=ti_key.run_id, task_id=ti_key.task_id, map_index=ti_key.map_index
    )


def resume_without_sensor(
    sensor: BaseSensorOperator, next_method: str, next_kwargs: dict[str, Any] | None, context: Context
) -> Any:
    """Resume a deferred sensor as an operator resumes: `soft_fail` and `never_fail` are the caller's to apply.

    `BaseSensorOperator.resume_execution` skips the task on any error, also where a retry would succeed.
    """
    from airflow.sdk import BaseSensorOperator

    return super(BaseSensorOperator, sensor).resume_execution(next_method, next_kwargs, context)


def supervisor_connection() -> object | None:
    """The connection to Airflow's supervisor, over which this process asks; None where there is none."""
    from airflow.sdk.execution_time import task_runner

    return getattr(task_runner, "SUPERVISOR_COMMS", None)


def explicit_deployment_id() -> str:
    """`[ktrain] deployment_id`; an empty string where it is not set."""
    from airflow.sdk.configuration import conf

    return str(conf.get("ktrain", "deployment_id", fallback="") or "")


def remember(context: Context, key: str, value: Any) -> bool:
    """Store something for later segments and tries of this task: in `task_state_store`, which survives a SIGKILL.

    Below 3.3 there is no such store. What a resumed task needs (RESUME_STATE) is an XCom then, which Airflow keeps over
    a resume and clears before the next try; anything else is not stored.

    :return: whether later tries find it.
    """
    store = context.get("task_state_store")
    if store is not None:
        store.set(key, clean(value))
    elif key in RESUME_STATE:  # below 3.3
        push(context, key, value)
    return store is not None


def recall(context: Context, key: str) -> Any:
    """What `remember` stored for this task of this run; None where there is nothing."""
    store = context.get("task_state_store")
    if store is not None:
        return store.get(key)
    if key not in RESUME_STATE:  # below 3.3
        return None
    ti = context["ti"]
    return ti.xcom_pull(task_ids=ti.task_id, key=key, map_indexes=ti.map_index)


def has_task_state(context: Context) -> bool:
    """Whether later tries find what this one stores.

    Below 3.3 they don't: the job itself is the only proof of its success then, so its task doesn't delete it.
    """
    return context.get("task_state_store") is not None


def calls_on_kill() -> bool:
    """Whether Airflow calls `BaseTrigger.on_kill`. Below 3.3 it only cancels a trigger, whatever the reason."""
    from airflow.triggers.base import BaseTrigger

    return hasattr(BaseTrigger, "on_kill")


def push(context: Context, key: str, value: Any) -> None:
    """Push an XCom of this task, without characters that a database refuses."""
    context["ti"].xcom_push(key=key, value=clean(value))


class StorableLog:
    """Mixin of operators, sensors and triggers: their `log` writes no characters that Airflow can't carry.

    Half of a surrogate pair in a traceback ends a triggerer or a worker in Airflow 3.3, since its log is JSON in UTF-8.
    """

    @property
    def log(self) -> Any:
        return storable_log(cast("Any", super()).log)


def storable_log(log: Any) -> Any:
    """A logger that writes to `log` without such characters. A traceback is a part of the text then.

    structlog does it, so that the line still names the code that wrote it and not this module.
    """
    everything = structlog.make_filtering_bound_logger(0)
    processors: list[Any] = [structlog.processors.format_exc_info, _storable_event]
    return structlog.wrap_logger(log, processors=processors, wrapper_class=everything).bind()


def _storable_event(_: Any, __: str, event: MutableMapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call of the logger below."""
    cleaned = clean(event)
    traceback = cleaned.pop("exception", "")
    text = cleaned.pop("event")
    return (f"{text}\n{traceback}" if traceback else text,), dict(cleaned)


def trigger_failure(next_kwargs: Mapping[str, Any] | None) -> str | None:
    """Why Airflow resumes a task with TRIGGER_FAILED, in one line; None where its deferral has timed out.

    Airflow hands over an error, which is one of two texts, and for a trigger that failed a traceback: text, or lines.
    """
    given = next_kwargs or {}
    error = given.get("error") or "Airflow names no error"
    text = str(getattr(error, "value", error))
    if text == DEFERRAL_TIMEOUT:
        return None
    lines = trigger_traceback(next_kwargs).splitlines()
    return lines[-1].strip() if lines else text


def trigger_traceback(next_kwargs: Mapping[str, Any] | None) -> str:
    """The traceback of a trigger that failed; empty where Airflow hands over none."""
    given = (next_kwargs or {}).get("traceback") or ""
    return "".join(map(str, given)).strip() if isinstance(given, list | tuple) else str(given).strip()


def push_return_value(context: Context, operator: BaseOperator, value: Any) -> None:
    """Push what `execute` is about to return, as Airflow does after it: an XCom backend may refuse it.

    With `multiple_outputs` each key of a dict is pushed as well.
    """
    if not operator.do_xcom_push or value is None:
        return
    if operator.multiple_outputs and isinstance(value, Mapping):
        for key, part in value.items():
            push(context, key, part)
    push(context, "return_value", value)


def gauge(name: str, value: float, **tags: str) -> None:
    """One of Airflow's metrics."""
    from airflow.sdk.observability.stats import Stats

    Stats.gauge(name, value, tags=tags)


def trigger_log_hint(ti: Any) -> str:
    """Where the log lines of a trigger will be visible; empty where Airflow shows them like those of a worker.

    It follows from Airflow's own limits: a trigger's log file is uploaded when the trigger ends, and until then only
    the triggerer's log server has it; with CloudWatch, Airflow reads the worker's stream alone (apache/airflow#70317).

    :param ti: the task instance that defers.
    """
    from airflow.sdk.configuration import conf

    if not conf.getboolean("logging", "remote_logging", fallback=False):
        return ""
    folder = str(conf.get("logging", "remote_base_log_folder", fallback="") or "")
    if folder.startswith("cloudwatch://"):
        try:
            stream = _log_path(ti).replace(":", "_")
        except Exception:  # the template may name what only Airflow's log handler knows
            stream = "<path of the task's log>"
        return (
            "Airflow does not show a trigger's log lines from CloudWatch after the trigger has ended "
            "(apache/airflow#70317). They stay in the log stream of this name, with the triggerer's job id:\n"
            f"{stream}.trigger.<id>.log"
        )
    if folder.startswith(UPLOADED_LOGS):
        return (
            "Log lines from the trigger appear here when the trigger ends. "
            "They appear live only if the API server can reach the triggerer's log server."
        )
    return ""


def _log_path(ti: Any) -> str:
    """The path of a task's log below the log folder, by `[logging] log_filename_template`."""
    from airflow.sdk.configuration import conf
    from jinja2 import Template

    template = str(conf.get("logging", "log_filename_template"))
    return str(Template(template).render(ti=ti, try_number=ti.try_number))
