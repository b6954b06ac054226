"""Explains the condition QuotaReserved of a Workload without quota: its phase, and why in plain words.

The reason decides where Kueue gives one that says enough (0.20, and 0.18 with the feature gate
UnadmittedWorkloadsObservability), the message otherwise. Sources: recordings 70 to 85 (Kueue 0.18.5), KEP-10852, and
Kueue's code of several releases: pkg/scheduler/scheduler.go, pkg/scheduler/flavorassigner,
pkg/controller/core/workload_controller.go.
"""

from __future__ import annotations

import enum
import re
from decimal import Decimal

from airflow_provider_ktrain.core.state.quantity import parse_quantity
from airflow_provider_ktrain.core.text.output import counted

_POD_SET = re.compile(r"(?:; )?couldn't assign flavors to pod set [^:\s]+: ")
_UNUSED = re.compile(
    r"insufficient unused quota (?:in cohort )?for (?P<resource>\S+) in flavor (?P<flavor>[^\s,;]+), "
    r"(?P<more>[^\s,;]+) more needed"
)
_ABOVE_MAXIMUM = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^\s,;]+)"
    r"(?P<amounts>, previously considered podsets requests \((?P<before>[^)]*)\) \+ "
    r"current podset request \((?P<request>[^)]*)\) > maximum capacity \((?P<capacity>[^)]*)\)"
    r"|, request > maximum capacity \((?P<old_request>\S+) > (?P<old_capacity>\S+)\))?"
)
_PREEMPTING = re.compile(r"\.? ?Pending the preemption of (?P<count>\d+) workload\(s\)")
_BYPASSED = re.compile(r"Bypassed scheduling evaluation", re.I)
_BLOCKED = re.compile(
    r"(?:Cluster|Local)Queue (?P<name>\S*) ?(?:is inactive|doesn't exist|not found|is terminating or)"
)
#: what else an administrator must change, which releases before 0.20 say in messages only
_SETUP = (
    (re.compile(r".*resource (\S+) unavailable in ClusterQueue.*"), r"its ClusterQueue has no quota for \1"),
    (
        re.compile(r"(?i).*namespace doesn't match ClusterQueue selector.*"),
        "its ClusterQueue admits no jobs of this namespace",
    ),
)
_NO_FLAVOR = re.compile(r"untolerated taint \{[^}]*\} in flavor [^\s,;]+|flavor \S+ doesn't match node affinity")
_PENDING_EVALUATION, _EXCEEDS, _NO_MATCH = "PendingEvaluation", "ExceedsMaxQuota", "NoMatchingFlavor"


class QueuePhase(enum.StrEnum):
    """What the queue does with a job."""

    PENDING = "pending"  #: Kueue has not evaluated the job, or not since its queue has changed: no news
    WAITING = "waiting"  #: for quota
    MISCONFIGURED = "misconfigured"  #: its queue is missing, stopped or has no such flavor: an administrator must act
    NEVER_FITS = "never fits"  #: requests more than the whole quota of every flavor, and was never admitted
    CHECKING = "checking"  #: has quota, and waits for admission checks
    ADMITTED = "admitted"
    EVICTING = "evicting"  #: lost its admission: its pods are being deleted, then it is queued again
    DEACTIVATED = "deactivated"  #: by somebody: waits until the Workload is active again
    GIVEN_UP = "given up"  #: deactivated by Kueue itself: it doesn't come back without help
    FINISHED = "finished"


#: the phase by the reason of QuotaReserved. A reason that isn't here is shown, and the job waits
_REASONS = {
    _PENDING_EVALUATION: QueuePhase.PENDING,
    "Inadmissible": QueuePhase.MISCONFIGURED,
    "Misconfigured": QueuePhase.MISCONFIGURED,
    "Suspended": QueuePhase.MISCONFIGURED,
    _NO_MATCH: QueuePhase.MISCONFIGURED,
    **dict.fromkeys(
        ("", "Pending", "Waiting", _EXCEEDS, "WaitingForQuota", "WaitingForPreemptedWorkloads", "WaitingForPodsReady",
         "TopologyPlacementFailed"), QueuePhase.WAITING,
    ),
}  # fmt: skip


