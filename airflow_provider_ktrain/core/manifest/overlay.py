"""Typed options over any manifest: fields that no option names stay as the manifest has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import Kind, Manifest, kind_of
from airflow_provider_ktrain.core.kinds.manifest_fields import REQUIRED_NODES, add_to_node_terms, mapping_at
from airflow_provider_ktrain.core.kinds.mpirun import OPEN_MPI, with_exports
from airflow_provider_ktrain.core.manifest.loader import plain
from airflow_provider_ktrain.core.manifest.volumes import Volume
from airflow_provider_ktrain.core.state.accelerators import DEFAULT_RESOURCE
from airflow_provider_ktrain.core.state.pods.objects import NODE_NAME
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL

HOSTNAME = "kubernetes.io/hostname"

Json = Any


@dataclass(frozen=True)
class JobOptions:
    """Options of a job, beside a manifest or without one. None leaves the manifest's value; an empty list empties it.

    "Training replicas" are all roles of a PyTorchJob, and the Workers of an MPIJob (its Launcher only runs mpirun).
    The "main container" is `pytorch` for a PyTorchJob, and `spec.mainContainer` or the first one for an MPIJob. The
    pods of a TrainJob are the runtime's: `spec.trainer` describes their container `node`, and the pods are patched.

    :param runtime: the runtime of a TrainJob: the name of a ClusterTrainingRuntime, or a runtimeRef.
    :param image: image of the main container, in every role.
    :param command: command of the main container; for an MPIJob the Launcher's.
    :param args: arguments of the main container; for an MPIJob the Launcher's.
    :param env: environment variables of every role, by name; they replace the manifest's. A mapping as value becomes
        `valueFrom`.
    :param workers: number of Workers; the Master or Launcher is not counted.
    :param replicas: number of replicas by role, for any role; takes precedence over `workers`.
    :param gpus: GPUs per training replica, as a limit (and request); 0 removes the manifest's.
    :param gpu_resource: the resource that `gpus` counts. Default: DEFAULT_RESOURCE.
    :param resources: other resources per training replica, as limits and requests:
        `{"memory": "64Gi", "rdma/hca": 1}`; not the one that `gpus` sets.
    :param nproc_per_node: processes per replica: PyTorchJob's `nprocPerNode` (a number, `auto`, `gpu` or `cpu`;
        training-operator 1.7 and newer), MPIJob's `slotsPerWorker` (a number).
    :param hosts: names of the nodes that may run the replicas, by their label kubernetes.io/hostname.
    :param node_selector: labels that a node must have, added to the manifest's.
    :param tolerations: added to the manifest's.
    :param affinity: replaces the manifest's; `hosts` is added to it.
    :param priority_class: a PriorityClass of the cluster.
    :param queue: a Kueue LocalQueue of the namespace, set as a label of the job. Kueue then suspends the job and
        resumes it on admission; on a cluster without Kueue the label has no effect.
    :param workload_priority_class: a WorkloadPriorityClass of Kueue, set as a label of the job.
    :param volumes: volumes that are mounted into the main container of every role; a mount at the same path is
        replaced.
    :param labels: added to the job and its pods.
    :param annotations: added to the job and its pods.
    :param pod_override: a pod template, or pod templates by role, that is merged into those of the job by Kubernetes'
        strategic merge, after all other options.
    :param avoid_nodes: names of nodes that the replicas avoid. The affinity of a TrainJob is added to that of its
        runtime later, by `trainjob/patches.py: expand`.
    """

    runtime: str | Mapping[str, Json] | None = None
    image: str | None = None
    command: Sequence[str] | None = None
    args: Sequence[str] | None = None
    env: Mapping[str, str | Mapping[str, Json]] = field(default_factory=dict)
    workers: int | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    gpus: int | None = None
    gpu_resource: str = DEFAULT_RESOURCE
    resources: Mapping[str, str | int] = field(default_factory=dict)
    nproc_per_node: int | str | None = None
    hosts: Sequence[str] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Json]] = ()
    affinity: Mapping[str, Json] | None = None
    priority_class: str | None = None
    queue: str | None = None
    workload_priority_class: str | None = None
    volumes: Sequence[Volume] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pod_override: Mapping[str, Json] = field(default_factory=dict)
    avoid_nodes: Sequence[str] = ()


def build(kind: str, options: JobOptions, api_version: str | None = None) -> Manifest:
    """The manifest of a job without a manifest of its own: Master or Launcher, and `options.workers` Workers.

    Its containers are not restarted: a failure ends the job, and Airflow retries the task. (The default of
    training-operator for a PyTorchJob, OnFailure, restarts a broken program without limit.)

    :param api_version: the API version that the cluster serves. Default: the newest that we can write.
    :raises ManifestError: without an image, or without a role that the kind requires.
    """
    known = kind_of(kind)
    roles = roles_without_manifest(known, options)
    return overlay(known.skeleton(api_version or known.api_versions[0], roles), options)


def roles_without_manifest(known: Kind, options: JobOptions) -> list[str]:
    """The roles of a job that is built from options alone."""
    kind = known.name
    roles = [known.primaries[0], *(["Worker"] if options.workers or options.replicas.get("Worker") else [])]
    if not options.image and not known.runtimes:
        raise ManifestError(
            f"a {kind} without a manifest needs an image", expected="image=...", remedy="set image or manifest"
        )
    if missing := [role for role in known.required_roles if role not in roles]:
        names = " and ".join(f"{role}s" for role in missing)
        raise ManifestError(
            f"the {kind} has no {names}, so nothing would run",
            found="workers=None",
            expected="workers >= 1",
            remedy="set workers",
        )
    return roles


def overlay(manifest: Mapping[str, Json], options: JobOptions) -> Manifest:
    """A copy of the manifest with the options applied.

    :raises ManifestError: if an option names a role or needs a container that the manifest doesn't have, or if GPUs are
        set twice.
    """
    result: Manifest = plain(manifest)
    kind = kind_of(result.get("kind"))
    if options == JobOptions():
        return result
    spec = mapping_at(result, "spec")
    workers = {} if options.workers is None else {"Worker": options.workers}
    if options.runtime is not None:
        spec["runtimeRef"] = {"name": options.runtime} if isinstance(options.runtime, str) else dict(options.runtime)
    kind.form.set_replicas(spec, {**workers, **options.replicas}, kind.roles)
    if options.nproc_per_node is not None:
        kind.form.set_processes(spec, options.nproc_per_node)
    metadata = mapping_at(result, "metadata")
    kueue = {QUEUE_LABEL: options.queue, PRIORITY_LABEL: options.workload_priority_class}
    _merge(metadata, "labels", {**options.labels, **{key: value for key, value in kueue.items() if value}})
    _merge(metadata, "annotations", options.annotations)
    for role, template in kind.form.option_templates(result):
        if options.labels or options.annotations:
            _merge(mapping_at(template, "metadata"), "labels", options.labels)
            _merge(mapping_at(template, "metadata"), "annotations", options.annotations)
        pod = mapping_at(template, "spec")
        _over_pod(pod, options)
        for volume in options.volumes:
            _put(kind.form.main_container(spec, pod, role), "volumeMounts", volume.mount(), same="mountPath")
        program = kind.form.program(spec, pod, role)
        _over_program(program, options, runs_program=kind.runs_program(role))
        if role in kind.launchers and program.get("command") and spec.get("mpiImplementation", OPEN_MPI) == OPEN_MPI:
            program["command"] = with_exports(program["command"], {name: name for name in options.env})
        if kind.trains(spec, role):
            _set_resources(program, kind.form.resources_field, options)
    if options.pod_override:
        kind.form.override_pods(result, plain(options.pod_override))
    return result


def _over_pod(pod: dict[str, Json], options: JobOptions) -> None:
    _merge(pod, "nodeSelector", options.node_selector)
    if options.tolerations:
        present = pod.get("tolerations") or []
        pod["tolerations"] = [*present, *(plain(t) for t in options.tolerations if t not in present)]
    if options.affinity is not None:
        pod["affinity"] = plain(options.affinity)
    if options.hosts:
        hosts = {"key": HOSTNAME, "operator": "In", "values": list(options.hosts)}
        required = mapping_at(mapping_at(mapping_at(pod, "affinity"), "nodeAffinity"), REQUIRED_NODES)
        terms = required.get("nodeSelectorTerms") or ()
        required["nodeSelectorTerms"] = [term for term in terms if term and isinstance(term, dict)]  # others match none
        add_to_node_terms(pod, "matchExpressions", [hosts])
    if options.avoid_nodes:
        # an entry of matchFields has one value (ValidateNodeFieldSelectorRequirement in Kubernetes' core/validation)
        others = [{"key": NODE_NAME, "operator": "NotIn", "values": [name]} for name in options.avoid_nodes]
        add_to_node_terms(pod, "matchFields", others)
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
        pod.pop("priority", None)  # admission refuses a number that differs from the class's
    for volume in options.volumes:
        _put(pod, "volumes", volume.volume(), same="name")


def _over_program(program: dict[str, Json], options: JobOptions, *, runs_program: bool) -> None:
    """:param runs_program: whether `command` and `args` are this container's."""
    if options.image is not None:
        program["image"] = options.image
    for key, words in (("command", options.command), ("args", options.args)):
        if words is not None and runs_program:
            program[key] = [str(word) for word in words]
    for name, value in options.env.items():
        entry = {"valueFrom": plain(value)} if isinstance(value, Mapping) else {"value": str(value)}
        _put(program, "env", {"name": name, **entry}, same="name")


