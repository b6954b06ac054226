"""The tests' client of Airflow's API, against a server that answers like Airflow on a locked SQLite database."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow

LOCKED = 500, {"detail": {"reason": "Database error", "message": "Serious error when handling your request."}}
LOCKED_BELOW_3_3 = 500, "Internal Server Error"
EXISTS = 409, {"detail": {"reason": "Unique constraint violation"}}
DONE = 200, {"name": "four_gpus"}
Answer = tuple[int, object]
Serve = Callable[..., Airflow]


@pytest.fixture
def serve(tmp_path: pathlib.Path) -> Iterator[Serve]:
    """A function that starts a server with these answers; returns its client."""
    servers: list[ThreadingHTTPServer] = []

    def start(*answers: Answer, sql: str = "") -> Airflow:
        rest = iter(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"access_token": "x"})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(*next(rest))

            def answer(self, code: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        airflow = Airflow(tmp_path, TestCluster(tmp_path / "kubeconfig", "default"), tmp_path, sql)
        server = ThreadingHTTPServer(("127.0.0.1", airflow.port), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return airflow

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("locked", [LOCKED, LOCKED_BELOW_3_3], ids=["3.3", "below 3.3"])
def test_request_is_repeated_while_sqlite_is_locked(serve: Serve, locked: Answer) -> None:
    assert serve(locked, locked, DONE).call("POST", "/api/v2/pools", {}) == DONE[1]


def test_repeated_request_that_finds_its_own_change_succeeds(serve: Serve) -> None:
    assert serve(LOCKED, EXISTS).call("POST", "/api/v2/pools", {}) is None


def test_first_conflict_is_an_error(serve: Serve) -> None:
    with pytest.raises(AssertionError, match="POST /api/v2/pools: 409"):
        serve(EXISTS).call("POST", "/api/v2/pools", {})


def test_database_error_of_postgresql_is_an_error(serve: Serve) -> None:
    with pytest.raises(AssertionError, match="POST /api/v2/pools: 500"):
        serve(LOCKED, DONE, sql="postgresql://127.0.0.1/airflow").call("POST", "/api/v2/pools", {})
