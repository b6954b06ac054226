"""What the pages show while nobody follows deferred trainings. This file runs last: it stops the triggerer."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import GROWS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]
NOTE = "No triggerer follows the training at present"


def test_page_says_that_no_triggerer_follows_the_training(airflow_site: Site, open_page: Open) -> None:
    """Nothing is written for a job in a queue, so the age of its data doesn't show it."""
    phases = {"Running": airflow_site.running(), "Queued": airflow_site.queued()}
    tabs = {phase: open_page(airflow_site.page(training)) for phase, training in phases.items()}
    for tab in tabs.values():  # on a busy machine, heartbeats of the triggerer may be late
        tab.get_by_text(NOTE).wait_for(state="detached", timeout=GROWS)
    airflow_site.airflow.end("triggerer")
    try:
        for phase, tab in tabs.items():
            tab.get_by_text(NOTE).wait_for(timeout=GROWS)
            assert tab.locator("#phase .phase").inner_text() == phase, "what is known is still shown"
    finally:
        airflow_site.airflow.run("triggerer")
        airflow_site.airflow.wait_triggerers(1)
    for tab in tabs.values():
        tab.get_by_text(NOTE).wait_for(state="detached", timeout=GROWS)
