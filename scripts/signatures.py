"""Writes the parameters that a constructor passes on to its base class into its source.

    python scripts/signatures.py

Editors and type checkers read the source: behind `**kwargs` they see no parameter of the base class. So `__init__` of a
subclass lists them twice, in its signature and in its call of the base class, each time between the comment
`# of BASE: scripts/signatures.py` and `**kwargs`. `tests/test_docs.py` fails if a list is out of date.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from pathlib import Path

OPERATORS = Path(__file__).resolve().parent.parent / "airflow_provider_ktrain" / "operators"
PASSED_ON = re.compile(r"( +)# of (\w+): scripts/signatures.py\n(?:.*\n)*? +\*\*kwargs(: Any)?,")
FILES = [file for file in sorted(OPERATORS.glob("*.py")) if PASSED_ON.search(file.read_text())]
LINE_LENGTH = 120


@functools.cache
def parameters(base: str) -> dict[str, str]:
    """The keyword parameters of a class's constructor as they are written there, by name."""
    for file in OPERATORS.glob("*.py"):
        text = file.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == base:
                (init,) = (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
                return {
                    arg.arg: " = ".join(ast.get_source_segment(text, part) or "" for part in (arg, default) if part)
                    for arg, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
                }
    raise LookupError(f"no module in {OPERATORS} defines {base}")


def _lists(found: re.Match[str]) -> str:
    """One of the two lists of a constructor."""
    indent, base, in_signature = found.groups()
    if in_signature:
        lines = [f"{indent}{text}," for text in parameters(base).values()]
    else:
        arguments = " ".join(f"{name}={name}," for name in parameters(base))
        lines = textwrap.wrap(arguments, LINE_LENGTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([f"{indent}# of {base}: scripts/signatures.py", *lines, f"{indent}**kwargs{in_signature or ''},"])


def updated(file: Path) -> str:
    """A module with its lists as the base classes are now."""
    return PASSED_ON.sub(_lists, file.read_text())


if __name__ == "__main__":
    for file in FILES:
        file.write_text(updated(file))
