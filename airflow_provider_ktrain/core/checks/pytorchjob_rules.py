"""Rules for PyTorchJobs only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING
from airflow_provider_ktrain.core.checks.warning_rules import may_have_gpus, without_nccl_gpus
from airflow_provider_ktrain.core.kinds import PYTORCHJOB


@rule("master-count", ERROR, PYTORCHJOB)
def master_count(job: Job) -> Iterator[Finding]:
    """A Master has `replicas: 1`, written out."""
    if "Master" in job.replicas:
        replicas = job.replicas["Master"].at["replicas"]
        if replicas.value != 1:
            found = str(replicas.value) if replicas.present else "nothing"
            yield Finding(replicas, "Master.replicas must be set to 1", found, "1", "set Master.replicas to 1")


@rule("worker-count", WARNING, PYTORCHJOB)
def no_workers(job: Job) -> Iterator[Finding]:
    """A Worker has at least one replica.

    The webhook of training-operator 1.9 refuses 0 (pkg/webhooks/pytorch); our operators leave such a Worker out.
    """
    worker = job.replicas.get("Worker")
    if worker and worker.count == 0 and not job.spec["elasticPolicy"].present:
        message = "training-operator 1.9 refuses 0 Workers; ktrain's operators leave them out"
        hint = "remove Worker: the Master then runs alone"
        yield Finding(worker.at["replicas"], message, "0", "at least 1", hint)


@rule("elastic", ERROR, PYTORCHJOB)
def elastic_policy(job: Job) -> Iterator[Finding]:
    """With an elasticPolicy there are Workers, and their number is within its bounds."""
    elastic = job.spec["elasticPolicy"]
    if not elastic.present:
        return
    worker = job.replicas.get("Worker")
    low, high = elastic["minReplicas"], elastic["maxReplicas"]
    if worker is None:
        message = "elasticPolicy scales Workers, and the job has none"
        yield Finding(job.replica_specs["Worker"], message, "nothing", "Worker", "add Workers, or remove the policy")
    elif worker.count < 1:
        message = "elasticPolicy needs at least one Worker"
        yield Finding(worker.at["replicas"], message, str(worker.count), "at least 1", "raise it")
    if low.number is not None and high.number is not None and low.number > high.number:
        expected, hint = f"at most {high.number}", "lower it, or raise maxReplicas"
        yield Finding(low, "minReplicas exceeds maxReplicas", str(low.number), expected, hint)
    elif worker and not (low.number or 0) <= worker.count <= (high.number or worker.count):
        bounds = f"{low.number if low.present else 1} to {high.number if high.present else worker.count}"
        yield Finding(
            worker.at["replicas"], "Worker.replicas is outside the bounds of elasticPolicy", str(worker.count), bounds,
            "set Worker.replicas within them, or change them", WARNING,
        )  # fmt: skip
    if elastic["nProcPerNode"].present and job.spec["nprocPerNode"].present:
        message = "the number of processes per node is set twice"
        yield Finding(elastic["nProcPerNode"], message, "both", "spec.nprocPerNode only", "remove this one")


@rule("elastic-range", WARNING, PYTORCHJOB)
def elastic_range(job: Job) -> Iterator[Finding]:
    """An elasticPolicy has a range, and no Master beside it.

    training-operator takes missing bounds from each other, or from Worker.replicas. It sets MASTER_ADDR and RANK where
    there is a Master, which torchrun's rendezvous then ignores.
    """
    elastic, worker = job.spec["elasticPolicy"], job.replicas.get("Worker")
    if not elastic.present or worker is None:
        return
    if "Master" in job.replicas:
        message = "the Master is not part of the elastic range: minReplicas and maxReplicas count Workers"
        hint = "remove the Master, and add a Worker"
        yield Finding(job.replica_specs["Master"], message, "Master", "Workers only", hint)
    low, high = elastic["minReplicas"].number, elastic["maxReplicas"].number
    first, last = low or high or worker.count, high or low or worker.count
    if first == last and (low is None or high is None or last == 1):
        message = "the job isn't elastic: its range has one size"
        found, hint = f"{first}:{last}", "set minReplicas and maxReplicas, or remove elasticPolicy"
        yield Finding(elastic, message, found, "minReplicas below maxReplicas", hint)


_ALWAYS_SET = frozenset({"PET_NNODES", "PET_NPROC_PER_NODE"})
_SET_WITH_MASTER = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", "WORLD_SIZE", "RANK", "PET_NODE_RANK"}
)
_SET_IF_ELASTIC = frozenset({"PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"})


@rule("reserved-env", WARNING, PYTORCHJOB)
def reserved_env(job: Job) -> Iterator[Finding]:
    """No variable is set that the operator overrides."""
    with_master = _SET_WITH_MASTER if "Master" in job.replicas else set()
    names = _ALWAYS_SET | with_master | (_SET_IF_ELASTIC if job.spec["elasticPolicy"].present else set())
    for replica in job.replicas.values():
        for env in (e for c in replica.containers for e in c["env"]):
            if env["name"].text in names:
                message = f"the operator overrides {env['name'].text}: the value has no effect"
                yield Finding(env, message, str(env["value"].value), "the operator's value", "remove it")


@rule("worker-only", WARNING, PYTORCHJOB)
def worker_only(job: Job) -> Iterator[Finding]:
    """Workers without a Master have another way to find each other."""
    worker = job.replicas.get("Worker")
    if "Master" in job.replicas or job.spec["elasticPolicy"].present or not worker:
        return
    own = {e["name"].text for e in worker.main["env"]}
    if worker.count > 1 and "MASTER_ADDR" not in own and not re.search(r"rdzv|master[-_]addr", worker.command_line):
        message = "without a Master or an elasticPolicy, MASTER_ADDR, RANK and WORLD_SIZE are not set"
        expected = "Master and Worker, or spec.elasticPolicy"
        yield Finding(job.replica_specs, message, "only Worker", expected, "add a Master, or an elasticPolicy")


@rule("backoff-limit", WARNING, PYTORCHJOB)
def backoff_limit(job: Job) -> Iterator[Finding]:
    """A backoffLimit has an effect.

    training-operator counts restarts of containers: under Never there are none, and under ExitCode it doesn't count.
    """
    limit = job.spec["runPolicy"]["backoffLimit"]
    policies = {r.at["restartPolicy"].text for r in job.replicas.values()}
    if limit.number and policies and policies <= {"Never", "ExitCode"}:
        message = f"backoffLimit has no effect under restartPolicy {' and '.join(sorted(policies))}"
        hint = "remove it, and set `retries` of the task"
        yield Finding(limit, message, str(limit.number), "OnFailure, or no backoffLimit", hint)


@rule("unequal-gpus", WARNING, PYTORCHJOB)
def unequal_gpus(job: Job) -> Iterator[Finding]:
    """Either both Master and Worker request GPUs, or none of them: both train.

    Replicas that use or configure nccl without GPUs have a warning of their own (nccl-without-gpus).
    """
    master, worker = job.replicas.get("Master"), job.replicas.get("Worker")
    if master is None or worker is None or worker.count < 1:
        return
    without, with_gpus = sorted((master, worker), key=lambda replica: replica.gpus)
    warned = [replica.role for replica, _ in without_nccl_gpus(job)]
    if with_gpus.gpus and not without.gpus and without.role not in warned and not may_have_gpus(job, without):
        message = f"{with_gpus.role} requests GPUs and {without.role} doesn't: both train"
        expected, hint = f"GPUs for {without.role}, too", f"request them for {without.role}, or for neither"
        yield Finding(without.main["resources"], message, f"{with_gpus.gpus} and 0 GPUs", expected, hint)
