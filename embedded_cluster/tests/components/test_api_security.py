"""The embedded cluster runs any program that it gets: tests of each refusal that keeps others out."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from components.raw_client import Client, eventually
from ktrain_embedded.cluster import ClusterError, Config, EmbeddedCluster, running, start

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def api(cluster: EmbeddedCluster) -> Client:
    return Client(cluster)


def listeners(pid: int) -> list[str]:
    """Addresses, in hexadecimal, on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(link) if link.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def test_server_listens_on_loopback_only(cluster: EmbeddedCluster) -> None:
    assert listeners(cluster.pid) == ["0100007F"]


def test_server_accepts_tls_only(cluster: EmbeddedCluster) -> None:
    host, port = urlsplit(cluster.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=120) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            answer = plain.recv(100)
        except ConnectionError:
            answer = b""
    assert not answer.startswith(b"HTTP")


def test_certificate_is_signed_by_its_own_ca(cluster: EmbeddedCluster) -> None:
    host, port = urlsplit(cluster.url).netloc.split(":")
    for name in ("127.0.0.1", "localhost"):
        context = ssl.create_default_context(cafile=str(cluster.ca_file))
        with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw, server_hostname=name) as tls:
            assert tls.version() in ("TLSv1.2", "TLSv1.3")
    unknowing = ssl.create_default_context()
    with socket.create_connection((host, int(port))) as raw, pytest.raises(ssl.SSLCertVerificationError):
        unknowing.wrap_socket(raw, server_hostname="localhost")


def test_token_file_is_readable_by_its_owner_only(cluster: EmbeddedCluster) -> None:
    for path in (cluster.kubeconfig, cluster.state_dir / "cluster.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.state_dir.stat().st_mode) == 0o700
    readable = [p for p in cluster.state_dir.iterdir() if p.is_file() and p.stat().st_mode & 0o077]
    assert all(cluster.token.encode() not in p.read_bytes() for p in readable)
    assert not any(b"PRIVATE KEY" in p.read_bytes() for p in cluster.state_dir.iterdir() if p.is_file())


def test_token_is_not_on_a_command_line(cluster: EmbeddedCluster) -> None:
    assert cluster.token.encode() not in Path(f"/proc/{cluster.pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    "host", ["example.com", "example.com:443", "127.0.0.1", "localhost:1", "127.0.0.1.nip.io:80", ""]
)
def test_foreign_host_is_refused(api: Client, host: str) -> None:
    answer = api("GET", PODS, headers={"Host": host})
    assert (answer.status, answer.body["reason"]) == (403, "Forbidden")
    assert "Host" in answer.body["message"]


@pytest.mark.parametrize("origin", ["https://example.com", "null", "https://127.0.0.1", ""])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_foreign_origin_is_refused(api: Client, method: str, origin: str) -> None:
    answer = api(method, PODS, headers={"Origin": origin})
    assert answer.status == 403
    assert "Origin" in answer.body["message"]
    assert not answer.header("Access-Control-Allow-Origin")


@pytest.mark.parametrize(("token", "status"), [("", 403), ("nonsense", 401), ("Ä", 401)])
@pytest.mark.parametrize("path", [PODS, "/ktrain/faults"])
def test_missing_and_wrong_tokens_are_refused(cluster: EmbeddedCluster, token: str, status: int, path: str) -> None:
    method, body = ("POST", {"fault": "expire"}) if path == "/ktrain/faults" else ("GET", None)
    headers = {"Authorization": f"Bearer {token}".encode().decode("latin-1")} if token else {}
    assert Client(cluster, "")(method, path, body, headers).status == status


def test_fault_switches_need_the_admin_token(cluster: EmbeddedCluster) -> None:
    admin, path = Client(cluster), "/api/v1/namespaces/default/serviceaccounts"
    admin("POST", path, {"metadata": {"name": "curious"}})
    token = admin("POST", f"{path}/curious/token", {"spec": {}}).json["status"]["token"]
    answer = Client(cluster, token)("POST", "/ktrain/faults", {"fault": "expire"})
    assert answer.status == 403
    assert 'cannot create path "/ktrain/faults"' in answer.body["message"]


def test_token_is_invalid_after_its_account_is_deleted(cluster: EmbeddedCluster) -> None:
    admin, path = Client(cluster), "/api/v1/namespaces/default/serviceaccounts"
    admin("POST", path, {"metadata": {"name": "brief"}})
    token = admin("POST", f"{path}/brief/token", {"spec": {"expirationSeconds": 600}}).json["status"]["token"]
    assert Client(cluster, token)("GET", "/version").status == 200
    admin("DELETE", f"{path}/brief")
    assert Client(cluster, token)("GET", "/version").status == 401
    admin("POST", path, {"metadata": {"name": "brief"}})
    assert Client(cluster, token)("GET", "/version").status == 401


PARENT = """
import sys
from ktrain_embedded.cluster import EmbeddedCluster
with EmbeddedCluster() as c:
    print(c.pid, c.state_dir, flush=True)
    sys.stdin.read()
"""


def test_server_ends_with_its_parent_process() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().decode().split()
        assert running(Path(directory)) is not None
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: running(Path(directory)) is None)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    shutil.rmtree(directory)  # as nobody else does after a SIGKILL


def test_state_directory_has_one_cluster(cluster: EmbeddedCluster) -> None:
    with pytest.raises(ClusterError, match="a cluster is already running"):
        start(Config(str(cluster.state_dir)))
