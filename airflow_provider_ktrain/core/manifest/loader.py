"""Loads a manifest from what an author writes (a dict, YAML text, an SDK's object) into plain JSON values.

YAML is read as the API server reads it (YAML 1.1 without sexagesimal numbers and dates). Duplicate keys, which kubectl
refuses and PyYAML ignores, are errors.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import KINDS, did_you_mean
from airflow_provider_ktrain.core.kinds.strategic_merge import member

TEXT = "manifest"  #: What messages call text that was not read from a file.
SUFFIXES = (".yaml", ".yml", ".json")
CHECK_ALIASES = "check the aliases of YAML"
#: How many parts a manifest's JSON may have, more than any manifest has (etcd accepts 1.5 MiB): YAML aliases may
#: multiply.
MAX_PARTS = 500_000


@dataclass(frozen=True)
class Document:
    """One document of a source.

    :param file: the file's path, `manifest` for other text, or empty for an object.
    :param line: its first line in the file, from 1.
    :param lines: the line of each JSON path; empty unless the source was YAML.
    :param beside: the other documents of the source.
    """

    content: Any
    file: str = ""
    line: int = 0
    lines: Mapping[str, int] = field(default_factory=dict)
    beside: tuple[Document, ...] = ()

    @property
    def left_out(self) -> Iterator[str]:
        """A warning for each of the other documents: they are not submitted."""
        for other in self.beside:
            hint = _misspelled([other]) or "create it before, for example by kubectl apply"
            yield f"{_title(other.content)} is not submitted, only the training job is: {hint}"

    def line_of(self, path: str) -> int:
        """The line of a JSON path, or of the innermost value around it that has one; 0 if unknown."""
        while path not in self.lines and path != "$":
            path = re.sub(r"(\.[^.\[\]]+|\[[^\[\]]*\])$", "", path) or "$"
        return self.lines.get(path, self.line)


def the_job(documents: Sequence[Document]) -> Document:
    """The one training job among the documents; `beside` names the others, which are not submitted.

    :raises ManifestError: if there is none, or more than one.
    """
    known = " or ".join(sorted(KINDS))
    if not documents:
        raise ManifestError("the manifest is empty", expected=f"one {known}", remedy="pass the job's manifest")
    jobs = [d for d in documents if isinstance(d.content, dict) and d.content.get("kind") in KINDS]
    if len(documents) > 1 and len(jobs) != 1:
        raise ManifestError(
            f"the manifest contains {len(jobs) or 'no'} training jobs",
            where=documents[0].file,
            found=", ".join(f"{_title(d.content)} (line {d.line})" for d in jobs or documents),
            expected=f"exactly one {known}",
            remedy=("" if jobs else _misspelled(documents))
            or "keep one training job in this manifest, and use one task for each job",
        )
    job = (jobs or documents)[0]
    if not isinstance(job.content, dict):
        raise ManifestError(
            "the manifest is not a mapping",
            where=f"{job.file}:{job.line}" if job.line else job.file,
            found=_short(job.content),
            expected=f"apiVersion, kind ({known}), metadata and spec",
            remedy="if this is a path, it must end in " + ", ".join(SUFFIXES) if isinstance(job.content, str) else "",
        )
    return replace(job, beside=tuple(d for d in documents if d is not job))


def load_documents(source: object, file: str = TEXT) -> list[Document]:
    """All documents of a source that are not empty.

    :param source: a mapping; YAML or JSON text; or an object of a Kubernetes SDK (`to_dict()`).
    :param file: the file that text was read from, for messages. Default: `manifest`, the name of the parameter.
    :raises ManifestError: naming file, line, what was found, what was expected and the remedy.
    """
    if isinstance(source, Mapping):
        return list(_listed(Document(plain(source))))
    if isinstance(source, str):
        return parse(source, file)
    if hasattr(source, "to_dict"):
        return [Document(plain(source))]
    raise ManifestError(
        "a manifest of this type can't be loaded",
        found=type(source).__name__,
        expected="a dict, YAML text, the path of a YAML file, or an object with to_dict()",
    )


def plain(value: Any) -> Any:
    """A copy of JSON values that shares no object, so that each place can be changed by itself.

    YAML aliases share objects: after `copy.deepcopy` a change to the Master would also change a Worker that is
    `*master`. Objects of Kubernetes SDKs are converted to their JSON.

    :raises ManifestError: for values that JSON doesn't have, and for aliases that contain themselves or multiply too
        often.
    """
    where = ""
    try:
        parts = list(itertools.islice(_ENCODER.iterencode(value), MAX_PARTS + 1))
        if len(parts) <= MAX_PARTS:
            return json.loads("".join(parts))
        why = "it is too large"
    except RecursionError:
        why = "it contains itself, or is too deep"
    except (TypeError, ValueError) as e:
        why = str(e)
        where = "" if "Circular" in why else _path_of_invalid(value, "$")
    raise ManifestError(
        f"the manifest can't be written as JSON: {why}", where=where, remedy=f"correct the value; {CHECK_ALIASES}"
    )


def _path_of_invalid(value: Any, path: str) -> str:
    """The path of the innermost value that JSON doesn't have."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        try:
            _ENCODER.encode(item)
        except (TypeError, ValueError):
            return _path_of_invalid(item, f"{path}[{key}]" if isinstance(key, int) else member(path, str(key)))
    return path


