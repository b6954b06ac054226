"""A tab that nobody sees asks for nothing."""

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
MINUTE = 60_000  # milliseconds
UPDATE = "**/update*"
#: What a browser does when the user goes to another tab, or returns.
SHOW = """visible => {
  Object.defineProperty(document, "hidden", { value: !visible, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def show(tab: Any, visible: bool) -> None:
    tab.evaluate(SHOW, visible)


@pytest.mark.parametrize("which", ["training", "list"])
def test_hidden_tab_sends_no_requests(airflow_site: Site, open_page: Open, which: str) -> None:
    training = airflow_site.running()
    tab = open_page(airflow_site.page(training) if which == "training" else airflow_site.list())
    tab.clock.install()  # from the next load on, time passes as usual, and faster in `run_for`
    tab.reload()
    until(tab, "served.size > 0")
    with tab.expect_response(UPDATE):
        tab.clock.run_for(MINUTE)
    show(tab, False)
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.clock.run_for(10 * MINUTE)
    assert not asked
    with tab.expect_response(UPDATE):
        show(tab, True)


def test_tab_that_is_opened_in_the_background_waits(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.running()), hidden=True)
    until(tab, "document.readyState === 'complete'")
    assert tab.evaluate("served.size") == 0
    assert tab.locator("#phase .phase").inner_text() == "Running", "the server has filled the page"
    show(tab, True)
    until(tab, "charts.size > 0")
