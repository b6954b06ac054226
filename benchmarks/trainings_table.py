"""What each view of the table of trainings takes, with 300 running trainings and 10,000 that have ended.

    KTRAIN_TEST_DATABASE=postgresql python benchmarks/trainings_table.py [--ended 10000] [--browser]

Nothing is cached: each request reads the DAGs, the page and the sums. CPU is that of this process, which answers the
requests as Airflow's API server does, and of the database's server. With `--browser`, Chromium opens the table, filters
it and goes to the next page; it fails if a script does. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import html
import logging
import os
import re
import socket
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from harness import machine, quantile, table
from harness.database import cpu_of_server, database, version

RUNNING, DAGS, REPEATS = 300, 20, 5
MAX_ROWS = 50  # of a page
#: Seconds from the navigation until the answer is there, and until the page is shown and its scripts have run.
TIMES = """(() => {
  const [times] = performance.getEntriesByType("navigation");
  return [times.responseEnd / 1000, times.loadEventEnd / 1000];
})()"""
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
CAUSES = (
    ("", ""),
    ("user code", "ValueError: not enough values to unpack"),
    ("out of memory", "Worker 3: exit code 137"),
)


def summary(number: int, category: str, cause: str) -> dict[str, Any]:
    """About 1 KB."""
    return {
        "version": 1, "try_number": 1, "state": "failed" if cause else "succeeded", "cause": cause,
        "category": category, "started": 1.0, "ended": 2.0, "code": "0123456789", "model_uri": f"s3://models/{number}",
        "job": {"kind": "PyTorchJob", "namespace": "ml", "name": "x" * 46, "cluster": "https://cluster:6443/0123456789"},
        "usage": {"tries": 2, "held": 7200.0 + number, "wasted": 60.0}, "checkpoint": "s3://checkpoints/" + "x" * 60,
        "metrics": {f"metric {n}": [n / 7, n / 9] for n in range(8)},
        "parameters": {f"parameter_{n}": f"value {number}" for n in range(12)},
    }  # fmt: skip


def status(number: int) -> dict[str, Any]:
    """About 12 KB, as of a training with many replicas and curves of several metrics."""
    return {
        "version": 1, "try_number": 1, "written_at": 2.0, "host": "trigger", "phase": "Running", "phase_since": 1.0,
        "usage": {"held": 3600.0 + number, "wasted": 30.0, "gpus": 8},
        "replicas": {
            "count": 64, "gpus": 8, "states": {"Running": 64},
            "rows": [["Worker", n, f"job-{number}-worker-{n}", f"node-{n}", 1, "Running", 0] for n in range(64)],
        },
        "series": {f"metric {n}": [[step, step / (number + 7)] for step in range(64)] for n in range(4)},
    }  # fmt: skip


def fill(ended: int) -> None:
    """Store the trainings, by Airflow's own models."""
    import uuid

    from airflow import models, settings
    from airflow.models.base import Base
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import insert, select, text

    from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM

    models.import_all_models()  # type: ignore[no-untyped-call]
    Base.metadata.create_all(settings.engine)
    runs = [{"dag_id": f"dag_{n % DAGS}", "run_id": f"run_{n}"} for n in range(ended + RUNNING)]
    manual = {"run_type": "manual", "run_after": BEGAN, "state": "running"}
    with create_session() as session:
        session.execute(insert(DagBundleModel.__table__).values(name="bundle"))
        limits = {"max_active_tasks": 1, "max_consecutive_failed_dag_runs": 0, "has_task_concurrency_limits": False}
        dags = [{"dag_id": f"dag_{n}", "bundle_name": "bundle", "fileloc": "x", **limits} for n in range(DAGS)]
        session.execute(insert(DagModel.__table__), dags)
        session.execute(insert(DagRun.__table__), [{**run, **manual} for run in runs])
        ids = dict(session.execute(select(DagRun.run_id, DagRun.id)).all())
        tasks, xcoms = [], []
        for n, run in enumerate(runs):
            category, cause = CAUSES[n % len(CAUSES)] if n < ended else CAUSES[0]
            key, began = {**run, "task_id": "train", "map_index": -1}, BEGAN + timedelta(minutes=4 * n)
            state = "deferred" if n >= ended else "failed" if cause else "success"
            times = {"start_date": began, "end_date": began + timedelta(hours=1), "updated_at": began}
            about = {"id": uuid.uuid4(), "state": state, "try_number": 1, "pool": "p", "pool_slots": 1}
            tasks.append({**key, **times, **about})
            for name, value in ((SUMMARY_XCOM, summary(n, category, cause)), (STATUS_XCOM, status(n))):
                stored = {"key": name, "value": value, "timestamp": began}
                xcoms.append({**key, **stored, "dag_run_id": ids[run["run_id"]]})
        session.execute(insert(TaskInstance.__table__), tasks)
        session.execute(insert(XComModel.__table__), xcoms)
    with create_session() as session:
        session.execute(text("ANALYZE"))


