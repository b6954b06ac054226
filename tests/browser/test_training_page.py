"""The training page in a browser, while the training runs and after it has ended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import GROWS, until

pytestmark = [pytest.mark.browser, pytest.mark.embedded, pytest.mark.timeout(1800)]
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
    last = "document.querySelector('#metrics-section tbody td').textContent"
    before = tab.evaluate(last)
    until(tab, f"before => {last} !== before", arg=before, timeout=GROWS)
    until(tab, f"points => {POINTS_OF_LOSS} !== points", arg=points, timeout=GROWS)
    assert tab.evaluate(picture) != drawn
    assert tab.evaluate("window.loadedOnce"), "the page was reloaded"


def test_failed_training_begins_with_the_cause_and_what_to_do(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.failed()))
    first = tab.locator("main > *").first
    assert first.get_by_role("heading").inner_text() == "Why it failed"
    assert "ran out of GPU memory" in first.locator(".summary").inner_text()
    assert "What to do: Reduce the batch size" in first.locator(".remedy").inner_text()
    box = first.locator(".remedy").bounding_box()
    assert box["y"] + box["height"] < 900, "it takes scrolling to see what to do"
    assert tab.locator("#phase .phase").inner_text() == "Failed"
    assert not tab.locator("#age").count(), "the data of a training that has ended doesn't age"
