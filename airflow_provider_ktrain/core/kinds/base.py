"""The interface of a kind of training job.

`Kind` implements what kubeflow.org's PyTorchJob and MPIJob have in common: replica specs by role, a run policy, and the
operators' labels. A kind's own file overrides what differs; nothing outside `core/kinds` compares a kind's name or
version. Facts are training-operator's (1.5 to 1.9) and mpi-operator's (0.8.2), read from their sources and from
recordings of a real cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.manifest_fields import POD_DEADLINE_MARGIN, Manifest, lower_deadline, mapping_at
from airflow_provider_ktrain.core.kinds.pod_override import pod_patches
from airflow_provider_ktrain.core.strategic_merge import merged

OPERATOR_LABEL = "training.kubeflow.org"
JOB_NAME_LABEL = f"{OPERATOR_LABEL}/job-name"


@dataclass(frozen=True)
class OperatorVersion:
    """The operator that serves one API version of a kind, and how it behaves.

    :param version: the API version, without the group.
    :param name: of the operator.
    :param default_restart_policy: the restartPolicy of a replica spec that sets none. Default: OnFailure.
    :param restart_policies: the values of a replica's restartPolicy with which it runs and ends a job. Default: all.
    :param run_policy: of a job that is built without a manifest. Default: cleanPodPolicy Running.
    :param ignored: fields of the run policy that it ignores at the top of `spec`, where an older operator reads them.
    :param defaults: fields of `spec` that are sent unless the manifest sets them.
    :param peer_command: the command that it sets in a container without command and args whose role doesn't run the
        program.
    :param limits_restarts: whether it limits restarts where the job sets no backoffLimit.
    :param rejects_after_creation: whether it validates a job itself, after the API server accepted it: the job then
        never starts.
    :param recreates_pods: whether it recreates deleted pods of a failed job without a completionTime, and goes on with
        one whose Workers were evicted.
    :param expires: whether it deletes the job and its pods after ttlSecondsAfterFinished.
    :param rewrite_hint: what to change in a manifest that was written for another version. Default: the apiVersion.
    """

    version: str
    name: str
    default_restart_policy: str = "OnFailure"
    restart_policies: tuple[str, ...] = ("Always", "OnFailure", "Never", "ExitCode")
    run_policy: Mapping[str, Any] = field(default_factory=lambda: {"cleanPodPolicy": "Running"}, compare=False)
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    peer_command: tuple[str, ...] = ()
    limits_restarts: bool = False
    rejects_after_creation: bool = False
    recreates_pods: bool = False
    expires: bool = False
    rewrite_hint: str = ""


@dataclass(frozen=True)
class Kind:
    """One kind of training job.

    Methods that take a `spec` or a `manifest` as a `dict` change it in place; their callers pass a copy.

    :param name: the resource's `kind`.
    :param plural: the resource's path segment.
    :param operators: of the API versions that we can write, newest first; which one is used is discovered from the
        cluster.
    :param replica_specs: the key of `spec` that maps roles to replica specs.
    :param roles: the replica types, in order of rank.
    :param primaries: roles whose end is the job's end, in order of preference: the first that the job has.
    :param container: the name that one container of each pod must have, or None.
    :param processes_field: the key of `spec` that holds the number of processes in each pod.
    :param schema_types: the types of its manifests, in the notation of `core/manifest/schema.py`. A whole manifest has
        the type `<name>/<version>`, or `<name>` if all versions have the same fields.
    :param required_roles: roles without which nothing runs.
    :param group: the API group.
    :param has_runtimes: whether jobs refer to a runtime, which has their image and pod templates. It is read before a
        job is sent.
    :param platform_hint: what users should know about the future of this kind. Default: empty, nothing.
    :param resources_field: the key of resources, beside image and command (see `program`).
    :param name_length: the greatest length of a job's name: its pods' names, which begin with it, are host names of at
        most 63 characters, and room is left for four digits of an index.
    :param propagation: the propagationPolicy with which a job is deleted. After `Background` the name is free before
        the pods are gone.
    :param pod_name_label: the label of pods that the operator sets to the job's name.
    :param labels_pods: whether the pods certainly have the labels of the manifest that we send.
    :param empty_roles: roles without pods if their replica spec doesn't set `replicas`; others have one.
    :param launchers: roles whose program needs the pods of other roles.
    :param auxiliary_roles: roles whose command is neither the training program nor its launcher.
    :param single_roles: roles with one pod, which is shown without its index.
    :param main_containers: containers whose failure fails the job, others being sidecars. Default: empty, all.
    :param fixed_size_reason: why a job can't be scaled; empty if it can.
    :param reports_phases: whether the operator sets the conditions Created, Running, Restarting and Succeeded.
    :param restarts_failed_jobs: whether a failed job may train again, unless it is suspended: its condition Failed then
        vanishes.
    :param failure_deletes_peers: whether the operator deletes the pods of all replicas when one fails for good.
    :param failed_role: regular expression of the message of the condition Failed; its group is the role that failed.
    :param pod_owner: `group/version/plural` of the object between the job and its pods, which has the job's name; empty
        if the job owns its pods.
    :param pod_owner_label: the label of pods with the uid of that object.
    """

    name: str
    plural: str
    operators: tuple[OperatorVersion, ...]
    replica_specs: str
    roles: tuple[str, ...]
    primaries: tuple[str, ...]
    container: str | None
    processes_field: str
    schema_types: Mapping[str, str] = field(compare=False, repr=False)
    required_roles: tuple[str, ...] = ()
    group: str = "kubeflow.org"
    has_runtimes: bool = False
    platform_hint: str = ""
    resources_field: str = "resources"
    name_length: int = 46
    propagation: str = "Foreground"
    pod_name_label: str = JOB_NAME_LABEL
    labels_pods: bool = True
    empty_roles: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    auxiliary_roles: tuple[str, ...] = ()
    single_roles: tuple[str, ...] = ()
    main_containers: tuple[str, ...] = ()
    fixed_size_reason: str = ""
    reports_phases: bool = True
    restarts_failed_jobs: bool = False
    failure_deletes_peers: bool = False
    failed_role: str = r"(\w+) replica\(s\) failed"
    pod_owner: str = ""
    pod_owner_label: str = ""

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

    @property
    def pods_outlive_job(self) -> bool:
        """Whether a deleted job is gone before its pods are."""
        return self.propagation == "Background"

    # ---- the job and its pods

    def replicas(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The replica specs of a job, by role as the manifest writes it."""
        specs = (job.get("spec") or {}).get(self.replica_specs)
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
        """Whether the training is complete only if the program of this replica is.

        The job's success is that of its primary role: of a Master or Launcher, or of all ranks where there is none.
        """
        return role == self.primary(job) and (index == 0 or not self.is_elastic(job))

    def pod_role(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """Role and index of a pod by its labels, for every version of the operators.

        training-operator labels pods with replica-type in lower case, mpi-operator with job-role only; before 1.6 the
        keys have no prefix, and the legacy pytorch-operator writes pytorch-replica-type.
        """

        def label(*names: str) -> str | None:
            keys = [k for n in names for k in (f"{OPERATOR_LABEL}/{n}", n, f"pytorch-{n}")]
            return next((labels[k] for k in keys if labels.get(k)), None)

        value = (label("replica-type", "job-role") or "").lower()
        role = next((r for r in self.roles if r.lower() == value), self.primaries[0] if value == "master" else "")
        index = label("replica-index") or "0"
        return role or value or "pod", int(index) if index.isdigit() else 0

    def size(self, job: Mapping[str, Any]) -> int:
        """How many pods the job requests."""
        return sum(self.count(job, role) for role in self.replicas(job))

    def has_role(self, role: str) -> bool:
        """Whether jobs of this kind may have pods of this role."""
        return role in self.roles

    def replica_name(self, role: str, index: int) -> str:
        """A replica as messages name it: `Worker 3`, or `Launcher`, of which there is only one."""
        return role if role in self.single_roles else f"{role} {index}"

    def renames_pods(self, role: str) -> bool:
        """Whether a pod that replaces another of this role has another name."""
        return role in self.single_roles

    def is_main_container(self, name: object) -> bool:
        """Whether a container of this name belongs to the training and isn't a sidecar."""
        return not self.main_containers or name in self.main_containers

    def main_container_name(self, job: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
        """The container of a pod that trains or initializes; the others are sidecars.

        It has a name that the operator knows, or that the manifest's `mainContainer` gives. Otherwise it is the first
        of the manifest, or of the pod if the manifest has no template: a webhook may have put a sidecar before it.

        :param job: the pod's job; only its kind and name may be known.
        :param pod: with its spec.
        :return: empty if the pod has no containers.
        """
        role, _ = self.pod_role((pod.get("metadata") or {}).get("labels") or {})
        template = ((self.replicas(job).get(role) or {}).get("template") or {}).get("spec") or {}
        names = [str(c.get("name")) for c in (pod.get("spec") or {}).get("containers") or ()]
        named = (job.get("spec") or {}).get("mainContainer")
        wanted = [*self.main_containers, named, *(c.get("name") for c in template.get("containers") or ())]
        return next((name for name in [*wanted, *names] if name in names), "")

    def runs_program(self, role: str) -> bool:
        """Whether the command of this role's pods is the training program or its launcher."""
        return role not in self.auxiliary_roles

    def trains(self, spec: Mapping[str, Any], role: str) -> bool:
        """Whether training processes run in this role's pods, so that they need its GPUs and memory."""
        return self.runs_program(role)

    def owns_pod(self, pod: Mapping[str, Any], name: str, uid: str) -> bool | None:
        """Whether a pod with the label of the job's name belongs to the job. None: its owners must be read.

        mpi-operator's launcher pod is owned by a batch Job, and a TrainJob's pods by the batch Jobs of its JobSet.

        :param name: of the job.
        :param uid: of the job.
        """
        if self.pod_owner:
            return None
        owners = pod["metadata"].get("ownerReferences") or ()
        return any(o["uid"] == uid or (o["kind"] == "Job" and o["name"] == f"{name}-launcher") for o in owners)

    def objects_with_events(self, job: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Kind and name of the objects between the job and its pods whose events show why there are no pods."""
        return []

    # ---- status

    def is_running(self, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the job runs although no condition shows it.

        :param pods: its pods; none if they are not known.
        """
        return False

    def runs_on(self, job: Mapping[str, Any]) -> bool:
        """Whether the job still trains although it has the condition Failed, and may succeed."""
        return False

    def is_restarting(self, pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the job starts again after a failure although no condition shows it.

        :param pods: its pods.
        """
        return False

    # ---- manifests

    def templates(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Role and pod template of each replica spec; a missing template is added to the manifest."""
        specs = (manifest.get("spec") or {}).get(self.replica_specs)
        for role, spec in (specs if isinstance(specs, dict) else {}).items():
            if isinstance(spec, dict):
                yield role, mapping_at(spec, "template")

    def option_templates(self, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Role and pod template of those that options are applied to; missing ones are added to the manifest."""
        return self.templates(manifest)

    def skeleton(self, api_version: str, roles: Sequence[str]) -> Manifest:
        """A manifest with these roles, one replica each, to which `core/manifest/overlay.py` applies the options."""
        return {
            "apiVersion": api_version,
            "kind": self.name,
            "metadata": {},
            "spec": {
                "runPolicy": dict(self.operator_of(api_version).run_policy),
                self.replica_specs: {
                    role: {
                        "replicas": 1,
                        "restartPolicy": "Never",
                        "template": {"spec": {"containers": [{"name": self.container or role.lower()}]}},
                    }
                    for role in roles
                },
            },
        }

    def override_pods(self, manifest: dict[str, Any], override: Mapping[str, Any]) -> None:
        """Merge a pod template into those of the manifest, by Kubernetes' strategic merge.

        :param override: a pod template, or pod templates by role.
        :raises ManifestError: it can't be merged. The path in it begins with `pod_override`.
        """
        for role, template in self.templates(manifest):
            for path, patch in pod_patches(override, role):
                changed = merged(template, patch, path)
                template.clear()
                template.update(changed)

    def main_container(self, spec: Mapping[str, Any], pod: dict[str, Any], role: str) -> dict[str, Any]:
        """The container that trains: the one that the operator looks for by name, else the first.

        :raises ManifestError: if the pod has no container.
        """
        containers = [c for c in pod.get("containers") or () if isinstance(c, dict)]
        name = self.container or spec.get("mainContainer")
        found = next((c for c in containers if c.get("name") == name), containers[0] if containers else None)
        if found is None:
            raise ManifestError(
                f"replica type {role} has no container",
                where=f"$.spec.{self.replica_specs}.{role}.template.spec.containers",
                expected="one container" + (f" named {name!r}" if name else ""),
            )
        return found

    def program(self, spec: dict[str, Any], pod: dict[str, Any], role: str) -> dict[str, Any]:
        """The mapping that holds image, command, args, env and resources of the main container.

        :raises ManifestError: if the pod has no container.
        """
        return self.main_container(spec, pod, role)

    def set_replicas(self, spec: dict[str, Any], counts: Mapping[str, int]) -> None:
        """Set the number of replicas by role.

        :raises ManifestError: for a role that the manifest doesn't have, unless its number is 0.
        """
        specs = mapping_at(spec, self.replica_specs)
        for role, count in counts.items():
            if role not in specs and count == 0:
                continue
            if not isinstance(specs.get(role), dict):
                near = next((known for known in self.roles if known.lower() == role.lower()), role)
                raise ManifestError(
                    f"the manifest has no replica type {role}, and its replicas are set",
                    where=f"$.spec.{self.replica_specs}",
                    found=", ".join(specs) or "no replica types",
                    expected=role if role in self.roles else " or ".join(self.roles),
                    remedy=f"add a replica spec {role} to the manifest" if near == role else f"did you mean {near}?",
                )
            specs[role]["replicas"] = count

    def set_processes(self, spec: dict[str, Any], count: int | str) -> None:
        """Set the number of processes in each pod.

        :raises ManifestError: for a value that this kind does not take.
        """
        spec[self.processes_field] = str(count)

    def fit(self, spec: dict[str, Any]) -> None:
        """Rewrite what the operator would refuse, although its meaning is clear."""

    def set_backstop(self, manifest: dict[str, Any], seconds: float) -> None:
        """Let the cluster end the job by itself; see `core/manifest/transform.py: backstop`.

        The job's activeDeadlineSeconds alone is only checked when the operator reconciles the job. The pods' own
        deadlines, a little later, make it reconcile; with cleanPodPolicy Running every pod is then deleted (recorded
        under restartPolicy Never and OnFailure). An MPIJob v2beta1 passes the deadline to the launcher's batch Job,
        which has a timer; its Workers end by cleanPodPolicy or by their own deadlines.
        """
        spec = manifest.setdefault("spec", {})
        policy = spec["runPolicy"] = dict(spec.get("runPolicy") or {})
        lower_deadline(policy, seconds)
        if not spec.get("cleanPodPolicy"):
            policy.setdefault("cleanPodPolicy", "Running")
        for _, template in self.templates(manifest):
            lower_deadline(template.setdefault("spec", {}), seconds + POD_DEADLINE_MARGIN)

    def suspension(self, suspend: bool) -> dict[str, Any]:
        """The part of `spec` that suspends or resumes a job."""
        return {"runPolicy": {"suspend": suspend}}

    # ---- what the operator does

    def cleans_up_pods(self, job: Mapping[str, Any]) -> bool:
        """Whether the operator deletes the running pods of a job that has ended (cleanPodPolicy)."""
        policy = ((job.get("spec") or {}).get("runPolicy") or {}).get("cleanPodPolicy")
        return policy in ("Running", "All")

    def may_create_pods_late(self, job: Mapping[str, Any]) -> bool:
        """Whether the operator may create a pod just after the job has ended, in place of one that it has lost."""
        return False

    # ---- scaling

    def is_elastic(self, job: Mapping[str, Any]) -> bool:
        """Whether the training continues with fewer Workers."""
        return False

    def worker_bounds(self, job: Mapping[str, Any]) -> tuple[int, int | None]:
        """The least and the greatest number of Workers that the job may be scaled to; None: no upper bound."""
        return 1, None
