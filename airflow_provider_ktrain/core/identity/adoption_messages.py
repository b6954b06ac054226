"""Messages about a job that a try finds under its name: what happens to it, and how it differs from the new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.identity.adoption import Adoption, Decision
from airflow_provider_ktrain.core.identity.names import PREFIX, code_hash, label
from airflow_provider_ktrain.core.identity.task_variables import without_variables
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL

MAX_PATHS = 20  #: How many paths a message names.
_NEXT_STEPS = {
    Adoption.REFUSE: "This try fails.",
    Adoption.WAIT: "Waiting for the previous job's pods to stop.",
    Adoption.REPLACE: "Replacing it.",
    Adoption.TAKE_RESULT: "Using its result.",
    Adoption.ADOPT: "Adopting it.",
}
_CONFIG_MAP_NAME = ".configMap.name"  # end of the path of a volume's source; that of the code is new for each job


def describe_existing(job: str, decision: Decision) -> str:
    """The message about a job that has our name: why it exists, and what this try does with it.

    :param job: kind, namespace and name.
    """
    detail = f"\n{decision.detail}" if decision.detail else ""
    return f"{job} exists: {decision.reason}. {_NEXT_STEPS[decision.action]}{detail}"


def what_differs(job: str, manifest: Mapping[str, Any], found: Mapping[str, Any], *, invalid: str = "") -> str:
    """The warning about a job that is adopted although the manifest of this try is different or invalid.

    :param manifest: of this try, stamped.
    :param invalid: why the manifest can't be submitted. Default: empty, it can.
    """
    if invalid:
        now = f"The manifest is invalid now. {job} continues with the earlier one."
        return f"{now}\nA new submission would fail: {invalid}"
    differing = [
        path
        for path in differences(without_variables(manifest["spec"]), without_variables(found.get("spec")))
        if PREFIX not in path and not path.endswith(_CONFIG_MAP_NAME)
    ]
    labels = [name for name in (QUEUE_LABEL, PRIORITY_LABEL) if label(manifest, name) != label(found, name)]
    differing = [*(f"$.metadata.labels['{name}']" for name in labels), *differing]
    theirs, ours = code_hash(found), code_hash(manifest)
    if theirs != ours:
        differing = [f"code (hash {theirs or 'none'}, now {ours or 'none'})", *differing]
    return (
        f"The manifest has changed, but {job} keeps the old one.\nChanged: "
        f"{', '.join(differing[:MAX_PATHS]) or 'metadata'}. Set reattach='if_unchanged' to replace such a job."
    )


def differences(sent: Any, found: Any, path: str = "$.spec") -> Iterator[str]:
    """JSON paths at which `found` lacks or contradicts a value of `sent`. Values that only `found` has are ignored.

    Lists whose items have a `manager` (runtimePatches of a TrainJob) are compared by it: Kueue adds an entry.
    """
    if _by_manager(sent) and _by_manager(found):
        theirs = {entry["manager"]: entry for entry in found}
        for i, entry in enumerate(sent):
            yield from differences(entry, theirs.get(entry["manager"]), f"{path}[{i}]")
    elif isinstance(sent, Mapping) and isinstance(found, Mapping):
        for key, value in sent.items():
            if key in found:
                yield from differences(value, found[key], f"{path}.{key}")
            elif value not in (None, {}, []):
                yield f"{path}.{key}"
    elif isinstance(sent, list) and isinstance(found, list) and len(sent) == len(found):
        for i, (a, b) in enumerate(zip(sent, found, strict=True)):
            yield from differences(a, b, f"{path}[{i}]")
    elif sent != found:
        yield path


def _by_manager(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(i, Mapping) and isinstance(i.get("manager"), str) for i in items)
