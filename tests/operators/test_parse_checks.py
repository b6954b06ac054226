"""Wrong literals fail when the DAG is parsed; what is only known when a task runs is left alone."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG, XComArg, task

from airflow_provider_ktrain.operators.job_control import (
    DeleteTrainingJobOperator,
    ScaleTrainingJobOperator,
    SuspendTrainingJobOperator,
)
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator
from airflow_provider_ktrain.sensors.training import PyTorchJobSensor, TrainJobSensor
from airflow_provider_ktrain.volumes import ClaimVolume
from tests.leaks import restored_signals

IMAGE = {"image": "i:1"}
JOB = {"job_name": "job"}
WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (
        PyTorchJobOperator,
        {**IMAGE, "logs": "master"},
        r"logs: found 'master', expected one of auto, all, primary, none",
    ),
    (PyTorchJobOperator, {**IMAGE, "logs": {"Launcher": [0]}}, r"logs: found the role 'Launcher', expected Master"),
    (PyTorchJobOperator, {**IMAGE, "workers": -1}, r"workers: invalid parameter; found -1; expected a whole number"),
    (PyTorchJobOperator, {**IMAGE, "replicas": {"Worker": 1.5}}, r"replicas\['Worker'\]: .*found 1.5"),
    (PyTorchJobOperator, {**IMAGE, "gpus": 0.5}, r"gpus: .*found 0.5; expected a whole number, 0 or more"),
    (
        PyTorchJobOperator,
        {**IMAGE, "on_finish_action": "delete"},
        r"on_finish_action: .*found 'delete'; expected one of",
    ),
    (PyTorchJobOperator, {**IMAGE, "on_finish_action": "{{ params.x }}"}, r"on_finish_action: .*expected one of"),
    (PyTorchJobOperator, {**IMAGE, "reattach": "never"}, r"reattach: .*found 'never'; expected one of always"),
    (PyTorchJobOperator, {**IMAGE, "startup_timeout": timedelta(seconds=-1)}, r"startup_timeout: .*expected seconds"),
    (PyTorchJobOperator, {**IMAGE, "hosts": "n1"}, r"hosts: .*found 'n1'; expected a list .*write \['n1'\]"),
    (PyTorchJobOperator, {**IMAGE, "env": {"A": None}}, r"env\['A'\]: .*found None"),
    (PyTorchJobOperator, {**IMAGE, "deferrable": "yes"}, r"deferrable: .*found 'yes'; expected True or False"),
    (PyTorchJobOperator, {**IMAGE, "crash_loop_limit": 0}, r"crash_loop_limit: .*found 0; expected a whole number, 1"),
    (PyTorchJobOperator, {**IMAGE, "tolerations": [{"effect": 1}]}, r"tolerations\[0\]: "),
    (PyTorchJobOperator, {}, r"a PyTorchJob without a manifest needs an image; expected image=...; remedy: set image"),
    (MPIJobOperator, {"workers": 2}, r"a MPIJob without a manifest needs an image"),
    (MPIJobOperator, IMAGE, r"the MPIJob has no Workers, so nothing would run"),
    (TrainJobOperator, {"nodes": 0}, r"nodes: .*found 0; expected a whole number, 1 or more"),
    (TrainJobOperator, {"runtime": ""}, r"runtime: .*found ''"),
    (PyTorchJobSensor, {**JOB, "conditions": ["Done"]}, r"conditions\[0\]: .*found 'Done'; expected some of Created"),
    (TrainJobSensor, {**JOB, "logs": "some"}, r"logs: found 'some', expected one of"),
    (PyTorchJobSensor, {"job_name": "Not a name"}, r"job_name: .*found 'Not a name'"),
    (ScaleTrainingJobOperator, {**JOB, "workers": -1}, r"workers: .*found -1"),
    (ScaleTrainingJobOperator, {**JOB, "workers": None}, r"workers: .*found None"),
    (SuspendTrainingJobOperator, {**JOB, "kind": "TFJob"}, r"kind: .*found 'TFJob'; expected one of MPIJob"),
    (SuspendTrainingJobOperator, {**JOB, "timeout": "5m"}, r"timeout: .*found '5m'"),
    (DeleteTrainingJobOperator, {**JOB, "force": "no"}, r"force: .*found 'no'"),
    (ReapTrainingJobsOperator, {"max_jobs": -1}, r"max_jobs: .*found -1"),
    (ReapTrainingJobsOperator, {"confirm_after": "5m"}, r"confirm_after: .*found '5m'"),
    (ReapTrainingJobsOperator, {"namespaces": ["a", ""]}, r"namespaces: .*found \['a', ''\]"),
    (ReapTrainingJobsOperator, {"dry_run": "False"}, r"dry_run_only: .*found 'False'"),
]


@pytest.mark.parametrize(("operator", "arguments", "error"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_literal_fails_when_the_operator_is_created(
    operator: type[Any], arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{error}") as raised:
        operator(task_id="train", **arguments)
    assert str(raised.value).endswith("\nTask: train")


def test_all_wrong_parameters_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)workers: .*gpus: |gpus: .*workers: "):
        PyTorchJobOperator(task_id="train", image="i:1", workers=-1, gpus=-1)


def test_templates_and_xcom_args_are_left_alone() -> None:
    with DAG("dag", default_args={"image": "{{ params.image }}"}):
        other = TrainJobOperator(task_id="other")
        value: Any = XComArg(other)
        PyTorchJobOperator(
            task_id="train",
            workers="{{ params.n }}",
            gpus=value,
            replicas={"Worker": "{% if a %}1{% endif %}"},
            hosts="{{ params.hosts }}",
            args=["--n", value],
            env={"A": value["a"]},
            namespace="{{ params.namespace }}",
            volumes=[ClaimVolume("{{ params.claim }}", "/data")],
            tolerations=value,
        )
        MPIJobOperator(task_id="mpi", workers=value)
        MPIJobOperator(task_id="manifest", image=None, manifest=value)
        ScaleTrainingJobOperator(task_id="scale", job_name=other.job_name, workers=value, kind="{{ params.kind }}")
        PyTorchJobSensor(task_id="wait", job_name=value)


def test_mapped_and_partial_values_are_left_alone() -> None:
    with DAG("dag"):
        PyTorchJobOperator.partial(task_id="train", logs="all").expand(image=["i:1", "i:2"])
        mapped = PyTorchJobOperator.partial(task_id="more", image="i:1").expand(gpus=[1, -1])
    # as the worker creates the task: `execute` then checks it, and knows the job of an earlier try
    operator: Any = mapped.operator_class(task_id="more", image="i:1", gpus=-1, _airflow_from_mapped=True)
    assert operator.gpus == -1


class SetsItsImage(PyTorchJobOperator):
    """A user's subclass, which sets parameters after the constructor of its base."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(gpus=-1, **kwargs)
        self.gpus = 1


