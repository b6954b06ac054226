"""The cause of a failure, wherever it stands in the logs: see docs/contributing/causes.md."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.exceptions import TrainingJobError
from tests.clusters import IMAGE
from tests.core.manifests import replica
from tests.operators.task_instance import Instance
from tests.operators.virtual_instance import VirtualInstance
from tests.tables import table

pytestmark = pytest.mark.embedded("needs the scripted API server")

KINDS = table(Path(__file__).parent / "causes" / "kinds.yaml")
CASES = {f"{kind} {n}": case for kind, cases in KINDS.items() for n, case in enumerate(cases, 1)}


def program(log: str) -> str:
    """A shell's program that prints the log and ends as it says."""
    steps = ["sleep 0.5"]
    for line in log.splitlines():
        steps.append(line[1:] if line.startswith("#") else f"echo {shlex.quote(line)}")
    return "; ".join(steps if steps[-1].startswith("exit ") else [*steps, "sleep 0.5", "exit 1"])


def manifest(case: dict[str, Any]) -> dict[str, Any]:
    """The job of a case."""
    specs = {}
    for name, log in case["logs"].items():
        role = name.partition(" ")[0]
        specs[role] = replica()
        specs[role]["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", program(log)], "image": IMAGE}
    spec = {"pytorchReplicaSpecs": specs, "runPolicy": {"cleanPodPolicy": case.get("clean", "None")}}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}, "spec": spec}


def waiting() -> dict[str, Any]:
    """A replica that runs until its pod is deleted."""
    one = replica()
    one["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", "sleep 600"], "image": IMAGE}
    return one


