"""Where the processes of a job were when a limit released it, and which of them keeps the others waiting.

The stacks only name a replica and its line. They change neither the category of a cause nor whether a retry is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.diagnosis.node_conditions import NodeProblem
from airflow_provider_ktrain.core.logs.stacks import (
    FUNCTION_FILE,
    FUNCTION_OFFSET,
    LAUNCHER,
    RANK,
    WORKER,
    Frame,
    Stack,
)
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.text.output import counted, format_duration, listed

MAX_NAMED = 3  #: Processes that a sentence names.
MAX_LISTED = 16  #: Processes of one group that the detail names.
MAX_GROUPS = 12  #: How many groups the detail lists.
GONE = "gone"  #: Why a rank has no stack: its process has ended.
#: What a rank does in a collective operation of its peers.
ABSENT, SILENT, MISSING = "has not joined", "reports no timeout", "is missing"
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python[\d.]+t?/")
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_CONSOLE_SCRIPT = re.compile(r"/s?bin/[^/.]+$")
#: A process in one of these waits for its peers.
_COLLECTIVE = re.compile(r"/(torch/distributed|horovod|mpi4py|deepspeed/comm)/")
_LAUNCHERS = re.compile(r"/torch/distributed/(elastic|run|launch|launcher)\b")
#: Modules with the functions for collective operations, and their decorator with its helpers.
_OPERATIONS = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_CHILD = "process.py", "_bootstrap"  #: The outermost function of a process that multiprocessing has started.
_DECORATOR = re.compile(r"/torch/distributed/c10d_logger\.py$")
#: Packages that call the one whose line matters, if a program has no line outside of packages.
_FRAMEWORKS = {
    "torch", "accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers", "mpi4py", "horovod", "numpy",
}  # fmt: skip
#: What to do about a hang whose stacks aren't known.
LOOK_FOR_STACKS = (
    "Look for a replica that waits for another: a missing peer, unequal numbers of batches, a deadlock. py-spy dump in "
    "a pod shows where it waits. A program that is sent as code prints its stacks when the job is released."
)
_IMPORT = "<frozen importlib"  #: Frames of Python while it imports a module.
_STATES = {"D": "it waits in the kernel, for a disk, a network file system or a driver"}
_STARTS = {
    Limit.PROGRESS: "No step for {}",
    Limit.LOG_STALL: "No log line for {}",
    Limit.EXECUTION: "Not finished after {}",
}  #: Words of the first line, by the limits that a hang can pass.


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    :param function: of the program's own innermost frame; empty if only the collective operation is known.
    :param at: its file and line, or the number of the operation.
    :param inner: the function that it has called, if that waits for peers, or the operation. Default: empty.
    :param why: why the place isn't known. Default: empty.
    :param imports: the module that it imports. Default: empty, it imports none.
    """

    function: str = ""
    at: str = ""
    inner: str = ""
    why: str = ""
    imports: str = ""

    @property
    def text(self) -> str:
        """Such as `all_reduce (train.py:88)`."""
        return f"{self.inner or self.function} ({self.at})"

    @property
    def detail(self) -> str:
        """Such as `train.py:88 in train, in all_reduce`."""
        called = self.inner or (self.imports and f"the import of {self.imports}")
        if not self.function:
            return self.why or (self.text if self.at else called)
        return f"{self.at} in {self.function}" + (f", in {called}" if called else "")


