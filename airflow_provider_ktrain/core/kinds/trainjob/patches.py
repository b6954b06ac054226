"""The pod templates of a TrainJob: they are in its runtime, and `spec.runtimePatches` changes them.

The options of a task are known before the runtime is. They are therefore first applied to one pod template, in our
entry of runtimePatches, under the name ANY_JOB. `expand` turns it into a patch of each replicated job of the runtime,
so that strategic merging, which the Trainer does with the entries in their order, loses nothing of the runtime's.

The API server of Trainer 2.3 accepts patches of jobs and containers that the runtime doesn't have; the job then never
starts (recording 55d). `expand` refuses them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError, RuntimeMismatchError
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest, mapping_at
from airflow_provider_ktrain.core.kinds.mpirun import OPEN_MPI, with_exports
from airflow_provider_ktrain.core.kinds.runtimes import Runtimes, Served
from airflow_provider_ktrain.core.kinds.strategic_merge import merged
from airflow_provider_ktrain.core.kinds.trainjob.runtime import (
    RUNTIMES,
    node_count,
    of_other_kind,
    policy_of,
    require_policy,
    runtime_ref,
)

MANAGER = "ktrain.airflow/provider"  #: Manager of our entry of runtimePatches.
ANY_JOB = "*"  #: Stands for each replicated job, until the runtime is known.
NODE = "node"  #: The container in which the trainer runs, in every runtime.
PATCHES, DEADLINE = "runtimePatches", "activeDeadlineSeconds"
#: The versions before 2.2, by what they had in place of runtimePatches.
OLDER = {"podTemplateOverrides": "2.1", "podSpecOverrides": "2.0"}
#: The jobs of the TrainJob's runtime, which the status lists only later.
ROLES_ANNOTATION = "ktrain.airflow/roles"
#: The jobs of the TrainJob's runtime that have a successPolicy, which ends them before all their pods have ended.
SUCCESS_POLICY_ANNOTATION = "ktrain.airflow/success-policy"
#: Containers whose environment the webhook doesn't let patches set, and the field that does.
ENV_FIELDS = {
    NODE: "spec.trainer.env",
    "dataset-initializer": "spec.initializer.dataset.env",
    "model-initializer": "spec.initializer.model.env",
}
#: Volumes that the Trainer adds to the pods of MPI runtimes.
TRAINER_VOLUMES = frozenset({"mpi-ssh-auth", "mpi-hostfile"})
CONTAINER_LISTS = ("containers", "initContainers")
_MAX_POD_NAME = 63
_POD_SUFFIX = len("-0-") + len("-xxxxx") + 1  # of `<job>-<replicated job>-0-<index>-xxxxx`, without the index


def require_supported(fields: frozenset[str]) -> None:
    """Check that jobs can be submitted to the cluster's Trainer: 2.2 and newer, which have runtimePatches.

    :param fields: the fields of `spec` in the served schema.
    :raises RuntimeMismatchError: it is older. It may be upgraded before a retry.
    """
    if PATCHES in fields:
        return
    field, version = next(((f, v) for f, v in OLDER.items() if f in fields), ("", "older than 2.2"))
    raise RuntimeMismatchError(
        f"the cluster's Kubeflow Trainer is {version}: TrainJobs can be submitted only to 2.2 or newer",
        found=f"spec.{field} in the schema of TrainJob" if field else "",
        expected=f"spec.{PATCHES}",
        remedy="have Kubeflow Trainer upgraded; a retry or a clear then submits the job",
    )


def lacks(served: Served) -> str:
    """What a job without runtimePatches lacks, for the log; empty if it has them."""
    if served.supported and served.runtime is not None:
        return ""
    backstop = "" if served.supported else f", and the job gets no {DEADLINE} as a backstop"
    return f"The job's pods don't get this task's labels{backstop}: {served.unreadable or 'the runtime is not known'}."


def our_templates(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of the replicated job and patch of its pod template, for each in our entry of runtimePatches.

    :raises ManifestError: if another type of value is in place of a template.
    """
    for entry in _entries(manifest):
        for replicated in _jobs_of(entry) if entry.get("manager") == MANAGER else ():
            yield (
                str(replicated.get("name")),
                mapping_at(mapping_at(mapping_at(replicated, "template"), "spec"), "template"),
            )


