"""Values that can be stored as an XCom under each key of a dict (`multiple_outputs`)."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.text.xcom_values import storable_outputs


@pytest.mark.parametrize("key", ["loss", "a b", "é", "x" * 512, "train/loss", "a.b", "..a", ".hidden/x"])
def test_keys_that_become_xcoms(key: str) -> None:
    assert storable_outputs({key: 1}) == ({key: 1}, ())


@pytest.mark.parametrize("key", ["", "x" * 513, "a?b", "a#b", "a\nb", "\x7f", ".", "..", "../x", "a/..", "a/./b"])
def test_keys_that_are_left_out_with_a_warning(key: str) -> None:
    kept, (warning,) = storable_outputs({key: 1, "loss": 0.5})
    assert kept == {"loss": 0.5}
    assert "is left out: a key of multiple_outputs has 1 to 512 characters" in warning
    assert len(warning) < 250


def test_empty_key_is_named_in_quotes() -> None:
    _, (warning,) = storable_outputs({"": 1})
    assert warning.startswith("'' is left out")
