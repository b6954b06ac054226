"""Rules for what runs, but hardly as it was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import At, Found, Job, Level, Replica, rule
from airflow_provider_ktrain.core.manifest.transform import LEGACY_RUN_POLICY, TTL, TTL_MINIMUM

WARNING = Level.WARNING
_BACKEND = re.compile(r"\s--?(?:dist(?:ributed)?[-_])?backend[=\s]+['\"]?(nccl|gloo)\b", re.IGNORECASE)
_BACKEND_ENV = ("BACKEND", "DIST_BACKEND", "TORCH_DISTRIBUTED_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND")
_MPIRUN = re.compile(  # -n may be the program's own as well, once that has begun
    r"\b(?:mpirun|mpiexec|horovodrun)(?:[^;|&\n]*?\s(?=--?np\b)|(?:\s+--[\w-]+)*\s+)(--?np|-n)[=\s]+['\"]?(\d+)\b"
)
_ALWAYS_SET = {"PET_NNODES", "PET_NPROC_PER_NODE"}
_WITH_MASTER = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "PET_NODE_RANK",
}
_ELASTIC = {"PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"}


@rule("legacy-run-policy", WARNING)
def run_policy_stands_in_run_policy(job: Job) -> Iterator[Found]:
    if job.kind.name == "PyTorchJob":
        for key in LEGACY_RUN_POLICY:
            if job.spec[key].here:
                yield Found(
                    job.spec[key],
                    f"{key} at the top of spec is pytorch-operator's; training-operator drops it in silence",
                    f"spec.{key}",
                    f"spec.runPolicy.{key}",
                    "move it under runPolicy",
                )


@rule("image-tag", WARNING)
def images_have_tags(job: Job) -> Iterator[Found]:
    for image in _unique([c["image"] for r in job.replicas.values() for c in r.containers]):
        name = image.text.rpartition("/")[2]
        if name and not re.search(r"[:@<{$]", name):
            yield Found(
                image, "the image has no tag, so it is whatever latest is today", image.text, f"{image.text}:<tag>",
                "name a tag or a digest",
            )  # fmt: skip


@rule("nccl-without-gpu", WARNING)
def nccl_has_gpus(job: Job) -> Iterator[Found]:
    for replica, at in _using(job, "nccl"):
        if _gpus(job, replica) == 0:
            yield Found(
                at,
                f"the backend of {replica.role} is nccl, which needs GPUs, and it asks for none",
                "nccl, no GPU",
                "resources.limits nvidia.com/gpu: 1",
                "ask for GPUs, or use gloo",
            )


@rule("gloo-with-gpu", WARNING)
def gloo_has_no_gpus(job: Job) -> Iterator[Found]:
    for replica, at in _using(job, "gloo"):
        if gpus := _gpus(job, replica):
            yield Found(
                at,
                f"{replica.role} asks for GPUs, and gloo carries what they exchange through the CPU: right for a trial "
                "without real GPUs, slow with them",
                f"gloo, {gpus} GPUs",
                "nccl, where the GPUs are real",
                "use nccl, or leave the GPUs out; for a trial let it be",
            )


@rule("shm", WARNING)
def nccl_has_shared_memory(job: Job) -> Iterator[Found]:
    """NCCL between the processes of a pod, and DataLoader workers, share memory through /dev/shm: 64 MiB by default."""
    for replica, _ in _using(job, "nccl"):
        for trained in [replica] if replica in job.trained else job.trained:
            mounts = {m["mountPath"].text.rstrip("/") for m in trained.main["volumeMounts"]}
            if trained.gpus and "/dev/shm" not in mounts and not trained.pod["hostIPC"].value:
                yield Found(
                    trained.main["volumeMounts"],
                    f"{trained.role} uses nccl and has only the 64 MiB of /dev/shm that containers get",
                    "no mount at /dev/shm",
                    "an emptyDir of medium Memory at /dev/shm",
                    "add a volume {name: shm, emptyDir: {medium: Memory}}",
                )


@rule("nproc", WARNING)
def processes_have_gpus(job: Job) -> Iterator[Found]:
    per_pod = job.spec["slotsPerWorker" if job.kind.name == "MPIJob" else "nprocPerNode"]
    elastic = job.spec["elasticPolicy"]["nProcPerNode"]
    if per_pod.text and not per_pod.number and per_pod.text not in ("auto", "gpu", "cpu"):
        expected = "a number from 1, auto, gpu or cpu"
        yield Found(per_pod, "torchrun takes no such nprocPerNode", per_pod.text, expected, "write auto, or a number")
    for replica in job.trained:
        said = [at for at in (per_pod, elastic) if (at.number or 0) > replica.gpus > 0]
        for at in said:
            yield _more_processes(at, replica, at.number or 0)
        for count, at in _numbers(replica, r"--nproc[-_]per[-_]node"):
            if count > replica.gpus > 0:
                yield _more_processes(at, replica, count)


def _more_processes(at: At, replica: Replica, count: int) -> Found:
    found, hint = f"{count} processes, {replica.gpus} GPUs", "lower it, or ask for more GPUs"
    return Found(at, f"more processes than GPUs in each {replica.role}", found, f"at most {replica.gpus}", hint)


@rule("world-size", WARNING)
def world_size_is_the_operators(job: Job) -> Iterator[Found]:
    """The seeds' practitioner: an argument that nothing reads. PyTorch's env:// takes WORLD_SIZE from the operator."""
    pods = sum(r.count for r in job.trained)
    processes = pods * (job.spec["nprocPerNode"].number or job.spec["slotsPerWorker"].number or 1)
    given = "Master" in job.replicas
    for replica in job.programs:
        launched = [count for count, _ in _numbers(replica, r"--nproc[-_]per[-_]node")]
        right = {pods, processes, *(pods * n for n in launched)}
        for count, at in _numbers(replica, r"--?world[-_]size"):
            if count not in right:
                yield Found(
                    at,
                    "--world-size disagrees with the replicas",
                    str(count),
                    " or ".join(map(str, sorted(right))),
                    "leave it out: the operator sets WORLD_SIZE" if given else "correct it",
                )
            elif given:
                yield Found(
                    at,
                    "--world-size is for nothing: the operator sets WORLD_SIZE, which init_method env:// reads",
                    str(count),
                    "no such argument",
                    "leave it out; a program that does not know it refuses to start",
                )


