"""Text from logs and responses is changed so that it can be stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.text.output import (
    MAX_LINE_CHARS,
    clean,
    clipped,
    ends_of_chain,
    readable_size,
    shortened,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()))
NESTED = st.recursive(
    ANY_TEXT | st.none() | st.booleans() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(item)


@given(NESTED)
def test_cleaned_values_can_be_encoded_and_have_no_nul(value: Any) -> None:
    cleaned = clean(value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cleaned)) == cleaned  # the encoding of Airflow's processes
    assert not any("\0" in text for text in strings(cleaned))
    assert clean(cleaned) == cleaned


def test_only_unstorable_characters_are_replaced() -> None:
    value = {"a\0": ["\udcff", ("é", 1)], "n": None, "x": 0.5, "category": Category.IMAGE}
    assert clean(value) == {"a\ufffd": ["\ufffd", ("é", 1)], "n": None, "x": 0.5, "category": Category.IMAGE}
    assert clean(value)["category"] is Category.IMAGE


@pytest.mark.parametrize("length", [MAX_LINE_CHARS + 1, 256 * 1024, 10**7])
def test_head_and_tail_of_a_long_line_are_kept(length: int) -> None:
    line = "ValueError: " + "x" * length + " the end"
    kept = clipped(line)
    assert len(kept) <= MAX_LINE_CHARS
    assert kept.startswith("ValueError: x")
    assert kept.endswith("the end")
    assert " characters ...] " in kept
    assert clipped(kept) == kept
    head, _, tail = kept.partition(" [... ")
    number, _, tail = tail.partition(" characters ...] ")
    assert len(head) + int(number.replace(",", "")) + len(tail) == len(line)


def test_a_short_line_is_not_changed() -> None:
    assert clipped("x" * MAX_LINE_CHARS) == "x" * MAX_LINE_CHARS
    assert clipped("x" * 101, 100) != "x" * 101


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable_size(size) == text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("6 nodes are cordoned", "6 nodes are cordoned"),
        ("6 nodes are cordoned, 1 had untolerated taints", "6 nodes are cordoned, 1..."),
        ("6 nodes are not ready: they are cordoned", "6 nodes are not ready..."),
        ("6 nodes had untolerated taints", "6 nodes had untolerated..."),
        ("pods.apps/example-with-a-long-name is invalid", "pods.apps/example-with-..."),
        ("a pods.apps/example-with-a-long-name is invalid", "a pods.apps/example-wit..."),
    ],
)
def test_line_is_shortened_at_a_word(line: str, expected: str) -> None:
    assert shortened(line, 26) == expected


@pytest.mark.parametrize(
    ("most", "line"),
    [(30, "pulling: GET: HTTP 404: no tag"), (29, "pulling: ... HTTP 404: no tag"), (22, "pulling: ... no tag")],
)
def test_chain_of_errors_keeps_its_beginning_and_its_end(most: int, line: str) -> None:
    assert ends_of_chain("pulling: GET: HTTP 404: no tag\nTry again", most) == line
