"""Rules for every kind: what the API server, the webhook or the operator refuses, or accepts and never runs.

Each was recorded on a real cluster (training-operator 1.9, mpi-operator 0.8.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Field, Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import ERROR, NAMESPACE, NAMESPACE_FORMAT, WARNING
from airflow_provider_ktrain.core.manifest.schema import TYPES
from airflow_provider_ktrain.core.state.quantity import parse_quantity
from airflow_provider_ktrain.core.state.queue.kueue_status import MULTIKUEUE

MAX_LABEL = 63  #: Characters of a DNS label: a Service's name, a label's value.
CLEAN_POD_POLICIES = ("All", "Running", "None")
_OPERATOR_VOLUMES = {"mpi-job-config", "mpi-job-kubectl", "ssh-auth"}  #: Volumes that the MPI operators add.
_VOLUME_SOURCES = {member.partition(":")[0] for member in TYPES["Volume"].split()} - {"name!"}


@rule("name", ERROR)
def name(job: Job) -> Iterator[Finding]:
    """The job's name is a DNS-1035 label."""
    name = job.root["metadata"]["name"]
    if name.text and not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name.text):
        fixed = re.sub(r"[^a-z0-9]+", "-", name.text.lower()).strip("-").lstrip("0123456789-")
        expected = "lower-case letters, digits and -, starting with a letter"
        hint = f"for example {fixed!r}" if fixed else "choose another name"
        yield Finding(name, "invalid job name", repr(name.text), expected, hint)


@rule("name-length", ERROR)
def name_length(job: Job) -> Iterator[Finding]:
    """The names of pods and Services, `<job>-<role>-<index>`, have at most 63 characters.

    If the operator can't create the Services, the job never gets a status.
    """
    name = job.root["metadata"]["name"]
    suffixes = [
        f"-{r.role.lower()}" + ("" if r.role in job.kind.single_roles else f"-{max(r.count - 1, 0)}")
        for r in job.replicas.values()
    ]
    longest = max(suffixes, key=len, default="")
    if len(name.text + longest) > MAX_LABEL:
        message = "the job's name is too long: pods add a suffix to it"
        found = f"{len(name.text)} characters, {len(name.text + longest)} with {longest}"
        yield Finding(name, message, found, f"at most {MAX_LABEL - len(longest)} characters", "shorten it")


@rule("namespace", ERROR)
def namespace(job: Job) -> Iterator[Finding]:
    """The namespace's name is a DNS label."""
    namespace = job.root["metadata"]["namespace"]
    if namespace.text and not re.fullmatch(NAMESPACE, namespace.text):
        yield Finding(namespace, "invalid namespace", repr(namespace.text), NAMESPACE_FORMAT, "correct it")


@rule("label", ERROR)
def labels(job: Job) -> Iterator[Finding]:
    """Keys and values of labels and node selectors, and keys of annotations, are valid.

    As `IsQualifiedName` and `IsValidLabelValue` of Kubernetes' apimachinery; an annotation's value is any text.
    """
    holders = [job.root["metadata"], *(template["metadata"] for template in job.pod_templates)]
    lists = [(h[key], key == "labels") for h in holders for key in ("labels", "annotations")]
    reported = set()  # an option sets the same label on the job and each template: it is reported once
    for entries, are_labels in [*lists, *((template["spec"]["nodeSelector"], True) for template in job.pod_templates)]:
        for key, value in entries.members():
            if (key, value.text) in reported:
                continue
            reported.add((key, value.text))
            prefix, slash, name = key.rpartition("/")
            if not re.fullmatch(_LABEL, name) or (
                slash and not re.fullmatch(_DOMAIN, prefix if are_labels else prefix.lower())
            ):
                message = f"invalid {'label' if are_labels else 'annotation'} key"
                yield Finding(value, message, repr(key), "name, or domain.name/name", _LABEL_HINT)
            elif are_labels and value.text and not re.fullmatch(_LABEL, value.text):
                expected = f"up to {MAX_LABEL} letters, digits, -, _ and ."
                yield Finding(value, "invalid label value", repr(value.text), expected, _LABEL_HINT)


_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL_HINT = "remove other characters; start and end with a letter or digit; only annotation values are free text"


@rule("replica-type", ERROR)
def replica_types(job: Job) -> Iterator[Finding]:
    """The kind has these replica types."""
    known = job.kind.roles
    for role, at in job.replica_specs.members():
        if role not in known:
            near = next((k for k in known if k.lower() == role.lower()), None)
            hint = f"did you mean {near}?" if near else "remove it"
            yield Finding(at, f"{job.kind.name} has no replica type {role}", role, " and ".join(known), hint)


@rule("no-replicas", ERROR)
def replicas_exist(job: Job) -> Iterator[Finding]:
    """The job has replicas."""
    if job.kind.form.replica_specs and (job.replica_specs.value == {} or not job.replica_specs.present):
        roles = " and ".join(job.kind.roles)
        yield Finding(job.replica_specs, "the job has no replicas, so nothing runs", "nothing", roles, f"add {roles}")


