"""A job's manifest, from what the author gives to what is submitted.

`load` reads it, `overlay` lays typed options over it (or `build` makes one of options alone), `modernize` and `fit`
bring it to the shape that the cluster's operator reads, `stamp` names and labels it, `backstop` sees to it that it ends
even where nobody is left to end it. Each returns a new manifest and leaves its argument alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.errors import VersionNotServedError
from airflow_provider_ktrain.core.kinds.base import PYTORCHJOB, Manifest, kind_of
from airflow_provider_ktrain.core.manifest.loader import load, plain
from airflow_provider_ktrain.core.manifest.overlay import (
    ClaimVolume,
    HostPath,
    Options,
    SharedMemory,
    Volume,
    build,
    overlay,
    templates,
)

__all__ = [
    "ClaimVolume",
    "HostPath",
    "Options",
    "SharedMemory",
    "Volume",
    "backstop",
    "build",
    "fit",
    "gpus_of",
    "is_gpu",
    "load",
    "modernize",
    "overlay",
    "stamp",
]

LEGACY_RUN_POLICY = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
TTL = "ttlSecondsAfterFinished"
TTL_MINIMUM = 86_400  #: seconds: a triggerer or a worker may be away for hours
BACKSTOP_MARGIN = 20  #: seconds from the job's own deadline to its pods'
_MAX_SECONDS = 2**31 - 1
_SERVERS_OWN = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "managedFields",
    "selfLink",
    "clusterName",
    "generateName",
    "ownerReferences",
)


def modernize(manifest: Mapping[str, Any]) -> tuple[Manifest, tuple[str, ...]]:
    """Bring the shape of the legacy pytorch-operator v1 to today's; returns the manifest and what was changed.

    There the run policy stood at the top of spec; training-operator prunes it from there in silence. A field that
    stands in both places keeps the value under runPolicy.
    """
    result: Manifest = plain(manifest)
    spec = result.get("spec")
    if result.get("kind") != "PyTorchJob" or not isinstance(spec, dict):
        return result, ()
    legacy = {key: spec.pop(key) for key in LEGACY_RUN_POLICY if key in spec}
    if legacy:
        spec["runPolicy"] = legacy | (spec.get("runPolicy") or {})
    return result, tuple(
        f"spec.{key} is pytorch-operator's: moved to spec.runPolicy.{key}, where training-operator reads it"
        for key in legacy
    )


def fit(manifest: Mapping[str, Any], served: str) -> Manifest:
    """The manifest as the operator of this cluster reads it. Without an apiVersion it gets the served one.

    v2beta1 (mpi-operator): a cleanPodPolicy at the top of spec would be pruned and the workers would stay, so it moves
    to runPolicy; the launcher waits for its workers (launcherCreationPolicy WaitForWorkersReady) unless the manifest
    says otherwise, or it would start, and could fail, while they are unschedulable. v1 (training-operator) reads both
    places, and runPolicy wins. A PyTorchJob's Worker with 0 replicas, which the webhook of training-operator 1.9
    refuses, is left out.

    :param served: the API version that the cluster serves for this kind, as `kubeflow.org/v1`.
    :raises VersionNotServedError: where the manifest is written for another version.
    """
    result: Manifest = plain(manifest)
    said = result.setdefault("apiVersion", served)
    kind = result.get("kind")
    if said != served:
        raise VersionNotServedError(
            f"apiVersion {said} of {kind} is not served by this cluster",
            where="$.apiVersion",
            found=str(said),
            expected=served,
            remedy=_REWRITE.get((str(kind), served), f"write the manifest for {served}"),
        )
    spec = result.get("spec")
    if kind == "PyTorchJob" and isinstance(spec, dict):
        specs = spec.get("pytorchReplicaSpecs") or {}
        if "Master" in specs and (specs.get("Worker") or {}).get("replicas") == 0:
            spec["pytorchReplicaSpecs"] = {"Master": specs["Master"]}
    if kind == "MPIJob" and served.endswith("/v2beta1") and isinstance(spec, dict):
        if "cleanPodPolicy" in spec:
            policy = {"cleanPodPolicy": spec.pop("cleanPodPolicy")}
            spec["runPolicy"] = policy | (spec.get("runPolicy") or {})
        spec.setdefault("launcherCreationPolicy", "WaitForWorkersReady")
    return result


_REWRITE = {
    ("MPIJob", "kubeflow.org/v1"): "the cluster runs training-operator: write apiVersion: kubeflow.org/v1, leave out "
    "sshAuthMountPath, launcherCreationPolicy, runLauncherAsWorker and mpiImplementation, and use an image whose "
    "mpirun starts its ranks by /etc/mpi/kubexec.sh; or install mpi-operator instead",
    ("MPIJob", "kubeflow.org/v2beta1"): "the cluster runs mpi-operator: write apiVersion: kubeflow.org/v2beta1, put "
    "cleanPodPolicy under spec.runPolicy, and use an image whose Workers run sshd; or install training-operator",
}


def stamp(
    manifest: Mapping[str, Any],
    name: str,
    namespace: str,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest under our name and labels. The labels also stand on every pod template: pods are found by them.

    What a server wrote (status, uid, resourceVersion, ...; of a manifest saved by `kubectl get -o yaml`) is left out. A
    ttlSecondsAfterFinished below TTL_MINIMUM is raised to it: the ended job is the proof of how it ended until Airflow
    knows, and the task itself releases it.

    :param annotations: on the job only.
    """
    result: Manifest = plain(manifest)
    result.pop("status", None)
    policy = (result.get("spec") or {}).get("runPolicy") or {}
    if isinstance(ttl := policy.get(TTL), int) and ttl < TTL_MINIMUM:
        policy[TTL] = TTL_MINIMUM
    metadata = result.get("metadata") or {}
    kept = {k: v for k, v in metadata.items() if k not in _SERVERS_OWN}
    notes = {k: v for k, v in (kept.pop("annotations", None) or {}).items() if k != _LAST_APPLIED}
    result["metadata"] = {
        **kept,
        "name": name,
        "namespace": namespace,
        "labels": {**(kept.get("labels") or {}), **(labels or {})},
        "annotations": {**notes, **(annotations or {})},
    }
    for _, template in templates(result):
        # `creationTimestamp: null`, which tools write into templates, is an unknown field to a strict server
        inner = {k: v for k, v in (template.get("metadata") or {}).items() if v is not None and k not in _SERVERS_OWN}
        template["metadata"] = {**inner, "labels": {**(inner.get("labels") or {}), **(labels or {})}}
    return result


