"""`ktrain check --server`: the requests to a cluster before a job exists, over HTTP. Nothing is ever created."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from airflow_provider_ktrain.cli import job_file, kubeconfig, main
from airflow_provider_ktrain.core.checks import Problem, rbac
from airflow_provider_ktrain.core.kinds import MPIJOB, kind_of
from airflow_provider_ktrain.core.manifest.code import CodeFile, pack
from airflow_provider_ktrain.core.manifest.loader import Document
from airflow_provider_ktrain.core.manifest.overlay import JobOptions
from airflow_provider_ktrain.core.prepare import prepare
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.submit.preflight import preflight
from tests import apiserver
from tests.apiserver import ApiServer, InThread, Request, Response, failure
from tests.clusters import REAL, TestCluster, in_namespace, least_rights, require, serves, with_token
from tests.core.manifests import DATA, mpijob, pytorchjob
from tests.job_control.conftest import Check
from tests.job_control.jobs import Jobs

Object = dict[str, Any]


def codes(problems: list[Object]) -> list[tuple[str, str]]:
    return [(p["level"], p["code"]) for p in problems]


def queued(manifest: Object) -> Object:
    manifest["metadata"]["labels"] = {QUEUE_LABEL: "team-a"}
    return manifest


@pytest.mark.parametrize("manifest", [pytorchjob(), mpijob("v1")], ids=["pytorchjob", "mpijob"])
def test_valid_manifest_has_no_problem_and_is_not_created(
    cluster: TestCluster, jobs: Jobs, check: Check, manifest: Object
) -> None:
    require(cluster, kind_of(manifest["kind"]), "v1")
    before = jobs.names()
    assert check(manifest, cluster) == (0, [])
    del manifest["metadata"]["name"]  # the operators set one
    assert check(manifest, cluster) == (0, [])
    assert jobs.names() <= before


def test_manifest_for_the_other_mpi_operator_has_a_remedy(cluster: TestCluster, check: Check) -> None:
    require(cluster, MPIJOB, "v1")
    status, (problem,) = check(mpijob("v2beta1"), cluster)
    assert status == 1
    assert (problem["code"], problem["path"], problem["found"], problem["expected"]) == (
        "not-served",
        "$.apiVersion",
        "kubeflow.org/v2beta1",
        "kubeflow.org/v1",
    )
    assert "the cluster runs training-operator" in problem["hint"]


def test_old_fields_that_are_converted_are_not_an_error(cluster_v2: TestCluster, check: Check) -> None:
    require(cluster_v2, MPIJOB, "v2beta1")
    manifest = mpijob("v2beta1")
    manifest["spec"]["cleanPodPolicy"] = "Running"  # submitted under runPolicy
    assert check(manifest, cluster_v2)[0] == 0
    assert codes(check(manifest, cluster_v2)[1]) == [("warning", "legacy-run-policy")]


def test_missing_namespace_is_an_error(cluster: TestCluster, check: Check) -> None:
    status, (problem,) = check(pytorchjob(), cluster, "--namespace", "nowhere")
    assert status == 1
    assert (problem["code"], problem["found"]) == ("namespace", "nowhere")
    assert problem["hint"] == "create it: kubectl create namespace nowhere"
    elsewhere = pytorchjob()
    elsewhere["metadata"]["namespace"] = "elsewhere"
    (problem,) = check(elsewhere, cluster.kubeconfig)[1]
    assert problem["found"] == "elsewhere"


@pytest.mark.usefixtures("without_kueue")
def test_queue_without_kueue_is_a_warning(cluster: TestCluster, check: Check) -> None:
    status, (problem,) = check(queued(pytorchjob()), cluster)
    assert (status, problem["level"], problem["code"]) == (0, "warning", "queue")
    assert problem["path"] == "$.metadata.labels['kueue.x-k8s.io/queue-name']"
    assert "Kueue is not installed" in problem["message"]


def test_rejection_by_the_server_is_reported(cluster: TestCluster, check: Check) -> None:
    manifest = pytorchjob()
    manifest["spec"]["runPolicy"] = {"managedBy": "somebody"}
    status, (problem,) = check(manifest, cluster)
    assert (status, problem["code"]) == (1, "refused")
    assert "managedBy" in problem["message"]


def test_unknown_field_that_the_server_refuses_is_one_error(cluster: TestCluster, check: Check) -> None:
    """The schema that the embedded cluster publishes says nothing of pods, and the cluster refuses the field."""
    if REAL:
        pytest.skip("needs a schema without the fields of pods")
    status, problems = check(pytorchjob(newInKubernetes=1), cluster)
    assert status == 1
    assert codes(problems) == [("error", "unknown-field")] * 2  # of Master and Worker


def test_error_of_our_checks_is_reported_once(cluster: TestCluster, check: Check) -> None:
    manifest = yaml.safe_load((DATA / "practitioner-nccl.yaml").read_text())
    status, problems = check(manifest, cluster)
    assert status == 1
    assert [c for level, c in codes(problems) if level == "error"] == ["container-name"] * 2 + ["wrong-list"] * 2


# ---- rights


def role(cluster: TestCluster, name: str, rules: list[Object], folder: pathlib.Path) -> pathlib.Path:
    """A kubeconfig of a service account with only these rights in the namespace of the tests."""
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(least_rights(cluster, name, rules)))
    return path


def test_printed_role_is_enough(cluster: TestCluster, check: Check, tmp_path: pathlib.Path) -> None:
    kubeconfig = role(cluster, "enough", rbac.rules(), tmp_path)
    assert check(pytorchjob(), kubeconfig) == (0, [])
    if serves(cluster, "kubeflow.org", "v1", "mpijobs"):
        assert check(mpijob("v1"), kubeconfig) == (0, [])


@pytest.mark.parametrize(("code", "missing"), [(True, 0), (False, 1)])
def test_rights_for_code_are_checked_if_the_job_has_code(
    cluster: TestCluster, tmp_path: pathlib.Path, code: bool, missing: int
) -> None:
    path = role(cluster, f"code-{code}".lower(), rbac.rules(code=code), tmp_path)
    asked = job_file.request(prepare(Document(pytorchjob()), JobOptions()), code=pack([CodeFile("train.py", b"")]))
    chosen = kubeconfig.target(argparse.Namespace(kubeconfig=str(path), context=None, namespace=None))

    async def ask() -> list[Problem]:
        api = Api(chosen.make_client)
        try:
            return await preflight(api, asked, cluster.namespace)
        finally:
            await api.close()

    problems = asyncio.run(ask())
    assert [(p.level, p.code) for p in problems] == [("error", "rights")] * missing
    command = f"`ktrain rbac --code --namespace {cluster.namespace} --service-account NAMESPACE:NAME`"
    assert all(command in p.hint for p in problems)
    assert all("no right to create, get configmaps" in p.message for p in problems)


def test_each_missing_right_is_reported(cluster: TestCluster, check: Check, tmp_path: pathlib.Path) -> None:
    granted = {rule["resources"][0]: rule for rule in rbac.rules()}
    jobs = {**granted["pytorchjobs"], "verbs": ["create", "get", "list", "patch"]}
    status, problems = check(pytorchjob(), role(cluster, "lacking", [jobs, granted["pods"]], tmp_path))
    assert status == 1
    assert codes(problems) == [*[("error", "rights")] * 2, *[("warning", "rights")] * 3]
    assert [p["message"] for p in problems] == [
        f"no right to watch, delete pytorchjobs.kubeflow.org in namespace {cluster.namespace}",
        f"no right to get pods/log in namespace {cluster.namespace}",
        f"no right to list, watch events in namespace {cluster.namespace}",
        f"no right to get persistentvolumeclaims in namespace {cluster.namespace}",
        f"no right to get services in namespace {cluster.namespace}",
    ]
    assert all(f"ktrain rbac --namespace {cluster.namespace}" in p["hint"] for p in problems)


# ---- the connection


def test_unreachable_cluster_gives_exit_status_2(
    cluster: TestCluster, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kubeconfig = tmp_path / "job.yaml", tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(pytorchjob()))
    assert main(["check", str(file), "--server", "--kubeconfig", str(kubeconfig)]) == 2
    assert f"the kubeconfig {kubeconfig} does not exist" in capsys.readouterr().err
    away = with_token(cluster.kubeconfig, "expired")
    for named in away["clusters"]:
        named["cluster"]["server"] = "https://127.0.0.1:1"
    kubeconfig.write_text(yaml.safe_dump(away))
    assert main(["check", str(file), "--server", "--kubeconfig", str(kubeconfig)]) == 2
    err = capsys.readouterr().err
    assert "the cluster can't be reached. Check --kubeconfig, --context or KUBECONFIG, and `kubectl version`." in err
    kubeconfig.write_text(yaml.safe_dump(with_token(cluster.kubeconfig, "expired")))
    assert main(["check", str(file), "--server", "--kubeconfig", str(kubeconfig)]) == 2
    assert "refused the credentials" in capsys.readouterr().err
    assert main(["check", str(file), "--server", "--kubeconfig", str(cluster.kubeconfig), "--context", "none"]) == 2
    assert "--context: found 'none', expected one of" in capsys.readouterr().err


def test_context_selects_the_cluster(cluster: TestCluster, check: Check, tmp_path: pathlib.Path) -> None:
    kubeconfig = in_namespace(yaml.safe_load(cluster.kubeconfig.read_text()), cluster.namespace)
    used = next(c["context"] for c in kubeconfig["contexts"] if c["name"] == kubeconfig["current-context"])
    kubeconfig["contexts"].append({"name": "away", "context": {**used, "namespace": "far"}})
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    assert check(pytorchjob(), path) == (0, [])
    (problem,) = check(pytorchjob(), path, "--context", "away")[1]
    assert (problem["code"], problem["found"]) == ("namespace", "far")


# ---- by fixed responses: Kueue, and a published schema

KUEUE = "/apis/kueue.x-k8s.io"
QUEUE = f"{KUEUE}/v1beta2/namespaces/default/localqueues/team-a"
SCHEMA = "/openapi/v3/apis/kubeflow.org/v1"
JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
SERVED: dict[str, Object | int] = {
    "/apis/kubeflow.org": {"versions": [{"version": "v1"}]},
    "/apis/kubeflow.org/v1": {"resources": [{"name": "pytorchjobs"}]},
    "/api/v1/namespaces/default": {"status": {"phase": "Active"}},
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": {"status": {"allowed": True}},
    KUEUE: {"preferredVersion": {"version": "v1beta2"}},
    JOBS: {"spec": {"runPolicy": {"suspend": True}}},  # of a dry run, by Kueue's webhook
}


def _head(request: Request) -> Object:
    """What each answer to a request has, so that it says what it is about."""
    where = request.where
    if not where.resource:
        version = {"kind": "APIResourceList", "groupVersion": where.api_version}
        return version if where.version else {"kind": "APIGroup", "name": where.group}
    sent = request.body or {"metadata": {"name": where.name}}
    meta = {"uid": "u-1", "namespace": where.namespace, **sent.get("metadata", {})}
    return {"apiVersion": where.api_version, "kind": sent.get("kind", where.resource), "metadata": meta}


@contextlib.contextmanager
def serving(folder: pathlib.Path, answers: Mapping[str, Object | int]) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """A server with fixed responses (a number: that status). Yields its kubeconfig and the writes that it receives."""
    written: list[str] = []

    def answer(request: Request, _: object) -> Response:
        found = answers.get(request.path, 404)
        if "/secrets/" in request.path and "as=PartialObjectMetadata" not in request.headers["Accept"]:
            found = 500  # nothing may read a Secret's data
        if request.method == "POST" and "selfsubject" not in request.path:
            written.append(request.line.removeprefix("POST "))
        where = request.where
        if isinstance(found, int):
            return failure(found, "no", name=where.name, kind=where.resource, group=where.group)
        return Response(200, found if request.path.startswith("/openapi") else {**_head(request), **found})

    with InThread(ApiServer) as thread:
        thread.api.replace("", "", answer, math.inf, processed=False)
        yield apiserver.kubeconfig(folder, thread.url, "default"), written


@pytest.mark.parametrize(
    ("queue", "reported"),
    [
        ({"status": {"conditions": [{"type": "Active", "status": "True"}]}}, None),
        ({}, None),
        (403, None),
        (404, ("error", "no such LocalQueue")),
        ({"spec": {"stopPolicy": "Hold"}}, ("warning", "stopPolicy Hold")),
        (
            {
                "status": {
                    "conditions": [{"type": "Active", "status": "False", "message": "Can't submit new workloads"}]
                }
            },
            ("warning", "does not admit jobs now: Can't submit new workloads"),
        ),
    ],
)
def test_queue_problems_are_reported(
    check: Check, tmp_path: pathlib.Path, queue: Object | int, reported: tuple[str, str] | None
) -> None:
    with serving(tmp_path, {**SERVED, QUEUE: queue}) as (kubeconfig, written):
        status, problems = check(queued(pytorchjob()), kubeconfig)
    refused = reported is not None and reported[0] == "error"
    assert status == int(refused)
    assert codes(problems) == ([(reported[0], "queue")] if reported else [])
    assert all(reported and reported[1] in p["message"] for p in problems)
    assert written == ([] if refused else [f"{JOBS}?fieldValidation=Strict&dryRun=All"])


CLUSTER_QUEUE = f"{KUEUE}/v1beta2/clusterqueues/gpus"
PRIORITY = f"{KUEUE}/v1beta2/workloadpriorityclasses/high"
LOCAL: Object = {"spec": {"clusterQueue": "gpus"}, "status": {"conditions": [{"type": "Active", "status": "False"}]}}
OPEN: Object = {"spec": {"namespaceSelector": {}, "resourceGroups": []}}


@pytest.mark.parametrize(
    ("served", "reported"),
    [
        ({CLUSTER_QUEUE: OPEN}, []),
        ({CLUSTER_QUEUE: 403, PRIORITY: 403}, []),
        ({CLUSTER_QUEUE: 404}, ["error: ClusterQueue gpus of the LocalQueue does not exist"]),
        (
            {CLUSTER_QUEUE: {"spec": {**OPEN["spec"], "stopPolicy": "HoldAndDrain"}}},
            ["warning: ClusterQueue gpus is stopped"],
        ),
        (
            {CLUSTER_QUEUE: {"spec": {"namespaceSelector": {"matchLabels": {"team": "a"}}}}},
            ["error: ClusterQueue gpus admits no jobs of this namespace"],
        ),
        ({CLUSTER_QUEUE: OPEN, PRIORITY: 404}, ["error: the cluster has no such WorkloadPriorityClass"]),
    ],
)
def test_problems_of_the_cluster_queue_and_the_priority_class_are_reported(
    check: Check, tmp_path: pathlib.Path, served: Mapping[str, Object | int], reported: list[str]
) -> None:
    manifest = queued(pytorchjob())
    manifest["metadata"]["labels"][PRIORITY_LABEL] = "high"
    local = {"spec": LOCAL["spec"]}
    with serving(tmp_path, {**SERVED, PRIORITY: {}, QUEUE: local, **served}) as (kubeconfig, _):
        _, problems = check(manifest, kubeconfig)
    found = [f"{p['level']}: {p['message']}" for p in problems if "has no quota for" not in p["message"]]
    assert len(found) == len(reported)
    assert all(one.startswith(other) for one, other in zip(found, reported, strict=True))


def test_a_missing_cluster_queue_is_reported_once(check: Check, tmp_path: pathlib.Path) -> None:
    with serving(tmp_path, {**SERVED, QUEUE: LOCAL, CLUSTER_QUEUE: 404}) as (kubeconfig, _):
        status, problems = check(queued(pytorchjob()), kubeconfig)
    assert (status, codes(problems)) == (1, [("error", "queue")])


def test_a_queue_of_multikueue_is_reported(check: Check, tmp_path: pathlib.Path) -> None:
    """Kueue's webhook sets `managedBy` of a job whose ClusterQueue has an admission check of MultiKueue."""
    mutated = {"spec": {"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}}}
    with serving(tmp_path, {**SERVED, QUEUE: {}, JOBS: mutated}) as (kubeconfig, _):
        status, problems = check(queued(pytorchjob()), kubeconfig)
    assert (status, codes(problems)) == (1, [("error", "multikueue")])


def test_kind_that_kueue_does_not_manage_is_a_warning(check: Check, tmp_path: pathlib.Path) -> None:
    """Its webhook doesn't suspend the job of the dry run. Kueue 0.19 doesn't manage PyTorchJobs by default."""
    with serving(tmp_path, {**SERVED, QUEUE: {}, JOBS: {}}) as (kubeconfig, _):
        status, problems = check(queued(pytorchjob()), kubeconfig)
        assert check(pytorchjob(), kubeconfig) == (0, [])
    assert (status, codes(problems)) == (0, [("warning", "queue")])
    assert "Kueue doesn't manage pytorchjobs in namespace default" in problems[0]["message"]
    assert "add kubeflow.org/pytorchjob to integrations.frameworks" in problems[0]["hint"]


TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"


@pytest.mark.parametrize(
    ("field", "version"), [("podSpecOverrides", "2.0"), ("podTemplateOverrides", "2.1"), ("runtimePatches", "")]
)
def test_an_older_trainer_is_an_error(check: Check, tmp_path: pathlib.Path, field: str, version: str) -> None:
    gvk = {"group": "trainer.kubeflow.org", "version": "v1alpha1", "kind": "TrainJob"}
    spec: Object = {"properties": {field: {}, "trainer": {}, "runtimeRef": {}}}
    schemas = {"TrainJob": {"x-kubernetes-group-version-kind": [gvk], "properties": {"spec": spec}}}
    served = {
        **SERVED, TRAINER: {"resources": [{"name": "trainjobs"}]}, f"{TRAINER}/clustertrainingruntimes/torch": {},
        "/openapi/v3" + TRAINER: {"openapi": "3.0.0", "components": {"schemas": schemas}},
    }  # fmt: skip
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "train"},
        "spec": {"runtimeRef": {"name": "torch"}, "trainer": {"image": "train:1"}},
    }  # fmt: skip
    with serving(tmp_path, served) as (kubeconfig, _):
        _, problems = check(manifest, kubeconfig)
    errors = [p["message"] for p in problems if p["level"] == "error"]
    found = [message for message in errors if "can be submitted only to 2.2 or newer" in message]
    assert len(found) == bool(version)
    assert all(f"Kubeflow Trainer is {version}:" in message for message in found)


