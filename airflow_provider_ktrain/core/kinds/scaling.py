"""Whether and how far jobs of a kind can be scaled while they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scaling:
    """Scaling of a kind whose trainings stop when a Worker is removed.

    :param fixed_size_reason: why a job can't be scaled. Default: empty, it can.
    """

    fixed_size_reason: str = ""

    def is_elastic(self, job: Mapping[str, Any]) -> bool:
        """Whether the training continues with fewer Workers."""
        return False

    def worker_bounds(self, job: Mapping[str, Any]) -> tuple[int, int | None]:
        """The least and the greatest number of Workers that the job may be scaled to; None: no upper bound."""
        return 1, None
