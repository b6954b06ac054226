"""Lineage of trainings, taken by Airflow's OpenLineage provider and written by its file transport."""

from __future__ import annotations

import datetime
import json
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Asset, TaskInstanceState
from airflow.sdk.log import mask_secret
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.state.pods.usage import Usage
from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.exceptions import TrainingUserCodeError
from airflow_provider_ktrain.operators.openlineage import FACET, PRODUCER
from airflow_provider_ktrain.operators.training import (
    MPIJobOperator,
    PyTorchJobOperator,
    TrainingJobOperator,
    TrainJobOperator,
)
from tests.operators.task_instance import DAG_ID, Instance

pytest.importorskip("airflow.providers.openlineage", reason="needs apache-airflow-providers-openlineage")

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "openlineage" / "KtrainTrainingRunFacet.json"
JOB = {"kind": "PyTorchJob", "namespace": "ml", "name": "train-1", "uid": "u1", "code": "c0de"}
STATUS = {"job": JOB}
USAGE = Usage(requested=40.0, queued=10.0, held=30.0, wasted=5.0, gpus=3).as_dict()
Event = dict[str, Any]
Emit = Callable[[TrainingJobOperator, TaskInstanceState], Event]


@pytest.fixture
def emit(tmp_path: Path) -> Emit:
    """Let the provider extract the lineage of an operator and write the event; returns what it has written."""
    from airflow.providers.openlineage.extractors import ExtractorManager
    from airflow.providers.openlineage.plugins.adapter import OpenLineageAdapter
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport.file import FileConfig, FileTransport

    written = tmp_path / "events.jsonl"
    transport = FileTransport(FileConfig(log_file_path=str(written), append=True))
    adapter = OpenLineageAdapter(OpenLineageClient(transport=transport))
    now = datetime.datetime.now(datetime.UTC).isoformat()
    common: dict[str, Any] = dict.fromkeys(("nominal_start_time", "nominal_end_time", "owners", "tags"))
    common |= {"run_id": str(uuid.uuid4()), "job_name": "dag.train", "job_description": None}

    def emitted(operator: TrainingJobOperator, state: TaskInstanceState) -> Event:
        found = ExtractorManager().extract_metadata(
            dagrun=types.SimpleNamespace(run_id="run"), task=operator, task_instance_state=state, task_instance=None
        )
        if state is TaskInstanceState.RUNNING:
            adapter.start_task(task=found, event_time=now, **common)
        elif state is TaskInstanceState.FAILED:
            adapter.fail_task(task=found, end_time=now, error=ValueError("why"), **common)
        else:
            adapter.complete_task(task=found, end_time=now, **common)
        event: Event = json.loads(written.read_text().splitlines()[-1])
        return event

    return emitted


def made(operator: type[TrainingJobOperator], *, folder: Path | None = None, **parameters: Any) -> TrainingJobOperator:
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    with DAG(DAG_ID, schedule=None, start_date=start, template_searchpath=str(folder) if folder else None):
        return operator(task_id="train", **parameters)


def facet(event: Event) -> dict[str, Any]:
    """The training's facet of an event, after its validation."""
    found: dict[str, Any] = event["run"]["facets"][FACET]
    base = Resource.from_contents(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"RunFacet": {}}}
    )
    schema = json.loads(SCHEMA.read_text())
    spec = "https://openlineage.io/spec/2-0-2/OpenLineage.json"
    Draft202012Validator(schema, registry=Registry().with_resource(spec, base)).validate({FACET: found})
    (definition,) = schema["$defs"]
    assert found.pop("_producer") == PRODUCER
    assert found.pop("_schemaURL") == f"{PRODUCER}#/$defs/{definition}"
    assert found.keys() <= schema["$defs"][definition]["allOf"][1]["properties"].keys()
    return found


