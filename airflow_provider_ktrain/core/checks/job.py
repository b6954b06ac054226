"""What a check sees: a manifest that may be broken anywhere, and how it says what it found."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.kinds.base import Kind
from airflow_provider_ktrain.core.manifest.loader import join
from airflow_provider_ktrain.core.manifest.overlay import trains
from airflow_provider_ktrain.core.manifest.transform import is_gpu

NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
NAMESPACE_IS = "up to 63 lower-case letters, digits and -"


class Level(enum.StrEnum):
    ERROR = "error"  #: the cluster or the operator would refuse the job or never run it
    WARNING = "warning"  #: it runs, hardly as it was meant


@dataclass(frozen=True)
class Problem:
    """One finding. `path` is a JSON path: `$.spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].image`."""

    level: Level
    code: str
    path: str
    message: str
    found: str = ""
    expected: str = ""
    hint: str = ""

    def __str__(self) -> str:
        said = "".join(
            f"; {label}{text}"
            for label, text in (("found ", self.found), ("expected ", self.expected), ("", self.hint))
            if text
        )
        return f"{self.level} {self.code} at {self.path}: {self.message}{said}"


@dataclass(frozen=True)
class At:
    """A place in a manifest and what is there. Asking for what is not there gives a place with nothing in it."""

    value: Any
    path: str = "$"

    def __getitem__(self, key: str) -> At:
        return At(self.value.get(key) if isinstance(self.value, dict) else None, join(self.path, key))

    def __iter__(self) -> Iterator[At]:
        for i, item in enumerate(self.value if isinstance(self.value, list) else ()):
            yield At(item, f"{self.path}[{i}]")

    def members(self) -> Iterator[tuple[str, At]]:
        for key in self.value if isinstance(self.value, dict) else ():
            yield key, self[key]

    @property
    def here(self) -> bool:
        return self.value is not None

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """A whole number, also one in quotes; None for anything else."""
        if isinstance(self.value, bool):
            return None
        return int(self.value) if str(self.value).isdigit() else None


@dataclass(frozen=True)
class Replica:
    """One replica type of a job."""

    role: str
    at: At
    count: int
    container: str | None

    @property
    def pod(self) -> At:
        return self.at["template"]["spec"]

    @property
    def containers(self) -> list[At]:
        return list(self.pod["containers"])

    @property
    def main(self) -> At:
        """The container that trains: the one of the wanted name, else the first."""
        named = [c for c in self.containers if c["name"].text == self.container]
        return (named or self.containers or [At(None, f"{self.pod.path}.containers[0]")])[0]

    @functools.cached_property
    def words(self) -> str:
        """Command and arguments of the main container as one text, with a blank around each word."""
        texts = [str(word.value) for key in ("command", "args") for word in self.main[key]]
        return " " + " ".join(texts) + " "

    @property
    def gpus(self) -> int:
        """GPUs of one pod."""
        return sum(
            max(resources["limits"][name].number or 0, resources["requests"][name].number or 0)
            for c in self.containers
            for resources in [c["resources"]]
            for name in {n for side in ("limits", "requests") for n, _ in resources[side].members() if is_gpu(n)}
        )


@dataclass(frozen=True)
class Job:
    """A manifest of a known kind, taken apart as far as it can be.

    :param version: of its API (`v1`); the newest one that we can write where the manifest names none of them.
    """

    root: At
    kind: Kind
    version: str

    @property
    def spec(self) -> At:
        return self.root["spec"]

    @property
    def replica_specs(self) -> At:
        return self.spec[self.kind.replica_specs]

    @functools.cached_property
    def replicas(self) -> dict[str, Replica]:
        wanted = self.kind.container or self.spec["mainContainer"].text
        return {
            role: Replica(role, at, self.kind.count(self.root.value, role), wanted)
            for role, at in self.replica_specs.members()
            if isinstance(at.value, dict)
        }

    @property
    def trained(self) -> list[Replica]:
        """The replicas that do the training: of an MPIJob the Workers."""
        return [r for r in self.replicas.values() if trains(self.spec.value, r.role)]

    @property
    def programs(self) -> list[Replica]:
        """The replicas whose command is the program: of an MPIJob the Launcher."""
        return [r for r in self.replicas.values() if self.kind.name != "MPIJob" or r.role == "Launcher"]

    @property
    def mpi_v2(self) -> bool:
        return self.kind.name == "MPIJob" and self.version == "v2beta1"


@dataclass(frozen=True)
class Found:
    """What a rule found. `level` only where it differs from the rule's."""

    at: At
    message: str
    found: str = ""
    expected: str = ""
    hint: str = ""
    level: Level | None = None


Rule = Callable[[Job], Iterator[Found]]


@dataclass(frozen=True)
class Registered:
    code: str
    level: Level
    rule: Rule

    def problems(self, job: Job) -> Iterator[Problem]:
        for f in self.rule(job):
            yield Problem(f.level or self.level, self.code, f.at.path, f.message, f.found, f.expected, f.hint)


RULES: list[Registered] = []


def rule(code: str, level: Level) -> Callable[[Rule], Rule]:
    """Put a rule into the registry, under the code that its findings carry."""

    def register(function: Rule) -> Rule:
        RULES.append(Registered(code, level, function))
        return function

    return register
