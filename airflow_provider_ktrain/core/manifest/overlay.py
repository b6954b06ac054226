"""Typed options over any manifest: the manifest stays the truth, and what the options do not name is untouched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds.base import KINDS, Kind, Manifest, kind_of
from airflow_provider_ktrain.core.manifest.loader import plain

HOSTNAME = "kubernetes.io/hostname"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
CHECKPOINT_DIR, ATTEMPT = "KTRAIN_CHECKPOINT_DIR", "KTRAIN_ATTEMPT"

Json = Any


@runtime_checkable
class Volume(Protocol):
    """A volume of a pod and where the training's container finds it."""

    def volume(self) -> dict[str, Json]: ...

    def mount(self) -> dict[str, Json]: ...


@dataclass(frozen=True)
class SharedMemory:
    """Memory as /dev/shm, beyond the 64 MiB of a container runtime: what NCCL and DataLoader workers share.

    :param size: a Kubernetes quantity; counts against the container's memory limit. None: half of the node's memory.
    """

    size: str | None = None

    def volume(self) -> dict[str, Json]:
        return {"name": "shm", "emptyDir": {"medium": "Memory"} | ({"sizeLimit": self.size} if self.size else {})}

    def mount(self) -> dict[str, Json]:
        return {"name": "shm", "mountPath": "/dev/shm"}


@dataclass(frozen=True)
class ClaimVolume:
    """A PersistentVolumeClaim of the job's namespace.

    :param claim: its name; more than one replica needs one that is ReadWriteMany (or ReadOnlyMany).
    :param mount_path: where the container finds it.
    :param read_only: default: False.
    :param sub_path: the directory in it that is mounted. Default: all of it.
    """

    claim: str
    mount_path: str
    read_only: bool = False
    sub_path: str | None = None

    def volume(self) -> dict[str, Json]:
        return {"name": _dns_label(f"pvc-{self.claim}"), "persistentVolumeClaim": {"claimName": self.claim}}

    def mount(self) -> dict[str, Json]:
        extra: dict[str, Json] = {"readOnly": True} if self.read_only else {}
        if self.sub_path:
            extra["subPath"] = self.sub_path
        return {"name": _dns_label(f"pvc-{self.claim}"), "mountPath": self.mount_path} | extra


@dataclass(frozen=True)
class HostPath:
    """A directory of the node.

    :param path: on the node.
    :param mount_path: in the container; the same path by default.
    :param type: Kubernetes' hostPath type (`Directory`, `DirectoryOrCreate`, ...): what must be there.
    :param read_only: default: False.
    """

    path: str
    mount_path: str | None = None
    type: str = "Directory"
    read_only: bool = False

    def volume(self) -> dict[str, Json]:
        return {"name": _dns_label(f"host-{self.path}"), "hostPath": {"path": self.path, "type": self.type}}

    def mount(self) -> dict[str, Json]:
        extra = {"readOnly": True} if self.read_only else {}
        return {"name": _dns_label(f"host-{self.path}"), "mountPath": self.mount_path or self.path} | extra