def resumed(operator: TrainingJobOperator, outcome: Outcome) -> None:
    """Resume an operator object that has not submitted the job, as in a worker after a deferral."""
    ti = types.SimpleNamespace(
        dag_id=DAG_ID, task_id="train", run_id="run", map_index=-1, try_number=1, max_tries=0, id="ti",
        xcom_push=lambda key, value: None,
    )  # fmt: skip
    operator.execute_complete({"ti": ti}, event_of(outcome))  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("operator", "parameters", "expected"),
    [
        (
            PyTorchJobOperator,
            {"image": "train:1", "workers": 2, "gpus": 1, "namespace": "ml"},
            {
                "job": {"kind": "PyTorchJob", "namespace": "ml"},
                "replicas": {"Master": 1, "Worker": 2},
                "images": {"Master": "train:1", "Worker": "train:1"},
                "gpus": 3,
            },
        ),
        (
            MPIJobOperator,
            {"image": "mpi:1", "workers": 2, "gpus": "{{ 2 }}"},
            {
                "job": {"kind": "MPIJob"},
                "replicas": {"Launcher": 1, "Worker": 2},
                "images": {"Launcher": "mpi:1", "Worker": "mpi:1"},
                "gpus": 4,
            },
        ),
        (
            TrainJobOperator,
            {"runtime": "torch-distributed", "nodes": 2, "gpus": 4},
            {"job": {"kind": "TrainJob"}, "replicas": {"node": 2}, "images": {}, "gpus": 8},
        ),
    ],
)
def test_start_event_has_what_the_task_requests(
    emit: Emit, operator: type[TrainingJobOperator], parameters: dict[str, Any], expected: dict[str, Any]
) -> None:
    task = made(operator, **parameters)
    task.gpus = 2 if task.gpus == "{{ 2 }}" else task.gpus  # as rendered
    assert facet(emit(task, TaskInstanceState.RUNNING)) == expected


def train() -> None:
    """The program of a job."""


def test_start_event_of_a_function_has_what_it_requests(emit: Emit) -> None:
    task = made(_PyTorchJobDecoratedOperator, python_callable=train, image="train:1", op_args=(), op_kwargs={})
    assert facet(emit(task, TaskInstanceState.RUNNING))["replicas"] == {"Master": 1}


