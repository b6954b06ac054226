"""Checks that the tests notice when a correction is taken back: `reverts.py check`, `reverts.py run [NAME ...]`.

`scripts/reverts/README.md` describes the patches. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "reverts"
TESTS_FAILED = 1  #: Exit status of pytest; other errors, such as a test that doesn't exist, have others.
TIMEOUT_SECONDS = 900


@dataclasses.dataclass(frozen=True)
class Revert:
    """A patch.

    :param tests: each notices it.
    """

    path: pathlib.Path
    fault: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @classmethod
    def read(cls, path: pathlib.Path) -> Revert:
        """The revert of a file.

        :raises ValueError: its head doesn't name the fault and a test.
        """
        head = path.read_text().partition("diff --git")[0].splitlines()
        comments = [line.removeprefix("#").strip() for line in head if line.startswith("#")]
        tests = [text.removeprefix("notices:").strip() for text in comments if text.startswith("notices:")]
        faults = [text for text in comments if text and not text.startswith("notices:")]
        if not (faults and tests):
            raise ValueError(f"{path.name}: expected comment lines with the fault and `notices: TEST` at the top")
        return cls(path, faults[0], tuple(tests))


def selected(names: Sequence[str]) -> list[Revert]:
    """The reverts with these names; all if there are none.

    :raises ValueError: a name is none of a revert, or a head can't be read.
    """
    paths = sorted(FOLDER.glob("*.patch"))
    for name in names:
        if not any(_is_named(path, name) for path in paths):
            raise ValueError(f"no patch in {FOLDER.relative_to(ROOT)} is named {name}")
    return [Revert.read(path) for path in paths if not names or any(_is_named(path, name) for name in names)]


def _is_named(path: pathlib.Path, name: str) -> bool:
    return path.stem == name or path.stem.startswith(f"{name}-")


def apply_error(revert: Revert, root: pathlib.Path, *options: str) -> str:
    """Apply the patch; why this isn't possible, or empty."""
    command = ["git", "apply", *options, str(revert.path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def check(reverts: Sequence[Revert]) -> list[str]:
    """Why patches are of no use: they don't apply to the working tree, or their tests don't exist."""
    wrong = []
    for revert in reverts:
        if error := apply_error(revert, ROOT, "--check"):
            wrong.append(f"{revert.name} doesn't apply: {error}")
        for test in revert.tests:
            path, *names = re.sub(r"\[.*", "", test).split("::")
            file = ROOT / path
            text = file.read_text() if file.is_file() else ""
            if not all(re.search(rf"\b(?:def|class) {re.escape(name)}\b", text) for name in names) or not text:
                wrong.append(f"{revert.name}: no test {test}")
    return wrong


@contextlib.contextmanager
def _copy_of_head() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="ktrain-reverts-") as folder:
        root = pathlib.Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", root, "HEAD"], cwd=ROOT, check=True)
        try:
            yield root
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", root], cwd=ROOT, check=True)


def _run_tests(root: pathlib.Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of pytest, and the end of its output."""
    path = os.pathsep.join(map(str, (root, root / "embedded_cluster" / "src")))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, f"no end after {TIMEOUT_SECONDS} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def run(reverts: Sequence[Revert]) -> list[str]:
    """Which reverts no test notices, one line each."""
    wrong = []
    for revert in reverts:
        with _copy_of_head() as root:
            status, output = _run_tests(root, revert.tests)
            if status:
                problem = f"its tests fail without it:\n{output}"
            elif error := apply_error(revert, root):
                problem = f"doesn't apply: {error}"
            else:
                status, output = _run_tests(root, revert.tests)
                problem = "" if status == TESTS_FAILED else f"not noticed (exit status {status} of pytest):\n{output}"
        print(f"{'ok  ' if not problem else 'FAIL'} {revert.fault}  ({revert.path.name})", flush=True)
        if problem:
            print(problem, flush=True)
            wrong.append(f"{revert.name}: {problem.splitlines()[0]}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("check", "run"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args(arguments)
    try:
        wrong = (check if args.command == "check" else run)(selected(args.names))
    except ValueError as e:
        wrong = [str(e)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