@dataclass(frozen=True)
class Options:
    """What can be said beside, or without, a manifest. None leaves the manifest as it is; an empty list empties.

    "Trained replicas" are all roles of a PyTorchJob, and the Workers of an MPIJob (its Launcher only starts mpirun).
    The container meant is `pytorch` for a PyTorchJob, `spec.mainContainer` or the first one for an MPIJob.

    :param image: of that container, in every role.
    :param command: its entrypoint; for an MPIJob the Launcher's.
    :param args: its arguments; for an MPIJob the Launcher's.
    :param env: by name, over the manifest's; a mapping as value stands for `valueFrom`. In every role.
    :param workers: number of Workers, the Master or Launcher not counted.
    :param replicas: number of replicas by role, for any role; wins over `workers`.
    :param gpus: per trained replica, as a limit (and request); 0 removes it.
    :param gpu_resource: the resource that `gpus` counts.
    :param resources: other resources per trained replica, as limits and requests: `{"memory": "64Gi", "rdma/hca": 1}`;
        not the one that `gpus` counts, where that is given.
    :param nproc_per_node: processes per replica: PyTorchJob's `nprocPerNode` (a number, `auto`, `gpu` or `cpu`;
        training-operator 1.7 and newer), MPIJob's `slotsPerWorker` (a number).
    :param hosts: names of the only nodes that may take the replicas, by their label kubernetes.io/hostname.
    :param node_selector: labels of the nodes, added to the manifest's.
    :param tolerations: added to the manifest's.
    :param affinity: in place of the manifest's; `hosts` is added to it.
    :param priority_class: a PriorityClass of the cluster.
    :param queue: a Kueue LocalQueue of the namespace, as label on the job. Kueue itself then suspends the job and
        resumes it on admission; where no Kueue runs, the label does nothing.
    :param volumes: mounted into that container of every role; one at the same path is replaced.
    :param labels: on the job and its pods.
    :param annotations: on the job and its pods.
    :param checkpoint_dir: environment variable KTRAIN_CHECKPOINT_DIR of every replica.
    :param attempt: environment variable KTRAIN_ATTEMPT of every replica: which submission of the run this is, from 1.
    """

    image: str | None = None
    command: Sequence[str] | None = None
    args: Sequence[str] | None = None
    env: Mapping[str, str | Mapping[str, Json]] = field(default_factory=dict)
    workers: int | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    resources: Mapping[str, str | int] = field(default_factory=dict)
    nproc_per_node: int | str | None = None
    hosts: Sequence[str] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Json]] = ()
    affinity: Mapping[str, Json] | None = None
    priority_class: str | None = None
    queue: str | None = None
    volumes: Sequence[Volume] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dir: str | None = None
    attempt: int | None = None


def build(kind: str, options: Options, api_version: str | None = None) -> Manifest:
    """The manifest of a job that is told by options alone: Master or Launcher, and `options.workers` Workers.

    Its containers are not restarted (the operators' default for a PyTorchJob, OnFailure, restarts a broken program
    without end): a failure ends the job, and trying again is the task's business.

    :param api_version: what the cluster serves; the newest that we can write by default.
    :raises ManifestError: without an image; an MPIJob without Workers.
    """
    known = kind_of(kind)
    roles = [known.primaries[0], *(["Worker"] if options.workers or options.replicas.get("Worker") else [])]
    if not options.image:
        raise ManifestError(
            f"a {kind} without a manifest needs an image", expected="image=...", remedy="give image or manifest"
        )
    if kind == "MPIJob" and "Worker" not in roles:
        raise ManifestError(
            "an MPIJob without Workers runs nothing",
            found="workers=None",
            expected="workers >= 1",
            remedy="give workers",
        )
    version = api_version or known.api_versions[0]
    manifest: Manifest = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", **_no_more_launchers(version)},
            known.replica_specs: {
                role: {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": {"spec": {"containers": [{"name": known.container or role.lower()}]}},
                }
                for role in roles
            },
        },
    }
    return overlay(manifest, options)


def _no_more_launchers(version: str) -> dict[str, int]:
    """mpi-operator's launcher is a batch Job, which makes new pods under Never, six by default. Under training-operator
    the limit must not be set: it deletes the pods, with their logs, when it is reached."""
    return {"backoffLimit": 0} if version.endswith("/v2beta1") else {}


