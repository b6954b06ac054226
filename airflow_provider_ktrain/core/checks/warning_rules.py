"""Rules for every kind: what runs, but probably not as intended."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Field, Finding, Job, Replica, rule
from airflow_provider_ktrain.core.checks.problem import WARNING
from airflow_provider_ktrain.core.identity.task_variables import UNHASHED_VARIABLES
from airflow_provider_ktrain.core.manifest.transform import TTL, TTL_MINIMUM
from airflow_provider_ktrain.core.state.accelerators import COMMON_NAMES, DEFAULT_RESOURCE, accelerator_of
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL
from airflow_provider_ktrain.core.text.output import SUGGESTION, counted

_BACKEND = re.compile(r"\s--?(?:dist(?:ributed)?[-_])?backend[=\s]+['\"]?(nccl|gloo)\b", re.IGNORECASE)
#: Variables of NCCL itself; those of its library's loading are matched by their value.
_NCCL_ENV = re.compile(r"NCCL_[A-Z0-9_]+")
_NCCL_LIBRARY = re.compile(r"\blibnccl\b")
_BACKEND_ENV = ("BACKEND", "DIST_BACKEND", "TORCH_DISTRIBUTED_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND")


@rule("image-tag", WARNING)
def image_tag(job: Job) -> Iterator[Finding]:
    """Images have a tag or a digest."""
    images = [c["image"] for r in job.replicas.values() for c in r.containers]
    for image in {image.text: image for image in reversed(images)}.values():  # the first place of each
        name = image.text.rpartition("/")[2]
        if name and not re.search(r"[:@<{$]", name):
            message = "the image has no tag, so each node pulls what `latest` is at that moment"
            yield Finding(image, message, image.text, f"{image.text}:<tag>", "add a tag or a digest")


@rule("nccl-without-gpus", WARNING)
def nccl_without_gpus(job: Job) -> Iterator[Finding]:
    """Replicas that use or configure nccl request GPUs; those of a TrainJob may be the runtime's.

    Without a request, the scheduler places the pods anywhere, and pods that see all GPUs of a node share them.
    """
    users = [r.role for r, _ in _using(job, "nccl")]
    for replica, at in without_nccl_gpus(job):
        uses = replica.role in users
        message = f"{replica.role} {'uses' if uses else 'configures'} nccl, which needs GPUs, and requests none"
        hint = "request GPUs, or use gloo" if uses else "request GPUs, or remove the settings of nccl"
        yield Finding(at, message, "nccl, no GPU", f"resources.limits {DEFAULT_RESOURCE}: 1", hint)


@rule("resource-name", WARNING)
def resource_name(job: Job) -> Iterator[Finding]:
    """The names of accelerators are spelled as their device plugins do.

    No node has a resource of another name, so that the pods would wait for ever.
    """
    for _, container in job.containers:
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        for name, at in (*limits.members(), *((n, a) for n, a in requests.members() if not limits[n].present)):
            if meant := _meant(name):
                message = f"{name} is probably misspelled: pods wait until a node has a resource of this name"
                yield Finding(at, message, name, meant, f"{SUGGESTION}{meant}?")


def _meant(name: str) -> str:
    """The common resource whose name is like this one; "" if it is one, or if this may well be another resource."""
    vendor, _, resource = name.lower().rpartition("/")
    for known in () if name in COMMON_NAMES else COMMON_NAMES:
        known_vendor, _, known_resource = known.lower().partition("/")
        if vendor == known_vendor:
            if accelerator_of(name) is None and _similarity(resource, known_resource) > 0.8:
                return known
        elif resource.removesuffix("s") == known_resource and (
            vendor in ("", *known_vendor.split(".")[:-1]) or _similarity(vendor, known_vendor) > 0.87
        ):
            return known
    return ""


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


@rule("gloo-with-gpus", WARNING)
def gloo_with_gpus(job: Job) -> Iterator[Finding]:
    """Replicas that request GPUs don't use gloo."""
    for replica, at in _using(job, "gloo"):
        if gpus := _gpus(job, replica):
            slow = "gloo, which exchanges gradients through the CPU: it is slow"
            message = f"{replica.role} requests GPUs and uses {slow}"
            hint = "use nccl, or remove the GPUs; on simulated GPUs gloo is right"
            yield Finding(at, message, f"gloo, {counted(gpus, 'GPU')}", "nccl", hint)


