"""Images: names mapped to directories. There is no registry behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from airflow_provider_ktrain.local.store import Obj

#: images that the operators add by themselves, by the last part of their name: they need nothing but the pod's tools
OPERATORS = ("alpine", "kubectl-delivery")
ENTRYPOINTS = {"kubectl-delivery": ["deliver-kubectl", "/etc/mpi/hostfile"]}


class ImageNotFound(Exception):
    """No directory is mapped to the image; worded as containerd words it, with the remedy."""

    def __init__(self, image: str) -> None:
        super().__init__(
            f'failed to pull and unpack image "{image}": failed to resolve image: {image}: not found (this cluster has '
            f"no registry: map the name to a directory with --image {image}=DIR)"
        )


def names(image: str) -> Iterator[str]:
    """The names under which an image may be mapped, as given first, without tag or digest last."""
    short = image.removeprefix("docker.io/").removeprefix("library/")
    for name in (image, short):
        yield name
        head, _, tail = name.partition("@")[0].rpartition("/")
        yield f"{head}/{tail.partition(':')[0]}".lstrip("/")


class Images:
    """What images there are; a name that is mapped to None is an empty directory."""

    def __init__(self, mapped: Mapping[str, Path | None]) -> None:
        self._mapped = dict(mapped)

    def directory(self, image: str) -> Path | None:
        """The image's directory, None for an empty one; ImageNotFound where the name is not mapped."""
        for name in names(image):
            if name in self._mapped:
                return self._mapped[name]
        if _last(image) in OPERATORS:
            return None
        raise ImageNotFound(image)

    @staticmethod
    def entrypoint(container: Obj) -> Obj:
        """The container with the command that its image gives it, where the operators count on one."""
        command = ENTRYPOINTS.get(_last(container["image"]))
        return {**container, "command": command} if command and not container.get("command") else container


def _last(image: str) -> str:
    return list(names(image))[-1].rpartition("/")[2]
