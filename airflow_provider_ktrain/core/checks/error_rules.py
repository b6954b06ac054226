"""Rules for what the API server, the webhook or the operator refuses, or accepts and never runs.

Each is as recorded on a real cluster (training-operator 1.9, mpi-operator 0.8.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation

from airflow_provider_ktrain.core.checks.job import NAMESPACE, NAMESPACE_IS, At, Found, Job, Level, rule
from airflow_provider_ktrain.core.manifest.schema import TYPES

ERROR, WARNING = Level.ERROR, Level.WARNING
MAX_LABEL = 63  #: characters of a DNS label: a Service's name, a label's value
RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN_POD_POLICIES = ("All", "Running", "None")
_OWN_VOLUMES = {"mpi-job-config", "mpi-job-kubectl", "ssh-auth"}  #: the MPI operators add these themselves
_SOURCES = {member.partition(":")[0] for member in TYPES["Volume"].split()} - {"name!"}


@rule("name", ERROR)
def name_is_a_label(job: Job) -> Iterator[Found]:
    name = job.root["metadata"]["name"]
    if name.text and not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name.text):
        fixed = re.sub(r"[^a-z0-9]+", "-", name.text.lower()).strip("-").lstrip("0123456789-")
        yield Found(
            name,
            "the name is no DNS-1035 label",
            repr(name.text),
            "lower-case letters, digits and -, a letter first",
            f"{fixed!r} would do" if fixed else "give it another name",
        )


@rule("name-length", ERROR)
def name_grows_too_long(job: Job) -> Iterator[Found]:
    """Pods and Services are `<job>-<role>-<index>`; a job whose Services cannot be made never gets a status."""
    name = job.root["metadata"]["name"]
    suffixes = [
        f"-{r.role.lower()}" + ("" if r.role == "Launcher" else f"-{max(r.count - 1, 0)}")
        for r in job.replicas.values()
    ]
    longest = max(suffixes, key=len, default="")
    if len(name.text + longest) > MAX_LABEL:
        yield Found(
            name,
            "the name grows too long with a replica's suffix",
            f"{len(name.text)} characters, {len(name.text + longest)} with {longest}",
            f"at most {MAX_LABEL - len(longest)} characters",
            "shorten it",
        )


@rule("namespace", ERROR)
def namespace_is_a_label(job: Job) -> Iterator[Found]:
    namespace = job.root["metadata"]["namespace"]
    if namespace.text and not re.fullmatch(NAMESPACE, namespace.text):
        message = "no namespace can have this name"
        yield Found(namespace, message, repr(namespace.text), NAMESPACE_IS, "correct it")


@rule("label", ERROR)
def labels_are_such(job: Job) -> Iterator[Found]:
    """As `IsQualifiedName` and `IsValidLabelValue` of Kubernetes' apimachinery; an annotation's value is any text."""
    holders = [job.root["metadata"], *(r.at["template"]["metadata"] for r in job.replicas.values())]
    lists = [(h[key], key == "labels") for h in holders for key in ("labels", "annotations")]
    told = set()  # what an option puts everywhere is told once
    for entries, are_labels in [*lists, *((r.pod["nodeSelector"], True) for r in job.replicas.values())]:
        for key, value in entries.members():
            if (key, value.text) in told:
                continue
            told.add((key, value.text))
            prefix, slash, name = key.rpartition("/")
            if not re.fullmatch(_LABEL, name) or (
                slash and not re.fullmatch(_DOMAIN, prefix if are_labels else prefix.lower())
            ):
                yield Found(value, "no such key is allowed", repr(key), "name, or domain.name/name", _LABEL_HINT)
            elif are_labels and value.text and not re.fullmatch(_LABEL, value.text):
                expected = f"up to {MAX_LABEL} letters, digits, -, _ and ."
                yield Found(value, "no label can have this value", repr(value.text), expected, _LABEL_HINT)


_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL_HINT = "leave out other characters; begin and end with a letter or digit; annotations' values are free"


@rule("replica-type", ERROR)
def replica_types_are_known(job: Job) -> Iterator[Found]:
    known = job.kind.roles
    for role, at in job.replica_specs.members():
        if role not in known:
            near = next((k for k in known if k.lower() == role.lower()), None)
            hint = f"did you mean {near}?" if near else "leave it out"
            yield Found(at, f"{job.kind.name} has no replica type {role}", role, " and ".join(known), hint)


@rule("no-replicas", ERROR)
def something_runs(job: Job) -> Iterator[Found]:
    if job.replica_specs.value == {} or not job.replica_specs.here:
        what = " and ".join(job.kind.roles)
        yield Found(job.replica_specs, "the job has no replicas: nothing would run", "nothing", what, f"add {what}")


@rule("replicas", ERROR)
def counts_are_counts(job: Job) -> Iterator[Found]:
    """Of a Master, a Launcher and elastic Workers other rules tell it."""
    worker = job.replicas.get("Worker")
    if worker and worker.count < 0 and not job.spec["elasticPolicy"].here:
        yield Found(worker.at["replicas"], "replicas are below 0", str(worker.count), "0 or more", "correct the number")


@rule("master-replicas", ERROR)
def one_master(job: Job) -> Iterator[Found]:
    if job.kind.name == "PyTorchJob" and "Master" in job.replicas:
        replicas = job.replicas["Master"].at["replicas"]
        if replicas.value != 1:
            found = str(replicas.value) if replicas.here else "nothing"
            yield Found(
                replicas, "a PyTorchJob has one Master, said explicitly", found, "1", "set Master.replicas to 1"
            )


@rule("no-workers", WARNING)
def workers_are_some(job: Job) -> Iterator[Found]:
    """The webhook of training-operator 1.9 refuses 0 (pkg/webhooks/pytorch); without it the Master runs alone."""
    worker = job.replicas.get("Worker")
    if job.kind.name == "PyTorchJob" and worker and worker.count == 0 and not job.spec["elasticPolicy"].here:
        yield Found(
            worker.at["replicas"],
            "training-operator 1.9 refuses 0 Workers; our operators leave them out",
            "0",
            "at least 1",
            "leave Worker out: the Master then runs alone",
        )


@rule("launcher", ERROR)
def one_launcher_some_workers(job: Job) -> Iterator[Found]:
    if job.kind.name != "MPIJob" or not job.replicas:
        return
    roles = {role.lower() for role in job.replicas}
    launcher, worker = job.replicas.get("Launcher"), job.replicas.get("Worker")
    if "launcher" not in roles:
        yield Found(
            job.replica_specs["Launcher"], "an MPIJob needs a Launcher", "nothing", "one replica", "add a Launcher"
        )
    if launcher and launcher.count != 1:
        yield Found(
            launcher.at["replicas"],
            "an MPIJob has one Launcher",
            str(launcher.count),
            "1",
            "set Launcher.replicas to 1",
        )
    if "worker" not in roles:
        message = "there are no Workers: the Launcher runs alone"
        yield Found(job.replica_specs["Worker"], message, "nothing", "Worker", "add Workers", WARNING)
    elif worker and worker.count == 0:
        level = ERROR if job.mpi_v2 else WARNING
        found = str(worker.count) if worker.at["replicas"].here else "nothing, which means 0"
        yield Found(worker.at["replicas"], "there are no Workers", found, "at least 1", "set Worker.replicas", level)


@rule("no-container", ERROR)
def every_pod_has_a_container(job: Job) -> Iterator[Found]:
    for replica in job.replicas.values():
        if not replica.containers:
            yield Found(
                replica.pod["containers"], f"{replica.role} has no container", "nothing", "one container", "add one"
            )


@rule("container-name", ERROR)
def operator_finds_its_container(job: Job) -> Iterator[Found]:
    wanted = job.kind.container
    for replica in job.replicas.values():
        names = [c["name"].text for c in replica.containers]
        if wanted and names and wanted not in names:
            at = replica.containers[0]["name"] if len(names) == 1 else replica.pod["containers"]
            yield Found(
                at,
                f"{replica.role} has no container named {wanted}, which the operator looks for",
                ", ".join(names),
                wanted,
                f"rename the container that trains to {wanted}",
            )


@rule("image", ERROR)
def images_can_be_pulled(job: Job) -> Iterator[Found]:
    for replica in job.replicas.values():
        for container in (*replica.pod["initContainers"], *replica.containers):
            image = container["image"]
            if not isinstance(image.value, str | None):
                continue  # the schema says so
            if not image.text:
                message = f"container {container['name'].text} has no image"
                yield Found(image, message, "nothing", "an image", "add image: registry/repository:tag")
            elif re.search(r"<[^>]*>|\{\{.*\}\}|\$\{.*\}", image.text):
                yield Found(image, "the image is a placeholder", image.text, "an image", "put your image's name there")
            elif not _IMAGE.fullmatch(image.text):
                hint = "correct it: a repository is of lower-case letters, digits, ., _ and -"
                yield Found(image, "the image's name is not valid", repr(image.text), "registry/repository:tag", hint)


_IMAGE = re.compile(
    r"([a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]+)?/)?"  # registry
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"  # repository
    r"(:[\w][\w.-]{0,127})?(@[a-z0-9+._-]+:[0-9a-fA-F]{32,})?"  # tag, digest
)


@rule("wrong-list", ERROR)
def entries_stand_in_their_list(job: Job) -> Iterator[Found]:
    """Recorded: `{name, value}` under volumeMounts is refused with `mountPath: Required value`, no word of env."""
    for replica in job.replicas.values():
        lists = [(replica.pod, "volumes")]
        for container in (*replica.pod["initContainers"], *replica.containers):
            lists += [(container, key) for key in ("env", "envFrom", "volumeMounts", "ports")]
        for holder, key in lists:
            for entry in holder[key]:
                belongs = _list_of(entry)
                if belongs and belongs != key:
                    what = entry["name"].text or "the entry"
                    where = "in the pod's volumes, beside containers" if belongs == "volumes" else f"under {belongs}"
                    shape = "{" + ", ".join(k for k, _ in entry.members()) + "}"
                    yield Found(entry, f"{what} stands under {key} but is an entry of {belongs}", shape, _SHAPES[key],
                                f"move it {where}")  # fmt: skip


def _list_of(entry: At) -> str | None:
    """The list that an entry belongs to by its members."""
    keys = {key for key, _ in entry.members()}
    marks = {
        "volumeMounts": {"mountPath"},
        "ports": {"containerPort"},
        "envFrom": {"configMapRef", "secretRef"},
        "env": {"value", "valueFrom"},
        "volumes": _SOURCES,
    }
    return next((name for name, members in marks.items() if keys & members), None)


_SHAPES = {
    "volumeMounts": "{name, mountPath}",
    "ports": "{containerPort}",
    "envFrom": "{configMapRef} or {secretRef}",
    "env": "{name, value}",
    "volumes": "{name, and a source as hostPath or persistentVolumeClaim}",
}


@rule("env-name", ERROR)
def variables_have_names(job: Job) -> Iterator[Found]:
    """Kubernetes since 1.30 takes any printable ASCII but `=`."""
    for replica in job.replicas.values():
        for container in (*replica.pod["initContainers"], *replica.containers):
            for name in (env["name"] for env in container["env"]):
                if isinstance(name.value, str) and not re.fullmatch(r"[ -<>-~]+", name.text):
                    expected = "letters, digits, _, - and ."
                    yield Found(name, "no variable can have this name", repr(name.text), expected, "rename it")


@rule("volume", ERROR)
def mounts_have_volumes(job: Job) -> Iterator[Found]:
    for replica in job.replicas.values():
        volumes = {v["name"].text for v in replica.pod["volumes"]}
        for container in (*replica.pod["initContainers"], *replica.containers):
            for mount in container["volumeMounts"]:
                name = mount["name"]
                if _list_of(mount) == "volumeMounts" and name.text and name.text not in volumes | _OWN_VOLUMES:
                    have = ", ".join(sorted(volumes)) or "no volumes"
                    message, hint = f"{replica.role} has no volume {name.text}", "add it to the pod's volumes"
                    yield Found(name, message, have, f"a volume {name.text}", hint)


@rule("restart-policy", ERROR)
def restart_policies_are_known(job: Job) -> Iterator[Found]:
    for replica in job.replicas.values():
        policy = replica.at["restartPolicy"]
        if not policy.text:
            continue
        if job.kind.name == "MPIJob" and policy.text == "ExitCode":
            yield Found(
                policy,
                "ExitCode does not end an MPIJob: v2beta1 never starts it, v1 restarts it for ever",
                policy.text,
                "Never or OnFailure",
                "write Never: the task tries again by `retries`",
            )
        elif policy.text not in (allowed := RESTART_POLICIES[1:3] if job.mpi_v2 else RESTART_POLICIES):
            yield Found(policy, "no such restart policy", policy.text, " or ".join(allowed), "write one of these")


@rule("clean-pod-policy", WARNING)
def clean_pod_policies_are_known(job: Job) -> Iterator[Found]:
    top, run = job.spec["cleanPodPolicy"], job.spec["runPolicy"]["cleanPodPolicy"]
    if job.mpi_v2 and top.here:
        yield Found(
            top,
            "mpi-operator prunes cleanPodPolicy from the top of spec, and the Workers stay",
            str(top.value),
            "spec.runPolicy.cleanPodPolicy",
            "move it under runPolicy",
        )
    for policy in (top, run):
        if policy.text and policy.text not in CLEAN_POD_POLICIES:
            message = "mpi-operator never starts the job" if job.mpi_v2 else "the operator takes it for All"
            expected = " or ".join(CLEAN_POD_POLICIES)
            level = ERROR if job.mpi_v2 else WARNING
            yield Found(policy, f"no such cleanPodPolicy: {message}", policy.text, expected, "write Running", level)


@rule("elastic", ERROR)
def elastic_bounds_hold(job: Job) -> Iterator[Found]:
    elastic = job.spec["elasticPolicy"]
    if job.kind.name != "PyTorchJob" or not elastic.here:
        return
    worker = job.replicas.get("Worker")
    low, high = elastic["minReplicas"], elastic["maxReplicas"]
    if worker is None:
        message = "elasticPolicy scales Workers, and there are none"
        yield Found(job.replica_specs["Worker"], message, "nothing", "Worker", "add Workers, or leave it out")
    elif worker.count < 1:
        yield Found(worker.at["replicas"], "elasticPolicy needs a Worker", str(worker.count), "at least 1", "raise it")
    if low.number is not None and high.number is not None and low.number > high.number:
        expected = f"at most {high.number}"
        yield Found(
            low, "minReplicas is above maxReplicas", str(low.number), expected, "lower it, or raise maxReplicas"
        )
    elif worker and not (low.number or 0) <= worker.count <= (high.number or worker.count):
        bounds = f"{low.number if low.here else 1} to {high.number if high.here else worker.count}"
        yield Found(
            worker.at["replicas"], "Workers outside the elastic bounds", str(worker.count), bounds,
            "set Worker.replicas within them, or move them", WARNING,
        )  # fmt: skip
    if elastic["nProcPerNode"].here and job.spec["nprocPerNode"].here:
        message = "processes per node are given twice"
        yield Found(elastic["nProcPerNode"], message, "both", "spec.nprocPerNode alone", "leave this one out")


@rule("resources", ERROR)
def resources_can_be_granted(job: Job) -> Iterator[Found]:
    for replica in job.replicas.values():
        for container in (*replica.pod["initContainers"], *replica.containers):
            yield from _resources(container["resources"])
        for size in (volume["emptyDir"]["sizeLimit"] for volume in replica.pod["volumes"]):
            yield from _quantity("sizeLimit", size)


def _resources(resources: At) -> Iterator[Found]:
    limits, requests = resources["limits"], resources["requests"]
    for name, asked in (*limits.members(), *((n, a) for n, a in requests.members() if not limits[n].here)):
        limit, request = quantity(limits[name]), quantity(requests[name])
        extended = "/" in name and not name.startswith("kubernetes.io/")
        if wrong := list(_quantity(name, asked)):
            yield from wrong
        elif extended and (quantity(asked) or 0) % 1:
            yield Found(asked, f"{name} cannot be divided", str(asked.value), "a whole number", "ask for whole ones")
        elif extended and not limits[name].here:
            hint = "write it under limits; the request follows"
            yield Found(
                requests[name], f"{name} is requested without a limit", "no limit", f"limits {name}: {request}", hint
            )
        elif extended and request is not None and request != limit:
            hint = "leave the request out: it follows the limit"
            yield Found(requests[name], f"{name}: request and limit must be equal", str(request), str(limit), hint)
        elif limit is not None and request is not None and request > limit:
            yield Found(
                requests[name], f"{name}: the request is above the limit", str(requests[name].value),
                f"at most {limits[name].value}", "lower it, or raise the limit",
            )  # fmt: skip


def _quantity(name: str, at: At) -> Iterator[Found]:
    if at.here and isinstance(at.value, int | str):
        amount = quantity(at)
        if amount is None:
            expected = "a number with a unit, as 4, 500m or 16Gi"
            yield Found(at, f"{name} is no quantity", repr(at.value), expected, "write it without blanks, as 8Gi")
        elif amount < 0:
            yield Found(at, f"{name} is below 0", str(at.value), "0 or more", "correct it")


_UNITS = {unit: Decimal(1000) ** power for power, unit in enumerate(("n", "u", "m", "", "k", *"MGTPE"), -3)} | {
    f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)
}


def quantity(at: At) -> Decimal | None:
    """A Kubernetes quantity as a number; None for what is none."""
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(at.value))
    try:
        return Decimal(match[1]) * _UNITS[match[2]] if match else None
    except (InvalidOperation, KeyError):
        return None
