"""What users with and without rights see, on an API server that has a path in its address: `[api] base_url`."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

import pytest

from tests.browser.conftest import Open
from tests.browser.site import ApiServer, Site
from tests.browser.tabs import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]
REFUSED = "the server responded with a status of 40"


@pytest.fixture(scope="module")
def server(airflow_site: Site) -> Iterator[ApiServer]:
    with airflow_site.api_server("/airflow") as started:
        yield started


def test_anonymous_user_can_log_in_and_comes_back(airflow_site: Site, server: ApiServer, open_page: Open) -> None:
    training = airflow_site.succeeded()
    tab = open_page(server.page(training), user="-", allowed=REFUSED)
    tab.get_by_role("heading", name="You are not logged in").wait_for()
    tab.get_by_role("link", name="Log in to Airflow").click()
    tab.get_by_label("Username").fill("admin")
    tab.get_by_label("Password").fill(server.password("admin"))
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_role("heading", name="Training train").wait_for()
    assert urllib.parse.urlsplit(tab.url).path == "/airflow/ktrain/training"


def test_user_without_a_role_sees_no_training(airflow_site: Site, server: ApiServer, open_page: Open) -> None:
    training, guest = airflow_site.running(), server.token(None)
    tab = open_page(server.page(training), user=guest, allowed=REFUSED)
    tab.get_by_role("heading", name="You don't have access to this training").wait_for()
    assert training.run_id not in tab.content()
    tab = open_page(server.list(), user=guest)
    tab.get_by_text("No trainings are found.").wait_for()
    assert training.run_id not in tab.content()


def test_viewer_sees_the_page_below_the_path_of_the_server(
    airflow_site: Site, server: ApiServer, open_page: Open
) -> None:
    training, viewer = airflow_site.running(), server.token("viewer")
    tab = open_page(server.list(), user=viewer)
    tab.get_by_role("row", name=training.dag_id).get_by_role("link").first.click()
    tab.get_by_role("heading", name="Training train").wait_for()
    until(tab, "charts.size > 0")  # scripts and updates are found
    links = tab.evaluate("[...document.links].map((link) => link.pathname)")
    assert links
    assert all(path.startswith("/airflow/") for path in links), links
    assert tab.locator(".lines dt").count(), "a viewer may read logs"


def test_expired_login_is_shown_without_a_reload(airflow_site: Site, server: ApiServer, open_page: Open) -> None:
    tab = open_page(server.page(airflow_site.running()), user=server.token("viewer"), allowed=REFUSED)
    until(tab, "served.size > 0")
    tab.context.clear_cookies()
    tab.evaluate("update()")
    tab.get_by_text("You are logged out").wait_for()


def test_unknown_training_and_incomplete_address(airflow_site: Site, server: ApiServer, open_page: Open) -> None:
    viewer, page = server.token("viewer"), server.page(airflow_site.succeeded())
    for url, title in ((f"{page}0", "No such training"), (page.partition("?")[0], "Incomplete address")):
        tab = open_page(url, user=viewer, allowed="the server responded with a status of 4")
        assert tab.get_by_role("heading").inner_text() == title
        assert tab.title() == title