@dataclass(frozen=True)
class Process:
    """The main process of a rank, or of a replica without ranks.

    :param others: places of its other threads.
    :param workers: places of the processes that it has started, such as those of a data loader.
    """

    replica: str
    pid: int
    rank: str
    place: Place
    frames: tuple[Frame, ...]
    others: tuple[Place, ...] = ()
    workers: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Group:
    """Processes at the same place. They wait for their peers if the place has an `inner` function."""

    place: Place
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Hang:
    """Where the processes of a job were.

    :param groups: of the main processes; those that keep the others waiting first.
    :param odd: how many groups these are, at the beginning. 0: this can't be said.
    """

    groups: tuple[Group, ...]
    odd: int
    replicas: int
    read: int

    @property
    def replica(self) -> str:
        """The replica that keeps the others waiting; empty if it isn't one."""
        found = {process.replica for group in self.groups[: self.odd] for process in group.processes}
        return found.pop() if len(found) == 1 else ""

    @property
    def _by_replica(self) -> bool:
        """Whether each replica has one process, so that its name says which is meant."""
        names = [process.replica for group in self.groups for process in group.processes]
        return len(names) == len(set(names))

    def name(self, process: Process) -> str:
        """The process in a sentence: `Worker 3`, or `rank 5 of Worker 2`."""
        who = f"rank {process.rank}" if process.rank else f"process {process.pid}"
        if not process.replica:
            return who
        return process.replica if self._by_replica else f"{who} of {process.replica}"

    @property
    def sentence(self) -> str:
        """Who is where, in one line."""
        first, *rest = self.groups
        if not rest:
            return self._all_of(first)
        if not self.odd:
            named = [self._clause(group, self._names(group)) for group in self.groups[:2]]
            return "; ".join(named) + (f"; and {counted(len(self.groups) - 2, 'group')} more" * (len(self.groups) > 2))
        odd, others = self.groups[: self.odd], self.groups[self.odd :]
        if odd[0].place.why == MISSING:
            return f"{self._count(others)}; {self._clause(odd[0], self._names(odd[0]))}"
        clauses = [self._clause(group, self._names(group)) for group in odd[:2]]
        clauses += [self._others(others)] if others else []
        return ", ".join(clauses)

    @property
    def waiting(self) -> str:
        """The number of those that wait."""
        return self._count(self.groups[self.odd :])

    def _names(self, group: Group) -> str:
        return listed([self.name(process) for process in group.processes], MAX_NAMED)

    @property
    def _unit(self) -> str:
        return "replica" if self._by_replica else "rank"

    def _all_of(self, group: Group) -> str:
        number = len(group.processes)
        if number == 1:
            only = ", the only one that was read," if self.read < self.replicas else ""
            return self._clause(group, f"{self._names(group)}{only}")
        who = f"both {self._unit}s" if number == 2 else f"all {counted(number, self._unit)}"
        read = " that were read" if self.read < self.replicas else ""
        return self._clause(group, f"{who}{read}", many=True)

    def _others(self, groups: Sequence[Group]) -> str:
        largest = max(groups, key=lambda group: len(group.processes))
        number, total = len(largest.processes), sum(len(group.processes) for group in groups)
        if number == 1 and total == 1 and self.read == self.replicas:
            return self._clause(largest, self._names(largest))
        if number < total or self.read < self.replicas:
            read = " that were read" if self.read < self.replicas else ""
            who = f"{number} of the {counted(total, f'other {self._unit}')}{read}"
        else:
            who = counted(number, f"other {self._unit}")
        return self._clause(largest, who, many=number > 1)

    def _count(self, groups: Sequence[Group]) -> str:
        """Such as `7 of 8 ranks wait in ALLREDUCE (work 8)`, of all that are known."""
        largest = max(groups, key=lambda group: len(group.processes))
        number, total = len(largest.processes), sum(len(group.processes) for group in self.groups)
        who = f"{number} of {counted(total, self._unit)}" if total > 2 else "its peer"
        return self._clause(largest, who, many=number > 1)

    def _clause(self, group: Group, who: str, *, many: bool | None = None) -> str:
        """Such as `Worker 3 is in load_batch (data.py:41)`."""
        many = len(group.processes) > 1 if many is None else many
        place = group.place
        if place.why == GONE:
            return f"{who} {'have' if many else 'has'} left"
        if place.why == ABSENT:
            return f"{who} {'have' if many else 'has'} not joined"
        if place.why == SILENT:
            return f"{who} {'report' if many else 'reports'} no timeout"
        if place.why == MISSING:
            return f"{who} {'are' if many else 'is'} missing"
        if place.why:
            state = place.why[-1:]
            known = f": {_STATES[state]}" if state in _STATES else ""
            return f"{who} {'do' if many else 'does'} not answer (state {state}{known})"
        if place.inner:
            return f"{who} {'wait' if many else 'waits'} in {place.text}"
        if place.imports:
            return f"{who} {'import' if many else 'imports'} {place.imports}{f' ({place.at})' if place.at else ''}"
        workers = {worker.text for process in group.processes for worker in process.workers}
        others = {other.text for process in group.processes for other in process.others}
        beside = ""
        if len(workers) == 1:
            beside = f" with worker processes in {next(iter(workers))}"
        elif len(others) == 1:
            beside = f" with a thread in {next(iter(others))}"
        return f"{who} {'are' if many else 'is'} in {place.text}{beside}"

    @property
    def advice(self) -> str:
        """What to look at."""
        place = self.groups[0].place
        if place.why == GONE:
            return "Find out why it has left: all ranks must make the same number of steps."
        if place.why:
            if place.why[-1:] in _STATES:
                return "Check the storage and the drivers of its node."
            return "It runs no Python code, or blocks signals: py-spy dump --native in its pod shows more."
        if not all(group.place.inner for group in self.groups):
            return "Look at the named line: data that does not come, a lock, a branch that only some ranks take."
        if len(self.groups) > 1:
            return "Let all ranks call the same collective operations in the same order."
        return "No rank is behind: check that all replicas run, the network between their nodes, and the GPUs."

    @property
    def lines(self) -> list[str]:
        """The groups, one line each, for the detail of a cause."""
        found = [f"Where the processes were ({self.read} of {counted(self.replicas, 'replica')} read):"]
        for group in self.groups[:MAX_GROUPS]:
            beside = sorted(
                {f"worker at {worker.detail}" for process in group.processes for worker in process.workers}
                | {f"thread at {thread.detail}" for process in group.processes for thread in process.others}
            )
            names = listed([self.name(process) for process in group.processes], MAX_LISTED)
            found.append(f"  {len(group.processes)}: {group.place.detail} [{names}]")
            found += [f"     {text}" for text in beside[:4]]
        if len(self.groups) > MAX_GROUPS:
            found.append(f"  and {counted(len(self.groups) - MAX_GROUPS, 'group')} more")
        return found