def test_missing_rights_for_kueue_are_warnings(check: Check, tmp_path: pathlib.Path) -> None:
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    with serving(tmp_path, {**SERVED, QUEUE: {}, reviews: {"status": {"allowed": False}}}) as (kubeconfig, _):
        _, problems = check(queued(pytorchjob()), kubeconfig)
    warnings = [p["message"] for p in problems if p["level"] == "warning"]
    assert "no right to get, list, watch, patch workloads.kueue.x-k8s.io in namespace default" in warnings
    assert "no right to get localqueues.kueue.x-k8s.io in namespace default" in warnings


def test_schema_of_the_server_is_checked_strictly(check: Check, tmp_path: pathlib.Path) -> None:
    any_object = {"x-kubernetes-preserve-unknown-fields": True}
    job = {
        "x-kubernetes-group-version-kind": [{"group": "kubeflow.org", "version": "v1", "kind": "PyTorchJob"}],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": any_object,
            "spec": {"properties": {"pytorchReplicaSpecs": any_object}},
        },
    }
    manifest = pytorchjob()
    manifest["spec"]["nprocPerNode"] = "2"  # from a newer operator than the one of the cluster
    with serving(tmp_path, {**SERVED, SCHEMA: {"openapi": "3.0.0", "components": {"schemas": {"Job": job}}}}) as (
        kubeconfig,
        written,
    ):
        status, (problem,) = check(manifest, kubeconfig)
    assert (status, problem["level"], problem["code"], problem["path"]) == (
        1,
        "error",
        "unknown-field",
        "$.spec.nprocPerNode",
    )
    assert len(written) == 1  # the dry run, which ignores unknown fields


