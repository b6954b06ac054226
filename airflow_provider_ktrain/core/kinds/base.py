"""What a PyTorchJob or an MPIJob is, as data: API versions, replica roles, labels, what ends the job.

A new kind is one more entry here. Facts are training-operator's (1.5 to 1.9) and mpi-operator's (0.8.2), read from
their sources and from recordings of a real cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.errors import UnknownKindError

Manifest = dict[str, Any]

OPERATOR_LABEL = "training.kubeflow.org"
JOB_NAME_LABEL = f"{OPERATOR_LABEL}/job-name"


@dataclass(frozen=True)
class Kind:
    """One kind of training job.

    :param name: the resource's `kind`.
    :param plural: its path segment.
    :param versions: API versions that we can write, newest first; which one is used is discovered from the cluster.
    :param replica_specs: the key of `spec` that maps replica types to their specs.
    :param roles: the replica types, in order of rank.
    :param primaries: roles whose end is the job's end, in order of preference: the first that the job has.
    :param container: the name that the operator wants one container to have, or None.
    """

    name: str
    plural: str
    versions: tuple[str, ...]
    replica_specs: str
    roles: tuple[str, ...]
    primaries: tuple[str, ...]
    container: str | None
    group: str = "kubeflow.org"

    @property
    def api_versions(self) -> tuple[str, ...]:
        return tuple(f"{self.group}/{v}" for v in self.versions)

    def replicas(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The replica specs of a job, by role as the manifest writes it."""
        specs = (job.get("spec") or {}).get(self.replica_specs)
        return {str(k): v for k, v in specs.items() if isinstance(v, Mapping)} if isinstance(specs, Mapping) else {}

    def count(self, job: Mapping[str, Any], role: str) -> int:
        """How many pods of a role the job asks for: `replicas`, 1 where it is left out (MPIJob v1 Workers: 0)."""
        spec = self.replicas(job).get(role)
        if spec is None:
            return 0
        replicas = spec.get("replicas")
        if isinstance(replicas, int):
            return replicas
        return 0 if self.name == "MPIJob" and role == "Worker" else 1

    def primary(self, job: Mapping[str, Any]) -> str:
        """The role whose end is the job's end."""
        found = self.replicas(job)
        return next((role for role in self.primaries if role in found), self.primaries[0])

    def pod_role(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """Role and index of a pod by its labels, whatever the operator's version.

        training-operator labels pods with replica-type in lower case, mpi-operator with job-role only; before 1.6 the
        keys have no prefix, and the legacy pytorch-operator writes pytorch-replica-type.
        """

        def label(*names: str) -> str | None:
            keys = [k for n in names for k in (f"{OPERATOR_LABEL}/{n}", n, f"pytorch-{n}")]
            return next((labels[k] for k in keys if labels.get(k)), None)

        said = (label("replica-type", "job-role") or "").lower()
        role = next((r for r in self.roles if r.lower() == said), self.primaries[0] if said == "master" else "")
        index = label("replica-index") or "0"
        return role or said or "pod", int(index) if index.isdigit() else 0


PYTORCHJOB = Kind(
    name="PyTorchJob",
    plural="pytorchjobs",
    versions=("v1",),
    replica_specs="pytorchReplicaSpecs",
    roles=("Master", "Worker"),
    primaries=("Master", "Worker"),
    container="pytorch",
)
MPIJOB = Kind(
    name="MPIJob",
    plural="mpijobs",
    versions=("v2beta1", "v1"),
    replica_specs="mpiReplicaSpecs",
    roles=("Launcher", "Worker"),
    primaries=("Launcher",),
    container=None,
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (PYTORCHJOB, MPIJOB)}


def kind_of(name: object) -> Kind:
    """The Kind of that name; UnknownKindError names the ones there are."""
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    near = next((known for known in KINDS if known.lower() == str(name).lower()), None)
    raise UnknownKindError(
        "no kind of training job",
        where="kind",
        found=repr(name) if name else "nothing",
        expected=f"one of {', '.join(sorted(KINDS))}",
        remedy=f"did you mean {near}?" if near else "other kinds are not for this provider",
    )
