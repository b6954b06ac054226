"""TrainJob: trainer.kubeflow.org/v1alpha1, run by Kubeflow Trainer through a JobSet that it makes of a runtime.

Facts are Kubeflow Trainer's (2.0 to 2.3) and JobSet's (0.12), read from their sources and from recordings 50 to 61 of a
real cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.base import Kind, OperatorVersion
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest, lower_deadline, mapping_at
from airflow_provider_ktrain.core.kinds.pod_override import all_patches
from airflow_provider_ktrain.core.kinds.trainjob import patches
from airflow_provider_ktrain.core.kinds.trainjob.patches import ANY_JOB, NODE, ROLES_ANNOTATION
from airflow_provider_ktrain.core.kinds.trainjob.runtime import DEFAULT_RUNTIME
from airflow_provider_ktrain.core.strategic_merge import merged, removals

JOBSET = "jobset.sigs.k8s.io"
JOBSET_NAME_LABEL = f"{JOBSET}/jobset-name"  #: on pods: the JobSet's name, which is the TrainJob's
ROLE_LABEL = f"{JOBSET}/replicatedjob-name"
ATTEMPT_LABEL = f"{JOBSET}/restart-attempt"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
LAUNCHER = "launcher"
INITIALIZERS = ("dataset-initializer", "model-initializer")
#: fields of the container `node`, and where `spec.trainer` has them
TRAINER_FIELDS = {
    "image": "image", "command": "command", "args": "args", "env": "env", "resources": "resourcesPerNode",
}  # fmt: skip


class TrainJob(Kind):
    """Nodes that run one program, which the runtime's torchrun or mpirun distributes; before them, initializers.

    What a role is comes from the runtime: `node`, `launcher`, the initializers, or names of its author's own. The
    manifest only has the trainer, so a job's roles are those that its status lists; before, those of our annotation, or
    `node`. `spec.trainer` sets program, number and resources of the nodes; everything else about the pods is set by
    patches of the runtime.
    """

    # ---- the job and its pods

    def replicas(self, job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The roles, each with a replica spec such as the trainer implies; initializers request no GPUs."""
        trainer = _trainer(job)
        container = {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
        container |= {"name": NODE, "resources": trainer.get("resourcesPerNode") or {}}
        spec = {"template": {"spec": {"containers": [container]}}}
        return {role: {} if role in INITIALIZERS else spec for role in self._roles(job)}

    def count(self, job: Mapping[str, Any], role: str) -> int:
        """How many pods of a role the job requests. The launcher is one of the nodes, and at least one other runs.

        A job without numNodes has the number of its runtime, which is not known here: 1 is assumed. Tasks set it
        if they can read the runtime (`patches.expand`).
        """
        roles = self._roles(job)
        if role not in roles:
            return 0
        if role in self.single_roles:
            return 1
        nodes = _trainer(job).get("numNodes")
        nodes = nodes if isinstance(nodes, int) else 1
        return max(nodes - 1, 1) if LAUNCHER in roles else nodes

    def primary(self, job: Mapping[str, Any]) -> str:
        """The launcher, else `node`, else the first role that initializes nothing."""
        roles = self._roles(job)
        known = [role for role in self.primaries if role in roles]
        return [*known, *(role for role in roles if role not in INITIALIZERS), NODE][0]

    def pod_role(self, labels: Mapping[str, str]) -> tuple[str, int]:
        """The replicated job's name and the completion index, which is the node's rank."""
        index = labels.get(INDEX_LABEL) or "0"
        return labels.get(ROLE_LABEL) or "pod", int(index) if index.isdigit() else 0

    def objects_with_events(self, job: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The JobSet and its Jobs, whose failures to create pods do not reach the TrainJob (recording 55d)."""
        name = str((job.get("metadata") or {}).get("name"))
        return [("JobSet", name), *(("Job", f"{name}-{role}-0") for role in self._roles(job))]

    def has_role(self, role: str) -> bool:
        """A runtime may name its replicated jobs as it likes."""
        return re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", role) is not None

    def renames_pods(self, role: str) -> bool:
        """JobSet creates the pods of a restart under new names."""
        return True

    def _roles(self, job: Mapping[str, Any]) -> list[str]:
        """The status lists all from the start, though not in the runtime's order (recording 50d).

        Before that, and on Trainer 2.0, which doesn't list them, the annotation of our tasks does.
        """
        annotations = (job.get("metadata") or {}).get("annotations") or {}
        noted = [role for role in str(annotations.get(ROLES_ANNOTATION) or "").split(",") if role]
        listed = [str(entry.get("name")) for entry in _jobs_status(job)] or noted
        given = (job.get("spec") or {}).get("initializer") or {}
        initializers = [role for role in INITIALIZERS if role.partition("-")[0] in given]
        return sorted(listed, key=self._rank) if listed else [NODE, *initializers]

    def _rank(self, role: str) -> int:
        return self.roles.index(role) if role in self.roles else len(self.roles)

    # ---- status

    def is_running(self, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether a pod of the program (of the launcher if there is one) runs or has run. No condition shows this.

        The nodes of an MPI runtime run an SSH server before (recording 57). `jobsStatus` counts Jobs: `ready` is 1 only
        while all pods of one are ready. It decides where no pods are given.
        """
        known, by_launcher = list(pods), LAUNCHER in self._roles(job)

        def starts(role: str) -> bool:
            return role == LAUNCHER if by_launcher else role not in INITIALIZERS

        if not known:
            return any(entry.get("ready") for entry in _jobs_status(job) if starts(str(entry.get("name"))))
        return any(
            (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")
            and starts(self.pod_role((pod.get("metadata") or {}).get("labels") or {})[0])
            for pod in known
        )

    def is_restarting(self, pods: Iterable[Mapping[str, Any]]) -> bool:
        """Whether JobSet has recreated all Jobs (failurePolicy of the runtime), and no pod runs yet."""
        labels = ((pod.get("metadata") or {}).get("labels") or {} for pod in pods)
        return any(at.get(ATTEMPT_LABEL, "0") != "0" for at in labels)

    # ---- manifests

    def templates(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The patches of pod templates in our entry of runtimePatches."""
        return patches.our_templates(manifest)

    def option_templates(self, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """A patch for all pods, added to our entry of runtimePatches: its jobs aren't known yet."""
        yield ANY_JOB, patches.add_template(manifest)

    def skeleton(self, api_version: str, roles: Sequence[str]) -> Manifest:
        """A job that runs nothing yet: the runtime brings the image and the command."""
        spec: Manifest = {"runtimeRef": {"name": DEFAULT_RUNTIME}, "trainer": {}}
        return {"apiVersion": api_version, "kind": self.name, "metadata": {}, "spec": spec}

    def program(self, spec: dict[str, Any], pod: dict[str, Any], role: str) -> dict[str, Any]:
        """`spec.trainer`: the Trainer copies it into container `node`."""
        return mapping_at(spec, "trainer")

    def main_container(self, spec: Mapping[str, Any], pod: dict[str, Any], role: str) -> dict[str, Any]:
        """The patch of the container in which the trainer runs, added to the patch of the pod."""
        containers = pod["containers"] = pod.get("containers") or []
        found: dict[str, Any] | None = next((c for c in containers if c.get("name") == NODE), None)
        if found is None:
            containers.append(found := {"name": NODE})
        return found

    def override_pods(self, manifest: dict[str, Any], override: Mapping[str, Any]) -> None:
        """Merge a pod template into our patch of the runtime's, and its container `node` into `spec.trainer`.

        A patch can only add to the runtime: the API server drops null, and the directives aren't in the schema.

        :param override: a pod template for all jobs of the runtime, or pod templates by the names of these jobs.
        :raises ManifestError: it removes something, or sets the program of one job. The path in it is named.
        """
        for role, path, patch in all_patches(override):
            rest, program, at = _without_program(patch, path)
            if program and role not in ("", NODE):
                raise ManifestError(
                    f"the program of job {role} can't be set: spec.trainer is the same for all jobs",
                    where=at,
                    found=", ".join(program),
                    remedy=f"set it for all jobs, or in the runtime's job {role}",
                )
            if program:
                trainer = mapping_at(mapping_at(manifest, "spec"), "trainer")
                trainer.update(merged(trainer, program, at))
            if removed := next(removals(rest, path), None):
                raise ManifestError(
                    "a TrainJob can't remove what its runtime sets", where=removed, remedy="change the runtime"
                )
            if rest:
                template = patches.add_template(manifest, role or ANY_JOB)
                template.update(merged(template, rest, path))

    def set_replicas(self, spec: dict[str, Any], counts: Mapping[str, int]) -> None:
        """Set numNodes. The other replicated jobs have one pod.

        :raises ManifestError: for another role than `node`.
        """
        for role, count in counts.items():
            if role != NODE:
                raise ManifestError(
                    f"a {self.name} has no replica type {role}",
                    found=role,
                    expected=NODE,
                    remedy="set the number of nodes (spec.trainer.numNodes)",
                )
            mapping_at(spec, "trainer")["numNodes"] = count

    def set_processes(self, spec: dict[str, Any], count: int | str) -> None:
        """Set numProcPerNode. Without it, torchrun starts a process for each GPU, or for each CPU if there are none.

        :raises ManifestError: for a word other than auto, which removes it.
        """
        trainer = mapping_at(spec, "trainer")
        if count == "auto":
            trainer.pop("numProcPerNode", None)
            return
        if not str(count).isdigit():
            raise ManifestError(
                f"nproc_per_node of a {self.name} must be a number or auto",
                found=repr(count),
                expected="a number (numProcPerNode), or auto: the number of GPUs, or of CPUs",
            )
        trainer["numProcPerNode"] = int(count)

    def set_backstop(self, manifest: dict[str, Any], seconds: float) -> None:
        """Trainer 2.2 and newer have a timer for it, which counts from the last resumption (recordings 54, 54b)."""
        lower_deadline(mapping_at(manifest, "spec"), seconds)

    def suspension(self, suspend: bool) -> dict[str, Any]:
        """`suspend` is a field of `spec` itself."""
        return {"suspend": suspend}

    # ---- what the operator does

    def cleans_up_pods(self, job: Mapping[str, Any]) -> bool:
        """JobSet deletes the Jobs that are active at its end, in the foreground (recording 57)."""
        return True


def _trainer(job: Mapping[str, Any]) -> Mapping[str, Any]:
    trainer = (job.get("spec") or {}).get("trainer")
    return trainer if isinstance(trainer, Mapping) else {}


def _jobs_status(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in (job.get("status") or {}).get("jobsStatus") or () if isinstance(entry, Mapping)]


def _without_program(patch: Mapping[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Split a pod template: without the program of container `node`, that program as `spec.trainer`, and its path."""
    given = patch.get("spec")
    spec: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    containers = spec.get("containers")
    containers = containers if isinstance(containers, list) else []
    for i, container in enumerate(containers):
        if not isinstance(container, Mapping) or container.get("name") != NODE:
            continue
        program = {TRAINER_FIELDS[key]: value for key, value in container.items() if key in TRAINER_FIELDS}
        kept = {key: value for key, value in container.items() if key not in TRAINER_FIELDS}
        others = [*containers[:i], *([kept] if kept.keys() > {"name"} else []), *containers[i + 1 :]]
        pod = {key: value for key, value in spec.items() if key != "containers"}
        rest = {**patch, "spec": {**pod, **({"containers": others} if others else {})}}
        return ({k: v for k, v in rest.items() if v or k != "spec"}, program, f"{path}.spec.containers[{i}]")
    return dict(patch), {}, path


_TRAINER = OperatorVersion(
    version="v1alpha1",
    name="Kubeflow Trainer 2",
    defaults={"trainer": {}},  # without it the Trainer sets no PET_* variables (recording 50b)
    limits_restarts=True,  # by the backoffLimit of the batch Jobs, 6 by default
    recreates_pods=True,  # if its JobSet is deleted, the job trains again (recordings 53e, 60b)
)

TRAINJOB = TrainJob(
    name="TrainJob",
    plural="trainjobs",
    operators=(_TRAINER,),
    replica_specs="",
    roles=(NODE, LAUNCHER, *INITIALIZERS),
    primaries=(LAUNCHER, NODE),
    container=NODE,
    processes_field="numProcPerNode",
    schema_types={  # Trainer 2.0 to 2.3
        "TrainJob": "apiVersion:s kind:s metadata:Metadata spec!:TrainJobSpec status:any",
        # the overrides of Trainer 2.0 and 2.1 are known, too; 2.2 and newer refuse them
        "TrainJobSpec": "runtimeRef!:RuntimeRef trainer:Trainer initializer:Initializer "
        "runtimePatches:[RuntimePatch@manager] podTemplateOverrides:any podSpecOverrides:any labels:{s} "
        "annotations:{s} suspend:b activeDeadlineSeconds:i managedBy:s",
        "RuntimeRef": "name!:s apiGroup:s kind:s",
        "Trainer": "image:s command:[s] args:[s] env:[EnvVar@name] numNodes:i resourcesPerNode:Resources "
        "numProcPerNode:q",
        "Initializer": "dataset:InitializerSource model:InitializerSource",
        "InitializerSource": "storageUri:s env:[EnvVar@name] secretRef:ObjectName",
        "RuntimePatch": "manager!:s time:s trainingRuntimeSpec:RuntimePatchSpec",
        "RuntimePatchSpec": "template:JobSetPatch",
        "JobSetPatch": "metadata:PatchMetadata spec:JobSetPatchSpec",
        "PatchMetadata": "labels:{s} annotations:{s}",
        "JobSetPatchSpec": "replicatedJobs:[ReplicatedJobPatch@name]",
        "ReplicatedJobPatch": "name!:s template:JobPatch",
        "JobPatch": "metadata:PatchMetadata spec:JobPatchSpec",
        "JobPatchSpec": "template:PodPatch",
        "PodPatch": "metadata:PatchMetadata spec:PodPatchSpec",
        "PodPatchSpec": "affinity:Affinity containers:[ContainerPatch@name] imagePullSecrets:[ObjectName] "
        "initContainers:[ContainerPatch@name] nodeSelector:{s} schedulingGates:any "
        "securityContext:PodSecurityContext serviceAccountName:s terminationGracePeriodSeconds:i "
        "tolerations:[Toleration] volumes:[Volume@name]",
        "ContainerPatch": "name!:s env:[EnvVar@name] securityContext:SecurityContext "
        "volumeMounts:[VolumeMount@mountPath]",
    },
    group="trainer.kubeflow.org",
    has_runtimes=True,
    resources_field="resourcesPerNode",
    # the pods' names are `<job>-dataset-initializer-0-<index>-xxxxx`, of at most 63 characters (recording 55b)
    name_length=33,
    # in the foreground, Kubeflow Trainer recreates the JobSet until the TrainJob is gone (recordings 53b, 53e)
    propagation="Background",
    pod_name_label=JOBSET_NAME_LABEL,
    labels_pods=False,
    launchers=(LAUNCHER,),
    auxiliary_roles=INITIALIZERS,
    single_roles=(LAUNCHER, *INITIALIZERS),
    main_containers=(NODE, *INITIALIZERS),
    reports_phases=False,
    failure_deletes_peers=True,  # and with maxRestarts of the runtime recreates them
    restarts_failed_jobs=True,  # when its JobSet is deleted, for example by a TTL of the runtime (recording 60b)
    # by the name of the batch Job: `jobset failed due to ... (first failed job: train-node-0)`
    failed_role=rf"first failed job: \S+?-({'|'.join((NODE, LAUNCHER, *INITIALIZERS))})-0\)",
    pod_owner="jobset.x-k8s.io/v1alpha2/jobsets",
    pod_owner_label=f"{JOBSET}/jobset-uid",  # JobSet 0.10 and newer
    fixed_size_reason="Kubeflow Trainer can't change the number of nodes of a TrainJob (KEP-2903 plans it)",
)
