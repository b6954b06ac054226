"""Texts of messages: words, placeholders for values, and choices between texts."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: What the docs call some values.
SYNONYMS = {"python_callable": "function", "ref": "job", "claim": "job", "title": "job", "e": "error"}


@dataclass(frozen=True)
class Placeholder:
    """A value that is inserted.

    :param source: its expression.
    :param spec: its format, such as `.0f`, or `!r`. Default: "".
    """

    source: str
    spec: str = ""

    @property
    def name(self) -> str:
        """A word for the value: `namespace` for `claim.namespace`, `reason` for `event.get("reason")`."""
        name = _name_of(ast.parse(self.source.lstrip("*"), mode="eval").body).strip("_").lower()
        return SYNONYMS.get(name, name)


@dataclass(frozen=True)
class Choice:
    """One of several texts."""

    options: tuple[Text, ...]


Text = tuple["str | Placeholder | Choice", ...]


def choice(options: Iterable[Text]) -> Text:
    """One text for several: what is common to all, or a choice."""
    flat: list[Text] = []
    for text in options:
        flat += options_of(text)
    different = tuple(dict.fromkeys(flat))
    return different[0] if len(different) == 1 else (Choice(different),) if different else ()


def has_words(text: Text) -> bool:
    """Whether a text has words of its own besides the values that are inserted."""
    return any(
        any(map(has_words, part.options)) if isinstance(part, Choice) else isinstance(part, str) and part.strip(" :;,.")
        for part in text
    )


def variants(text: Text) -> Iterator[tuple[str | Placeholder, ...]]:
    """Each text without choices, so that each option is used at least once."""
    choices = [part for part in text if isinstance(part, Choice)]
    expanded = {choice: [v for option in choice.options for v in variants(option)] for choice in choices}
    for i in range(max((len(options) for options in expanded.values()), default=1)):
        parts = [
            expanded[part][min(i, len(expanded[part]) - 1)] if isinstance(part, Choice) else (part,) for part in text
        ]
        yield tuple(itertools.chain.from_iterable(parts))


def nonempty(texts: Iterable[Text]) -> list[Text]:
    return [option for text in texts for option in options_of(text) if option]


def options_of(text: Text) -> tuple[Text, ...]:
    """The options of a text that is one choice, or the text."""
    return text[0].options if len(text) == 1 and isinstance(text[0], Choice) else (text,)


def shown(text: Text) -> str:
    """The text with placeholders as `{name}` and choices as `(this / that)`; `(this)?` may be left out."""
    return "".join(_shown(part) for part in text)


def lines(text: Text) -> list[str]:
    """The text as `shown`, with one entry for each line; of a text that is one choice, for each line of each option."""
    return [line for option in options_of(text) for line in shown(option).split("\n") if line]


def _shown(part: str | Placeholder | Choice) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Placeholder):
        return f"{{{part.name}}}"
    options = [shown(option).replace("\n", " ") for option in part.options]
    return f"({' / '.join(filter(None, options))}){'?' * ('' in options)}"


def _name_of(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type"))):
            return "type"
        case ast.Attribute(value=value, attr="__name__"):
            return _name_of(value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(args=[ast.Constant(value=str(key)), *_]) if key.isidentifier():
            return key
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            return f"number of {_name_of(value)}"
        case ast.Call(func=ast.Name(id=name)) if name.endswith("_of"):
            return name.removesuffix("_of")
        case ast.Call(func=ast.Name(id="counted"), args=[_, ast.Constant(value=str(noun))]):
            return f"number of {noun}s"
        case ast.Call(func=ast.Attribute(value=value, attr="replace")):
            return _name_of(value)
        case ast.Call(args=[value, *_]) | ast.Call(func=ast.Attribute(value=value)):
            return _name_of(value)
        case ast.Await(value=value) | ast.Subscript(value=value) | ast.BinOp(left=value) | ast.IfExp(body=value):
            return _name_of(value)
        case ast.FormattedValue(value=value) | ast.GeneratorExp(elt=value) | ast.ListComp(elt=value):
            return _name_of(value)
        case ast.BoolOp(values=[value, *_]):
            return _name_of(value)
        case ast.JoinedStr(values=values):
            return next((_name_of(v) for v in values if isinstance(v, ast.FormattedValue)), "value")
    return "value"


def specified(part: str | Placeholder | Choice, spec: str) -> str | Placeholder | Choice:
    """The part, if it is a placeholder with the format of a `%` conversion."""
    formats = {"%s": "", "%d": "d", "%r": "!r"}
    if isinstance(part, Placeholder):
        return Placeholder(part.source, formats.get(spec, spec.removeprefix("%")))
    return part


def formatted(text: Text, call: ast.Call) -> Text:
    """The text with the placeholders of `str.format` replaced."""
    given = {str(k.arg): ast.unparse(k.value) for k in call.keywords}
    parts: list[str | Placeholder | Choice] = []
    for part in text:
        if isinstance(part, Choice):
            parts.append(Choice(tuple(formatted(option, call) for option in part.options)))
        elif isinstance(part, str):
            for i, piece in enumerate(re.split(r"\{(\w*)\}", part)):
                parts.append(Placeholder(given.get(piece) or ast.unparse(call.args[0])) if i % 2 else piece)
        else:
            parts.append(part)
    return tuple(part for part in parts if part != "")
