"""Generated pages are up to date, and each guarantee names a test that runs with a TrainJob."""

from __future__ import annotations

import pathlib

import pytest

from scripts import installation, suites
from scripts.end_rules import Guarantee, code_of, guarantees, runs_with_a_trainjob


@pytest.mark.parametrize("page", installation.PAGES.pages, ids=lambda page: str(page.name))
def test_page_is_up_to_date(page: pathlib.Path) -> None:
    assert page.read_text() == installation.PAGES.updated(page), "run `python scripts/installation.py`"


def test_suites_have_the_features_and_what_waits() -> None:
    printed = suites.suites()
    assert "- worker follows a training with its code\n" in printed
    assert "| `tests/e2e/` | Airflow's processes |" in printed


def test_suite_of_each_test_is_what_its_code_says(request: pytest.FixtureRequest) -> None:
    """What `scripts/suites.py` reads from the code is what pytest selects, for the tests of guarantees.

    `make test` leaves a test out if it leaves out each of its parameters.
    """
    named = {test for guarantee in guarantees() for test in guarantee.tests}
    left_out: dict[str, bool] = {}
    for item in request.session.items:
        if (test := item.nodeid.partition("[")[0]) in named and not item.get_closest_marker("sampled"):
            left_out[test] = left_out.get(test, True) and item.get_closest_marker("thorough") is not None
    assert left_out == {test: suites.is_thorough(test) for test in left_out}


@pytest.mark.parametrize("guarantee", guarantees(), ids=lambda guarantee: guarantee.text[:60])
def test_guarantee_names_tests_and_one_runs_with_a_trainjob(guarantee: Guarantee) -> None:
    assert guarantee.tests
    for test in guarantee.tests:
        assert "def test_" in code_of(test), f"{test} is not a test"
    if not guarantee.not_for_trainjobs:
        assert any(map(runs_with_a_trainjob, guarantee.tests)), f"none of {guarantee.tests} runs with a TrainJob"