def find_hang(stacks: Mapping[str, Sequence[Stack]], replicas: int, ended: Iterable[str] = ()) -> Hang | None:
    """Group the processes by where they are; None if none has printed its stack.

    :param ended: replicas whose pods have ended. Default: none.
    """
    processes = list(_processes(stacks))
    alive = {process.rank for process in processes if process.place.why != GONE}
    processes = [p for p in processes if p.place.why != GONE or p.rank not in alive]
    processes += [Process(replica, 0, "", Place(why=GONE), ()) for replica in ended]
    if all(process.place.why for process in processes):
        return None  # a job whose ranks have all left has not hung
    groups = grouped(processes)
    odd = find_odd(groups)
    ordered = [*odd, *(group for group in groups if group not in odd)]
    if not odd:
        ordered.sort(key=lambda group: bool(group.place.inner))
    return Hang(tuple(ordered), len(odd), max(replicas, len(stacks)), len({p.replica for p in processes}))


def grouped(processes: Sequence[Process]) -> list[Group]:
    """The processes by their places: the smallest group first."""
    by_place: dict[Place, list[Process]] = {}
    for process in processes:
        by_place.setdefault(process.place, []).append(process)
    groups = (Group(place, tuple(found)) for place, found in by_place.items())
    return sorted(groups, key=lambda group: (len(group.processes), group.processes[0].replica))


def explain_hang(cause: Cause, limit: Limit, seconds: float, hang: Hang, problem: NodeProblem | None = None) -> Cause:
    """The cause with where the processes were, and what to look at. If it names what failed, only its detail gets them.

    :param problem: of the node of the replica that keeps the others waiting. Default: None, none is known.
    """
    places = "\n".join(hang.lines)
    cause = replace(cause, resolution=cause.resolution.replace(LOOK_FOR_STACKS, hang.advice))
    if cause.replica or limit not in _STARTS:
        return replace(cause, detail="\n".join(filter(None, (cause.detail, places))))
    before, node = cause.summary, "" if problem is None else f"{problem}. "
    cause = replace(
        cause.with_summary(lambda _: f"{_STARTS[limit].format(format_duration(seconds))}: {node}{hang.sentence}"),
        replica=hang.replica,
        detail="\n".join(filter(None, (before, places, cause.detail))),
    )
    return cause.with_short_summary()


def _processes(stacks: Mapping[str, Sequence[Stack]]) -> Iterator[Process]:
    """The main processes of all replicas; a launcher counts only where it has no ranks."""
    for replica, found in stacks.items():
        mains = [stack for stack in found if stack.main and stack.part == RANK]
        mains = mains or [stack for stack in found if stack.main and stack.part == LAUNCHER]
        for main in mains:
            workers = [s for s in found if s.main and s.part == WORKER and s.rank == main.rank]
            workers = [replace(worker, frames=_of_child(worker.frames)) for worker in workers]
            threads = [s for s in found if not s.main and s.pid == main.pid]
            yield Process(
                replica,
                main.pid,
                main.rank,
                _place(main),
                main.frames,
                tuple(dict.fromkeys(_place(s) for s in threads if _own(s.frames) is not None)),
                tuple(dict.fromkeys(_place(s) for s in workers if _own(s.frames) is not None)),
            )


