"""Canaries: the Airflow internals used by `compat` and its callers have the expected names, values and behaviour.

Each assertion's message names the part of this provider that breaks.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any, cast

import airflow
import pytest
import structlog
from airflow.configuration import retrieve_configuration_description
from airflow.models import taskinstance
from airflow.providers.cncf.kubernetes import pod_generator
from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook, KubernetesHook
from airflow.sdk import BaseOperator, BaseOperatorLink, BaseSensorOperator, Context
from airflow.sdk.bases import operator
from airflow.sdk.configuration import AirflowSDKConfigParser
from airflow.sdk.exceptions import AirflowException, TaskDeferralError, TaskDeferralTimeout
from airflow.sdk.execution_time import supervisor, task_runner
from airflow.sdk.execution_time.supervisor import WatchedSubprocess
from airflow.sdk.execution_time.xcom import XCom
from airflow.sdk.log import load_remote_log_handler, logging_processors, mask_secret
from airflow.sdk.observability.stats import Stats
from airflow.triggers.base import BaseTrigger
from airflow.utils.helpers import log_filename_template_renderer
from airflow.utils.log.file_task_handler import FileTaskHandler

import airflow_provider_ktrain
from airflow_provider_ktrain import compat, worker_host
from airflow_provider_ktrain.core.state.accelerators import add_host_rows, unit_of
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.sensors.training import PyTorchJobSensor
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.operators.task_instance import Ti

AIRFLOW = pathlib.Path(airflow.__file__).parent
PACKAGE = pathlib.Path(airflow_provider_ktrain.__file__).parent
#: The documented interface for authors of providers, and Airflow's provider that this one builds on.
PUBLIC = {
    "airflow.plugins_manager", "airflow.providers.cncf.kubernetes.hooks.kubernetes",
    "airflow.providers.openlineage.extractors", "airflow.sdk",
    "airflow.sdk.bases.decorator", "airflow.sdk.exceptions", "airflow.sdk.types", "airflow.triggers.base",
}  # fmt: skip


def accepts(function: Any, *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)


def imports_of(file: pathlib.Path) -> set[str]:
    """The Airflow modules that a file imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    found |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in found if name.split(".")[0] == "airflow"}


def test_only_compat_imports_internals_of_airflow() -> None:
    found = {
        str(file.relative_to(PACKAGE)): internals
        for file in PACKAGE.rglob("*.py")
        if (internals := imports_of(file) - PUBLIC) and file.name not in ("compat.py", "compat_server.py")
    }
    assert found == {}, "move these imports to compat.py, and add a canary for them here"


# configuration


@pytest.mark.parametrize("value", [None, "True", "False"])
def test_default_deferrable_counts_only_in_the_environment(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = "[operators] default_deferrable is ignored, or Airflow's own default (False) disables deferral"
    configuration = AirflowSDKConfigParser()
    monkeypatch.setattr("airflow.sdk.configuration.conf", configuration, raising=False)
    configuration.read_string("[operators]\ndefault_deferrable = false\n")  # as in the airflow.cfg that Airflow creates
    if value is not None:
        monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", value)
    assert compat.default_deferrable() is (value != "False"), breaks
    made: list[Any] = [
        PyTorchJobOperator(task_id="train", image="train:1"),
        PyTorchJobSensor(task_id="train", job_name="train"),
        PyTorchJobOperator(task_id="train", image="train:1", deferrable=value == "False"),
    ]
    assert [task.deferrable for task in made] == [value != "False", value != "False", value == "False"]


# resuming after a trigger


def test_trigger_failure_constants_match_airflow() -> None:
    breaks = (
        "a failed trigger or an expired deferral is not recognized: the GPUs are not released, the job is not followed"
    )
    assert operator.TRIGGER_FAIL_REPR == compat.TRIGGER_FAILED, breaks
    assert operator.TriggerFailureReason.TRIGGER_TIMEOUT.value == compat.DEFERRAL_TIMEOUT, breaks


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("TRIGGER_TIMEOUT", TaskDeferralTimeout), ("TRIGGER_FAILURE", TaskDeferralError)],
)
def test_trigger_failure_is_passed_as_error_and_traceback(reason: str, expected: type[Exception]) -> None:
    kwargs = {"error": operator.TriggerFailureReason[reason], "traceback": ["ImportError: no such module\n"]}
    with pytest.raises(expected) as error:
        BaseOperator(task_id="train").resume_execution(operator.TRIGGER_FAIL_REPR, kwargs, Context())
    assert type(error.value) is expected, "trigger_failure mistakes a failed trigger for an expired deferral"
    source = inspect.getsource(BaseOperator.resume_execution)
    assert '"traceback"' in source, "trigger_traceback returns nothing: the log doesn't show why a trigger failed"


