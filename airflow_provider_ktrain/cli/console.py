"""The log of a command: lines on standard output, errors on standard error."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, TextIO

from airflow_provider_ktrain.cli.wording import for_run
from airflow_provider_ktrain.core.text.output import Verbatim, masked

_RESET, _DIM, _YELLOW, _RED = "\033[0m", "\033[2m", "\033[33m", "\033[31m"


class Console:
    """Prints what the engine logs, in the words of `ktrain run`: `engine.api.job_calls.Log`.

    Colors are used on a terminal only, and not if NO_COLOR is set (https://no-color.org). If nobody reads the output
    any more (`ktrain run job.yaml | head`), the process gets SIGTERM, and what is printed after that is dropped.
    """

    def __init__(self) -> None:
        self._broken = False

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        """Progress."""
        self._print(sys.stdout, "", "", event, args)

    def warning(self, event: Any, *args: Any, **kw: Any) -> None:
        """A problem that doesn't end the command."""
        self._print(sys.stdout, _YELLOW, "warning: ", event, args)

    def error(self, event: Any, *args: Any, **kw: Any) -> None:
        """Why the command fails."""
        self._print(sys.stderr, _RED, "error: ", event, args)

    def _print(self, stream: TextIO, color: str, prefix: str, event: Any, args: tuple[Any, ...]) -> None:
        colored = stream.isatty() and not os.environ.get("NO_COLOR")
        text = str(event) % args if args else event if isinstance(event, str) else str(event)
        text = masked(text if isinstance(text, Verbatim) else for_run(text))
        first, *rest = text.splitlines() or [""]
        clock = time.strftime("%H:%M:%S")
        head = f"{_DIM}{clock}{_RESET} {color}{prefix}{first}{_RESET}" if colored else f"{clock} {prefix}{first}"
        indent = " " * (len(clock) + 1)
        try:
            if not self._broken:
                print("\n".join([head, *(f"{indent}{line}" for line in rest)]), file=stream, flush=True)
        except BrokenPipeError:
            self._broken = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python flushes the stream at its exit
            os.kill(os.getpid(), signal.SIGTERM)
