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


# color, marker and width of a line, in the colors of Okabe and Ito, which people with any colour vision can tell apart
OURS, VERMILION = ("#0072B2", "o", 3.0), ("#D55E00", "s", 1.5)
ORANGE, GREEN, BLACK = ("#E69F00", "^", 1.5), ("#009E73", "D", 1.5), ("black", "x", 1.5)


class Line(NamedTuple):
    """One line of a panel.

    :param label: what the legend shows.
    :param y: the column of the values.
    :param look: its color, marker and width.
    :param where: only rows with this text in this column; default: all rows.
    """

    label: str
    y: str
    look: tuple[str, str, float] = OURS
    where: tuple[str, str] | None = None


class Panel(NamedTuple):
    """One pair of axes.

    :param title: the quantity and its unit.
    :param x: the column of the horizontal axis, whose label is `x_label`.
    :param lines: in the legend's order.
    :param log: both axes are logarithmic; otherwise linear.
    :param noise: values below this one can't be distinguished from 0.
    :param limit: a horizontal line: its value and its label.
    """

    title: str
    x: str
    x_label: str
    lines: tuple[Line, ...]
    log: bool = False
    noise: float | None = None
    limit: tuple[float, str] | None = None


class Plot(NamedTuple):
    """One file.

    :param name: of the file, without its ending.
    :param section: the heading in README under which its table is.
    :param title: the result, as a sentence.
    """

    name: str
    section: str
    title: str
    panels: tuple[Panel, ...]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.svg"


def waiting(title: str, y: str, noise: float | None = None) -> Panel:
    """All contenders of the benchmark of waiting; ours is the last one and lies on top."""
    looks = {
        "KubernetesPodTrigger": VERMILION, "KubernetesJobTrigger": ORANGE, "plain poller": GREEN, "bare watch": BLACK,
    }  # fmt: skip
    peers = [Line(name, y, look, ("waits", name)) for name, look in looks.items()]
    ours = Line("this provider", y, where=("waits", "TrainingJobTrigger"))
    return Panel(title, "jobs", "jobs that wait in one event loop", (*peers, ours), noise=noise)


WAITING = Plot("waiting", "Waiting", "Waiting jobs cost this provider no requests and no measurable CPU", (
    waiting("CPU, s per minute above an idle loop", "CPU s/min above idle", noise=0.5),
    waiting("requests per minute", "requests/min"),
    waiting("memory, MiB above an idle loop", "MiB above idle"),
))  # fmt: skip
LARGE_JOBS = Plot("large-jobs", "Large jobs", "A change of a pod takes less than 1 ms in jobs of up to 5,000 pods", (
    Panel(
        "a change of a pod: median time in the event loop, ms", "pods of the job", "pods of the job",
        (Line("before", "before: a change, median ms", VERMILION), Line("now", "a change, median ms")),
        log=True, limit=(1, "target: 1 ms"),
    ),
    Panel(
        "first list of all pods: longest time in the event loop, ms", "pods of the job", "pods of the job",
        (Line("now", "first list, longest ms"),), log=True, limit=(10, "target: 10 ms"),
    ),
))  # fmt: skip
LOG_POSITIONS = Plot("log-positions", "Log positions", "Log positions never take more than 32 KiB", (
    Panel(
        "log positions in a trigger's arguments, bytes", "containers", "containers",
        (Line("now", "bytes"),), log=True, limit=(32 * 1024, "limit: 32 KiB"),
    ),
))  # fmt: skip
FLEET = Plot(
    "fleet", "Several triggerers, and other jobs in the namespace",
    "Each triggerer receives the changes of all its Airflow's jobs; other jobs cost it nothing",
    (
        Panel(
            "to all triggerers, KB/s while 10 jobs/s change", "triggerers", "triggerers",
            (Line("now", "KB/s while jobs change", where=("other jobs", "0")),),
        ),
        Panel(
            "memory of a triggerer, MiB above idle", "jobs each", "its own jobs",
            (Line("now", "MiB above idle", where=("triggerers", "1")),),
        ),
        Panel(
            "the same with 100 jobs of its own", "other jobs", "jobs of other owners in the namespace",
            (Line("now", "MiB above idle", where=("jobs each", "100")),),
        ),
    ),
)  # fmt: skip
PLOTS = (WAITING, LARGE_JOBS, LOG_POSITIONS, FLEET)


