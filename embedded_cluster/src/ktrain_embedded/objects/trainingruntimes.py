"""TrainingRuntime and ClusterTrainingRuntime: the CEL rule of their schema, and the Trainer's validating webhooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ktrain_embedded.objects.errors import Problem, denied
from ktrain_embedded.objects.resources import Obj

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"  # label of a Job template: the step of the TrainJob
SUPPORT = ("trainer.kubeflow.org/support", "deprecated")  # label and value of a deprecated runtime
POLICY_URL = "https://www.kubeflow.org/docs/components/trainer/operator-guides/runtime/#runtime-deprecation-policy"
SOURCES = ("torch", "mpi", "jax", "xgboost", "flux")
#: The container that the job of each step must have.
CONTAINERS = {
    "trainer": "node", "model-initializer": "model-initializer", "dataset-initializer": "dataset-initializer",
}  # fmt: skip


def rules(runtime: Obj, old: Obj | None) -> list[Problem]:
    """Return the violations of the schema's CEL rule."""
    policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
    if sum(source in policy for source in SOURCES) < 2:
        return []
    return [("FieldValueInvalid", "Invalid value: Only one of the policy can be configured", "spec.mlPolicy")]


def validator(kind: str) -> Callable[[Any, Obj, Obj | None], list[str]]:
    """The validating webhook for runtimes of this kind. It returns warnings, and raises ApiError 403 for a denial."""

    def validate(_: Any, runtime: Obj, old: Obj | None) -> list[str]:
        problems = list(_replicated_jobs(runtime))
        if problems:
            raise denied(f"validator.{kind.lower()}.trainer.kubeflow.org", problems)
        return deprecation(kind, runtime) if old is None else []

    return validate


def deprecation(what: str, runtime: Obj) -> list[str]:
    """The warning about a deprecated runtime.

    :param what: how the message names it: its kind, or `Referenced` and its kind.
    """
    label, value = SUPPORT
    if (runtime["metadata"].get("labels") or {}).get(label) != value:
        return []
    name = runtime["metadata"].get("name")
    return [
        f'{what} "{name}" is deprecated and will be removed in a future release of Kubeflow Trainer. See runtime '
        f"deprecation policy: {POLICY_URL}"
    ]


def step_of(replicated: Obj) -> str:
    """The step of a replicated job: trainer, dataset-initializer, model-initializer, or ""."""
    return str(((replicated["template"].get("metadata") or {}).get("labels") or {}).get(ANCESTOR, ""))


def _replicated_jobs(runtime: Obj) -> Iterator[str]:
    jobs = (runtime["spec"]["template"].get("spec") or {}).get("replicatedJobs") or ()
    for i, job in enumerate(jobs):
        path = f"spec.template.spec.replicatedJobs[{i}]"
        step = step_of(job)
        if step not in CONTAINERS:
            continue
        if job.get("replicas", 1) != 1:
            yield f"{path}.replicas: Invalid value: {job['replicas']}: always must be 1"
        pod = ((job["template"].get("spec") or {}).get("template") or {}).get("spec") or {}
        containers = pod.get("containers") or []
        if all(container.get("name") != CONTAINERS[step] for container in containers):
            shown = json.dumps(containers, separators=(",", ":")) if containers else "null"
            why = f"must contain the required container for the ancestor: {step}"
            yield f"{path}.template.spec.template.spec.containers: Invalid value: {shown}: {why}"
