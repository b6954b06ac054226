"""The value that stands for an object of Kubernetes that doesn't exist."""

from __future__ import annotations

from enum import Enum


class Absent(Enum):
    """An object is proved not to exist. "Not read" is another value: None, or an error.

    The API server answered that it doesn't exist, that another object has its name, or with a complete list without it.
    """

    ABSENT = "absent"


ABSENT = Absent.ABSENT
