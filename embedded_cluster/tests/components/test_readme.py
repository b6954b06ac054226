"""The Python code of the README runs as it is written, and its table has the public names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ktrain_embedded

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_python_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out == "['ktrain-node-0', 'ktrain-node-1']\n"


def test_public_names_are_documented_and_exist() -> None:
    assert set(re.findall(r"^\| `(\w+)", README, re.MULTILINE)) == set(ktrain_embedded.__all__)
    assert all(hasattr(ktrain_embedded, name) for name in ktrain_embedded.__all__)
