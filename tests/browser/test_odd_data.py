"""Metrics and log lines that are hard to show: values of any size, control sequences, 1 MB lines, broken UTF-8."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import OVERFLOW, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]
NARROWEST = {"width": 320, "height": 640}  # CSS pixels of WCAG 2 AA, 1.4.10 Reflow


@pytest.fixture
def tab(airflow_site: Site, open_page: Open) -> Any:
    training = airflow_site.begin("odd_values")
    airflow_site.wait_state(training, "failed")
    opened = open_page(airflow_site.page(training), viewport=NARROWEST)
    until(opened, "charts.size === 4")
    return opened


def test_curves_of_values_of_any_size(tab: Any) -> None:
    assert tab.get_by_text("1e300 at step 30").is_visible()
    for name in ("tiny", "negative", "red", "huge"):
        tab.get_by_role("button", name=f"Logarithmic scale for {name}").click()
    assert tab.get_by_text("60 of 60 values are too small for a logarithmic scale.").is_visible()
    drawn = tab.evaluate("charts.get('tiny').uplot.data[1].filter((value) => value !== null).length")
    assert 1 < drawn < 10


def test_range_that_is_narrow_beside_its_numbers_is_drawn_as_one_point(tab: Any) -> None:
    """uPlot would look for its ticks for ever, and the tab of everybody who opens the page would die."""
    steps = tab.evaluate(
        """() => {
            const place = document.body.appendChild(document.createElement("div"));
            const narrow = [[9007199254740000, 9007199254740001], [1, 2]];
            showCharts(place, { narrow, equal: [[1, 2], [1e18, 1e18 + 256]] });
            return charts.get("narrow").steps;
        }"""
    )
    assert steps == [9007199254740001]


def test_long_and_broken_lines_are_cut_and_wrapped(tab: Any) -> None:
    line = tab.locator(".lines code", has_text="caf").inner_text()
    assert line.startswith("\ufffd caf\ufffd bold [... ")  # its last word is cut, so all of it is left out
    assert len(line) <= 121
    assert tab.evaluate(OVERFLOW) == 0
    assert "\x1b" not in tab.evaluate("document.body.innerText")
