"""Collects the messages that the provider can log or raise, from its source code, for docs/reference/messages.md.

    python scripts/messages.py [WORD]

prints those that contain the word. A message is a text with placeholders, found where the code passes it to a logger,
an error, a cause or a check. Variables, parameters, constants and functions that return `str` are replaced by their
texts; where there are several, the message has a choice.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where this file is run as a script

from scripts.message_texts import Placeholder, Text, choice, formatted, has_words, nonempty, shown, specified

PACKAGE = Path(__file__).resolve().parent.parent / "airflow_provider_ktrain"
LEVELS = ("info", "warning", "error", "exception")
NOTICES = ("add_notice", "gap")  #: Methods that add a warning to the lines of a container.
ONLY_LOGGED = "_only_logged"  #: Method that logs its argument as a warning, if there is an error.
MAX_DEPTH = 7  #: How many variables and functions are replaced one within another.
#: Functions that return their argument's text.
PASS_THROUGH = ("first_line", "with_short_first_line", "clipped", "clean", "masked", "str", "_sentence")
#: Functions whose result is shown as a placeholder.
VALUES = ("counted", "format_duration", "clipped", "readable_size")
BUILTIN_ERRORS = ("ValueError", "AirflowSensorTimeout", "AirflowSkipException")
ERROR_DETAILS = ("where", "found", "expected", "remedy")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Around = tuple[Function | ast.ClassDef, ...]  #: What an expression is in, innermost last.

#: The parameters of what carries a text to a message, and the kind of that message.
CARRIERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Cause": ("cause", ("category", "summary", "detail", "resolution")),
    "FailurePattern": ("cause", ("pattern", "category", "description", "resolution")),
    "Finding": ("check", ("at", "message", "found", "expected", "hint")),
    "Problem": ("check", ("level", "code", "path", "message", "found", "expected", "hint")),
    "Decision": ("part", ("action", "reason")),
    "Verdict": ("part", ("orphan", "reason")),
    "Released": ("info", ("done", "pods", "gpus", "seconds", "text")),
}
TEXT_OF = ("summary", "description", "message", "reason", "text")
REMEDY_OF = ("remedy", "resolution", "hint")
#: Methods and functions whose result is logged in another module.
RETURNED: Mapping[tuple[str, str], str] = {
    ("operators/airflow_settings", "without_retry"): "warning",
    ("operators/airflow_settings", "redelivered"): "warning",
    ("core/diagnosis/crash_loop", "describe"): "warning",
    ("engine/follow/state", "describe"): "info",
    ("core/state/pods/usage", "__str__"): "info",
    ("core/state/pods/replica_status", "_line"): "info",
    ("core/state/steps/reported_steps", "describe"): "info",
    ("core/logs/repetition", "repetition_of"): "info",
    ("core/logs/result", "_joined"): "part",
    ("core/logs/result", "_parsed"): "part",
    ("core/text/xcom_values", "storable_outputs"): "part",
    ("core/text/xcom_values", "_stored"): "part",
    ("core/text/xcom_values", "_items"): "part",
    ("core/text/xcom_values", "_limited"): "part",
    ("core/manifest/program", "cannot_travel"): "ValueError",
    ("decorators/base", "__init__"): "ValueError",
    ("decorators/base", "_context_problems"): "ValueError",
    ("engine/job_control", "scale"): "info",
    ("engine/job_control", "suspend"): "info",
    ("engine/job_control", "resume"): "info",
    ("operators/checkpoint_listing", "describe"): "info",
    ("operators/submission", "try_out"): "info",
    ("core/kinds/trainjob/patches", "lacks"): "info",
}


@dataclass(frozen=True)
class Message:
    """One place in the code that logs, raises or returns a message.

    :param module: path of the module below the package, without suffix.
    :param line: number of the line.
    :param kind: level of a logged message, class of an error, `cause`, `check`, or `part` of other messages.
    :param text: the message; "" if its words can't be found.
    :param when: what the code around it does: the comment above it, or the docstring of the function.
    :param details: found, expected and remedy, as far as the message has them.
    """

    module: str
    line: int
    kind: str
    text: Text
    when: str
    details: Mapping[str, Text] = field(default_factory=dict)

    @property
    def remedy(self) -> Text:
        return next((self.details[name] for name in REMEDY_OF if name in self.details), ())


@dataclass(frozen=True)
class Scope:
    """Where an expression is.

    :param module: its module.
    :param around: the classes and functions around it, innermost last. Default: none.
    :param depth: how many texts are inserted one within another. Default: 0.
    """

    module: str
    around: tuple[Function | ast.ClassDef, ...] = ()
    depth: int = 0

    @property
    def functions(self) -> list[Function]:
        """The functions around it, innermost first."""
        return [node for node in reversed(self.around) if not isinstance(node, ast.ClassDef)]

    def deeper(self) -> Scope:
        return replace(self, depth=self.depth + 1)


class Code:
    """The parsed modules of the package."""

    def __init__(self, package: Path = PACKAGE) -> None:
        paths = sorted(package.rglob("*.py"))
        sources = {p.relative_to(package).with_suffix("").as_posix(): p.read_text() for p in paths}
        for path in sorted(package.rglob("failure_patterns.toml")):
            sources[path.relative_to(package).with_suffix("").as_posix()] += _patterns(path)
        self.lines = {name: text.splitlines() for name, text in sources.items()}
        self.modules = {name: ast.parse(text) for name, text in sources.items()}
        self.functions: dict[str, list[tuple[str, Function]]] = {}
        self.constants: dict[tuple[str, str], ast.expr] = {}
        self.parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        self.errors = set(BUILTIN_ERRORS)
        self._assigned: dict[Function, list[tuple[ast.expr, ast.expr]]] = {}
        self.calls: dict[str, list[tuple[Around, ast.Call]]] = {}
        for name, tree in self.modules.items():
            for target, value in _assignments(tree.body):
                if isinstance(target, ast.Name):
                    self.constants[name, target.id] = value
            self.calls[name] = []
            self._index(name, tree, ())

    def _index(self, module: str, node: ast.AST, around: Around) -> None:
        """Note what is below a node, in the order of the code."""
        for block in node._fields:
            value = getattr(node, block, None)
            for child in value if isinstance(value, list) else (value,):
                if not isinstance(child, ast.AST) or isinstance(child, ast.expr_context):
                    continue
                self.parents[child] = (node, block)
                within = around
                if isinstance(child, ast.Call):
                    self.calls[module].append((around, child))
                elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.functions.setdefault(child.name, []).append((module, child))
                    within = (*around, child)
                elif isinstance(child, ast.ClassDef):
                    if child.name.endswith(("Error", "Unavailable")):
                        self.errors.add(child.name)
                    within = (*around, child)
                self._index(module, child, within)

    # messages

    def messages(self) -> Iterator[Message]:
        """All messages, by module and line."""
        for module, calls in self.calls.items():
            found = [self._message(Scope(module, around), call) for around, call in calls]
            returned = [
                m
                for (where, name), kind in RETURNED.items()
                if where == module
                for m in self._returned(where, name, kind)
            ]
            yield from sorted((m for m in (*found, *returned) if m is not None), key=lambda m: m.line)

    def _message(self, scope: Scope, call: ast.Call) -> Message | None:
        name = _called(call)
        parts: dict[str, ast.expr] = {str(k.arg): k.value for k in call.keywords}
        if isinstance(call.func, ast.Attribute) and call.args:
            if name == ONLY_LOGGED:
                return self._built(scope, call, "warning", (*self.text(call.args[0], scope), "\n", Placeholder("e")))
            if [function.name for function in scope.functions][:1] == [ONLY_LOGGED]:
                return None
            if name in LEVELS and ast.unparse(call.func.value).endswith("log"):
                return self._built(scope, call, "error" if name == "exception" else name, self._logged(call, scope))
            if name in NOTICES and scope.module.startswith("engine/logs"):
                return self._built(scope, call, "warning", self.text(call.args[0], scope))
        if name == "print" and scope.module == "cli" and "file" in parts:
            return self._built(scope, call, "printed", self.text(call.args[0], scope))
        if name == "warn":
            return self._built(scope, call, "warning", self.text(call.args[0], scope))
        if name in self.errors and call.args:
            details = {key: self.text(value, scope) for key, value in parts.items() if key in ERROR_DETAILS}
            return self._built(scope, call, name, self.text(call.args[0], scope), details)
        if name in CARRIERS:
            kind, parameters = CARRIERS[name]
            given = {**dict(zip(parameters, call.args, strict=False)), **parts}
            texts = {key: self.text(given[key], scope) for key in parameters if key in given}
            text = next((texts.pop(key) for key in TEXT_OF if key in texts), ())
            if name == "FailurePattern":
                text = (Placeholder("replica"), " ", *text, ": ", Placeholder("message"))
            return self._built(scope, call, f"{kind} {self._code(scope, texts)}".strip(), text, texts)
        return None

    @staticmethod
    def _code(scope: Scope, details: Mapping[str, Text]) -> str:
        """The code of a check: of the problem, or of the rule around it."""
        for decorator in (d for function in scope.functions for d in function.decorator_list):
            if isinstance(decorator, ast.Call) and _called(decorator) == "rule":
                return str(ast.literal_eval(decorator.args[0]))
        return shown(details["code"]) if "code" in details and has_words(details["code"]) else ""

    def _returned(self, module: str, name: str, kind: str) -> Iterator[Message]:
        """The texts that a function returns, yields or appends to a list."""
        for function in (f for where, f in self.functions[name] if where == module):
            around = self.parents[function][0]
            scope = Scope(module, (around, function) if isinstance(around, ast.ClassDef) else (function,))
            for node in ast.walk(function):
                value = node.value if isinstance(node, ast.Return | ast.Yield) else None
                if isinstance(node, ast.Call) and _called(node) == "append":
                    value = node.args[0]
                for member in value.elts if isinstance(value, ast.Tuple) else [value]:
                    if member is not None and has_words(text := self.text(member, scope)):
                        yield self._built(scope, member, kind, text)

    def _built(
        self, scope: Scope, node: ast.expr, kind: str, text: Text, details: Mapping[str, Text] | None = None
    ) -> Message:
        return Message(scope.module, node.lineno, kind, text, self._when(scope, node), details or {})

    def _when(self, scope: Scope, node: ast.expr) -> str:
        """The comment above the statement, or else the first sentence of the docstring around it."""
        statement: ast.AST = node
        while not isinstance(statement, ast.stmt):
            statement = self.parents[statement][0]
        comment: list[str] = []
        for line in reversed(self.lines[scope.module][: statement.lineno - 1]):
            if not re.match(r"\s*#:? ", line):
                break
            comment.insert(0, re.sub(r"^\s*#:? ", "", line))
        if comment:
            return " ".join(comment)
        documented = [
            around
            for around in reversed(scope.around)
            if not isinstance(around, ast.ClassDef) or [f.name for f in scope.functions][:1] == ["__init__"]
        ]
        text = next((text for around in documented if (text := ast.get_docstring(around))), "")
        return re.split(r"(?<=\.) ", " ".join(text.split("\n\n")[0].split()))[0]

    # texts

    def text(self, node: ast.expr | None, scope: Scope) -> Text:
        """The text that an expression may have."""
        found = self._text(node, scope) if node is not None and scope.depth < MAX_DEPTH else None
        return (Placeholder(ast.unparse(node) if node is not None else "value"),) if found is None else found

    def _text(self, node: ast.expr, scope: Scope) -> Text | None:
        """As `text`; None if the text is unknown."""
        match node:
            case ast.Constant(value=str(text)):
                return (text,) if text else ()
            case ast.JoinedStr(values=parts):
                return tuple(itertools.chain.from_iterable(self.text(part, scope) for part in parts))
            case ast.FormattedValue():
                return self._inserted(node, scope)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, scope) + self.text(right, scope)
            case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr() as text, op=ast.Mult()):
                return choice([self.text(text, scope), ()])
            case ast.IfExp(body=body, orelse=other):
                return choice([self.text(body, scope), self.text(other, scope)])
            case ast.BoolOp(op=ast.Or(), values=[*values, last]):
                return choice([*nonempty(self.text(value, scope) for value in values), self.text(last, scope)])
            case ast.NamedExpr(value=value):
                return self.text(value, scope)
            case ast.Name():
                return self._of_name(node, scope)
            case ast.Attribute(attr=name) if name.isupper():
                return self._of_constant(name, scope)
            case ast.Subscript(value=ast.Name(id=name)):
                return choice([self.text(row, scope) for row in self._rows(name, scope)]) or None
            case ast.Call():
                return self._of_call(node, scope)
        return None

    def _inserted(self, node: ast.FormattedValue, scope: Scope) -> Text:
        """A placeholder, or the text of its expression if that has words of its own."""
        spec = "".join(str(p.value) for p in getattr(node.format_spec, "values", ()) if isinstance(p, ast.Constant))
        text = self.text(node.value, scope.deeper())
        if not spec and node.conversion == -1 and any(not isinstance(part, Placeholder) for part in text):
            return text
        if isinstance(node.value, ast.Name) and isinstance(constant := self._constant(node.value.id, scope), ast.expr):
            with contextlib.suppress(ValueError):
                return (format(_number(constant), spec),)
        return (Placeholder(ast.unparse(node.value), "!r" if node.conversion == ord("r") else spec),)

    def _of_name(self, node: ast.Name, scope: Scope) -> Text | None:
        for function in scope.functions:
            if values := self._reaching(node, function):
                text = choice(self._at(value, position, scope.deeper()) for value, position in values)
                text = choice(nonempty([text])) if self._is_tested(node) else text
                return text + self._added(node, function, scope)
            if node.id in _parameters(function):
                return self._of_parameter(node.id, function, scope)
        return self._of_constant(node.id, scope)

    def _reaching(self, use: ast.Name, function: Function) -> list[tuple[ast.expr, int | None]]:
        """The values that may be assigned to the name before its use, each with the position in it."""
        assigned = [
            (target, value, position)
            for target, value in self._assignments_in(function)
            if target.lineno <= use.lineno
            for position in _positions(target, use.id)
        ]
        found: list[tuple[ast.expr, int | None]] = []
        here = self._blocks(use)
        for target, value, position in sorted(assigned, key=lambda a: a[0].lineno, reverse=True):
            if use in ast.walk(value):
                continue
            there = self._blocks(target)
            if any((node, _OTHER[block]) in there for node, block in here if block in _OTHER):
                continue  # in the other branch of an `if`
            found.insert(0, (value, position))
            if there <= here:
                break  # earlier values never reach the use
        return found

    def _assignments_in(self, function: Function) -> list[tuple[ast.expr, ast.expr]]:
        """All assignments in a function; they are searched once."""
        if function not in self._assigned:
            self._assigned[function] = list(_assignments(ast.walk(function)))
        return self._assigned[function]

    def _is_tested(self, use: ast.Name) -> bool:
        """Whether the use is in an `if` or a conditional expression that tests the name, so that it isn't empty."""
        node: ast.AST = use
        while node in self.parents:
            node, block = self.parents[node]
            if block == "body" and isinstance(node, ast.If | ast.IfExp):
                tested = [n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)]
                if use.id in tested and not isinstance(node.test, ast.UnaryOp):
                    return True
        return False

    def _blocks(self, node: ast.AST) -> set[tuple[ast.AST, str]]:
        """The branches in which a node is: the statement and the name of its block."""
        found: set[tuple[ast.AST, str]] = set()
        while node in self.parents:
            parent, block = self.parents[node]
            if isinstance(parent, ast.If | ast.While | ast.Try | ast.ExceptHandler) and block != "test":
                found.add((parent, block))
            node = parent
        return found

    def _added(self, use: ast.Name, function: Function, scope: Scope) -> Text:
        """What `name += ...` adds before the use."""
        added: Text = ()
        for node in ast.walk(function):
            if isinstance(node, ast.AugAssign) and node.lineno < use.lineno and ast.unparse(node.target) == use.id:
                text = self.text(node.value, scope.deeper())
                added += text if self._blocks(node) <= self._blocks(use) else choice([text, ()])
        return added

    def _at(self, value: ast.expr, position: int | None, scope: Scope) -> Text:
        """The text of a value, or of its member at a position."""
        if position is None:
            return self.text(value, scope)
        if isinstance(value, ast.IfExp):
            return choice([self._at(value.body, position, scope), self._at(value.orelse, position, scope)])
        if isinstance(value, ast.Tuple):
            return self.text(value.elts[position], scope)
        name = value.value if isinstance(value, ast.Subscript) else value
        rows = self._rows(name.id, scope) if isinstance(name, ast.Name) else []
        texts = [self._at(row, position, scope) for row in rows if isinstance(row, ast.Tuple)]
        return choice(texts) if texts else (Placeholder(ast.unparse(value)),)

    def _of_parameter(self, name: str, function: Function, scope: Scope) -> Text | None:
        """The texts that callers in the same module pass; None without words."""
        found = []
        for around, call in self.calls[scope.module]:
            if _called(call) != function.name:
                continue
            where = Scope(scope.module, around, scope.depth + 1)
            parameters = _parameters(function)
            is_bound = isinstance(call.func, ast.Attribute) and parameters[0] in ("self", "cls")
            given: dict[str, ast.expr] = dict(zip(parameters[is_bound:], call.args, strict=False))
            given |= {str(k.arg): k.value for k in call.keywords}
            if name in given:
                found.append(self.text(given[name], where))
        return choice(found) if any(map(has_words, found)) else None

    def _of_constant(self, name: str, scope: Scope) -> Text | None:
        value = self._constant(name, scope)
        return self.text(value, scope.deeper()) if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp) else None

    def _constant(self, name: str, scope: Scope) -> ast.expr | None:
        """The constant of this module, or the one of another module that nothing else has the name of."""
        named = [value for (_, constant), value in self.constants.items() if constant == name]
        only = named[0] if len(named) == 1 and name.strip("_").isupper() else None
        return self.constants.get((scope.module, name), only)

    def _rows(self, name: str, scope: Scope) -> list[ast.expr]:
        """The members of a constant tuple, or the values of a constant mapping."""
        value = self._constant(name, scope)
        if isinstance(value, ast.Dict):
            return value.values
        return value.elts if isinstance(value, ast.Tuple | ast.List) else []

    def _of_call(self, call: ast.Call, scope: Scope) -> Text | None:
        name = _called(call)
        if name in PASS_THROUGH and len(call.args) == 1:
            return self.text(call.args[0], scope)
        if isinstance(call.func, ast.Attribute) and name == "format":
            return formatted(self.text(call.func.value, scope), call)
        if isinstance(call.func, ast.Attribute) and name == "join":
            return self._of_join(call.func.value, call.args[0], scope)
        defined = [(m, f) for m, f in self.functions.get(name, ()) if _returns_text(f)]
        if len(defined) != 1 or name in VALUES:
            return None
        module, function = defined[0]
        within = Scope(module, (function,), scope.depth + 1)
        returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
        text = choice([self.text(value, within) for value in returns])
        return text if has_words(text) else None

    def _of_join(self, separator: ast.expr, members: ast.expr, scope: Scope) -> Text | None:
        if isinstance(members, ast.Call) and _called(members) == "filter":
            members = members.args[1]
        if not isinstance(members, ast.Tuple | ast.List):
            return None
        parts = [self.text(separator, scope) + self.text(m, scope) for m in members.elts]
        return tuple(itertools.chain.from_iterable(parts))[len(self.text(separator, scope)) :]

    def _logged(self, call: ast.Call, scope: Scope) -> Text:
        """The text of a logged message, whose `%s` are replaced by the arguments."""
        values = [self._inserted(ast.FormattedValue(value, -1), scope) for value in call.args[1:]]
        text = self.text(call.args[0], scope)
        if not values or not isinstance(text[0], str):
            return text
        pieces = re.split(r"(%(?:\.\d+)?[sdrf])", text[0])
        filled: Text = (pieces[0],)
        for value, spec, after in zip(values, pieces[1::2], pieces[2::2], strict=True):
            filled += (*(specified(part, spec) for part in value), after)
        return tuple(part for part in filled if part != "")


