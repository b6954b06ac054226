"""The code of a job: a directory's files, packed, and the command that unpacks them in each pod.

The packed files are in a ConfigMap, which the job's pods mount. A pod starts no container before its ConfigMap
exists. In each pod, a short Python program unpacks the files into a volume of the pod, changes to that directory, and
replaces itself by the job's command. Signals, exit code, arguments and standard input are therefore the command's own.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import Manifest, kind_of
from airflow_provider_ktrain.core.kinds.manifest_fields import mapping_at
from airflow_provider_ktrain.core.manifest.loader import plain
from airflow_provider_ktrain.core.text.output import counted, readable_size

MAX_BYTES = 700 * 1024  #: of the packed files: Kubernetes takes 1 MiB in a ConfigMap, and etcd 1.5 MiB in base64
ARCHIVE = "code.tar.gz"  #: key in the ConfigMap
ARCHIVE_DIRECTORY = "/ktrain/archive"  #: where the pods mount the ConfigMap
CODE_DIRECTORY = "/ktrain/code"  #: where the pods unpack the code, and in which the program runs
HASH_CHARS = 16
LARGEST = 5  #: how many files an error names
CODE_VOLUMES = ("ktrain-archive", "ktrain-code")  #: of the pods
_PYTHON = ("python3", "-I", "-c")  #: isolated from PYTHONPATH and from modules in the image's working directory
_START_WORDS = len(_PYTHON) + 3  #: and the program and its two directories
#: Runs with Python 3.6 and newer. Python ignores SIGPIPE and SIGXFSZ, which the program would inherit. The filter keeps
#: Python 3.12 and 3.13 from warning about its default. Names are UTF-8 even if the locale is C (Python 3.6). After a
#: restart of the container, a file must not be written to where a link leads, and Python below 3.8.8 replaces no links.
#: Files get the current time, because Python and build tools recognize by it that what they have compiled is old.
_START = """\
import os, signal, sys, tarfile, time
archive, directory, *command = sys.argv[1:]
tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)
with tarfile.open(archive) as packed:
    for member in packed:
        member.name, member.linkname = (
            os.fsdecode(name.encode("utf-8", "surrogateescape")) for name in (member.name, member.linkname)
        )
        member.mtime = time.time()
        path = os.path.join(directory, member.name)
        if os.path.islink(path):
            os.unlink(path)
    packed.extractall(directory)
os.chdir(directory)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
try:
    os.execvp(command[0], command)
except OSError as error:
    print("%s: %s" % (command[0], error.strerror), file=sys.stderr)
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


@dataclass(frozen=True)
class CodeFile:
    """A file or a symbolic link of a directory.

    :param path: relative to the directory, with `/`.
    :param content: of a file. Default: empty.
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
    :param files: number of files.
    :param size: bytes of the files.
    :param archive: the packed files.
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

    :param files: of the directory.
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

    :param sizes: bytes and path of each file.
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
    """The name of the ConfigMap with a job's code. A job that replaces another of its name never mounts the old one.

    :param job: name of the job.
    :param submission: value of the job's submission label.
    """
    return f"{job}-code-{submission}"


def run_with_code(manifest: Mapping[str, Any], config_map: str) -> Manifest:
    """A copy of the manifest whose program runs in the directory of the code.

    :param manifest: with its apiVersion.
    :param config_map: name of the ConfigMap.
    :raises ManifestError: a container has no command.
    """
    result: Manifest = plain(manifest)
    kind, spec = kind_of(result.get("kind")), mapping_at(result, "spec")
    peer_command = kind.operator_of(str(result.get("apiVersion"))).peer_command
    archive, code = CODE_VOLUMES
    volumes = ({"name": archive, "configMap": {"name": config_map}}, {"name": code, "emptyDir": {}})
    mounts = (
        {"name": archive, "mountPath": ARCHIVE_DIRECTORY, "readOnly": True},
        {"name": code, "mountPath": CODE_DIRECTORY},
    )
    for role, template in kind.form.option_templates(result):
        pod = mapping_at(template, "spec")
        container, program = kind.form.main_container(spec, pod, role), kind.form.program(spec, pod, role)
        needs_command = program.get("args") or kind.runs_program(role)
        command = program.get("command") or ([] if needs_command else peer_command)
        if not command:
            raise ManifestError(
                "code needs a command, because the image's own ENTRYPOINT isn't known",
                where=f"$.spec.{kind.form.replica_specs}.{role}" if kind.form.replica_specs else "$.spec.trainer",
                found="no command",
                expected='a command, such as ["python", "train.py"]',
                remedy="set command",
            )
        program["command"] = [*_start_command(_START), *command]
        pod["volumes"] = [*(pod.get("volumes") or ()), *plain(volumes)]
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), *plain(mounts)]
    return result


def without_start(command: list[Any]) -> list[Any]:
    """A container's own command, without the words of this or another release that unpack code before it."""
    starts = len(command) > _START_WORDS and command[:_START_WORDS] == _start_command(command[len(_PYTHON)])
    return command[_START_WORDS:] if starts else command


def _start_command(program: str) -> list[str]:
    """The words before a container's own command."""
    return [*_PYTHON, program, f"{ARCHIVE_DIRECTORY}/{ARCHIVE}", CODE_DIRECTORY]
