"""The XCom `ktrain_summary`: one small document about a training, which lists and comparisons show.

A worker writes it before it submits the job, and again at the end; after a kill of a deferred task, its trigger does.
docs/reference/status.md describes its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.formats import VERSION, json_size, mapping, total_usage, usage_of_try
from airflow_provider_ktrain.core.identity.task_variables import VARIABLE_PREFIX
from airflow_provider_ktrain.core.reporting.redaction import redacted
from airflow_provider_ktrain.core.text.output import masked

MAX_BYTES = 1536  #: Size of the document's JSON.
MAX_METRICS = 8
MAX_PARAMETERS = 12
CONFIGURATION, CLUSTER = "configuration", "cluster"  #: Categories of causes that no job has: of the task itself.
#: Numbers of metrics and parameters, and characters of each text: what is tried in turn until the document fits.
_LIMITS = ((MAX_METRICS, MAX_PARAMETERS, 160), (MAX_METRICS, MAX_PARAMETERS, 60), (4, 6, 40), (0, 0, 40))
_SHORT_CHARS = 40  #: Length of a parameter's name or value, and of a metric's name.
_JOB_CHARS = 63  #: Length of each text of the job: of a name in Kubernetes.
_OF_INTERPRETER = ("-c", "-m")  #: Flags of Python and shells whose operand is the program.
#: A word that names a parameter: a flag, or a name as Hydra reads it.
_NAME = re.compile(r"-{0,2}\+{0,2}[^\W\d][\w./@-]*")
#: A word after a flag that is its value: neither a flag nor the script.
_OPERAND = re.compile(r"(?!-|[^=]*\.py$).*|-[\d.].*", re.DOTALL)


def parameters_of(
    words: Sequence[Any],
    env: Mapping[str, Any],
    arguments: Mapping[str, Any],
    hides: Callable[[str], bool],
) -> dict[str, str]:
    """What the user has set for the program, by name, without secrets.

    :param words: of the command and its arguments. Flags and names with a value count: `--lr 0.1`, `--lr=0.1`,
        `lr=0.1`. The program of `python -c` and the module of `python -m` don't.
    :param env: environment variables.
    :param arguments: of a function, by name.
    :param hides: whether Airflow hides the value of a variable, by its name.
    """
    found = {name: _value(redacted({name: value})[masked(name)]) for name, value in arguments.items()}
    shown_words = [str(word) for word in redacted(list(words), hides=hides)]
    for before, word, follows in zip(["", *shown_words], shown_words, [*shown_words[1:], "-"], strict=False):
        name, given, value = word.partition("=")
        if before in _OF_INTERPRETER or name in _OF_INTERPRETER or not _NAME.fullmatch(name):
            continue
        if given or (name.startswith("-") and _OPERAND.fullmatch(follows)):
            found[name.lstrip("-+")] = _value(value if given else follows)
        elif name.startswith("--"):
            found[name.lstrip("-")] = "true"
    for name, value in env.items():
        if not name.startswith(VARIABLE_PREFIX):
            found[name] = _value(redacted({"name": name, "value": str(value)}, hides=hides)["value"])
    return {_short(name, _SHORT_CHARS): value for name, value in [*found.items()][:MAX_PARAMETERS]}


def _value(value: Any) -> str:
    return _short(" ".join(str(value).split()), _SHORT_CHARS)


def _short(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 3]}..."


def metrics_of(training_metrics: Any) -> dict[str, list[Any]]:
    """The last and best value of the first metrics of a status or an outcome."""
    named = [*mapping(training_metrics).items()][:MAX_METRICS]
    return {
        _short(masked(str(name)), _SHORT_CHARS): [mapping(one).get("last"), mapping(one).get("best")]
        for name, one in named
    }


def summary(before: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A summary as JSON types of at most MAX_BYTES, without secrets.

    What doesn't fit is left out: texts are shortened, then metrics and parameters are left out.

    :param before: the summary that this one replaces.
    :param changes: its fields that have other values now.
    """
    whole = masked({**before, "version": VERSION, **changes})
    for metrics, parameters, chars in _LIMITS:
        document = {name: _short(value, chars) if isinstance(value, str) else value for name, value in whole.items()}
        job = mapping(whole.get("job"))
        document |= {"job": {name: _short(str(text), _JOB_CHARS) for name, text in job.items()}} if job else {}
        document["metrics"] = dict([*mapping(whole.get("metrics")).items()][:metrics])
        document["parameters"] = dict([*mapping(whole.get("parameters")).items()][:parameters])
        if json_size(document) <= MAX_BYTES:
            break
    return document


def status_of(summary: Mapping[str, Any], try_number: int) -> dict[str, Any]:
    """What a status would have of a try that has stored none: its worker was lost before. Empty if nothing is known.

    :param summary: of this try or another one.
    """
    if summary.get("try_number") != try_number:
        return {}
    found = {name: summary.get(name) for name in ("try_number", "job", "parameters")}
    cause = {"summary": summary.get("cause"), "category": summary.get("category")}
    return {**found, "ended": summary.get("state") != "running", "cause": cause if cause["summary"] else None}


def killed_summary(before: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a killed try that no worker ends, by its last status.

    :param before: the summary of its beginning.
    """
    cause, earlier, own = (mapping(of) for of in (status.get("cause"), before.get("usage"), status.get("usage")))
    used = usage_of_try(own)
    total = total_usage([earlier, used])
    return summary(
        before,
        state="failed",
        cause=str(cause.get("summary") or ""),
        category=str(cause.get("category") or ""),
        ended=status.get("written_at"),
        usage=total if used["tries"] else {**total, "at_least": True},
        metrics=metrics_of(status.get("metrics")),
        code=str(mapping(status.get("job")).get("code") or ""),
    )
