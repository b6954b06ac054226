"""A kind of training job: what all kinds have, such as names, roles, pods and a phase.

A kind is made of smaller objects: what its manifest looks like (`form.py`), and how its operator behaves and whether
it can be scaled (`operators.py`). Their defaults are what kubeflow.org's PyTorchJob and MPIJob have in
common; a kind's own file or folder has what differs. Nothing outside `core/kinds` compares a kind's name or version.
Facts are training-operator's (1.7 to 1.9) and mpi-operator's (0.8.2), read from their sources and from recordings of a
real cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.kinds.form import ManifestForm
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest
from airflow_provider_ktrain.core.kinds.runtimes import Runtimes
from airflow_provider_ktrain.core.kinds.training_operators import (
    OPERATOR_LABEL,
    OperatorBehavior,
    OperatorVersion,
    Scaling,
)

#: What follows the job's name and the role in a pod's name.
_REST_OF_POD_NAME = re.compile(r"(-\d+(?=-\d))?(-(?P<index>\d+))?(-[a-z0-9]{5})?")


@dataclass(frozen=True)
class Kind:
    """One kind of training job.

    :param plural: the resource's path segment.
    :param operators: of the API versions that we can write, newest first; which one is used is discovered from the
        cluster.
    :param roles: the replica types, in order of rank.
    :param primaries: roles whose end is the job's end, in order of preference: the first that the job has.
    :param required_roles: roles without which nothing runs.
    :param platform_hint: what users should know about the future of this kind. Default: empty, nothing.
    :param name_length: the greatest length of a job's name: its pods' names, which begin with it, are host names of at
        most 63 characters, and room is left for four digits of an index.
    :param empty_roles: roles without pods if their replica spec doesn't set `replicas`; others have one.
    :param launchers: roles whose program needs the pods of other roles.
    :param auxiliary_roles: roles whose command is neither the training program nor its launcher.
    :param single_roles: roles with one pod, which is shown without its index.
    :param main_containers: containers whose failure fails the job, others being sidecars. Default: empty, all.
    """

    name: str
    plural: str
    operators: tuple[OperatorVersion, ...]
    form: ManifestForm
    roles: tuple[str, ...]
    primaries: tuple[str, ...]
    required_roles: tuple[str, ...] = ()
    group: str = "kubeflow.org"
    platform_hint: str = ""
    name_length: int = 46
    empty_roles: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    auxiliary_roles: tuple[str, ...] = ()
    single_roles: tuple[str, ...] = ()
    main_containers: tuple[str, ...] = ()
    runtimes: Runtimes | None = field(default=None, repr=False)
    behavior: OperatorBehavior = field(default_factory=OperatorBehavior)
    scaling: Scaling = field(default_factory=Scaling)

    @property
    def versions(self) -> tuple[str, ...]:
        """The API versions that we can write, newest first, without the group."""
        return tuple(operator.version for operator in self.operators)

    def operator_of(self, version: str) -> OperatorVersion:
        """The operator of an API version, which may have its group; of the newest if we don't know it."""
        name = version.rpartition("/")[2]
        return next((operator for operator in self.operators if operator.version == name), self.operators[0])

    @property
    def api_versions(self) -> tuple[str, ...]:
        """The `apiVersion` values that we can write, newest first."""
        return tuple(f"{self.group}/{v}" for v in self.versions)

    def skeleton(self, api_version: str, roles: Sequence[str]) -> Manifest:
        """A manifest with these roles, to which `core/manifest/overlay.py` applies the options."""
        spec = self.form.new_spec(roles, self.operator_of(api_version).run_policy)
        return {"apiVersion": api_version, "kind": self.name, "metadata": {}, "spec": spec}

    # ---- the job and its pods

    def replicas(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The replica specs of a job, by role as the manifest writes it."""
        specs = (job.get("spec") or {}).get(self.form.replica_specs)
        return {str(k): v for k, v in specs.items() if isinstance(v, Mapping)} if isinstance(specs, Mapping) else {}

    def count(self, job: Mapping[str, Any], role: str) -> int:
        """How many pods of a role the job requests; the operator's default if `replicas` is not set."""
        spec = self.replicas(job).get(role)
        if spec is None:
            return 0
        replicas = spec.get("replicas")
        return replicas if isinstance(replicas, int) else int(role not in self.empty_roles)

    def primary(self, job: Mapping[str, Any]) -> str:
        """The role whose end is the job's end."""
        found = self.replicas(job)
        return next((role for role in self.primaries if role in found), self.primaries[0])

    def completes(self, job: Mapping[str, Any], role: str, index: int) -> bool:
        """Whether the success of the job depends on the program of this replica.

        It is the success of the primary role: of a Master or Launcher, or of all ranks where there is none. An elastic
        job without a Master succeeds with any of its Workers (recordings 111).
        """
        return role == self.primary(job)

    def stopped_primary(self, job: Mapping[str, Any]) -> str:
        """Since when the job's conditions show that the pod of its primary was stopped, as RFC 3339; "" if they don't.

        Default: the conditions of the kind never show that.
        """
        return ""

    def pod_role(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """Role and index of a pod by its labels.

        training-operator labels pods with replica-type in lower case, mpi-operator with job-role only.
        """
        of_operator = (labels.get(f"{OPERATOR_LABEL}/{name}") for name in ("replica-type", "job-role"))
        value = next(filter(None, of_operator), "").lower()
        role = next((r for r in self.roles if r.lower() == value), self.primaries[0] if value == "master" else "")
        index = labels.get(f"{OPERATOR_LABEL}/replica-index") or "0"
        return role or value or "pod", int(index) if index.isdigit() else 0

    def role_of(self, pod: Mapping[str, Any]) -> tuple[str, int]:
        """Role and index of a pod: see `pod_role`."""
        return self.pod_role((pod.get("metadata") or {}).get("labels") or {})

    def replica(self, pod: Mapping[str, Any]) -> str:
        """The replica of a pod as messages name it: see `replica_name`."""
        return self.replica_name(*self.role_of(pod))

    def replica_of(self, job: Mapping[str, Any], pod_name: str) -> tuple[str, int] | None:
        """Role and index of one of the job's pods by its name alone; None if no pod of the job has this name.

        The operators' names end with role and index. A replicated job's number comes before the index of its pods, and
        pods of a Job have five more characters.
        """
        for role in self.replicas(job):
            prefix = f"{(job.get('metadata') or {}).get('name')}-{role.lower()}"
            if found := _REST_OF_POD_NAME.fullmatch(pod_name.removeprefix(prefix)):
                # five characters of a pod of a role without indexes may all be digits
                return role, 0 if role in self.single_roles else int(found["index"] or 0)
        return None

    def deciding_replicas(self, job: Mapping[str, Any]) -> set[tuple[str, int]]:
        """All replicas on which the success of the job depends: see `completes`."""
        replicas = ((role, index) for role in self.replicas(job) for index in range(self.count(job, role)))
        return {replica for replica in replicas if self.completes(job, *replica)}

    def size(self, job: Mapping[str, Any]) -> int:
        """How many pods the job requests."""
        return sum(self.count(job, role) for role in self.replicas(job))

    def has_role(self, role: str) -> bool:
        """Whether jobs of this kind may have pods of this role."""
        return role in self.roles

    def rank(self, role: str) -> int:
        """The place of a role in the order of the kind's roles; others come last."""
        return self.roles.index(role) if role in self.roles else len(self.roles)

    def replica_name(self, role: str, index: int) -> str:
        """A replica as messages name it: `Worker 3`, or `Launcher`, of which there is only one."""
        return role if role in self.single_roles else f"{role} {index}"

    def is_main_container(self, name: object) -> bool:
        """Whether a container of this name belongs to the training and isn't a sidecar."""
        return not self.main_containers or name in self.main_containers

    def main_container_name(self, job: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
        """The container of a pod that trains or initializes; the others are sidecars.

        It has a name that the operator knows, or that the manifest's `mainContainer` gives. Otherwise it is the first
        of the manifest, or of the pod if the manifest has no template: a webhook may have put a sidecar before it.

        :param job: the pod's job; only its kind and name may be known.
        :return: empty if the pod has no containers.
        """
        role, _ = self.role_of(pod)
        template = ((self.replicas(job).get(role) or {}).get("template") or {}).get("spec") or {}
        names = [str(c.get("name")) for c in (pod.get("spec") or {}).get("containers") or ()]
        named = (job.get("spec") or {}).get("mainContainer")
        wanted = [*self.main_containers, named, *(c.get("name") for c in template.get("containers") or ())]
        return next((name for name in [*wanted, *names] if name in names), "")

    def objects_with_events(self, job: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Kind and name of the objects between the job and its pods whose events show why there are no pods."""
        name, owners = str((job.get("metadata") or {}).get("name")), self.behavior.owners_with_events
        found = ((kind, at.format(job=name, role=role)) for kind, at in owners for role in self.replicas(job))
        return list(dict.fromkeys(found))

    def runs_program(self, role: str) -> bool:
        """Whether the command of this role's pods is the training program or its launcher."""
        return role not in self.auxiliary_roles

    def trains(self, spec: Mapping[str, Any], role: str) -> bool:
        """Whether training processes run in this role's pods, so that they need its GPUs and memory."""
        return self.runs_program(role)

    # ---- status

    def is_running(self, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the job runs although no condition shows it."""
        return False

    def runs_on(self, job: Mapping[str, Any]) -> bool:
        """Whether the job still trains although it has the condition Failed, and may succeed."""
        return False

    def is_restarting(self, pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the job starts again after a failure although no condition shows it."""
        return False
