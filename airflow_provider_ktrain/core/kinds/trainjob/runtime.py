"""The runtime of a TrainJob: which one it is, and what its ML policy means.

The policy determines the number of nodes, and what starts the program there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from airflow_provider_ktrain.core.errors import RuntimeMismatchError
from airflow_provider_ktrain.core.kinds.runtimes import RuntimeRef

RUNTIME_GROUP = "trainer.kubeflow.org"
CLUSTER_RUNTIME = "ClusterTrainingRuntime"
DEFAULT_RUNTIME = "torch-distributed"  #: Runtime of jobs that are built without a manifest.
#: The resource's path segment, and whether it is in a namespace, by kind of runtime.
RUNTIMES = {CLUSTER_RUNTIME: ("clustertrainingruntimes", False), "TrainingRuntime": ("trainingruntimes", True)}
#: Environment variables that the webhook refuses, by the ML policy of the runtime (recording 55).
RESERVED_ENVIRONMENT = {
    "torch": frozenset({"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}),
    "mpi": frozenset(
        {
            "OMPI_MCA_orte_default_hostfile",
            "OMPI_MCA_orte_keep_fqdn_hostnames",
            "OMPI_MCA_orte_set_default_slots",
            "OMPI_MCA_plm_rsh_args",
        }
    ),
}
TORCH = "torch"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"  #: Label of a Job template: which step it is.
TRAINER_STEP = "trainer"  #: Step of the job whose number of pods is the policy's.
#: Label and value of a runtime that will be removed.
SUPPORT_LABEL, DEPRECATED = "trainer.kubeflow.org/support", "deprecated"
SOURCES = (TORCH, "mpi", "jax", "xgboost", "flux")  #: Keys of mlPolicy that say how the nodes find each other.
#: Words of commands that start one process group on all nodes.
_LAUNCHERS = ("torchrun", "torch.distributed", "accelerate", "deepspeed", "mpirun", "tune ")


def runtime_ref(manifest: Mapping[str, Any]) -> RuntimeRef | None:
    """The ClusterTrainingRuntime or TrainingRuntime of runtimeRef. None: there is none, or of an unknown kind."""
    ref = (manifest.get("spec") or {}).get("runtimeRef") or {}
    kind = ref.get("kind") or CLUSTER_RUNTIME
    if not ref.get("name") or kind not in RUNTIMES or ref.get("apiGroup") not in (None, "", RUNTIME_GROUP):
        return None
    plural, namespaced = RUNTIMES[kind]
    return RuntimeRef(kind, plural, namespaced, ref["name"])


def of_other_kind(ref: RuntimeRef) -> RuntimeRef:
    """The TrainingRuntime with the name of a ClusterTrainingRuntime, or the other way round."""
    kind = next(kind for kind in RUNTIMES if kind != ref.kind)
    plural, namespaced = RUNTIMES[kind]
    return RuntimeRef(kind, plural, namespaced, ref.name)


def policy_of(runtime: Mapping[str, Any]) -> Mapping[str, Any]:
    """The runtime's mlPolicy; empty if it has none."""
    policy = (runtime.get("spec") or {}).get("mlPolicy")
    return policy if isinstance(policy, Mapping) else {}


def node_count(manifest: Mapping[str, Any], runtime: Mapping[str, Any]) -> int | None:
    """The number of nodes: the job's numNodes, else the runtime's. None: neither sets it.

    A runtime for MPI has its number in the Job `node`, to which runLauncherAsNode adds the launcher (mpi.go and
    trainingruntime.go 2.3).
    """
    trainer = (manifest.get("spec") or {}).get("trainer") or {}
    number, policy = trainer.get("numNodes"), policy_of(runtime)
    if number is None and isinstance(mpi := policy.get("mpi"), Mapping):
        pods = _pods(runtime, "node")
        number = pods + bool(mpi.get("runLauncherAsNode")) if pods is not None else None
    elif number is None:
        number = policy.get("numNodes")
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _pods(runtime: Mapping[str, Any], name: str) -> int | None:
    """How many pods a replicated job of the runtime has; None if there is no such job."""
    jobs = ((runtime["spec"].get("template") or {}).get("spec") or {}).get("replicatedJobs") or ()
    job = next((j for j in jobs if isinstance(j, Mapping) and j.get("name") == name), None)
    if job is None:
        return None
    template = job.get("template") or {}
    of_trainer = ((template.get("metadata") or {}).get("labels") or {}).get(ANCESTOR_LABEL) == TRAINER_STEP
    number = policy_of(runtime).get("numNodes") if of_trainer else (template.get("spec") or {}).get("parallelism")
    return number if isinstance(number, int) else 1


def require_policy(manifest: Mapping[str, Any], runtime: Mapping[str, Any], wanted: str) -> None:
    """Check that the runtime starts programs as the job's program expects it.

    A single node needs no policy, unless the runtime has another one, whose command the program would replace.

    :param wanted: key of mlPolicy: `torch`.
    :raises RuntimeMismatchError: it has another policy, or none for several nodes.
    """
    policy = policy_of(runtime)
    others = [source for source in SOURCES if source in policy]
    if wanted in policy or (not others and node_count(manifest, runtime) in (None, 1)):
        return
    raise RuntimeMismatchError(
        f"the runtime has no {wanted} policy, so the nodes would not find each other",
        where="$.spec.runtimeRef",
        found=f"{(runtime.get('metadata') or {}).get('name')} with mlPolicy {', '.join(others) or 'for no framework'}",
        expected=f"a runtime with mlPolicy.{wanted}",
        remedy="use a runtime such as torch-distributed; a function for mpirun needs @task.mpijob",
    )


def python_without_torchrun(command: object) -> str:
    """The program of a command that runs Python directly, so once on each node; empty if it doesn't.

    :param command: command and arguments of the container.
    """
    words = [str(word) for word in command] if isinstance(command, list) else []
    program = PurePosixPath(words[0]).name if words else ""
    if not program.startswith("python") or any(launcher in " ".join(words) for launcher in _LAUNCHERS):
        return ""
    return program
