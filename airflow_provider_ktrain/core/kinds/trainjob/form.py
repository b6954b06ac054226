"""What the manifest of a TrainJob looks like: the program in `spec.trainer`, pods as patches of the runtime's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.form import ManifestForm, override_patches
from airflow_provider_ktrain.core.kinds.manifest_fields import lower_deadline, mapping_at
from airflow_provider_ktrain.core.kinds.strategic_merge import merged, removals
from airflow_provider_ktrain.core.kinds.trainjob import patches
from airflow_provider_ktrain.core.kinds.trainjob.patches import ANY_JOB, NODE
from airflow_provider_ktrain.core.kinds.trainjob.runtime import DEFAULT_RUNTIME

#: Fields of the container `node`, and where `spec.trainer` has them.
TRAINER_FIELDS = {
    "image": "image", "command": "command", "args": "args", "env": "env", "resources": "resourcesPerNode",
}  # fmt: skip


class TrainJobForm(ManifestForm):
    """`spec.trainer` sets program, number and resources of the nodes; patches of the runtime set everything else."""

    def templates(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The patches of pod templates in our entry of runtimePatches."""
        return patches.our_templates(manifest)

    def option_templates(self, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """A patch for all pods, added to our entry of runtimePatches: its jobs aren't known yet."""
        yield ANY_JOB, patches.add_template(manifest)

    def new_spec(self, roles: Sequence[str], run_policy: Mapping[str, Any]) -> dict[str, Any]:
        """A job that runs nothing yet: the runtime brings the image and the command."""
        return {"runtimeRef": {"name": DEFAULT_RUNTIME}, "trainer": {}}

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
        for role, path, patch in override_patches(override):
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

    def grace_seconds(
        self, manifest: Mapping[str, Any], pod: Mapping[str, Any], runtime: Mapping[str, Any] | None
    ) -> float | None:
        """The shortest one of all pods, as the patches of the job and its runtime set it."""
        return patches.grace_seconds(manifest, runtime)

    def set_replicas(self, spec: dict[str, Any], counts: Mapping[str, int], roles: Sequence[str]) -> None:
        """Set numNodes. The other replicated jobs have one pod."""
        for role, count in counts.items():
            if role != NODE:
                raise ManifestError(
                    f"a TrainJob has no replica type {role}",
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
                "nproc_per_node of a TrainJob must be a number or auto",
                found=repr(count),
                expected="a number (numProcPerNode), or auto: the number of GPUs, or of CPUs",
            )
        trainer["numProcPerNode"] = int(count)

    def set_backstop(self, manifest: dict[str, Any], seconds: float) -> None:
        """The Trainer has a timer for it, which counts from the last resumption (recordings 54, 54b)."""
        lower_deadline(mapping_at(manifest, "spec"), seconds)

    def suspension(self, suspend: bool) -> dict[str, Any]:
        """`suspend` is a field of `spec` itself."""
        return {"suspend": suspend}


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


FORM = TrainJobForm(
    replica_specs="",
    container=NODE,
    processes_field="numProcPerNode",
    resources_field="resourcesPerNode",
    schema_types={  # Trainer 2.2 and 2.3
        "TrainJob": "apiVersion:s kind:s metadata:Metadata spec!:TrainJobSpec status:any",
        "TrainJobSpec": "runtimeRef!:RuntimeRef trainer:Trainer initializer:Initializer "
        "runtimePatches:[RuntimePatch@manager] suspend:b activeDeadlineSeconds:i managedBy:s",
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
)
