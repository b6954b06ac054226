"""Tests of benchmarks/plot.py, without matplotlib: the tables have what plots need, and plots are up to date."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from tests.test_docs import ROOT, script

plot = script(ROOT / "benchmarks" / "plot.py")
README: str = plot.README.read_text()
TABLE = """
# Other

| jobs | s |
|---|---|
| 7 | 7 |

## Waiting

| waits | jobs | s |
| --- | --- | --- |
| ours | 1,000 | -0.3 |
| ours | 10 | 2 |
| ours | 100 | - |
| peer | 10 | 5,000.5 |
| broken | 10 | fast |

| jobs | MiB |
| --- | --- |
| 10 | 4 |

### Details
"""


def line(**fields: Any) -> Any:
    return plot.Line(**{"label": "ours", "y": "s", "where": ("waits", "ours"), **fields})


def example(section: str = "Waiting", **fields: Any) -> Any:
    """A plot of one line."""
    return plot.Plot("example", section, "", (plot.Panel("", "jobs", "", (line(**fields),)),))


@pytest.mark.parametrize(
    ("drawn", "points"),
    [
        (example(), [(10, 2), (1000, -0.3)]),
        (example(where=("waits", "peer")), [(10, 5000.5)]),
        (example(y="MiB", where=None), [(10, 4)]),
        (example("Other", where=None), [(7, 7)]),
    ],
    ids=["sorted, without unmeasured values", "another row", "the table with these columns", "another section"],
)
def test_points_of_a_table(drawn: Any, points: list[tuple[float, float]]) -> None:
    assert plot.data(drawn, TABLE) == [[points]]


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (example("Sleeping"), "section 'Sleeping': the section is missing"),
        (example("Details"), "section 'Details': no table has the columns jobs, s, waits"),
        (example(y="CPU"), "section 'Waiting': no table has the columns CPU"),
        (example(where=("waits", "other")), "section 'Waiting': column 's': no row for 'ours'"),
        (
            example(where=("waits", "broken")),
            "section 'Waiting': column 's': could not convert string to float: 'fast'",
        ),
    ],
)
def test_error_names_file_section_and_column(drawn: Any, message: str) -> None:
    with pytest.raises(plot.TableError, match=re.escape(message)) as raised:
        plot.data(drawn, TABLE)
    assert str(raised.value).startswith("benchmarks/README.md")


@pytest.mark.parametrize("drawn", plot.PLOTS, ids=lambda drawn: drawn.name)
def test_plot_is_up_to_date(drawn: Any) -> None:
    assert drawn.file.exists(), "run `make plots`"
    assert plot.digest(drawn, README) in drawn.file.read_text(), (
        f"the tables of benchmarks/README.md or the definition of this plot have changed since {drawn.file.name} was "
        "drawn: run `make plots`, look at it, and check the text that README shows in its place"
    )


def test_digest_changes_with_the_numbers_and_the_definition() -> None:
    digests = {
        plot.digest(example(), TABLE),
        plot.digest(example(), TABLE.replace("1,000", "1,001")),
        plot.digest(example(label="peer"), TABLE),
    }
    assert len(digests) == 3
    assert plot.digest(example(), TABLE.replace("5,000.5", "6,000")) in digests


def test_readme_shows_every_plot_with_a_text() -> None:
    shown = re.findall(r"!\[([^]]{40,})\]\(plots/([\w-]+)\.svg\)", README)
    names = sorted(drawn.name for drawn in plot.PLOTS)
    assert sorted(name for _, name in shown) == names
    assert sorted(file.stem for file in plot.FOLDER.iterdir()) == names


def test_plot_is_shown_in_the_section_of_its_table() -> None:
    for drawn in plot.PLOTS:
        section = re.split(rf"^#+ {re.escape(drawn.section)}$", README, flags=re.MULTILINE)[1]
        assert f"(plots/{drawn.name}.svg)" in re.split(r"^#", section, flags=re.MULTILINE)[0]


def test_plots_are_small_and_contain_text() -> None:
    for drawn in plot.PLOTS:
        svg = drawn.file.read_text()
        assert len(svg) < 60_000
        for part in (drawn.title, *(text for panel in drawn.panels for text in (panel.title, panel.x_label))):
            assert f">{html.escape(part, quote=False)}</text>" in svg
