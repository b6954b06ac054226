"""Rules for MPIJobs only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Finding, Job, Replica, rule
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING
from airflow_provider_ktrain.core.kinds.mpijob import MPIJOB

_MPIRUN = re.compile(  # -n may also be an argument of the program, after its name
    r"\b(?:mpirun|mpiexec|horovodrun)(?:[^;|&\n]*?\s(?=--?np\b|--num-proc\b)|(?:\s+--[\w-]+)*\s+)"
    r"(--?np|--num-proc|-n)[=\s]+['\"]?(\d+)\b"
)
#: What starts ranks in other pods, or a script that may call it.
_STARTS_RANKS = re.compile(r"\b(?:mpirun|mpiexec|horovodrun|orterun|prterun|deepspeed)\b|(?:^|sh)\s+\S+\.sh\b")
_SSHD = re.compile(r"sshd|dropbear|(?:service|systemctl start|init\.d/)\s*ssh\b")
_SHELL = re.compile(r"^(?:\S*/)?(?:ba|da|z|k)?sh(?:\s+-\w+)*\s+-\w*c\s+")
_BEFORE_COMMAND = re.compile(r"^(?:(?:exec|nohup|time|then|else|do|\w+=\S*)\s+)+")
#: Commands that don't start sshd, and words of shells.
_WITHOUT_SSHD = re.compile(
    r"sleep|tail|cat|read|wait|trap|true|:|while|until|for|done|if|fi|\[|test|echo|printf|date|hostname|env|export|"
    r"cd|ls|mkdir|touch|chmod|chown|cp|mv|ln|rm|set|ulimit|nvidia-smi|ibstat|python[\d.]*|torchrun|mpirun|pause"
)
_ROOT_SSH = "/root/.ssh"
#: The options of an elastic horovodrun.
_MIN, _MAX = (rf"--?{bound}[-_](?:np|num[-_]proc)" for bound in ("min", "max"))
_COOLDOWN = "--blacklist-cooldown-range"


@rule("launcher-count", ERROR, MPIJOB)
def launcher_count(job: Job) -> Iterator[Finding]:
    """There is one Launcher."""
    launcher = job.replicas.get("Launcher")
    if job.replicas and "launcher" not in {role.lower() for role in job.replicas}:
        at = job.replica_specs["Launcher"]
        yield Finding(at, "the MPIJob has no Launcher", "nothing", "one replica", "add a Launcher")
    elif launcher and launcher.count != 1:
        replicas, found = launcher.at["replicas"], str(launcher.count)
        yield Finding(replicas, "an MPIJob must have one Launcher", found, "1", "set Launcher.replicas to 1")


@rule("worker-count", ERROR, MPIJOB)
def worker_count(job: Job) -> Iterator[Finding]:
    """There are Workers."""
    worker = job.replicas.get("Worker")
    if job.replicas and "worker" not in {role.lower() for role in job.replicas}:
        message = "the MPIJob has no Workers: the Launcher runs alone"
        yield Finding(job.replica_specs["Worker"], message, "nothing", "Worker", "add Workers", WARNING)
    elif worker and worker.count == 0:
        level = ERROR if job.operator.rejects_after_creation else WARNING
        found = str(worker.count) if worker.at["replicas"].present else "nothing, which means 0"
        message = "the MPIJob has no Workers"
        yield Finding(worker.at["replicas"], message, found, "at least 1", "set Worker.replicas", level)


@rule("mpi-processes", WARNING, MPIJOB)
def mpi_processes(job: Job) -> Iterator[Finding]:
    """mpirun and horovodrun start as many processes as there are slots."""
    worker, launcher = job.replicas.get("Worker"), job.replicas.get("Launcher")
    if not worker or not launcher or not worker.count:
        return
    per_pod = job.spec[MPIJOB.form.processes_field].number or 1
    as_host = job.spec["runLauncherAsWorker"].value or (_by_exec(job) and _has_gpu_limit(launcher))
    slots = per_pod * (worker.count + bool(as_host))
    low = max(launcher.numbers(_MIN), default=None, key=lambda number: number[0])
    high = max(launcher.numbers(_MAX), default=None, key=lambda number: number[0])
    if low and low[0] > slots:
        hint = "add Workers, or lower it"
        yield Finding(low[1], "fewer slots than --min-np", f"{slots} slots", f"at least {low[0]}", hint)
    for match in re.finditer(_MPIRUN, launcher.command_line) if low is None else ():
        if int(match[2]) > slots and "oversubscribe" not in launcher.command_line:
            at = launcher.word(match[1])
            hint = "lower it, or add Workers or slotsPerWorker"
            yield Finding(at, "mpirun refuses more processes than slots", match[2], f"at most {slots}", hint)
    if high and high[0] < slots:
        message = "more slots than --max-np: some stay unused"
        yield Finding(high[1], message, f"{slots} slots", f"at most {high[0]}", "raise it")


@rule("horovod-cooldown", WARNING, MPIJOB)
def horovod_cooldown(job: Job) -> Iterator[Finding]:
    """An elastic horovodrun uses Workers again that were removed.

    It blacklists the host of a rank that fails, as all ranks of a deleted pod do: `HostManager.blacklist`.
    """
    launcher = job.replicas.get("Launcher")
    if not launcher or "horovodrun" not in launcher.command_line or _COOLDOWN in launcher.command_line:
        return
    if bounds := launcher.numbers(f"{_MIN}|{_MAX}"):
        message = "Workers that are removed don't train again when the job grows: Horovod blacklists them for good"
        hint = "add it (Horovod 0.24 and newer), if the job is to shrink and grow"
        yield Finding(bounds[0][1], message, f"no {_COOLDOWN}", f"{_COOLDOWN} 5 30", hint)


@rule("horovod-secrets", WARNING, MPIJOB)
def horovod_secrets(job: Job) -> Iterator[Finding]:
    """No values of Secrets are printed: horovodrun passes the Launcher's variables in a command line.

    kubexec.sh of training-operator prints this line. The task's log masks variables with `secretKeyRef` in it, but the
    names of an `envFrom` are not known.
    """
    launcher = job.replicas.get("Launcher")
    if launcher and _by_exec(job) and "horovodrun" in launcher.command_line:
        for source in (s["secretRef"] for s in launcher.main["envFrom"] if s["secretRef"].present):
            message = "the log will contain the values of this Secret: horovodrun passes them in a command line"
            yield Finding(source, message, "envFrom", "secretKeyRef", "name each variable in env: it is then masked")


@rule("sshd", WARNING, MPIJOB)
def sshd(job: Job) -> Iterator[Finding]:
    """Under v2beta1, Workers run sshd, and their variables don't reach the ranks."""
    worker, launcher = job.replicas.get("Worker"), job.replicas.get("Launcher")
    if not worker or not launcher or _by_exec(job) or not re.search(_STARTS_RANKS, launcher.command_line):
        return
    if not _may_start_sshd(worker.command_line):
        message = "the Workers don't start sshd, so that mpirun can't reach them"
        at = worker.main["command"] if worker.main["command"].value else worker.main["args"]
        yield Finding(at, message, worker.command_line.strip(), "/usr/sbin/sshd -De", "remove the Workers' command")
    env, sources = worker.main["env"], worker.main["envFrom"]
    unset = [name for entry in env if (name := entry["name"].text) and not _reaches_ranks(name, launcher)]
    for field, found in ((env, ", ".join(unset)), (sources, "envFrom" if sources.value else "")):
        if found:
            message = "the ranks don't get these variables: sshd doesn't pass them to its sessions"
            hint = "pass them by mpirun -x NAME, or set them in the image"
            yield Finding(field, message, found, "variables of the Launcher", hint)


