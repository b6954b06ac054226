"""The path of a manifest: it is the same for operators, `ktrain run` and `ktrain check`, and ignores earlier jobs."""

from __future__ import annotations

import argparse
import copy
import io
import json
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_ktrain.cli import main, run
from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.core.checks import Problem
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.names import (
    BACKSTOP_ANNOTATION,
    DEADLINE_ANNOTATION,
    MANIFEST_ANNOTATION,
    SUSPENDED_ANNOTATION,
    Owner,
    TaskKey,
)
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.conditions import FAILED_ANNOTATION, INCOMPLETE_ANNOTATION
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.manifest.code import CodeFile, pack
from airflow_provider_ktrain.core.manifest.deadline import deadline_of
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.loader import Document
from airflow_provider_ktrain.core.manifest.overlay import JobOptions
from airflow_provider_ktrain.core.prepare import Prepared, prepare
from airflow_provider_ktrain.core.state.pods.stopped_pods import STOPPED_PODS_ANNOTATION
from airflow_provider_ktrain.core.text.output import masked
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

from .manifests import JSON, mpijob, pytorchjob, trainjob

MAKE: dict[str, Any] = {"PyTorchJob": pytorchjob, "MPIJob": mpijob, "TrainJob": trainjob}
OPERATORS: dict[str, Any] = {
    "PyTorchJob": PyTorchJobOperator, "MPIJob": MPIJobOperator, "TrainJob": TrainJobOperator,
}  # fmt: skip
CREATED, CREATED_AT = "2026-11-24T10:00:00Z", 1795514400.0
NODE = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "node"}]}}}}}
RUNTIME = {"spec": {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [NODE]}}}}
SERVED = Served(True, RUNTIME)


def read(manifest: Any, options: JobOptions | None = None, **more: Any) -> Prepared:
    return prepare(Document(copy.deepcopy(manifest)), options or JobOptions(), **more)


def saved(manifest: Manifest, **more: Any) -> Manifest:
    """What `kubectl get -o yaml` prints of a job that a task has submitted with everything that it can add."""
    kind = kind_of(manifest["kind"])
    owner = Owner(TaskKey("airflow", "dag", "train", "run", 3), 2, "ti")
    asked: dict[str, Any] = {
        "code": pack([CodeFile("train.py", b"print(1)")]), "run_seconds": 100.0, "checkpoint_root": "s3://b",
        "avoid_nodes": {"gpu-1": "it failed", "gpu-2": "it failed"},
    }  # fmt: skip
    request = JobRequest(kind, owner, 1, read(manifest).manifest, **(asked | more))
    fitted = request.fitted(manifest["apiVersion"])
    served = SERVED if kind.runtimes else None
    job = request.stamped(fitted, "team", "s", attempt=4, now=CREATED_AT - 1.4, served=served)
    job["metadata"]["annotations"] |= {
        SUSPENDED_ANNOTATION: "ti", FAILED_ANNOTATION: json.dumps({"reason": "Failed", "message": "exit code 1"}),
        STOPPED_PODS_ANNOTATION: json.dumps({"job": "u", "pods": []}), INCOMPLETE_ANNOTATION: "Master 0 ended",
    }  # fmt: skip
    job["metadata"] |= {"creationTimestamp": CREATED, "uid": "u", "resourceVersion": "7"}
    holder = job["spec"] if kind.runtimes else job["spec"].setdefault("runPolicy", {})
    holder["suspend"] = True
    if kind.runtimes:
        job["spec"]["runtimePatches"].append({"manager": "kueue.x-k8s.io/manager", "trainingRuntimeSpec": {}})
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "Failed"}]}
    return job


def resubmitted(manifest: Manifest) -> Manifest:
    """The same manifest, as a cluster gets it from a task that adds nothing."""
    kind = kind_of(manifest["kind"])
    request = JobRequest(kind, Owner(TaskKey("a", "d", "t", "r"), 1, "ti"), 1, manifest)
    served = SERVED if kind.runtimes else None
    fitted = request.fitted(manifest["apiVersion"])
    job = request.stamped(fitted, "team", "s", attempt=1, now=0.0, served=served)
    del job["metadata"]["annotations"][MANIFEST_ANNOTATION]  # a saved manifest has more fields, such as its namespace
    return job


@pytest.mark.parametrize("kind", MAKE)
def test_saved_job_is_submitted_like_the_manifest_that_it_was_made_of(kind: str) -> None:
    own = MAKE[kind]()
    prepared = read(saved(own))
    expected = resubmitted(read(own).manifest)
    if kind != "TrainJob":  # set with the backstop
        expected["spec"]["runPolicy"] = {"cleanPodPolicy": "Running"}
    if kind == "MPIJob":  # with code, a Worker needs a command, which the manifest has
        assert own["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"]
    assert resubmitted(prepared.manifest) == expected
    assert [problem.code for problem in prepared.problems] == [*(p.code for p in read(own).problems), "saved"]
    assert read(prepared.manifest).manifest == prepared.manifest
    assert deadline_of(prepared.manifest) is None


@pytest.mark.parametrize("kind", MAKE)
def test_limits_and_nodes_of_the_user_are_kept(kind: str) -> None:
    own = MAKE[kind]()
    if kind == "TrainJob":
        own["spec"]["activeDeadlineSeconds"] = 50
    else:
        own["spec"]["runPolicy"] = {"activeDeadlineSeconds": 50, "cleanPodPolicy": "None"}
    again = read(saved(own)).manifest
    holder = again["spec"] if kind == "TrainJob" else again["spec"]["runPolicy"]
    assert holder["activeDeadlineSeconds"] == 50
    assert "activeDeadlineSeconds" not in json.dumps(again).replace('"activeDeadlineSeconds": 50', "")


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("later", [3.0, 3600.0, -120.0], ids=["clock ahead", "resumed", "waited for quota"])
def test_deadline_of_a_saved_job_is_left_out_whenever_it_was_created(kind: str, later: float) -> None:
    job = saved(MAKE[kind]())
    job["metadata"]["annotations"][DEADLINE_ANNOTATION] = str(CREATED_AT + later + 100)
    assert "activeDeadlineSeconds" not in json.dumps(read(job).manifest)