@rule("operator-env", WARNING)
def environment_is_the_operators(job: Job) -> Iterator[Found]:
    if job.kind.name != "PyTorchJob":
        return
    names = _ALWAYS_SET | (_WITH_MASTER if "Master" in job.replicas else set())
    names |= _ELASTIC if job.spec["elasticPolicy"].here else set()
    for replica in job.replicas.values():
        for env in (e for c in replica.containers for e in c["env"]):
            if env["name"].text in names:
                yield Found(
                    env,
                    f"the operator sets {env['name'].text} after you, and the last one wins",
                    str(env["value"].value),
                    "the operator's value",
                    "leave it out",
                )


@rule("worker-only", WARNING)
def workers_alone_meet(job: Job) -> Iterator[Found]:
    worker = job.replicas.get("Worker")
    if job.kind.name != "PyTorchJob" or "Master" in job.replicas or job.spec["elasticPolicy"].here or not worker:
        return
    own = {e["name"].text for e in worker.main["env"]}
    if worker.count > 1 and "MASTER_ADDR" not in own and not re.search(r"rdzv|master[-_]addr", worker.words):
        yield Found(
            job.replica_specs,
            "without a Master and without elasticPolicy nobody sets MASTER_ADDR, RANK and WORLD_SIZE",
            "Worker alone",
            "Master and Worker, or spec.elasticPolicy",
            "add a Master, or an elasticPolicy",
        )


@rule("template-restart-policy", WARNING)
def restart_policy_stands_on_the_replica(job: Job) -> Iterator[Found]:
    for replica in job.replicas.values():
        inner, outer = replica.pod["restartPolicy"], replica.at["restartPolicy"]
        if inner.here and inner.value != outer.value:
            yield Found(
                inner,
                "the operator overrides the restartPolicy of a pod template",
                str(inner.value),
                f"restartPolicy under {replica.role}, beside template",
                "move it there",
            )


@rule("backoff-limit", WARNING)
def backoff_limit_counts_restarts(job: Job) -> Iterator[Found]:
    """training-operator counts in-place restarts: under Never there are none, under ExitCode it does not look."""
    limit = job.spec["runPolicy"]["backoffLimit"]
    policies = {r.at["restartPolicy"].text for r in job.replicas.values()}
    if limit.number and job.kind.name == "PyTorchJob" and policies and policies <= {"Never", "ExitCode"}:
        yield Found(
            limit,
            f"backoffLimit does nothing under restartPolicy {' and '.join(sorted(policies))}",
            str(limit.number),
            "OnFailure, or no backoffLimit",
            "leave it out: the task tries again by `retries`",
        )


