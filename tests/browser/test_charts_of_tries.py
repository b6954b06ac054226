"""The curves of several tries in one chart, as a user sees them: see the run `three-tries` of filled_site."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.filled_site import SERIES
from tests.browser.tabs import OVERFLOW, colors, until

pytest.importorskip("airflow.models.task_state_store", reason="Airflow below 3.3 doesn't store the curves of tries")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts an Airflow database of its own"),
    pytest.mark.timeout(1800),
]
LAST_VALUES = "try 1: 50, try 2: 24, this try: 10"
RADIUS = 4.0  # CSS pixels: of the middle of the ring that marks where a try broke
PLACES = """points => {
  const { uplot } = charts.get("loss"), { left, top } = uplot.over.getBoundingClientRect();
  return points.map(([step, value]) => [left + uplot.valToPos(step, "x"), top + uplot.valToPos(value, "y")]);
}"""
COLORS_OF_THEME = """names => names.map((name) => {
  const probe = document.body.appendChild(document.createElement("div"));
  probe.style.color = `var(${name})`;
  const rgb = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
  probe.remove();
  return rgb;
})"""


def chart(address: str, open_tab: Open, width: int = 1280, scheme: str = "light") -> Any:
    """The page, scrolled to the only chart. Two pixels of the picture are one CSS pixel."""
    tab = open_tab(
        f"{address}/training?dag_id=mine&run_id=three-tries&task_id=train", user="everything", color_scheme=scheme,
        viewport={"width": width, "height": 900}, device_scale_factor=2,
    )  # fmt: skip
    until(tab, "charts.size === 1 && labels.length === 3")
    tab.locator(".chart").scroll_into_view_if_needed()
    return tab


def seen(tab: Any, points: list[Any]) -> list[list[tuple[int, ...]]]:
    """The colors around each point of the chart: in the middle, then in eight directions at the radius of a mark."""
    places = tab.evaluate(PLACES, points)
    around = [(RADIUS * math.cos(n * math.pi / 4), RADIUS * math.sin(n * math.pi / 4)) for n in range(8)]
    found = colors(tab, [(x + dx, y + dy) for x, y in places for dx, dy in [(0.0, 0.0), *around]])
    return [found[n : n + 9] for n in range(0, len(found), 9)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_mark_shows_where_each_earlier_try_broke(address: str, open_tab: Open, width: int, scheme: str) -> None:
    tab = chart(address, open_tab, width, scheme)
    card, *lines = map(tuple, tab.evaluate(COLORS_OF_THEME, ["--card", "--line-0", "--line-1", "--line-2"]))
    *broken, last = seen(tab, [one["loss"][-1] for one in SERIES])
    for line, (middle, *ring) in zip(lines, broken, strict=False):
        assert middle == card, "the mark is a ring"
        assert ring == [line] * 8
    assert card in last[1:], "the try that runs has no mark"
    begins = seen(tab, [one["loss"][0] for one in SERIES])
    assert all(around[1:].count(line) < 4 for line, around in zip(lines, begins, strict=True))
    assert len({card, *lines}) == 4, "the lines can be told apart"
    assert tab.evaluate(OVERFLOW) == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_values_of_all_tries_are_read_at_a_step(address: str, open_tab: Open, width: int) -> None:
    tab = chart(address, open_tab, width)
    readout = tab.locator(".chart-head .quiet")
    assert readout.inner_text() == LAST_VALUES
    for step, text in ((20, "try 1: 70, try 2: 62 at step 20"), (60, "try 2: 30, this try: 22 at step 60")):
        ((x, y),) = tab.evaluate(PLACES, [[step, 50]])
        tab.mouse.move(x, y)
        assert readout.inner_text() == text
        box = readout.bounding_box()
        assert box["x"] + box["width"] <= width
        assert readout.evaluate("item => item.scrollWidth <= item.clientWidth"), "no text is cut off"
    tab.mouse.move(1, 1)
    assert readout.inner_text() == LAST_VALUES


def test_marks_stay_on_a_logarithmic_scale(address: str, open_tab: Open) -> None:
    tab = chart(address, open_tab)
    card, line = map(tuple, tab.evaluate(COLORS_OF_THEME, ["--card", "--line-1"]))
    tab.get_by_role("button", name="Logarithmic scale for loss").click()
    ((middle, *ring),) = seen(tab, SERIES[1]["loss"][-1:])
    assert (middle, ring) == (card, [line] * 8)


def test_rows_of_the_tries_are_below_the_chart(address: str, open_tab: Open) -> None:
    tab = chart(address, open_tab, 390)
    results = tab.locator("#tries-section tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in results] == ["2", "1"]
    assert [row.split("\t")[-1] for row in results] == ["OOM in step 70", "OOM in step 40"]
    assert tab.locator("#tries-section").bounding_box()["y"] > tab.locator(".chart").bounding_box()["y"]
