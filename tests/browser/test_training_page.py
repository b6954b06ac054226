"""The training page in a browser, while the training runs and after it has ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_provider_ktrain.core.text.output import format_duration
from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import GROWS, until
from tests.e2e.airflow import wait_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]
AGE = """() => {
  showDurations();
  const age = document.querySelector("#age span");
  return [Date.now() / 1000, age.textContent, Number(age.dataset.at)];
}"""
SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}
POINTS_OF_LOSS = "charts.get('loss')?.uplot.data[0].length ?? 0"


def shows(tab: Any, text: str) -> None:
    """Wait until the page shows the text."""
    tab.get_by_text(text).first.wait_for()


def test_curve_and_age_grow_without_a_reload(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.running()))
    until(tab, f"{POINTS_OF_LOSS} > 1")
    tab.evaluate("window.loadedOnce = true")
    assert tab.locator("#phase .phase").inner_text() == "Running"
    points, age = tab.evaluate(POINTS_OF_LOSS), tab.locator("#age").inner_text()
    picture = "document.querySelector('[aria-label^=\"Curve of loss\"] canvas').toDataURL()"
    drawn = tab.evaluate(picture)

    until(tab, "age => document.getElementById('age').textContent !== age", arg=age)
    held = "document.querySelector('#usage ~ dl [data-at]').textContent"
    before = tab.evaluate(held)
    until(tab, f"before => {held} !== before", arg=before)
    lengths = [0, 1.4, 59.4, 59.6, 60, 3599, 3661, 7260, 86400, 90061]
    assert tab.evaluate("lengths => lengths.map(duration)", lengths) == [format_duration(s) for s in lengths]
    last = "document.querySelector('#metrics-section tbody td').textContent"
    before = tab.evaluate(last)
    until(tab, f"before => {last} !== before", arg=before, timeout=GROWS)
    until(tab, f"points => {POINTS_OF_LOSS} !== points", arg=points, timeout=GROWS)
    assert tab.evaluate(picture) != drawn
    assert tab.evaluate("window.loadedOnce"), "the page was reloaded"


@pytest.mark.parametrize("days", [-1, 1])
def test_age_does_not_depend_on_the_clock_of_the_browser(airflow_site: Site, open_page: Open, days: int) -> None:
    """The data of a training that waits gets older, because nothing is written."""
    tab = open_page(airflow_site.page(airflow_site.queued()), java_script_enabled=False)
    written = float(tab.locator("#age span").get_attribute("data-at"))
    wait_for("the data has an age", lambda: time.time() > written + 30)
    tab = open_page(airflow_site.page(airflow_site.queued()), clock=days * 86400)
    until(tab, "served.size > 0")
    drawn, age, at = tab.evaluate(AGE)
    assert abs(drawn - time.time()) > 80000, "the clock of the browser is right"
    words = age.split()
    shown = sum(int(number) * SECONDS[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert at <= time.time()
    assert 0.5 * (time.time() - at) < shown < 1.5 * (time.time() - at) + 5


def test_failed_training_begins_with_the_cause_and_what_to_do(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.failed()))
    until(tab, "served.size > 0")  # the script replaces each part of the page once, and has no boxes for them meanwhile
    first = tab.locator("main > *").first
    assert first.get_by_role("heading").inner_text() == "Why it failed"
    assert "ran out of GPU memory" in first.locator(".summary").inner_text()
    assert "What to do: Reduce the batch size" in first.locator(".remedy").inner_text()
    box = first.locator(".remedy").bounding_box()
    assert box["y"] + box["height"] < 900, "it takes scrolling to see what to do"
    assert tab.locator("#phase .phase").inner_text() == "Failed"
    assert not tab.locator("#age").count(), "the data of a training that has ended doesn't age"
