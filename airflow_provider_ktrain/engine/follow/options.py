"""How a task wants its job to be followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_provider_ktrain.core.formats import known_fields, mapping
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.logs.selection import LogChoice
from airflow_provider_ktrain.core.state.limits import Limits


@dataclass(frozen=True)
class Options:
    """How a job is followed; part of trigger kwargs. docs/reference/formats.md describes the fields.

    :param drain_timeout: before the pods are deleted, the rest of the logs is read until no line has come for this
        time, in seconds. While lines come, it goes on for up to 5 minutes, but not past the deadline. After the
        release, what was read is logged within the same limits; after a takeover, lines since the deferral have this
        time. Default: 30.
    """

    logs: LogChoice = "auto"
    limits: Limits = field(default_factory=Limits)
    deadline: float | None = None
    on_finish_action: OnFinishAction = OnFinishAction.DELETE_JOB
    drain_timeout: float = 30
    release: bool = True
    conditions: tuple[str, ...] = ()
    require: Mapping[str, str] = field(default_factory=dict)
    fail_on_nan: bool | tuple[str, ...] = False

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON types."""
        return {
            **asdict(self),
            "on_finish_action": self.on_finish_action.value,
            "conditions": list(self.conditions),
            "require": dict(self.require),
            "fail_on_nan": self.fail_on_nan if isinstance(self.fail_on_nan, bool) else list(self.fail_on_nan),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Options:
        """Read what `to_dict` returned, in this release or another one."""
        limits = Limits(**known_fields(Limits, mapping(data).get("limits")))
        conditions = tuple(mapping(data).get("conditions") or ())
        action = OnFinishAction.of(mapping(data).get("on_finish_action", OnFinishAction.DELETE_JOB))
        require = dict(mapping(mapping(data).get("require")))
        names = mapping(data).get("fail_on_nan")
        nan = tuple(map(str, names)) if isinstance(names, list | tuple) else names is True
        read = {
            "limits": limits, "conditions": conditions, "on_finish_action": action, "require": require,
            "fail_on_nan": nan,
        }  # fmt: skip
        return cls(**{**known_fields(cls, data), **read})