_OTHER = {"body": "orelse", "orelse": "body"}


def _patterns(path: Path) -> str:
    """The tables of a TOML file of patterns as Python, each below its comment."""
    text, fields = path.read_text(), ("pattern", "description", "resolution")
    lines = []
    for table, entries in tomllib.loads(text).items():
        if comment := re.search(rf"^((?:# .*\n)+)\n\[\[{table}\]\]", text, re.MULTILINE):
            calls = (
                f"FailurePattern(category=Category.{entry['category'].upper().replace(' ', '_')}, "
                f"{', '.join(f'{name}={entry[name]!r}' for name in fields)})"
                for entry in entries
            )
            lines.append(f"\n{comment[1]}{table} = ({', '.join(calls)},)")
    return "\n".join(lines)


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with its value; of a loop, the target with the iterable."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter


def _number(node: ast.expr) -> float:
    """The number that a constant is: a literal or a product of them."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _number(node.left) * _number(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError(ast.unparse(node))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _parameters(function: Function) -> list[str]:
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _returns_text(function: Function) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == "str"


def _positions(target: ast.expr, name: str) -> Iterator[int | None]:
    """Where a target assigns the name: None for the whole value, or a position in a tuple."""
    if isinstance(target, ast.Name) and target.id == name:
        yield None
    elif isinstance(target, ast.Tuple):
        yield from (i for i, member in enumerate(target.elts) if isinstance(member, ast.Name) and member.id == name)


@functools.cache
def messages() -> tuple[Message, ...]:
    """All messages of the package, by module and line."""
    return tuple(Code().messages())


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    for m in messages():
        if word in shown(m.text):
            print(f"{m.module}:{m.line} [{m.kind}] {shown(m.text)!r} WHEN {m.when} DO {shown(m.remedy)}")


if __name__ == "__main__":
    main()