def test_sensors_resume_as_operators_without_soft_fail() -> None:
    """Airflow's own method of the sensor would skip the task."""

    class Fails(BaseSensorOperator):
        def execute_complete(self, context: Any) -> None:
            raise AirflowException("from the sensor")

    breaks = "resume_without_sensor: a sensor with soft_fail skips its task on an error that a retry would recover from"
    assert "resume_execution" in vars(BaseSensorOperator), breaks
    assert BaseSensorOperator.__mro__[1] is BaseOperator, breaks
    with pytest.raises(AirflowException, match=r"^from the sensor$"):
        compat.resume_without_sensor(Fails(task_id="wait", soft_fail=True), "execute_complete", {}, {})


# tries and kills


def test_task_states_can_be_requested() -> None:
    parameters = ("dag_id", "task_ids", "run_ids", "map_index")
    breaks = "task_state: a kill looks like a lost worker, so killed jobs are kept until the reaper runs"
    assert accepts(task_runner.RuntimeTaskInstance.get_task_states, *parameters), breaks
    answered = (AIRFLOW / "api_fastapi/execution_api/routes/task_instances.py").read_text()
    assert 'f"{task.task_id}_{task.map_index}": task.state' in answered, f"{breaks} (the key of a mapped task)"


def test_supervisor_connection_is_declared() -> None:
    declared = "SUPERVISOR_COMMS" in task_runner.__annotations__ or hasattr(task_runner, "SUPERVISOR_COMMS")
    assert declared, "supervisor_connection: the first kill in a triggerer waits until Airflow's API is loaded"


def test_kill_leaves_time_to_release_the_job() -> None:
    delay = inspect.signature(WatchedSubprocess.kill).parameters["escalation_delay"].default
    assert delay == compat.SIGKILL_DELAY_SECONDS, "SIGKILL comes before a killed worker has released its job"
    assert delay > worker_host.STOP_SECONDS, "SIGKILL comes before a killed worker has released its job"


def test_triggers_have_on_kill_where_there_is_a_task_state() -> None:
    has_store = "task_state_store" in Context.__annotations__
    assert compat.calls_on_kill() == has_store, "calls_on_kill: cancelled triggers are released twice or not at all"


def test_execution_without_a_task_instance_has_no_retry() -> None:
    """`execute({})`, as in a user's unit test."""
    assert not compat.has_retry({})


def test_trigger_without_a_triggerer_has_no_task_instance() -> None:
    """`airflow dags test` runs triggers in the worker and never sets it."""
    assert TrainingJobTrigger().task_instance is None, (
        "an interrupted `airflow dags test` leaves its job on the cluster"
    )


def test_runtime_task_instance_has_its_tries() -> None:
    fields = task_runner.RuntimeTaskInstance.model_fields
    breaks = "has_retry and job_owner: a job is deleted although a retry would adopt it, or adopted across a clear"
    assert {"try_number", "max_tries", "map_index", "id"} <= fields.keys(), breaks


def test_clear_renews_max_tries() -> None:
    source = inspect.getsource(taskinstance.clear_task_instances)
    breaks = "first_try_since_clear: a cleared task adopts the job of before the clear, or a retry replaces its own job"
    assert "max_tries = ti.try_number + task.retries" in source, breaks


# what is stored


def test_task_state_can_be_read_and_written() -> None:
    if "task_state_store" not in Context.__annotations__:
        pytest.skip("below 3.3")
    from airflow.sdk.execution_time.context import TaskStateStoreAccessor

    breaks = "remember and recall: a retry doesn't find the job and the outcome that the previous try has stored"
    assert accepts(TaskStateStoreAccessor.set, "key", "value"), breaks
    assert accepts(TaskStateStoreAccessor.get, "key"), breaks


