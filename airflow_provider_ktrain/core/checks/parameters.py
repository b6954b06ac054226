"""The valid values of the parameters of operators and sensors: one table, used after templates are rendered.

A rendered template is text unless the DAG renders native objects: text of a whole number is converted, text of a list
or a mapping is refused, as is text where a list is expected (its letters would become the members).
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from airflow_provider_ktrain.core.checks.problem import NAMESPACE, NAMESPACE_FORMAT, Level, Problem, raise_errors
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.names import PREFIX, OnFinishAction
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.manifest.volumes import Volume
from airflow_provider_ktrain.core.state.accelerators import DEFAULT_RESOURCE

Fits = Callable[[Any], bool]


@dataclass(frozen=True)
class Shape:
    """The valid values of a parameter, besides None for "not set".

    :param fits: whether a value is valid; for a list or a mapping, whether a member is.
    :param many: Sequence or Mapping, if the parameter is one.
    :param choices: all valid values, if they are a few words.
    :param numbers: whether the text of a whole number is converted to the number.
    :param reserved: what the keys of a mapping may not begin with, besides being text. Default: nothing.
    """

    expected: str
    fits: Fits
    many: type[Sequence[Any]] | type[Mapping[str, Any]] | None = None
    remedy: str = ""
    choices: tuple[str, ...] = ()
    numbers: bool = False
    reserved: tuple[str, ...] = ()


def validated(given: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """The parameters that are in the table, with text of whole numbers converted.

    :param required: names that may not be None, besides REQUIRED.
    :raises ManifestError: naming each invalid parameter with what was found, what was expected and a remedy.
    """
    values = converted({name: value for name, value in given.items() if name in PARAMETERS})
    asked = {k: v for k, v in values.items() if v is not None or k in REQUIRED or k in required}
    raise_errors(problem for name, value in asked.items() for problem in _problems(name, value))
    return values


def converted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with text of whole numbers converted, where a number is expected. Nothing is checked."""
    return {name: _number(value) if PARAMETERS[name].numbers else value for name, value in given.items()}


def _problems(name: str, value: Any) -> Iterator[Problem]:
    """The parameters of the task are valid."""
    shape = PARAMETERS[name]
    if shape.many is None:
        wrong = [] if shape.fits(value) else [("", value)]
    elif not isinstance(value, shape.many) or isinstance(value, str | bytes):
        wrong = [("", value)]
    elif isinstance(value, Mapping):
        invalid = {k for k in value if not isinstance(k, str) or k.startswith(shape.reserved)}
        wrong = [(f"[{k!r}]", v) for k, v in value.items() if k in invalid or not shape.fits(v)]
    else:
        wrong = [(f"[{i}]", v) for i, v in enumerate(value) if not shape.fits(v)]
    for at, found in wrong:
        text = repr(found) if name != "env" or found is None else type(found).__name__  # env may contain secrets
        shown = text if len(text) <= 120 else f"{text[:117]}..."
        remedy = _remedy(shape, found, whole=not at)
        yield Problem(Level.ERROR, "parameter", name + at, "invalid parameter", shown, shape.expected, remedy)


def _remedy(shape: Shape, found: Any, *, whole: bool) -> str:
    """:param whole: whether `found` is the parameter, and not one of its members."""
    if isinstance(found, str):
        if near := next((c for c in shape.choices if c.lower() == found.lower()), None):
            return f"did you mean {near!r}?"
        if whole and shape.many and found.lstrip().startswith(("[", "{")):
            return "rendered templates are text: set render_template_as_native_obj=True on the DAG"
        if whole and shape.many is Sequence and found.strip():
            return f"write {_words(found)!r}"
    return shape.remedy


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _namespace(value: Any) -> bool:
    return _text(value) and re.fullmatch(NAMESPACE, value) is not None


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _duration(value: Any) -> bool:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _exit_codes(value: Any) -> bool:
    codes = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return all(_whole(code, 1) and code <= 255 for code in codes)


def _metric_names(value: Any) -> bool:
    names = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return isinstance(value, bool) or (bool(names) and all(_text(name) and name != "" for name in names))


def _bound(value: Any) -> bool:
    from airflow_provider_ktrain.core.requirements import is_bound

    return is_bound(value)


def _number(value: Any) -> Any:
    """A whole number for the text of one; in a mapping, each."""
    if isinstance(value, Mapping):
        return {k: _number(v) for k, v in value.items()}
    return int(value) if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,9}\s*", value) else value


def _like(name: str) -> Fits:
    """Whether a value, possibly an object of a Kubernetes SDK, matches a type of `core/manifest/schema.py`."""

    def fits(value: Any) -> bool:
        from airflow_provider_ktrain.core.manifest import schema as schemas
        from airflow_provider_ktrain.core.manifest.loader import plain

        try:
            return value is not None and not any(schemas.compare(plain(value), schemas.compiled(name)))
        except ManifestError:
            return False

    return fits


def _one_of(*choices: str, many: type[Sequence[Any]] | None = None) -> Shape:
    what = f"{'some' if many else 'one'} of {', '.join(choices)}"
    return Shape(what, choices.__contains__, many, "write one of these", choices)


_TEXT = Shape("text", _text, remedy="write it in quotes, or remove it")
_SWITCH = Shape("True or False", lambda value: isinstance(value, bool), remedy="write it without quotes")
_COUNT = Shape(
    "a whole number, 0 or more", _whole, remedy="write 2, or a template that renders to a number", numbers=True
)
_DURATION = Shape("seconds or a timedelta, 0 or more", _duration, remedy="write timedelta(minutes=10), or 600")
_WORDS = Shape("a list of words", _scalar, Sequence, 'write ["--epochs", "3"]')
_OURS = f"{PREFIX}/"
_LABELS = Shape("a mapping of text to text", _scalar, Mapping, 'write {"name": "value"}')

