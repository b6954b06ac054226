"""`ktrain run` on any cluster: the log, the cause, the exit status, signals and limits. It imports no Airflow."""

from __future__ import annotations

import itertools
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from airflow_provider_ktrain.cli import main
from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, PREFIX
from airflow_provider_ktrain.core.identity.reaping import judge
from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from tests.cli.conftest import SECONDS, Start
from tests.clusters import IMAGE, TestCluster, least_rights, require
from tests.core.manifests import trainjob

Object = dict[str, Any]
WAIT = "echo ready; while true; do sleep 0.1; done"
IGNORE_SIGTERM = "trap '' TERM; echo ready; while true; do sleep 0.1; done"


def job(script: str, *, name: str = "train", grace: int = 1, workers: int = 0) -> Object:
    """A PyTorchJob whose replicas run a shell script."""
    replicas = {"Master": 1, **({"Worker": workers} if workers else {})}
    options = JobOptions(image=IMAGE, command=["sh", "-c", script], gpus=1, replicas=replicas)
    manifest = build("PyTorchJob", options, "kubeflow.org/v1")
    manifest["metadata"]["name"] = name
    for spec in manifest["spec"]["pytorchReplicaSpecs"].values():
        spec["restartPolicy"] = "Never"
        spec["template"]["spec"]["terminationGracePeriodSeconds"] = grace
    return manifest


@pytest.fixture
def run(ktrain: Start, cluster: TestCluster, tmp_path: Path) -> Start:
    """Starts `ktrain run` for a manifest on the cluster of the tests."""

    def start(manifest: Object, *options: object) -> Any:
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(manifest))
        return ktrain("run", file, "--kubeconfig", cluster.kubeconfig, "-n", cluster.namespace, *options)

    return start


def left(cluster: TestCluster, name: str, plural: str = "pytorchjobs") -> list[Object]:
    """The jobs in the cluster that were submitted for a manifest of this name."""
    api = client.CustomObjectsApi(config.new_client_from_config(str(cluster.kubeconfig)))
    selector = f"{PREFIX}/task-id={name}"
    found = api.list_namespaced_custom_object("kubeflow.org", "v1", cluster.namespace, plural, label_selector=selector)
    return list(found["items"])


def delete(cluster: TestCluster, name: str) -> None:
    api = client.CustomObjectsApi(config.new_client_from_config(str(cluster.kubeconfig)))
    api.delete_namespaced_custom_object("kubeflow.org", "v1", cluster.namespace, "pytorchjobs", name)


def pods_left(cluster: TestCluster, name: str) -> list[str]:
    api = client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))
    selector = f"{PREFIX}/task-id={name}"
    return [pod.metadata.name for pod in api.list_namespaced_pod(cluster.namespace, label_selector=selector).items]


def test_success_prints_log_and_result_and_deletes_the_job(run: Start, cluster: TestCluster) -> None:
    # the job ends with its Master, which must not be before the Worker has started
    metric = """echo 'KTRAIN_METRIC {"step": 3, "loss": 0.25}'"""
    command = run(job(f"{metric}; echo 'KTRAIN_RESULT {{\"loss\": 0.5}}'; sleep 3", name="success", workers=1))
    assert command.end() == 0, command.output
    assert "loss: 0.25 at step 3" in command.output
    assert re.search(r"succeeded after .* with 2 replicas\.\n( *1 GPU released, .*\n)? *GPU time: ", command.output)
    assert '[Master 0] KTRAIN_RESULT {"loss": 0.5}' in command.output
    assert "[Worker 0] " in command.output
    assert not re.search(r"kept without running pods|PyTorchJob \S+ deleted\.", command.output)
    assert 'Result: {"loss": 0.5}' in command.output
    assert not left(cluster, "success")
    assert not pods_left(cluster, "success")


def test_failure_prints_the_cause_and_exits_1(run: Start, cluster: TestCluster) -> None:
    command = run(job("echo 'ValueError: bad learning rate'; exit 3", name="failure"))
    assert command.end() == 1, command.output
    errors = [line for line in command.lines if " error: " in line]
    assert "Master 0 failed: ValueError: bad learning rate (exit code 3)" in errors[0]
    assert command.output.count("Master 0 failed") == 1
    assert not left(cluster, "failure")


