"""Rules for every kind: what the cluster accepts without a word, and what changes the training."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import WARNING
from airflow_provider_ktrain.core.state.quantity import parse_quantity
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL
from airflow_provider_ktrain.core.text.output import SUGGESTION, counted

_KUEUE_LABELS = {QUEUE_LABEL: "queue_name", PRIORITY_LABEL: "workload_priority_class"}
_ISTIO = "sidecar.istio.io/inject"
#: Keys of labels and annotations that change a training, by which misspelt ones of the same domain are found.
_KNOWN_KEYS = (
    QUEUE_LABEL, PRIORITY_LABEL, _ISTIO, "kueue.x-k8s.io/podset-required-topology",
    "kueue.x-k8s.io/podset-preferred-topology", "kueue.x-k8s.io/podset-unconstrained-topology",
    "scheduling.volcano.sh/queue-name", "scheduling.k8s.io/group-name",
    "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt",
)  # fmt: skip
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z|k|a)?sh")
_OF_RANK = (
    r"(?:(?:LOCAL_|NODE_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_[A-Z_]+|JOB_COMPLETION_INDEX|(?:NUM_|N)NODES)"
)
_VARIABLE = re.compile(rf"(?<!\$)\$(?:{_OF_RANK}\b|\{{{_OF_RANK}\}})")
#: A pod with less memory than the first, in bytes, doesn't start; no node has as many cores as the second.
_LEAST_MEMORY, _MOST_CORES = 1024 * 1024, 2000


@rule("queue-label", WARNING)
def queue_label(job: Job) -> Iterator[Finding]:
    """Queue and priority class of Kueue are labels of the job. Kueue ignores them as annotations, and on pod templates.

    A task's `labels` are set in both places.
    """
    labels = job.root["metadata"]["labels"]
    for key, parameter in _KUEUE_LABELS.items():
        places = [(job.root["metadata"]["annotations"][key], "an annotation")]
        for template in job.pod_templates:
            places += [
                (template["metadata"]["labels"][key], "a label of the pod template"),
                (template["metadata"]["annotations"][key], "an annotation of the pod template"),
            ]
        if labels[key].text:
            continue
        for at, what in [place for place in places if place[0].text][:1]:
            message = f"{key} has no effect as {what}: Kueue reads the labels of the job"
            yield Finding(at, message, what, "a label in metadata.labels", f"move it there, or set `{parameter}`")


@rule("misspelt-key", WARNING)
def misspelt_key(job: Job) -> Iterator[Finding]:
    """Keys of labels and annotations are spelled as their readers do: others have no effect."""
    holders = [job.root["metadata"], *(template["metadata"] for template in job.pod_templates)]
    reported = set()
    for key, at in (member for h in holders for side in ("labels", "annotations") for member in h[side].members()):
        meant = _meant(key)
        if meant and key not in reported:
            reported.add(key)
            yield Finding(at, f"{key} is probably misspelled: nothing reads it", key, meant, f"{SUGGESTION}{meant}?")


def _meant(key: str) -> str:
    """The known key of the same or a similar domain that differs in one or two letters; "" if there is none."""
    if key in _KNOWN_KEYS or "/" not in key:
        return ""
    return next((known for known in _KNOWN_KEYS if _distance(key.lower(), known, 2) <= 2), "")


def _distance(one: str, other: str, most: int) -> int:
    """How many letters one text must change to become the other; a number above `most` if more."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


@rule("suspended", WARNING)
def suspended(job: Job) -> Iterator[Finding]:
    """A suspended job has a queue that resumes it."""
    at = job.spec["suspend"] if job.kind.runtimes else job.spec["runPolicy"]["suspend"]
    if at.value is True and not job.root["metadata"]["labels"][QUEUE_LABEL].text:
        message = "the job is created suspended, and has no queue that resumes it: it waits until somebody does"
        yield Finding(at, message, "suspend: true", "a queue, or no suspend", "remove it, or set `queue_name`")


