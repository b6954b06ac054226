"""Turns a Python function into the program of a job's replicas.

Only the function's source is sent, as it was written, and its arguments as JSON; nothing of the module around it. The
source is never generated from a syntax tree: the image may have an older Python than Airflow, and `ast.unparse` of 3.12
and newer writes f-strings that older versions can't parse.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.task_variables import PROGRAM, TERMINATION_LOG, VARIABLE_PREFIX
from airflow_provider_ktrain.core.logs import result
from airflow_provider_ktrain.core.logs.result import NOT_RETURNED, PART_BYTES, PART_MARKER, RESULT_MARKER
from airflow_provider_ktrain.core.logs.stacks import FUNCTION_FILE, FUNCTION_OFFSET

#: Lets rank 0 write the termination message, at Kubernetes' default for `terminationMessagePath`. The path is in a
#: variable because the embedded cluster replaces paths in variables.
TERMINATION_MESSAGE = {TERMINATION_LOG: "/dev/termination-log"}
NOT_JSON = f"{NOT_RETURNED}is not JSON: "  #: Follows the marker if the function returned something else.
RETURNED = "returned"  #: Key of the return value in numbered lines: without it, None could mean that none was read.
IMAGE_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")  #: Variables that images set for their programs.
REASON_CHARS = 300  #: Length of the reason why a value is not JSON.
MAX_BYTES = 96 * 1024  #: Size of the encoded program: Linux takes 128 KiB in one environment variable.

#: Writes the program to a file, so that tracebacks show its lines, and executes it.
_LAUNCH = """\
import base64, os, sys, tempfile
path = os.path.join(tempfile.mkdtemp(prefix="ktrain-"), "{file}")
with open(path, "wb") as f:
    f.write(base64.b64decode(os.environ["{variable}"]))
