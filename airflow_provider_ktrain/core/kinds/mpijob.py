"""MPIJob: kubeflow.org/v2beta1, run by mpi-operator, or kubeflow.org/v1, run by training-operator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.kinds.form import ManifestForm
from airflow_provider_ktrain.core.kinds.training_operators import OperatorBehavior, OperatorVersion, Scaling

_REPLICA_SPECS, _SLOTS = "mpiReplicaSpecs", "slotsPerWorker"  #: Keys of `spec`.
_MIN_FLAGS = ("--min-np", "--min-num-proc")  # of horovodrun
_MAX_FLAGS = ("--max-np", "--max-num-proc")


class MPIJob(Kind):
    """A Launcher that runs mpirun, and the Workers in which it starts the processes.

    Under v2beta1 the launcher is a batch Job, and mpi-operator validates the job in its controller.
    """

    def trains(self, spec: Mapping[str, Any], role: str) -> bool:
        """The Workers, and the Launcher only with `runLauncherAsWorker` (v2beta1)."""
        return role != "Launcher" or bool(spec.get("runLauncherAsWorker"))

    def runs_on(self, job: Mapping[str, Any]) -> bool:
        """After an eviction of Workers, the job ends with its Launcher (recording 101-mpi-ephemeral-storage-worker)."""
        failed = true_conditions(job).get("Failed")
        if failed is None or failed.reason != "MPIJobEvicted":
            return False
        status = job.get("status") or {}
        launcher = (status.get("replicaStatuses") or {}).get("Launcher") or {}
        limit = ((job.get("spec") or {}).get("runPolicy") or {}).get("backoffLimit")
        # `failed` counts pods: the launcher's batch Job creates others up to its limit, which is 6 by default
        ended = status.get("completionTime") or (launcher.get("failed") or 0) > (6 if limit is None else limit)
        return not ended and self.operator_of(str(job.get("apiVersion"))).recreates_pods


class _Form(ManifestForm):
    """Processes are slots."""

    def set_processes(self, spec: dict[str, Any], count: int | str) -> None:
        """Slots are a number: unlike a PyTorchJob's nprocPerNode, they can't be `auto` or `gpu`."""
        if not str(count).isdigit():
            raise ManifestError(
                "nproc_per_node of an MPIJob must be a number",
                found=repr(count),
                expected=f"a number ({self.processes_field})",
            )
        spec[self.processes_field] = int(count)


class _Scaling(Scaling):
    """By horovodrun's arguments."""

    def is_elastic(self, job: Mapping[str, Any]) -> bool:
        """horovodrun is elastic with `--min-np` or `--max-np`."""
        words = _launcher_words(job)
        return any(_flag(words, flags) is not None for flags in (_MIN_FLAGS, _MAX_FLAGS))

    def worker_bounds(self, job: Mapping[str, Any]) -> tuple[int, int | None]:
        """From horovodrun's arguments, which count processes: slotsPerWorker in each Worker. 0 Workers are allowed."""
        words = _launcher_words(job)
        slots = int((job.get("spec") or {}).get(_SLOTS) or 1)
        low, high = (_flag(words, flags) for flags in (_MIN_FLAGS, _MAX_FLAGS))
        return -(-low // slots) if low else 0, high // slots if high else None


def launcher_containers(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The containers of the Launcher's pod template."""
    launcher = ((job.get("spec") or {}).get(_REPLICA_SPECS) or {}).get("Launcher") or {}
    return ((launcher.get("template") or {}).get("spec") or {}).get("containers") or []


def _launcher_words(job: Mapping[str, Any]) -> list[str]:
    main = (launcher_containers(job) or [{}])[0]
    return [str(w) for key in ("command", "args") for w in main.get(key) or ()]


def _flag(words: list[str], flags: tuple[str, ...]) -> int | None:
    """The number of an argument: `--min-np 1` or `--min-np=1`."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name in flags and (value or following).isdigit():
            return int(value or following)
    return None


_MPI_OPERATOR = OperatorVersion(
    version="v2beta1",
    name="mpi-operator",
    default_restart_policy="Never",
    restart_policies=("OnFailure", "Never"),  # it doesn't start a job with ExitCode
    # the launcher's batch Job creates new pods under Never, six by default
    run_policy={"cleanPodPolicy": "Running", "backoffLimit": 0},
    ignored=("cleanPodPolicy",),  # the Workers would keep running
    # else the launcher would start, and could fail, while its Workers are not scheduled yet
    defaults={"launcherCreationPolicy": "WaitForWorkersReady"},
    peer_command=("/usr/sbin/sshd", "-De"),  # mpi-operator 0.8
    limits_restarts=True,  # a batch Job's backoffLimit is 6 by default
    rejects_after_creation=True,  # mpi-operator has no webhook: it validates a job when it reconciles it
    recreates_pods=True,  # after an eviction
    # mpi-operator's TTL deletes the launcher and leaves the MPIJob (recording 40c-mpi-deadline-ttl)
    expires=False,
    rewrite_hint="the cluster runs mpi-operator: write apiVersion: kubeflow.org/v2beta1, put cleanPodPolicy under "
    "spec.runPolicy, and use an image whose Workers run sshd (elastic horovodrun: also add --slots with the number of "
    "slotsPerWorker, which its discover_hosts.sh doesn't print); or install training-operator",
)
# It reads cleanPodPolicy in both places. Its run policy has no backoffLimit: when it is reached, the pods are deleted
# with their logs.
_TRAINING_OPERATOR = OperatorVersion(
    version="v1",
    name="training-operator",
    default_restart_policy="Never",
    restart_policies=("Always", "OnFailure", "Never"),  # it restarts a job with ExitCode without limit
    peer_command=("sleep", "365d"),  # training-operator 1.9: mpirun uses exec
    rewrite_hint="the cluster runs training-operator: write apiVersion: kubeflow.org/v1, leave out sshAuthMountPath, "
    "launcherCreationPolicy, runLauncherAsWorker and mpiImplementation, and use an image whose mpirun starts its ranks "
    "by /etc/mpi/kubexec.sh; or install mpi-operator instead",
)

MPIJOB = MPIJob(
    name="MPIJob",
    plural="mpijobs",
    operators=(_MPI_OPERATOR, _TRAINING_OPERATOR),
    form=_Form(
        replica_specs=_REPLICA_SPECS,
        container=None,
        processes_field=_SLOTS,
        schema_types={
            "MPIJob/v1": "apiVersion:s kind:s metadata:Metadata spec!:MPIJobSpecV1 status:any",
            "MPIJobSpecV1": "slotsPerWorker:i cleanPodPolicy:s mpiReplicaSpecs!:{ReplicaSpec} mainContainer:s "
            "runPolicy:RunPolicy",
            "MPIJob/v2beta1": "apiVersion:s kind:s metadata:Metadata spec!:MPIJobSpecV2 status:any",
            "MPIJobSpecV2": "slotsPerWorker:i runLauncherAsWorker:b runPolicy:RunPolicy mpiReplicaSpecs!:{ReplicaSpec} "
            "sshAuthMountPath:s launcherCreationPolicy:AtStartup|WaitForWorkersReady "
            "mpiImplementation:OpenMPI|Intel|MPICH",
        },
    ),
    roles=("Launcher", "Worker"),
    primaries=("Launcher",),
    required_roles=("Launcher", "Worker"),
    empty_roles=("Worker",),
    launchers=("Launcher",),
    auxiliary_roles=("Worker",),  # mpirun of the Launcher starts the processes in them
    single_roles=("Launcher",),
    # under v2beta1 the launcher's pod is owned by a batch Job, which creates another one
    behavior=OperatorBehavior(renamed_roles=("Launcher",), launcher_job="-launcher"),
    scaling=_Scaling(),
)
