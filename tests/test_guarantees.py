"""Generated pages are up to date, and each guarantee names a test that runs with a TrainJob."""

from __future__ import annotations

import pathlib

import pytest

from scripts import endings, installation, suites
from scripts.endings import Guarantee, code_of, guarantees, runs_with_a_trainjob
from scripts.pages import Pages

SCRIPTS = [(script, page) for script in (endings.PAGES, installation.PAGES, suites.PAGES) for page in script.pages]


@pytest.mark.parametrize(("script", "page"), SCRIPTS, ids=lambda value: getattr(value, "name", ""))
def test_page_is_up_to_date(script: Pages, page: pathlib.Path) -> None:
    assert page.read_text() == script.updated(page), f"run `python {script.script}`"


def test_suite_of_each_test_is_what_its_code_says(request: pytest.FixtureRequest) -> None:
    """What `scripts/suites.py` reads from the code is what pytest selects, for the tests of guarantees."""
    named = {test for guarantee in guarantees() for test in guarantee.tests}
    for item in request.session.items:
        if (test := item.nodeid.partition("[")[0]) in named:
            assert suites.is_thorough(test) is (item.get_closest_marker("thorough") is not None), test


@pytest.mark.parametrize("guarantee", guarantees(), ids=lambda guarantee: guarantee.text[:60])
def test_guarantee_names_tests_and_one_runs_with_a_trainjob(guarantee: Guarantee) -> None:
    assert guarantee.tests
    for test in guarantee.tests:
        assert "def test_" in code_of(test), f"{test} is not a test"
    if not guarantee.not_for_trainjobs:
        assert any(map(runs_with_a_trainjob, guarantee.tests)), f"none of {guarantee.tests} runs with a TrainJob"
