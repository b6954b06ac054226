from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.identity.task_variables import PROGRAM, TERMINATION_LOG
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB
from airflow_provider_ktrain.core.logs.result import PART_MARKER, RESULT_MARKER, find_result, keep_result_line
from airflow_provider_ktrain.core.logs.stacks import FUNCTION_FILE, FUNCTION_OFFSET
from airflow_provider_ktrain.core.manifest.program import (
    MPI,
    NOT_JSON,
    RETURNED,
    Definition,
    cannot_travel,
    command,
    mpirun_command,
    program,
    program_variable,
)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f():\n    return torch.zeros(1)", "'torch', which is defined outside"),
        ("def f(x=DEFAULT):\n    return x", "'DEFAULT'"),
        ("def f():\n    def inner():\n        return helper()\n    return inner()", "'helper'"),
        ("async def f():\n    return 1", "async"),
        ("def f():\n    yield 1", "generator"),
        ("f = lambda: 1", "lambda"),
    ],
)
def test_function_that_cannot_be_shipped_is_refused(source: str, reason: str) -> None:
    assert reason in "; ".join(cannot_travel(Definition(source), "f"))


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: Unknown, *b, c=1, **d) -> Model:\n    import os\n    return [os.getpid() for _ in range(len(b))]",
        "@task.pytorchjob(image='x')\ndef f():\n    from math import pi\n    return {k: pi for k in 'ab'}",
        "def f(n):\n    return n and f(n - 1)",
        "def f():\n    class A:\n        x = 1\n    return A.x, __name__",
        "    def f():\n        return '$(HOME) $$'\n",
    ],
)
def test_self_contained_function_can_be_shipped(source: str) -> None:
    assert list(cannot_travel(Definition(source), "f")) == []


def run(text: str, **env: str) -> str:
    words, variables = [sys.executable, *command(torchrun=False)[1:]], {**program_variable(text), **env}
    ran = subprocess.run(words, env=variables, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def test_arguments_and_result_are_passed_unchanged() -> None:
    source = "@task.pytorchjob(\n    image='x'\n)\ndef f(a, b=None):\n    return {'a': a, 'b': b, 'rank': '$(X) $$'}"
    output = run(program(Definition(source), "f", ["ü\n'\""], {"b": [1, None]}))
    result, error, _ = find_result(PYTORCHJOB, {}, [], output.strip())
    assert (result, error) == ({"a": "ü\n'\"", "b": [1, None], "rank": "$(X) $$"}, "")


@pytest.mark.parametrize("indentation", ["", "    "])
def test_file_of_a_function_has_the_same_name_and_lines_everywhere(indentation: str) -> None:
    source = f"{indentation}def f():\n{indentation}    return __file__, 1 / 0\n"
    output = run(program(Definition(source), "f", [], {}))
    assert f'/{FUNCTION_FILE}", line {2 + FUNCTION_OFFSET}, in f' in output


def test_only_rank_0_prints_a_result() -> None:
    assert run(program(Definition("def f():\n    return 1"), "f", [], {}), RANK="1") == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{1, 2}", "it is of type set"),
        ("{'loss': [float('nan'), {1}]}", "['loss'][1] is of type set"),
        ("{'model': {'it\\'s': object()}}", """['model']["it's"] is of type object"""),
        ("{'a': 1, 'b': {(1, 2): 3}}", "['b'] has a key of type tuple"),
        ("({'ü': complex(1)},)", "[0]['\\xfc'] is of type complex"),
        ("(lambda a: a.append(a) or a)([])", "Circular reference detected"),
        ("{'k' * 1000: {1}}", "['kkkk"),
    ],
)
def test_return_value_that_is_not_json_is_reported_with_its_place(value: str, why: str) -> None:
    said = run(program(Definition(f"def f():\n    return {value}"), "f", [], {})).strip()
    result, error, _ = find_result(PYTORCHJOB, {}, [], said)
    assert result is None
    assert error.startswith(f"Its result is left out: {NOT_JSON}{why}")
    assert len(error) < 500
    result, error = received(run(mpi(f"def f():\n    return {value}"), PMI_RANK="0"))
    assert (result, error[: error.index(why)]) == (None, f"Its result is left out: {NOT_JSON}")


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("{1: 'a', None: 1e308, 2.5: [()]}", '{"1": "a", "null": 1e+308, "2.5": [[]]}'),
        ("10**20", "1" + "0" * 20),
        ("{'loss': float('nan'), 'model': 'm'}", '{"loss": NaN, "model": "m"}'),
    ],
)
def test_return_value_that_python_writes_as_json_is_sent(value: str, sent: str) -> None:
    said = run(program(Definition(f"def f():\n    return {value}"), "f", [], {})).strip()
    assert said == RESULT_MARKER + sent


def test_traceback_shows_the_source_line() -> None:
    output = run(program(Definition("def f(n):\n    return 1 / n"), "f", [0], {}))
    assert "return 1 / n" in output
    assert "ZeroDivisionError" in output


def test_arguments_that_are_not_json_are_refused() -> None:
    with pytest.raises(ManifestError, match="arguments of f are not JSON"):
        program(Definition("def f(x): pass"), "f", [object()], {})


