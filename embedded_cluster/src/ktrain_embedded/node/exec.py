"""Name resolution and remote commands between pods, and the tools that are installed in pods.

The ranks of an MPIJob are children of their Worker's shim. The launcher's `ssh` or `kubectl exec` is a small program.
It asks the kubelet, over a socket in the kubelet's root, where the shim listens, and passes its file descriptors to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from ktrain_embedded.node import agent, shim
from ktrain_embedded.objects import disruptions
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store

AGENT = Path(agent.__file__)
PYTHON = Path(sys.executable)
#: File name -> tool of the agent. kubectl isn't in the PATH by its name: the launcher's init container delivers it.
TOOLS = {"kubectl-exec": "kubectl", **{t: t for t in ("nslookup", "ssh", "deliver-kubectl")}}
if PYTHON.with_name("mpirun").exists():
    TOOLS |= {"mpirun": "mpirun", "mpiexec": "mpirun"}
REPLACED = {"/usr/sbin/sshd": "sshd", "/etc/init.d/ssh": "sshd"}  # programs of images, and the tools that replace them
#: Parameters of Open MPI 4 that the operators set, and their names in Open MPI 5.
OPEN_MPI = {
    "OMPI_MCA_plm_rsh_agent": "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_rsh_args": "PRTE_MCA_plm_ssh_args",
    "OMPI_MCA_orte_default_hostfile": "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "PRTE_MCA_prte_keep_fqdn_hostnames",
}
SCRIPTS = {
    "hostname": """#!/bin/sh
case "$1" in '') echo "$HOSTNAME";; -i|-I) echo 127.0.0.1;; *) exec env PATH="${PATH#*:}" hostname "$@";; esac
""",
    # this only waits: the shim executes the commands while a process with the id in sshd.pid exists
    "sshd": """#!/bin/sh
listen() {
    trap 'rm -f "$file"; echo "Received signal 15; terminating." >&2; exit 0' TERM INT
    printf 'Server listening on 0.0.0.0 port 22.\\nServer listening on :: port 22.\\n' >&2
    sleep infinity & wait
}
file="${0%/*}/sshd.pid"
for word; do
    case "$word" in -[!-]*D*|-D*) foreground=1 ;; -t|-T) exit 0 ;; esac
done
[ -z "$foreground" ] || { echo $$ > "$file"; listen; }
listen < /dev/null > /dev/null 2>&1 & echo $! > "$file"
""",
    "service": """#!/bin/sh
case "$1 $2" in ssh\\ *start|sshd\\ *start) exec "${0%/*}/sshd" ;; *) PATH="${PATH#*:}" exec service "$@" ;; esac
""",
}


def resolve(store: Store, namespace: str, host: str) -> Obj | None:
    """Resolve a name to a pod, as the cluster's DNS does: a ready pod of a Service, or `<hostname>.<subdomain>`."""
    first, *rest = host.rstrip(".").split(".")
    domain = [part for part in rest if part not in ("svc", "cluster", "local")]
    found: list[tuple[Obj | None, Obj]] = []
    if len(domain) < 2:
        inside = domain[0] if domain else namespace
        if service := store.find(r.SERVICE, inside, first):
            selector = service["spec"].get("selector") or {"": ""}
            found += [(service, pod) for pod in store.list(r.POD, inside, selector)]
    inside = domain[1] if len(domain) > 1 else namespace
    for pod in store.list(r.POD, inside):
        subdomain = pod["spec"].get("subdomain")
        if subdomain and pod["spec"].get("hostname") == first and domain[:1] in ([], [subdomain]):
            found.append((store.find(r.SERVICE, inside, subdomain), pod))
    return next((pod for service, pod in found if service and _published(pod, service)), None)


def _published(pod: Obj, service: Obj) -> bool:
    status = pod.get("status", {})
    live = status.get("phase") == "Running" and "podIP" in status
    return live and (disruptions.is_ready(pod) or bool(service["spec"].get("publishNotReadyAddresses")))


def find(store: Store, root: Path, namespace: str, name: str, how: str, container: str) -> dict[str, object]:
    """Return a pod's ip, phase, whether its sshd listens and, if it runs, the directory of its shim's socket.

    {} if the pod doesn't exist.
    """
    pod = resolve(store, namespace, name) if how == "dns" else store.find(r.POD, namespace, name)
    if pod is None:
        return {}
    pod_directory = root / "pods" / pod["metadata"]["uid"]
    where = pod_directory / (container or pod["spec"]["containers"][0]["name"])
    status = pod.get("status", {})
    runs = status.get("phase") == "Running" and (where / shim.EXEC_SOCKET).exists()
    return {
        "ip": status.get("podIP", ""), "phase": status.get("phase", ""), "directory": str(where) if runs else "",
        "sshd": runs and _exists(pod_directory / "bin" / "sshd.pid"),
    }  # fmt: skip


def _exists(pid_file: Path) -> bool:
    """Whether the process exists whose id a file contains."""
    try:
        os.kill(int(pid_file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


async def serve(store: Store, root: Path, name: str) -> None:
    """Respond to the requests of tools on a socket in `root`, until cancelled. Only this user can access the socket."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ValueError, TypeError, OSError):
            question = json.loads(await reader.readline())
            writer.write(json.dumps(find(store, root, **question)).encode() + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=_bound(root / f"{name}.sock"))
    await server.serve_forever()


def _bound(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(path.parent):  # a socket address is limited to about 100 bytes; the path can be longer
        listening.bind(path.name)
    path.chmod(0o600)
    return listening


def install(directory: Path, root: Path, name: str, namespace: str) -> None:
    """Write the tools, which come first in a pod's PATH: scripts that start the agent with its arguments."""
    directory.mkdir(parents=True, exist_ok=True)
    scripts = dict(SCRIPTS)
    for tool, of_agent in TOOLS.items():
        words = [PYTHON, "-I", "-S", AGENT, of_agent, root, f"{name}.sock", namespace]
        scripts[tool] = f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n'
    for python in ("python", "python3"):
        if not PYTHON.with_name(python).exists():
            scripts[python] = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    for tool, script in scripts.items():
        (directory / tool).write_text(script)
        (directory / tool).chmod(0o755)


def open_mpi(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Add the variables to a launcher's environment that Open MPI 5 needs on this machine.

    The operators set parameters of Open MPI 4, which have other names in Open MPI 5. Collective operations must not
    detect shared hosts (`^han`), because all hosts are this machine, but each has its own daemon. Ranks must not
    communicate through /dev/shm (`^sm`), because the first ranks of two Workers would use the same file name.

    :param scratch: directory for the files of Open MPI's session.
    """
    if not env.keys() & OPEN_MPI.keys():
        return dict(env)
    here = {"OMPI_MCA_coll": "^han", "OMPI_MCA_btl": "^sm", "PRTE_MCA_prte_tmpdir_base": str(scratch)}
    return {**here, **{new: env[old] for old, new in OPEN_MPI.items() if env.get(old)}, **env}
