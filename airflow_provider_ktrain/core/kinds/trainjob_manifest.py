"""The manifest of a TrainJob, and how options are applied to it. What the operator does with it is in `trainjob.py`.

A TrainJob names a runtime, which has the pod templates. Its `spec.trainer` sets program, number and resources of the
nodes; everything else about the pods is set by patches of the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import runtime_patches
from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest, lower_deadline, mapping_at
from airflow_provider_ktrain.core.kinds.pod_override import all_patches
from airflow_provider_ktrain.core.kinds.runtime_patches import ANY_JOB, NODE
from airflow_provider_ktrain.core.kinds.served import RuntimeRef
from airflow_provider_ktrain.core.strategic_merge import merged, removals

RUNTIME_GROUP = "trainer.kubeflow.org"
CLUSTER_RUNTIME = "ClusterTrainingRuntime"
DEFAULT_RUNTIME = "torch-distributed"  #: of jobs that are built without a manifest
#: by kind of runtime: the resource's path segment, and whether it is in a namespace
RUNTIMES = {CLUSTER_RUNTIME: ("clustertrainingruntimes", False), "TrainingRuntime": ("trainingruntimes", True)}
#: fields of the container `node`, and where `spec.trainer` has them
TRAINER_FIELDS = {
    "image": "image", "command": "command", "args": "args", "env": "env", "resources": "resourcesPerNode",
}  # fmt: skip
#: environment variables that the webhook refuses, by the ML policy of the runtime (recording 55)
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


class TrainJobManifest(Kind):
    """How manifests of TrainJobs are written."""

    def schema_types(self) -> Mapping[str, str]:
        """Trainer 2.0 to 2.3."""
        return {
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
        }

    def templates(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The patches of pod templates in our entry of runtimePatches."""
        return runtime_patches.our_templates(manifest)

    def option_templates(self, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """A patch for all pods, added to our entry of runtimePatches: its jobs aren't known yet."""
        yield ANY_JOB, runtime_patches.add_template(manifest)

    def skeleton(self, api_version: str, roles: Sequence[str]) -> Manifest:
        """A job that runs nothing yet: the runtime brings the image and the command."""
        spec: Manifest = {"runtimeRef": {"name": DEFAULT_RUNTIME}, "trainer": {}}
        return {"apiVersion": api_version, "kind": self.name, "metadata": {}, "spec": spec}

    def program(self, spec: dict[str, Any], pod: Mapping[str, Any], role: str) -> dict[str, Any]:
        """`spec.trainer`: the Trainer copies it into container `node`."""
        return mapping_at(spec, "trainer")

    def main_container(self, spec: Mapping[str, Any], pod: Mapping[str, Any], role: str) -> dict[str, Any]:
        """The patch of the container in which the trainer runs, added to the patch of the pod."""
        containers = pod.get("containers")
        found = next((c for c in containers or () if c.get("name") == NODE), None)
        if found is None:
            found = {"name": NODE}
            assert isinstance(pod, dict)
            pod["containers"] = [*(containers or ()), found]
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
                template = runtime_patches.add_template(manifest, role or ANY_JOB)
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


def runtime_ref(manifest: Mapping[str, Any]) -> RuntimeRef | None:
    """The ClusterTrainingRuntime or TrainingRuntime of runtimeRef. None: there is none, or of an unknown kind."""
    ref = (manifest.get("spec") or {}).get("runtimeRef") or {}
    kind = ref.get("kind") or CLUSTER_RUNTIME
    if not ref.get("name") or kind not in RUNTIMES or ref.get("apiGroup") not in (None, "", RUNTIME_GROUP):
        return None
    plural, namespaced = RUNTIMES[kind]
    return RuntimeRef(kind, plural, namespaced, ref["name"])


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