@pytest.mark.thorough
def test_signals_delete_the_jobs_of_two_runs_of_a_manifest_and_wait_for_their_pods(
    run: Start, cluster: TestCluster
) -> None:
    signals = [signal.SIGTERM, signal.SIGHUP]
    commands = [run(job(WAIT, name="twice")) for _ in signals]
    for command in commands:
        command.wait_for("[Master 0] ready")
    jobs = left(cluster, "twice")
    assert len({found["metadata"]["name"] for found in jobs}) == 2
    for found, deployment in itertools.product(jobs, ("airflow", "ktrain-run")):
        assert found["metadata"]["labels"][DEPLOYMENT_LABEL].startswith("ktrain-run-")
        assert not judge(found, deployment, "absent", 1).orphan, "the reaper of a deployment ignores it"
    for command, number in zip(commands, signals, strict=True):
        command.interrupt(number)
    for command, number in zip(commands, signals, strict=True):
        assert command.end() == 128 + number, command.output
        assert "1 GPU released, 1 pod deleted." in command.output
    assert not left(cluster, "twice")
    assert not pods_left(cluster, "twice")


@pytest.mark.thorough
def test_the_grace_period_is_named_and_a_second_signal_reports_what_is_left(run: Start, cluster: TestCluster) -> None:
    command = run(job(IGNORE_SIGTERM, name="stubborn", grace=60))
    command.wait_for("[Master 0] ready")
    command.interrupt()
    command.wait_for("SIGINT: deleting the job")
    command.wait_for("is killed when its grace period of 60 s is over")
    command.interrupt()
    assert command.end() == 130, command.output
    (error,) = [line for line in command.lines if " error: " in line]
    assert (
        "1 pod with 1 GPU not gone yet. To see them, run `kubectl get pods" in error
        or "was not deleted: 1 pod with 1 GPU" in error
    )


@pytest.mark.thorough
def test_closed_output_deletes_the_job(run: Start, cluster: TestCluster) -> None:
    command = run(job("echo ready; while true; do sleep 0.1; echo again; done", name="piped"))
    command.wait_for("[Master 0] ready")
    assert command.process.stdout is not None
    command.process.stdout.close()
    assert command.process.wait(SECONDS) == 143
    assert not left(cluster, "piped")
    assert not pods_left(cluster, "piped")


@pytest.mark.embedded("sets fault switches")
def test_an_unreachable_api_server_keeps_the_job_and_a_second_signal_reports_it(
    run: Start, cluster: TestCluster
) -> None:
    command = run(job(WAIT, name="cut-off"))
    command.wait_for("[Master 0] ready")
    (submitted,) = left(cluster, "cut-off")
    name = submitted["metadata"]["name"]
    cluster.admin("status", status=503, path=name)
    command.interrupt()
    command.wait_for("SIGINT: deleting the job")
    command.interrupt()
    assert command.end() == 130, command.output
    cluster.admin("clear")
    assert f"{name} may still hold accelerators: the API server doesn't respond." in command.output
    assert f"run `kubectl delete -n {cluster.namespace} pytorchjobs {name}`" in command.output
    assert left(cluster, "cut-off")
    delete(cluster, name)


@pytest.mark.thorough
def test_a_missing_right_to_create_is_the_only_error(run: Start, cluster: TestCluster, tmp_path: Path) -> None:
    reader = tmp_path / "reader.kubeconfig"
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    reader.write_text(yaml.safe_dump(least_rights(cluster, "reader", [pods])))
    command = run(job(WAIT, name="unmade"), "--kubeconfig", reader)
    assert command.end() == 4, command.output
    (error,) = (line for line in command.lines if "error:" in line)
    assert "error: no right to create pytorchjobs.kubeflow.org" in error
    assert "whether the job was created" not in command.output


@pytest.mark.embedded("sets fault switches")
def test_a_missing_right_to_watch_deletes_the_new_job(run: Start, cluster: TestCluster) -> None:
    cluster.admin("status", status=403, verb="watch", path="/pytorchjobs")
    command = run(job(WAIT, name="unwatched"))
    assert command.end() == 4, command.output
    cluster.admin("clear")
    assert "error: no right to watch" in command.output
    assert not left(cluster, "unwatched")


def test_signal_before_the_create_leaves_no_job(run: Start, cluster: TestCluster) -> None:
    command = run(job(WAIT, name="early"))
    command.interrupt(signal.SIGTERM)
    assert command.end() in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert not left(cluster, "early")


