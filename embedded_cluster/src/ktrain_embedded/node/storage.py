"""The disk usage of a pod, and the kubelet's limits: emptyDir sizeLimit and ephemeral-storage.

Counted are emptyDirs, logs, and files in the working directory of a container whose image has no directory. Containers
share this machine's /tmp and /dev/shm: of these, files count that a process of the pod had open when it was measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ktrain_embedded.objects.quantity import parse
from ktrain_embedded.objects.store import Obj, at

STORAGE = "ephemeral-storage"
TMP, SHM = SHARED = ("/tmp", "/dev/shm")
Opened = dict[str, dict[tuple[int, int], int]]  #: Bytes by directory of SHARED, and by device and inode.


def _limits(pod: Obj) -> list[tuple[Obj, str]]:
    """The containers with a limit of ephemeral-storage, and their limits."""
    found = ((x, at(x, "resources.limits", {}).get(STORAGE)) for x in pod["spec"]["containers"])
    return [(container, limit) for container, limit in found if limit]


def _empty_dirs(pod: Obj) -> Iterator[tuple[str, str | None, bool]]:
    """Name, size limit, and whether it is in memory, of each emptyDir."""
    for volume in pod["spec"].get("volumes") or ():
        source = volume.get("emptyDir")
        if source is not None:
            yield volume["name"], source.get("sizeLimit"), source.get("medium") == "Memory"


def is_limited(pod: Obj) -> bool:
    """Whether the pod has any limit to measure."""
    return bool(_limits(pod)) or any(limit for _, limit, _ in _empty_dirs(pod))


def exceeded(pod: Obj, directory: Path, opened: Mapping[str, Opened]) -> str | None:
    """The kubelet's message about the first limit that the pod exceeds, or None.

    A real kubelet mounts an emptyDir in memory with its limit as its size: there, the program gets ENOSPC instead.

    :param directory: the directory of the pod.
    :param opened: the files of /tmp and /dev/shm, by container.
    """
    volumes = {name: _volume(pod, name, directory, opened) for name, _, _ in _empty_dirs(pod)}
    for name, limit, _ in _empty_dirs(pod):
        if limit and volumes[name] > parse(limit):
            return f'Usage of EmptyDir volume "{name}" exceeds the limit "{limit}". '
    limits = _limits(pod)
    used = _used_by(pod, directory, opened)
    everything = sum(used.values()) + sum(volumes[name] for name, _, in_memory in _empty_dirs(pod) if not in_memory)
    if limits and everything > sum(parse(limit) for _, limit in limits):
        total = limits[0][1] if len(limits) == 1 else f"{sum(int(parse(limit)) for _, limit in limits)}"
        return f"Pod ephemeral local storage usage exceeds the total limit of containers {total}. "
    for container, limit in limits:
        if used[container["name"]] > parse(limit):
            return f'Container {container["name"]} exceeded its local ephemeral storage limit "{limit}". '
    return None


def usage(pod: Obj, directory: Path, opened: Mapping[str, Opened]) -> dict[str, int]:
    """The bytes of the disk that each container uses; emptyDirs count for the first one.

    :param directory: the directory of the pod.
    :param opened: the files of /tmp and /dev/shm, by container.
    """
    used = _used_by(pod, directory, opened)
    volumes = (_size(directory / "volumes" / name) for name, _, in_memory in _empty_dirs(pod) if not in_memory)
    used[next(iter(used))] += sum(volumes)
    return used


def opened_by(pids: Iterable[int], excluded: Sequence[Path]) -> Opened:
    """The files of the shared directories that processes have open for writing, or mapped; nothing without /proc.

    :param excluded: directories that are counted elsewhere, or not at all.
    """
    found: Opened = {shared: {} for shared in SHARED}
    for pid in pids:
        for path, link in _writable(Path(f"/proc/{pid}")):
            shared = next((shared for shared in SHARED if path.startswith(f"{shared}/")), None)
            if shared is None or any(Path(path).is_relative_to(folder) for folder in excluded):
                continue
            with contextlib.suppress(OSError):
                stat = os.stat(link)
                found[shared][stat.st_dev, stat.st_ino] = stat.st_size
    return found


def _writable(process: Path) -> Iterator[tuple[str, Path | str]]:
    """The path of each file that a process may write, and one by which also a deleted file is found."""
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                flags = (process / "fdinfo" / link.name).read_text().partition("flags:")[2].split()[0]
                if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                    yield os.readlink(link), link
        for line in (process / "maps").read_text().splitlines():
            _, rights, *_, path = line.split(maxsplit=5) if line.count("/") else ("", "", "")
            if rights.startswith("rw") and rights.endswith("s"):
                yield path, path


def _volume(pod: Obj, name: str, directory: Path, opened: Mapping[str, Opened]) -> int:
    """The bytes of an emptyDir. What is mounted to /dev/shm is this machine's."""
    containers = pod["spec"]["containers"]
    mounted = [x["name"] for x in containers for m in x.get("volumeMounts") or () if _is_shm(m, name)]
    files = {file: size for container in mounted for file, size in opened.get(container, {}).get(SHM, {}).items()}
    return _size(directory / "volumes" / name) + sum(files.values())


def _is_shm(mount: Obj, name: str) -> bool:
    return (mount["name"], mount["mountPath"].rstrip("/")) == (name, SHM)


def _used_by(pod: Obj, directory: Path, opened: Mapping[str, Opened]) -> dict[str, int]:
    """The bytes of each container, without volumes."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    return {name: _used(directory / name) + sum(opened.get(name, {}).get(TMP, {}).values()) for name in names}


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
