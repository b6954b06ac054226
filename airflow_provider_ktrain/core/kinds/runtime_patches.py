"""The pod templates of a TrainJob: they are in its runtime, and `spec.runtimePatches` changes them (Trainer 2.2+).

The options of a task are known before the runtime is. They are therefore first applied to one pod template, in our
entry of runtimePatches, under the name ANY_JOB. `expand` turns it into a patch of each replicated job of the runtime,
so that strategic merging, which the Trainer does with the entries in their order, loses nothing of the runtime's.

The API server of Trainer 2.3 accepts patches of jobs and containers that the runtime doesn't have; the job then never
starts (recording 55d). `expand` refuses them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError, RuntimeMismatchError
from airflow_provider_ktrain.core.kinds.manifest_fields import Manifest, mapping_at
from airflow_provider_ktrain.core.kinds.runtime_policy import node_count
from airflow_provider_ktrain.core.kinds.served import Served
from airflow_provider_ktrain.core.strategic_merge import merged

MANAGER = "ktrain.airflow/provider"  #: of our entry of runtimePatches
ANY_JOB = "*"  #: stands for each replicated job, until the runtime is known
NODE = "node"  #: the container in which the trainer runs, in every runtime
PATCHES, DEADLINE = "runtimePatches", "activeDeadlineSeconds"
OVERRIDES = (PATCHES, "podTemplateOverrides", "podSpecOverrides")  #: of Trainer 2.2, 2.1 and 2.0
SINCE = "Trainer 2.2 or newer"
#: of the job: its runtime's jobs, which Trainer 2.0 doesn't list in the status
ROLES_ANNOTATION = "ktrain.airflow/roles"
#: what a patch can set in a pod and in a container (2.3; trainjob_types.go)
POD_FIELDS = (
    "affinity", "containers", "imagePullSecrets", "initContainers", "nodeSelector", "schedulingGates",
    "securityContext", "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes",
)  # fmt: skip
CONTAINER_FIELDS = ("env", "name", "securityContext", "volumeMounts")
#: containers whose environment the webhook doesn't let patches set, and the field that does
ENV_FIELDS = {
    NODE: "spec.trainer.env",
    "dataset-initializer": "spec.initializer.dataset.env",
    "model-initializer": "spec.initializer.model.env",
}
#: volumes that the Trainer adds to the pods of MPI runtimes
TRAINER_VOLUMES = frozenset({"mpi-ssh-auth", "mpi-hostfile"})
CONTAINER_LISTS = ("containers", "initContainers")
_MAX_POD_NAME = 63
_POD_SUFFIX = len("-0-") + len("-xxxxx") + 1  # of `<job>-<replicated job>-0-<index>-xxxxx`, without the index


def override_field(served: Served) -> str:
    """The field of `spec` by which this cluster's Trainer overrides pod templates; empty if it isn't known."""
    return next((name for name in OVERRIDES if name in (served.fields or ())), "")


def limits_of(served: Served) -> str:
    """What a job without runtimePatches lacks, for the log; empty if it has them."""
    field = override_field(served)
    if field == PATCHES and served.runtime is not None:
        return ""
    if field == PATCHES:
        return f"The job's pods don't get this task's labels: {served.unreadable or 'the runtime is not known'}."
    why = f"both need {SINCE}, and this cluster serves {field or 'no overrides'}"
    return (
        f"The job's pods don't get this task's labels, and the job gets no {DEADLINE} as a backstop: "
        f"{served.unreadable if served.fields is None else why}."
    )


def our_templates(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of the replicated job and patch of its pod template, for each in our entry of runtimePatches."""
    entry = _our_entry(manifest)
    for replicated in _jobs_of(entry or {}):
        yield str(replicated.get("name")), _pod_template(replicated)


def add_template(manifest: dict[str, Any], job: str = ANY_JOB) -> dict[str, Any]:
    """The pod template for a replicated job in our entry of runtimePatches, added if it isn't there.

    :param job: its name. Default: ANY_JOB.
    """
    found = next((template for name, template in our_templates(manifest) if name == job), None)
    if found is not None:
        return found
    spec = mapping_at(manifest, "spec")
    entry = _our_entry(manifest)
    if entry is None:
        entry = {"manager": MANAGER}
        spec[PATCHES] = [*(spec.get(PATCHES) or []), entry]
    template = mapping_at(mapping_at(mapping_at(entry, "trainingRuntimeSpec"), "template"), "spec")
    added: dict[str, Any] = {"name": job}
    template["replicatedJobs"] = [*(template.get("replicatedJobs") or []), added]
    return _pod_template(added)