def test_the_timeout_ends_the_job(run: Start, cluster: TestCluster) -> None:
    command = run(job(IGNORE_SIGTERM, name="late"), "--timeout", "5s")
    assert command.end() == 124, command.output
    assert command.output.count("did not finish within 5 s of its creation (--timeout): ") == 1
    assert not left(cluster, "late")
    assert not pods_left(cluster, "late")


@pytest.mark.thorough
def test_standard_input_with_another_document(ktrain: Start, cluster: TestCluster) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    command = ktrain("run", "-", "--kubeconfig", cluster.kubeconfig, "-n", cluster.namespace)
    assert command.end(yaml.safe_dump_all([other, job("echo from stdin", name="stdin")])) == 0, command.output
    assert "[Master 0] from stdin" in command.output
    assert "warning: ConfigMap settings is not submitted, only the training job is" in command.output


@pytest.mark.thorough
def test_mpijob_with_an_invalid_result(run: Start, cluster: TestCluster) -> None:
    require(cluster, MPIJOB, "v1")
    command_line = ["sh", "-c", "echo launched; echo KTRAIN_RESULT {"]
    options = JobOptions(image=IMAGE, command=command_line, replicas={"Launcher": 1, "Worker": 1})
    manifest = build("MPIJob", options, "kubeflow.org/v1")
    manifest["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    command = run({**manifest, "metadata": {"name": "mpi"}})
    assert command.end() == 0, command.output
    assert "[Launcher 0] launched" in command.output
    assert re.search(r"warning: .*KTRAIN_RESULT is not valid JSON", command.output)


def test_a_signal_deletes_a_trainjob_and_waits_for_its_pods(run: Start, cluster: TestCluster) -> None:
    require(cluster, TRAINJOB, runtime="torch-distributed")
    script = f"trap 'exit 143' TERM; echo on node $PET_NODE_RANK; {WAIT}"
    manifest = trainjob(nodes=1, image=IMAGE, command=["sh", "-c", script])
    manifest["metadata"] = {"name": "interrupted"}
    command = run(manifest)
    command.wait_for("[node 0] on node 0")
    command.wait_for("[node 0] ready")
    command.interrupt(signal.SIGINT)
    assert command.end() == 130, command.output
    assert "1 pod deleted." in command.output
    assert not pods_left(cluster, "interrupted")


def test_templates_are_refused_with_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml.safe_dump(job("true")).replace(f"image: {IMAGE}", "image: '{{ params.image }}'")
    (tmp_path / "job.yaml").write_text(text)
    assert main(["run", str(tmp_path / "job.yaml")]) == 2
    output = "".join(capsys.readouterr())
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "params.image" in line)
    assert f"{tmp_path / 'job.yaml'}:{number}: `ktrain run` doesn't render templates" in output
    assert "found {{ params.image }}" in output


def test_an_invalid_manifest_is_refused_as_by_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = job("true")
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"] = "main"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    assert main(["run", str(tmp_path / "job.yaml")]) == 2
    output = "".join(capsys.readouterr())
    assert f"{tmp_path / 'job.yaml'}:" in output
    assert "error container-name at $.spec.pytorchReplicaSpecs.Master" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["absent.yaml"], "absent.yaml can't be read: No such file or directory"),
        (["job.yaml", "--timeout", "soon"], "--timeout: found 'soon', expected a duration such as 90s, 15m"),
        (["job.yaml", "--timeout", "0"], "--timeout: found '0', expected a duration"),
        (["job.yaml", "--gpus-per-node", "2"], "--image NAME=DIR and --gpus-per-node need --local"),
        (["job.yaml", "--local", "--context", "x"], "--local: found --kubeconfig or --context"),
        (["job.yaml", "--local", "--gpus-per-node", "-3"], "found '-3', expected a whole number, 0 or more"),
    ],
)
def test_wrong_usage_exits_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("true")))
    try:
        status: object = main(["run", *args])
    except SystemExit as e:
        status = e.code
    assert status == 2
    assert message in " ".join("".join(capsys.readouterr()).split())


def test_an_unreachable_cluster_exits_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("true")))
    assert main(["run", str(tmp_path / "job.yaml"), "--kubeconfig", str(tmp_path / "absent")]) == 4
    assert "absent does not exist: set --kubeconfig or KUBECONFIG" in "".join(capsys.readouterr())
