"""pods/exec over WebSocket: kubectl, the official client (v4), raw messages (v5); and errors of what isn't served."""

from __future__ import annotations

import json
import os
import pty
import secrets
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from kubernetes import client, config
from kubernetes.stream import stream

from components.raw_client import Client
from ktrain_embedded.cluster import EmbeddedCluster

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine")


@pytest.fixture(scope="module")
def core(cluster: EmbeddedCluster) -> client.CoreV1Api:
    return client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))


@pytest.fixture(scope="module")
def pod(core: client.CoreV1Api) -> Iterator[str]:
    """A running pod with a variable, a volume with a file, and two containers."""
    name = f"exec-{secrets.token_hex(3)}"
    script = "echo content > /data/file; touch /data/ready; while true; do sleep 0.1; done"
    container = {
        "name": "main", "image": "busybox", "command": ["sh", "-c", script], "env": [{"name": "MINE", "value": "here"}],
        "volumeMounts": [{"name": "v", "mountPath": "/data"}],
    }  # fmt: skip
    other = {"name": "other", "image": "busybox", "command": ["sleep", "600"]}
    spec = {
        "containers": [container, other],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 1,
    }
    core.create_namespaced_pod("default", {"metadata": {"name": name}, "spec": spec})
    wait_until_ready(core, name)
    assert run(core, name, "sh", "-c", "until [ -e /data/ready ]; do sleep 0.05; done") == ""
    yield name
    core.delete_namespaced_pod(name, "default", grace_period_seconds=0)


def wait_until_ready(core: client.CoreV1Api, name: str) -> None:
    from kubernetes import watch

    watching = watch.Watch().stream(
        core.list_namespaced_pod, "default", field_selector=f"metadata.name={name}", timeout_seconds=240
    )
    for event in watching:
        statuses = event["object"].status.container_statuses or ()
        if statuses and all(status.ready for status in statuses):
            return
    raise AssertionError(f"{name} is not ready")


def run(core: client.CoreV1Api, pod: str, *command: str, **how: Any) -> Any:
    """The output of a command, through the official client."""
    given = {"container": "main", "stdin": False, "stdout": True, "stderr": True, "tty": False, **how}
    return stream(core.connect_get_namespaced_pod_exec, pod, "default", command=list(command), **given)


@pytest.fixture
def kubectl(cluster: EmbeddedCluster) -> Any:
    def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "--kubeconfig", str(cluster.kubeconfig), *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)

    return run