def explain(reason: str, message: str) -> tuple[QueuePhase, str]:
    """The phase of a Workload without quota, and what keeps it from getting quota in plain words, without a full stop.

    :param reason: of its condition QuotaReserved, which is False; "" if it has none.
    """
    phase = _REASONS.get(reason, QueuePhase.WAITING)
    if phase is QueuePhase.PENDING or not (reason or message):
        return QueuePhase.PENDING, "Kueue has not looked at the job yet"
    if is_bypassed(message):  # the reason is the verdict on an equal job
        never = reason == _EXCEEDS
        return (QueuePhase.NEVER_FITS, "requests more than the whole quota, as they do") if never else (phase, "")
    pod_sets = [_PREEMPTING.sub("", text).strip(" ,;.") for text in _POD_SET.split(message)]
    if setup := next((found.expand(why) for pattern, why in _SETUP if (found := pattern.fullmatch(message))), ""):
        return QueuePhase.MISCONFIGURED, setup
    if blocking_queue(message) is not None:
        phase = QueuePhase.MISCONFIGURED
    elif phase is QueuePhase.WAITING:
        # a pod set without a flavor holds back the whole job, whatever the others lack
        if above := [found for text in pod_sets for found in _above(reason, text)]:
            return QueuePhase.NEVER_FITS, _above_maximum(above)
        if any(text and not _NO_FLAVOR.sub("", text).strip(" ,;") for text in pod_sets):
            phase, reason = QueuePhase.MISCONFIGURED, _NO_MATCH
    why = _needed(pod_sets, message) or _raw(message)
    if reason == _NO_MATCH:
        why = f"no flavor of its ClusterQueue suits it: {why}" if why else "no flavor of its ClusterQueue suits it"
    elif why and reason not in _REASONS:
        why = f"{why} ({reason})"
    return phase, why or reason


def is_bypassed(message: str) -> bool:
    """Whether Kueue has not evaluated a job because it has evaluated an equal one."""
    return bool(_BYPASSED.match(message))


def blocking_queue(message: str) -> str | None:
    """The queue that the message calls inactive or missing, "" if it doesn't name it; None if it is about no queue."""
    found = _BLOCKED.search(message)
    return None if found is None else found["name"]


def _above(reason: str, pod_set: str) -> list[re.Match[str]]:
    """The flavors of a pod set, each too small; none if the pod set may fit: any other text means that it waits."""
    above = list(_ABOVE_MAXIMUM.finditer(pod_set))
    proven = reason == _EXCEEDS or all(found["amounts"] for found in above)
    return above if proven and not _ABOVE_MAXIMUM.sub("", pod_set).strip(" ,;.") else []


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


def _needed(pod_sets: list[str], message: str) -> str:
    """How much quota is missing; "" if the message doesn't contain it.

    Kueue's amounts contain what the pod sets before need, so the largest amount of a flavor and resource is what the
    job needs. A pod set needs one flavor for all resources of a resource group: flavors with the same resource are
    alternatives, others are of different resource groups, and all are needed.
    """
    together: dict[str, dict[str, str]] = {}  # of pod sets without alternatives: flavor -> resource -> amount
    either: list[dict[str, dict[str, str]]] = []
    most: dict[tuple[str, str], str] = {}
    for found in _UNUSED.finditer(message):
        place = found["flavor"], found["resource"]
        most[place] = max(most.get(place, "0"), found["more"], key=_size)
    for text in pod_sets:
        flavors: dict[str, dict[str, str]] = {}
        for found in _UNUSED.finditer(text):
            flavor, resource = found["flavor"], found["resource"]
            flavors.setdefault(flavor, {})[resource] = most[flavor, resource]
        named = [resource for amounts in flavors.values() for resource in amounts]
        if len(named) > len(set(named)):
            either += [flavors] if flavors not in either else []
        else:
            for flavor, amounts in flavors.items():
                together.setdefault(flavor, {}).update(amounts)
    needed = " and ".join(filter(None, (_listed(together, " and "), *(_listed(of, " or ") for of in either))))
    if not needed:
        return ""
    preempting = _PREEMPTING.search(message)
    jobs = f"; {counted(int(preempting['count']), 'job')} will be preempted for it" if preempting else ""
    return f"needs {needed}{jobs}"


def _listed(flavors: dict[str, dict[str, str]], joined_by: str) -> str:
    return joined_by.join(
        f"{' and '.join(f'{amount} {resource}' for resource, amount in amounts.items())} more in flavor {flavor}"
        for flavor, amounts in flavors.items()
    )


def _size(amount: str) -> Decimal:
    return parse_quantity(amount) or Decimal(0)


def _raw(message: str) -> str:
    """Kueue's own text, to follow a colon."""
    text = _POD_SET.sub("", message).strip().rstrip(".")
    word = text.partition(" ")[0]
    return text[:1].lower() + text[1:] if word[1:].islower() else text
