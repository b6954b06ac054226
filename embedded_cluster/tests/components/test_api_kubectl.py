"""Stock kubectl, as the guides type it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from components.raw_client import Client
from ktrain_embedded.cluster import EmbeddedCluster

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine")

JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: NAME
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          terminationGracePeriodSeconds: 1
          containers:
          - name: pytorch
            image: workshop
            command: [sh, -c, "echo training as $RANK of $WORLD_SIZE; SCRIPT"]
    Worker:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          terminationGracePeriodSeconds: 1
          containers:
          - name: pytorch
            image: workshop
            command: [sh, -c, "echo training as $RANK of $WORLD_SIZE; SCRIPT"]
"""
Kubectl = Callable[..., str]


def waits_for(name: str) -> str:
    """A script that waits for a file of the workshop."""
    return f"until [ -e {name} ]; do sleep 0.02; done"


def job(name: str, script: str = "true") -> str:
    return JOB.replace("NAME", name).replace("SCRIPT", script)


@pytest.fixture(scope="module")
def namespace(cluster: EmbeddedCluster) -> str:
    Client(cluster)("POST", "/api/v1/namespaces", {"metadata": {"name": "kubectl"}})
    return "kubectl"


@pytest.fixture
def kubectl(cluster: EmbeddedCluster, namespace: str) -> Kubectl:
    def run(*args: str, stdin: str | None = None, code: int = 0) -> str:
        """What kubectl prints, errors and warnings after a line of dashes; it must end with `code`."""
        command = ["kubectl", "--kubeconfig", str(cluster.kubeconfig), "-n", namespace, *args]
        env = {**os.environ, "KUBE_EDITOR": "sed -i 's/note: x/note: edited/'"}
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, env=env)
        output = done.stdout + ("---\n" + done.stderr if done.stderr else "")
        assert done.returncode == code, output
        return output

    return run


def test_job_can_be_created_watched_and_deleted(kubectl: Kubectl, workshop: Path) -> None:
    manifest = job("simple", waits_for("simple.done"))
    assert kubectl("create", "-f", "-", stdin=manifest) == "pytorchjob.kubeflow.org/simple created\n"
    assert "already exists" in kubectl("create", "-f", "-", stdin=manifest, code=1)
    # a master that ended sooner would leave the worker in its init container
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/simple-worker-0", "--timeout=240s")
    (workshop / "simple.done").touch()
    kubectl("wait", "--for=condition=Succeeded", "pytorchjobs/simple", "--timeout=240s")
    assert "type: Succeeded" in kubectl("get", "-o", "yaml", "pytorchjobs", "simple")
    listed = kubectl("get", "pytorchjobs").split()
    assert listed[:3] == ["NAME", "STATE", "AGE"]
    assert listed[3:5] == ["simple", "Succeeded"]
    services = kubectl("get", "services").splitlines()
    assert services[0].split() == ["NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "AGE"]
    assert services[1].split()[:5] == ["simple-master-0", "ClusterIP", "None", "<none>", "23456/TCP"]
    kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/simple-worker-0", "--timeout=240s")
    pods = kubectl("get", "pods", "-l", "training.kubeflow.org/job-name=simple").splitlines()
    assert pods[0].split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert [line.split()[:4] for line in pods[1:]] == [
        ["simple-master-0", "0/1", "Completed", "0"],
        ["simple-worker-0", "0/1", "Completed", "0"],
    ]
    assert kubectl("logs", "simple-master-0") == "training as 0 of 2\n"
    assert "PyTorchJob simple is successfully completed." in kubectl("describe", "pytorchjob", "simple")
    assert "Controlled By:  PyTorchJob/simple" in kubectl("describe", "pod", "simple-master-0")
    assert 'pytorchjob.kubeflow.org "simple" deleted' in kubectl("delete", "pytorchjob", "simple")
    assert "NotFound" in kubectl("get", "pytorchjob", "simple", code=1)


def test_apply_changes_only_differences(kubectl: Kubectl) -> None:
    manifest = job("applied", "sleep 600")
    assert kubectl("apply", "-f", "-", stdin=manifest) == "pytorchjob.kubeflow.org/applied created\n"
    assert kubectl("apply", "-f", "-", stdin=manifest) == "pytorchjob.kubeflow.org/applied unchanged\n"
    more = manifest.replace("    Worker:\n      replicas: 1", "    Worker:\n      replicas: 2")
    assert "+      replicas: 2" in kubectl("diff", "-f", "-", stdin=more, code=1)
    assert kubectl("apply", "--dry-run=server", "-f", "-", stdin=more).startswith(
        "pytorchjob.kubeflow.org/applied configured"
    )
    assert kubectl("apply", "-f", "-", stdin=more) == "pytorchjob.kubeflow.org/applied configured\n"
    path = "{.spec.pytorchReplicaSpecs.Worker.replicas}"
    assert kubectl("get", "pytorchjob", "applied", "-o", f"jsonpath={path}") == "2"
    kubectl("delete", "-f", "-", stdin=manifest)


@pytest.mark.thorough
def test_apply_of_built_in_types(kubectl: Kubectl) -> None:
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "1", "b": "2"}}
    assert "created" in kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    manifest["data"] = {"a": "1", "c": "3"}
    assert "configured" in kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    assert json.loads(kubectl("get", "configmap", "settings", "-o", "jsonpath={.data}")) == {"a": "1", "c": "3"}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"},
        "spec": {"containers": [{"name": "main", "image": "busybox", "command": ["sleep", "600"]}]},
    }  # fmt: skip
    kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    pod["metadata"] = {"name": "plain", "labels": {"team": "a"}}
    assert "configured" in kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    assert kubectl("get", "pod", "plain", "-o", "jsonpath={.metadata.labels.team}") == "a"
    kubectl("delete", "pod", "plain", "--grace-period=0", "--force")


