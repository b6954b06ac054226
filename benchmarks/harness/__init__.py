"""Shared by the benchmarks: contenders in separate processes, and the resource usage of a process."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp

from ktrain_embedded import EmbeddedCluster

Json = dict[str, Any]
TICK = os.sysconf("SC_CLK_TCK")


def cpu(pid: int | str = "self") -> float:
    """CPU seconds used by a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def waited(pid: int) -> float:
    """Seconds in which the main thread of a process was ready to run, and had no CPU."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found, queue = [pid], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def memory(pid: int | str = "self", key: str = "VmRSS") -> float:
    """MiB of a process that are in memory (VmRSS), or its maximum so far (VmHWM)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return round(int(status[key].split()[0]) / 1024, 1)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank quantile. None if there are no values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))] if ranked else None


def machine() -> str:
    """One line that describes the machine and the versions of a measurement."""
    names = ("apache-airflow", "apache-airflow-providers-cncf-kubernetes", "kubernetes_asyncio", "aiohttp")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{os.cpu_count()} CPUs, Python {platform.python_version()}, {versions}"


def session(cluster: Mapping[str, str], **options: Any) -> aiohttp.ClientSession:
    """A session with the cluster's credentials; `cluster` is the result of `credentials`."""
    tls = ssl.create_default_context(cafile=cluster["ca_file"])
    return aiohttp.ClientSession(
        cluster["url"],
        connector=aiohttp.TCPConnector(ssl=tls, limit=0),
        headers={"Authorization": f"Bearer {cluster['token']}"},
        timeout=aiohttp.ClientTimeout(total=None),
        **options,
    )


def credentials(cluster: EmbeddedCluster) -> dict[str, str]:
    """The credentials that a contender needs to reach the cluster."""
    return {
        "url": cluster.url,
        "token": cluster.token,
        "ca_file": str(cluster.ca_file),
        "kubeconfig": str(cluster.kubeconfig),
    }


class Contender:
    """The same script in a separate process, which reads lines of JSON and answers each with one line."""

    def __init__(self, script: str, parameters: Json, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, "--contender", json.dumps(parameters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> Json:
        """The next line that the process writes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the contender has ended: {self._process.wait()}")
        answer: Json = json.loads(line)
        return answer

    def ask(self, **command: Any) -> Json:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def answers() -> Callable[[Json], None]:
    """In a contender: a function that sends an answer to the stage. All other output of the process goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)

    def answer(parameters: Json) -> None:
        os.write(out, json.dumps(parameters).encode() + b"\n")

    return answer


@contextlib.contextmanager
def contender(
    script: str, parameters: Json, cluster: Mapping[str, str], *, log_level: str = "WARNING"
) -> Iterator[Contender]:
    """A contender that reaches the cluster by Airflow's connection `kubernetes_default`, ready for requests."""
    extra = {"kube_config_path": cluster["kubeconfig"]}
    connection = json.dumps({"conn_type": "kubernetes", "extra": extra})
    env = {"AIRFLOW_CONN_KUBERNETES_DEFAULT": connection, "AIRFLOW__LOGGING__LOGGING_LEVEL": log_level}
    process = Contender(script, {**parameters, "cluster": dict(cluster)}, env)
    try:
        process.read()
        yield process
    finally:
        process.end()


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    lines = [head, ["---"] * len(head), *([cell(v) for v in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
