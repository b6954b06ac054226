"""Records a terminal session of `ktrain run` for README.

    python scripts/record_run.py

It runs COMMAND on a terminal of its own, in a copy of the checkout's examples. Run it again after a change of what
`ktrain run` prints.
"""

import contextlib
import os
import pathlib
import pty
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMMAND = "ktrain run --local --code examples/demo -- python train.py --epochs 1"
MARKS = "<!-- recorded by scripts/record_run.py -->\n", "<!-- end of the recording -->\n"


def record(directory: pathlib.Path) -> list[str]:
    """Run the command on a pseudo-terminal. Returns the lines that it printed."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "NO_COLOR": "1",
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    arguments = [sys.executable, "-m", "airflow_provider_ktrain.cli", *COMMAND.split()[1:]]
    lines: list[str] = []
    with subprocess.Popen(arguments, cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as run:
        os.close(theirs)
        with (
            open(ours, encoding="utf-8", errors="replace", newline="") as terminal,
            contextlib.suppress(OSError),  # Linux reports the end of a pseudo-terminal as an I/O error
        ):
            lines.extend(line.rstrip("\r\n") for line in terminal)
    if run.returncode:
        sys.exit("\n".join(lines) + f"\n{COMMAND} ended with status {run.returncode}")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(ROOT / "examples" / "demo", pathlib.Path(directory) / "examples" / "demo")
        lines = record(pathlib.Path(directory))
    begin, end = MARKS
    head, _, rest = README.read_text().partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        sys.exit(f"README has no lines {begin.strip()} and {end.strip()}")
    text = "\n".join([f"$ .venv/bin/{COMMAND}", *lines])
    README.write_text(f"{head}{begin}```console\n{text}\n```\n{end}{tail}")
    print(f"{len(lines)} lines recorded in {README.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
