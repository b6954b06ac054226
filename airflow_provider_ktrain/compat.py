"""Everything that depends on Airflow's version or internals, in one place. Supported: 3.2.2 and newer.

Code for Airflow below 3.3 is marked "below 3.3" and can be deleted once 3.3 is required. tests/operators/test_compat.py
has a test for each internal that this module uses: if Airflow changes it, the test names what breaks.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import inspect
import json
import os
import socket
import sys
import termios
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from urllib.parse import urlsplit

import structlog
from airflow.sdk import configuration
from airflow.sdk.bases.operator import BaseOperatorMeta

from airflow_provider_ktrain.core.formats import DEFERRAL_STATE, JOB_STATE
from airflow_provider_ktrain.core.logs.repetition import LogFiles, LogStorage
from airflow_provider_ktrain.core.state.accelerators import (
    DEFAULT_RESOURCE,
    Accelerator,
    add_host_rows,
    configured_rows,
)
from airflow_provider_ktrain.core.text.output import add_host_masker, clean, masked, masked_log
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from airflow.sdk import BaseOperator, BaseSensorOperator, Context
    from airflow.sdk.types import TaskInstanceKey

    from airflow_provider_ktrain.core.identity.names import TaskInstanceId

    Admit = Callable[[Callable[..., Any], str, dict[str, Any]], bool]

_Operator = TypeVar("_Operator")

DEFAULT_WORKER_SECONDS = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TRIGGER_FAILED = "__fail__"  #: `next_method` of a task whose trigger failed or whose deferral timed out.
DEFERRAL_TIMEOUT = "Trigger timeout"  #: `error` of its `next_kwargs` in the second case, and only there.
SUCCEEDED_JOB_TTL = 3600  #: Airflow below 3.3: seconds from the end of a kept job until the cluster deletes it.
#: Airflow below 3.3: who deletes a kept job.
WHO_DELETES_IT = "The training operator deletes a PyTorchJob an hour after its end. To delete another kind, run"
RESUME_STATE = (JOB_STATE, DEFERRAL_STATE)  #: Airflow below 3.3: keys of the XComs that replace the task store.
#: Seconds after its start before which a trigger fires no event: Airflow 3.3 fails a task whose event arrives while its
#: worker still reports the deferral (measured: 2 of 20 tasks within 5 s).
EARLIEST_EVENT = 10.0
JOB_SOURCE = "job"  #: The logger's name of what concerns a whole job; lines of a replica have the replica's name.
SIGKILL_DELAY_SECONDS = 5.0  #: Time from SIGTERM, on which Airflow calls `on_kill`, to SIGKILL.
#: Remote log storage from which Airflow shows a trigger's log when it has uploaded it, and from which it never does.
UPLOADED_LOGS, HIDDEN_LOGS = ("s3://", "gs://", "wasb"), ("cloudwatch://", "oss://", "hdfs://")

CELERY_PROVIDER = "apache-airflow-providers-celery"
VISIBILITY_TIMEOUT = 86400.0  #: Seconds; what Airflow's Celery provider sets for these brokers by default.
VISIBILITY_BROKERS = ("redis://", "rediss://", "sqs://", "sentinel://")


def deployment_id() -> str:
    """`[ktrain] deployment_id`, else a hash of Airflow's base URL: identifies this Airflow on a shared cluster."""
    if configured := explicit_deployment_id():
        return configured
    return "d" + hashlib.sha256((_server_url() or "airflow").encode()).hexdigest()[:10]


def is_common_deployment_id() -> bool:
    """Whether the deployment id is a default that other Airflow deployments have as well.

    Nothing else in Airflow's configuration is shared by all its components and unique to a deployment: workers don't
    need a fernet key, and each machine without one generates its own.
    """
    url = _server_url()
    return not explicit_deployment_id() and (not url or urlsplit(url).hostname in LOOPBACK)


def _server_url() -> str:
    return _setting("api", "base_url") or _setting("core", "execution_api_server_url")


def _setting(section: str, option: str) -> str:
    return str(configuration.conf.get(section, option, fallback="") or "")