@rule("endless-restarts", WARNING)
def restarts_are_bounded(job: Job) -> Iterator[Found]:
    """Without backoffLimit, training-operator lets the kubelet restart a broken program for ever, and says Running.

    Its default restartPolicy is OnFailure for PyTorchJobs and Never for MPIJobs v1. mpi-operator (v2beta1) is left out:
    its launcher is a batch Job, whose backoffLimit is 6 by default. So are elastic jobs, which restart by design.
    """
    if job.mpi_v2 or job.spec["runPolicy"]["backoffLimit"].here or job.spec["elasticPolicy"].here:
        return
    default = "OnFailure" if job.kind.name == "PyTorchJob" else "Never"
    replicas = [r for role, r in job.replicas.items() if role in job.kind.roles]
    restarted = [r for r in replicas if (r.at["restartPolicy"].text or default) == "OnFailure"]
    if restarted:
        roles = " and ".join(r.role for r in restarted)
        by_default = "" if any(r.at["restartPolicy"].here for r in restarted) else " by default"
        yield Found(
            job.spec["runPolicy"]["backoffLimit"],
            f"restartPolicy of {roles} is OnFailure{by_default}: a program that fails is restarted without limit",
            "no backoffLimit",
            "restartPolicy Never, or a backoffLimit",
            "set restartPolicy: Never, and `retries` of the task; crash_loop_limit ends only crash loops",
        )


@rule("ttl", WARNING)
def ended_jobs_stay_until_they_are_read(job: Job) -> Iterator[Found]:
    """The ended job is the proof of how it ended: a short TTL deletes it before a task that was away can read it."""
    ttl = job.spec["runPolicy"][TTL]
    if ttl.number is not None and ttl.number < TTL_MINIMUM:
        yield Found(
            ttl,
            "the operator deletes the ended job before whoever follows it may have read how it ended; a task raises "
            "this value, and deletes the job itself (on_finish_action)",
            str(ttl.number),
            f"at least {TTL_MINIMUM}",
            "leave it out",
        )


@rule("mpi-processes", WARNING)
def mpirun_has_slots(job: Job) -> Iterator[Found]:
    worker, launcher = job.replicas.get("Worker"), job.replicas.get("Launcher")
    if job.kind.name != "MPIJob" or not worker or not launcher or not worker.count:
        return
    slots = worker.count * (job.spec["slotsPerWorker"].number or 1)
    if job.spec["runLauncherAsWorker"].value:
        slots += job.spec["slotsPerWorker"].number or 1
    low = max([n for n, _ in _numbers(launcher, r"--?min[-_]np")], default=None)
    if low is not None and low > slots:
        at = _numbers(launcher, r"--?min[-_]np")[0][1]
        yield Found(at, "fewer slots than --min-np", f"{slots} slots", f"at least {low}", "add Workers, or lower it")
    for match in re.finditer(_MPIRUN, launcher.words) if low is None else ():
        if int(match[2]) > slots and "oversubscribe" not in launcher.words:
            at = _word_at(launcher, match[1])
            hint = "lower it, or add Workers or slotsPerWorker"
            yield Found(at, "more processes than slots: mpirun refuses", match[2], f"at most {slots}", hint)
    high = max([n for n, _ in _numbers(launcher, r"--?max[-_]np")], default=None)
    if high is not None and high < slots:
        at = _numbers(launcher, r"--?max[-_]np")[0][1]
        expected = f"at most {high}"
        yield Found(at, "more slots than --max-np: some stay idle", f"{slots} slots", expected, "raise it")


def _using(job: Job, backend: str) -> list[tuple[Replica, At]]:
    """The replicas whose program is told to use a backend, and where it is told so."""
    found = []
    for replica in job.programs:
        match = _BACKEND.search(replica.words)
        said = match[1].lower() if match else ""
        at = _word_at(replica, match[0]) if match else replica.main
        for env in replica.main["env"]:
            if not match and env["name"].text in _BACKEND_ENV:
                said, at = env["value"].text.lower(), env
        if said == backend:
            found.append((replica, at))
    return found


def _gpus(job: Job, replica: Replica) -> int:
    """GPUs of the pods in which a program's processes run: of an MPIJob's Launcher those of the Workers."""
    return max((r.gpus for r in ([replica] if replica in job.trained else job.trained)), default=0)


def _numbers(replica: Replica, flag: str) -> list[tuple[int, At]]:
    """The values of a numeric argument of a program, and where each stands."""
    return [
        (int(m[1]), _word_at(replica, m[0])) for m in re.finditer(rf"\s(?:{flag})[=\s]+['\"]?(\d+)\b", replica.words)
    ]


def _word_at(replica: Replica, text: str) -> At:
    flag = re.split(r"[=\s]", text.strip())[0]
    words = [w for key in ("command", "args") for w in replica.main[key]]
    return next((w for w in words if flag in str(w.value)), replica.main)


def _unique(places: list[At]) -> list[At]:
    """The first place of each value."""
    return list({str(at.value): at for at in reversed(places)}.values())[::-1]
