"""From what an author gives (dict, YAML text, a file, an SDK's object) to a manifest: plain JSON, nothing shared.

YAML is read as the API server's own reader does (YAML 1.1 without sexagesimal numbers and dates), and duplicate keys,
which kubectl refuses and PyYAML swallows, are errors.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from airflow_provider_ktrain.core.errors import ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.core.kinds.base import KINDS, Manifest

SUFFIXES = (".yaml", ".yml", ".json")
MAX_VALUES = 100_000  #: more than any manifest has (etcd takes 1.5 MiB): stops YAML aliases that multiply


@dataclass(frozen=True)
class Document:
    """One document of a source.

    :param content: its value, plain JSON.
    :param file: where it was read from, or `<text>`, or empty for an object.
    :param line: its first line in the file, from 1.
    :param lines: the line of each JSON path; empty for what was not text.
    :param beside: kind and name of the documents beside it.
    """

    content: Any
    file: str = ""
    line: int = 0
    lines: Mapping[str, int] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def left_out(self) -> Iterator[str]:
        """What to say of the documents beside it."""
        for title in self.beside:
            yield f"{title} stands beside the job and is not submitted: apply it before, as by kubectl apply"

    def line_of(self, path: str) -> int:
        """The line of a JSON path, or of the nearest thing around it that has one; 0 where nothing is known."""
        while path not in self.lines and path != "$":
            path = re.sub(r"(\.[^.\[\]]+|\[[^\[\]]*\])$", "", path) or "$"
        return self.lines.get(path, self.line)


def load(source: object, folder: str | os.PathLike[str] | None = None) -> Manifest:
    """The one training job of a source, as a dict of its own that may be changed freely.

    :param source: a mapping; YAML or JSON text (templates already rendered); the path of a .yaml, .yml or .json file;
        or an object of a Kubernetes SDK (`to_dict()`). Of several documents exactly one must be a training job; the
        others are left out (:func:`the_job` names them in `beside`).
    :param folder: where relative paths start; the working directory by default.
    :raises ManifestError: naming file, line, what was found, what was expected and the remedy.
    """
    manifest: Manifest = the_job(read(source, folder)).content
    return manifest


def the_job(documents: Sequence[Document]) -> Document:
    """The one training job among the documents; `beside` names the others, which nobody will submit.

    :raises ManifestError: where there is none, or more than one.
    """
    known = " or ".join(sorted(KINDS))
    if not documents:
        raise ManifestError("the manifest is empty", expected=f"one {known}", remedy="give the job's manifest")
    jobs = [d for d in documents if isinstance(d.content, dict) and d.content.get("kind") in KINDS]
    if len(documents) > 1 and len(jobs) != 1:
        raise ManifestError(
            f"the manifest has {len(jobs) or 'no'} training jobs",
            where=documents[0].file,
            found=", ".join(f"{_title(d.content)} (line {d.line})" for d in jobs or documents),
            expected=f"exactly one {known}",
            remedy="one manifest a task: keep one training job in this one",
        )
    job = (jobs or documents)[0]
    if not isinstance(job.content, dict):
        raise ManifestError(
            "the manifest is no mapping",
            where=job.where,
            found=_short(job.content),
            expected=f"apiVersion, kind ({known}), metadata and spec",
            remedy="a path must end in " + ", ".join(SUFFIXES) if isinstance(job.content, str) else "",
        )
    return replace(job, beside=tuple(_title(d.content) for d in documents if d is not job))


def read(source: object, folder: str | os.PathLike[str] | None = None) -> list[Document]:
    """All documents of a source that hold something. Parameters and errors as for :func:`load`."""
    if isinstance(source, Mapping):
        return list(_listed(Document(plain(source))))
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_path(source)):
        path = Path(folder or ".") / os.fspath(source)
        return parse(_text_of(path), str(source))
    if isinstance(source, str):
        return parse(source, "<text>")
    if hasattr(source, "to_dict"):
        return [Document(plain(source))]
    raise ManifestError(
        "the manifest is of a type that cannot be read",
        found=type(source).__name__,
        expected="a dict, YAML text, the path of a YAML file, or an object with to_dict()",
    )


def plain(value: Any) -> Any:
    """A copy of JSON values in which nothing is shared, so that a change in one place is a change in one place.

    YAML aliases share: with `copy.deepcopy` a change to the Master would change a Worker that is `*master`. Objects of
    Kubernetes SDKs become what they would be on the wire.

    :raises ManifestError: for what JSON cannot say, and for aliases that contain themselves or multiply beyond reason.
    """
    left = [MAX_VALUES]

    def copy(value: Any, path: str, depth: int) -> Any:
        left[0] -= 1
        if left[0] < 0 or depth > 100:
            raise ManifestError(
                "the manifest is too large or contains itself", where=path[:200], remedy="check its aliases"
            )
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, Mapping):
            return {_key(k, path): copy(v, join(path, _key(k, path)), depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [copy(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        if isinstance(value, datetime.datetime | datetime.date):
            return value.isoformat()
        if isinstance(getattr(value, "attribute_map", None), Mapping):  # models of OpenAPI's Python generator
            named = ((json_name, getattr(value, name)) for name, json_name in value.attribute_map.items())
            return {k: copy(v, join(path, k), depth + 1) for k, v in named if v is not None}
        if hasattr(value, "to_dict"):
            return copy(value.to_dict(), path, depth + 1)
        raise ManifestError("a value that JSON has not", where=path, found=_short(value), remedy="quote it")

    return copy(value, "$", 0)


def unrendered(text: str) -> str:
    """Text with Jinja's (or Helm's) expressions in it, made readable: a word stands for what is not known yet."""
    return _JINJA.sub(lambda m: UNKNOWN if m[0].startswith("{{") else "", text)


def unknown(content: Any, path: str = "$") -> Iterator[str]:
    """The JSON paths of the values that `unrendered` has put its word into."""
    members = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in members:
        yield from unknown(value, join(path, key) if isinstance(key, str) else f"{path}[{key}]")
    if isinstance(content, str) and UNKNOWN in content:
        yield path


UNKNOWN = "ktrain-template"
_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}")


def join(path: str, key: str) -> str:
    """The JSON path of a member: `$.a.b`, `$.a['b/c']`."""
    return f"{path}.{key}" if re.fullmatch(r"[A-Za-z_][\w-]*", key) else f"{path}['{key}']"


def _is_path(text: str) -> bool:
    return "\n" not in text and text.strip().endswith(SUFFIXES) and not text.lstrip().startswith(("{", "---"))


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ManifestUnreadableError(
            f"the manifest {path} does not exist",
            found=f"nothing at {path.absolute()}",
            expected="a YAML file",
            remedy="give an absolute path, or one relative to the DAG's folder",
        ) from None
    except OSError as e:
        raise ManifestUnreadableError(
            f"the manifest {path} cannot be read", found=str(e.strerror), remedy="check it"
        ) from None
    except UnicodeDecodeError as e:
        raise ManifestError(
            f"the manifest {path} is no UTF-8", found=f"byte {path.read_bytes()[e.start]:#04x} at {e.start}"
        ) from None


def parse(text: str, file: str = "<text>") -> list[Document]:
    """All documents of YAML or JSON text that hold something; `file` is what errors call it."""
    try:
        return list(_documents(text, file))
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        lines = text.splitlines()
        line = min(mark.line + 1, len(lines)) if mark else 0
        raise ManifestError(
            f"the manifest is no YAML: {e.problem or e.context}",
            where=f"{file}:{line}" if line else file,
            found=repr(lines[line - 1].strip()[:120]) if 0 < line <= len(lines) else "",
            expected="YAML",
            remedy="look at the indentation, quotes and colons of this line and the one before",
        ) from None
    except yaml.YAMLError as e:
        raise ManifestError(f"the manifest is no YAML: {e}", where=file, expected="YAML") from None
    except RecursionError:
        raise ManifestError("the manifest contains itself", where=file, remedy="check its aliases") from None


def _documents(text: str, file: str) -> Iterator[Document]:
    if text.lstrip().startswith("{"):  # JSON may be indented by tabs, YAML may not
        try:
            yield from _listed(Document(plain(json.loads(text)), file, 1, {}))
            return
        except json.JSONDecodeError:
            pass
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # check_node() said so
            lines = dict(_lines(node, "$", set()))
            content = plain(loader.construct_document(node))
            if content is not None:
                yield from _listed(Document(content, file, node.start_mark.line + 1, lines))
    finally:
        loader.dispose()


def _listed(document: Document) -> Iterator[Document]:
    """The document, or the items of what `kubectl get -o yaml` writes of several objects."""
    content = document.content
    items = content.get("items") if isinstance(content, dict) and str(content.get("kind")).endswith("List") else None
    if not isinstance(items, list):
        yield document
        return
    for i, item in enumerate(items):
        root = f"$.items[{i}]"
        lines = {"$" + path.removeprefix(root): n for path, n in document.lines.items() if path.startswith(root)}
        yield Document(item, document.file, lines.get("$", document.line), lines)


def _lines(node: yaml.Node, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """The line of each path. An alias has the line of what holds it; a key that stands twice is refused."""
    yield path, node.start_mark.line + 1
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands twice in one mapping, first in line {first[key.value]}",
                    problem_mark=key.start_mark,
                )
            first[key.value] = line
            inner = join(path, key.value)
            yield from _lines(value, inner, seen)
            yield inner, line
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, f"{path}[{i}]", seen)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads as Kubernetes does: keys are text, no dates, no base 60 (`22:10` is text, not 1330)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        return {
            _key(self.construct_object(key, deep=True), f"line {key.start_mark.line + 1}"): self.construct_object(
                value, deep=deep
            )
            for key, value in node.value
        }


_NUMBERS = {
    "int": re.compile(r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"),
    "float": re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rpartition(":")[2] not in (*_NUMBERS, "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _regexp in _NUMBERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _regexp, list("-+0123456789."))


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise ManifestError("a key that is no text", where=path, found=_short(key), expected="text")


def _title(content: Any) -> str:
    if not isinstance(content, Mapping):
        return _short(content)
    metadata = content.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{content.get('kind', 'something without a kind')} {name or '(no name)'}"


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 120 else text[:117] + "..."
