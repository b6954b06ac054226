"""The steps that a training has reported, and which of them an earlier try of its task had reached before.

The new job of a retry begins at its last checkpoint, or at the beginning. Until it has reached the last step of the
earlier tries, it repeats their steps. The number of steps is a lower bound: a program reports a step after it has
trained it, and some programs report only now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from airflow_provider_ktrain.core.formats import is_step, known_fields

Number = float | int


@dataclass
class ReportedSteps:
    """The steps of one job.

    :param before: the highest step that earlier tries reached. Default: None, no earlier try reported any.
    :param first: the first step that was reported. Default: None, there is none yet.
    :param first_at: when it was, in epoch seconds. Default: 0.
    :param highest: the highest step that was reported. Default: None, there is none yet.
    :param repeated_until: when the highest step up to `before` was reported, in epoch seconds. Default: 0.
    """

    before: Number | None = None
    first: Number | None = None
    first_at: float = 0.0
    highest: Number | None = None
    repeated_until: float = 0.0

    def record(self, step: Number, at: float) -> None:
        """Take a step that any replica reported.

        :param at: when it did, in epoch seconds.
        """
        if self.first is None or at < self.first_at:
            self.first, self.first_at = step, at
        if self.highest is None or step > self.highest:
            if self.highest is None or (self.before is not None and self.highest < self.before):
                self.repeated_until = max(at, self.first_at)
            self.highest = step

    @property
    def repeated(self) -> int | None:
        """How many steps this job has repeated, at least. None: not known, or the program counts no whole steps."""
        if self.before is None or self.first is None or self.highest is None:
            return None
        last = min(self.before, self.highest)
        if int(last) != last or int(self.first) != self.first:
            return None
        return max(int(last) - int(self.first) + 1, 0)

    def usage(self, gpus: float, held: float) -> dict[str, float]:
        """The fields of the task's usage: `repeated_steps`, and `repeated` in GPU-seconds; none if not known.

        The GPU-seconds are those from the first report to the last repeated one, so they include restarts of pods and
        pauses in between.
        """
        steps = self.repeated
        if steps is None:
            return {}
        seconds = self.repeated_until - self.first_at if steps else 0.0
        return {"repeated_steps": steps, "repeated": round(min(seconds * gpus, held), 3)}

    def describe(self, usage: Mapping[str, float], unit: str) -> str:
        """A line for the log; empty if nothing was repeated."""
        steps = usage.get("repeated_steps")
        if not steps or self.first is None:
            return ""
        last = int(self.first) + int(steps) - 1
        return (
            f"Repeated: steps {int(self.first):,} to {last:,}, which an earlier try had reached "
            f"(about {usage.get('repeated', 0.0):.1f} {unit.replace(' ', '-')}-seconds)."
        )

    def to_dict(self) -> dict[str, Any]:
        """For the next process that follows the job; empty if there is nothing to hand over."""
        return {} if self == ReportedSteps() else asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> ReportedSteps:
        """Read what `to_dict` returned, in this release or another one."""
        return cls(**{name: value for name, value in known_fields(cls, data).items() if is_step(value)})
