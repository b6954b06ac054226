"""The limits of a training that can't start, as a user sees them: see the runs of filled_site."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.tabs import LOW_CONTRAST, OVERFLOW, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts an Airflow database of its own"),
    pytest.mark.timeout(1800),
]
LIMITS = "section[aria-labelledby=limits]"
LEFT = f"document.querySelector('{LIMITS} [data-at]').textContent"
WAITS = {
    "missing-claim": ("missing claim", 'persistentvolumeclaim "data" not found'),
    "no-matching-node": ("no matching node", "didn't match Pod's node affinity/selector"),
}
SECONDS = {"h": 3600, "min": 60, "s": 1}


def open_run(address: str, open_tab: Open, run: str, **how: Any) -> Any:
    return open_tab(f"{address}/training?dag_id=mine&run_id={run}&task_id=train", user="everything", **how)


def limits(tab: Any) -> list[list[str]]:
    """Name and text of each, from top to bottom."""
    found = tab.locator(f"{LIMITS} dt, {LIMITS} dd").all_inner_texts()
    return [found[n : n + 2] for n in range(0, len(found), 2)]


def seconds(duration: str) -> int:
    words = duration.split()
    return sum(int(number) * SECONDS[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("run", WAITS)
def test_limit_that_strikes_is_first_and_says_when(
    address: str, open_tab: Open, run: str, width: int, scheme: str
) -> None:
    name, warning = WAITS[run]
    viewport = {"width": width, "height": 900}
    tab = open_run(address, open_tab, run, color_scheme=scheme, viewport=viewport)
    until(tab, "served.size > 0")
    (first, left), (second, _) = limits(tab)
    assert (first, second) == (name, "scheduling_timeout")
    assert re.fullmatch(r"expires in (1 h|[0-9]+ min( [0-9]+ s)?)", left)
    note = tab.locator("#notes .note", has_text=warning)
    for item in (note, *tab.locator(f"{LIMITS} dt, {LIMITS} dd").all()):
        box = item.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] < 60 or item == note, "a name or a time is broken into many lines"
    assert tab.evaluate(OVERFLOW) == 0
    assert tab.evaluate(LOW_CONTRAST) == []


@pytest.mark.parametrize("clock", [0, 86400], ids=["right", "a day ahead"])
def test_time_that_is_left_runs_down_in_the_browser(address: str, open_tab: Open, clock: int) -> None:
    tab = open_run(address, open_tab, "missing-claim", clock=clock)
    until(tab, "served.size > 0")
    before = tab.evaluate(LEFT)
    for _ in range(2):
        after = until(tab, f"before => {LEFT} !== before && {LEFT}", before)
        assert seconds(before) - 60 < seconds(after) < seconds(before)
        before = after


def test_limit_that_has_expired_says_so(address: str, open_tab: Open) -> None:
    tab = open_run(address, open_tab, "expired")
    assert limits(tab)[0] == ["missing claim", "has expired"]
