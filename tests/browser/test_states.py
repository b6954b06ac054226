"""The training page of trainings in other states, and how it treats texts from the cluster."""

from __future__ import annotations

import importlib.util
import itertools
import re

import pytest

from tests.browser.conftest import Open
from tests.browser.site import Site
from tests.browser.tabs import GROWS, LOW_CONTRAST, OVERFLOW, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.embedded("starts a cluster and an Airflow of its own"),
    pytest.mark.timeout(1800),
]
PHONE = {"width": 320, "height": 640}  # the narrowest one; CSS pixels of WCAG 2 AA, 1.4.10 Reflow


def test_queued_training_shows_what_it_waits_for(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.queued()))
    assert tab.locator("#phase .phase").inner_text() == "Queued"
    assert "nvidia.com/gpu in flavor h100, 24 more needed" in tab.locator("#phase-section .note").inner_text()
    assert not tab.locator("#notes").count(), "nothing is wrong"


def test_log_line_with_markup_and_control_sequences_is_text(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.succeeded()))
    line = tab.get_by_role("region").or_(tab.locator(".lines")).locator("code", has_text="<script>").first
    assert line.inner_text().endswith("</script><img src=x onerror=alert(1)> red")
    until(tab, "charts.size > 0")  # the script has replaced the parts of the page
    assert tab.locator(".lines code", has_text="<script>").count() == 1
    assert not tab.locator("main script, main img").count()
    assert tab.title() == "train · Training"


def test_page_works_without_its_script(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.succeeded()), java_script_enabled=False)
    assert tab.locator("#phase .phase").inner_text() == "Succeeded"
    assert tab.get_by_role("row", name="loss").count() == 1


def test_retried_training_shows_its_tries_and_what_it_repeated(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.retried()))
    if importlib.util.find_spec("airflow.models.task_state_store") is None:  # below 3.3
        tab.get_by_text("Nothing is known about the earlier tries:").wait_for()
        return
    results = tab.locator("#tries-section tbody tr").all_inner_texts()
    assert tab.locator(".chart").count() == 1
    tab.get_by_text(re.compile(r"^try 1: [0-9.]+, this try: [0-9.]+$")).wait_for()  # the last values
    assert ["succeeded" in results[0], "damaged file" in results[1], len(results)] == [True, True, 2]
    tab.get_by_text("Repeated steps", exact=True).wait_for()
    assert tab.locator("dt", has_text="Repeated steps").locator("+ dd").inner_text().startswith("101 in ")


def test_metrics_have_curves_and_a_logarithmic_scale(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.succeeded()))
    curve = tab.get_by_role("img", name="Curve of loss from step 0")
    curve.wait_for()
    assert tab.get_by_text("NaN at step 200").is_visible()
    scale = tab.get_by_role("button", name="Logarithmic scale for loss")
    assert scale.get_attribute("aria-pressed") == "false"
    scale.focus()
    tab.keyboard.press("Enter")
    assert scale.get_attribute("aria-pressed") == "true"
    assert tab.evaluate("charts.get('loss').uplot.scales.y.distr") == 3
    assert tab.evaluate("document.activeElement.textContent") == "log"
    labels = tab.evaluate("charts.get('lr').uplot.axes[1]._values")
    assert len(set(labels)) == len(labels), "small values have different labels"


def test_command_is_copied(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.running()))
    until(tab, "served.size > 0")
    button = tab.get_by_role("button", name="Copy: kubectl get pytorchjobs").first
    command = button.get_attribute("aria-label").removeprefix("Copy: ")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button.click()
    tab.get_by_text("The command was copied.").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == command
    assert tab.evaluate("document.activeElement.className") == "copy"


def test_command_is_copied_where_the_browser_has_no_clipboard_api(airflow_site: Site, open_page: Open) -> None:
    """As over plain HTTP on another host than localhost."""
    tab = open_page(airflow_site.page(airflow_site.running()))
    until(tab, "served.size > 0")
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.evaluate("document.addEventListener('copy', () => { window.copied = String(document.activeElement.value); })")
    button = tab.get_by_role("button", name="Copy: kubectl get pytorchjobs").first
    button.click()
    tab.get_by_text("The command was copied.").wait_for()
    assert tab.evaluate("window.copied") == button.get_attribute("aria-label").removeprefix("Copy: ")


def test_names_for_a_screen_reader(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.failed()))
    for name in ("Why it failed", "Details of the cause", "Phase: Failed", "Metrics", "Replicas"):
        tab.get_by_role("region", name=name, exact=True).first.wait_for()
    tab.get_by_role("navigation", name="Related pages").wait_for()
    airflow_site.running()
    tab = open_page(airflow_site.list())
    tab.get_by_role("rowheader", name="train", exact=True).first.wait_for()
    tab.get_by_role("button", name="DAG", exact=True).wait_for()  # without the arrow
    assert tab.get_by_role("row").first.locator("th").count() == 11


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(airflow_site: Site, open_page: Open, scheme: str) -> None:
    trainings = airflow_site.running(), airflow_site.failed(), airflow_site.succeeded()
    for url in (*map(airflow_site.page, trainings), airflow_site.list(), airflow_site.comparison(*trainings)):
        tab = open_page(url, viewport=PHONE, color_scheme=scheme)
        until(tab, "served.size > 0")
        assert tab.evaluate(OVERFLOW) == 0, url


def test_page_keeps_focus_and_selection_when_it_is_updated(airflow_site: Site, open_page: Open) -> None:
    tab = open_page(airflow_site.page(airflow_site.running()))
    until(tab, "charts.size > 0")
    tab.get_by_role("button", name="Logarithmic scale for loss").focus()
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('#commands-section code'))")
    selected = tab.evaluate("String(getSelection())")
    last = "document.querySelector('#metrics-section tbody td').textContent"
    before = tab.evaluate(last)
    until(tab, f"before => {last} !== before", arg=before, timeout=GROWS)
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "Logarithmic scale for loss"
    assert tab.evaluate("String(getSelection())") == selected != ""


def test_contrast_of_texts(airflow_site: Site, open_page: Open) -> None:
    """WCAG 2 AA: 4.5 to 1 for texts of normal size, in both themes."""
    failed, succeeded = airflow_site.failed(), airflow_site.succeeded()
    pages = airflow_site.page(failed), airflow_site.list(), airflow_site.comparison(failed, succeeded)
    for url, scheme in itertools.product(pages, ("light", "dark")):
        tab = open_page(url, color_scheme=scheme)
        assert tab.evaluate("document.documentElement.dataset.theme") == scheme
        assert tab.evaluate(LOW_CONTRAST) == [], url
