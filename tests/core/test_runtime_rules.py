from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.checks.trainjob_rules import judge_runtime

from .manifests import runtime_patch, trainjob

Json = dict[str, Any]
NEVER: Json = {"backoffLimit": 0}
LABELLED = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}


def job(name: str = "node", metadata: Json | None = None, policy: str | None = None, **spec: Any) -> Json:
    pod: Json = {"containers": [{"name": "node"}], **({"restartPolicy": policy} if policy else {})}
    return {"name": name, "template": {"metadata": metadata or {}, "spec": {**spec, "template": {"spec": pod}}}}


def runtime(*jobs: Json, ml: Json | None = None, **jobset: Any) -> Json:
    return {"spec": {"mlPolicy": ml or {"torch": {}}, "template": {"spec": {"replicatedJobs": list(jobs), **jobset}}}}


def found(manifest: Json, of: Json) -> list[tuple[str, str]]:
    return [(p.level.value, p.code) for p in judge_runtime(manifest, of, 33)]


QUICK = runtime(job(metadata=LABELLED, policy="Never", **NEVER))
MPI = {"mpi": {"runLauncherAsNode": True}}
MPI_RUNTIME = runtime(job("node", **NEVER), job("launcher", LABELLED, **NEVER), ml=MPI)


DEPRECATED = {"metadata": {"labels": {"trainer.kubeflow.org/support": "deprecated"}}}
PYTHON = ["python3", "train.py"]
TWO_NODES = runtime(job(metadata=LABELLED, **NEVER), ml={"torch": {}, "numNodes": 2})


def without(field: str, **trainer: Any) -> Json:
    manifest = trainjob(**trainer)
    del manifest["spec"]["trainer"][field]
    return manifest


def with_patch(job_name: str) -> Json:
    manifest = trainjob()
    manifest["spec"]["runtimePatches"] = [runtime_patch("example.com/me", job_name, nodeSelector={"a": "b"})]
    return manifest


@pytest.mark.parametrize(
    ("manifest", "of", "problems"),
    [
        (trainjob(), QUICK, []),
        (with_patch("worker"), QUICK, [("error", "runtime-patch")]),
        (trainjob(), runtime(job("n" * 20, **NEVER)), [("error", "name-length")]),
        (trainjob(env=[{"name": "PET_NNODES"}]), QUICK, [("error", "reserved-env")]),
        (trainjob(env=[{"name": "OMPI_MCA_plm_rsh_args"}]), QUICK, []),
        (trainjob(env=[{"name": "PET_NNODES"}]), runtime(job(**NEVER), ml={"jax": {}}), []),
        (trainjob(), runtime(job(**NEVER), ttlSecondsAfterFinished=5), [("warning", "ttl")]),
        (trainjob(), {**QUICK, **DEPRECATED}, [("warning", "deprecated-runtime")]),
        (trainjob(command=PYTHON), QUICK, [("warning", "torchrun")]),
        (trainjob(command=PYTHON, nodes=1), TWO_NODES, []),
        (without("numNodes", command=PYTHON), TWO_NODES, [("warning", "torchrun")]),
        (without("numNodes", command=PYTHON), QUICK, []),
        (trainjob(command=PYTHON), runtime(job(**NEVER), ml={"jax": {}}), []),
        (trainjob(command=PYTHON, image=None), MPI_RUNTIME, []),
        (trainjob(image=None), MPI_RUNTIME, []),
        (trainjob(image=None, nodes=1), MPI_RUNTIME, [("warning", "node-count")]),
        (trainjob(), MPI_RUNTIME, [("warning", "trainer-scope")]),
        (trainjob(), runtime(job("launcher", LABELLED, **NEVER), ml=MPI), [("error", "node-count")]),
        (trainjob(), runtime(job("launcher", LABELLED, **NEVER), ml={"mpi": {}}), [("warning", "node-count")]),
    ],
)
def test_problems_of_a_job_on_its_runtime(manifest: Json, of: Json, problems: list[tuple[str, str]]) -> None:
    assert found(manifest, of) == problems
    assert all(p.hint for p in judge_runtime(manifest, of, 33))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, "up to 5 minutes"),  # recording 51i: 5 minutes and 29 seconds
        ({"policy": "Never"}, "up to 5 minutes"),
        ({"backoffLimit": 4}, "up to 1 minute before"),
        ({"backoffLimit": 3}, ""),
        ({"backoffLimit": 0}, ""),
    ],
)
def test_restarts_that_delay_a_failure_are_reported(spec: Json, text: str) -> None:
    problems = list(judge_runtime(trainjob(), runtime(job(**spec)), 33))
    assert [p.code for p in problems] == (["slow-failure"] if text else [])
    assert all(text in p.message for p in problems)