def add_template(manifest: dict[str, Any], job: str = ANY_JOB) -> dict[str, Any]:
    """The pod template for a replicated job in our entry of runtimePatches, added if it isn't there."""
    templates = dict(our_templates(manifest))
    if job not in templates:
        templates[job] = {}
        _set_templates(mapping_at(manifest, "spec"), templates)
    return templates[job]


def _set_templates(spec: dict[str, Any], templates: Mapping[str, dict[str, Any]]) -> None:
    """Let our entry, the last of runtimePatches, have these pod templates; without any there is no entry."""
    jobs = [{"name": name, "template": {"spec": {"template": template}}} for name, template in templates.items()]
    ours = {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    others = [e for e in spec.pop(PATCHES, None) or () if not (isinstance(e, Mapping) and e.get("manager") == MANAGER)]
    if others or jobs:
        spec[PATCHES] = [*others, ours] if jobs else others


def expand(manifest: Mapping[str, Any], served: Served, *, name_length: int, policy: str = "") -> Manifest:
    """The manifest with patches of the replicated jobs that the runtime has, in place of ANY_JOB.

    If schema or runtime can't be read, our entry is removed: the pods then have none of our labels. The user's own
    entries are kept as they are. A job without numNodes gets the runtime's, and an annotation names the runtime's jobs.

    :param policy: the ML policy that the runtime must have, such as `torch`. Default: empty, any.
    :raises RuntimeMismatchError: the options need a schema or runtime that can't be read; a patch names a job,
        container or volume that the runtime doesn't have; the pods' names would be too long.
    """
    result: Manifest = copy.deepcopy(dict(manifest))
    spec, templates = mapping_at(result, "spec"), dict(our_templates(result))
    options = templates.pop(ANY_JOB, {})
    _set_templates(spec, templates)
    if policy and served.runtime is not None:
        require_policy(result, served.runtime, policy)
    if named := _named(options):
        _require_patches(named, served)
    if served.runtime is None:
        return result
    runtime = served.runtime
    trainer = mapping_at(spec, "trainer")
    if trainer.get("numNodes") is None and (count := node_count(result, runtime)) is not None:
        trainer["numNodes"] = count  # so that the follower knows the size of the job
    _export_variables(trainer, runtime)
    replicated_by_runtime = replicated_jobs((runtime.get("spec") or {}).get("template") or {})
    with_policy = [job for job in replicated_by_runtime if _job_spec(job).get("successPolicy")]
    annotations = dict(mapping_at(result, "metadata").get("annotations") or {})
    for annotation, jobs in ((ROLES_ANNOTATION, replicated_by_runtime), (SUCCESS_POLICY_ANNOTATION, with_policy)):
        if jobs:
            annotations[annotation] = ",".join(str(job.get("name")) for job in jobs)
    result["metadata"]["annotations"] = annotations
    if not served.supported:
        return result
    for problem in mismatches(result, runtime, name_length):
        raise problem
    jobs = replicated_jobs(patched_template(result, runtime))
    _require_containers(options, jobs)
    for replicated in jobs:
        name = str(replicated.get("name"))
        templates[name] = merged(templates.get(name) or {}, _patch(replicated, options))
    _set_templates(spec, templates)
    return result


def _export_variables(trainer: dict[str, Any], runtime: Mapping[str, Any]) -> None:
    """Pass the values of `env` to all processes of mpirun: the launcher's node, on which rank 0 runs, has no `env`.

    A patch can't set it there. Values from a Secret or ConfigMap can't be passed.
    """
    mpi = ((runtime.get("spec") or {}).get("mlPolicy") or {}).get("mpi")
    if mpi is None or (mpi.get("mpiImplementation") or OPEN_MPI) != OPEN_MPI or not trainer.get("command"):
        return
    env = [one for one in trainer.get("env") or () if isinstance(one, dict) and "value" in one]
    exports = {str(one.get("name")): f"{one.get('name')}={one['value']}" for one in env}
    trainer["command"] = with_exports(trainer["command"], exports)


def patched_template(manifest: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime's JobSet template with the manifest's patches applied, as the Trainer does.

    A patch that can't be merged is left out: the API server refuses it.
    """
    template = copy.deepcopy(dict((runtime.get("spec") or {}).get("template") or {}))
    for entry in _entries(manifest):
        with contextlib.suppress(ManifestError):
            template = merged(template, (entry.get("trainingRuntimeSpec") or {}).get("template") or {})
    return template


def grace_seconds(manifest: Mapping[str, Any], runtime: Mapping[str, Any] | None) -> float | None:
    """The shortest grace period of the pods, with the manifest's patches. None: nothing sets one.

    :param runtime: None: it isn't known.
    """
    graces: dict[str, float] = {}
    jobs = replicated_jobs(((runtime or {}).get("spec") or {}).get("template") or {})
    for replicated in (*jobs, *(job for entry in _entries(manifest) for job in _jobs_of(entry))):
        grace = pod_of(replicated).get("terminationGracePeriodSeconds")
        if isinstance(grace, int):  # the API server refuses anything else
            name = str(replicated.get("name"))
            graces |= dict.fromkeys(graces if name == ANY_JOB else (), grace) | {name: grace}
    return min(graces.values(), default=None)


def mismatches(
    manifest: Mapping[str, Any], runtime: Mapping[str, Any], name_length: int
) -> Iterator[RuntimeMismatchError]:
    """Patches of jobs and containers that the runtime doesn't have, mounts of volumes that aren't there, long names."""
    jobs = replicated_jobs((runtime.get("spec") or {}).get("template") or {})
    known = {str(r.get("name")): pod_of(r) for r in jobs}
    patched = {str(r.get("name")): pod_of(r) for r in replicated_jobs(patched_template(manifest, runtime))}
    for at, entry in enumerate(_entries(manifest)):
        where = f"$.spec.{PATCHES}[{at}]"
        for replicated in _jobs_of(entry):
            name = str(replicated.get("name"))
            if name in known:
                volumes = _names(patched[name], "volumes")
                yield from _mismatches_of_job(where, name, pod_of(replicated), known[name], volumes)
            elif name != ANY_JOB:
                yield _unknown(f"the runtime has no job named {name}", where, name, known)
    yield from _long_names(jobs, node_count(manifest, runtime) or 1, name_length)


def _mismatches_of_job(
    where: str, name: str, patch: Mapping[str, Any], pod: Mapping[str, Any], volumes: set[str]
) -> Iterator[RuntimeMismatchError]:
    for key in CONTAINER_LISTS:
        containers = _names(pod, key)
        for container in _items(patch, key):
            if container.get("name") not in containers:
                message = f"the runtime's job {name} has no container named {container.get('name')} in {key}"
                yield _unknown(message, where, str(container.get("name")), containers)
            for mount in _items(container, "volumeMounts"):
                if mount.get("name") not in volumes | TRAINER_VOLUMES:
                    message = f"the pods of job {name} have no volume named {mount.get('name')}"
                    yield _unknown(message, where, str(mount.get("name")), volumes)


def _long_names(jobs: Sequence[Mapping[str, Any]], count: int, name_length: int) -> Iterator[RuntimeMismatchError]:
    """Replicated jobs whose pods' names, `<job>-<replicated job>-0-<index>-xxxxx`, would exceed 63 characters.

    JobSet refuses such a job, which only an event shows (recording 55b).
    """
    for replicated in jobs:
        index = len(str(max(count - 1, 0))) if node_container(replicated) is not None else 1
        longest = _MAX_POD_NAME - name_length - _POD_SUFFIX - index
        if len(str(replicated.get("name"))) > longest:
            yield RuntimeMismatchError(
                f"the name of the runtime's job {replicated.get('name')} is too long: JobSet would refuse the job",
                found=f"{len(str(replicated.get('name')))} characters",
                expected=f"at most {longest}, as the TrainJob's name has {name_length}",
                remedy="shorten it in the runtime, or use another runtime",
            )


def require_code(served: Served) -> None:
    """Check that a job can get code: volumes need runtimePatches, and MPI nodes a command that can't be changed.

    :raises RuntimeMismatchError: schema or runtime can't be read, or the runtime is for MPI.
    """
    _require_patches("code", served)
    if "mpi" in policy_of(served.runtime or {}):
        raise RuntimeMismatchError(
            "code can't be used with an MPI runtime: its nodes run a command that a TrainJob can't change",
            where="$.spec.runtimeRef",
            remedy="put the code into the image, use MPIJobOperator, or use another runtime",
        )


def _require_patches(what: str, served: Served) -> None:
    """:raises RuntimeMismatchError: the pods can't be patched, because schema or runtime can't be read."""
    if not served.supported or served.runtime is None:
        raise RuntimeMismatchError(
            f"{what} can't be applied, because the cluster doesn't show which pods the job has",
            found=served.unreadable or "the schema of TrainJob can't be read",
            expected="the rights to read the TrainJob's schema and its runtime",
            remedy="grant them (`ktrain rbac --cluster-runtimes --service-account NAMESPACE:NAME` prints them), or "
            "leave the options out",
        )


def _named(template: Mapping[str, Any]) -> str:
    """What the options want of the pods, by the names of its fields; empty if that is nothing."""
    fields = [f for part in ("metadata", "spec") for f, value in (template.get(part) or {}).items() if value]
    return ", ".join("volumeMounts" if f == "containers" else f for f in fields)


def _patch(replicated: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The patch of one job's pod template, so that its pods get the changes and keep their other values.

    :param replicated: the job with the user's patches applied.
    """
    pod, options = pod_of(replicated), change.get("spec") or {}
    spec = {key: value for key, value in options.items() if key not in (*CONTAINER_LISTS, "volumes")}
    for key in ("tolerations", "affinity"):
        if options.get(key):
            spec[key] = _both(pod.get(key), options[key])
    for key in CONTAINER_LISTS:
        if containers := [c for c in _items(options, key) if str(c.get("name")) in _names(pod, key)]:
            spec[key] = containers
    patched = any(key in spec for key in CONTAINER_LISTS)
    volumes = [v for v in _items(options, "volumes") if patched or str(v.get("name")) in _names(pod, "volumes")]
    if volumes:
        spec["volumes"] = volumes
    return {"metadata": change.get("metadata") or {}} | ({"spec": spec} if spec else {})


def _require_containers(options: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> None:
    """:raises RuntimeMismatchError: a container that the options change is in no job of the runtime."""
    for key in CONTAINER_LISTS:
        known = {name for replicated in jobs for name in _names(pod_of(replicated), key)}
        for name in sorted(_names(options.get("spec") or {}, key) - known):
            raise RuntimeMismatchError(
                f"the runtime has no container named {name} in {key}, and a patch can't add one",
                found=", ".join(sorted(known)) or "no containers",
                expected=name,
                remedy="use another runtime",
            )


def _both(one: Any, other: Any, key: str = "") -> Any:
    """Tolerations of both, or an affinity that demands what both demand.

    The terms of a node selector are alternatives, so each of one is combined with each of the other. All other lists
    are demands or preferences that add up.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {**one, **other, **{k: _both(one[k], other[k], k) for k in one if k in other}}
    if isinstance(one, list) and isinstance(other, list):
        if key == "nodeSelectorTerms" and one and other:
            return [_both(a, b) for a in one for b in other]
        return [*one, *(item for item in other if item not in one)]
    return other


def _unknown(message: str, where: str, found: str, known: Any) -> RuntimeMismatchError:
    """The error for a patch of something that the runtime doesn't have."""
    return RuntimeMismatchError(
        message,
        where=where,
        found=found,
        expected=" or ".join(sorted(known)) or "none",
        remedy="correct the patch, or use another runtime",
    )


def _entries(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _items(manifest.get("spec") or {}, PATCHES)


def _items(holder: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The mappings in the list at a key; none if there is no list."""
    items = holder.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _names(holder: Mapping[str, Any], key: str) -> set[str]:
    """The names of the mappings in the list at a key."""
    return {str(item.get("name")) for item in _items(holder, key)}


def _jobs_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return replicated_jobs((entry.get("trainingRuntimeSpec") or {}).get("template") or {})


def replicated_jobs(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The replicated jobs of a JobSet template."""
    return _items(template.get("spec") or {}, "replicatedJobs")


def pod_of(replicated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec of the pods of a replicated job; empty if it has none."""
    pod = (_job_spec(replicated).get("template") or {}).get("spec")
    return pod if isinstance(pod, Mapping) else {}


def _job_spec(replicated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec of the batch Job of a replicated job; empty if it has none."""
    return (replicated.get("template") or {}).get("spec") or {}


def node_container(replicated: Mapping[str, Any]) -> dict[str, Any] | None:
    """The container `node` of a replicated job; None if it has none."""
    return next((c for c in _items(pod_of(replicated), "containers") if c.get("name") == NODE), None)


#: The ClusterTrainingRuntimes and TrainingRuntimes of Kubeflow Trainer.
TRAINING_RUNTIMES = Runtimes(
    in_namespaces=tuple(plural for plural, namespaced in RUNTIMES.values() if namespaced),
    in_cluster=tuple(plural for plural, namespaced in RUNTIMES.values() if not namespaced),
    ref=runtime_ref,
    of_other_kind=of_other_kind,
    require_supported=require_supported,
    lacks=lacks,
    require_code=require_code,
    expand=expand,
)
