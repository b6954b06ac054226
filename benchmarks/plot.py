"""Draw how costs grow, from the tables of benchmarks/README.md: `make plots` writes benchmarks/plots/*.svg.

Needs the extra `bench` (matplotlib). The tables contain the only copy of the numbers. Each plot contains a digest of
what it was drawn from, and `tests/test_plots.py` checks that it is that of the tables.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

README = Path(__file__).parent / "README.md"
FOLDER = Path(__file__).parent / "plots"
WIDE, NARROW = (10.5, 3.9), (6.5, 3.6)  # inches
STYLE = {
    "svg.hashsalt": "ktrain",  # the same ids in each run
    "svg.fonttype": "none",  # text stays text
    "font.sans-serif": ["DejaVu Sans"],
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": "0.9", "xtick.labelsize": 9, "ytick.labelsize": 9,
}  # fmt: skip
Point = tuple[float, float]


class TableError(ValueError):
    """README doesn't contain what a plot needs."""


class Look(NamedTuple):
    """The color of a line, the marker of its points as matplotlib names it, and the width in points."""

    color: str
    marker: str
    width: float = 1.5


# the colors of Okabe and Ito, which people with any kind of colour vision can tell apart
OURS = Look("#0072B2", "o", 3)
VERMILION, ORANGE, GREEN, BLACK = Look("#D55E00", "s"), Look("#E69F00", "^"), Look("#009E73", "D"), Look("black", "x")


class Line(NamedTuple):
    """One line of a panel.

    :param label: what the legend shows.
    :param y: the column of the values.
    :param look: how it is drawn.
    :param where: only rows with this text in this column; default: all rows.
    """

    label: str
    y: str
    look: Look = OURS
    where: tuple[str, str] | None = None


class Panel(NamedTuple):
    """One pair of axes.

    :param title: the quantity and its unit.
    :param lines: in the legend's order.
    :param log: both axes are logarithmic; otherwise linear.
    :param noise: values below this one can't be distinguished from 0.
    :param limit: a horizontal line: its value and its label.
    """

    title: str
    lines: tuple[Line, ...]
    log: bool = False
    noise: float | None = None
    limit: tuple[float, str] | None = None


class Plot(NamedTuple):
    """One file.

    :param name: of the file, without its ending.
    :param section: the heading in README under which its table is.
    :param title: the result, as a sentence.
    :param x: the column of the horizontal axis, whose label is `x_label`.
    """

    name: str
    section: str
    title: str
    x: str
    x_label: str
    panels: tuple[Panel, ...]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.svg"

    @property
    def columns(self) -> list[str]:
        """The columns that its table must have."""
        lines = [line for panel in self.panels for line in panel.lines]
        named = [self.x, *(line.y for line in lines), *(line.where[0] for line in lines if line.where)]
        return list(dict.fromkeys(named))


def contenders(y: str) -> tuple[Line, ...]:
    """A line for each contender of the benchmark of waiting; ours is the last one and lies on top."""
    return (
        Line("KubernetesPodTrigger", y, VERMILION, ("waits", "KubernetesPodTrigger")),
        Line("KubernetesJobTrigger", y, ORANGE, ("waits", "KubernetesJobTrigger")),
        Line("plain poller", y, GREEN, ("waits", "plain poller")),
        Line("bare watch", y, BLACK, ("waits", "bare watch")),
        Line("this provider", y, where=("waits", "TrainingJobTrigger")),
    )


WAITING = Plot(
    "waiting", "Waiting", "Waiting jobs cost this provider no requests and no measurable CPU",
    "jobs", "jobs that wait in one event loop",
    (
        Panel("CPU, s per minute above an idle loop", contenders("CPU s/min above idle"), noise=0.5),
        Panel("requests per minute", contenders("requests/min")),
        Panel("memory, MiB above an idle loop", contenders("MiB above idle")),
    ),
)  # fmt: skip
LARGE_JOBS = Plot(
    "large-jobs", "Large jobs", "A change of a pod takes less than 1 ms, in jobs of up to 5,000 pods",
    "pods of the job", "pods of the job",
    (
        Panel(
            "a change of a pod: median time in the event loop, ms",
            (Line("before", "before: a change, median ms", VERMILION), Line("now", "a change, median ms")),
            log=True, limit=(1, "target: 1 ms"),
        ),
        Panel(
            "first list of all pods: longest time in the event loop, ms",
            (Line("now", "first list, longest ms"),),
            log=True, limit=(10, "target: 10 ms"),
        ),
    ),
)  # fmt: skip
LOG_POSITIONS = Plot(
    "log-positions", "Log positions", "Log positions never take more than 32 KiB", "containers", "containers",
    (
        Panel(
            "log positions in a trigger's arguments, bytes",
            (Line("log positions", "bytes"),),
            log=True, limit=(32 * 1024, "limit: 32 KiB"),
        ),
    ),
)  # fmt: skip
PLOTS = (WAITING, LARGE_JOBS, LOG_POSITIONS)