_PLURALS = ",".join(kind.plural for kind in KINDS.values())

#: The parameters that may not be None.
REQUIRED = {
    "job_name", "kubernetes_conn_id", "timeout", "on_finish_action", "reattach", "conditions", "confirm_after",
    "max_jobs", "fail_on_nan",
}  # fmt: skip
PARAMETERS: Mapping[str, Shape] = {
    **dict.fromkeys(("name", "kubernetes_conn_id", "cluster_context", "image", "priority_class_name"), _TEXT),
    **dict.fromkeys(("queue_name", "workload_priority_class", "checkpoint_dir"), _TEXT),
    **dict.fromkeys(("deferrable", "resume_on_clear", "missing_ok", "force", "avoid_failed_nodes"), _SWITCH),
    **dict.fromkeys(("server_dry_run", "dry_run_only"), _SWITCH),
    **dict.fromkeys(("workers", "gpus", "max_restarts"), _COUNT),
    "max_jobs": Shape("a whole number, 0 or more", _whole, remedy="write 20"),
    "nodes": Shape("a whole number, 1 or more", lambda value: _whole(value, 1), remedy="write 2", numbers=True),
    "runtime": Shape(
        "the name of a ClusterTrainingRuntime, or a mapping with name and kind",
        lambda value: (_text(value) and value != "") or _like("RuntimeRef")(value),
        remedy='write "torch-distributed", or {"kind": "TrainingRuntime", "name": "mine"}',
    ),
    "crash_loop_limit": Shape(
        "a whole number, 1 or more, or None", lambda value: _whole(value, 1), remedy="write 6, or None", numbers=True
    ),
    **dict.fromkeys(("queue_timeout", "schedule_timeout", "startup_timeout", "log_stall_timeout"), _DURATION),
    **dict.fromkeys(("partial_start_timeout", "progress_timeout"), _DURATION),
    **dict.fromkeys(("timeout", "confirm_after"), _DURATION),
    **dict.fromkeys(("command", "args"), _WORDS),
    "code": Shape(
        "the path of a directory or file",
        lambda value: isinstance(value, str | os.PathLike) and os.fspath(value) != "",
        remedy='write "training", relative to the DAG file',
    ),
    "node_selector": _LABELS,
    **dict.fromkeys(
        ("labels", "annotations"),
        replace(_LABELS, expected=f"{_LABELS.expected}, without keys that begin with {_OURS}", reserved=(_OURS,)),
    ),
    "namespace": Shape(
        f"the name of a namespace: {NAMESPACE_FORMAT}",
        lambda value: value == "" or _namespace(value),
        remedy="correct it, or remove it to use the connection's namespace",
    ),
    "namespaces": Shape(
        f"a namespace or a list of namespaces: {NAMESPACE_FORMAT}",
        lambda value: all(_namespace(name) for name in ([value] if _text(value) and value else value or ())),
        remedy="correct it, or remove it to use the connection's namespace",
    ),
    "job_name": Shape(
        "the name of a job: lower-case letters, digits and -",
        lambda value: _text(value) and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", value) is not None,
        remedy=f"kubectl get {_PLURALS} lists them; a task of this DAG has train.job_name",
    ),
    "env": Shape(
        "a mapping of names to text, or to the content of valueFrom",
        lambda value: _scalar(value) or isinstance(value, Mapping),
        Mapping,
        'write {"NAME": "value"}; remove variables without a value',
    ),
    "hosts": Shape(
        "a list of node names", lambda value: _text(value) and value != "", Sequence, 'write ["node-1"]',
    ),
    "skip_on_exit_code": Shape(
        "an exit code from 1 to 255, or a list of them", _exit_codes, remedy="write 99, or [3, 99]"
    ),
    "require": Shape(
        "a comparison with a number (>=, <=, > or <), or finite, by name", _bound, Mapping,
        'write {"val_accuracy": ">= 0.9", "loss": "finite"}',
    ),
    "fail_on_nan": Shape(
        "True, False, or names of metrics", _metric_names, remedy='write "loss", ["loss", "grad_norm"], or True'
    ),
    "replicas": Shape("a whole number, 0 or more, by role", _whole, Mapping, 'write {"Worker": 2}', numbers=True),
    "container_resources": Shape("a mapping of resources to quantities", _scalar, Mapping, 'write {"memory": "64Gi"}'),
    "nproc_per_node": Shape(
        "a whole number from 1, or auto, gpu or cpu",
        lambda value: _whole(value, 1) or value in ("auto", "gpu", "cpu"),
        remedy="write one of these, or remove it for one process in each replica",
        numbers=True,
    ),
    "tolerations": Shape(
        "a list of mappings with key, operator, value, effect and tolerationSeconds", _like("Toleration"), Sequence,
        f'write [{{"key": "{DEFAULT_RESOURCE}", "operator": "Exists"}}]',
    ),
    "affinity": Shape(
        "a mapping with nodeAffinity, podAffinity or podAntiAffinity, as in a pod's spec",
        _like("Affinity"),
        remedy="see kubectl explain pod.spec.affinity",
    ),
    "volumes": Shape(
        "a list of ClaimVolume, HostPath and SharedMemory",
        lambda value: isinstance(value, Volume) and not isinstance(value, type),
        Sequence,
        "write volumes=[SharedMemory()]; put any other volume into the manifest",
    ),
    "on_finish_action": _one_of(*(action.value for action in OnFinishAction)),
    "reattach": _one_of("always", "if_unchanged"),
    "conditions": _one_of(
        "Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed", many=Sequence
    ),
}  # fmt: skip
