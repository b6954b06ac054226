"""The code of a job: a directory's files, packed, and the command that unpacks them in each pod.

The packed files are in a ConfigMap, which the job's pods mount. A pod starts no container before its ConfigMap
exists. In each pod, `core/manifest/start.py` unpacks the files into a volume of the pod.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.text.output import counted, readable_size

MAX_BYTES = 700 * 1024  #: Size of the packed files: Kubernetes takes 1 MiB in a ConfigMap, and etcd 1.5 MiB in base64.
ARCHIVE = "code.tar.gz"  #: Key in the ConfigMap.
HASH_CHARS = 16
LARGEST = 5  #: How many files an error names.


@dataclass(frozen=True)
class CodeFile:
    """A file or a symbolic link of a directory.

    :param path: relative to the directory, with `/`.
    :param executable: whether its owner may execute the file. Default: False.
    :param link: target of a symbolic link, relative to the link's directory. Default: empty, it is a file.
    """

    path: str
    content: bytes = field(default=b"", repr=False)
    executable: bool = False
    link: str = ""


@dataclass(frozen=True)
class Code:
    """The packed code of a job.

    :param hash: of paths, contents and modes. It doesn't depend on times, owners or the version of Python.
    :param size: bytes of the files.
    """

    hash: str
    files: int
    size: int
    archive: bytes = field(repr=False)

    def __str__(self) -> str:
        packed = readable_size(len(self.archive))
        return f"{counted(self.files, 'file')}, {readable_size(self.size)} ({packed} packed), hash {self.hash}"


def pack(files: Iterable[CodeFile]) -> Code:
    """Pack files, in the order of their paths. Times and owners are left out.

    :raises ManifestError: there are none, or they are too large.
    """
    ordered = sorted(files, key=lambda file: file.path)
    if not ordered:
        raise ManifestError(
            "there are no files to send",
            where="code",
            found="an empty directory, or one whose files are all ignored",
            expected="at least one file",
            remedy="correct the path or .ktrainignore",
        )
    archive = gzip.compress(_tar(ordered), mtime=0)
    if len(archive) > MAX_BYTES:
        raise too_large(((len(file.content), file.path) for file in ordered), packed=len(archive))
    return Code(_hash(ordered), len(ordered), sum(len(file.content) for file in ordered), archive)


def _tar(files: Iterable[CodeFile]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            member = tarfile.TarInfo(file.path)
            member.mode = 0o755 if file.executable else 0o644
            if file.link:
                member.type, member.linkname = tarfile.SYMTYPE, file.link
            member.size = len(file.content)
            archive.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()


def _hash(files: Iterable[CodeFile]) -> str:
    """A hash of the files themselves: another version of zlib may pack them differently."""
    listed = [[f.path, f.link, f.executable, hashlib.sha256(f.content).hexdigest()] for f in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:HASH_CHARS]


def too_large(sizes: Iterable[tuple[int, str]], *, packed: int | None = None) -> ManifestError:
    """The error for files that don't fit into a ConfigMap.

    :param packed: bytes of all files, packed. Default: None, they are too large to be packed.
    """
    ordered = sorted(sizes, key=lambda entry: (-entry[0], entry[1]))
    total = readable_size(sum(size for size, _ in ordered))
    named = ", ".join(f"{path} ({readable_size(size)})" for size, path in ordered[:LARGEST])
    found = f"{readable_size(packed)} packed" if packed else f"{total} in {counted(len(ordered), 'file')}"
    return ManifestError(
        f"the code is too large: {found}, at most {readable_size(MAX_BYTES)} packed",
        where="code",
        found=f"these largest files: {named}",
        expected="program files only",
        remedy="list other files in .ktrainignore; put data on a volume, and libraries into the image",
    )


def config_map_name(job: str, submission: str) -> str:
    """The name of the ConfigMap with a job's code. A job that replaces another of its name never mounts the old one."""
    return f"{job}-code-{submission}"
