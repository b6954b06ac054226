"""Names and commands between pods: what resolves in the cluster, and the tools by which a pod uses it.

Ranks of an MPIJob start below the shim of their Worker: the launcher's `ssh` or `kubectl exec` is a small program that
asks the kubelet, over a socket in its root, where that shim listens, and hands it its own descriptors.
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
from typing import Any

from airflow_provider_ktrain.local import agent, shim
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.store import Obj, Store

AGENT = Path(agent.__file__)
#: file name -> tool of the agent; kubectl is no tool for everyone: the launcher's init container delivers it
TOOLS = {"kubectl-exec": "kubectl", **{t: t for t in ("nslookup", "ssh", "sshd", "deliver-kubectl")}}
REPLACED = {"/usr/sbin/sshd": "sshd"}  # commands of operators that are tools here
#: parameters of Open MPI 4 that the operators set, and what Open MPI 5 calls them
OPEN_MPI = {
    "OMPI_MCA_plm_rsh_agent": "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_rsh_args": "PRTE_MCA_plm_ssh_args",
    "OMPI_MCA_orte_default_hostfile": "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "PRTE_MCA_prte_keep_fqdn_hostnames",
}
MPIRUN = Path(sys.executable).with_name("mpirun")
PROC = Path("/proc/self/fd").is_dir()  # by it a path of any length can be bound; an address has a hundred bytes
HOSTNAME = """#!/bin/sh
case "$1" in '') echo "$HOSTNAME";; -i|-I) echo 127.0.0.1;; *) exec env PATH="${PATH#*:}" hostname "$@";; esac
"""


def ready(pod: Obj) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def resolve(store: Store, namespace: str, host: str) -> Obj | None:
    """The pod that a name leads to, as the cluster's DNS: a Service's ready pod, or `<hostname>.<subdomain>`."""
    first, *rest = host.rstrip(".").split(".")
    domain = [part for part in rest if part not in ("svc", "cluster", "local")]
    service = store.find(r.SERVICE, domain[0] if domain else namespace, first)
    if service and len(domain) < 2:
        for pod in store.list(r.POD, service["metadata"].get("namespace"), service["spec"].get("selector") or {"": ""}):
            if _published(pod, service):
                return pod
    inside = domain[1] if len(domain) > 1 else namespace
    for pod in store.list(r.POD, inside):
        subdomain = pod["spec"].get("subdomain")
        if pod["spec"].get("hostname") == first and subdomain and subdomain == (domain[0] if domain else subdomain):
            service = store.find(r.SERVICE, inside, subdomain)
            if service and _published(pod, service):
                return pod
    return None


def _published(pod: Obj, service: Obj) -> bool:
    live = pod.get("status", {}).get("phase") == "Running" and pod["status"].get("podIP")
    return bool(live and (ready(pod) or service["spec"].get("publishNotReadyAddresses")))


class Resolver:
    """Answers the tools' questions, on a socket in `root` that only this user can reach."""

    def __init__(self, store: Store, root: Path, name: str) -> None:
        self._store = store
        self._root = root
        self.name = f"{name}.sock"

    async def run(self) -> None:
        """Until cancelled."""
        self._root.mkdir(parents=True, exist_ok=True)
        directory = os.open(self._root, os.O_RDONLY)
        path = self._root / self.name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"/proc/self/fd/{directory}/{self.name}" if PROC else str(path))
        path.chmod(0o600)
        server = await asyncio.start_unix_server(self._answer, sock=listening)
        try:
            await server.serve_forever()
        finally:
            server.close()
            os.close(directory)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ValueError, KeyError, OSError):
            question = json.loads(await reader.readline())
            writer.write(json.dumps(self.find(**question)).encode() + b"\n")
            await writer.drain()
        writer.close()

    def find(self, namespace: str, name: str, how: str, container: str | None = None) -> dict[str, Any]:
        """The pod's ip, phase, and the directory where its shim listens if it runs; {} where there is none."""
        found = resolve(self._store, namespace, name) if how == "dns" else self._store.find(r.POD, namespace, name)
        if found is None:
            return {}
        where = self._root / "pods" / found["metadata"]["uid"] / (container or found["spec"]["containers"][0]["name"])
        status = found.get("status", {})
        runs = status.get("phase") == "Running" and (where / shim.EXEC_SOCKET).exists()
        return {
            "ip": status.get("podIP", ""), "phase": status.get("phase", "Pending"),
            "directory": str(where) if runs else "",
        }  # fmt: skip


class Tools:
    """The directory of tools that each pod has first in its PATH."""

    def __init__(self, root: Path, address: str) -> None:
        self._root = root
        self._address = address

    def install(self, pod: Obj, directory: Path) -> None:
        """Write the tools of a pod: scripts that start the agent with what it needs to know."""
        directory.mkdir(parents=True, exist_ok=True)
        tools = {**TOOLS, "mpirun": "mpirun", "mpiexec": "mpirun"} if MPIRUN.exists() else TOOLS
        for name, tool in tools.items():
            words = [sys.executable, "-I", "-S", AGENT, tool, self._root, self._address, pod["metadata"]["namespace"]]
            script = f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n'
            _executable(directory / name, script)
        _executable(directory / "hostname", HOSTNAME)
        for name in ("python", "python3"):
            if not Path(sys.executable).with_name(name).exists():
                _executable(directory / name, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')

    @staticmethod
    def replaces(directory: Path, argv0: str) -> str:
        """The command itself, or the tool that stands for it on this machine."""
        return str(directory / REPLACED[argv0]) if argv0 in REPLACED else argv0

    @staticmethod
    def environment(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
        """The environment of a launcher with what Open MPI 5 needs here; `scratch` is for its session's files.

        The operators speak to Open MPI 4, whose runtime's parameters have other names now. And collective operations
        that first look who shares a host must not: all hosts are this machine, though each has a daemon of its own. Nor
        may ranks talk through /dev/shm: the first ranks of two Workers would give their files there one name.
        """
        if not any(name in env for name in OPEN_MPI):
            return dict(env)
        renamed = {new: env[old] for old, new in OPEN_MPI.items() if env.get(old)}
        return {
            "OMPI_MCA_coll": "^han",
            "OMPI_MCA_btl": "^sm",
            "PRTE_MCA_prte_tmpdir_base": str(scratch),
            **renamed,
            **env,
        }


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