@rule("istio", WARNING)
def istio(job: Job) -> Iterator[Finding]:
    """Istio's sidecar is turned off on the pod templates: on the job, its annotation or label has no effect."""
    on_pods = [t["metadata"][side][_ISTIO] for t in job.pod_templates for side in ("labels", "annotations")]
    for side in ("annotations", "labels"):
        at = job.root["metadata"][side][_ISTIO]
        if at.present and not any(field.present for field in on_pods):
            message = f"{_ISTIO} has no effect on the job: Istio reads it on pods, and may inject its sidecar"
            hint = "move it to template.metadata of each replica type, or set `annotations` of the task"
            yield Finding(at, message, f"metadata.{side}", "the pod templates", hint)


@rule("idle-gpus", WARNING)
def idle_gpus(job: Job) -> Iterator[Finding]:
    """Each pod starts as many processes as it has GPUs, if their number is set."""
    for replica in job.training:
        counts = replica.numbers(r"--nproc[-_]per[-_]node")
        field = job.spec[job.kind.form.processes_field]
        if not counts and field.number:
            counts = [(field.number, field)]
        for count, at in counts[:1]:
            if 0 < count < replica.gpus:
                message = f"some GPUs of each {replica.role} may stay idle: it starts fewer processes than it has GPUs"
                found = f"{counted(count, 'process')}, {counted(replica.gpus, 'GPU')}".replace("processs", "processes")
                hint = "raise the number of processes, unless each uses several GPUs; or request fewer GPUs"
                yield Finding(at, message, found, str(replica.gpus), hint)


@rule("shell-variable", WARNING)
def shell_variable(job: Job) -> Iterator[Finding]:
    """Without a shell, commands refer to variables by `$(NAME)`: Kubernetes passes `$NAME` unchanged."""
    for replica in job.programs:
        words = [*replica.main["command"], *replica.main["args"]]
        texts = [word.text for word in words]
        if any(_SHELL.fullmatch(text) for text in texts) or not replica.main["command"].value:
            continue
        for word in words:
            if "\n" not in word.text and (found := _VARIABLE.search(word.text)):
                name = found[0].strip("${}")
                message = f"{found[0]} is passed unchanged: no shell replaces it"
                yield Finding(word, message, found[0], f"$({name})", f"write $({name}), which Kubernetes replaces")
                break


@rule("quantity-unit", WARNING)
def quantity_unit(job: Job) -> Iterator[Finding]:
    """Memory and cpu have a unit: without one, they are bytes and cores."""
    for _, container in job.containers:
        for side in ("limits", "requests"):
            for name in ("memory", "ephemeral-storage", "cpu"):
                at = container["resources"][side][name]
                amount = parse_quantity(at.value) if isinstance(at.value, int | str) else None
                if amount is None or amount <= 0:
                    continue
                if name == "cpu" and amount >= _MOST_CORES:
                    message, meant = f"cpu counts cores: these are {amount:,.0f}", f"{at.value}m"
                elif name != "cpu" and amount < _LEAST_MEMORY:
                    message = f"{name} counts bytes: with so few, no container starts"
                    meant = f"{str(at.value).rstrip('m')}Mi"
                else:
                    continue
                yield Finding(at, message, str(at.value), meant, "add the unit")


@rule("host-network", WARNING)
def host_network(job: Job) -> Iterator[Finding]:
    """Pods in the network of their node still find Services: dnsPolicy is ClusterFirstWithHostNet."""
    for pod in (template["spec"] for template in job.pod_templates):
        if pod["hostNetwork"].value is True and pod["dnsPolicy"].text in ("", "ClusterFirst"):
            message = "with hostNetwork, pods use the DNS of their node, and don't find the other replicas"
            found = pod["dnsPolicy"].text or "no dnsPolicy"
            hint = "set dnsPolicy: ClusterFirstWithHostNet"
            yield Finding(pod["hostNetwork"], message, found, "ClusterFirstWithHostNet", hint)