@pytest.mark.parametrize("backstop", ["400", "many", "", None, []])
def test_limit_that_the_task_has_not_set_is_kept(backstop: Any) -> None:
    own = pytorchjob()
    own["spec"]["runPolicy"] = {"activeDeadlineSeconds": 280}  # that of the task was 400
    job = saved(own)
    job["metadata"]["annotations"] |= {DEADLINE_ANNOTATION: str(CREATED_AT - 20), BACKSTOP_ANNOTATION: backstop}
    assert read(job).manifest["spec"]["runPolicy"]["activeDeadlineSeconds"] == 280


def test_required_nodes_of_the_user_are_kept() -> None:
    own = pytorchjob()
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}, {}]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "zone", "labelSelector": {"matchLabels": {"ktrain.airflow/dag-id": "other"}}}
            ]
        },
    }
    own["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["affinity"] = affinity
    again = read(saved(own)).manifest
    assert again["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["affinity"] == affinity


def test_options_that_the_patches_of_a_trainjob_have_are_kept() -> None:
    own = read(trainjob(), JobOptions(node_selector={"gpu": "a100"})).manifest
    again = resubmitted(read(saved(own)).manifest)
    assert again == resubmitted(own)
    assert "a100" in json.dumps(again)


def test_manifest_without_our_marks_is_left_as_it_is() -> None:
    own = pytorchjob()
    own["spec"]["runPolicy"] = {"suspend": True, "activeDeadlineSeconds": 10**6}
    container = own["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "KTRAIN_CHECKPOINT_DIR", "value": "/data"}, {"name": "KTRAIN_TRY", "value": "7"}]
    prepared = read(own, keeps_name=True)
    assert prepared.manifest == own
    assert prepared.changes == []
    assert [problem.code for problem in prepared.problems] == ["reserved-variable", "suspended"]


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "", "1 2"])
def test_deadline_that_is_no_number_is_none(text: str) -> None:
    assert deadline_of({"metadata": {"annotations": {DEADLINE_ANNOTATION: text}}}) is None


def test_option_for_a_manifest_of_another_shape_reports_the_shape() -> None:
    wrong = pytorchjob()
    wrong["spec"]["pytorchReplicaSpecs"]["Worker"] = [1]
    prepared = read(wrong, JobOptions(workers=3))
    assert [(p.code, p.path) for p in prepared.errors] == [("type", "$.spec.pytorchReplicaSpecs.Worker")]
    del wrong["spec"]["pytorchReplicaSpecs"]["Worker"]
    with pytest.raises(ManifestError, match="has no replica type Worker"):
        read(wrong, JobOptions(workers=3))


# the callers


def of_operator(manifest: Manifest) -> tuple[Manifest | None, str]:
    task = OPERATORS[manifest["kind"]](task_id="train", manifest=manifest)
    try:
        return task.build_manifest(task.manifest), ""
    except ManifestError as e:
        return None, str(e)


def of_run(file: Path) -> tuple[Manifest | None, str]:
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    args = parser.parse_args(["run", str(file)], argparse.Namespace(program=[]))
    try:
        return run.load(args, Console())[0].manifest, ""
    except run.InvalidManifest as e:
        return None, masked(str(e))


def of_check(file: Path) -> tuple[int, list[tuple[str, Problem]]]:
    out = io.StringIO()
    with redirect_stdout(out):
        status = main(["check", str(file), "--output", "json"])
    found = [(f"{p.pop('file')}:{p.pop('line')}: ", Problem(**p)) for p in json.loads(out.getvalue())]
    return status, [(at, problem) for at, problem in found if problem.level == "error"]


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in paths(item, (*path, key)))]


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A manifest, perhaps saved from a job, with a wrong value somewhere or an old field."""
    made = MAKE[draw(st.sampled_from(sorted(MAKE)))]()
    manifest = draw(st.sampled_from([made, saved(made), saved(made, code=None, run_seconds=None)]))
    if draw(st.booleans()):
        *parents, key = draw(st.sampled_from([path for path in paths(manifest) if path and path[0] == "spec"]))
        holder = manifest
        for parent in parents:
            holder = holder[parent]
        holder[key] = draw(JSON)
    if isinstance(manifest["spec"], dict) and draw(st.booleans()):
        manifest["spec"]["cleanPodPolicy"] = "All"
    return manifest


class Quoting(yaml.SafeDumper):
    """Quotes text such as 1e100, which is text in YAML 1.1 and a number where Kubernetes reads it."""


Quoting.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+$"), "-+.0123456789")


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(manifests())
def test_operators_run_and_check_read_the_same_manifest_and_see_the_same_problems(manifest: Manifest) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(yaml.dump(manifest, Dumper=Quoting, sort_keys=False))
        by_operator, by_run, (status, errors) = of_operator(manifest), of_run(file), of_check(file)
    assert by_operator[0] == by_run[0]
    assert status == int(bool(errors)) == int(by_run[0] is None)
    assert by_run[1] == "\n".join(f"{at}{problem}" for at, problem in errors)
    assert "\n".join(str(problem) for _, problem in errors) in by_operator[1]
