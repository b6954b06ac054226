"""The training page, its data and its rights, by HTTP. tests/browser has the tests in a real browser."""

from __future__ import annotations

import contextlib
import html
import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.database import free_port
from tests.e2e.kube import Kube, selector_of

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-1")]
TOKEN_WITHOUT_A_ROLE = """
from airflow.api_fastapi.app import create_app
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.app import get_auth_manager
create_app(apps="core")
print("token:", get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="guest", role=None)))
"""


def get(url: str, path: str, token: str | None = None, tag: str = "") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of a request to the plugin. Without a token it is anonymous."""
    headers = {"If-None-Match": tag} if tag else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=240) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(), dict(e.headers)


def page(run: str, task: str, part: str = "", *, dag: str = "reports") -> str:
    query = urllib.parse.urlencode({"dag_id": dag, "run_id": run, "task_id": task, "map_index": "{MAP_INDEX}"})
    return f"/ktrain/training{part}?{query}"


def run_of(run: str) -> str:
    """The part of a run's links that names it."""
    return f"run_id={urllib.parse.quote(run, safe='')}"


def token(airflow: Airflow) -> str:
    return str(airflow.call("GET", "/auth/token")["access_token"])


def test_page_follows_a_deferred_training(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("reports", {"waits": True})
    airflow.wait_state("reports", run, "succeeds", "deferred")
    admin = token(airflow)

    def points() -> int:
        status, text, _ = get(airflow.url, page(run, "succeeds", "/update"), admin)
        return len(json.loads(text)["series"].get("loss", [[]])[0]) if status == 200 else 0

    first = wait_for("points of the loss", points)
    kube.let_go(selector_of("reports", run, "succeeds"), 2)
    airflow.wait_state("reports", run, "succeeds", "success")
    assert points() == 50
    assert 0 < first <= 30

    status, text, headers = get(airflow.url, page(run, "succeeds"), admin)
    assert status == 200
    for shown in (
        "Succeeded",
        "Master 0",
        "Worker 0",
        "Held without training",
        "kubectl get pytorchjobs.kubeflow.org",
        "NaN",
    ):
        assert shown in text, shown
    assert html.escape('alert("from') in text or "alert(&#34;from" in text
    assert "<script>alert" not in text
    assert "script-src 'self'" in headers["content-security-policy"]

    status, _, headers = get(airflow.url, page(run, "succeeds", "/update"), admin)
    assert get(airflow.url, page(run, "succeeds", "/update"), admin, tag=headers["etag"])[0] == 304

    reported = airflow.xcom("reports", run, "succeeds", "metrics")
    assert reported["loss"] == {"last": 0.41, "step": 49, "best": 0.41, "best_step": 49}
    assert reported["odd"]["last"] == "NaN"
    stored = airflow.xcom("reports", run, "succeeds", "ktrain_status")
    assert (stored["ended"], stored["phase"], stored["try_number"]) == (True, "Succeeded", 1)
    link = str(airflow.links("reports", run, "succeeds")["Training"])
    assert link.startswith("/ktrain/training?dag_id=reports&run_id=")


def test_page_of_a_failed_training_begins_with_the_cause(airflow: Airflow) -> None:
    run = airflow.trigger("reports")
    airflow.wait_state("reports", run, "fails", "failed")
    status, text, _ = get(airflow.url, page(run, "fails"), token(airflow))
    assert status == 200, text
    assert text.index("Why it failed") < text.index("exit code 3") < text.index("Replicas")


def test_running_trainings_are_listed(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("reports", {"waits": True})
    airflow.wait_state("reports", run, "succeeds", "deferred")
    admin = token(airflow)
    path = f"{run_of(run)}&amp;task_id=succeeds"
    wait_for("its row", lambda: path in get(airflow.url, "/ktrain/running", admin)[1])
    kube.let_go(selector_of("reports", run, "succeeds"), 2)
    airflow.wait_state("reports", run, "succeeds", "success")
    wait_for("its row is gone", lambda: path not in get(airflow.url, "/ktrain/running", admin)[1])


def test_rights_are_checked(airflow: Airflow, kube: Kube) -> None:
    """Anonymous requests get 401, users without a role 403, and their list is empty."""
    run = airflow.trigger("reports", {"waits": True})
    airflow.wait_state("reports", run, "succeeds", "deferred")
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
            page(run, "succeeds"), page(run, "succeeds", "/update"), "/ktrain/running", "/ktrain/running/update",
        ]  # fmt: skip
        wait_for("the API server answers", lambda: answers(url))
        assert [get(url, path)[0] for path in protected] == [401] * 4
        assert [get(url, path, guest)[0] for path in protected[:2]] == [403] * 2
        lists = [get(url, path, guest) for path in protected[2:]]
        assert all(status == 200 and run_of(run) not in text for status, text, _ in lists)
        assert [get(url, path, admin)[0] for path in protected] == [200] * 4
        wait_for("an administrator's list has the run", lambda: run_of(run) in get(url, "/ktrain/running", admin)[1])
        assert get(url, page("unknown", "succeeds"), admin)[0] == 404
    finally:
        airflow.end("strict-api-server")
        kube.let_go(selector_of("reports", run, "succeeds"), 2)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return get(url, "/api/v2/version")[0] == 200
    return False