def check(case: dict[str, Any], instance: Instance) -> None:
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(manifest=manifest(case), deferrable=False)
    assert str(failed.value).splitlines()[0].startswith(" ".join(case["first"].split()))
    assert failed.value.cause["category"] == case["category"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_cause_is_found_wherever_it_stands(name: str, instance: Instance) -> None:
    check(CASES[name], instance)


@pytest.mark.thorough
@pytest.mark.programs("the same lines through pipes of processes")
@pytest.mark.parametrize("name", CASES)
def test_cause_of_processes_is_found(name: str, instance: Instance) -> None:
    check(CASES[name], instance)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("instance", [PYTORCHJOB, MPIJOB, TRAINJOB], indirect=True, ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
@pytest.mark.parametrize(("code", "name"), [(137, "SIGKILL"), (143, "SIGTERM")])
def test_signal_is_the_cause_when_the_operator_then_deletes_the_pods(
    instance: VirtualInstance, policy: str, code: int, name: str
) -> None:
    """At a backoffLimit of 0, operators delete the pods. That the limit was reached is the effect."""
    kind, runs = instance.kind, ["sh", "-c", f"sleep 2; exit {code}"]
    one = replica()
    one["restartPolicy"] = policy
    one["template"]["spec"]["containers"][0] |= {"command": runs, "image": IMAGE}
    spec = {"runPolicy": {"backoffLimit": 0}}
    parameters: dict[str, Any] = {"command": runs, "image": IMAGE}
    if kind is TRAINJOB:
        runtime = instance.api.objects["clustertrainingruntimes"]["torch-distributed"]
        runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] = 0
    else:
        roles = {"Master": one, "Worker": waiting()} if kind is PYTORCHJOB else {"Launcher": one, "Worker": waiting()}
        field = "pytorchReplicaSpecs" if kind is PYTORCHJOB else "mpiReplicaSpecs"
        version = "kubeflow.org/v1" if kind is PYTORCHJOB else "kubeflow.org/v2beta1"
        job = {"apiVersion": version, "kind": kind.name, "metadata": {}, "spec": {**spec, field: roles}}
        parameters = {"manifest": job}
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(**parameters, deferrable=False)
    who = {PYTORCHJOB: "Master 0", MPIJOB: "Launcher", TRAINJOB: "node 0"}[kind]
    assert str(failed.value).splitlines()[0] == f"{who} was killed from outside by {name} (exit code {code})"
    assert failed.value.cause["category"] == "infrastructure"


LOST_BY_MPIRUN = """\
-----
{} has lost communication with a remote daemon.
This is usually due to either a failure of the TCP network connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and therefore will terminate the job.
-----"""
OF_PROGRAM = """\
Traceback (most recent call last):
  File "/srv/fit.py", line 12, in <module>
ValueError: sample 4711 has no label"""


#: Of a launcher's own program. No traceback in them is the cause.
WRAPPED = """\
ORTE was unable to reliably start one or more daemons.
Traceback (most recent call last):
  File "/srv/launch.py", line 17, in <module>
    main()
RuntimeError: mpirun exited with code 255"""
LOGGED = """\
2026-11-28 10:00:01,120 - launcher - ERROR - mpirun failed with exit code 1
2026-11-28 10:00:01,130 - launcher - INFO - uploaded logs"""
SURVIVED = """\
Traceback (most recent call last):
  File "/srv/tune.py", line 3, in <module>
    import optuna
ModuleNotFoundError: No module named 'optuna'
step 1 loss 2.0
#sleep 3
step 2 loss 1.9"""
UCX = """\
[train-worker-0:0:41:0] ib_mlx5_log.c:171  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81)
[train-worker-0:41:0:41] Caught signal 6 (Aborted: tkill(2) or tgkill(2))
==== backtrace (tid: 41) ====
 0  /opt/ucx/lib/libucs.so.0(ucs_handle_error+0x2e4) [0x7f]
 1  /opt/ucx/lib/ucx/libuct_ib.so.0(uct_ib_mlx5_completion_with_err+0x5) [0x7f]
================================="""
EVICTED = "Worker 1 was evicted from its node (EvictionByEvictionAPI)"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("instance", [MPIJOB], indirect=True, ids=["mpijob"])
@pytest.mark.parametrize("delay", [1, 11, 200])
@pytest.mark.parametrize(
    ("log", "is_evicted", "first"),
    [
        (LOST_BY_MPIRUN.format("ORTE"), True, EVICTED),
        (LOST_BY_MPIRUN.format("PRTE"), True, EVICTED),
        ("therefore will terminate the job.", True, EVICTED),
        (LOST_BY_MPIRUN.format("PRTE"), False, "The pod of Worker 1 was deleted before Launcher failed (exit code 1)"),
        ("", False, "The pod of Worker 1 was deleted before Launcher failed (exit code 1)"),
        (WRAPPED, False, "The pod of Worker 1 was deleted before Launcher failed (exit code 1)"),
        (LOGGED, True, EVICTED),
        (f"{SURVIVED}\n{LOST_BY_MPIRUN.format('PRTE')}", True, EVICTED),
        (UCX, True, EVICTED),
        (OF_PROGRAM, True, "Launcher failed: ValueError: sample 4711 has no label (exit code 1)"),
        (OF_PROGRAM, False, "Launcher failed: ValueError: sample 4711 has no label (exit code 1)"),
    ],
)
def test_launcher_that_fails_after_its_worker_is_the_effect(
    instance: VirtualInstance, delay: int, log: str, is_evicted: bool, first: str
) -> None:
    launcher, worker = waiting(), waiting()
    launcher["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", f"sleep {30 + delay}; {program(log)}"]
    worker["replicas"] = 3
    spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": {"cleanPodPolicy": "Running"}}
    began, ended = instance.clock, [False]

    def end_worker() -> None:
        ended[0] = True
        (pod,) = (one["metadata"]["name"] for one in instance.pods() if one["metadata"]["name"].endswith("-worker-1"))
        if is_evicted:
            instance.api.evict(pod)
        else:
            instance.api.delete_pod(pod)

    instance.when(lambda: not ended[0] and instance.clock > began + 30, end_worker)
    with pytest.raises(TrainingJobError) as failed:
        instance.execute(
            manifest={"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {}, "spec": spec},
            deferrable=False,
        )
    assert str(failed.value).splitlines()[0].startswith(first)


def workers(number: int, log: str) -> dict[str, Any]:
    one = replica()
    one["template"]["spec"]["containers"][0] |= {"command": ["sh", "-c", log], "image": IMAGE}
    return {**one, "replicas": number}


def run(instance: Instance, **parameters: Any) -> None:
    """Execute the task, to its end also in the triggerer."""
    if (deferred := instance.execute(**parameters)) is not None:
        instance.resume(instance.event(deferred))


LOST = "RuntimeError: Connection closed by peer [10.0.0.7]:4711"


@pytest.mark.parametrize("deferrable", [False, True])
def test_cause_of_a_peer_whose_log_is_not_followed(instance: Instance, deferrable: bool) -> None:
    """The peers are asked for it when the followed replica has only lost one."""
    of_rank_2 = f'if [ "$RANK" = 2 ]; then {program(OF_PROGRAM)}; sleep 300; fi; sleep 300'
    case = {"logs": {"Master 0": f"#sleep 3\n{LOST}\n#exit 1"}}
    job = manifest(case)
    job["spec"]["pytorchReplicaSpecs"]["Worker"] = workers(3, of_rank_2.replace("sleep 0.5; exit 1", "sleep 200"))
    with pytest.raises(TrainingJobError) as failed:
        run(instance, manifest=job, deferrable=deferrable, logs="primary")
    first = "Worker 1 failed: ValueError: sample 4711 has no label (it still runs)"
    assert str(failed.value).splitlines()[0] == first


@pytest.mark.parametrize("logs", ["none", "auto"])
def test_cause_far_above_the_end_of_a_log_that_was_not_followed_from_its_beginning(
    instance: Instance, logs: str
) -> None:
    """It stands before the deferral, or in a log that is read only after the failure."""
    case = {"logs": {"Master 0": "\n".join([OF_PROGRAM, "#sleep 30", *["memory map"] * 90])}}
    with pytest.raises(TrainingJobError) as failed:
        run(instance, manifest=manifest(case), deferrable=True, logs=logs)
    first = "Master 0 failed: ValueError: sample 4711 has no label (exit code 1)"
    assert str(failed.value).splitlines()[0] == first
