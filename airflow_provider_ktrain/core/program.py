"""A Python function as the program of a job's replicas: what can travel, and how.

Only the function's source travels, and its arguments as JSON; nothing of the module around it.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import symtable
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.result import RESULT_MARKER

PROGRAM_VARIABLE = "KTRAIN_PROGRAM"
MAX_BYTES = 96 * 1024  #: of the encoded program: Linux takes 128 KiB in one environment variable

#: writes the program to a file, so that tracebacks show its lines, and becomes it
_LAUNCH = """\
import base64, os, sys, tempfile
with tempfile.NamedTemporaryFile("wb", prefix="ktrain-", suffix=".py", delete=False) as f:
    f.write(base64.b64decode(os.environ["{variable}"]))
os.execv(sys.executable, [sys.executable, "-u", *{options!r}, f.name])
"""

_PROGRAM = """\
{source}

if __name__ == "__main__":
    import json as _json
    import os as _os

    _given = _json.loads({given!r})
    _returned = {name}(*_given["args"], **_given["kwargs"])
    if _os.environ.get("RANK", "0") == "0":
        try:
            _text = _json.dumps(_returned, allow_nan=False)
        except (TypeError, ValueError) as _error:
            _text = f"the return value of {name} cannot travel: {{_error}}"
        print({marker!r} + _text, flush=True)
"""


def cannot_travel(source: str, name: str) -> Iterator[str]:
    """What the function's source needs that it does not bring: one line each.

    :param source: the function's definition, without decorators of ours.
    """
    tree = ast.parse(textwrap.dedent(source))
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    if function is None:
        yield f"{name} is no function with a source of its own (a lambda?): write it with def"
        return
    if isinstance(function, ast.AsyncFunctionDef):
        yield f"{name} is async: call asyncio.run inside of a plain function"
    if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(function)):
        yield f"{name} is a generator: return one value"
    function.decorator_list = []
    # annotations are not evaluated in the program
    plain = "from __future__ import annotations\n" + ast.unparse(ast.Module([function], []))
    top = symtable.symtable(plain, "<function>", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()} | {name, "annotations"}
    for missing in sorted(_globals(top) - defined - set(dir(builtins)) - {"__name__", "__file__"}):
        yield (
            f"{name} uses {missing!r}, which is defined outside of it: import or define it inside of the function, "
            "or pass it as an argument"
        )


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Names that this scope and those inside of it look up in the module."""
    outermost = table.get_type() == "module"
    found = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (outermost or s.is_global())}
    return found.union(*(_globals(child) for child in table.get_children() if child.get_type() != "annotation"))


def program(source: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The program that calls the function with its arguments and hands over rank 0's return value.

    :raises ManifestError: arguments that are no JSON, or a program that is too large.
    """
    try:
        given = json.dumps({"args": list(args), "kwargs": dict(kwargs)}, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ManifestError(
            f"the arguments of {name} cannot travel: {e}",
            expected="values that JSON has: strings, numbers, booleans, None, lists and dicts",
            remedy="pass a path or an id instead",
        ) from None
    text = "from __future__ import annotations\n\n" + _PROGRAM.format(
        source=_undecorated(source), name=name, given=given, marker=RESULT_MARKER
    )
    if (size := len(base64.b64encode(text.encode()))) > MAX_BYTES:
        raise ManifestError(
            f"the function {name} and its arguments are too large",
            found=f"{size:,} bytes",
            expected=f"at most {MAX_BYTES:,}",
            remedy="put the code into the image, or pass a path instead of the data",
        )
    return text


def _undecorated(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return ast.unparse(tree)


def command(*, torchrun: bool) -> list[str]:
    """The command that runs the program: by torchrun, which reads the operator's PET_* variables, or plainly."""
    options = ["-m", "torch.distributed.run"] if torchrun else []
    return ["python3", "-c", _LAUNCH.format(variable=PROGRAM_VARIABLE, options=options)]


def environment(text: str) -> dict[str, str]:
    """The program in an environment variable; encoded, since Kubernetes expands `$(...)` in values."""
    return {PROGRAM_VARIABLE: base64.b64encode(text.encode()).decode()}