def test_too_large_program_is_refused() -> None:
    with pytest.raises(ManifestError, match="too large"):
        program(Definition("def f(x): pass"), "f", ["x" * 100_000], {})


def test_program_is_passed_base64_encoded() -> None:
    text = program(Definition("def f():\n    return '$$'"), "f", [], {})
    assert base64.b64decode(program_variable(text)[PROGRAM]).decode() == text
    assert json.dumps(command(torchrun=True)).count("torch.distributed.run") == 1


@pytest.mark.parametrize(("length", "written"), [(10, True), (5000, False)])
def test_result_is_written_to_the_termination_log_if_it_fits(tmp_path: Path, length: int, written: bool) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    output = run(program(Definition("def f(n): return 'x' * n"), "f", [length], {}), **{TERMINATION_LOG: str(log)})
    assert output == f'{RESULT_MARKER}"{"x" * length}"\n'
    assert log.read_text() == (output.strip() if written else "")


def test_termination_log_is_not_created_outside_of_kubernetes(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    run(program(Definition("def f(): return 1"), "f", [], {}), **{TERMINATION_LOG: str(log)})
    assert not log.exists()


WRITTEN = """\
def f(x=1,  # one
      y="a"):
    '''Text.

# no comment
    \u2028  it\x0c stays'''
    # a comment
    return f"{x!r:>{ 4 }}" '$$' "{y}"
"""


@pytest.mark.parametrize("decorators", ["", "@a\n", "@a(\n    b=1,\n)\n# a comment\n\n@c.d\n"])
def test_definition_is_shipped_as_written(decorators: str) -> None:
    definition = Definition(decorators + WRITTEN)
    assert definition.text == WRITTEN
    assert WRITTEN in program(definition, "f", [], {})


def test_indented_definition_is_shipped_as_written() -> None:
    """Dedenting would change the strings in it, or fail if a string has a line without indentation."""
    source = '    @a(\n        1)\n    def f():\n        return """x\n      y\nz"""\n'
    definition = Definition(source)
    assert [text for _, text in definition.decorators] == ["a(\n        1)"]
    assert list(cannot_travel(definition, "f")) == []
    assert run(program(definition, "f", [], {})) == RESULT_MARKER + json.dumps("x\n      y\nz") + "\n"


# ---- under mpirun


def mpi(source: str, *args: Any) -> str:
    return program(Definition(source), "f", args, {}, MPI)


def received(output: str) -> tuple[Any, str]:
    """The result that a follower of the Launcher's log reads."""
    held = ""
    for line in output.split("\n"):
        held = keep_result_line(held, line)
    return find_result(MPIJOB, {}, [], held)[:2]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
@pytest.mark.parametrize("value", [None, 0.5, {"text": "ü" * 7000}])
def test_rank_0_sends_its_return_value_in_short_lines(variable: str, value: Any) -> None:
    output = run(mpi("def f(x):\n    return x", value), **{variable: "0"})
    assert received(output) == ({RETURNED: value}, "")
    assert max(len(line) for line in output.splitlines(keepends=True)) <= 2000


def test_other_ranks_send_nothing() -> None:
    assert run(mpi("def f(): return 1"), OMPI_COMM_WORLD_RANK="1") == ""


def test_unknown_rank_fails_before_the_function_runs() -> None:
    output = run(mpi("def f(): print('trained')"), RANK="0")
    assert output == "mpirun has set neither OMPI_COMM_WORLD_RANK nor PMI_RANK: the rank is unknown\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f():\n    return {1}", f"{NOT_JSON}it is of type set"),
        ("def f():\n    return 'x' * 50_000", "the return value has 50,016 bytes of JSON, more than 49,152"),
    ],
)
def test_return_value_that_cannot_be_sent_has_a_reason(source: str, why: str) -> None:
    assert received(run(mpi(source), PMI_RANK="0")) == (None, f"Its result is left out: {why}")


NOISY = """\
def f(n):
    import os
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    print("\\n".join(f"rank {rank} {i} " + "y" * 150 for i in range(2000)), end="")
    return ["x" * n, os.environ["FORWARDED"], os.environ["PATH"]]
"""


@pytest.mark.skipif(not shutil.which("mpirun", path=Path(sys.executable).parent), reason="needs Open MPI")
def test_return_value_passes_a_real_mpirun(tmp_path: Path) -> None:
    """All ranks write as fast as they can, and rank 0's last line has no newline."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=3\n")
    env = {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PRTE_MCA_prte_default_hostfile": str(hostfile),
        "FORWARDED": "yes",
    }
    words = mpirun_command(["FORWARDED", "MISSING"])
    ran = subprocess.run(words, env={**env, **program_variable(mpi(NOISY, 20_000))}, capture_output=True, text=True)
    assert received(ran.stdout) == ({RETURNED: ["x" * 20_000, "yes", env["PATH"]]}, ""), ran.stderr
    assert sum(PART_MARKER in line for line in ran.stdout.splitlines()) == 22
    assert {f"rank {rank} 0 " in ran.stdout for rank in range(3)} == {True}
