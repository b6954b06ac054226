"""Records a terminal session of `ktrain run` for README: docs/run.svg, and the same text in README.

    python scripts/record_run.py

It runs the commands of SESSION on a terminal of its own, in a copy of the checkout's examples. The SVG shows
each line when it was printed; pauses are cut to MAX_PAUSE seconds.
"""

import html
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
README, SVG = ROOT / "README.md", ROOT / "docs" / "run.svg"
SESSION = ("ktrain run --local --code examples/demo -- python train.py --epochs 3",)
MARKS = "<!-- recorded by scripts/record_run.py -->\n", "<!-- end of the recording -->\n"
MAX_PAUSE = 1.5  # seconds
WIDTH = 118  # characters of a line in the SVG
CHAR, LINE, MARGIN = 7.8, 18, 16  # pixels
NOISE = re.compile(r"Name:|Address: |^$")  # lines of operators' init containers


class Shown(NamedTuple):
    """A line of the session, and when it was printed in seconds."""

    at: float
    text: str


def record(command: str, directory: pathlib.Path) -> tuple[list[Shown], int]:
    """Run a command on a pseudo-terminal. Returns what it printed, and its exit status."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": str(WIDTH),
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    arguments = [sys.executable, "-m", "airflow_provider_ktrain.cli", *command.split()[1:]]
    begun, lines = time.monotonic(), []
    with subprocess.Popen(arguments, cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        with open(ours, encoding="utf-8", errors="replace", newline="") as terminal:
            try:
                for line in terminal:
                    lines.append(Shown(time.monotonic() - begun, line.rstrip("\r\n")))
            except OSError:  # Linux reports the end of a pseudo-terminal as an I/O error
                pass
    return lines, run.returncode


def session() -> list[Shown]:
    """All commands, their output and a last prompt; pauses are cut."""
    shown, clock = [], 0.0
    with tempfile.TemporaryDirectory(prefix="training-") as made:
        directory = pathlib.Path(made)
        shutil.copytree(ROOT / "examples" / "demo", directory / "examples" / "demo")
        for command in SESSION:
            shown.append(Shown(clock, f"$ {command}"))
            lines, status = record(command, directory)
            if status:
                sys.exit("\n".join(line.text for line in lines) + f"\n{command} ended with status {status}")
            before = 0.0
            for line in lines:
                clock, before = clock + min(line.at - before, MAX_PAUSE), line.at
                text = re.sub(r"\S*/training-\w+", "~/training", line.text)
                if not NOISE.search(text):
                    shown.append(Shown(clock, text))
    shown.append(Shown(clock + 0.5, "$"))
    return shown


def svg(lines: list[Shown]) -> str:
    """An SVG that shows each line from its time on. Viewers without animation show all of them."""
    cut = [Shown(at, text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}\u2026") for at, text in lines]
    width, height = MARGIN * 2 + CHAR * WIDTH, MARGIN * 2 + LINE * len(cut)
    rows = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (n + 0.75):.0f}" class="{_class(text)}" '
        f'style="animation-delay:{at:.2f}s" xml:space="preserve">{html.escape(text)}</text>'
        for n, (at, text) in enumerate(cut)
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" role="img" \
aria-label="A terminal session of ktrain run">
<style>
rect {{ fill: #1b1f24 }}
text {{ fill: #d6dbe1; font: 13px ui-monospace, Menlo, Consolas, monospace; animation: show 0s both }}
.command {{ fill: #7ee787 }}
@keyframes show {{ from {{ visibility: hidden }} to {{ visibility: visible }} }}
</style>
<rect width="100%" height="100%" rx="8"/>
{rows}
</svg>
"""


def _class(text: str) -> str:
    return "command" if text.startswith("$") else "line"


def main() -> None:
    lines = session()
    SVG.write_text(svg(lines))
    begin, end = MARKS
    readme = README.read_text()
    head, _, rest = readme.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        sys.exit(f"README has no lines {begin.strip()} and {end.strip()}")
    text = "\n".join(line.text for line in lines[:-1])
    README.write_text(f"{head}{begin}```console\n{text}\n```\n{end}{tail}")
    print(f"{len(lines)} lines recorded: {SVG.relative_to(ROOT)} and {README.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
