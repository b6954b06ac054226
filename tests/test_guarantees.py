"""The generated pages of the guarantees are up to date, and each guarantee names a test that runs with a TrainJob."""

from __future__ import annotations

import pathlib

import pytest

from scripts.endings import PAGES, Guarantee, code_of, guarantees, runs_with_a_trainjob


@pytest.mark.parametrize("page", PAGES.pages, ids=lambda page: page.name)
def test_page_is_up_to_date(page: pathlib.Path) -> None:
    assert page.read_text() == PAGES.updated(page), "run `python scripts/endings.py`"


@pytest.mark.parametrize("guarantee", guarantees(), ids=lambda guarantee: guarantee.text[:60])
def test_guarantee_names_tests_and_one_runs_with_a_trainjob(guarantee: Guarantee) -> None:
    assert guarantee.tests
    for test in guarantee.tests:
        assert "def test_" in code_of(test), f"{test} is not a test"
    if not guarantee.not_for_trainjobs:
        assert any(map(runs_with_a_trainjob, guarantee.tests)), f"none of {guarantee.tests} runs with a TrainJob"