def worker_seconds() -> float:
    """`[ktrain] worker_seconds`: how long a deferrable task follows its job in the worker before it defers."""
    return float(configuration.conf.getfloat("ktrain", "worker_seconds", fallback=DEFAULT_WORKER_SECONDS))


def redelivery_seconds(executor: str | None) -> float | None:
    """Seconds after which Celery's broker delivers the message of a running task again; None if it doesn't.

    Since 3.18.0, Airflow's Celery provider ignores it (apache/airflow#64052).

    :param executor: the task's `executor`: a name, a class or an alias; None is the default executor.
    """
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        if tuple(map(int, metadata.version(CELERY_PROVIDER).split(".")[:2])) >= (3, 18):
            return None
    entries = [e.strip() for e in _setting("core", "executor").split(";")[0].split(",")]
    aliased = [entry for entry in entries if entry.split(":")[0] == executor]
    if not any("Celery" in entry for entry in ([executor, *aliased] if executor else entries[:1])):
        return None
    if seconds := _setting("celery_broker_transport_options", "visibility_timeout"):
        return float(seconds)
    return VISIBILITY_TIMEOUT if _setting("celery", "broker_url").startswith(VISIBILITY_BROKERS) else None


def default_deferrable() -> bool:
    """`[operators] default_deferrable` where the environment sets it, else True. Airflow's own default is False.

    A value in airflow.cfg proves nothing: Airflow writes this default into the file when it creates it.
    """
    section, option = "operators", "default_deferrable"
    in_environment = f"AIRFLOW__{section}__{option}".upper() in os.environ
    return bool(configuration.conf.getboolean(section, option)) if in_environment else True


def base_path() -> str:
    """The path of `[api] base_url`, without a slash at its end: the prefix of links to Airflow's own pages."""
    return urlsplit(_setting("api", "base_url")).path.rstrip("/")


def job_url() -> str:
    """`[ktrain] job_url`: the URL template of a page about a job; an empty string if it is not set."""
    return _setting("ktrain", "job_url")


def task_state(ti: Any) -> str:
    """The state of a task instance, requested from Airflow.

    `none` if it has no state (a clear resets it), `absent` if the task instance does not exist.

    :param ti: a task instance, or a key of one.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    index = ti.map_index if ti.map_index is not None and ti.map_index >= 0 else None
    states = RuntimeTaskInstance.get_task_states(
        dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=index
    )
    found = states.get(ti.run_id) or {}
    key = ti.task_id if index is None else f"{ti.task_id}_{index}"
    return str(getattr(found[key], "value", found[key]) or "none") if key in found else "absent"


def context_keys() -> frozenset[str]:
    """The names in Airflow's task context, which `@task` passes to a function's parameters of the same name."""
    from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

    return frozenset(KNOWN_CONTEXT_KEYS)


def xcom_of(ti_key: TaskInstanceKey | TaskInstanceId, key: str) -> Any:
    """The XCom of a task instance, read outside of the task; None if there is none. It blocks."""
    from airflow.sdk.execution_time.xcom import XCom

    return XCom.get_one(
        key=key, dag_id=ti_key.dag_id, run_id=ti_key.run_id, task_id=ti_key.task_id, map_index=ti_key.map_index
    )


def own_xcom(ti: Any, key: str) -> Any:
    """An XCom of this try of the worker's own task; None if there is none. It blocks."""
    return ti.xcom_pull(task_ids=ti.task_id, key=key, map_indexes=ti.map_index)


def resume_without_sensor(
    sensor: BaseSensorOperator, next_method: str, next_kwargs: dict[str, Any] | None, context: Context
) -> Any:
    """Resume a deferred sensor as an operator resumes: `soft_fail` and `never_fail` are the caller's to apply.

    `BaseSensorOperator.resume_execution` skips the task on any error, also where a retry would succeed.
    """
    from airflow.sdk import BaseSensorOperator

    return super(BaseSensorOperator, sensor).resume_execution(next_method, next_kwargs, context)


