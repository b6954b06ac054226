"""How the pods of a job get the code that is sent to them, the same for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError


@dataclass(frozen=True)
class PodCode:
    """What the pods of a job need so that its program runs with the code that is sent.

    :param start: the beginning of the command of a container: what unpacks the code and then executes the rest.
    :param volumes: of each pod.
    :param mounts: of each main container.
    """

    start: Sequence[str]
    volumes: Sequence[Mapping[str, Any]]
    mounts: Sequence[Mapping[str, Any]]

    def command(self, command: Sequence[str], where: str) -> list[str]:
        """The command of a container, with the code.

        :param command: without the code.
        :param where: path of the container.
        :raises ManifestError: it is empty.
        """
        if not command:
            raise ManifestError(
                "code needs a command, because the image's own ENTRYPOINT isn't known",
                where=where,
                found="no command",
                expected='a command, such as ["python", "train.py"]',
                remedy="set command",
            )
        return [*self.start, *command]

    def mount(self, pod: dict[str, Any], container: dict[str, Any]) -> None:
        """Add the volumes to a pod, and the mounts to its main container."""
        pod["volumes"] = [*(pod.get("volumes") or ()), *map(dict, self.volumes)]
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), *map(dict, self.mounts)]