def expand(manifest: Mapping[str, Any], served: Served, *, name_length: int) -> Manifest:
    """The manifest with patches of the replicated jobs that the runtime has, in place of ANY_JOB.

    Without runtimePatches, or if the runtime can't be read, our entry is removed: the pods then have none of our
    labels. The user's own entries are kept as they are. A job without numNodes gets the runtime's, and an annotation
    names the runtime's jobs.

    :param served: what the cluster serves.
    :param name_length: number of characters of the job's name.
    :raises RuntimeMismatchError: the manifest or the options need what this cluster doesn't serve; a patch names a job,
        container or volume that the runtime doesn't have; the pods' names would be too long.
    """
    result: Manifest = copy.deepcopy(dict(manifest))
    spec = mapping_at(result, "spec")
    template = _take_template(result)
    _require_fields(spec, template, served)
    if served.runtime is None:
        return result
    runtime = served.runtime
    trainer = mapping_at(spec, "trainer")
    if trainer.get("numNodes") is None and (count := node_count(result, runtime)) is not None:
        trainer["numNodes"] = count  # so that the follower knows the size of the job
    names = (str(job.get("name")) for job in replicated_jobs((runtime.get("spec") or {}).get("template") or {}))
    metadata = mapping_at(result, "metadata")
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ROLES_ANNOTATION: ",".join(names)}
    if override_field(served) != PATCHES:
        return result
    for problem in (*mismatches(result, runtime), *long_names(result, runtime, name_length)):
        raise problem
    patched = patched_template(result, runtime)
    jobs = [_patch(replicated, template) for replicated in replicated_jobs(patched)]
    _require_containers(template, patched)
    ours = {"template": {"spec": {"replicatedJobs": jobs}}}
    entry = _our_entry(result)
    if entry is None:
        spec[PATCHES] = [*(spec.get(PATCHES) or []), {"manager": MANAGER, "trainingRuntimeSpec": ours}]
    else:
        entry["trainingRuntimeSpec"] = merged(entry.get("trainingRuntimeSpec") or {}, ours)
    return result


