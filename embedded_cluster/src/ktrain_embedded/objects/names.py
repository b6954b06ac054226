"""Suffixes for generateName, and the validation rules and messages of Kubernetes for names and labels."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

SUFFIX_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # the alphabet of generateName


def random_suffix(length: int = 5) -> str:
    """Return a random suffix as generateName does, without vowels and easily confused characters."""
    return "".join(random.choices(SUFFIX_ALPHABET, k=length))


@dataclass(frozen=True)
class Rule:
    """A pattern, the maximum length, and the message for values that don't match the pattern."""

    pattern: str
    longest: int
    message: str

    def breaches(self, value: str) -> Iterator[str]:
        """Yield Kubernetes' message for each violation of the rule."""
        if len(value) > self.longest:
            yield f"must be no more than {self.longest} characters"
        if not re.fullmatch(self.pattern, value):
            yield f"{self.message}, regex used for validation is '{self.pattern}')"


SUBDOMAIN = Rule(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", 253,
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com'",
)  # fmt: skip
LABEL = Rule(
    "[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63,
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc'",
)  # fmt: skip
PATH_SEGMENT = Rule(r"(?!\.{1,2}$)[^/%]+", 253, "may not contain '/' or '%' (e.g. 'system:node'")
DNS_1035 = Rule(
    "[a-z]([-a-z0-9]*[a-z0-9])?", 63,
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123'",
)  # fmt: skip
KEY_NAME = Rule(
    "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", 63,
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc'",
)  # fmt: skip
LABEL_VALUE = Rule(
    "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", 63,
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345'",
)  # fmt: skip


def qualified(key: str) -> Iterator[str]:
    """Validate the key of a label or annotation: a name with an optional domain prefix and a slash."""
    prefix, slash, name = key.rpartition("/")
    if slash:
        yield from (f"prefix part {why}" for why in SUBDOMAIN.breaches(prefix))
    yield from KEY_NAME.breaches(name)
