"""Variables in the processes that Open MPI's mpirun starts by ssh: they don't get those of their containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

OPEN_MPI = "OpenMPI"  #: Other implementations don't know the option -x.


def with_exports(command: Sequence[Any], exports: Mapping[str, str]) -> list[Any]:
    """The command of mpirun with an option for each variable that it doesn't export itself. Others stay as they are.

    :param exports: `NAME`, whose value mpirun then takes from its own environment, or `NAME=value`, by the name.
    """
    words = [str(word) for word in command]
    if not words or PurePosixPath(words[0]).name not in ("mpirun", "mpiexec"):
        return [*command]
    present = {word.partition("=")[0] for word in words}
    options = [word for name, export in exports.items() if name not in present for word in ("-x", export)]
    return [command[0], *options, *command[1:]]