def test_all_kinds_of_problems_are_found_in_one_run(check: Check, tmp_path: pathlib.Path) -> None:
    """The schema of this server has no fields of pods, as many CRDs. Its operator's webhook refuses the job."""
    anything = {"x-kubernetes-preserve-unknown-fields": True}
    replicas = {"additionalProperties": {"properties": {"replicas": {}, "restartPolicy": {}, "template": anything}}}
    job = {
        "x-kubernetes-group-version-kind": [{"group": "kubeflow.org", "version": "v1", "kind": "PyTorchJob"}],
        "properties": {
            **dict.fromkeys(("apiVersion", "kind", "metadata"), anything),
            "spec": {"properties": {"pytorchReplicaSpecs": replicas}},
        },
    }
    manifest = pytorchjob(comand=["python", "train.py"], imagePullPolicy="always", newInKubernetes=1)
    del manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    published: Object = {SCHEMA: {"openapi": "3.0.0", "components": {"schemas": {"Job": job}}}}
    with serving(tmp_path, {**SERVED, **published, JOBS: 422}) as (kubeconfig, written):
        assert codes(check(manifest, kubeconfig)[1]) == [
            ("error", "unknown-field"),
            ("error", "value"),
            ("warning", "unknown-field"),
        ]
        assert not written
        del manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["imagePullPolicy"]
        manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["serviceAccountName"] = "absent"
        assert codes(check(manifest, kubeconfig)[1]) == [
            ("error", "refused"),
            ("error", "unknown-field"),
            ("error", "reference"),
            ("warning", "unknown-field"),
        ]
    assert [line for line in written if "fieldValidation=Ignore" in line and "dryRun=All" in line] == written