@rule("shm", WARNING)
def shared_memory(job: Job) -> Iterator[Finding]:
    """Replicas that use nccl have more than the default 64 MiB of /dev/shm.

    NCCL between the processes of a pod, and DataLoader workers, share memory through /dev/shm.
    """
    for replica, _ in [] if job.kind.runtimes else _using(job, "nccl"):
        for trained in _trained(job, replica):
            mounts = {m["mountPath"].text.rstrip("/") for m in trained.main["volumeMounts"]}
            if trained.gpus and "/dev/shm" not in mounts and not trained.pod["hostIPC"].value:
                message = f"{trained.role} uses nccl and has only the default 64 MiB of /dev/shm"
                expected = "an emptyDir of medium Memory at /dev/shm"
                hint = "add volumes=[SharedMemory()], or a volume {name: shm, emptyDir: {medium: Memory}} and its mount"
                yield Finding(trained.main["volumeMounts"], message, "no mount at /dev/shm", expected, hint)


@rule("nproc", WARNING)
def processes_per_pod(job: Job) -> Iterator[Finding]:
    """The number of processes in each pod is valid and doesn't exceed its GPUs."""
    per_pod = job.spec[job.kind.form.processes_field]
    elastic = job.spec["elasticPolicy"]["nProcPerNode"]
    if per_pod.text and not per_pod.number and per_pod.text not in ("auto", "gpu", "cpu"):
        expected = "a number from 1, auto, gpu or cpu"
        yield Finding(
            per_pod, f"invalid {job.kind.form.processes_field}", per_pod.text, expected, "write auto, or a number"
        )
    for replica in job.training:
        fields = [at for at in (per_pod, elastic) if (at.number or 0) > replica.gpus > 0]
        for at in fields:
            yield _more_processes(at, replica, at.number or 0)
        for count, at in replica.numbers(r"--nproc[-_]per[-_]node"):
            if count > replica.gpus > 0:
                yield _more_processes(at, replica, count)


def _more_processes(at: Field, replica: Replica, count: int) -> Finding:
    """The number of processes in each pod doesn't exceed its GPUs."""
    found, hint = f"{count} processes, {counted(replica.gpus, 'GPU')}", "lower it, or request more GPUs"
    return Finding(at, f"more processes than GPUs in each {replica.role}", found, f"at most {replica.gpus}", hint)


@rule("world-size", WARNING)
def world_size(job: Job) -> Iterator[Finding]:
    """An argument --world-size agrees with the replicas.

    With a Master the argument is superfluous: PyTorch's env:// reads the WORLD_SIZE that the operator sets.
    """
    if job.kind.runtimes:  # the number of nodes, or of processes, may be the runtime's
        return
    pods = sum(r.count for r in job.training)
    processes = pods * (job.spec[job.kind.form.processes_field].number or 1)
    is_set = "Master" in job.replicas
    for replica in job.programs:
        launched = [count for count, _ in replica.numbers(r"--nproc[-_]per[-_]node")]
        right = {pods, processes, *(pods * n for n in launched)}
        for count, at in replica.numbers(r"--?world[-_]size"):
            if count not in right:
                expected = " or ".join(map(str, sorted(right)))
                hint = "remove it: the operator sets WORLD_SIZE" if is_set else "correct it"
                yield Finding(at, "--world-size disagrees with the replicas", str(count), expected, hint)
            elif is_set:
                message = "--world-size is superfluous: the operator sets WORLD_SIZE, which init_method env:// reads"
                hint = "remove it; a program that doesn't know it fails at its start"
                yield Finding(at, message, str(count), "no such argument", hint)


@rule("template-restart-policy", WARNING)
def template_restart_policy(job: Job) -> Iterator[Finding]:
    """restartPolicy is set in the replica spec and not in the pod template."""
    for replica in job.replicas.values():
        inner, outer = replica.pod["restartPolicy"], replica.at["restartPolicy"]
        if inner.present and inner.value != outer.value:
            message = "the operator overrides the restartPolicy of a pod template"
            expected = f"restartPolicy under {replica.role}, beside template"
            yield Finding(inner, message, str(inner.value), expected, "move it there")