@rule("ssh-keys", WARNING, MPIJOB)
def ssh_keys(job: Job) -> Iterator[Finding]:
    """Under v2beta1, the user of each container can read the SSH keys: sshAuthMountPath is /root/.ssh by default."""
    path = job.spec["sshAuthMountPath"].text or _ROOT_SSH
    if _by_exec(job) or path != _ROOT_SSH:
        return
    for replica in job.replicas.values():
        users = [of["securityContext"]["runAsUser"] for of in (replica.main, replica.pod)]
        user = next((user for user in users if user.number is not None), None)
        if user is not None and user.number:
            message = f"user {user.number} can't read the SSH keys in {_ROOT_SSH}: mpirun doesn't reach the Workers"
            hint = "set sshAuthMountPath to .ssh in the home directory of this user, such as /home/mpiuser/.ssh"
            yield Finding(user, message, f"runAsUser {user.number}", "another sshAuthMountPath", hint)


def _may_start_sshd(command_line: str) -> bool:
    """Whether a command may start sshd. It doesn't if it only waits, or runs Python.

    A script, or any program that isn't known, may start it.
    """
    text = _SHELL.sub("", command_line.strip())
    if not text or re.search(_SSHD, text):
        return True
    commands = (_BEFORE_COMMAND.sub("", part.strip()) for part in re.split(r"[;|&\n]+", text))
    first = [command.split()[0].rpartition("/")[2] for command in commands if command.split()]
    return any(not re.fullmatch(_WITHOUT_SSHD, name) for name in first)


def _reaches_ranks(name: str, launcher: Replica) -> bool:
    """Whether mpirun's arguments pass a variable to the ranks, or it is for the container runtime."""
    return name.startswith("NVIDIA_") or re.search(rf"\b{re.escape(name)}\b", launcher.command_line) is not None


def _by_exec(job: Job) -> bool:
    """Whether mpirun reaches the Workers by kubectl exec, as training-operator's do."""
    return job.operator.version == "v1"


def _has_gpu_limit(launcher: Replica) -> bool:
    """Whether training-operator makes the launcher a host: for any limit whose name contains `gpu`."""
    return any("gpu" in name for c in launcher.containers for name, _ in c["resources"]["limits"].members())
