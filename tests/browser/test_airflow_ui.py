"""Our pages inside Airflow's own UI: the button of a task, the entry in the navigation, and the theme."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain import compat
from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]


def frame_of(tab: Any) -> Any:
    """The document in the iframe that Airflow shows a plugin's page in, when it is complete."""
    tab.locator("iframe").wait_for()
    frame = tab.locator("iframe").element_handle().content_frame()
    until(frame, "document.readyState === 'complete'")
    return frame


def test_button_of_a_task_opens_its_page_in_the_same_tab(airflow_site: Site, open_page: Open) -> None:
    training = airflow_site.running()
    # Airflow 3.2 says so when its page is left while it reads the log
    tab = open_page(airflow_site.task_page(training), allowed="aborted")
    tab.get_by_role("link", name="Training", exact=True).click()
    tab.get_by_role("heading", name="Training train").wait_for()
    assert f"dag_id={training.dag_id}" in tab.url
    assert len(tab.context.pages) == 1
    tab.get_by_role("link", name="Log and manifest").click()
    tab.get_by_role("link", name="Details").wait_for()


def test_entry_in_the_navigation_shows_the_list_in_a_frame(airflow_site: Site, open_page: Open) -> None:
    training = airflow_site.running()
    tab = open_page(f"{airflow_site.airflow.url}/")
    tab.get_by_role("button", name="Browse").click()
    tab.get_by_role("menuitem", name="Trainings").click()
    frame = frame_of(tab)
    frame.get_by_role("row", name=training.dag_id).first.wait_for()
    assert not frame.get_by_role("link", name="Airflow", exact=True).is_visible(), "it would open Airflow in the frame"
    frame.get_by_role("link", name=training.task_id, exact=True).first.click()
    frame.get_by_role("heading", name="Training train").wait_for()
    frame.get_by_role("link", name="All trainings").click()
    frame.get_by_role("heading", name="Trainings", exact=True).wait_for()


def test_frame_has_the_theme_of_the_ui(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(f"{airflow_site.airflow.url}/plugin/ktrain-trainings", color_scheme="light")
    frame = frame_of(tab)
    until(frame, "document.documentElement.dataset.theme === 'light'")
    for theme in ("dark", "light"):
        tab.evaluate("theme => localStorage.setItem('theme', theme)", theme)  # as the UI's switch does
        until(frame, "theme => document.documentElement.dataset.theme === theme", arg=theme)


def test_group_that_a_program_never_ends_folds_the_later_lines(airflow_site: Site, open_page: Open) -> None:
    """SECURITY.md says so. The lines are there, below the group. Airflow 3.2 doesn't fold a group that has no end."""
    training = airflow_site.begin("group_without_end")
    airflow_site.wait_state(training, "success")
    tab = open_page(airflow_site.task_page(training).removesuffix("/details"))
    tab.get_by_text("] before the group").wait_for()  # Airflow 3.2 doesn't fold the manifest, which has the program
    later = [tab.get_by_text(text) for text in ("] in the group", "succeeded after")]
    if compat.calls_on_kill():  # Airflow 3.3
        group = tab.get_by_text("of the program")
        group.wait_for()
        assert not any(line.is_visible() for line in later)
        group.click()
    for line in later:
        line.wait_for()
