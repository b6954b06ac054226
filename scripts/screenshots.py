"""Make the pictures of the training page in docs/images: `screenshots.py [NAME ...]`, default: all of them.

It starts an Airflow and an embedded cluster, runs trainings, and photographs their pages with the system's Chromium.
It needs the extra `browser` and takes some minutes.
"""

import argparse
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from playwright.sync_api import sync_playwright

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.site import Site, Training, browser_path, site, token  # noqa: E402 - found by the line above
from tests.browser.tabs import until  # noqa: E402
from tests.e2e.airflow import wait_for  # noqa: E402

OUT = ROOT / "docs" / "images"
MAX_BYTES = 150_000
STEP = 3000  # of the loss in the picture of a running training
SLOW = 120_000  # milliseconds
DESKTOP = (1200, 900)


class Picture(NamedTuple):
    """One picture.

    :param url: of a page; it waits until the training is in its state.
    :param size: of the window in pixels.
    :param scheme: `light` or `dark`.
    :param ready: what is true in the page when it can be photographed.
    """

    url: Callable[[Site], str]
    size: tuple[int, int] = DESKTOP
    scheme: str = "light"
    ready: str = "served.size > 0"


def running(made: Site) -> str:
    """The page of a running training whose curves have a shape."""
    training = made.running()

    def has_curves() -> bool:
        return bool(made.status(training).get("metrics", {}).get("loss", {}).get("step", 0) >= STEP)

    wait_for(f"the loss has reached step {STEP}", has_curves, 600)
    return made.page(training)


@functools.cache
def rates(made: Site) -> list[str]:
    """Two runs of four mapped trainings each, of which one fails."""
    dag_id = "learning_rates"
    runs = [made.airflow.trigger(dag_id) for _ in range(2)]

    def have_ended() -> bool:
        tasks = [task for run in runs for task in made.airflow.tasks(dag_id, run)]
        return len(tasks) == 8 and all(task["state"] in ("success", "failed") for task in tasks)

    wait_for("all learning rates were tried", have_ended, 900)
    return runs


def listed(made: Site) -> str:
    """The table with a filter."""
    rates(made)
    return f"{made.list()}?dag_id=learning_rates"


def compared(made: Site) -> str:
    """The comparison of a training of each run."""
    return made.comparison(*(Training("learning_rates", run, "train", n) for n, run in enumerate(rates(made), 1)))


PICTURES = {
    "training-running": Picture(running),
    "training-failed": Picture(lambda made: made.page(made.failed())),
    "training-hang": Picture(lambda made: made.page(made.hung()), size=(1200, 800)),
    "training-queued": Picture(lambda made: made.page(made.queued()), size=(1200, 760)),
    "training-list": Picture(listed, size=(1750, 675)),
    "training-comparison": Picture(compared, size=(1200, 760), ready="charts.size > 1"),
    "training-retried": Picture(lambda made: made.page(made.retried()), size=(1200, 1320), ready="charts.size > 0"),
    "training-dark": Picture(running, scheme="dark"),
    "training-phone": Picture(running, size=(390, 844)),
}


def take(browser: Any, made: Site, name: str) -> None:
    """Photograph one page."""
    picture = PICTURES[name]
    url = picture.url(made)
    width, height = picture.size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=picture.scheme)
    context.add_cookies([{"name": "_token", "value": token(made.airflow), "url": url}])
    page = context.new_page()
    page.goto(url, timeout=SLOW)
    until(page, picture.ready, timeout=SLOW)
    page.wait_for_load_state("networkidle", timeout=SLOW)
    taken = OUT / f"{name}.png"
    page.screenshot(path=taken, animations="disabled")
    context.close()
    print(f"{taken.relative_to(ROOT)}: {taken.stat().st_size:,} bytes", flush=True)
    if taken.stat().st_size > MAX_BYTES:
        sys.exit(f"{taken} has more than {MAX_BYTES:,} bytes. Make the window smaller.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"unknown picture {', '.join(sorted(unknown))}; there are: {', '.join(PICTURES)}")
    if (path := browser_path()) is None:
        sys.exit("no browser on this machine (Debian: apt-get install chromium)")
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright, site(pathlib.Path(home)) as made:
        browser = playwright.chromium.launch(executable_path=path, timeout=SLOW)
        for dag_id in ("large_batch", "image_classifier"):  # they take a minute or two
            made.begin(dag_id)
        for name in names:
            take(browser, made, name)


if __name__ == "__main__":
    main()