def built() -> Any:
    """The application, for an administrator. It keeps nothing that it reads."""
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    from airflow_provider_ktrain import compat_server
    from airflow_provider_ktrain.plugin import application, trainings

    logging.disable(logging.INFO)
    init_auth_manager()
    trainings.Shared.__init__.__defaults__ = (0.0, time.monotonic)  # nothing is kept
    app = application.build()
    admin = SimpleAuthManagerUser(username="admin", role="admin")
    app.dependency_overrides[compat_server.user_dependency()] = lambda: admin
    return app


def measure(url: str) -> None:
    """Ask for each view, as a browser does, and print what it took."""
    from starlette.testclient import TestClient

    client, rows = TestClient(built()), []
    second = re.search(r'trainings\?([^"]*after[^"]*)"', client.get("/trainings").text)
    views = {
        "first page": "", "second page": html.unescape(second[1]) if second else "", "one DAG": "dag_id=dag_7",
        "failed": "state=failed", "one day": "since=2026-11-05&until=2026-11-05",
        "category of the cause": "category=out+of+memory", "text in the cause": "text=not+enough+values",
        "text that no cause has": "text=no+cause+says+this",
    }  # fmt: skip
    for name, query in views.items():
        took = []
        for _ in range(REPEATS):
            began, own, server = time.monotonic(), time.process_time(), cpu_of_server(url)
            shown = client.get(f"/trainings?{query}").text
            took.append((time.process_time() - own, cpu_of_server(url) - server, time.monotonic() - began))
        count = re.search(r"<strong>([0-9,]+)</strong> trainings", shown)
        medians = [f"{sorted(values)[REPEATS // 2]:.2f}" for values in zip(*took, strict=True)]
        rows.append([name, count and count[1], *medians, f"{max(elapsed for *_, elapsed in took):.2f}"])
    report(["view", "trainings", "API server CPU s", "database CPU s", "median s", "longest s"], rows)


def browse() -> None:
    """Open the table in Chromium, use it, and print what that took."""
    import uvicorn
    from fastapi import FastAPI
    from playwright.sync_api import sync_playwright

    from airflow_provider_ktrain.links.training import PREFIX
    from tests.browser.site import browser_path

    whole = FastAPI()
    whole.mount(PREFIX, built())
    server, errors = uvicorn.Server(uvicorn.Config(whole, log_level="error")), list[str]()
    took: dict[str, list[tuple[float, float]]] = {}
    with socket.socket() as listening, sync_playwright() as playwright:
        listening.bind(("127.0.0.1", 0))
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}{PREFIX}/trainings"
        browser = playwright.chromium.launch(executable_path=browser_path())
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(300_000)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)

        def take(name: str, role: Any = "", button: str = "") -> None:
            if role:
                with tab.expect_navigation():
                    tab.get_by_role(role, name=button).click()
            assert tab.locator("#rows tbody tr").count() == MAX_ROWS
            took.setdefault(name, []).append(tab.evaluate(TIMES))

        for _ in range(REPEATS):
            tab.goto(address)
            take("first page")
            take("next page", "link", "Older")
            tab.get_by_label("State").select_option("failed")
            take("failed", "button", "Filter")
            tab.get_by_label("Text in the cause").fill("not enough values")
            take("text in the cause", "button", "Filter")
        browser.close()
        server.should_exit = True
    assert not errors, errors
    rows = []
    for name, values in took.items():
        medians = [quantile(times, 0.5) for times in zip(*values, strict=True)]
        rows.append([name, *medians, max(shown for _, shown in values)])
    report(["view", "answer s", "shown s", "longest s"], rows)


def report(head: list[str], rows: list[list[Any]]) -> None:
    print(f"{machine()}; {version()}; load {os.getloadavg()[0]:.0f}\n")
    print(table(head, rows), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ended", type=int, default=10_000)
    parser.add_argument("--browser", action="store_true", help="measure in Chromium; needs the extra `browser`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, database() as url:
        os.environ["AIRFLOW_HOME"] = home
        os.environ["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"] = url or f"sqlite:///{home}/airflow.db"
        fill(args.ended)
        browse() if args.browser else measure(url)