def test_terminating_namespace_is_an_error(check: Check, tmp_path: pathlib.Path) -> None:
    going = {"/api/v1/namespaces/default": {"status": {"phase": "Terminating"}}}
    with serving(tmp_path, {**SERVED, **going}) as (kubeconfig, _):
        status, (problem,) = check(pytorchjob(), kubeconfig)
    assert (status, problem["code"], problem["message"]) == (1, "namespace", "the namespace is being deleted")


def test_unknown_rights_are_a_warning(check: Check, tmp_path: pathlib.Path) -> None:
    mute = {"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": 403}
    with serving(tmp_path, {**SERVED, **mute}) as (kubeconfig, _):
        status, problems = check(pytorchjob(), kubeconfig)
    assert (status, codes(problems)) == (0, [("warning", "rights")])


# ---- the objects that the manifest names

NAMED: dict[str, Any] = {
    "serviceAccountName": "trainer",
    "imagePullSecrets": [{"name": "registry"}],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "imagenet"}},
        {"name": "keys", "secret": {"secretName": "s3"}},
        {"name": "extra", "secret": {"secretName": "other", "optional": True}},
        {"name": "all", "projected": {"sources": [{"configMap": {"name": "settings"}}, {"secret": {"name": "s3"}}]}},
    ],
}
ENVIRONMENT: dict[str, Any] = {
    "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "envFrom": [{"configMapRef": {"name": "no/name"}}, {"secretRef": {"name": "absent", "optional": True}}],
}
CORE = "/api/v1/namespaces/default"
NAMED_PATHS = [
    f"{CORE}/{name}"
    for name in (
        "serviceaccounts/trainer",
        "persistentvolumeclaims/imagenet",
        "secrets/s3",
        "configmaps/settings",
        "secrets/registry",
        "secrets/hub",
    )
]


