"""A headless Chromium of the system, and an Airflow for it. Without one of them the tests are skipped with the reason.

Playwright drives the browser of the system; it downloads none.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.site import BROWSERS, Site, browser_path, site, token
from tests.browser.tabs import SLOW

Open = Callable[..., Any]
HIDDEN = "Object.defineProperty(document, 'hidden', { value: true, configurable: true })"
CLOCK = "{ const real = Date.now; Date.now = () => real() + %d; }"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser, by Playwright's API."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`: pip install '.[browser]'")
    if (chosen := browser_path()) is None:
        pytest.skip(f"no browser on this machine: {', '.join(BROWSERS)} (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chosen, timeout=4 * SLOW)
        yield started
        started.close()


@pytest.fixture(scope="session")
def airflow_site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("airflow")) as started:
        yield started


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the plugin's pages about the trainings of `filled_site`. Each test has the same ones."""
    home = tmp_path_factory.mktemp("airflow")
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__CORE__AUTH_MANAGER": "tests.plugin.rights_site.PerEntityAuthManager",
    }
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, number = listening.getsockname()[1], listening.fileno()
        command = [sys.executable, "-m", "tests.browser.filled_site", str(number)]
        with subprocess.Popen(command, env=environment, pass_fds=[number]) as process:
            try:
                url = f"http://127.0.0.1:{port}/ktrain"
                with urllib.request.urlopen(f"{url}/static/page.css", timeout=600):  # waits until the process accepts
                    yield url
            finally:
                process.terminate()


@pytest.fixture
def open_page(open_tab: Open, airflow_site: Site) -> Open:
    """Opens a page of Airflow's: see `open_tab`. Without a user, an administrator opens it."""

    def open_one(url: str, *, user: str = "", **how: Any) -> Any:
        return open_tab(url, user=user or token(airflow_site.airflow), **how)

    return open_one


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Open]:
    """Opens a URL in a new tab and returns the tab. The test fails if a tab reports an error.

    Errors are those in the console, such as violations of the Content-Security-Policy, and uncaught exceptions.
    """
    problems: list[str] = []
    contexts: list[Any] = []

    def open_one(
        url: str, *, user: str, allowed: str = "", clock: int = 0, hidden: bool = False, **context: Any
    ) -> Any:
        """
        :param user: the token of the user; `-` for nobody.
        :param allowed: errors that contain this text are expected. Default: none is.
        :param clock: seconds that the browser's clock is ahead. Default: 0.
        :param hidden: open it in the background. Default: False.
        :param context: of Playwright's `new_context`, such as `color_scheme` and `viewport`.
        """
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}))
        contexts[-1].set_default_timeout(SLOW)
        if clock:
            contexts[-1].add_init_script(CLOCK % (1000 * clock))
        if hidden:
            contexts[-1].add_init_script(HIDDEN)
        if user != "-":
            contexts[-1].add_cookies([{"name": "_token", "value": user, "url": url}])
        tab = contexts[-1].new_page()

        def note(text: str) -> None:
            if not (allowed and allowed in text):
                problems.append(f"{url}: {text}")

        tab.on("pageerror", lambda error: note(str(error)))
        tab.on("console", lambda message: note(message.text) if message.type == "error" else None)
        tab.goto(url, timeout=2 * SLOW)
        return tab

    yield open_one
    for context in contexts:
        context.close()
    assert not problems