def rows(text: str, section: str, columns: list[str]) -> list[dict[str, str]]:
    """The rows of the first table of a section that has all these columns.

    :raises TableError: there is no such section or table.
    """
    found = re.search(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise TableError(f"benchmarks/README.md has no section {section!r}")
    missing = columns
    for table in re.findall(r"(?:^\|.*\n)+", found[1], re.MULTILINE):
        head, _, *body = ([cell.strip() for cell in row.strip()[1:-1].split("|")] for row in table.splitlines())
        lacks = [column for column in columns if column not in head]
        if not lacks:
            return [dict(zip(head, cells, strict=True)) for cells in body]
        missing = min(missing, lacks, key=len)
    raise TableError(f"benchmarks/README.md, section {section!r}: no table has the columns {', '.join(missing)}")


def points(table: list[dict[str, str]], plot: Plot, line: Line) -> list[Point]:
    """The points of a line. A cell with `-` is a value that wasn't measured.

    :raises TableError: there is no point, or a cell isn't a number.
    """
    place = f"benchmarks/README.md, section {plot.section!r}, column {line.y!r}"
    chosen = [row for row in table if line.where is None or row[line.where[0]] == line.where[1]]
    cells = [(row[plot.x], row[line.y]) for row in chosen if row[line.y] != "-"]
    try:
        found = [(float(x.replace(",", "")), float(y.replace(",", ""))) for x, y in cells]
    except ValueError as error:
        raise TableError(f"{place}: {error}") from error
    if not found:
        raise TableError(f"{place}: no row for {line.label!r}")
    return sorted(found)


def data(plot: Plot, text: str) -> list[list[list[Point]]]:
    """The points of each panel and line.

    :param text: of benchmarks/README.md.
    :raises TableError: README lacks a section, a table, a column or a row, or a cell isn't a number.
    """
    table = rows(text, plot.section, plot.columns)
    return [[points(table, plot, line) for line in panel.lines] for panel in plot.panels]


def digest(plot: Plot, text: str) -> str:
    """What a plot is drawn from: its definition and its numbers."""
    return "sha256:" + hashlib.sha256(repr((plot, data(plot, text))).encode()).hexdigest()


def draw(plot: Plot, text: str) -> None:
    """Write the file of a plot."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(STYLE)
    figure = Figure(figsize=WIDE if plot.panels[1:] else NARROW)
    all_axes = figure.subplots(1, len(plot.panels), squeeze=False)[0]
    figure.suptitle(plot.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for axes, panel, lines in zip(all_axes, plot.panels, data(plot, text), strict=True):
        draw_panel(axes, panel, lines)
        axes.set_xlabel(plot.x_label)
    handles, labels = all_axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0, 0.93), ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95 if len(labels) > 1 else 1))
    metadata = {"Title": plot.title, "Description": digest(plot, text), "Creator": None, "Date": None}
    figure.savefig(plot.file, metadata=metadata)


def draw_panel(axes: Any, panel: Panel, lines: list[list[Point]]) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    axes.set_title(panel.title, loc="left", fontsize=10)
    if panel.log:
        axes.set(xscale="log", yscale="log")
    axes.margins(y=0.1)
    axes.set_xticks(sorted({x for found in lines for x, _ in found}))
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if panel.limit:
        value, label = panel.limit
        axes.axhline(value, color="black", linestyle="--", linewidth=1)
        axes.text(0.25, value * 1.12, label, transform=axes.get_yaxis_transform())  # x is a part of the axes' width
    for line, found in zip(panel.lines, lines, strict=True):
        axes.plot(
            *zip(*found, strict=True), label=line.label, color=line.look.color, marker=line.look.marker,
            linewidth=line.look.width, zorder=3,
        )  # fmt: skip
    if panel.noise:
        axes.axhspan(-panel.noise, panel.noise, color="0.85", zorder=0, label="noise")


def main() -> None:
    text = README.read_text()
    for plot in PLOTS:
        draw(plot, text)
        print(f"{plot.file}: {plot.file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
