"""A pytest plugin of scripts/mutations.py: notes which test runs, how long it takes, and selects tests.

The folder KTRAIN_MUTATIONS gets the notes. If it contains `wanted.json`, a list of ids, only these tests run.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DATA = Path(os.environ["KTRAIN_MUTATIONS"])
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
PROBE = "airflow_provider_ktrain._mutation_probe"
# tests may replace them
now, cpu_of_process, usage = time.perf_counter, time.process_time, resource.getrusage
_failed: set[str] = set()


def cpu() -> float:
    """CPU of this process and of its children that have ended."""
    children = usage(resource.RUSAGE_CHILDREN)
    return cpu_of_process() + children.ru_utime + children.ru_stime


def id_of(item: pytest.Item) -> str:
    """The id without the group that pytest-xdist appends."""
    groups = (f"@{mark.args[0] if mark.args else mark.kwargs.get('name')}" for mark in item.iter_markers("xdist_group"))
    return next((item.nodeid.removesuffix(group) for group in groups if item.nodeid.endswith(group)), item.nodeid)


def append(name: str, row: object) -> None:
    with (DATA / name).open("a") as file:
        file.write(f"{json.dumps(row)}\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = DATA / "wanted.json"
    if not wanted.exists():
        return
    numbers = {name: number for number, name in enumerate(json.loads(wanted.read_text()))}
    files: dict[str, int] = {}  # one file after the other, because of fixtures that a module shares
    for name, number in numbers.items():
        files.setdefault(name.partition("::")[0], number)
    chosen = [item for item in items if item.nodeid in numbers]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in numbers])
    items[:] = sorted(chosen, key=lambda item: (files[item.nodeid.partition("::")[0]], numbers[item.nodeid]))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        append("uncollected", report.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    (DATA / f"current-{WORKER}").write_text(id_of(item))
    if "scripts.mutations" not in sys.modules and (DATA / "commit").exists():
        import importlib

        importlib.import_module(PROBE).TEST = id_of(item)  # type: ignore[attr-defined]
    began, used = now(), cpu()
    try:
        return (yield)
    finally:
        row = {"test": id_of(item), "seconds": round(now() - began, 4), "cpu": round(cpu() - used, 4)}
        append(f"tests-{WORKER}.jsonl", {**row, "failed": item.nodeid in _failed})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    append(f"session-{WORKER}.json", {"cpu": round(cpu(), 1)})
