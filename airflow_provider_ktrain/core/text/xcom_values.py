"""The door of all values that leave for Airflow: what can't be stored becomes text or is left out.

Measured on Airflow 3.3 with PostgreSQL 15: JSONB returns a float from 1e16 as an integer, and msgpack, in which
Airflow's processes talk, has no integers over 64 bits; whoever reads such an XCom fails. JSONB refuses NUL, UTF-8
refuses half of a surrogate pair, and Airflow's serializer gives some keys a meaning of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeVar, cast

from airflow_provider_ktrain.core.text.output import clean, clipped, masked_log

T = TypeVar("T")
log = masked_log(__name__)

MAX_PATH_CHARS = 64  #: Length of the place in the result that a warning names.
MAX_DEPTH = 64  #: Depth of lists and objects in one another: encoders walk them by recursion.
INTEGERS = range(-(2**63), 2**64)  #: The integers that msgpack has.
MAX_WARNINGS = 10
MAX_DIGITS = 400  #: Length of a text that can be a number: a larger integer isn't finite as a float.
RESERVED = ("__classname__", "__id__")  #: Keys of objects that Airflow's serializer has encoded.
ENCODED = ("__type", "__var")  #: Keys of such objects in older releases, which have both.
#: Keys of our own values whose numbers are counted and added up: one that doesn't fit is left out, because text isn't
#: 0.
COUNTS = ("usage",)
#: An XCom key has 1 to 512 characters and becomes a part of a URL.
XCOM_KEY = re.compile(r"(?!\.{1,2}(?:/|\Z))(?!.*/\.{1,2}(?:/|\Z))[^\0-\x1f\x7f?#]{1,512}\Z")


def storable(value: Any) -> tuple[Any, tuple[str, ...]]:
    """The value as it can be stored, and a warning, which names the key, for each change.

    :param value: of strings, numbers, booleans, None, lists and dicts with keys of text.
    """
    warnings: list[str] = []
    return _stored(value, "", 0, warnings), _limited(warnings)


def transportable(value: T, key: str) -> T:
    """A value of ours as Airflow can take it: an event, an XCom, an entry of the task store. Changes are logged.

    It has the rules of `storable`; but in COUNTS, a number that doesn't fit is left out. It never raises.

    :param value: as for `storable`; tuples become lists.
    :param key: of the value, which names it in warnings.
    """
    warnings: list[str] = []
    fit = _stored(value, key, 0, warnings, key, COUNTS)
    for warning in _limited(warnings):
        log.warning("Airflow can't take a value as it is: %s.", warning)
    return cast("T", fit)


def storable_outputs(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The items of a dict whose keys can be keys of XComs (`multiple_outputs`), and a warning for each other item."""
    unfit = dict.fromkeys(key for key in values if not XCOM_KEY.match(key))
    warnings = [
        f"{_shown(key)} is left out: a key of multiple_outputs has 1 to 512 characters, none of them ? or #"
        for key in unfit
    ]
    return {key: value for key, value in values.items() if key not in unfit}, _limited(warnings)


def _stored(value: Any, path: str, depth: int, warnings: list[str], key: str = "", counts: tuple[str, ...] = ()) -> Any:
    """Make a value storable.

    :param key: of the value.
    :param counts: keys below which a number that doesn't fit is LEFT_OUT. Default: none.
    """
    if depth > MAX_DEPTH:
        warnings.append(f"{_name(path, warnings)} is left out: it is nested more than {MAX_DEPTH} deep")
        return None
    if isinstance(value, str):
        if (cleaned := clean(value)) != value:
            warnings.append(
                f"{_name(path, warnings)} is changed: characters that databases refuse are replaced by U+FFFD"
            )
        return cleaned
    if isinstance(value, Mapping):
        return dict(_items(value, path, depth, warnings, counts, counted=key in counts))
    if isinstance(value, list | tuple):
        return [_stored(item, f"{path}[{i}]", depth + 1, warnings, "", counts) for i, item in enumerate(value)]
    if why := _number_problem(value):
        warnings.append(f"{_name(path, warnings)} is stored as text: {why}")
        return _digits(value)
    return value


def _items(
    value: Mapping[str, Any], path: str, depth: int, warnings: list[str], counts: tuple[str, ...], *, counted: bool
) -> Iterator[tuple[str, Any]]:
    """Make the items of a dict storable."""
    reserved = {*RESERVED, *(ENCODED[:1] if all(key in value for key in ENCODED) else ())}
    for key, item in ((key if isinstance(key, str) else _digits(key), item) for key, item in value.items()):
        inner = f"{path}.{_shown(key)}" if path else _shown(key)
        if key in reserved:
            warnings.append(f"{_name(inner, warnings)} is left out: Airflow's serializer reserves the key")
            continue
        if counted and (why := _number_problem(item)):
            warnings.append(f"{_name(inner, warnings)} is left out: {why}")
            continue
        if (cleaned := clean(key)) != key:
            warnings.append(
                f"the key {_name(inner, warnings)} is changed: characters that databases refuse are replaced by U+FFFD"
            )
        below = counts[0] if counted else key  # of `usage.others`, too
        yield cleaned, _stored(item, inner, depth + 1, warnings, below, counts)


def is_number_as_text(value: Any) -> bool:
    """Whether a text is what `storable` makes of a number that can't be stored as one."""
    try:
        number = float(value) if isinstance(value, str) and len(value) <= MAX_DIGITS else 0.0
    except ValueError:
        return False
    return bool(_number_problem(number))


def _digits(number: Any) -> str:
    """A number as text. Python refuses to convert integers of more than 4,300 digits."""
    try:
        return str(number)
    except ValueError:
        return "an integer of more than 4,300 digits"


def _number_problem(value: Any) -> str:
    """Why a number can't be stored as one; empty if it can, or if the value isn't a number."""
    if not isinstance(value, int | float | Decimal) or INTEGERS.start <= value < INTEGERS.stop:
        return ""
    if not isinstance(value, float):
        return "the integer has more than 64 bits"
    return "databases return it as a large integer" if math.isfinite(value) else "the number is not finite"


def _name(path: str, warnings: list[str]) -> str:
    """A value as a warning names it. In those that are only counted it has no name, because masking takes long."""
    return "" if len(warnings) >= MAX_WARNINGS else clipped(path, MAX_PATH_CHARS) or "the result"


def _shown(key: str) -> str:
    """A key as a warning names it."""
    text = clipped(key, MAX_PATH_CHARS)
    return text if key and key.isprintable() else ascii(text)


def _limited(warnings: list[str]) -> tuple[str, ...]:
    more = len(warnings) - MAX_WARNINGS
    return (*warnings[:MAX_WARNINGS], *([f"{more:,} more values are changed or left out"] if more > 0 else ()))