def test_start_event_has_the_hash_of_the_code(emit: Emit, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('hello')")
    task = made(PyTorchJobOperator, folder=tmp_path, image="i", command=["python"], code="code")
    assert len(facet(emit(task, TaskInstanceState.RUNNING))["codeHash"]) == 16


def test_start_event_of_an_invalid_task_has_the_kind(emit: Emit) -> None:
    task = made(PyTorchJobOperator, manifest="{{ params.manifest }}")
    task.manifest = "no: manifest\nof: a job\n"
    assert facet(emit(task, TaskInstanceState.RUNNING)) == {"job": {"kind": "PyTorchJob"}}


def test_error_in_our_code_leaves_out_the_facet(emit: Emit) -> None:
    """The provider handles errors of operators: the event is sent and the task continues."""

    class Broken(PyTorchJobOperator):
        def _requested(self, *, with_code: bool) -> dict[str, Any]:
            raise RuntimeError("broken")

    event = emit(made(Broken, image="i"), TaskInstanceState.RUNNING)
    assert event["eventType"] == "START"
    assert FACET not in event["run"]["facets"]


def test_other_accelerators_are_counted_by_their_names(emit: Emit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR", "google.com/tpu")
    task = made(PyTorchJobOperator, image="train:1", workers=1, gpus=4)
    requested = facet(emit(task, TaskInstanceState.RUNNING))
    assert (requested["gpus"], requested["resource"]) == (8, "google.com/tpu")
    slices = Usage(requested=2.0, held=2.0, gpus=1, resource="nvidia.com/mig-1g.5gb")
    used = Usage(6.0, 0.0, 6.0, 0.0, 7, "google.com/tpu", (slices,), 1).as_dict()
    resumed(task, Outcome("Succeeded", True, usage=used, status=STATUS))
    found = facet(emit(task, TaskInstanceState.SUCCESS))
    assert (found["gpus"], found["resource"], found["gpuSeconds"]["held"]) == (7, "google.com/tpu", 6)
    assert found["otherAccelerators"]["nvidia.com/mig-1g.5gb"]["gpuSeconds"]["held"] == 2
    assert found["unknownClaims"] == 1


def test_complete_event_after_a_deferral_has_what_ran(emit: Emit) -> None:
    task = made(PyTorchJobOperator, image="train:1", workers=2, gpus=1)
    result = {"model_uri": "s3://key:secret@models/mnist/7/?X-Amz-Signature=secret", "loss": 0.1}
    resumed(task, Outcome("Succeeded", True, usage=USAGE, status=STATUS, result=result))
    event = emit(task, TaskInstanceState.SUCCESS)
    assert facet(event) == {
        "job": {key: value for key, value in JOB.items() if key != "code"},
        "replicas": {"Master": 1, "Worker": 2},
        "images": {"Master": "train:1", "Worker": "train:1"},
        "gpus": 3,
        "codeHash": "c0de",
        "phase": "Succeeded",
        "gpuSeconds": {"requested": 40.0, "queued": 10.0, "held": 30.0, "wasted": 5.0},
    }
    assert [(found["namespace"], found["name"]) for found in event["outputs"]] == [("s3://models", "mnist/7")]
    assert "secret" not in json.dumps(event)


def test_datasets_of_the_task_are_kept(emit: Emit) -> None:
    """The provider takes inlets and outlets only if the operator returns no dataset."""
    task = made(PyTorchJobOperator, image="i", outlets=[Asset("s3://models/declared")])
    resumed(task, Outcome("Succeeded", True, status=STATUS, result={"model_uri": "s3://models/other"}))
    (output,) = emit(task, TaskInstanceState.SUCCESS)["outputs"]
    assert (output["namespace"], output["name"]) == ("s3://models", "declared")


def test_fail_event_has_the_cause_without_secrets(emit: Emit) -> None:
    mask_secret("hunter2-hunter2")
    cause = Cause(
        Category.USER_CODE,
        "Worker 1 failed: bad password hunter2-hunter2, token=swordfish",
        "last line of the log",
        "Fix it.",
        "Worker 1",
    )
    task = made(
        PyTorchJobOperator, image="i", command=["train", "--lr=1"], env={"API_KEY": "swordfish"}, kubernetes_conn_id="k"
    )
    with pytest.raises(TrainingUserCodeError):
        resumed(task, Outcome("Failed", False, usage=USAGE, status=STATUS, cause=cause.as_dict()))
    event = emit(task, TaskInstanceState.FAILED)
    found = facet(event)
    assert (found["phase"], found["gpus"]) == ("Failed", 3)
    assert found["cause"] == {
        "category": "user code",
        "summary": "Worker 1 failed: bad password ***, token=***",
        "resolution": "Fix it.",
        "replica": "Worker 1",
    }
    assert event["run"]["facets"]["errorMessage"]["message"] == "why"
    assert not [text for text in ("last line", "swordfish", "--lr") if text in json.dumps(event)]


def test_fail_event_before_the_submission_has_what_the_task_requests(emit: Emit) -> None:
    task = made(PyTorchJobOperator, image="i")
    assert facet(emit(task, TaskInstanceState.FAILED))["job"] == {"kind": "PyTorchJob"}


@pytest.mark.parametrize("deferrable", [False, True])
def test_events_of_a_training_on_a_cluster(emit: Emit, instance: Instance, deferrable: bool) -> None:
    command = ["sh", "-c", 'sleep 2; echo \'KTRAIN_RESULT {"model_uri": "gs://models/mnist"}\'']
    instance.execute(command=command, deferrable=deferrable, workers=1)
    assert instance.operator is not None
    if deferrable:
        instance.wait_ended()
        instance.fail("Trigger failure", traceback="ConnectionError: lost")
    event = emit(instance.operator, TaskInstanceState.SUCCESS)
    found = facet(event)
    assert {key: found["job"][key] for key in ("kind", "name")} == {"kind": "PyTorchJob", "name": instance.job_name}
    assert found["replicas"] == {"Master": 1, "Worker": 1}
    assert found["gpus"] == 2
    assert found["gpuSeconds"]["held"] > 0
    assert [(output["namespace"], output["name"]) for output in event["outputs"]] == [("gs://models", "mnist")]
