"""Names and commands between pods: what resolves in the cluster, and the tools by which a pod uses it.

Ranks of an MPIJob start below the shim of their Worker: the launcher's `ssh` or `kubectl exec` is a small program that
asks the kubelet, over a socket in its root, where that shim listens, and hands it its own descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_ktrain.local.node import agent, shim
from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.store import Obj, Store

AGENT = Path(agent.__file__)
PYTHON = Path(sys.executable)
#: file name -> tool of the agent; kubectl is no tool for everyone: the launcher's init container delivers it
TOOLS = {"kubectl-exec": "kubectl", **{t: t for t in ("nslookup", "ssh", "deliver-kubectl")}}
if PYTHON.with_name("mpirun").exists():
    TOOLS |= {"mpirun": "mpirun", "mpiexec": "mpirun"}
REPLACED = {"/usr/sbin/sshd": "sshd"}  # commands of operators that are tools here
#: parameters of Open MPI 4 that the operators set, and what Open MPI 5 calls them
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
    # it waits: its work is done by the shim
    "sshd": """#!/bin/sh
trap 'echo "Received signal 15; terminating." >&2; exit 0' TERM INT
printf 'Server listening on 0.0.0.0 port 22.\\nServer listening on :: port 22.\\n' >&2
sleep infinity & wait
""",
}


def resolve(store: Store, namespace: str, host: str) -> Obj | None:
    """The pod that a name leads to, as the cluster's DNS: a Service's ready pod, or `<hostname>.<subdomain>`."""
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
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    live = status.get("phase") == "Running" and "podIP" in status
    return live and (ready or bool(service["spec"].get("publishNotReadyAddresses")))


def find(store: Store, root: Path, namespace: str, name: str, how: str, container: str) -> dict[str, str]:
    """A pod's ip, phase, and the directory where its shim listens if it runs; {} where there is none."""
    pod = resolve(store, namespace, name) if how == "dns" else store.find(r.POD, namespace, name)
    if pod is None:
        return {}
    where = root / "pods" / pod["metadata"]["uid"] / (container or pod["spec"]["containers"][0]["name"])
    status = pod.get("status", {})
    runs = status.get("phase") == "Running" and (where / shim.EXEC_SOCKET).exists()
    return {"ip": status.get("podIP", ""), "phase": status.get("phase", ""), "directory": str(where) if runs else ""}


async def serve(store: Store, root: Path, name: str) -> None:
    """Answer the tools' questions, on a socket in `root` that only this user can reach. Until cancelled."""

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
    with contextlib.chdir(path.parent):  # a path of any length, where an address has a hundred bytes
        listening.bind(path.name)
    path.chmod(0o600)
    return listening


def install(directory: Path, root: Path, name: str, namespace: str) -> None:
    """Write the tools that a pod has first in its PATH: scripts that start the agent with what it needs to know."""
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
    """The environment of a launcher with what Open MPI 5 needs here; `scratch` is for its session's files.

    The operators speak to Open MPI 4, whose runtime's parameters have other names now. And collective operations that
    first look who shares a host must not: all hosts are this machine, though each has a daemon of its own. Nor may
    ranks talk through /dev/shm: the first ranks of two Workers would give their files there one name.
    """
    if not env.keys() & OPEN_MPI.keys():
        return dict(env)
    here = {"OMPI_MCA_coll": "^han", "OMPI_MCA_btl": "^sm", "PRTE_MCA_prte_tmpdir_base": str(scratch)}
    return {**here, **{new: env[old] for old, new in OPEN_MPI.items() if env.get(old)}, **env}
