"""What the manifest of a kind looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.manifest_fields import POD_DEADLINE_MARGIN, lower_deadline, mapping_at
from airflow_provider_ktrain.core.kinds.strategic_merge import member, merged

POD_OVERRIDE = "pod_override"  #: Name of the parameter, with which paths in it begin.
POD_TEMPLATE_FIELDS = {"metadata", "spec"}  #: Other keys of a `pod_override` are roles.


def override_patches(override: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Role, path and content of each pod template of a `pod_override`; the role of one for all roles is empty."""
    if override.keys() <= POD_TEMPLATE_FIELDS:
        yield "", POD_OVERRIDE, override
    else:
        yield from ((role, member(POD_OVERRIDE, role), p) for role, p in override.items() if isinstance(p, Mapping))


@dataclass(frozen=True)
class ManifestForm:
    """The form of PyTorchJob and MPIJob: replica specs by role, and a run policy.

    Methods that take a `spec` or a `manifest` as a `dict` change it in place; their callers pass a copy.

    :param replica_specs: the key of `spec` that maps roles to replica specs; empty if there is none.
    :param container: the name that one container of each pod must have, or None.
    :param processes_field: the key of `spec` that holds the number of processes in each pod.
    :param schema_types: the types of its manifests, in the notation of `core/manifest/schema.py`. A whole manifest has
        the type `<name>/<version>`, or `<name>` if all versions have the same fields.
    :param resources_field: the key of resources, beside image and command (see `program`).
    """

    replica_specs: str
    container: str | None
    processes_field: str
    schema_types: Mapping[str, str] = field(compare=False, repr=False)
    resources_field: str = "resources"

    def new_spec(self, roles: Sequence[str], run_policy: Mapping[str, Any]) -> dict[str, Any]:
        """The `spec` of a job with these roles, one replica each, without options."""
        return {
            "runPolicy": dict(run_policy),
            self.replica_specs: {
                role: {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": {"spec": {"containers": [{"name": self.container or role.lower()}]}},
                }
                for role in roles
            },
        }

    def templates(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Role and pod template of each replica spec; a missing template is added to the manifest."""
        specs = (manifest.get("spec") or {}).get(self.replica_specs)
        for role, spec in (specs if isinstance(specs, dict) else {}).items():
            if isinstance(spec, dict):
                yield role, mapping_at(spec, "template")

    def option_templates(self, manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Role and pod template of those that options are applied to; missing ones are added to the manifest."""
        return self.templates(manifest)

    def override_pods(self, manifest: dict[str, Any], override: Mapping[str, Any]) -> None:
        """Merge a pod template into those of the manifest, by Kubernetes' strategic merge.

        :raises ManifestError: it can't be merged. The path in it begins with `pod_override`.
        """
        for patched, path, patch in override_patches(override):
            for role, template in self.templates(manifest):
                if patched in ("", role):
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
        """The mapping that holds image, command, args, env and resources of the main container."""
        return self.main_container(spec, pod, role)

    def grace_seconds(
        self, manifest: Mapping[str, Any], pod: Mapping[str, Any], runtime: Mapping[str, Any] | None
    ) -> float | None:
        """The grace period of the pods that run the program. None: nothing sets it.

        :param pod: the spec of a pod template.
        :param runtime: of a TrainJob. None: it isn't known.
        """
        return pod.get("terminationGracePeriodSeconds")

    def set_replicas(self, spec: dict[str, Any], counts: Mapping[str, int], roles: Sequence[str]) -> None:
        """Set the number of replicas by role.

        :raises ManifestError: for a role that the manifest doesn't have, unless its number is 0.
        """
        specs = mapping_at(spec, self.replica_specs)
        for role, count in counts.items():
            if role not in specs and count == 0:
                continue
            if not isinstance(specs.get(role), dict):
                near = next((known for known in roles if known.lower() == role.lower()), role)
                raise ManifestError(
                    f"the manifest has no replica type {role}, and its replicas are set",
                    where=f"$.spec.{self.replica_specs}",
                    found=", ".join(specs) or "no replica types",
                    expected=role if role in roles else " or ".join(roles),
                    remedy=f"add a replica spec {role} to the manifest" if near == role else f"did you mean {near}?",
                )
            specs[role]["replicas"] = count

    def set_processes(self, spec: dict[str, Any], count: int | str) -> None:
        """Set the number of processes in each pod."""
        spec[self.processes_field] = str(count)

    def fit(self, spec: dict[str, Any]) -> None:
        """Rewrite what the operator would refuse, although its meaning is clear."""

    def set_backstop(self, manifest: dict[str, Any], seconds: float) -> None:
        """Let the cluster end the job by itself; see `core/manifest/deadline.py`.

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
