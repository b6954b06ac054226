"""What a rule works with: a manifest that may be wrong anywhere, and the findings that it reports."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.checks.problem import Level, Problem
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.kinds.strategic_merge import member
from airflow_provider_ktrain.core.kinds.training_operators import OperatorVersion
from airflow_provider_ktrain.core.kinds.trainjob.form import TRAINER_FIELDS
from airflow_provider_ktrain.core.state.accelerators import is_gpu


@dataclass(frozen=True)
class Field:
    """A field of a manifest: its value and its JSON path. A field of a field that isn't there has no value."""

    value: Any
    path: str = "$"

    def __getitem__(self, key: str) -> Field:
        return Field(self.value.get(key) if isinstance(self.value, dict) else None, member(self.path, key))

    def __iter__(self) -> Iterator[Field]:
        for i, item in enumerate(self.value if isinstance(self.value, list) else ()):
            yield Field(item, f"{self.path}[{i}]")

    def members(self) -> Iterator[tuple[str, Field]]:
        """Key and field of each entry of a mapping; nothing for another value."""
        for key in self.value if isinstance(self.value, dict) else ():
            yield key, self[key]

    @property
    def present(self) -> bool:
        """Whether the field is set. `null` counts as not set, as in the API server."""
        return self.value is not None

    @property
    def text(self) -> str:
        """The value if it is text, otherwise an empty string."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """A whole number, also one in quotes; None for anything else."""
        if isinstance(self.value, bool):
            return None
        return int(self.value) if str(self.value).isdigit() else None


@dataclass(frozen=True)
class Replica:
    """One replica type of a job.

    :param role: as the manifest writes it.
    :param container: the name of the main container, if the kind or the manifest names one.
    """

    role: str
    at: Field
    count: int
    container: str | None

    @property
    def pod(self) -> Field:
        """The spec of the pod template."""
        return self.at["template"]["spec"]

    @property
    def containers(self) -> list[Field]:
        """The containers of the pod template, without init containers."""
        return list(self.pod["containers"])

    @property
    def main(self) -> Field:
        """The main container: the one of that name, else the first."""
        named = [c for c in self.containers if c["name"].text == self.container]
        return (named or self.containers or [Field(None, f"{self.pod.path}.containers[0]")])[0]

    @functools.cached_property
    def command_line(self) -> str:
        """Command and arguments of the main container as one text, with a space before and after each word."""
        texts = [str(word.value) for key in ("command", "args") for word in self.main[key]]
        return " " + " ".join(texts) + " "

    def numbers(self, flag: str) -> list[tuple[int, Field]]:
        """The values of a numeric argument of the main container, and the word in which each flag is.

        :param flag: a regular expression: `--nproc[-_]per[-_]node`.
        """
        matches = re.finditer(rf"\s(?:{flag})[=\s]+['\"]?(\d+)\b", self.command_line)
        return [(int(m[1]), self.word(m[0])) for m in matches]

    def word(self, text: str) -> Field:
        """The word of the command line that contains the flag with which `text` begins."""
        flag = re.split(r"[=\s]", text.strip())[0]
        words = [w for key in ("command", "args") for w in self.main[key]]
        return next((w for w in words if flag in str(w.value)), self.main)

    @property
    def gpus(self) -> int:
        """The GPUs, or parts of them, that one pod requests."""
        return sum(
            max(resources["limits"][name].number or 0, resources["requests"][name].number or 0)
            for c in self.containers
            for resources in [c["resources"]]
            for name in {n for side in ("limits", "requests") for n, _ in resources[side].members() if is_gpu(n)}
        )


class TrainerField(Field):
    """`spec.trainer` of a job with a runtime, as the container that it describes."""

    def __getitem__(self, key: str) -> Field:
        return Field("node", self.path) if key == "name" else super().__getitem__(TRAINER_FIELDS.get(key, key))


class Trainer(Replica):
    """The nodes of a job whose pod templates are in a runtime: the manifest has one container of them, in part."""

    @property
    def pod(self) -> Field:
        """Empty: the pod is described in the runtime."""
        return Field(None, self.at.path)

    @property
    def containers(self) -> list[Field]:
        """`spec.trainer`, as the container that it describes."""
        return [TrainerField(self.at.value, self.at.path)]


@dataclass(frozen=True)
class Job:
    """A manifest of a known kind."""

    root: Field
    kind: Kind

    @property
    def operator(self) -> OperatorVersion:
        """The operator of the job's API version; of the newest if the manifest names none that we know."""
        return self.kind.operator_of(self.root["apiVersion"].text)

    @property
    def spec(self) -> Field:
        """The manifest's `spec`."""
        return self.root["spec"]

    @property
    def replica_specs(self) -> Field:
        """The mapping of roles to replica specs, whose key differs between the kinds."""
        return self.spec[self.kind.form.replica_specs]

    @functools.cached_property
    def replicas(self) -> dict[str, Replica]:
        """The replica types by role. A replica spec that isn't a mapping is left to the schema check."""
        container_name = self.kind.form.container or self.spec["mainContainer"].text
        if self.kind.runtimes:
            role, nodes = self.kind.primaries[-1], self.spec["trainer"]["numNodes"].number
            return {role: Trainer(role, self.spec["trainer"], 1 if nodes is None else nodes, container_name)}
        return {
            role: Replica(role, at, self.kind.count(self.root.value, role), container_name)
            for role, at in self.replica_specs.members()
            if isinstance(at.value, dict)
        }

    @property
    def pod_templates(self) -> list[Field]:
        """The pod templates of the manifest, and the patches of a runtime's."""
        patches = self.spec["runtimePatches"] if self.kind.runtimes else ()
        jobs = (r for p in patches for r in p["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"])
        return [*(r.at["template"] for r in self.replicas.values()), *(r["template"]["spec"]["template"] for r in jobs)]

    @property
    def containers(self) -> Iterator[tuple[Replica, Field]]:
        """Each container with its replica type, init containers first."""
        for replica in self.replicas.values():
            for container in (*replica.pod["initContainers"], *replica.containers):
                yield replica, container

    @property
    def training(self) -> list[Replica]:
        """The replicas in which training processes run: the Workers of an MPIJob."""
        return [r for r in self.replicas.values() if self.kind.trains(self.spec.value, r.role)]

    @property
    def programs(self) -> list[Replica]:
        """The replicas whose command is the program: the Launcher of an MPIJob."""
        return [r for r in self.replicas.values() if self.kind.runs_program(r.role)]


@dataclass(frozen=True)
class Finding:
    """What a rule reports: a `Problem` at a field, with the rule's code.

    :param level: only if it differs from the rule's.
    """

    at: Field
    message: str
    found: str = ""
    expected: str = ""
    hint: str = ""
    level: Level | None = None


Check = Callable[[Job], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A check and the code of its findings.

    :param kind: the only kind that the rule applies to; None: every kind.
    """

    code: str
    level: Level
    check: Check
    kind: Kind | None = None

    def problems(self, job: Job) -> Iterator[Problem]:
        """What the check finds in a job; nothing if the rule is for another kind."""
        if self.kind not in (None, job.kind):
            return
        for f in self.check(job):
            yield Problem(f.level or self.level, self.code, f.at.path, f.message, f.found, f.expected, f.hint)


REGISTRY: list[Rule] = []  #: All rules. The modules of rules add theirs, and `checks.rules()` imports these modules.


def rule(code: str, level: Level, kind: Kind | None = None) -> Callable[[Check], Check]:
    """Register a check. The first sentence of its docstring describes it in docs/reference/checks.md."""

    def register(function: Check) -> Check:
        REGISTRY.append(Rule(code, level, function, kind))
        return function

    return register