def patched_template(manifest: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime's JobSet template with the manifest's patches applied, as the Trainer does.

    A patch that can't be merged is left out: the API server refuses it.
    """
    template = copy.deepcopy(dict((runtime.get("spec") or {}).get("template") or {}))
    for entry in _entries(manifest):
        with contextlib.suppress(ManifestError):
            template = merged(template, (entry.get("trainingRuntimeSpec") or {}).get("template") or {})
    return template


def mismatches(manifest: Mapping[str, Any], runtime: Mapping[str, Any]) -> Iterator[RuntimeMismatchError]:
    """Patches of jobs and containers that the runtime doesn't have, and mounts of volumes that aren't there."""
    template = (runtime.get("spec") or {}).get("template") or {}
    known = {str(r.get("name")): r for r in replicated_jobs(template)}
    patched = {str(r.get("name")): r for r in replicated_jobs(patched_template(manifest, runtime))}
    for at, entry in enumerate(_entries(manifest)):
        for replicated in _jobs_of(entry):
            name = str(replicated.get("name"))
            where = f"$.spec.{PATCHES}[{at}]"
            if name == ANY_JOB:
                continue
            if name not in known:
                yield _unknown(f"the runtime has no job named {name}", where, name, known)
                continue
            for key in ("containers", "initContainers"):
                has = {str(c.get("name")): c for c in _items(pod_of(known[name]), key)}
                for container in _items(pod_of(replicated), key):
                    if container.get("name") not in has:
                        message = f"the runtime's job {name} has no container named {container.get('name')} in {key}"
                        yield _unknown(message, where, str(container.get("name")), has)
            yield from _missing_volumes(where, name, replicated, patched[name])


def _missing_volumes(
    where: str, name: str, patch: Mapping[str, Any], patched: Mapping[str, Any]
) -> Iterator[RuntimeMismatchError]:
    volumes = {str(v.get("name")) for v in _items(pod_of(patched), "volumes")} | TRAINER_VOLUMES
    for container in (*_items(pod_of(patch), "containers"), *_items(pod_of(patch), "initContainers")):
        for mount in _items(container, "volumeMounts"):
            if mount.get("name") not in volumes:
                message = f"the pods of job {name} have no volume named {mount.get('name')}"
                yield _unknown(message, where, str(mount.get("name")), volumes - TRAINER_VOLUMES)


def long_names(
    manifest: Mapping[str, Any], runtime: Mapping[str, Any], name_length: int
) -> Iterator[RuntimeMismatchError]:
    """Replicated jobs whose pods' names, `<job>-<replicated job>-0-<index>-xxxxx`, would exceed 63 characters.

    JobSet refuses such a job, which only an event shows (recording 55b).

    :param name_length: number of characters of the job's name.
    """
    template = (runtime.get("spec") or {}).get("template") or {}
    count = node_count(manifest, runtime) or 1
    for replicated in replicated_jobs(template):
        index = len(str(max(count - 1, 0))) if node_container(replicated) is not None else 1
        longest = _MAX_POD_NAME - name_length - _POD_SUFFIX - index
        if len(str(replicated.get("name"))) > longest:
            yield RuntimeMismatchError(
                f"the name of the runtime's job {replicated.get('name')} is too long: JobSet would refuse the job",
                found=f"{len(str(replicated.get('name')))} characters",
                expected=f"at most {longest}, as the TrainJob's name has {name_length}",
                remedy="shorten it in the runtime, or use another runtime",
            )


def require_mounts_of_code(served: Served | None) -> None:
    """Check that this cluster's Trainer can mount the volumes of code.

    :param served: what the cluster serves. None: it was not read.
    :raises RuntimeMismatchError: it is too old, or the connection can't read the runtime.
    """
    if served is None:
        return
    if served.fields is not None and override_field(served) != PATCHES:
        raise _too_old("code", served)
    if served.fields is None or served.runtime is None:
        raise _unreadable("code", served)


def _require_fields(spec: Mapping[str, Any], template: Mapping[str, Any], served: Served) -> None:
    """:raises RuntimeMismatchError: for what only a newer Trainer serves, or needs a runtime that can't be read."""
    if spec.get(DEADLINE) is not None and served.fields is not None and DEADLINE not in served.fields:
        raise _too_old(DEADLINE, served)
    options = _named(template)
    if served.fields is not None and override_field(served) != PATCHES and (options or spec.get(PATCHES)):
        raise _too_old(options or PATCHES, served)
    if options and (served.fields is None or served.runtime is None):
        raise _unreadable(options, served)


def _unreadable(what: str, served: Served) -> RuntimeMismatchError:
    """The error for options of pods that aren't known."""
    return RuntimeMismatchError(
        f"{what} can't be applied, because the cluster doesn't show which pods the job has",
        found=served.unreadable or "the schema of TrainJob can't be read",
        expected="the rights to read the TrainJob's schema and its runtime",
        remedy="grant them (`ktrain rbac --cluster-runtimes` prints them), or leave the options out",
    )


def _too_old(what: str, served: Served) -> RuntimeMismatchError:
    """The error for a Trainer that has no field for an option."""
    found = override_field(served) or "no overrides"
    return RuntimeMismatchError(
        f"{what} needs {SINCE}; this cluster serves {found}", remedy="upgrade the Trainer, or leave it out"
    )


def _named(template: Mapping[str, Any]) -> str:
    """What the options want of the pods, by the names of its fields; empty if that is nothing."""
    fields = [f for part in ("metadata", "spec") for f, value in (template.get(part) or {}).items() if value]
    return ", ".join("volumeMounts" if f == "containers" else f for f in fields)


def _take_template(manifest: dict[str, Any]) -> dict[str, Any]:
    """The pod template of ANY_JOB, removed from our entry; the entry is removed if nothing else is in it."""
    entry = _our_entry(manifest)
    if entry is None:
        return {}
    pod_template: dict[str, Any] = next((t for name, t in our_templates(manifest) if name == ANY_JOB), {})
    jobs = [r for r in _jobs_of(entry) if r.get("name") != ANY_JOB]
    template = (entry.get("trainingRuntimeSpec") or {}).get("template") or {}
    if "replicatedJobs" in (template.get("spec") or {}):
        template["spec"]["replicatedJobs"] = jobs
    if not jobs and not template.get("metadata"):
        spec = manifest["spec"]
        spec[PATCHES] = [e for e in spec[PATCHES] if e is not entry]
        if not spec[PATCHES]:
            del spec[PATCHES]
    return pod_template


def _patch(replicated: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The patch of one replicated job, so that its pods get the changes and keep their other values.

    :param replicated: the job with the user's patches applied.
    :param change: the pod template with the values that the options set.
    """
    pod, options = pod_of(replicated), change.get("spec") or {}
    spec = {key: value for key, value in copy.deepcopy(options).items() if key not in (*CONTAINER_LISTS, "volumes")}
    if options.get("tolerations"):
        present = list(pod.get("tolerations") or ())
        spec["tolerations"] = [*present, *(t for t in options["tolerations"] if t not in present)]
    if options.get("affinity"):
        spec["affinity"] = _both(pod.get("affinity") or {}, options["affinity"])
    for key in CONTAINER_LISTS:
        known = {c.get("name") for c in _items(pod, key)}
        if containers := [c for c in _items(options, key) if c.get("name") in known]:
            spec[key] = copy.deepcopy(containers)
    names = {v.get("name") for v in _items(pod, "volumes")}
    patched = any(key in spec for key in CONTAINER_LISTS)
    if volumes := [v for v in _items(options, "volumes") if patched or v.get("name") in names]:
        spec["volumes"] = [_compatible(volume, pod) for volume in volumes]
    template = {"metadata": copy.deepcopy(change.get("metadata") or {})} | ({"spec": spec} if spec else {})
    return {"name": replicated.get("name"), "template": {"spec": {"template": template}}}


def _require_containers(wanted: Mapping[str, Any], patched: Mapping[str, Any]) -> None:
    """:raises RuntimeMismatchError: a container that is to be changed is in no job of the runtime.

    :param wanted: the pod template of ANY_JOB.
    :param patched: the runtime's JobSet template.
    """
    for key in CONTAINER_LISTS:
        known = {str(c.get("name")) for r in replicated_jobs(patched) for c in _items(pod_of(r), key)}
        for container in _items(wanted.get("spec") or {}, key):
            if container.get("name") not in known:
                raise RuntimeMismatchError(
                    f"the runtime has no container named {container.get('name')} in {key}, and a patch can't add one",
                    found=", ".join(sorted(known)) or "no containers",
                    expected=str(container.get("name")),
                    remedy="use another runtime",
                )


def _compatible(volume: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, Any]:
    """The volume, unless the pod has one of this name from another source: a merged volume would have both.

    :raises RuntimeMismatchError: the pod has such a volume.
    """
    same = next((v for v in _items(pod, "volumes") if v.get("name") == volume.get("name")), None)
    if same is not None and same.keys() != volume.keys():
        raise RuntimeMismatchError(
            f"the runtime has another volume named {volume.get('name')}",
            found=", ".join(sorted(same.keys() - {"name"})),
            expected=", ".join(sorted(volume.keys() - {"name"})),
            remedy="leave it out, or rename it in the runtime",
        )
    return copy.deepcopy(dict(volume))


def _both(one: Any, other: Any, key: str = "") -> Any:
    """An affinity that demands what both demand.

    The terms of a node selector are alternatives, so each of one is combined with each of the other. All other lists
    are demands or preferences that add up.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        shared = {k: _both(one[k], other[k], k) for k in one if k in other}
        return copy.deepcopy({**one, **other, **shared})
    if isinstance(one, list) and isinstance(other, list):
        if key == "nodeSelectorTerms" and one and other:
            return [_both(a, b) for a in one for b in other]
        return copy.deepcopy([*one, *(item for item in other if item not in one)])
    return copy.deepcopy(other)


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


def _our_entry(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((e for e in _entries(manifest) if e.get("manager") == MANAGER), None)


def _jobs_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    template = (entry.get("trainingRuntimeSpec") or {}).get("template") or {}
    return replicated_jobs(template)


def replicated_jobs(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The replicated jobs of a JobSet template."""
    return _items(template.get("spec") or {}, "replicatedJobs")


def _pod_template(replicated: dict[str, Any]) -> dict[str, Any]:
    """The pod template of a replicated job, added if it is missing.

    :raises ManifestError: if another type of value is in its place.
    """
    return mapping_at(mapping_at(mapping_at(replicated, "template"), "spec"), "template")


def pod_of(replicated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec of the pods of a replicated job; empty if it has none."""
    template = ((replicated.get("template") or {}).get("spec") or {}).get("template") or {}
    pod = template.get("spec")
    return pod if isinstance(pod, Mapping) else {}


def node_container(replicated: Mapping[str, Any]) -> dict[str, Any] | None:
    """The container `node` of a replicated job; None if it has none."""
    return next((c for c in _items(pod_of(replicated), "containers") if c.get("name") == NODE), None)
