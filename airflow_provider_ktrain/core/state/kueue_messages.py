"""Explains the messages with which Kueue leaves a Workload without quota: its phase, and why in plain words.

Sources: recordings 70 to 74e (Kueue 0.18.5), and Kueue's code of several releases: pkg/scheduler/scheduler.go,
pkg/scheduler/flavorassigner, pkg/controller/core/workload_controller.go.
"""

from __future__ import annotations

import enum
import re

from airflow_provider_ktrain.core.text import counted

_POD_SET = re.compile(r"couldn't assign flavors to pod set [^:\s]+: ")
_UNUSED = re.compile(
    r"insufficient unused quota (?:in cohort )?for (?P<resource>\S+) in flavor (?P<flavor>[^\s,]+), "
    r"(?P<more>\S+) more needed"
)
_ABOVE_MAXIMUM = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^\s,;]+)"
    r"(?P<amounts>, previously considered podsets requests \((?P<before>[^)]*)\) \+ "
    r"current podset request \((?P<request>[^)]*)\) > maximum capacity \((?P<capacity>[^)]*)\)"
    r"|, request > maximum capacity \((?P<old_request>\S+) > (?P<old_capacity>\S+)\))?"
)
_PREEMPTING = re.compile(r"\.? ?Pending the preemption of (?P<count>\d+) workload\(s\)")
#: what an administrator must change: patterns, and what they mean
_SETUP = (
    (r"(ClusterQueue|LocalQueue) (\S+) is inactive", r"\1 \2 is inactive: it is stopped, or not completely set up"),
    (r"(ClusterQueue|LocalQueue) (\S+) ?(doesn't exist|not found|is terminating or missing)", r"\1 \2 doesn't exist"),
    (r"(ClusterQueue|LocalQueue)  ?(doesn't exist|not found|is terminating or missing)", r"its \1 doesn't exist"),
    (r"resource (\S+) unavailable in ClusterQueue", r"its ClusterQueue has no quota for \1"),
    (r"(?i)namespace doesn't match ClusterQueue selector", "its ClusterQueue admits no jobs of this namespace"),
)
_EXCEEDS = "ExceedsMaxQuota"  #: the reason in newer releases. One flavor is enough for it, so it proves nothing alone


class QueuePhase(enum.StrEnum):
    """What the queue does with a job."""

    WAITING = "waiting"  #: for quota, or for Kueue to look at the job
    MISCONFIGURED = "misconfigured"  #: its queue is missing or stopped: waits until an administrator changes that
    NEVER_FITS = "never fits"  #: requests more than the whole quota of every flavor, and was never admitted
    CHECKING = "checking"  #: has quota, and waits for admission checks
    ADMITTED = "admitted"
    EVICTING = "evicting"  #: lost its admission: its pods are being deleted, then it is queued again
    DEACTIVATED = "deactivated"  #: by somebody: waits until the Workload is active again
    GIVEN_UP = "given up"  #: deactivated by Kueue itself: it doesn't come back without help
    FINISHED = "finished"


def explain(reason: str, message: str) -> tuple[QueuePhase, str]:
    """The phase of a Workload without quota, and what keeps it from getting quota in plain words, without a full stop.

    :param reason: of its condition QuotaReserved, which is False.
    :param message: of the same condition.
    """
    if setup := _setup(message):
        return QueuePhase.MISCONFIGURED, setup
    above = list(_ABOVE_MAXIMUM.finditer(message))
    if _never_fits(reason, message, above):
        return QueuePhase.NEVER_FITS, _above_maximum(above)
    return QueuePhase.WAITING, _needed(message) or _raw(message) or reason or "it waits for quota"


def _setup(message: str) -> str:
    """What an administrator must change; "" if nothing."""
    found = ((re.search(pattern, message), why) for pattern, why in _SETUP)
    return next((match.expand(why) for match, why in found if match), "")


def _never_fits(reason: str, message: str, above: list[re.Match[str]]) -> bool:
    """Whether each flavor that Kueue names is too small. Any other text about a flavor means that the job waits."""
    rest = _PREEMPTING.sub("", _ABOVE_MAXIMUM.sub("", _POD_SET.sub("", message)))
    proven = reason == _EXCEEDS or all(found["amounts"] for found in above)
    return bool(above) and proven and not rest.strip(" ,;.")


def _above_maximum(above: list[re.Match[str]]) -> str:
    """How much is asked for, and how much there is at most."""
    limits = []
    for found in above:
        request, capacity = found["request"] or found["old_request"], found["capacity"] or found["old_capacity"]
        if request:
            asked = request if (found["before"] or "0") == "0" else f"{found['before']} + {request}"
            limits.append(f"{asked} {found['resource']} of at most {capacity} in flavor {found['flavor']}")
        else:
            limits.append(f"{found['resource']} in flavor {found['flavor']}")
    return f"requests more than the whole quota ({'; '.join(dict.fromkeys(limits))}): it can never run here"


def _needed(message: str) -> str:
    """How much quota is missing; "" if the message doesn't contain it."""
    parts = [_needed_by_pod_set(list(_UNUSED.finditer(part))) for part in _POD_SET.split(message)]
    needed = " and ".join(dict.fromkeys(filter(None, parts)))
    if not needed:
        return ""
    preempting = _PREEMPTING.search(message)
    jobs = f"; {counted(int(preempting['count']), 'job')} will be preempted for it" if preempting else ""
    return f"needs {needed}{jobs}"


def _needed_by_pod_set(unused: list[re.Match[str]]) -> str:
    """The missing quota of one pod set. A pod set needs one flavor for all resources of a resource group.

    So flavors with the same resource are alternatives; others are of different resource groups, and all are needed.
    """
    flavors: dict[str, list[str]] = {}
    resources: dict[str, set[str]] = {}
    for found in unused:
        flavors.setdefault(found["flavor"], []).append(f"{found['more']} {found['resource']}")
        resources.setdefault(found["resource"], set()).add(found["flavor"])
    alternatives = any(len(of_resource) > 1 for of_resource in resources.values())
    listed = [f"{' and '.join(amounts)} more in flavor {flavor}" for flavor, amounts in flavors.items()]
    return (" or " if alternatives else " and ").join(listed)


def _raw(message: str) -> str:
    """Kueue's own text, to follow a colon."""
    text = _POD_SET.sub("", message).strip().rstrip(".")
    word = text.partition(" ")[0]
    return text[:1].lower() + text[1:] if word[1:].islower() else text