def _json_value(value: Any) -> Any:
    """What JSON has for a value of another type than its own."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(getattr(value, "attribute_map", None), Mapping):  # models of OpenAPI's Python generator
        named = ((json_name, getattr(value, name)) for name, json_name in value.attribute_map.items())
        return {json_name: v for json_name, v in named if v is not None}
    if hasattr(value, "to_dict"):
        return value.to_dict()
    raise TypeError(f"found {_short(value)}")


_ENCODER = json.JSONEncoder(default=_json_value, allow_nan=False)


def unrendered(text: str) -> str:
    """Text with Jinja (or Helm) expressions as valid YAML: each expression is replaced by a placeholder."""
    return _JINJA.sub(lambda m: UNKNOWN if m[0].startswith("{{") else "", text)


def templates(text: str) -> Iterator[tuple[int, str]]:
    """The Jinja (or Helm) expressions of a text, each with its line, from 1."""
    for found in _JINJA.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0]


def unknown(content: Any, path: str = "$") -> Iterator[str]:
    """The JSON paths of the values that contain the placeholder of `unrendered`."""
    members = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in members:
        yield from unknown(value, member(path, key) if isinstance(key, str) else f"{path}[{key}]")
    if isinstance(content, str) and UNKNOWN in content:
        yield path


UNKNOWN = "ktrain-template"
_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}")


def parse(text: str, file: str = TEXT) -> list[Document]:
    """All documents of YAML or JSON text that are not empty; errors name it `file`."""
    try:
        return list(_documents(text, file))
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        lines = text.splitlines()
        line = min(mark.line + 1, len(lines)) if mark else 0
        at_fault = lines[line - 1] if 0 < line <= len(lines) else ""
        has_tab = "\t" in at_fault[: len(at_fault) - len(at_fault.lstrip())] or "'\\t'" in str(e.problem)
        raise ManifestError(
            f"invalid YAML: {e.problem or e.context}",
            where=f"{file}:{line}" if line else file,
            found=repr((at_fault if has_tab else at_fault.strip())[:120]) if at_fault else "",
            expected="YAML",
            remedy="replace the tab by spaces"
            if has_tab
            else "check the indentation, quotes and colons of this line and the one before",
        ) from None
    except yaml.YAMLError as e:
        raise ManifestError(f"invalid YAML: {e}", where=file, expected="YAML") from None
    except RecursionError:
        raise ManifestError("the manifest contains itself", where=file, remedy="check its aliases") from None


def _documents(text: str, file: str) -> Iterator[Document]:
    if text.lstrip().startswith("{"):  # JSON may be indented by tabs, YAML may not
        try:
            yield from _listed(Document(plain(json.loads(text)), file, 1, {}))
            return
        except json.JSONDecodeError:
            pass
        except ValueError as e:
            raise _unreadable(e, file) from None
    loader = _Loader(text, file)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # check_node() returned True
            lines = dict(_lines(node, "$", set()))
            content = plain(_constructed(loader, node, file))
            if content is not None:
                yield from _listed(Document(content, file, node.start_mark.line + 1, lines))
    finally:
        loader.dispose()


def _constructed(loader: _Loader, node: yaml.Node, file: str) -> Any:
    """The content of a document.

    :raises ManifestError: a value can't be read, such as an integer of thousands of digits or `!!int text`.
    """
    try:
        return loader.construct_document(node)
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise _unreadable(e, file) from None


def _unreadable(error: Exception, file: str) -> ManifestError:
    """The error of a value that YAML or JSON allows, but Python can't make: an integer of thousands of digits."""
    return ManifestError(f"a value can't be read: {error}", where=file, remedy="check its numbers and tags")


def _listed(document: Document) -> Iterator[Document]:
    """The document, or the items of a List, as `kubectl get -o yaml` writes several objects."""
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
    """The line of each path; an alias has the line of the value that contains it.

    :raises MarkedYAMLError: for a duplicate key.
    """
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
                    problem=f"duplicate key {key.value!r}, first in line {first[key.value]}",
                    problem_mark=key.start_mark,
                )
            first[key.value] = line
            inner = member(path, key.value)
            yield from _lines(value, inner, seen)
            yield inner, line
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, f"{path}[{i}]", seen)


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads as Kubernetes does: no dates, no base 60 (`22:10` is text, not 1330).

    Merge keys may multiply, so their members are counted before they are copied.
    """

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self._file, self._merged = file, 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace the merge keys of a mapping by what they refer to.

        :raises ManifestError: the document has more than MAX_PARTS merged members.
        """
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(merged, yaml.MappingNode):
                        self.flatten_mapping(merged)
                        self._count(len(merged.value))
        super().flatten_mapping(node)

    def _count(self, members: int) -> None:
        """Count members that merge keys copy, before they are copied.

        :raises ManifestError: a document has too many: a few lines of YAML can ask for billions.
        """
        self._merged += members
        if self._merged > MAX_PARTS:
            raise ManifestError(
                "the manifest is too large: its merge keys (<<) multiply", where=self._file, remedy=CHECK_ALIASES
            )


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


def _misspelled(documents: Sequence[Document]) -> str:
    """A hint for the first document whose kind is that of a training job, misspelled; empty if there is none."""
    contents = (document.content for document in documents)
    hints = (did_you_mean(content.get("kind")) for content in contents if isinstance(content, dict))
    return next(filter(None, hints), "")


def _title(content: Any) -> str:
    if not isinstance(content, Mapping):
        return _short(content)
    metadata = content.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{content.get('kind', 'something without a kind')} {name or '(no name)'}"


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 120 else text[:117] + "..."