@rule("endless-restarts", WARNING)
def endless_restarts(job: Job) -> Iterator[Finding]:
    """Restarts of a failing program are limited.

    Without backoffLimit, training-operator lets the kubelet restart a failing program without limit, and the job stays
    Running. Elastic jobs are exempt: they restart by design.
    """
    operator = job.operator
    limited = operator.limits_restarts or job.spec["runPolicy"]["backoffLimit"].present
    if limited or job.spec["elasticPolicy"].present:
        return
    replicas = [r for role, r in job.replicas.items() if role in job.kind.roles]
    restarted = [r for r in replicas if (r.at["restartPolicy"].text or operator.default_restart_policy) == "OnFailure"]
    if restarted:
        roles = " and ".join(r.role for r in restarted)
        by_default = "" if any(r.at["restartPolicy"].present for r in restarted) else " by default"
        at, expected = job.spec["runPolicy"]["backoffLimit"], "restartPolicy Never, or a backoffLimit"
        message = f"restartPolicy of {roles} is OnFailure{by_default}: a failing program is restarted without limit"
        hint = "set restartPolicy: Never, and `retries` of the task; crash_loop_limit only ends crash loops"
        yield Finding(at, message, "no backoffLimit", expected, hint)


@rule("ttl", WARNING)
def ttl(job: Job) -> Iterator[Finding]:
    """The operator keeps an ended job until its task has read how it ended."""
    ttl = job.spec["runPolicy"][TTL]
    if ttl.number is not None and ttl.number < TTL_MINIMUM:
        early = "the operator may delete the ended job before its task has read how it ended"
        message = f"{early}; tasks raise this value to {TTL_MINIMUM}"
        hint = "remove it: the task deletes the job (on_finish_action)"
        yield Finding(ttl, message, str(ttl.number), f"at least {TTL_MINIMUM}", hint)


@rule("reserved-variable", WARNING)
def reserved_variable(job: Job) -> Iterator[Finding]:
    """No variable is set that tasks set."""
    given = {env["name"].text: env for _, container in job.containers for env in container["env"]}
    for name in UNHASHED_VARIABLES:
        if name in given:
            yield Finding(given[name], f"{name} has no effect: the task sets it", hint="rename the variable")


@rule("queue-priority", WARNING)
def priority_without_queue(job: Job) -> Iterator[Finding]:
    """A priority class of Kueue needs a queue."""
    labels = job.root["metadata"]["labels"]
    if labels[PRIORITY_LABEL].text and not labels[QUEUE_LABEL].text:
        message = "a priority class of Kueue has no effect on a job without a queue"
        yield Finding(labels[PRIORITY_LABEL], message, labels[PRIORITY_LABEL].text, "a queue", "set `queue_name`")


def _using(job: Job, backend: str) -> list[tuple[Replica, Field]]:
    """The replicas whose program uses a backend, and the field that selects it."""
    found = []
    for replica in job.programs:
        match = _BACKEND.search(replica.command_line)
        selected = match[1].lower() if match else ""
        at = replica.word(match[0]) if match else replica.main
        for env in replica.main["env"]:
            if not match and env["name"].text in _BACKEND_ENV:
                selected, at = env["value"].text.lower(), env
        if selected == backend:
            found.append((replica, at))
    return found


def without_nccl_gpus(job: Job) -> list[tuple[Replica, Field]]:
    """The replicas that use or configure nccl and request no GPUs, and the field that shows it."""
    using = _using(job, "nccl")
    configured = [(r, env) for r in job.replicas.values() if (env := _nccl_setting(r)) is not None]
    others = [r.role for r, _ in (*using, *_using(job, "gloo"))]
    found = [*using, *((r, env) for r, env in configured if r.role not in others)]
    lacking = [(r, at) for r, at in found if not _gpus(job, r) and not may_have_gpus(job, r)]
    return [] if job.kind.runtimes else lacking


def _nccl_setting(replica: Replica) -> Field | None:
    """The first variable of the main container that configures or loads nccl; None if there is none."""
    for env in replica.main["env"]:
        name, value = env["name"].text, env["value"].text
        if _NCCL_ENV.fullmatch(name) or (name in ("LD_PRELOAD", "LD_LIBRARY_PATH") and _NCCL_LIBRARY.search(value)):
            return env
    return None


def _trained(job: Job, replica: Replica) -> list[Replica]:
    """The replicas in whose pods a program's processes run: for an MPIJob's Launcher, the Workers."""
    return [replica] if replica in job.training else job.training


def _gpus(job: Job, replica: Replica) -> int:
    """The GPUs of the pods in which a program's processes run."""
    return max((r.gpus for r in _trained(job, replica)), default=0)


def may_have_gpus(job: Job, replica: Replica) -> bool:
    """Whether those pods request devices by claims (dynamic resource allocation), or under a misspelled name."""
    resources = [c["resources"] for r in _trained(job, replica) for c in r.containers]
    names = {name for of in resources for side in ("limits", "requests") for name, _ in of[side].members()}
    return any(of["claims"].value for of in resources) or any(map(_meant, names))
