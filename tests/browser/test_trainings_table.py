"""The table of trainings in a browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]
SORTED_BY_LOSS = """values => {
  const body = document.querySelector("table.sortable").tBodies[0], row = body.rows[0], loss = 8;
  body.replaceChildren(...values.map((value) => {
    const copy = row.cloneNode(true);
    copy.cells[loss].textContent = value;
    return copy;
  }));
  return [false, true].map((descending) => {
    sortRows(loss, descending);
    return [...body.rows].map((copy) => copy.cells[loss].textContent);
  });
}"""


def rows(tab: Any) -> list[str]:
    """The DAGs of the rows, from top to bottom."""
    return [str(text) for text in tab.locator("tbody tr td:first-child").all_inner_texts()]


def open_list(site: Site, open_page: Open) -> Any:
    """The table, when it has the trainings that run and the script has updated it."""
    running, queued = site.running(), site.queued()
    tab = open_page(site.list())
    for training in (running, queued):
        tab.get_by_role("row", name=training.dag_id).first.wait_for()
    until(tab, "served.size > 0")
    return tab


def test_columns_are_sorted(airflow_site: Site, open_page: Open) -> None:
    tab = open_list(airflow_site, open_page)
    heading = tab.get_by_role("columnheader", name="DAG")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert rows(tab) == sorted(rows(tab))
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows(tab) == sorted(rows(tab), reverse=True)
    gpus = tab.get_by_role("columnheader", name="GPU time")
    gpus.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") is None
    assert gpus.get_attribute("aria-sort") == "ascending"
    assert rows(tab)[0] == "queued_training", "a queued training has held no GPU"


def test_numbers_are_sorted_by_their_value(airflow_site: Site, open_page: Open) -> None:
    tab = open_list(airflow_site, open_page)
    values = ["0.4", "", "0.35", "10.2", "NaN", "1e-05", "-3"]
    ascending, descending = tab.evaluate(SORTED_BY_LOSS, values)
    numbers = ["-3", "1e-05", "0.35", "0.4", "10.2"]
    assert ascending[:5] == numbers
    assert descending[:5] == numbers[::-1], "what isn't known is last in both orders"


def test_order_and_focus_stay_when_the_list_is_updated(airflow_site: Site, open_page: Open) -> None:
    tab = open_list(airflow_site, open_page)
    button = tab.get_by_role("columnheader", name="DAG").get_by_role("button")
    button.click()
    button.click()
    tab.evaluate("served = new Map(); tag = ''; update()")  # as if each part had changed
    until(tab, "served.size > 0")
    assert rows(tab) == sorted(rows(tab), reverse=True)
    assert tab.evaluate("document.activeElement.textContent") == "DAG"


def test_keyboard_leads_to_a_training(airflow_site: Site, open_page: Open) -> None:
    tab = open_list(airflow_site, open_page)
    for _ in range(80):
        tab.keyboard.press("Tab")
        if "dag_id=image_classifier" in (tab.evaluate("document.activeElement.getAttribute('href')") or ""):
            break
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Training train").wait_for()
    assert "dag_id=image_classifier" in tab.url


def test_whole_row_leads_to_its_training(airflow_site: Site, open_page: Open) -> None:
    tab = open_list(airflow_site, open_page)
    tab.get_by_role("row", name="queued_training").first.click(position={"x": 500, "y": 10})
    tab.get_by_role("heading", name="Training train").wait_for()
    assert "dag_id=queued_training" in tab.url


def test_filters_work_with_the_keyboard_alone(airflow_site: Site, open_page: Open) -> None:
    """The Content-Security-Policy allows no form to be sent: the script makes the address."""
    training = airflow_site.running()
    tab = open_page(airflow_site.list())
    tab.get_by_role("row", name=training.dag_id).first.wait_for()
    tab.get_by_label("Text in the cause").press_sequentially("no cause says this")
    tab.keyboard.press("Enter")
    tab.get_by_text("No trainings are found.").wait_for()
    assert tab.url.endswith("/ktrain/trainings?text=no+cause+says+this")
    assert tab.get_by_label("Text in the cause").input_value() == "no cause says this"
    tab.get_by_role("link", name="Clear").press("Enter")
    tab.get_by_role("row", name=training.dag_id).first.wait_for()
    tab.get_by_label("DAG").select_option(training.dag_id)
    tab.get_by_role("button", name="Filter").press("Enter")
    until(tab, "location.search")
    tab.get_by_role("row", name=training.dag_id).first.wait_for()
    assert set(rows(tab)) == {training.dag_id}


def test_ticked_trainings_are_compared(airflow_site: Site, open_page: Open) -> None:
    first, second = airflow_site.running(), airflow_site.queued()
    tab = open_list(airflow_site, open_page)
    compare = tab.locator("#compare")
    assert compare.is_disabled()
    for training in (first, second):
        tab.get_by_role("row", name=training.dag_id).first.get_by_role("checkbox").check()
    tab.evaluate("served = new Map(); tag = ''; update()")  # ticks stay when the rows are replaced
    until(tab, "served.size > 0")
    compare.click()
    tab.get_by_role("heading", name="Comparison of 2 trainings").wait_for()
    until(tab, "Object.keys(series).length > 0")
    until(tab, "document.querySelector('.chart-head')?.textContent.includes('A: ')")
    for training in (first, second):
        tab.get_by_role("columnheader", name=training.dag_id).wait_for()