def supervisor_connection() -> object | None:
    """This process's connection to Airflow's supervisor; None if there is none."""
    from airflow.sdk.execution_time import task_runner

    return getattr(task_runner, "SUPERVISOR_COMMS", None)


def unread_log() -> int:
    """Bytes that this process of a triggerer has logged and its supervisor hasn't read yet; 0 if that is unknown.

    The supervisor reads the lines from a socket and writes them to the logs of the tasks. When a trigger ends, it
    closes that trigger's log, although its last lines may still be unread: they go to the triggerer's own log.
    """
    output: Any = getattr(structlog.get_config()["logger_factory"], "io", None)
    try:
        unread = fcntl.ioctl(output.fileno(), termios.TIOCOUTQ, bytes(4))  # of a socket: Linux's SIOCOUTQ
    except (AttributeError, OSError, ValueError):  # no triggerer, or a system that doesn't count it
        return 0
    return int.from_bytes(unread, sys.byteorder)


def log_socket_size() -> int:
    """The bytes that the socket holds to which this process of a triggerer logs; Linux's default if that is unknown."""
    output: Any = getattr(structlog.get_config()["logger_factory"], "io", None)
    try:
        with socket.socket(fileno=os.dup(output.fileno())) as output_socket:
            return output_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except (AttributeError, OSError, ValueError):
        return 212_992


def explicit_deployment_id() -> str:
    """`[ktrain] deployment_id`; an empty string if it is not set."""
    return _setting("ktrain", "deployment_id")


def _transportable(value: Any, key: str) -> Any:
    from airflow_provider_ktrain.core.text.xcom_values import transportable  # a DAG file doesn't need it

    return transportable(value, key)


def remember(context: Context, key: str, value: Any) -> bool:
    """Store a value for later resumes and tries of this task, in Airflow's task store, which survives a SIGKILL.

    Below 3.3 there is none. The values that a resumed task needs (RESUME_STATE) become XComs, which Airflow
    keeps when a task resumes and clears before the next try. Other values are not stored.

    :return: whether later tries can read the value.
    """
    store = context.get("task_state_store")
    if store is not None:
        store.set(key, _transportable(value, key))
    elif key in RESUME_STATE:  # below 3.3
        push(context, key, value)
    return store is not None


def recall(context: Context, key: str) -> Any:
    """The value that `remember` stored for this task in this run; None if there is none."""
    store = context.get("task_state_store")
    if store is not None:
        return store.get(key)
    if key not in RESUME_STATE:  # below 3.3
        return None
    return own_xcom(context["ti"], key)


def has_task_store(context: Context) -> bool:
    """Whether later tries can read what this try stores.

    Below 3.3 they can't: the job itself is the only proof of its success, so the task doesn't delete it.
    """
    return context.get("task_state_store") is not None


def calls_on_kill() -> bool:
    """Whether Airflow calls `BaseTrigger.on_kill`. Below 3.3 it only cancels the trigger, for any reason."""
    from airflow.triggers.base import BaseTrigger

    return hasattr(BaseTrigger, "on_kill")


def push(context: Context, key: str, value: Any) -> None:
    """Push an XCom of this task, without what Airflow's processes or its database reject."""
    context["ti"].xcom_push(key=key, value=_transportable(value, key))


class ChecksAfterInit(BaseOperatorMeta):
    """Metaclass of operators with a method `parse_problem`, which is called when an operator has been created.

    That is after all constructors, because a user's subclass may set parameters in its own. A mapped task that Airflow
    creates to run it isn't checked: its parameters are no literals.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor. `inspect` would take that of `__call__`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls: type[_Operator], *args: Any, **kwargs: Any) -> _Operator:
        """Create an operator. With another type of its result, editors would not show the constructor.

        :raises ValueError: `parse_problem` returns a text. It is raised here because Airflow shows the last two frames:
            the other one is the line of the DAG file.
        """
        operator = super().__call__(*args, **kwargs)  # type: ignore[misc]
        from_mapped = getattr(operator, "_BaseOperator__from_mapped", False)
        if not from_mapped and (problem := operator.parse_problem()):
            raise ValueError(masked(problem))
        return cast("_Operator", operator)


def is_resolved_later(value: Any) -> bool:
    """Whether a value stands for one that is known when the task runs: an XComArg, a mapped argument, `DagParam`."""
    from airflow.sdk.definitions._internal.mixins import ResolveMixin

    return isinstance(value, ResolveMixin)


class StorableLog:
    """Mixin of operators, sensors and triggers: what their `log` writes is `masked`, except for lines of containers.

    In Airflow 3.3, half of a surrogate pair in a traceback ends the triggerer or worker: its log is JSON in UTF-8.
    """

    log_source: ClassVar[str] = ""  #: The logger's name in the task's log. Default: that of Airflow, with the class.

    @property
    def log(self) -> Any:
        """Airflow's logger of this task or trigger, behind the filter."""
        return storable_log(cast("Any", super()).log, self.log_source)


