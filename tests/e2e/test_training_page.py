"""The rights to the training page and its data, by HTTP. tests/browser has the tests in a real browser."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.database import free_port
from tests.e2e.kube import Kube, selector_of
from tests.e2e.page import get, page, run_of, token

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-2")]
TOKEN_WITHOUT_A_ROLE = """
from airflow.api_fastapi.app import create_app
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.app import get_auth_manager
create_app(apps="core")
print("token:", get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="guest", role=None)))
"""


def test_rights_are_checked(airflow: Airflow, kube: Kube) -> None:
    """Anonymous requests get 401, users without a role 403, and their list is empty."""
    run = airflow.trigger("reports")
    airflow.wait_state("reports", run, "train", "deferred")
    made = subprocess.run(
        [sys.executable, "-c", TOKEN_WITHOUT_A_ROLE], env=airflow.env, check=True, capture_output=True, text=True
    )
    guest = next(line.split()[1] for line in made.stdout.splitlines() if line.startswith("token:"))
    admin = token(airflow)
    port = free_port()
    # the tests' own API server takes everybody for an administrator
    strict = {"AIRFLOW__API__PORT": str(port), "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False"}
    airflow.run("api-server", "strict-api-server", **strict)
    try:
        url = f"http://127.0.0.1:{port}"
        protected = [
            page("reports", run, "train"), page("reports", run, "train", "/update"),
            "/ktrain/trainings", "/ktrain/trainings/update",
        ]  # fmt: skip
        wait_for("the API server answers", lambda: answers(url))
        assert [get(url, path)[0] for path in protected] == [401] * 4
        assert [get(url, path, guest)[0] for path in protected[:2]] == [403] * 2
        lists = [get(url, path, guest) for path in protected[2:]]
        assert all(status == 200 and run_of(run) not in text for status, text, _ in lists)
        assert [get(url, path, admin)[0] for path in protected] == [200] * 4
        wait_for("an administrator's list has the run", lambda: run_of(run) in get(url, "/ktrain/trainings", admin)[1])
        assert get(url, page("reports", "unknown", "train"), admin)[0] == 404
    finally:
        airflow.end("strict-api-server")
        kube.let_go(selector_of("reports", run, "train"), 1)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return get(url, "/api/v2/version")[0] == 200
    return False