@asynccontextmanager
async def connected(cluster: EmbeddedCluster, pod: str, **query: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A WebSocket of the newest protocol, v5."""
    tls = ssl.create_default_context(cafile=str(cluster.ca_file))
    headers = {"Authorization": f"Bearer {cluster.token}"}
    url = f"{cluster.url}/api/v1/namespaces/default/pods/{pod}/exec"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(url, params={"container": "main", **query}, ssl=tls, protocols=["v5.channel.k8s.io"]) as ws,
    ):
        yield ws


async def received(ws: aiohttp.ClientWebSocketResponse) -> dict[int, bytes]:
    """Everything that arrives, by channel."""
    data: dict[int, bytes] = {}
    async for message in ws:
        data[message.data[0]] = data.get(message.data[0], b"") + message.data[1:]
    return data


def test_a_command_has_the_environment_and_the_paths_of_its_container(core: client.CoreV1Api, pod: str) -> None:
    assert run(core, pod, "sh", "-c", "echo $MINE; cat /data/file") == "here\ncontent\n"
    assert run(core, pod, "cat", "/data/file") == "content\n"
    assert run(core, pod, "sh", "-c", "echo $MINE", container="other") == "\n"


def test_the_official_client_sees_the_exit_code_and_both_streams(core: client.CoreV1Api, pod: str) -> None:
    ended = run(core, pod, "sh", "-c", "echo out; echo err >&2; exit 3", _preload_content=False)
    ended.run_forever(timeout=120)
    assert (ended.read_stdout(), ended.read_stderr(), ended.returncode) == ("out\n", "err\n", 3)


async def test_standard_input_ends_when_the_client_closes_it(cluster: EmbeddedCluster, pod: str) -> None:
    async with connected(cluster, pod, command="cat", stdin="true", stdout="true") as ws:
        text = os.urandom(200_000)
        await ws.send_bytes(bytes([STDIN]) + text)
        await ws.send_bytes(bytes([CLOSE, STDIN]))
        data = await received(ws)
    assert data[STDOUT] == text
    assert json.loads(data[ERROR]) == {"metadata": {}, "status": "Success"}


async def test_a_terminal_has_a_size_and_echoes(cluster: EmbeddedCluster, pod: str) -> None:
    script = "read line; stty size; tty >/dev/null && echo $TERM"
    query = {"stdin": "true", "stdout": "true", "tty": "true"}
    async with connected(cluster, pod, command=["sh", "-c", script], **query) as ws:
        await ws.send_bytes(bytes([RESIZE]) + json.dumps({"Width": 91, "Height": 17}).encode())
        await ws.send_bytes(bytes([STDIN]) + b"typed\r")
        data = await received(ws)
    assert data[STDOUT].split() == [b"typed", b"17", b"91", b"xterm"]


async def test_a_command_ends_with_its_client(cluster: EmbeddedCluster, core: client.CoreV1Api, pod: str) -> None:
    mark = secrets.token_hex(4)
    async with connected(cluster, pod, command=["sh", "-c", f"echo up; sleep 600; echo {mark}"], stdout="true") as ws:
        while (await ws.receive_bytes())[1:] != b"up\n":
            pass
    gone = f"while ps -A -o args= | grep -v grep | grep -q 'sleep 600; echo {mark}'; do sleep 0.05; done"
    run(core, pod, "timeout", "60", "sh", "-c", gone.replace(mark, f"{mark[:4]}''{mark[4:]}"))


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("POD/exec?command=true&stdout=true", 400, "a container name must be specified for pod POD, choose one of"),
        ("POD/exec?container=x&command=true&stdout=true", 400, "container x is not valid for pod POD"),
        ("POD/exec?container=main&stdout=true", 400, "you must specify at least 1 command for the container"),
        ("POD/exec?container=main&command=true", 400, "you must specify at least 1 of stdin, stdout, stderr"),
        ("POD/exec?container=main&command=true&stdout=true", 400, "use kubectl 1.31 or newer"),
        ("POD/exec?container=main&command=tar&command=cf&command=-&command=/data&stdout=1", 400, "kubectl cp is not"),
        ("absent/exec?command=true&stdout=true", 404, 'pods "absent" not found'),
        ("POD/attach", 400, "kubectl attach is not supported by the embedded cluster: use `kubectl logs -f`"),
        ("POD/portforward", 400, "kubectl port-forward is not supported by the embedded cluster"),
    ],
)
def test_errors_come_before_the_upgrade(
    cluster: EmbeddedCluster, pod: str, path: str, status: int, message: str
) -> None:
    for method in ("GET", "POST"):
        answer = Client(cluster)(method, f"/api/v1/namespaces/default/pods/{path.replace('POD', pod)}")
        assert answer.status == status
        assert message.replace("POD", pod) in answer.json["message"]


@needs_kubectl
def test_kubectl_exec(kubectl: Any, pod: str) -> None:
    done = kubectl("exec", pod, "-c", "main", "--", "sh", "-c", "cat /data/file; echo bad >&2; exit 7")
    assert (done.stdout, done.returncode) == ("content\n", 7)
    assert done.stderr == "bad\ncommand terminated with exit code 7\n"
    assert kubectl("exec", "-i", pod, "-c", "main", "--", "cat", stdin="through a pipe\n").stdout == "through a pipe\n"
    absent = kubectl("exec", pod, "-c", "main", "--", "no-such-program")
    assert "the command 'no-such-program' can't be executed: [Errno 2] No such file" in absent.stderr


@needs_kubectl
def test_kubectl_exec_with_a_terminal(cluster: EmbeddedCluster, pod: str) -> None:
    ours, theirs = pty.openpty()
    command = ["kubectl", "--kubeconfig", str(cluster.kubeconfig), "exec", "-it", pod, "-c", "main", "--", "sh"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as shell:
        os.close(theirs)
        os.write(ours, b"echo $((6 * 7)); exit 5\n")
        output = b""
        try:
            while data := os.read(ours, 4096):
                output += data
        except OSError:  # Linux reports the end of a pseudo-terminal as an I/O error
            pass
        os.close(ours)
    assert b"42" in output
    assert shell.returncode == 5


@needs_kubectl
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["attach", "POD", "-c", "main"], "kubectl attach is not supported by the embedded cluster"),
        (["port-forward", "POD", "18080:80"], "kubectl port-forward is not supported by the embedded cluster"),
        (["cp", "POD:/data/file", "DIR/file", "-c", "main"], "kubectl cp is not supported by the embedded cluster"),
        (["cp", "/etc/hostname", "POD:/data/x", "-c", "main"], "kubectl cp is not supported by the embedded cluster"),
        (["top", "pods"], "Metrics API not available"),
        (["explain", "pods"], "doesn't describe the fields of built-in types"),
    ],
)
def test_unsupported_requests_have_a_clear_error(
    kubectl: Any, pod: str, tmp_path: Any, args: list[str], message: str
) -> None:
    done = kubectl(*(arg.replace("POD", pod).replace("DIR", str(tmp_path)) for arg in args))
    assert message in " ".join((done.stdout + done.stderr).split())