@rule("worker-count", ERROR)
def worker_count(job: Job) -> Iterator[Finding]:
    """The number of Workers is not negative."""
    worker = job.replicas.get("Worker")
    if worker and worker.count < 0 and not job.spec["elasticPolicy"].present:  # else rule `elastic` reports it
        replicas = worker.at["replicas"]
        yield Finding(replicas, "negative number of Workers", str(worker.count), "0 or more", "correct the number")


@rule("no-container", ERROR)
def containers_exist(job: Job) -> Iterator[Finding]:
    """Every replica type has a container."""
    for replica in job.replicas.values():
        if not replica.containers:
            at = replica.pod["containers"]
            yield Finding(at, f"{replica.role} has no container", "nothing", "one container", "add one")


@rule("container-name", ERROR)
def container_name(job: Job) -> Iterator[Finding]:
    """One container of each pod has the name that the operator looks for."""
    required = job.kind.form.container
    for replica in job.replicas.values():
        names = [c["name"].text for c in replica.containers]
        if required and names and required not in names:
            at = replica.containers[0]["name"] if len(names) == 1 else replica.pod["containers"]
            message = f"{replica.role} has no container named {required}, which the operator requires"
            yield Finding(at, message, ", ".join(names), required, f"rename the training container to {required}")


@rule("image", ERROR)
def image(job: Job) -> Iterator[Finding]:
    """Every container has an image with a valid name; that of a TrainJob may be the runtime's."""
    for _, container in job.containers:
        image = container["image"]
        if not isinstance(image.value, str | None):
            continue  # the schema reports it
        if not image.text and job.kind.runtimes:
            continue
        if not image.text:
            message = f"container {container['name'].text} has no image"
            yield Finding(image, message, "nothing", "an image", "add image: registry/repository:tag")
        elif re.search(r"<[^>]*>|\{\{.*\}\}|\$\{.*\}", image.text):
            yield Finding(image, "the image is a placeholder", image.text, "an image", "write your image's name")
        elif not _IMAGE.fullmatch(image.text):
            hint = "correct it: a repository has lower-case letters, digits, ., _ and -"
            yield Finding(image, "invalid image name", repr(image.text), "registry/repository:tag", hint)


_IMAGE = re.compile(
    r"([a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]+)?/)?"  # registry
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"  # repository
    r"(:[\w][\w.-]{0,127})?(@[a-z0-9+._-]+:[0-9a-fA-F]{32,})?"  # tag, digest
)


@rule("wrong-list", ERROR)
def wrong_list(job: Job) -> Iterator[Finding]:
    """Entries of env, envFrom, volumeMounts, ports and volumes are in the right list.

    Recorded: the API server refuses `{name, value}` under volumeMounts with `mountPath: Required value`, and doesn't
    mention env.
    """
    lists = [(replica.pod, "volumes") for replica in job.replicas.values()]
    for _, container in job.containers:
        lists += [(container, key) for key in ("env", "envFrom", "volumeMounts", "ports")]
    for holder, key in lists:
        for entry in holder[key]:
            belongs = _list_of(entry)
            if belongs and belongs != key:
                subject = entry["name"].text or "the entry"
                place = "to the pod's volumes, beside containers" if belongs == "volumes" else f"to {belongs}"
                shape = "{" + ", ".join(k for k, _ in entry.members()) + "}"
                message = f"{subject} is in {key}, but is an entry of {belongs}"
                yield Finding(entry, message, shape, _SHAPES[key], f"move it {place}")


def _list_of(entry: Field) -> str | None:
    """The list that an entry belongs to by its keys."""
    keys = {key for key, _ in entry.members()}
    marks = {
        "volumeMounts": {"mountPath"},
        "ports": {"containerPort"},
        "envFrom": {"configMapRef", "secretRef"},
        "env": {"value", "valueFrom"},
        "volumes": _VOLUME_SOURCES,
    }
    return next((name for name, members in marks.items() if keys & members), None)


_SHAPES = {
    "volumeMounts": "{name, mountPath}",
    "ports": "{containerPort}",
    "envFrom": "{configMapRef} or {secretRef}",
    "env": "{name, value}",
    "volumes": "{name, and a source such as hostPath or persistentVolumeClaim}",
}


@rule("env-name", ERROR)
def env_name(job: Job) -> Iterator[Finding]:
    """Environment variables have valid names.

    Kubernetes since 1.30 takes any printable ASCII but `=`.
    """
    for name in (env["name"] for _, container in job.containers for env in container["env"]):
        if isinstance(name.value, str) and not re.fullmatch(r"[ -<>-~]+", name.text):
            expected = "letters, digits, _, - and ."
            yield Finding(name, "invalid name of a variable", repr(name.text), expected, "rename it")


