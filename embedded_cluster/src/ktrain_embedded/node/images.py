"""Images: names that are mapped to directories. The cluster doesn't have a registry.

A Dockerfile in such a directory isn't built. Only its last ENTRYPOINT and CMD are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ktrain_embedded.objects.store import Obj

#: Images that operators add and the image of the training runtimes, by the last part of their name. They need only the
#: pod's tools.
RUNTIME = "ktrain-runtime"
OPERATORS = ("alpine", "kubectl-delivery", RUNTIME)
ANY = "*"  # the name that stands for every image that isn't mapped
ENTRYPOINTS = {"kubectl-delivery": ["deliver-kubectl", "/etc/mpi/hostfile"], RUNTIME: ["python3"]}
BINARIES = ("usr/local/bin", "usr/bin", "bin")  # directories of programs in an image, in the order of PATH
_HOST, _PART = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?", "[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
#: Image names that containerd accepts (github.com/distribution/reference).
REFERENCE = re.compile(
    rf"({_HOST}(\.{_HOST})*(:[0-9]+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@[a-zA-Z][\w+.-]*:[0-9a-fA-F]{{32,}})?",
    re.ASCII,
)


class ImageNotFound(Exception):
    """No directory is mapped to the image. The message is containerd's, with a remedy added."""

    def __init__(self, image: str) -> None:
        super().__init__(
            f'failed to pull and unpack image "{image}": failed to resolve image: {image}: not found (this cluster has '
            f"no registry: map the name to a directory with --image {image}=DIR)"
        )


def names(image: str) -> list[str]:
    """The names to look up for an image, from the full name to the name without registry, tag and digest."""
    whole = [image, image.removeprefix("docker.io/").removeprefix("library/")]
    return whole + [re.sub(r"(:[^/:@]*)?(@.*)?$", "", name) for name in whole]


class Images:
    """The images of the cluster. A name that is mapped to None has an empty directory.

    The name `*` stands for every image that isn't mapped, except those that operators add.
    """

    def __init__(self, mapped: Mapping[str, Path | None]) -> None:
        self._mapped = dict(mapped)

    def directory(self, image: str) -> Path | None:
        """The image's directory, or None for an empty one. ImageNotFound if the name isn't mapped."""
        for name in names(image):
            if name in self._mapped:
                return self._mapped[name]
        if _last(image) in OPERATORS and not (ANY in self._mapped and _last(image) == RUNTIME):
            return None
        if ANY in self._mapped:
            return self._mapped[ANY]
        raise ImageNotFound(image)

    @property
    def directories(self) -> list[Path]:
        """The directories of all images."""
        return [directory for directory in self._mapped.values() if directory is not None]

    @staticmethod
    def entrypoint(container: Obj, directory: Path | None) -> Obj:
        """The container, with command and args from its image (ENTRYPOINT and CMD) if the manifest doesn't set them."""
        if container.get("command"):
            return container
        instructions = _dockerfile(directory)
        command = ENTRYPOINTS.get(_last(container["image"])) or instructions.get("ENTRYPOINT", [])
        return {**container, "command": command, "args": container.get("args") or instructions.get("CMD", [])}


def binaries(directory: Path) -> list[str]:
    """The directories of programs in an image."""
    return [str(directory / name) for name in BINARIES if (directory / name).is_dir()]


def _dockerfile(directory: Path | None) -> dict[str, list[str]]:
    """The last ENTRYPOINT and CMD. A value that isn't a JSON list is a shell command."""
    path = directory / "Dockerfile" if directory else None
    text = path.read_text(errors="replace").replace("\\\n", " ") if path and path.is_file() else ""
    found: dict[str, list[str]] = {}
    for instruction, rest in re.findall(r"^\s*(ENTRYPOINT|CMD)\s+(.*?)\s*$", text, re.IGNORECASE | re.MULTILINE):
        try:
            found[instruction.upper()] = [str(word) for word in json.loads(rest)]
        except ValueError:
            found[instruction.upper()] = ["/bin/sh", "-c", rest]
    return found


def _last(image: str) -> str:
    return names(image)[-1].rpartition("/")[2]