def with_names() -> Object:
    manifest = pytorchjob(**ENVIRONMENT)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"] |= NAMED
    return manifest


def test_objects_that_the_manifest_names_and_that_do_not_exist_are_reported(
    check: Check, tmp_path: pathlib.Path
) -> None:
    manifest = with_names()
    with serving(tmp_path, SERVED) as (kubeconfig, written):
        status, problems = check(manifest, kubeconfig)
    assert status == 1
    assert written  # a dry run, which doesn't look for them
    assert [(p["level"], p["found"], p["expected"]) for p in problems] == [  # by line, errors first
        ("error", "hub", "a Secret"),
        ("error", "no/name", "a ConfigMap"),
        ("error", "trainer", "a ServiceAccount"),
        ("error", "imagenet", "a PersistentVolumeClaim"),
        ("error", "s3", "a Secret"),
        ("error", "settings", "a ConfigMap"),
        ("warning", "registry", "a Secret"),
    ]
    claim = problems[3]
    volumes = "$.spec.pytorchReplicaSpecs.Master.template.spec.volumes"
    assert claim == {
        "file": claim["file"],
        "line": claim["line"],
        "level": "error",
        "code": "reference",
        "path": f"{volumes}[0].persistentVolumeClaim.claimName",
        "message": "namespace default has no such PersistentVolumeClaim: the job's pods could not start",
        "found": "imagenet",
        "expected": "a PersistentVolumeClaim",
        "hint": "create it, or correct the name: kubectl get persistentvolumeclaims -n default lists them",
    }


@pytest.mark.parametrize("answer", [403, {"kind": "PartialObjectMetadata"}])
def test_objects_that_exist_or_may_not_be_read_are_no_problem(
    check: Check, tmp_path: pathlib.Path, answer: Object | int
) -> None:
    manifest = with_names()
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        del replica["template"]["spec"]["containers"][0]["envFrom"]
    with serving(tmp_path, {**SERVED, **dict.fromkeys(NAMED_PATHS, answer)}) as (kubeconfig, written):
        assert check(manifest, kubeconfig) == (0, [])
    assert written


def test_metadata_of_a_secret_of_the_cluster_is_found(cluster: TestCluster, check: Check) -> None:
    core = client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))
    core.create_namespaced_secret(cluster.namespace, {"metadata": {"name": "hub"}, "stringData": {"token": "x"}})
    manifest = pytorchjob(env=ENVIRONMENT["env"])
    assert check(manifest, cluster) == (0, [])
    core.delete_namespaced_secret("hub", cluster.namespace)
    status, (problem,) = check(manifest, cluster)
    assert (status, problem["code"], problem["found"]) == (1, "reference", "hub")
