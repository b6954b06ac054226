"""The disk usage of a pod, and the kubelet's limits: emptyDir sizeLimit and ephemeral-storage.

Counted are emptyDirs, logs, and files in the working directory of a container whose image has no directory. Files
elsewhere on this machine, such as in /tmp and /dev/shm, aren't counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ktrain_embedded.objects.quantity import parse
from ktrain_embedded.objects.store import Obj, at

STORAGE = "ephemeral-storage"


def _limits(pod: Obj) -> list[tuple[Obj, str]]:
    """The containers with a limit of ephemeral-storage, and their limits."""
    found = ((x, at(x, "resources.limits", {}).get(STORAGE)) for x in pod["spec"]["containers"])
    return [(container, limit) for container, limit in found if limit]


def _empty_dirs(pod: Obj) -> Iterator[tuple[str, str | None]]:
    """The names and size limits of the emptyDirs on disk."""
    for volume in pod["spec"].get("volumes") or ():
        source = volume.get("emptyDir")
        if source is not None and source.get("medium") != "Memory":
            yield volume["name"], source.get("sizeLimit")


def is_limited(pod: Obj) -> bool:
    """Whether the pod has any limit to measure."""
    return bool(_limits(pod)) or any(limit for _, limit in _empty_dirs(pod))


def exceeded(pod: Obj, directory: Path) -> str | None:
    """The kubelet's message about the first limit that the pod exceeds, or None.

    :param directory: the directory of the pod.
    """
    volumes = {name: _size(directory / "volumes" / name) for name, _ in _empty_dirs(pod)}
    for name, limit in _empty_dirs(pod):
        if limit and volumes[name] > parse(limit):
            return f'Usage of EmptyDir volume "{name}" exceeds the limit "{limit}". '
    limits = _limits(pod)
    used = {x["name"]: _used(directory / x["name"]) for x in pod["spec"]["containers"]}
    everything = sum(used.values()) + sum(volumes.values())
    if limits and everything > sum(parse(limit) for _, limit in limits):
        total = limits[0][1] if len(limits) == 1 else f"{sum(int(parse(limit)) for _, limit in limits)}"
        return f"Pod ephemeral local storage usage exceeds the total limit of containers {total}. "
    for container, limit in limits:
        if used[container["name"]] > parse(limit):
            return f'Container {container["name"]} exceeded its local ephemeral storage limit "{limit}". '
    return None


def _used(home: Path) -> int:
    """The bytes of a container's logs and of its own working directory."""
    return _size(home / "root") + sum(_size(path) for path in home.glob("*.log*"))


def _size(path: Path) -> int:
    """The bytes of a file, or of all files below a directory. Files that disappear meanwhile don't count."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except OSError:
                continue
    return total