def overlay(manifest: Mapping[str, Json], options: Options) -> Manifest:
    """A copy of the manifest with the options laid over it; what they do not name passes through untouched.

    :raises ManifestError: where an option has no place to go, a role or a container that the manifest has not; where
        GPUs are given twice.
    """
    result: Manifest = plain(manifest)
    kind = kind_of(result.get("kind"))
    if options == Options():
        return result
    spec = _dict(result, "spec")
    _set_replicas(spec, kind, options)
    if options.nproc_per_node is not None:
        _set_processes(spec, kind, options.nproc_per_node)
    metadata = _dict(result, "metadata")
    queue = {QUEUE_LABEL: options.queue} if options.queue else {}
    _merge(metadata, "labels", {**options.labels, **queue})
    _merge(metadata, "annotations", options.annotations)
    for role, template in templates(result):
        _over_template(template, options)
        pod = _dict(template, "spec")
        _over_pod(pod, options)
        container = main_container(kind, spec, pod, role)
        _over_container(container, options, starts=kind.name != "MPIJob" or role == "Launcher")
        if trains(spec, role):
            _set_resources(container, options)
    return result


def templates(manifest: Mapping[str, Json]) -> Iterator[tuple[str, dict[str, Json]]]:
    """Role and pod template of each replica spec; templates that are missing are made."""
    specs = (manifest.get("spec") or {}).get(KINDS[manifest["kind"]].replica_specs)
    for role, spec in (specs if isinstance(specs, dict) else {}).items():
        if isinstance(spec, dict):
            yield role, _dict(spec, "template")


def main_container(kind: Kind, spec: Mapping[str, Json], pod: Mapping[str, Json], role: str) -> dict[str, Json]:
    """The container that trains: the one that the operator looks for by name, else the first.

    :raises ManifestError: where the pod has no container.
    """
    containers = [c for c in pod.get("containers") or () if isinstance(c, dict)]
    name = kind.container or spec.get("mainContainer")
    found = next((c for c in containers if c.get("name") == name), containers[0] if containers else None)
    if found is None:
        raise ManifestError(
            f"replica type {role} has no container",
            where=f"$.spec.{kind.replica_specs}.{role}.template.spec.containers",
            expected="one container" + (f" named {name!r}" if name else ""),
        )
    return found


def trains(spec: Mapping[str, Json], role: str) -> bool:
    """Whether a role does the training itself: an MPIJob's Launcher does not, unless it is told to."""
    return role != "Launcher" or bool(spec.get("runLauncherAsWorker"))


def _set_replicas(spec: dict[str, Json], kind: Kind, options: Options) -> None:
    wanted = ({"Worker": options.workers} if options.workers is not None else {}) | dict(options.replicas)
    specs = _dict(spec, kind.replica_specs)
    for role, count in wanted.items():
        if role not in specs and count == 0:
            continue
        if not isinstance(specs.get(role), dict):
            near = next((known for known in kind.roles if known.lower() == role.lower()), role)
            raise ManifestError(
                f"replicas are given for {role}, which the manifest has not",
                where=f"$.spec.{kind.replica_specs}",
                found=", ".join(specs) or "no replica types",
                expected=role if role in kind.roles else " or ".join(kind.roles),
                remedy=f"add a replica spec {role} to the manifest" if near == role else f"did you mean {near}?",
            )
        specs[role]["replicas"] = count


def _set_processes(spec: dict[str, Json], kind: Kind, count: int | str) -> None:
    elastic = spec.get("elasticPolicy")
    if kind.name == "MPIJob":
        if not str(count).isdigit():
            raise ManifestError("nproc_per_node of an MPIJob", found=repr(count), expected="a number (slotsPerWorker)")
        spec["slotsPerWorker"] = int(count)
    elif isinstance(elastic, dict) and "nProcPerNode" in elastic:  # the webhook refuses both
        elastic["nProcPerNode"] = int(count)
    else:
        spec["nprocPerNode"] = str(count)


def _over_template(template: dict[str, Json], options: Options) -> None:
    if options.labels or options.annotations:
        metadata = _dict(template, "metadata")
        _merge(metadata, "labels", options.labels)
        _merge(metadata, "annotations", options.annotations)


