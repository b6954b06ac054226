"""Describes the files of a checkpoint directory in object storage, for the log of a retry."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from airflow_provider_ktrain.core.text.output import counted, readable_size

#: Keys under which the file systems of fsspec have the time of the last change.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


def is_url(directory: str) -> bool:
    """Whether a worker may be able to list a directory: it isn't a path in the pods."""
    scheme, separator, _ = directory.partition("://")
    return bool(separator) and scheme not in ("file", "local")


def describe_files(files: Mapping[str, Mapping[str, Any]], root: str) -> str:
    """How many files there are, their size, and the newest one.

    :param files: of fsspec's `find`: details by path.
    :param root: path of the directory.
    """
    if not files:
        return "has no files"
    size = sum(int(details.get("size") or 0) for details in files.values())
    text = f"has {counted(len(files), 'file')} ({readable_size(size)})"
    times = {path: at for path, details in files.items() if (at := _changed_at(details)) is not None}
    if not times:
        return text
    newest = max(times, key=lambda path: (times[path], path))
    name = newest.strip("/").removeprefix(root.strip("/")).lstrip("/")
    when = times[newest].astimezone(UTC)
    newest_size = readable_size(int(files[newest].get("size") or 0))
    return f"{text}, the newest is {name} ({newest_size}, {when:%Y-%m-%d %H:%M:%S} UTC)"


def _changed_at(details: Mapping[str, Any]) -> datetime | None:
    for name in _TIMES:
        value = details.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    return None