@rule("volume", ERROR)
def volume_exists(job: Job) -> Iterator[Finding]:
    """Every mount has a volume of the same name."""
    for replica, container in job.containers:
        volumes = {v["name"].text for v in replica.pod["volumes"]}
        for mount in container["volumeMounts"]:
            name = mount["name"]
            if _list_of(mount) == "volumeMounts" and name.text and name.text not in volumes | _OPERATOR_VOLUMES:
                have = ", ".join(sorted(volumes)) or "no volumes"
                message, hint = f"{replica.role} has no volume {name.text}", "add it to the pod's volumes"
                yield Finding(name, message, have, f"a volume {name.text}", hint)


@rule("restart-policy", ERROR)
def restart_policy(job: Job) -> Iterator[Finding]:
    """The operator runs and ends the job with this restartPolicy."""
    allowed = job.operator.restart_policies
    for replica in job.replicas.values():
        policy = replica.at["restartPolicy"]
        if policy.text and policy.text not in allowed:
            message = f"{job.kind.name} {job.operator.version} does not support this restartPolicy"
            yield Finding(policy, message, policy.text, " or ".join(allowed), "write Never: Airflow retries the task")


@rule("clean-pod-policy", WARNING)
def clean_pod_policy(job: Job) -> Iterator[Finding]:
    """The cleanPodPolicy is one that the operator knows."""
    late = job.operator.rejects_after_creation
    consequence = "the operator never starts the job" if late else "the operator applies All"
    for policy in (job.spec["cleanPodPolicy"], job.spec["runPolicy"]["cleanPodPolicy"]):
        if policy.text and policy.text not in CLEAN_POD_POLICIES:
            expected, level = " or ".join(CLEAN_POD_POLICIES), ERROR if late else WARNING
            message = f"unknown cleanPodPolicy: {consequence}"
            yield Finding(policy, message, policy.text, expected, "write Running", level)


@rule("multikueue", ERROR)
def multikueue(job: Job) -> Iterator[Finding]:
    """The job runs in the cluster to which it is submitted: MultiKueue creates its pods in another one."""
    for managed_by in (job.spec["managedBy"], job.spec["runPolicy"]["managedBy"]):
        if managed_by.text == MULTIKUEUE:
            message = "MultiKueue runs the job in another cluster: its pods can't be followed or released from here"
            hint = "remove it, and set `queue_name` to a queue of this cluster"
            yield Finding(managed_by, message, MULTIKUEUE, "no managedBy", hint)


@rule("resources", ERROR)
def resources(job: Job) -> Iterator[Finding]:
    """Requests and limits are valid quantities, and a node could grant them."""
    for _, container in job.containers:
        yield from _resources(container["resources"])
    for volume in (v for replica in job.replicas.values() for v in replica.pod["volumes"]):
        yield from _quantity("sizeLimit", volume["emptyDir"]["sizeLimit"])


def _resources(resources: Field) -> Iterator[Finding]:
    """Quantities are valid, extended resources are whole numbers, and no request exceeds its limit."""
    limits, requests, empty = resources["limits"], resources["requests"], set[str]()
    for name, asked in (*limits.members(), *((n, a) for n, a in requests.members() if not limits[n].present)):
        limit, request = parse_quantity(limits[name].value), parse_quantity(requests[name].value)
        extended = "/" in name and not name.startswith("kubernetes.io/")
        if not limits[name].present and not requests[name].present:
            if name not in empty:
                yield Finding(asked, f"{name} has no value", "nothing", "a quantity", "write one, or remove it")
            empty.add(name)
        elif wrong := list(_quantity(name, asked)):
            yield from wrong
        elif extended and (parse_quantity(asked.value) or 0) % 1:
            yield Finding(asked, f"{name} must be a whole number", str(asked.value), "a whole number", "correct it")
        elif extended and not limits[name].present:
            hint = "write it under limits; the request defaults to it"
            message, expected = f"{name} is requested without a limit", f"limits {name}: {request}"
            yield Finding(requests[name], message, "no limit", expected, hint)
        elif extended and request is not None and request != limit:
            hint = "remove the request: it defaults to the limit"
            yield Finding(requests[name], f"{name}: request and limit must be equal", str(request), str(limit), hint)
        elif limit is not None and request is not None and request > limit:
            yield Finding(
                requests[name], f"{name}: the request exceeds the limit", str(requests[name].value),
                f"at most {limits[name].value}", "lower it, or raise the limit",
            )  # fmt: skip


def _quantity(name: str, at: Field) -> Iterator[Finding]:
    """Quantities are valid and not negative."""
    if at.present and isinstance(at.value, int | str):
        amount = parse_quantity(at.value)
        if amount is None:
            expected = "a number with a unit: 4, 500m or 16Gi"
            yield Finding(at, f"{name} has an invalid quantity", repr(at.value), expected, "write it as 8Gi")
        elif amount < 0:
            yield Finding(at, f"{name} is negative", str(at.value), "0 or more", "correct it")