os.execv(sys.executable, [sys.executable, "-u", *{options!r}, path])
"""

#: Starts Python in all slots by mpirun. Open MPI needs options that MPICH and Intel MPI don't know. Its ranks are not
#: bound to cores, because the pods on a node would all choose the same ones.
_MPIRUN = """\
import os, subprocess
words = ["mpirun", "--allow-run-as-root"]
version = subprocess.run([*words, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
if b"Open MPI" in version:
    names = dict.fromkeys([*{forwarded!r}, *sorted(name for name in os.environ if name.startswith({prefix!r}))])
    words += ["--bind-to", "none", *(word for name in names if name in os.environ for word in ("-x", name))]
else:
    words = words[:1]
os.execvp("mpirun", [*words, *{python!r}])
"""

_PROGRAM = """\
{source}

if __name__ == "__main__":
    import json as _json
    import os as _os

    {rank}
    _given = _json.loads({given!r})
    _returned = {name}(*_given["args"], **_given["kwargs"])
    if _rank == "0":
{search}
        try:
            _text = _json.dumps({value})
        except (TypeError, ValueError, RecursionError) as _error:
            try:
                _why = _ktrain_not_json(_returned, "") or str(_error)
            except RecursionError:
                _why = str(_error)
            _text = {not_json!r} + _why.encode("unicode_escape").decode()[:{reason_chars}]
{output}"""

# the error of json.dumps names the type, but not the place
_SEARCH = """\
        def _ktrain_not_json(_value, _at):
            if isinstance(_value, (str, int, float, type(None))):
                return ""
            if isinstance(_value, dict):
                for _key, _item in _value.items():
                    if not isinstance(_key, (str, int, float, type(None))):
                        return (_at or "it") + " has a key of type " + type(_key).__name__
                    _why = _ktrain_not_json(_item, "%s[%r]" % (_at, _key))
                    if _why:
                        return _why
                return ""
            if isinstance(_value, (list, tuple)):
                _found = (_ktrain_not_json(_item, "%s[%d]" % (_at, _i)) for _i, _item in enumerate(_value))
                return next((_why for _why in _found if _why), "")
            return (_at or "it") + " is of type " + type(_value).__name__
"""

_RESULT_LINE = f"""\
        print({RESULT_MARKER!r} + _text, flush=True)
        _message = ({RESULT_MARKER!r} + _text).encode(errors="replace")
        _path = _os.environ.get({TERMINATION_LOG!r}, "")
        if len(_message) <= {result.TERMINATION_MESSAGE_BYTES} and _os.path.exists(_path):
            try:
                with open(_path, "wb") as _file:
                    _file.write(_message)
            except OSError:
                pass
"""

_MPI_RANK = """\
_rank = _os.environ.get("OMPI_COMM_WORLD_RANK") or _os.environ.get("PMI_RANK")
    if _rank is None:
        raise SystemExit("mpirun has set neither OMPI_COMM_WORLD_RANK nor PMI_RANK: the rank is unknown")
"""

# each line is one write after a pause, so that mpirun reads and forwards it in one piece; the copy is for damaged lines
_NUMBERED_LINES = f"""\
        import time as _time
        import zlib as _zlib

        if len(_text) > {result.MAX_BYTES}:
            _text = f"{NOT_RETURNED}has {{len(_text):,}} bytes of JSON, more than {result.MAX_BYTES:,}"
        _parts = [_text[_i : _i + {PART_BYTES}] for _i in range(0, len(_text), {PART_BYTES})]
        for _number, _part in [*enumerate(_parts, 1)] * 2:
            _line = "%d/%d %08x %s" % (_number, len(_parts), _zlib.crc32(_text.encode()), _part)
            _time.sleep(0.05)
            _os.write(1, ({PART_MARKER!r} + "%08x %s\\n" % (_zlib.crc32(_line.encode()), _line)).encode())
"""


@dataclass(frozen=True)
class Runner:
    """What starts the program in each process: how it finds its rank there, and how rank 0 sends its return value.

    :param rank: statement that sets `_rank`.
    :param value: expression of what is sent as JSON.
    :param output: statements that send the text `_text`.
    """

    rank: str
    value: str
    output: str


#: Runs under torchrun, or as Python alone.
TORCH = Runner('_rank = _os.environ.get("RANK", "0")', "_returned", _RESULT_LINE)
MPI = Runner(_MPI_RANK, f"{{{RETURNED!r}: _returned}}", _NUMBERED_LINES)


class Definition:
    """The definition of a function, taken from its source.

    :param source: text of the definition with its decorators, as `inspect.getsource` returns it: possibly indented.
    """

    def __init__(self, source: str) -> None:
        # dedenting would change the content of strings that span lines
        self._text = f"if True:\n{source}" if source[:1].isspace() else source
        self._tree = ast.parse(self._text)
        self._body = self._tree.body
        if source[:1].isspace() and isinstance(block := self._tree.body[0], ast.If):
            self._body = block.body

    @property
    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Its syntax tree; None if the source isn't that of a `def`."""
        first = self._body[0] if self._body else None
        return first if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def is_of(self, function: FunctionType) -> bool:
        """Whether this can be the definition of that function: it has its name. That of a lambda is not checked."""
        name = function.__code__.co_name
        return name == "<lambda>" or (self.function is not None and self.function.name == name)

    @property
    def decorators(self) -> list[tuple[ast.expr, str]]:
        """Syntax tree and text of each decorator, from the top."""
        nodes = self.function.decorator_list if self.function else []
        return [(node, ast.get_source_segment(self._text, node) or "") for node in nodes]

    @property
    def text(self) -> str:
        """The definition without decorators, otherwise as it was written; a block `if True:` if it is indented."""
        assert self.function is not None
        lines = self._text.split("\n")  # Python counts no other line ends; str.splitlines does
        block = lines[:1] if self.function is not self._tree.body[0] else []
        return "\n".join([*block, *lines[self.function.lineno - 1 : self.function.end_lineno]]) + "\n"


def cannot_travel(definition: Definition, name: str) -> Iterator[str]:
    """Why the function can't run elsewhere, one line each: what it needs and its source doesn't contain."""
    function = definition.function
    if function is None:
        yield f"the source of {name} is not that of a function (is it a lambda?): define it with def"
        return
    if isinstance(function, ast.AsyncFunctionDef):
        yield f"{name} is async: call asyncio.run inside of a plain function"
    if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(function)):
        yield f"{name} is a generator: return one value"
    # annotations are not evaluated in the program
    plain = "from __future__ import annotations\n" + definition.text
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


def program(
    definition: Definition, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], runner: Runner = TORCH
) -> str:
    """The program that calls the function with its arguments and prints rank 0's return value.

    :raises ManifestError: if the arguments are not JSON, or the program is too large.
    """
    try:
        given = json.dumps({"args": list(args), "kwargs": dict(kwargs)}, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise ManifestError(
            f"the arguments of {name} are not JSON: {e}",
            expected="JSON values: strings, numbers, booleans, None, lists and dicts",
            remedy="pass a path or an id instead",
        ) from None
    source = definition.text
    is_block = source.startswith("if True:\n")
    text = (
        "from __future__ import annotations\n"
        + "\n" * (FUNCTION_OFFSET - 1 - is_block)
        + _PROGRAM.format(
            source=source,
            name=name,
            given=given,
            not_json=NOT_JSON,
            rank=runner.rank,
            value=runner.value,
            search=_SEARCH,
            reason_chars=REASON_CHARS,
            output=runner.output,
        )
    )
    if (size := len(base64.b64encode(text.encode()))) > MAX_BYTES:
        raise ManifestError(
            f"the function {name} and its arguments are too large",
            found=f"{size:,} bytes",
            expected=f"at most {MAX_BYTES:,}",
            remedy="put the code into the image, or pass a path instead of the data",
        )
    return text


def command(*, torchrun: bool) -> list[str]:
    """The command that runs the program: by torchrun, which reads the operator's PET_* variables, or by Python."""
    options = ["-m", "torch.distributed.run"] if torchrun else []
    return ["python3", "-c", _LAUNCH.format(file=FUNCTION_FILE, variable=PROGRAM, options=options)]


def mpirun_command(forwarded: Sequence[str]) -> list[str]:
    """The command that runs the program in all slots by mpirun, which finds them in the operator's hostfile.

    Variables with our prefix are found when it runs: a list of them here would change the manifest, and with it the
    job of a retry, with each release that adds one.

    :param forwarded: further variables of the Launcher that all ranks get, if they are set. Processes that SSH starts
        have none of their container's variables.
    """
    names = list(dict.fromkeys([*IMAGE_VARIABLES, *forwarded]))
    return ["python3", "-c", _MPIRUN.format(forwarded=names, prefix=VARIABLE_PREFIX, python=command(torchrun=False))]


def program_variable(text: str) -> dict[str, str]:
    """The variable that holds the program. It is encoded, as Kubernetes expands `$(...)` in values."""
    return {PROGRAM: base64.b64encode(text.encode()).decode()}
