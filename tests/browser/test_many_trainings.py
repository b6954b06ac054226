"""The table of 300 running and 10,000 ended trainings in a browser, and users with rights on one DAG of two."""

from __future__ import annotations

import re
import urllib.parse

import pytest

from tests.browser.conftest import Open
from tests.browser.filled_site import ENDED, RUNNING
from tests.browser.tabs import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts an Airflow database of its own"),
    pytest.mark.timeout(1800),
]
ROWS = "#rows tbody tr"


def test_table_of_10300_trainings_has_pages_and_filters(address: str, open_tab: Open) -> None:
    tab = open_tab(f"{address}/trainings", user="everything")
    tab.get_by_text(f"{ENDED:,} trainings held GPUs").wait_for()  # of more, the newest are counted
    assert tab.locator(ROWS).count() == 50
    assert tab.locator(f"{ROWS}:has-text('Running')").count() == 50
    newest = tab.locator(f"{ROWS} td.run").all_inner_texts()
    assert newest[0] == f"run_{ENDED + RUNNING - 1}"
    tab.get_by_role("link", name="Older").click()
    tab.get_by_role("link", name="Newest").wait_for()
    older = tab.locator(f"{ROWS} td.run").all_inner_texts()
    assert older[0] == f"run_{ENDED + RUNNING - 51}"
    tab.get_by_label("State").select_option("failed")
    tab.get_by_label("Text in the cause").fill("shard 9999")
    tab.get_by_role("button", name="Filter").click()
    tab.get_by_text("1 training held GPUs").wait_for()
    assert tab.locator(f"{ROWS} td.run").all_inner_texts() == ["run_9999"]


def test_page_of_a_try_without_a_status_shows_its_summary(address: str, open_tab: Open) -> None:
    tab = open_tab(f"{address}/training?dag_id=theirs&run_id=run_9999&task_id=train", user="everything")
    assert tab.locator(".cause .summary").inner_text() == "ValueError: no data in shard 9999"
    assert tab.locator(".facts").inner_text().split() == ["Parameters", "shard=9999"]


@pytest.mark.parametrize("width", [1280, 390])
def test_user_who_may_read_one_dag_of_two_sees_one(address: str, open_tab: Open, width: int) -> None:
    viewport = {"width": width, "height": 900}
    tab = open_tab(f"{address}/trainings", user="one-dag", viewport=viewport)
    tab.get_by_text(re.compile(r"5,150 trainings held GPUs")).wait_for()
    assert set(tab.locator(f"{ROWS} td:first-child").all_inner_texts()) == {"mine"}
    assert "theirs" not in tab.content()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "only the table is scrolled"


def test_trainings_are_ticked_and_compared_with_the_keyboard_alone(address: str, open_tab: Open) -> None:
    tab = open_tab(f"{address}/trainings?state=failed", user="one-dag")
    until(tab, "served.size > 0")
    focused = "document.activeElement.className + document.activeElement.id"
    tab.get_by_label("DAG").focus()
    ticked = 0
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate(focused) == "pick":
            tab.keyboard.press("Space")
            ticked += 1
        if ticked == 2:
            break
    for _ in range(60):
        tab.keyboard.press("Shift+Tab")
        if tab.evaluate(focused) == "compare":
            break
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="Comparison of 2 trainings").wait_for()


def test_training_is_compared_with_the_run_before(address: str, open_tab: Open) -> None:
    tab = open_tab(f"{address}/training?dag_id=mine&run_id=run_9000&task_id=train", user="one-dag")
    tab.get_by_role("link", name="Compare with the run before").click()
    tab.get_by_role("heading", name="Comparison of 2 trainings").wait_for()
    assert tab.get_by_role("columnheader", name="run_8998").count() == 1, "run_8999 is of the other DAG"


def test_at_most_ten_trainings_are_compared(address: str, open_tab: Open) -> None:
    tab = open_tab(f"{address}/trainings", user="one-dag")
    until(tab, "served.size > 0")
    for box in tab.locator(".pick").all()[:11]:
        box.check()
    assert tab.locator("#compare").is_disabled()
    tab.locator(".pick").first.uncheck()
    tab.get_by_role("button", name="Compare 10 trainings").click()
    tab.get_by_role("heading", name="Comparison of 10 trainings").wait_for()
    eleventh = urllib.parse.urlencode({"training": "dag_id=mine&run_id=run_0&task_id=train"})
    refused = open_tab(f"{tab.url}&{eleventh}", user="one-dag", allowed="the server responded with a status of 422")
    refused.get_by_role("heading", name="Incomplete address").wait_for()