def hides(name: str) -> bool:
    """Whether Airflow hides the value of a variable of this name: `[core] sensitive_var_conn_names`, and defaults."""
    from airflow.sdk._shared.secrets_masker import _secrets_masker

    masker: Any = _secrets_masker()
    return bool(masker.should_hide_value_for_key(name))


def masked_by_airflow(text: str) -> str:
    """The text without the secrets that this process has read from Airflow's connections and variables."""
    from airflow.sdk._shared.secrets_masker import redact

    return str(redact(text))


add_host_masker(masked_by_airflow)


def default_accelerator() -> str:
    """`[ktrain] default_accelerator`: the resource that `gpus` requests."""
    return _setting("ktrain", "default_accelerator") or DEFAULT_RESOURCE


def _added_accelerators() -> list[Accelerator]:
    """What the configuration adds to the table of accelerators. An invalid entry costs that entry only."""

    def warn(problem: str) -> None:
        masked_log(__name__).warning(
            f"An entry of [ktrain] accelerators or default_accelerator isn't counted: {problem}"
        )

    return configured_rows(_setting("ktrain", "accelerators"), default_accelerator(), warn)


add_host_rows(_added_accelerators)


def storable_log(log: Any, source: str = "", admit: Admit | None = None) -> Any:
    """A logger that writes to `log` what is `masked`. A traceback becomes part of the text.

    It is a structlog wrapper, so that a line's location is still the code that logged it and not this module. Airflow
    takes `logger` and `timestamp` of a record from its keywords, if they are given, in a worker and in a triggerer.

    :param source: the logger's name in the task's log. Default: that of `log`.
    :param admit: whether a logger's method may be called now with a message and further arguments; otherwise `admit`
        calls it later. Default: None, everything is logged at once.
    """

    def storable_event(_: Any, name: str, event: MutableMapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        text, traceback = masked(event.pop("event")), event.pop("exception", "")
        text, kw = f"{text}\n{masked(traceback)}" if traceback else text, clean(dict(event))
        if admit is not None and not admit(getattr(log, name), str(text), kw):
            raise structlog.DropEvent
        return (text,), kw

    everything = structlog.make_filtering_bound_logger(0)
    processors: list[Any] = [structlog.processors.format_exc_info, storable_event]
    wrapped = structlog.wrap_logger(log, processors=processors, wrapper_class=everything)
    return wrapped.bind(logger=source) if source else wrapped.bind()


def trigger_failure(next_kwargs: Mapping[str, Any] | None) -> str | None:
    """Why Airflow resumes a task with TRIGGER_FAILED, in one line; None if the deferral timed out.

    Airflow passes an error, which is one of two texts, and for a failed trigger a traceback: text or a list of lines.
    """
    given = next_kwargs or {}
    error = given.get("error") or "Airflow reported no error"
    text = str(getattr(error, "value", error))
    if text == DEFERRAL_TIMEOUT:
        return None
    lines = trigger_traceback(next_kwargs).splitlines()
    return lines[-1].strip() if lines else text


def trigger_traceback(next_kwargs: Mapping[str, Any] | None) -> str:
    """The traceback of a failed trigger; an empty string if Airflow passes none."""
    given = (next_kwargs or {}).get("traceback") or ""
    return "".join(map(str, given)).strip() if isinstance(given, list | tuple) else str(given).strip()


def push_return_value(context: Context, operator: BaseOperator, value: Any) -> None:
    """Push the return value before `execute` returns it, because an XCom backend may reject it.

    With `multiple_outputs` each key of a dict is pushed as well.
    """
    if not operator.do_xcom_push or value is None:
        return
    if operator.multiple_outputs and isinstance(value, Mapping):
        for key, part in value.items():
            push(context, key, part)
    push(context, "return_value", value)


def set_xcom(ti_key: TaskInstanceId, key: str, value: Any) -> None:
    """Set an XCom of a task instance, in its trigger. It blocks, so it is called in a thread.

    Airflow keeps it when the task resumes, and clears it before the next try.
    """
    from airflow.sdk.execution_time.xcom import XCom

    XCom.set(key=key, value=_transportable(value, key), **asdict(ti_key))


def repeat_logs() -> str:
    """`[ktrain] repeat_logs`: `auto`, `always` or `never`."""
    return _setting("ktrain", "repeat_logs")


def is_inline() -> bool:
    """Whether this process runs tasks and triggers for `airflow dags test`, which shows their lines in its terminal."""
    return type(supervisor_connection()).__name__ == "InProcessSupervisorComms"


def log_storage(ti: Any) -> LogStorage:
    """Where Airflow stores the log of the worker's own task."""
    from airflow.sdk.log import load_remote_log_handler

    handler = load_remote_log_handler()
    classes = () if handler is None else tuple(cls.__name__ for cls in type(handler).__mro__)
    files = _log_files(ti) if handler is None else None
    return LogStorage(classes, files, dies_with_pod="AIRFLOW_IS_K8S_EXECUTOR_POD" in os.environ)


def _log_files(ti: Any) -> LogFiles | None:
    """The files of a task's log on this machine; None: they are not found by the setting of their names."""
    from airflow.utils.helpers import log_filename_template_renderer

    try:
        own = Path(_setting("logging", "base_log_folder"), log_filename_template_renderer()(ti=ti))
        with own.open() as records:
            first = records.readline()
        triggers = [file.stat() for file in own.parent.glob(f"{glob.escape(own.name)}.trigger.*.log")]
    except Exception:  # the template is the user's, and may need what only the scheduler knows
        return None
    try:
        began_at = epoch_seconds(json.loads(first)["timestamp"])
    except (KeyError, TypeError, ValueError):
        began_at = None
    return LogFiles(began_at, max((file.st_mtime for file in triggers if file.st_size), default=None))


def metrics() -> Any:
    """Airflow's metrics, with the methods `gauge` and `incr`."""
    from airflow.sdk.observability.stats import Stats

    return Stats


def trigger_log_hint() -> str:
    """Where the log lines of a trigger are visible; an empty string if Airflow shows them like those of a worker.

    Airflow uploads a trigger's log file when the trigger ends; until then, only the triggerer's log server has it.
    """
    if not configuration.conf.getboolean("logging", "remote_logging", fallback=False):
        return ""
    folder = _setting("logging", "remote_base_log_folder")
    if folder.startswith(HIDDEN_LOGS):
        return (
            "Airflow does not show a trigger's log lines from this storage after the trigger has ended "
            "(apache/airflow#70317).\nThe worker logs them again then ([ktrain] repeat_logs). They stay in "
            "<path of the task's log>.trigger.<id>.log."
        )
    if folder.startswith(UPLOADED_LOGS):
        return (
            "Log lines from the trigger appear here when the trigger ends. "
            "They appear live only if the API server can reach the triggerer's log server."
        )
    return ""


def has_retry(context: Context) -> bool:
    """Whether Airflow retries the task if this try fails."""
    ti = context.get("ti")
    return ti is not None and has_tries_left(ti)


def has_tries_left(ti: Any) -> bool:
    """Whether Airflow retries a task instance if its current try fails. A clear increases `max_tries`."""
    return bool(ti.try_number <= (ti.max_tries or 0))