def test_xcom_of_another_process_can_be_read() -> None:
    breaks = "xcom_of: the button `Training job` leads nowhere"
    assert accepts(XCom.get_one, "key", "dag_id", "task_id", "run_id", "map_index"), breaks
    assert hasattr(BaseOperatorLink, "xcom_key"), breaks


def test_xcoms_of_the_task_can_be_pulled() -> None:
    breaks = "recall below Airflow 3.3: a resumed task doesn't find its job"
    assert accepts(task_runner.RuntimeTaskInstance.xcom_pull, "task_ids", "key", "map_indexes"), breaks
    assert accepts(task_runner.RuntimeTaskInstance.xcom_push, "key", "value"), breaks


def test_operators_and_triggers_have_a_logger_to_wrap() -> None:
    breaks = "StorableLog: text that Airflow can't store ends the worker or the triggerer"
    for base in (BaseOperator, BaseSensorOperator, BaseTrigger):
        assert isinstance(inspect.getattr_static(base, "log"), property), breaks


def test_context_keys_include_common_names() -> None:
    breaks = "context_keys: @task.pytorchjob accepts functions that expect Airflow's context, which pods don't have"
    assert {"ti", "ds", "params", "logical_date"} <= compat.context_keys(), breaks


def test_gauges_have_tags() -> None:
    assert accepts(Stats.gauge, "tags"), "gauge: metrics of different tasks overwrite one another"


# configuration


@pytest.mark.parametrize(
    ("section", "option", "breaks"),
    [
        ("api", "base_url", "deployment_id: two Airflows that share a cluster use the same job names"),
        ("core", "executor", "redelivery_seconds: no warning of a redelivered message"),
        ("core", "execution_api_server_url", "deployment_id: two Airflows that share a cluster use the same job names"),
        ("logging", "remote_logging", "trigger_log_hint: nothing tells where a deferred task's log lines are"),
        ("logging", "remote_base_log_folder", "trigger_log_hint: nothing tells where a deferred task's log lines are"),
        ("logging", "log_filename_template", "log_storage: lines are logged again although they are shown"),
        ("logging", "base_log_folder", "log_storage: lines are not logged again although they are not shown"),
    ],
)
def test_configuration_options_exist(section: str, option: str, breaks: str) -> None:
    described = retrieve_configuration_description(include_providers=False)
    assert option in described[section]["options"], breaks


CELERY = "airflow.providers.celery.executors.celery_executor.CeleryExecutor"


@pytest.mark.parametrize(
    ("configured", "executor", "more", "seconds"),
    [
        ("LocalExecutor", None, "", None),
        ("CeleryExecutor", None, "", 86400.0),
        ("CeleryExecutor,KubernetesExecutor", "KubernetesExecutor", "", None),
        ("LocalExecutor,CeleryExecutor", "CeleryExecutor", "", 86400.0),
        (f"LocalExecutor, slow:{CELERY}", "slow", "", 86400.0),
        (f"slow:{CELERY}", None, "", 86400.0),
        ("LocalExecutor;team=CeleryExecutor", None, "", None),
        ("CeleryExecutor", None, "[celery_broker_transport_options]\nvisibility_timeout = 600\n", 600.0),
        ("CeleryExecutor", None, "[celery]\nbroker_url = amqp://rabbit\n", None),
    ],
)
def test_time_to_the_redelivery_of_a_message_by_the_executor(
    configured: str, executor: str | None, more: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch,
    celery_provider: Callable[[str], None],
) -> None:  # fmt: skip
    celery_provider("3.17.3")
    configuration = AirflowSDKConfigParser()
    monkeypatch.setattr("airflow.sdk.configuration.conf", configuration, raising=False)
    monkeypatch.delenv("AIRFLOW__CORE__EXECUTOR", raising=False)
    configuration.read_string(f"[core]\nexecutor = {configured}\n{more}")
    assert compat.redelivery_seconds(executor) == seconds


@pytest.mark.parametrize(("version", "seconds"), [("3.17.3", 86400.0), ("3.18.0", None), ("3.26.0rc1", None)])
def test_newer_celery_provider_ignores_a_redelivered_message(
    version: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch, celery_provider: Callable[[str], None]
) -> None:
    celery_provider(version)
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    assert compat.redelivery_seconds(None) == seconds