_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def backstop(manifest: Mapping[str, Any], seconds: float, margin: float = BACKSTOP_MARGIN) -> Manifest:
    """Let the cluster end the job by itself after some time, for the case that nobody is left to do it.

    A job's activeDeadlineSeconds alone never fires where nothing else happens; the pods' own, a little later, wakes the
    operator, which then fails the job; under cleanPodPolicy Running every pod is gone (recorded under Never and
    OnFailure). An MPIJob v2beta1 hands the deadline to the launcher's batch Job, which keeps it by a timer; its
    Workers go by cleanPodPolicy, or by their own deadline. A shorter deadline, or a cleanPodPolicy, that the manifest
    says stays.

    :param seconds: from the job's start to its deadline.
    :param margin: from there to the pods' deadlines, which count from each pod's start.
    """
    result: Manifest = plain(manifest)
    spec = result.setdefault("spec", {})
    policy = spec["runPolicy"] = dict(spec.get("runPolicy") or {})
    _lower(policy, seconds)
    if not spec.get("cleanPodPolicy"):
        policy.setdefault("cleanPodPolicy", "Running")
    for _, template in templates(result):
        _lower(template.setdefault("spec", {}), seconds + margin)
    return result


def expire(manifest: Mapping[str, Any], seconds: int) -> Manifest:
    """Let the cluster delete the job some time after its end, where its operator does that.

    Only a PyTorchJob's TTL is known to delete the job and its pods (recording 12-pt-ttl). mpi-operator's deletes the
    launcher and leaves the MPIJob (40c-mpi-deadline-ttl). A TTL that the manifest has is replaced.

    :param seconds: from the job's end to its deletion.
    """
    result: Manifest = plain(manifest)
    if result.get("kind") == PYTORCHJOB.name:
        spec = result.setdefault("spec", {})
        spec["runPolicy"] = {**(spec.get("runPolicy") or {}), "ttlSecondsAfterFinished": seconds}
    return result


def _lower(holder: dict[str, Any], seconds: float) -> None:
    ours = max(1, min(int(seconds), _MAX_SECONDS))
    said = holder.get("activeDeadlineSeconds")
    holder["activeDeadlineSeconds"] = min(said, ours) if isinstance(said, int) else ours


def is_gpu(resource: str) -> bool:
    """Whether an extended resource is a GPU or a part of one: nvidia.com/gpu, amd.com/gpu, nvidia.com/mig-1g.5gb."""
    return bool(re.fullmatch(r"[a-z0-9.-]+\.com/(gpu(\.shared)?|mig-.+)", resource))


def gpus_of(source: object) -> int:
    """The GPUs that all replicas of a job ask for together: what it takes from a pool, as `pool_slots`.

    :param source: whatever :func:`load` takes.
    :raises ManifestError: for what is no training job.
    """
    manifest = load(source)
    kind = kind_of(manifest.get("kind"))
    return sum(kind.count(manifest, role) * pod_gpus(_pod(spec)) for role, spec in kind.replicas(manifest).items())


def pod_gpus(pod_spec: Mapping[str, Any]) -> int:
    """The GPUs that one pod asks for."""
    return pod_amount(pod_spec, is_gpu)


def pod_amount(pod_spec: Mapping[str, Any], wanted: Callable[[str], bool]) -> int:
    """How much of the wanted extended resources one pod asks for.

    That is what its containers ask for together, or its hungriest init container where that is more.
    """

    def asked(container: Mapping[str, Any]) -> int:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        return sum(_whole(amount) for name, amount in amounts.items() if wanted(name))

    together = sum(asked(c) for c in pod_spec.get("containers") or () if isinstance(c, Mapping))
    return max([together, *(asked(c) for c in pod_spec.get("initContainers") or () if isinstance(c, Mapping))])


def _whole(amount: Any) -> int:
    return int(amount) if str(amount).isdigit() else 0


def _pod(replica_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    pod = (replica_spec.get("template") or {}).get("spec")
    return pod if isinstance(pod, Mapping) else {}