def rows(text: str, section: str, columns: list[str]) -> list[dict[str, str]]:
    """The rows of the first table of a section that has all these columns.

    :raises TableError: the section or its table is missing.
    """
    found = re.search(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise TableError("the section is missing")
    missing = columns
    for table in re.findall(r"(?:^\|.*\n)+", found[1], re.MULTILINE):
        head, _, *body = ([cell.strip() for cell in row.strip()[1:-1].split("|")] for row in table.splitlines())
        lacks = [column for column in columns if column not in head]
        if not lacks:
            return [dict(zip(head, cells, strict=True)) for cells in body]
        missing = min(missing, lacks, key=len)
    raise TableError(f"no table has the columns {', '.join(missing)}")


def points(table: list[dict[str, str]], panel: Panel, line: Line) -> list[Point]:
    """The points of a line. A cell with `-` is a value that wasn't measured.

    :raises TableError: the line has no points, or a cell isn't a number.
    """
    chosen = [row for row in table if line.where is None or row[line.where[0]] == line.where[1]]
    cells = [(row[panel.x], row[line.y]) for row in chosen if row[line.y] != "-"]
    if not cells:
        raise TableError(f"column {line.y!r}: no row for {line.label!r}")
    try:
        return sorted((float(x.replace(",", "")), float(y.replace(",", ""))) for x, y in cells)
    except ValueError as error:
        raise TableError(f"column {line.y!r}: {error}") from error


def data(plot: Plot, text: str) -> list[list[list[Point]]]:
    """The points of each panel and line.

    :param text: of benchmarks/README.md.
    :raises TableError: README lacks a section, a table, a column or a row, or a cell isn't a number.
    """
    used = [(panel, line) for panel in plot.panels for line in panel.lines]
    columns = [name for panel, line in used for name in (panel.x, line.y, *(line.where or ())[:1])]
    try:
        table = rows(text, plot.section, list(dict.fromkeys(columns)))
        return [[points(table, panel, line) for line in panel.lines] for panel in plot.panels]
    except TableError as error:
        raise TableError(f"benchmarks/README.md, section {plot.section!r}: {error}") from error


def digest(plot: Plot, text: str) -> str:
    """What a plot is drawn from: its definition and its numbers."""
    return "sha256:" + hashlib.sha256(repr((plot, data(plot, text))).encode()).hexdigest()


def draw(plot: Plot, text: str) -> None:
    """Write the file of a plot."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(STYLE)
    figure = Figure(figsize=(10.5, 3.9) if len(plot.panels) > 1 else (6.5, 3.6))
    all_axes = figure.subplots(1, len(plot.panels), squeeze=False)[0]
    figure.suptitle(plot.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for axes, panel, lines in zip(all_axes, plot.panels, data(plot, text), strict=True):
        draw_panel(axes, panel, lines)
    handles, labels = all_axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0, 0.93), ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95 if len(labels) > 1 else 1))
    metadata = {"Title": plot.title, "Description": digest(plot, text), "Creator": None, "Date": None}
    figure.savefig(plot.file, metadata=metadata)


def draw_panel(axes: Any, panel: Panel, lines: list[list[Point]]) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.margins(y=0.1)
    if panel.log:
        axes.set(xscale="log", yscale="log")
    else:
        axes.update_datalim([(lines[0][0][0], 0)])  # the vertical axis contains 0
    axes.set_xticks(sorted({x for found in lines for x, _ in found}))
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if panel.limit:
        value, label = panel.limit
        axes.axhline(value, color="black", linestyle="--", linewidth=1)
        axes.text(0.25, value * 1.12, label, transform=axes.get_yaxis_transform())  # x is a part of the axes' width
    for line, found in zip(panel.lines, lines, strict=True):
        color, marker, width = line.look
        axes.plot(*zip(*found, strict=True), label=line.label, color=color, marker=marker, linewidth=width, zorder=3)
    if panel.noise:
        axes.axhspan(-panel.noise, panel.noise, color="0.85", zorder=0, label="noise")


def main() -> None:
    text = README.read_text()
    for plot in PLOTS:
        draw(plot, text)
        print(f"{plot.file}: {plot.file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