def test_trigger_logs_have_the_suffix_that_is_announced() -> None:
    handler: Any = FileTaskHandler
    name = handler.add_triggerer_suffix("attempt=1.log", 7)
    assert name == "attempt=1.log.trigger.7.log", "trigger_log_hint: the name of the CloudWatch stream is wrong"


def test_log_of_a_worker_is_found_by_its_name() -> None:
    breaks = "log_storage: lines that are not shown are not logged again"
    assert callable(load_remote_log_handler), breaks
    assert log_filename_template_renderer()(ti=Ti("run", 2, 2)) == "dag_id=dag/run_id=run/task_id=train/attempt=2.log"
    assert "AIRFLOW_IS_K8S_EXECUTOR_POD" in inspect.getsource(pod_generator), "log_storage: lines that nobody will see"


def test_tasks_of_dags_test_have_a_supervisor_of_their_own() -> None:
    name = supervisor.InProcessSupervisorComms.__name__
    assert name == "InProcessSupervisorComms", "is_inline: `airflow dags test` says that lines may be missing"


# the provider for Kubernetes


def test_extras_of_a_connection_can_be_read() -> None:
    breaks = "hooks: no client can be built"
    assert accepts(KubernetesHook.__init__, "conn_id"), breaks
    assert inspect.iscoroutinefunction(AsyncKubernetesHook.get_conn_extras), breaks


# the task's log


def written(source: str, text: str, **fields: str) -> dict[str, Any]:
    """The record that a triggerer writes to a task's log."""
    file = io.BytesIO()
    log = structlog.wrap_logger(
        structlog.BytesLogger(cast("Any", file)), processors=logging_processors(json_output=True)
    )
    compat.storable_log(log, source).info(text, **fields)
    record: dict[str, Any] = json.loads(file.getvalue())
    return record


def test_a_record_keeps_its_source_and_time() -> None:
    stamp = "2026-11-21T10:00:00.123456Z"
    record = written("job", "step 1", logger="Worker 1", timestamp=stamp)
    assert (record["logger"], record["timestamp"]) == ("Worker 1", stamp), "the UI can't filter lines by replica"
    assert written("job", "submitted")["logger"] == "job"


def test_secrets_of_connections_are_masked() -> None:
    mask_secret("s3cret-of-a-connection")
    assert compat.masked_by_airflow("args: s3cret-of-a-connection") == "args: ***", (
        "the log shows secrets of the manifest"
    )
    assert compat.hides("my_password"), "the log shows variables that Airflow hides"
    assert not compat.hides("epochs")


@pytest.mark.parametrize(
    ("accelerators", "default", "unit", "warnings"),
    [
        ("example.com/wafer=wafer", "", "wafers", 0),
        ("", "example.com/wafer", "wafers", 0),
        ("example.com/wafer", "", "units of example.com/wafer", 1),
        ("", "wafer", "units of example.com/wafer", 1),
        ("example.com/npu", "example.com/wafer", "wafers", 1),
        ("npu=NPU, example.com/wafer=wafer", "", "wafers", 1),
    ],
)
def test_invalid_accelerator_of_the_configuration_costs_its_entry_only(
    accelerators: str,
    default: str,
    unit: str,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__ACCELERATORS", accelerators)
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR", default)
    add_host_rows(compat._added_accelerators)  # forget what was read before
    try:
        assert unit_of("example.com/wafer")[1] == unit
        assert caplog.text.count("isn't counted") == warnings
    finally:
        monkeypatch.undo()
        add_host_rows(compat._added_accelerators)


# parameters


def test_operator_has_a_metaclass_and_knows_whether_it_was_mapped() -> None:
    assert isinstance(BaseOperator, operator.BaseOperatorMeta), "ChecksAfterInit: literals aren't checked"
    mapped = BaseOperator(task_id="a", _airflow_from_mapped=True)
    assert mapped._BaseOperator__from_mapped is True, "ChecksAfterInit: mapped values fail in the constructor"  # type: ignore[attr-defined]


def test_values_that_are_resolved_later_have_a_common_class() -> None:
    argument = BaseOperator(task_id="a").output
    assert compat.is_resolved_later(argument), "parse_checks: an XComArg is taken for a literal"