@pytest.mark.thorough
def test_apply_merges_lists_by_their_keys(kubectl: Kubectl) -> None:
    def job(**variables: str) -> str:
        env = [{"name": name, "value": value} for name, value in variables.items()]
        container = {"name": "main", "image": "busybox", "command": ["true"], "env": env}
        template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
        meta = {"name": "lists", "finalizers": [f"example.com/{name.lower()}" for name in variables]}
        spec = {"suspend": True, "template": template}
        return json.dumps({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec})

    kubectl("apply", "-f", "-", stdin=job(A="1", B="2", C="3"))
    kubectl("annotate", "job", "lists", "note=x")  # which an apply of what does not say it leaves
    assert "configured" in kubectl("apply", "-f", "-", stdin=job(C="3", A="9", D="4"))
    made = json.loads(kubectl("get", "job", "lists", "-o", "json"))
    env = made["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [(e["name"], e["value"]) for e in env] == [("C", "3"), ("A", "9"), ("D", "4")]
    assert made["metadata"]["finalizers"] == ["example.com/c", "example.com/a", "example.com/d"]
    assert made["metadata"]["annotations"]["note"] == "x"
    kubectl("patch", "job", "lists", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    kubectl("delete", "job", "lists")


def test_logs_are_streamed_live(cluster: EmbeddedCluster, kubectl: Kubectl, workshop: Path) -> None:
    kubectl(
        "create", "-f", "-", stdin=job("talker", f"{waits_for('talker.done')}; for i in 1 2 3; do echo step $i; done")
    )
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/talker-worker-0", "--timeout=240s")
    path = "/api/v1/namespaces/kubectl/pods/talker-master-0/log?follow=true"
    with Client(cluster).open("GET", path) as followed:
        assert followed.readline() == b"training as 0 of 2\n"
        (workshop / "talker.done").touch()
        assert followed.read() == b"step 1\nstep 2\nstep 3\n"
    assert kubectl("logs", "-f", "talker-master-0") == "training as 0 of 2\nstep 1\nstep 2\nstep 3\n"
    assert kubectl("logs", "talker-master-0", "--tail=1") == "step 3\n"
    assert kubectl("logs", "talker-master-0", "--timestamps", "--tail=1").endswith("Z step 3\n")
    kubectl("wait", "--for=condition=Succeeded", "pytorchjobs/talker", "--timeout=240s")
    selected = kubectl("logs", "-l", "training.kubeflow.org/job-name=talker", "--prefix", "--tail=1")
    assert "[pod/talker-master-0/pytorch] step 3" in selected
    assert "init-pytorch" in kubectl("logs", "talker-worker-0", "--all-containers", "--prefix")
    kubectl("delete", "pytorchjobs", "--all")


@pytest.mark.thorough
def test_scale_patch_label_annotate_and_edit_change_the_job(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=job("grower", "sleep 600"))
    assert kubectl("scale", "pytorchjob/grower", "--replicas=3") == "pytorchjob.kubeflow.org/grower scaled\n"
    kubectl("wait", "--for=create", "pod/grower-worker-2", "--timeout=240s")
    patch = '{"spec":{"runPolicy":{"suspend":true}}}'
    assert "patched" in kubectl("patch", "pytorchjob", "grower", "--type=merge", "-p", patch)
    kubectl("wait", "--for=condition=Suspended", "pytorchjobs/grower", "--timeout=240s")
    refused = kubectl("patch", "pytorchjob", "grower", "-p", patch, code=1)
    assert "strategic-merge-patch+json is not supported by kubeflow.org/v1, Kind=PyTorchJob" in refused
    operations = '[{"op":"replace","path":"/spec/runPolicy/suspend","value":false}]'
    assert "patched" in kubectl("patch", "pytorchjob", "grower", "--type=json", "-p", operations)
    assert "labeled" in kubectl("label", "pytorchjob", "grower", "team=a")
    assert "annotated" in kubectl("annotate", "pytorchjob", "grower", "note=x")
    assert "grower" in kubectl("get", "pytorchjobs", "-l", "team in (a,b)")
    assert kubectl("edit", "pytorchjob", "grower") == "pytorchjob.kubeflow.org/grower edited\n"
    assert "note: edited" in kubectl("get", "pytorchjob", "grower", "-o", "yaml")
    kubectl("delete", "pytorchjob", "grower", "--cascade=foreground", "--wait")
    assert "No resources found" in kubectl("get", "pods", "-l", "training.kubeflow.org/job-name=grower")


REFUSED = [
    ("name: pytorch", "name: main", "must have at least one container with name pytorch"),
    ("replicas: 1", "replicas: 2", "spec.pytorchReplicaSpecs[Master].replicas: Forbidden: must be 1"),
    ("Master:", "Chief:", 'Unsupported value: "Chief": supported values: "Master", "Worker"'),
    (
        "image: workshop",
        "images: workshop",
        'unknown field "spec.pytorchReplicaSpecs.Master.template.spec.containers[0].images"',
    ),
]


@pytest.mark.parametrize(("found", "put", "message"), REFUSED)
def test_mistakes_are_reported(kubectl: Kubectl, found: str, put: str, message: str) -> None:
    assert message in kubectl("apply", "-f", "-", stdin=job("wrong").replace(found, put, 1), code=1)


@pytest.mark.thorough
def test_field_validation_of_the_server_is_strict(kubectl: Kubectl) -> None:
    manifest = job("odd").replace("spec:\n  py", "spec:\n  workers: 2\n  py")
    assert 'unknown field "spec.workers"' in kubectl("create", "-f", "-", stdin=manifest, code=1)
    assert 'Warning: unknown field "spec.workers"' in kubectl("create", "--validate=warn", "-f", "-", stdin=manifest)
    kubectl("delete", "pytorchjob", "odd")
    assert "Warning" not in kubectl("create", "--validate=ignore", "-f", "-", stdin=manifest)
    kubectl("delete", "pytorchjob", "odd")


@pytest.mark.thorough
def test_discovery_lists_resources_versions_and_nodes(kubectl: Kubectl) -> None:
    resources = kubectl("api-resources")
    assert "pytorchjobs" in resources
    assert "mpijobs" in resources
    assert "Server Version: v1.36" in kubectl("version")
    assert "ktrain-node-0" in kubectl("get", "nodes")
    assert "nvidia.com/gpu" in kubectl("describe", "node", "ktrain-node-0")
    assert "Established" in kubectl("get", "crd", "pytorchjobs.kubeflow.org", "-o", "yaml")
    assert "kubectl" in kubectl("get", "namespaces")
    for plural in (
        "all",
        "events",
        "services",
        "secrets",
        "serviceaccounts",
        "roles",
        "leases",
        "jobs",
        "pvc",
        "pv",
        "priorityclasses",
    ):
        kubectl("get", plural)
    assert kubectl("get", "--raw", "/healthz") == "ok"


def test_token_has_only_the_rights_of_its_role(kubectl: Kubectl) -> None:
    kubectl("create", "serviceaccount", "limited")
    kubectl("create", "role", "reader", "--verb=get,list,watch", "--resource=pytorchjobs.kubeflow.org")
    kubectl("create", "rolebinding", "limited", "--role=reader", "--serviceaccount=kubectl:limited")
    token = kubectl("create", "token", "limited").strip()
    assert kubectl("--token", token, "auth", "can-i", "list", "pytorchjobs") == "yes\n"
    assert kubectl("--token", token, "auth", "can-i", "create", "pytorchjobs", code=1) == "no\n"
    assert "system:serviceaccount:kubectl:limited" in kubectl("--token", token, "auth", "whoami")
    assert "Forbidden" in kubectl("--token", token, "get", "pods", code=1)
    kubectl("--token", token, "get", "pytorchjobs")


@pytest.mark.thorough
def test_namespace_is_deleted_with_its_objects(kubectl: Kubectl) -> None:
    kubectl("create", "namespace", "brief")
    kubectl("-n", "brief", "create", "-f", "-", stdin=job("lost", "sleep 600"))
    kubectl("-n", "brief", "wait", "--for=jsonpath={.status.phase}=Running", "pod/lost-master-0", "--timeout=240s")
    kubectl("delete", "namespace", "brief", "--timeout=240s")
    assert "not found" in kubectl("get", "namespace", "brief", code=1)
    assert "not found" in kubectl("-n", "brief", "create", "-f", "-", stdin=job("lost"), code=1)
