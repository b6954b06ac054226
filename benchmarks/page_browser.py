"""What the training page takes in a browser: a training of 256 replicas with series at their limit, and a small one.

    python benchmarks/page_browser.py [--updates 20]

Needs the extra `browser` and Chromium. A real API server has two deferred tasks, whose statuses are written into the
database: 256 replicas, of which 64 restart and are listed, with 32 metrics; and one replica with one metric. For each,
Chromium opens the page, updates it with changed and with unchanged data, scrolls it, draws every curve on the other
scale, and moves the mouse over a curve. CPU is that of the page's main thread, which runs the scripts and the layout:
below 16 ms, the page can be drawn 60 times a second. The elapsed times and the long tasks, which take more than 50 ms
of elapsed time, also depend on the machine's other load. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import machine, quantile, table
from harness.api_server import ApiServer, api_server

from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.browser.site import browser_path

PATIENCE = 300_000  # milliseconds that a page may take
FRAMES = 120  # of each scroll, down and up
HEAD = [
    "replicas", "series", "load", "step", "n", "CPU ms p50", "max", "elapsed ms p50", "max", "long tasks",
    "frame ms p50", "p99",
]  # fmt: skip
#: Counts tasks above 50 ms, and the time between two frames while `frames` is a list.
WATCH = """
window.longTasks = 0; window.frames_ = null;
new PerformanceObserver((list) => { longTasks += list.getEntries().length; }).observe({ entryTypes: ["longtask"] });
let last = 0;
(function frame(now) { frames_?.push(now - last); last = now; requestAnimationFrame(frame); })(0);
"""
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
SCROLL = """async (count) => {
  const whole = document.documentElement.scrollHeight - innerHeight;
  window.frames_ = [];
  for (let i = 0; i <= count; i++) {
    scrollTo(0, whole * (1 - Math.abs(1 - 2 * i / count)));
    await new Promise(requestAnimationFrame);
  }
  const found = frames_.slice(1);
  window.frames_ = null;
  return found;
}"""


class Job:
    """A training that reports metrics.

    :param replicas: their number.
    :param restarting: how many of them restart.
    :param names: number of metrics.
    """

    def __init__(self, replicas: int, restarting: int, names: int) -> None:
        self.replicas, self.restarting, self.names = replicas, restarting, names
        self.metrics, self.step = TrainingMetrics(), 0
        self.train(2000)

    def train(self, steps: int) -> None:
        for step in range(self.step, self.step + steps):
            values = {"step": step, **{f"metric_{n:02}": 1 + step * 1.2345678 / (n + 1) for n in range(self.names)}}
            self.metrics.read_line("Master 0", f"KTRAIN_METRIC {json.dumps(values)}", time.time())
        self.step += steps

    def status(self) -> dict[str, Any]:
        now = time.time()
        states = ["CrashLoopBackOff"] * self.restarting + ["Running"] * (self.replicas - self.restarting)
        rows = [["Worker", n, f"training-worker-{n}", f"node-{n // 8:03}", 8, s, 0] for n, s in enumerate(states)]
        return TrainingStatus(
            job={"kind": "PyTorchJob", "namespace": "default", "name": "training", "uid": "u"},
            try_number=1, written_at=now, host="trigger", phases=[("Queued", now - 900), ("Running", now - 600)],
            rows=rows, last_lines={f"Worker {n}": f"step {self.step} " * 9 for n in range(min(self.replicas, 16))},
            metrics=self.metrics, usage={"held": 1e6 + self.step, "wasted": 1e4, "queued": 900.0},
        ).to_dict()  # fmt: skip


@dataclass
class Step:
    """What one kind of step took.

    :param cpu: milliseconds of the main thread, of each.
    :param elapsed: milliseconds, of each.
    :param frames: milliseconds between two frames.
    :param long_tasks: their number.
    """

    cpu: list[float] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)
    frames: list[float] = field(default_factory=list)
    long_tasks: int = 0


class Page:
    """A page in Chromium whose main thread is measured."""

    def __init__(self, context: Any) -> None:
        context.set_default_timeout(PATIENCE)
        context.add_init_script(WATCH)
        self.tab = context.new_page()
        self._protocol = context.new_cdp_session(self.tab)
        self._protocol.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.steps: dict[str, Step] = {}

    def take(self, name: str, action: Callable[[], Any]) -> Any:
        """Do one step, until the page is drawn."""
        step, tasks = self.steps.setdefault(name, Step()), self._long_tasks()
        used, began = self._cpu(), time.monotonic()
        answer = action()
        self.tab.evaluate(PAINTED)
        step.elapsed.append(1000 * (time.monotonic() - began))
        step.cpu.append(1000 * (self._cpu() - used))
        step.long_tasks += self._long_tasks() - tasks
        return answer

    def scroll(self) -> None:
        step = self.steps.setdefault("scroll", Step())
        tasks, used, began = self._long_tasks(), self._cpu(), time.monotonic()
        step.frames += self.tab.evaluate(SCROLL, FRAMES)
        step.elapsed.append(1000 * (time.monotonic() - began) / FRAMES)
        step.cpu.append(1000 * (self._cpu() - used) / FRAMES)
        step.long_tasks += self._long_tasks() - tasks

    def _long_tasks(self) -> int:
        return int(self.tab.evaluate("window.longTasks ?? 0"))

    def _cpu(self) -> float:
        """Seconds of the main thread."""
        metrics = self._protocol.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def measure(page: Page, server: ApiServer, task_id: str, job: Job, updates: int) -> None:
    """Take all steps."""
    tab = page.tab

    def load() -> None:
        tab.goto(f"{server.url}/ktrain/training?dag_id=bench&run_id=r&task_id={task_id}&map_index=-1")
        while not tab.evaluate("served.size && charts.size"):
            tab.wait_for_timeout(50)

    page.take("load", load)
    tab.evaluate("clearTimeout(timer)")  # updates happen only when they are measured
    for _ in range(updates):
        page.take("nothing: the measurement itself", lambda: tab.evaluate("0"))
        job.train(10)
        server.rewrite(task_id, **job.status())
        page.take("update, changed", lambda: tab.evaluate("update().then(() => clearTimeout(timer))"))
        page.take("update, unchanged", lambda: tab.evaluate("update().then(() => clearTimeout(timer))"))
    page.scroll()
    for scale in range(2):
        for number in range(tab.locator("button.scale").count()):
            click = f"document.querySelectorAll('button.scale')[{number}].click()"
            page.take("logarithmic scale" if not scale else "linear scale", partial(tab.evaluate, click))
    tab.evaluate("document.querySelector('.plot').scrollIntoView()")
    box = tab.locator(".plot").first.bounding_box()
    for x in range(80, int(box["width"]) - 10, 5):
        y = box["y"] + box["height"] / 2
        page.take("mouse over a curve", partial(tab.mouse.move, box["x"] + x, y))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return print("skipped: needs the extra `browser`: pip install '.[browser]'")
    if (chosen := browser_path()) is None:
        return print("skipped: no Chromium on this machine (Debian: apt-get install chromium)")
    jobs = {"large": Job(256, 64, 32), "small": Job(1, 0, 1)}
    rows: list[list[Any]] = []
    with api_server({name: job.status() for name, job in jobs.items()}) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chosen, timeout=PATIENCE)
        print(f"{datetime.date.today()}; {machine()}; Chromium {browser.version}\n", flush=True)
        for task_id, job in jobs.items():
            load = [os.getloadavg()[0]]
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.add_cookies([{"name": "_token", "value": server.token, "url": server.url}])
            page = Page(context)
            measure(page, server, task_id, job, args.updates)
            load.append(os.getloadavg()[0])
            loads = f"{min(load):.0f} to {max(load):.0f}"
            context.close()
            for name, step in page.steps.items():
                rows.append([
                    job.replicas, job.names, loads, name, len(step.cpu), quantile(step.cpu, 0.5), max(step.cpu),
                    quantile(step.elapsed, 0.5), max(step.elapsed), step.long_tasks,
                    quantile(step.frames, 0.5), quantile(step.frames, 0.99),
                ])  # fmt: skip
        browser.close()
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
