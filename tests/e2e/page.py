"""Requests of the end-to-end tests to the training page and to the list of running trainings."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request

from tests.e2e.airflow import Airflow


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


def page(dag: str, run: str, task: str, part: str = "") -> str:
    query = urllib.parse.urlencode({"dag_id": dag, "run_id": run, "task_id": task, "map_index": "{MAP_INDEX}"})
    return f"/ktrain/training{part}?{query}"


def run_of(run: str) -> str:
    """The part of a run's links that names it."""
    return f"run_id={urllib.parse.quote(run, safe='')}"


def token(airflow: Airflow) -> str:
    return str(airflow.call("GET", "/auth/token")["access_token"])