def _set_resources(program: dict[str, Json], key: str, options: JobOptions) -> None:
    """Set the resources and GPUs of the program."""
    amounts: dict[str, Json] = dict(options.resources)
    if options.gpus is not None:
        if options.gpu_resource in amounts:
            raise ManifestError(
                f"gpus and container_resources both set {options.gpu_resource}",
                found=f"gpus={options.gpus!r} and {amounts[options.gpu_resource]!r}",
                expected="one of them",
                remedy="remove it from container_resources",
            )
        amounts[options.gpu_resource] = options.gpus
    if not amounts:
        return
    resources = mapping_at(program, key)
    for name, amount in amounts.items():
        for side in ("limits", "requests"):
            if name == options.gpu_resource and not amount:
                mapping_at(resources, side).pop(name, None)
            elif side == "limits" or "/" not in name or name in (resources.get(side) or {}):
                mapping_at(resources, side)[name] = amount  # an extended resource's request defaults to its limit
    for side in ("limits", "requests"):
        if not resources.get(side):
            resources.pop(side, None)


def _put(holder: dict[str, Json], key: str, entry: dict[str, Json], same: str) -> None:
    """Add an entry to a list; it replaces entries with the same value of the member `same`."""
    present = holder.get(key)
    entries = present if isinstance(present, list) else []
    mine = [i for i, e in enumerate(entries) if isinstance(e, dict) and e.get(same) == entry[same]]
    at = mine[0] if mine else len(entries)
    holder[key] = [*entries[:at], entry, *(e for i, e in enumerate(entries) if i > at and i not in mine)]


def _merge(holder: dict[str, Json], key: str, more: Mapping[str, str]) -> None:
    if more:
        mapping_at(holder, key).update({k: str(v) for k, v in more.items()})
