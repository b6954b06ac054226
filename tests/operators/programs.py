"""The programs of pods in virtual time: a part of the shell's language, executed step by step."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Steps = Generator[float | str, None, int]  #: Seconds that pass, and lines that are printed; returns the exit status.
_SEPARATOR = re.compile(r"[;\n]+|&")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_CLOSING = {"for": ("do", "done"), "if": ("then", "fi"), "while": ("do", "done"), "until": ("do", "done")}


class Exited(Exception):
    """The program has ended."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit {code}")
        self.code = code


@dataclass
class Command:
    """A simple command, or a compound one: `{ ... }`, for, if, while or until.

    :param after: `&&` or `||`: whether it depends on the status of the one before. Default: it doesn't.
    """

    words: Sequence[str]
    condition: Sequence[Command] = ()
    body: Sequence[Command] = ()
    after: str = ""


class Program:
    """A program: `sh -c` with echo, sleep, exit, true, false, `trap ... TERM`, variables, tests, conditions and loops.

    :param command: its words.
    :param environment: its variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._script = command[2] if list(command[:2]) == ["sh", "-c"] else shlex.join(command)
        self._variables = dict(environment)
        self._on_term: str | None = None  # None: it ends with exit code 143

    def steps(self) -> Generator[float | str]:
        """Its steps.

        :raises Exited: at its end.
        """
        raise Exited((yield from self._run(self._script)))

    def terminated(self) -> Generator[float | str]:
        """The steps after SIGTERM."""
        raise Exited(143 if self._on_term is None else (yield from self._run(self._on_term)))

    def _run(self, script: str) -> Steps:
        script = _ARITHMETIC.sub(lambda found: found[0].replace(" ", ""), script)
        lexer = shlex.shlex(script, posix=True, punctuation_chars=";&|<>\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
        commands, _ = _parsed(list(lexer), 0, ())
        return (yield from self._execute(commands))

    def _execute(self, commands: Sequence[Command]) -> Steps:
        status = 0
        for command in commands:
            if command.after != ("&&" if status else "||"):
                status = yield from self._command(command)
        return status

    def _command(self, command: Command) -> Steps:
        if not command.body:
            is_quoted = command.words[0] == "trap"
            words = command.words if is_quoted else [self._expanded(word) for word in command.words]
            return (yield from self._simple(list(words)))
        if not command.condition:
            return (yield from self._execute(command.body))
        (kind,), status = command.words, 0
        if kind == "for":
            name, _, *values = command.condition[0].words
            for self._variables[name] in values:
                status = yield from self._execute(command.body)
            return status
        while ((yield from self._execute(command.condition)) == 0) is (kind != "until"):
            status = yield from self._execute(command.body)
            if kind == "if":
                break
        return status

    def _expanded(self, word: str) -> str:
        word = _ARITHMETIC.sub(lambda found: str(self._calculated(found[1])), word)
        return re.sub(r"\$(\w+)", lambda found: self._variables.get(found[1], ""), word)

    def _calculated(self, expression: str) -> int:
        left, operator, right = re.split(r"([-+])", expression)
        values = [int(self._variables.get(value.strip("$ "), value)) for value in (left, right)]
        return values[0] + values[1] * (1 if operator == "+" else -1)

    def _simple(self, words: list[str]) -> Steps:
        match words:
            case ["echo", *text]:
                yield " ".join(text).partition(" >& ")[0]
            case ["sleep", seconds]:
                yield float(seconds)
            case ["exit", code]:
                raise Exited(int(code))
            case ["false"]:
                return 1
            case ["trap", handler, "TERM"]:
                self._on_term = handler
            case ["[", "-n", text, "]"]:
                return int(not text)
            case ["[", left, operator, right, "]"]:
                equal = {"=": left == right, "!=": left != right}
                return int(not (equal[operator] if operator in equal else _compared(operator, int(left), int(right))))
            case [*assigned] if all(re.match(r"\w+=", one) for one in assigned):
                self._variables |= {name: value for name, _, value in (one.partition("=") for one in assigned)}
            case ["true" | ":" | "wait"]:
                pass
            case _:
                raise NotImplementedError(f"no program in virtual time can run: {shlex.join(words)}")
        return 0


def _compared(operator: str, left: int, right: int) -> bool:
    return {"-lt": left < right, "-le": left <= right, "-eq": left == right}[operator]


def _parsed(words: Sequence[Any], at: int, ends: Collection[str]) -> tuple[list[Command], int]:
    """The commands from a word on, and where the word is that ends them."""
    commands: list[Command] = []
    after = ""
    while at < len(words) and words[at] not in ends:
        word = words[at]
        if _SEPARATOR.fullmatch(word) or word in ("&&", "||"):
            after, at = word if word in ("&&", "||") else "", at + 1
        elif word == "{":
            body, at = _parsed(words, at + 1, ("}",))
            commands.append(Command((), (), body, after))
            at += 1
        elif word in _CLOSING:
            begin, end = _CLOSING[word]
            condition, at = _parsed(words, at + 1, (begin,))
            body, at = _parsed(words, at + 1, (end,))
            commands.append(Command((word,), condition, body, after))
            at += 1
        else:
            end_at = at
            while end_at < len(words) and not (_SEPARATOR.fullmatch(words[end_at]) or words[end_at] in ("&&", "||")):
                end_at += 1
            commands.append(Command(words[at:end_at], after=after))
            at = end_at
    return commands, at