def find_odd(groups: Sequence[Group]) -> list[Group]:
    """The groups that keep the others waiting; none if this can't be said.

    :param groups: the smallest first.
    """
    if len(groups) < 2:
        return []
    half = sum(len(group.processes) for group in groups) / 2
    for why in (GONE, ABSENT, MISSING, SILENT):
        if gone := [group for group in groups if group.place.why == why]:
            return gone
    if silent := [group for group in groups if group.place.why]:
        return silent if sum(len(group.processes) for group in silent) < half else []
    busy = [group for group in groups if not group.place.inner]
    if len(busy) == 1 and len(busy[0].processes) <= half:
        return busy
    smallest, second = groups[:2]
    return [smallest] if len(smallest.processes) < len(second.processes) else []


def _place(stack: Stack) -> Place:
    if stack.why:
        return Place(why=stack.why)
    if not stack.frames:
        return Place(why="no answer, state S")
    own = _own(stack.frames) or _of_package(stack.frames) or stack.frames[0]
    inner = stack.frames[: stack.frames.index(own)]
    imports = _imported(inner or stack.frames)
    if imports and own.path.startswith("<frozen"):
        return Place(imports=imports)
    file = own.path.rpartition("/")[2]
    # the task's user knows no file of its function
    at = f"line {own.line - FUNCTION_OFFSET} of the function" if file == FUNCTION_FILE else f"{file}:{own.line}"
    return Place(own.function, at, _collective(inner), imports=imports)


def _imported(frames: Sequence[Frame]) -> str:
    """What the program's own frame imports, or Python before it has one; empty if it imports nothing.

    :param frames: innermost first.
    """
    if not any(frame.path.startswith(_IMPORT) for frame in frames):
        return ""
    modules = (frame.path for frame in reversed(frames) if frame.function == "<module>")
    path = next((path for path in modules if not path.startswith("<")), "")
    package = _PACKAGE.search(path)
    name = package[1] if package else path.removesuffix("/__init__.py").rpartition("/")[2]
    return name.removesuffix(".py") or "a module"


def _collective(frames: Sequence[Frame]) -> str:
    """The collective operation that a program has called; empty if it hasn't.

    It is the outermost function that has one: its helpers are not what the program called. Where the operation has
    failed already, because the peers of the rank ended first, only its decorator is left, which describes the error. It
    has the operation's name there (see `sitecustomize.py`).

    :param frames: that the program's own innermost frame has called.
    """
    found = [f for f in frames if _COLLECTIVE.search(f.path) and not _LAUNCHERS.search(f.path)]
    of_decorator = [number for number, f in enumerate(found) if _DECORATOR.search(f.path)]
    if any(found[number].function.startswith("_") for number in of_decorator):
        found = found[of_decorator[-1] :]
    undecorated = [f for f in found if not _DECORATOR.search(f.path)]
    named = [f for f in undecorated if _OPERATIONS.search(f.path)] or undecorated or found
    return named[-1].function if named else ""


def _of_child(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of a process that multiprocessing has started, without those of its parent, which it has after a fork.

    None of them is the program's own in a worker of a data loader that waits for work.
    """
    starts = (n for n, frame in enumerate(frames) if (frame.path.rpartition("/")[2], frame.function) == _CHILD)
    return tuple(frames[: next(starts, len(frames))])


def _own(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the program itself."""
    return next((frame for frame in frames if not _is_library(frame.path)), None)


def _of_package(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of a package that isn't a framework: the program may be installed as one."""
    for frame in frames:
        found = _PACKAGE.search(frame.path)
        if found and found[1].removesuffix(".py") not in _FRAMEWORKS:
            return frame
    return None


def _is_library(path: str) -> bool:
    return (
        path.startswith("<frozen")
        or _PACKAGE.search(path) is not None
        or _STANDARD_LIBRARY.search(path) is not None
        or _CONSOLE_SCRIPT.search(path) is not None
    )
