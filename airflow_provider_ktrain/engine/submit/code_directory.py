"""Reads the directory that a task sends as its code."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from airflow_provider_ktrain.core.errors import ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.core.manifest.code import LARGEST, Code, CodeFile, pack, too_large
from airflow_provider_ktrain.core.text.output import counted

IGNORE_FILE = ".ktrainignore"
#: Patterns that precede those of the ignore file, which may include such files again.
IGNORED = (
    ".git/", "__pycache__/", "*.py[co]", ".venv/", ".ipynb_checkpoints/", ".mypy_cache/", ".pytest_cache/",
    ".ruff_cache/", ".DS_Store", f"/{IGNORE_FILE}",
)  # fmt: skip
MAX_FILES = 10_000  #: Beyond this, the rest of the directory isn't even listed.
MAX_UNPACKED_BYTES = 32 * 1024 * 1024  #: Beyond this, the files are not even read.

Ignores = Callable[[str], bool]


def is_missing(path: Path) -> bool:
    """Whether no file or directory has this path. False if the path can't be checked: `read_code` raises the reason."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:  # such as a folder without the right to search it
        return False
    return False


def read_code(path: Path) -> Code:
    """Pack a directory without the files that its `.ktrainignore` names, or a single file.

    :raises ManifestUnreadableError: it doesn't exist, or a file in it can't be read.
    :raises ManifestError: it is too large or empty, or it has too many files, a special file, or a symbolic link that
        leads out of it, or its `.ktrainignore` is invalid.
    """
    try:
        if not path.is_dir():
            return pack([_file(path, path.name)])
        entries = list(itertools.islice(_entries(path, path, _ignores(path)), MAX_FILES + 1))
        if len(entries) > MAX_FILES:
            raise _too_many(name for name, _ in entries)
        sizes = [(entry.lstat().st_size, name) for name, entry in entries]
        if sum(size for size, _ in sizes) > MAX_UNPACKED_BYTES:
            raise too_large(sizes)
        root = path.resolve()
        return pack(_link(root, entry, name) if entry.is_symlink() else _file(entry, name) for name, entry in entries)
    except OSError as e:
        raise ManifestUnreadableError(
            f"the code can't be read: {e.strerror or e}",
            where="code",
            found=str(e.filename or path),
            expected="a readable file or directory",
            remedy="correct the path, or check that the DAG bundle contains it",
        ) from None


def _ignores(root: Path) -> Ignores:
    """Whether a path, relative to the root, is ignored. A directory ends in `/`."""
    from pathspec import GitIgnoreSpec

    own: list[str] = []
    if (file := root / IGNORE_FILE).is_file():
        own = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        for number, line in enumerate(own, 1):
            try:
                GitIgnoreSpec.from_lines([line])
            except (ValueError, re.error):
                raise _invalid_pattern(file, number, line) from None
    return GitIgnoreSpec.from_lines([*IGNORED, *own]).match_file


def _invalid_pattern(file: Path, number: int, line: str) -> ManifestError:
    """The error for a line of the ignore file that git doesn't accept either."""
    return ManifestError(
        f"{IGNORE_FILE} has an invalid pattern",
        where=f"{file}:{number}",
        found=repr(line),
        expected="a pattern as in .gitignore",
        remedy="correct or remove the line",
    )


def _entries(root: Path, directory: Path, ignores: Ignores) -> Iterator[tuple[str, Path]]:
    """Relative path, and path, of each file and symbolic link. As in git, nothing below an ignored directory counts."""
    for entry in directory.iterdir():
        name = entry.relative_to(root).as_posix()
        if entry.is_dir() and not entry.is_symlink():
            if not ignores(f"{name}/"):
                yield from _entries(root, entry, ignores)
        elif not ignores(name):
            yield name, entry


def _too_many(names: Iterable[str]) -> ManifestError:
    """The error for a directory with more than MAX_FILES files."""
    directories = Counter(name.partition("/")[0] + "/" for name in names if "/" in name)
    return ManifestError(
        f"the code has more than {MAX_FILES:,} files",
        where="code",
        found=", ".join(f"{counted(number, 'file')} in {name}" for name, number in directories.most_common(LARGEST)),
        expected="program files only",
        remedy=f"list other files in {IGNORE_FILE}; put data on a volume, and libraries into the image",
    )


def _file(path: Path, name: str) -> CodeFile:
    """A regular file. Sockets, pipes and devices can't be sent."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ManifestError(
            "the code has a special file", where="code", found=str(path), expected="files, directories and links",
            remedy=f"remove it, or list it in {IGNORE_FILE}",
        )  # fmt: skip
    if found.st_size > MAX_UNPACKED_BYTES:
        raise too_large([(found.st_size, name)])
    return CodeFile(name, path.read_bytes(), executable=bool(found.st_mode & stat.S_IXUSR))


def _link(root: Path, path: Path, name: str) -> CodeFile:
    """A link whose target is inside the directory, relative to the link, so that it works where it is unpacked."""
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise ManifestError(
            "a symbolic link leads out of the code's directory",
            where="code",
            found=f"{name} -> {os.readlink(path)}",
            expected="links inside the directory",
            remedy=f"copy the file, or list the link in {IGNORE_FILE}",
        )
    return CodeFile(name, link=Path(os.path.relpath(target, path.parent.resolve())).as_posix())
