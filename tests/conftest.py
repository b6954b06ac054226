"""Shared by all tests: their order, their groups, and the selection of those that a real cluster can run."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import settings

from tests import captured, clusters, leaks
from tests.clusters import REAL, TestCluster
from tests.isolation import own_directories
from tests.virtual import VirtualLoop

own_directories()

_COLLECTED = Counter[str]()  # combinations of the parameters of each sampled test
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

# the same examples in each run, even on a slow machine: HYPOTHESIS_PROFILE=explore searches for others
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=300)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    captured.register(config)
    leaks.register(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, nor look at them later: they are half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    if mark := item.get_closest_marker("sampled"):
        (every,) = mark.args
        function = item.nodeid.partition("[")[0]
        _COLLECTED[function] += 1
        if (_COLLECTED[function] - 1) % every:
            item.add_marker(pytest.mark.thorough)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups; pytest-randomly has changed the order before
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of Airflow's own processes first, so that no worker waits for them at the end.

    Tests that share a cluster of their own, or another fixture of their module, run in one process of pytest-xdist:
    each process would start another one.
    """
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and not item.get_closest_marker("xdist_group")
            and _has_fixture_of_its_module(item)
        ):
            item.add_marker(pytest.mark.xdist_group(_module_of(item)))
        if item.get_closest_marker("scripted") and "cluster" in item.name.partition("[")[2].rstrip("]").split("-"):
            item.add_marker(pytest.mark.thorough)
        if mark := item.get_closest_marker("embedded"):
            (why,) = mark.args
            item.add_marker(pytest.mark.skipif(bool(REAL), reason=f"on the embedded cluster only: {why}"))


def _module_of(item: pytest.Function) -> str:
    return item.nodeid.partition("::")[0]


def _has_fixture_of_its_module(item: pytest.Function) -> bool:
    """Whether the test uses a fixture that its module defines with the scope of a module."""
    used = (definitions[-1] for definitions in item._fixtureinfo.name2fixturedefs.values())
    return any(fixture.scope == "module" and fixture.baseid == _module_of(item) for fixture in used)


@pytest.fixture(autouse=True)
def masks_of_this_test() -> Iterator[None]:
    """When a test ends, Airflow forgets its secrets: for each new secret, it compiles one pattern of all of them."""
    before = [(masker, set(masker.patterns), masker.replacer) for masker in _maskers()]
    yield
    for masker, patterns, replacer in before:
        masker.patterns, masker.replacer = patterns, replacer


def _maskers() -> list[Any]:
    names = ("airflow._shared.secrets_masker.secrets_masker", "airflow.sdk._shared.secrets_masker.secrets_masker")
    return [sys.modules[name]._secrets_masker() for name in names if name in sys.modules]


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    """The cluster of all tests that need no other one. They use names of their own, and leave no fault behind."""
    with clusters.cluster(gpus=64) as reached:
        yield reached


@pytest.fixture(scope="module")
def no_garbage_collection() -> Iterator[None]:
    """For tests that parse code: Python 3.11 can't if garbage collection lets a traceback be formatted meanwhile.

    That parses lines of code, and both count their depth in one place (https://github.com/python/cpython/issues/106905).
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def without_kueue(cluster: TestCluster) -> None:
    """Skip the test if Kueue would suspend its job, which names a queue."""
    if clusters.serves(cluster, "kueue.x-k8s.io", "v1beta2", "workloads"):
        pytest.skip("needs a cluster without Kueue")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many facts of the recordings of Kueue were met, and what repeats the order of the tests."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    replays = [value for r in reports for name, value in r.user_properties if name == "kueue"]
    if replays:
        compared, different = (sum(numbers) for numbers in zip(*replays, strict=True))
        text = f"{compared - different} of {compared} facts agree, in {len(replays)} scenarios"
        terminalreporter.write_line(f"Replays of Kueue: {text}")
    if isinstance(seed := getattr(config.option, "randomly_seed", None), int):
        terminalreporter.write_line(f"Order of the tests: --randomly-seed={seed}")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory] | None:
    """Tests with the mark `virtual_time` have a loop that owns its time; those with `scripted` have each kind once."""
    if item.get_closest_marker("scripted"):
        return {"scripted": VirtualLoop, "cluster": asyncio.new_event_loop}
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"virtual": VirtualLoop} if virtual else {"real": asyncio.new_event_loop}
