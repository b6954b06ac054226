"""Text that a database rejects doesn't end a triggerer, and a result that it changes doesn't fail a training.

SQLite stores both; PostgreSQL doesn't (KTRAIN_TEST_DATABASE=postgresql).
"""

from __future__ import annotations

import http.server
import json
import pathlib
import re
import threading
from collections.abc import Iterator

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.chaos import airflow, begin, check_end, cluster
from tests.e2e.scenario import Begin

__all__ = ["airflow", "begin", "cluster"]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
PAGE = b"\x1f\x8b\x08\0\0\0\xed\xa0\x80"  # the beginning of a proxy's compressed response
DISCOVERY = {
    "/apis/kubeflow.org": {
        "kind": "APIGroup", "apiVersion": "v1", "name": "kubeflow.org",
        "versions": [{"groupVersion": "kubeflow.org/v1", "version": "v1"}],
    },
    "/apis/kubeflow.org/v1": {
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "kubeflow.org/v1",
        "resources": [{"name": "pytorchjobs", "kind": "PyTorchJob", "namespaced": True}],
    },
}  # fmt: skip
ABSENT = {
    "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
    "message": 'pytorchjobs.kubeflow.org "absent" not found',
    "details": {"name": "absent", "group": "kubeflow.org", "kind": "pytorchjobs"},
}  # fmt: skip


class Proxy(http.server.BaseHTTPRequestHandler):
    """Discovery works, the job doesn't exist, and all other requests are rejected with a binary page."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, body = 403, PAGE
        if path in DISCOVERY:
            status, body = 200, json.dumps(DISCOVERY[path]).encode()
        elif path.endswith("/pytorchjobs/absent"):
            status, body = 404, json.dumps(ABSENT).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def proxied(airflow: Airflow, tmp_path: pathlib.Path) -> Iterator[None]:
    """An Airflow connection `proxied` to such an API server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    kubeconfig = {
        "clusters": [{"name": "proxied", "cluster": {"server": url}}],
        "contexts": [{"name": "proxied", "context": {"cluster": "proxied", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {"token": "none"}}],
        "current-context": "proxied",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    extra = json.dumps({"kube_config_path": str(path)})
    connection = {"connection_id": "proxied", "conn_type": "kubernetes", "extra": extra}
    airflow.call("POST", "/api/v2/connections", connection)
    yield
    airflow.call("DELETE", "/api/v2/connections/proxied")
    server.shutdown()


def test_triggerer_survives_a_binary_error_page(proxied: None, airflow: Airflow, begin: Begin) -> None:
    run = airflow.trigger("chaos_error_page")

    def log() -> str:
        return airflow.log("chaos_error_page", run, "train")

    wait_for("the trigger has the page", lambda: re.search(r"Trying again\.[^\0]*?\b403\b[^\0]*?\ufffd", log()))
    airflow.set_state("chaos_error_page", run, "train", "failed")
    stage = begin("chaos_deferred", seconds=8)
    check_end(stage, "success")
    assert all(airflow.processes[name].poll() is None for name in airflow.triggerers)


def test_result_is_stored_with_values_that_the_database_accepts(airflow: Airflow) -> None:
    """PostgreSQL returned it as an integer that no process of Airflow could read."""
    run = airflow.trigger("chaos_result")
    airflow.wait_state("chaos_result", run, "report", "success")
    stored = {"loss": "1e+20", "diverged": "nan", "note": "a\ufffdb\ufffd", "accuracy": 0.97}
    assert airflow.xcom("chaos_result", run, "train") == stored
    assert airflow.xcom("chaos_result", run, "report") == ["1e+20", "nan", 0.97]
    log = airflow.log("chaos_result", run, "train")
    for key in ("loss is stored as text", "diverged is stored as text", "note is changed"):
        assert key in log