def _over_pod(pod: dict[str, Json], options: Options) -> None:
    _merge(pod, "nodeSelector", options.node_selector)
    if options.tolerations:
        present = pod.get("tolerations") or []
        pod["tolerations"] = [*present, *(plain(t) for t in options.tolerations if t not in present)]
    if options.affinity is not None:
        pod["affinity"] = plain(options.affinity)
    if options.hosts:
        _require_hosts(pod, options.hosts)
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
        pod.pop("priority", None)  # admission refuses a number that is not the class's
    for volume in options.volumes:
        _put(pod, "volumes", volume.volume(), same="name")


def _require_hosts(pod: dict[str, Json], hosts: Sequence[str]) -> None:
    """Terms are alternatives, the expressions in each all hold: so ours goes into each."""
    ours = {"key": HOSTNAME, "operator": "In", "values": list(hosts)}
    node = _dict(_dict(pod, "affinity"), "nodeAffinity")
    required = _dict(node, "requiredDuringSchedulingIgnoredDuringExecution")
    terms = [term for term in required.get("nodeSelectorTerms") or () if isinstance(term, dict)] or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), ours]} for term in terms
    ]


def _over_container(container: dict[str, Json], options: Options, *, starts: bool) -> None:
    """:param starts: whether this container starts the program."""
    if options.image is not None:
        container["image"] = options.image
    for key, words in (("command", options.command), ("args", options.args)):
        if words is not None and starts:
            container[key] = [str(word) for word in words]
    for volume in options.volumes:
        _put(container, "volumeMounts", volume.mount(), same="mountPath")
    extra = {CHECKPOINT_DIR: options.checkpoint_dir, ATTEMPT: options.attempt}
    for name, value in {**options.env, **{k: str(v) for k, v in extra.items() if v is not None}}.items():
        entry = {"valueFrom": plain(value)} if isinstance(value, Mapping) else {"value": str(value)}
        _put(container, "env", {"name": name, **entry}, same="name")


def _set_resources(container: dict[str, Json], options: Options) -> None:
    wanted: dict[str, Json] = dict(options.resources)
    if options.gpus is not None:
        if options.gpu_resource in wanted:
            raise ManifestError(
                f"gpus and container_resources both say {options.gpu_resource}",
                found=f"gpus={options.gpus!r} and {wanted[options.gpu_resource]!r}",
                expected="one of them",
                remedy="leave it out of container_resources",
            )
        wanted[options.gpu_resource] = options.gpus
    if not wanted:
        return
    resources = _dict(container, "resources")
    for name, amount in wanted.items():
        for side in ("limits", "requests"):
            if name == options.gpu_resource and not amount:
                _dict(resources, side).pop(name, None)
            elif side == "limits" or "/" not in name or name in (resources.get(side) or {}):
                _dict(resources, side)[name] = amount  # of extended resources the request follows the limit
    for side in ("limits", "requests"):
        if not resources.get(side):
            resources.pop(side, None)


def _put(holder: dict[str, Json], key: str, entry: dict[str, Json], same: str) -> None:
    """Add an entry to a list, in place of those that have the same value in one member."""
    present = holder.get(key)
    entries = present if isinstance(present, list) else []
    mine = [i for i, e in enumerate(entries) if isinstance(e, dict) and e.get(same) == entry[same]]
    at = mine[0] if mine else len(entries)
    holder[key] = [*entries[:at], entry, *(e for i, e in enumerate(entries) if i > at and i not in mine)]


def _merge(holder: dict[str, Json], key: str, more: Mapping[str, str]) -> None:
    if more:
        _dict(holder, key).update({k: str(v) for k, v in more.items()})


def _dict(holder: dict[str, Json], key: str) -> dict[str, Json]:
    """The mapping at a key, made where there is none."""
    if not isinstance(holder.get(key), dict):
        if holder.get(key) is not None:
            raise ManifestError(f"{key} is no mapping", found=repr(holder[key])[:80], expected="a mapping")
        holder[key] = {}
    value: dict[str, Json] = holder[key]
    return value


def _dns_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-") or "volume"