class BuildsItsManifest(PyTorchJobOperator):
    """A user's subclass, which has no image before it is executed."""


def test_subclass_is_checked_after_its_own_constructor() -> None:
    SetsItsImage(task_id="train", image="i:1")
    BuildsItsManifest(task_id="train")
    with pytest.raises(ValueError, match=r"^workers: "):
        BuildsItsManifest(task_id="train", workers=-1)


def test_function_with_a_wrong_literal_fails_when_it_is_called() -> None:
    with DAG("dag"):

        @task.pytorchjob(image="i:1", workers=-1)
        def train() -> int:
            return 1

        with pytest.raises(ValueError, match=r"^workers: .*found -1"):
            train()


DAG_FILE = """\
from airflow.sdk import DAG
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG("wrong"):
    PyTorchJobOperator(task_id="train", image="i:1", logs="master")
"""


def test_import_error_of_airflow_has_the_line_and_the_problem(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wrong.py").write_text(DAG_FILE)
    with restored_signals():
        errors = DagBag(tmp_path).import_errors
    error = next(text for path, text in errors.items() if path.endswith("wrong.py"))
    assert 'PyTorchJobOperator(task_id="train", image="i:1", logs="master")' in error
    assert "ValueError: logs: found 'master', expected one of auto, all, primary, none" in error
    assert len([line for line in error.splitlines() if line.startswith("  File")]) == 2


def test_parsing_imports_no_rules_and_no_engine() -> None:
    """The parameters are checked without the modules that check manifests or talk to a cluster."""
    code = DAG_FILE.replace("master", "all") + (
        "\nimport sys\n"
        "loaded = [m for m in sys.modules if m.startswith('airflow_provider_ktrain.')]\n"
        "print([m for m in loaded if '.engine' in m or m.endswith('_rules') or m.endswith('worker_host')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
