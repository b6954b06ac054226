"""Measures what the tests notice: breaks one thing at a time, and runs the tests that reach it until one fails.

    python scripts/mutations.py draw                # prints the 60 changes of scripts/mutations.toml
    python scripts/mutations.py check               # every mutation finds its place in this tree
    python scripts/mutations.py probe               # one run of all tests: which test reaches which place
    python scripts/mutations.py run [--only ID ...] # the tests of each mutation, the cheapest first
    python scripts/mutations.py report              # writes the tables

A mutation names the function and the code that it changes, not the file: it still finds its place after the function
has moved, and fails if the place is missing or isn't the only one. A mutation is caught by a test that fails with it,
outside tests/core twice, and passes without it. Tests of generated pages don't count: they notice any change of a
rule's words.

All commands work on copies of a commit (`--commit`, by default HEAD), in the folder `--data`.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "airflow_provider_ktrain"
LIST = ROOT / "scripts" / "mutations.toml"
PLUGIN = ROOT / "scripts" / "mutations_plugin.py"
RULES = "core/end_rules.py"

#: What acts: it reads, decides, writes, or keeps a secret.
ROOMS = (
    "engine/watch", "engine/api", "engine/submit", "engine/follow", "engine/logs", "engine/", "operators", "triggers",
    "hooks", "sensors", "worker_host.py", "status_writer.py", "compat.py", "cli/run", "core/end_rules.py",
    "core/identity", "core/state", "core/logs", "core/diagnosis", "core/text", "core/reporting/redaction.py",
)  # fmt: skip
#: How many changes of each kind are drawn, and the beginning of their ids.
QUOTA = {
    "condition negated": (11, "negated"), "condition dropped": (11, "dropped"), "off by one": (8, "bound"),
    "fence dropped": (5, "fence"), "identity not compared": (4, "identity"), "error not caught": (6, "uncaught"),
    "not advanced": (7, "stays"), "call dropped": (4, "uncalled"), "not masked": (4, "unmasked"),
}  # fmt: skip
#: The expressions that read time, which tests will own: their names are about to change.
UNSTABLE = ("time.", "utc_now", "_clock", "clock(", "monotonic")
FENCES = ("uid", "resourceVersion", "preconditions")
MASKS = ("masked", "without_secrets", "_masked", "redact", "redacted", "storable", "_storable")
#: Tests that compare generated pages and lists of names with the code.
PAGES = (
    "tests/test_guarantees.py",
    "tests/test_docs.py",
    "tests/test_messages.py",
    "tests/test_plots.py",
    "tests/test_wheels.py",
)


WHOLE = "the whole body"


class PlaceError(Exception):
    """The place of a mutation is missing, or there are several."""


@dataclass(frozen=True)
class Mutation:
    """One change.

    :param name: its id.
    :param kind: a key of QUOTA, "rule", or "by hand".
    :param function: qualified name without its module; for a rule, the name of the table.
    :param old: the code, as `ast.unparse` writes it; `except X:` for the body of a handler; WHOLE; for a rule, its
        name.
    :param new: what replaces it.
    """

    name: str
    kind: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Place:
    """Where a mutation changes a file, in bytes."""

    path: Path
    start: int
    end: int
    new: str
    statement: bool


# finding places


class Module:
    """A parsed file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code = path.read_bytes()
        self.tree = ast.parse(self.code)
        self._lines = [0]
        for line in self.code.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def at(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def functions(self) -> Iterator[tuple[str, ast.AST]]:
        """All functions with their qualified names, inner ones too."""

        def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    name = f"{prefix}{child.name}"
                    if not isinstance(child, ast.ClassDef):
                        yield name, child
                    yield from inside(child, f"{name}.")
                else:
                    yield from inside(child, prefix)

        return inside(self.tree, "")


class Tree:
    """The package in a copy of the repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = [Module(path) for path in sorted((root / PACKAGE).rglob("*.py")) if "in_pod" not in path.parts]
        self._functions: dict[str, list[tuple[Module, ast.AST]]] = defaultdict(list)
        for module in self.modules:
            for name, node in module.functions():
                self._functions[name].append((module, node))

    def rules(self) -> Iterator[tuple[str, Place]]:
        """The rules of the table, by name."""
        (module,) = (module for module in self.modules if module.path.match(f"{PACKAGE}/{RULES}"))
        for node in module.tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "RULES":
                assert isinstance(node.value, ast.Tuple)
                for rule in node.value.elts:
                    assert isinstance(rule, ast.Call)
                    name = rule.args[0]
                    assert isinstance(name, ast.Constant)
                    start, end = module.span(rule)
                    yield str(name.value), Place(module.path, start, module.code.index(b",", end) + 1, "", False)

    def place(self, mutation: Mutation) -> Place:
        """Where the mutation changes the code.

        :raises PlaceError: there is no such place, or several.
        """
        if mutation.kind == "rule":
            found = [place for name, place in self.rules() if name == mutation.old]
        else:
            found = list(self._places(mutation))
        if len(found) != 1:
            where = ", ".join(str(place.path.relative_to(self.root)) for place in found) or "no module"
            raise PlaceError(
                f"{mutation.name}: {mutation.function}: {mutation.old!r} found {len(found)} times: {where}"
            )
        return found[0]

    def _places(self, mutation: Mutation) -> Iterator[Place]:
        handler = mutation.old.startswith("except")
        if mutation.old == WHOLE:
            for module, function in self._functions[mutation.function]:
                body = function.body  # type: ignore[attr-defined]
                yield Place(module.path, module.span(body[0])[0], module.span(body[-1])[1], mutation.new, True)
            return
        old = mutation.old if handler else ast.unparse(ast.parse(mutation.old))
        for module, function in self._functions[mutation.function]:
            seen: set[tuple[int, int]] = set()
            for node in nodes_of(function):
                if handler and isinstance(node, ast.ExceptHandler) and head_of(node) == old:
                    start, end = module.span(node.body[0])[0], module.span(node.body[-1])[1]
                elif not handler and isinstance(node, ast.stmt | ast.expr) and ast.unparse(node) == old:
                    start, end = module.span(node)
                else:
                    continue
                if (start, end) not in seen:
                    seen.add((start, end))
                    statement = handler or isinstance(node, ast.stmt)
                    new = mutation.new if statement else f"({mutation.new})"
                    yield Place(module.path, start, end, new, statement)


def nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """What the function executes, without f-strings, whose parts have no exact place in Python 3.11."""
    todo: list[ast.AST] = list(reversed(function.body))  # type: ignore[attr-defined]
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.JoinedStr):
            yield node
            todo += reversed(list(ast.iter_child_nodes(node)))


def head_of(handler: ast.ExceptHandler) -> str:
    name = f" as {handler.name}" if handler.name else ""
    return f"except {ast.unparse(handler.type)}{name}:" if handler.type else "except:"


# drawing


@dataclass(frozen=True)
class Candidate:
    room: str
    kind: str
    function: str
    old: str
    new: str


def candidates(tree: Tree) -> Iterator[Candidate]:
    """All changes that could be drawn."""
    for module in tree.modules:
        inner = module.path.relative_to(tree.root / PACKAGE).as_posix()
        room = next((room for room in ROOMS if inner.startswith(room)), None)
        if room is None:
            continue
        for name, function in module.functions():
            for node in nodes_of(function):
                for kind, old, new in changes(node, function):
                    if not any(word in old for word in UNSTABLE):
                        yield Candidate(room, kind, name, old, new)


def changes(node: ast.AST, function: ast.AST) -> Iterator[tuple[str, str, str]]:
    """The changes of one node, by kind."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition negated", ast.unparse(node.test), negated(node.test)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield "condition negated", ast.unparse(test), negated(test)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for dropped in node.values:
            rest = [value for value in node.values if value is not dropped]
            yield "condition dropped", ast.unparse(node), " and ".join(f"({ast.unparse(value)})" for value in rest)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        swapped = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}.get(type(node.ops[0]))
        if swapped:
            new = ast.Compare(node.left, [swapped()], node.comparators)
            yield "off by one", ast.unparse(node), ast.unparse(new)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and is_one(node.right):
        yield "off by one", ast.unparse(node), ast.unparse(node.left)
    if isinstance(node, ast.Dict) and len(node.keys) > 0:
        for key in node.keys:
            if isinstance(key, ast.Constant) and key.value in FENCES:
                kept = [pair for pair in zip(node.keys, node.values, strict=True) if pair[0] is not key]
                new_dict = ast.Dict([k for k, _ in kept], [v for _, v in kept])
                yield "fence dropped", ast.unparse(node), ast.unparse(new_dict)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq) and is_identity(node):
        yield "identity not compared", ast.unparse(node), str(isinstance(node.ops[0], ast.Eq))
    if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[0], ast.Raise):
        yield "error not caught", head_of(node), "raise"
    if isinstance(node, ast.Assign | ast.AugAssign) and function.name not in ("__init__", "__post_init__"):  # type: ignore[attr-defined]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            yield "not advanced", ast.unparse(node), "pass"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        text = ast.unparse(node)
        if not text.startswith(("log", "self._log.", "self.log.", "super().")):
            yield "call dropped", text, "pass"
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in MASKS:
        yield "not masked", ast.unparse(node), ast.unparse(node.args[0])


def is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def is_identity(node: ast.AST) -> bool:
    return any(word in ast.unparse(node) for word in ("uid", "owner"))


def negated(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    return f"not ({ast.unparse(test)})"


def draw(tree: Tree, seed: int, excluded: Iterable[tuple[str, str]]) -> list[Candidate]:
    """The quota of each kind; rooms take turns, and a function has one change at most.

    :param excluded: (function, old code) of changes that no test could notice or judge.
    """
    chance, left_out = random.Random(seed), set(excluded)
    pool: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates(tree):
        pool[candidate.kind].append(candidate)
    drawn: list[Candidate] = []
    used, rooms = set[str](), Counter[str]()
    for kind, (quota, _) in QUOTA.items():
        chance.shuffle(pool[kind])
        taken = 0
        while taken < quota:
            usable = [c for c in pool[kind] if c.function not in used and (c.function, c.old) not in left_out]
            usable.sort(key=lambda c: rooms[c.room])  # the first of those whose room has the fewest
            choice = next(c for c in usable if is_unique(tree, c))
            drawn.append(choice)
            used.add(choice.function)
            rooms[choice.room] += 1
            taken += 1
    return drawn


def is_unique(tree: Tree, candidate: Candidate) -> bool:
    try:
        tree.place(Mutation("", candidate.kind, candidate.function, candidate.old, candidate.new))
    except PlaceError:
        return False
    return True


# the list


def mutations() -> list[Mutation]:
    """All mutations of the list: rules first."""
    listed = tomllib.loads(LIST.read_text())
    rules = [Mutation(f"rule: {name}", "rule", "RULES", name, "") for name in listed["rules"]]
    return rules + [
        Mutation(m["id"], m["kind"], m["function"], m["old"], m["new"]) for m in listed["mutation"]
    ]  # fmt: skip


def selected(only: Sequence[str] | None) -> list[Mutation]:
    """Those with these ids, or all.

    :raises SystemExit: there is no mutation with one of these ids.
    """
    found = mutations()
    if unknown := set(only or ()) - {m.name for m in found}:
        raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}")
    return [m for m in found if not only or m.name in only]


# changing files


def changed(code: bytes, place: Place) -> bytes:
    return code[: place.start] + place.new.encode() + code[place.end :]


def probed(code: bytes, places: Sequence[tuple[str, Place]], is_rules: bool) -> bytes:
    """The code with a call of `hit` where each mutation would change it."""
    texts: list[tuple[int, int, int, bytes]] = []  # offset; ends before starts, inner ends and outer starts first
    for name, place in places:
        size = place.end - place.start
        if not place.statement:
            texts.append((place.start, 1, -size, f"(_mutation_hit({name!r}) or (".encode()))
            texts.append((place.end, 0, size, b"))"))
            continue
        indent = code[code.rfind(b"\n", 0, place.start) + 1 : place.start]
        gap = b"; " if indent.strip() else b"\n" + indent
        texts.append((place.start, 1, -size - 1, f"_mutation_hit({name!r})".encode() + gap))
    for offset, _, _, text in sorted(texts, reverse=True):
        code = code[:offset] + text + code[offset:]
    head = b"from __future__ import annotations\n"
    imported = f"from {PACKAGE}._mutation_probe import hit as _mutation_hit\n".encode()
    if head not in code:
        raise SystemExit("a module without `from __future__ import annotations`")
    code = code.replace(head, head + imported, 1)
    return code + PROBE_OF_RULES if is_rules else code


PROBE_OF_RULES = b"""

def _decide_and_note(situation, rules=RULES, _decide=decide):
    rule = _decide(situation, rules)
    if rules is RULES:
        _mutation_hit("rule: " + rule.name)
    return rule


decide = _decide_and_note
"""

#: Written into the package of a copy; `TEST` is set by the plugin in the process of pytest.
PROBE = '''"""Notes which test reaches which place."""

import os
import time

TEST = ""
_seen = set()
_known = ["", 0.0]


def hit(name):
    test = TEST or _running()
    if (name, test) not in _seen:
        _seen.add((name, test))
        try:
            with open(f"{DATA}/hits-{os.getpid()}.txt", "a") as file:
                file.write(f"{name}\\t{test}\\n")
        except OSError:
            pass
    return False


def _running(clock=time.monotonic):
    """The test during which another process calls this."""
    if clock() > _known[1]:
        try:
            with open(f"{DATA}/current-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}") as file:
                _known[:] = file.read(), clock() + 0.05
        except OSError:
            return "?"
    return _known[0]
'''


# copies


def copy_of(commit: str, path: Path) -> Path:
    """A worktree of the commit."""
    git("worktree", "remove", "--force", str(path), check=False)
    shutil.rmtree(path, ignore_errors=True)
    git("worktree", "prune")
    git("worktree", "add", "--detach", str(path), commit)
    return path


def remove(path: Path) -> None:
    git("worktree", "remove", "--force", str(path), check=False)


def git(*args: str, check: bool = True) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"git {' '.join(args)}: {done.stderr}")
    return done.stdout.strip()


def environment(tree: Path, data: Path) -> dict[str, str]:
    paths = f"{tree}{os.pathsep}{tree / 'embedded_cluster' / 'src'}"
    return {**os.environ, "PYTHONPATH": paths, "KTRAIN_MUTATIONS": str(data)}


# probe


def probe(commit: str, data: Path, add: bool, pytest_args: Sequence[str]) -> int:
    """Run the tests on a copy whose places note who reaches them.

    :param add: keep what earlier runs have noted.
    """
    out = data / "map"
    if not add:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    copy = copy_of(commit, data / "tree-probe")
    tree = Tree(copy)
    by_path: dict[Path, list[tuple[str, Place]]] = defaultdict(list)
    for mutation in mutations():
        if mutation.kind != "rule":
            place = tree.place(mutation)
            by_path[place.path].append((mutation.name, place))
    rules = next(path for module in tree.modules if (path := module.path).match(f"{PACKAGE}/{RULES}"))
    for path in {*by_path, rules}:
        code = probed(path.read_bytes(), by_path[path], path == rules)
        compile(code, str(path), "exec")
        path.write_bytes(code)
    (copy / PACKAGE / "_mutation_probe.py").write_text(f"DATA = {str(out)!r}\n{PROBE}")
    shutil.copy(PLUGIN, copy / "scripts" / PLUGIN.name)
    (out / "commit").write_text(git("rev-parse", commit))
    command = [sys.executable, "-m", "pytest", "-p", "scripts.mutations_plugin", "-q", *pytest_args]
    print(" ".join(command), flush=True)
    status = subprocess.run(command, cwd=copy, env=environment(copy, out), check=False).returncode
    remove(copy)
    return status


@dataclass
class Measured:
    """A test of the run with probes."""

    seconds: float = 0.0
    cpu: float = 0.0
    failed: bool = False


def measured(data: Path) -> dict[str, Measured]:
    """All tests of the run with probes."""
    found: dict[str, Measured] = defaultdict(Measured)
    for path in sorted((data / "map").glob("tests-*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            test = found[row["test"]]
            test.seconds, test.cpu, test.failed = row["seconds"], row["cpu"], row["failed"]
    return dict(found)


def covering(data: Path) -> dict[str, set[str]]:
    """The tests that reach the place of each mutation."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (data / "map").glob("hits-*.txt"):
        for line in path.read_text().splitlines():
            name, _, test = line.partition("\t")
            if test and not test.startswith(("?", *PAGES)):
                found[name].add(test)
    return dict(found)


# run


@dataclass
class Outcome:
    """What the tests said about one mutation."""

    mutation: str
    caught_by: str = ""
    ran: int = 0
    covering: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass
class Slot:
    """A copy of the tree in which one process changes files."""

    tree: Path
    out: Path
    package: Tree
    stamp: int = 0

    def write(self, path: Path, code: bytes) -> None:
        """Write a file with a time of its own, so that no bytecode of another version is used."""
        path.write_bytes(code)
        self.stamp += 10
        os.utime(path, (self.stamp, self.stamp))


#: Modules that are imported once, before processes are forked: they take most of the time in which pytest starts.
PRELOADED = (
    "pytest", "hypothesis", "hypothesis.strategies", "pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin",
    "unittest.mock", "aiohttp", "aiohttp.web", "yaml", "kubernetes.client", "kubernetes.config",
    "kubernetes_asyncio.client", "kubernetes_asyncio.config", "airflow", "airflow.configuration", "airflow.sdk",
    "airflow.models", "airflow.sdk.execution_time.task_runner", "airflow.triggers.base",
    "airflow.providers.cncf.kubernetes.hooks.kubernetes", "fastapi", "starlette.testclient", "jsonschema",
    "cryptography.x509", "sqlalchemy.orm",
)  # fmt: skip
BATCHES = (15.0, 60.0, 150.0, 600.0)  #: Seconds of tests in each start of pytest.
UNKNOWN_SECONDS = 5.0  #: Assumed time of a test that was not measured.
SAME_FUNCTION = 3  #: How many cases of one test function run first. Its others wait until all functions have run.
_slot: Slot


def run(
    commit: str, data: Path, only: Sequence[str] | None, jobs: int, budget: float, core: bool, hints: Sequence[Path]
) -> None:
    """Run the tests of each mutation, and store the outcomes.

    :param hints: folders of earlier measurements: the tests that caught a mutation there run first.
    """
    commit = git("rev-parse", commit)
    chosen = selected(only)
    results = data / "outcomes"
    results.mkdir(parents=True, exist_ok=True)
    tests, reached = measured(data), covering(data)
    known = {
        m.name: [o["caught_by"] for h in hints if (o := outcomes(h).get(m.name)) and o["caught_by"]] for m in chosen
    }
    for name in PRELOADED:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    slots: Any = context.Queue()
    trees = [copy_of(commit, data / f"tree-{number}") for number in range(jobs)]
    for tree in trees:
        shutil.copy(PLUGIN, tree / "scripts" / PLUGIN.name)
        slots.put(tree)
    try:
        with concurrent.futures.ProcessPoolExecutor(jobs, context, _take_slot, (slots, data)) as pool:
            waiting = {
                pool.submit(examine, m, known[m.name], order(reached.get(m.name, set()), tests, core), tests, budget): m
                for m in chosen
            }
            for done in concurrent.futures.as_completed(waiting):
                mutation, outcome = waiting[done], done.result()
                if core and not outcome.caught_by:
                    print(f"not in core  {mutation.name}", flush=True)
                    continue
                text = json.dumps({**asdict(outcome), "commit": commit})
                (results / f"{mutation.name.replace('/', '_')}.json").write_text(text)
                print(f"{'caught  ' if outcome.caught_by else 'SURVIVED'} {words_of(outcome)}", flush=True)
    finally:
        for tree in trees:
            remove(tree)


def _take_slot(slots: Any, data: Path) -> None:
    global _slot
    tree = slots.get()
    _slot = Slot(tree, data / f"run-{tree.name}", Tree(tree), int(time.time()))
    _slot.out.mkdir(exist_ok=True)


def order(names: Iterable[str], tests: Mapping[str, Measured], core: bool) -> list[str]:
    """Few cases of each function first, the cheapest first; tests that failed without a mutation come last."""
    usable = [n for n in names if n in tests and (not core or n.startswith("tests/core/"))]
    usable.sort(key=lambda n: (tests[n].seconds, n))
    seen, ranked = Counter[str](), list[tuple[int, str]]()
    for name in usable:
        function = name.partition("[")[0]
        seen[function] += 1
        ranked.append((2 if tests[name].failed else seen[function] > SAME_FUNCTION, name))
    return [name for _, name in sorted(ranked, key=lambda pair: pair[0])]


def outcomes(data: Path) -> dict[str, dict[str, Any]]:
    """What an earlier run has found, by mutation."""
    return {o["mutation"]: o for o in (json.loads(p.read_text()) for p in (data / "outcomes").glob("*.json"))}


def examine(
    mutation: Mutation, first: Sequence[str], names: Sequence[str], tests: Mapping[str, Measured], budget: float
) -> Outcome:
    """Run the tests of one mutation until one fails that passes without it.

    :param first: the tests to begin with.
    """
    outcome = Outcome(mutation.name, covering=len(names))
    names = [*dict.fromkeys([*first, *names])]
    place = _slot.package.place(mutation)
    original = place.path.read_bytes()
    broken = changed(original, place)
    compile(broken, str(place.path), "exec")
    began, notes = time.monotonic(), list[str]()
    todo = list(names)
    try:
        _slot.write(place.path, broken)
        for limit in BATCHES:
            batch: list[str] = []
            while todo and (not batch or seconds_of(batch, tests) < limit):
                if seconds_of((*names[: outcome.ran], *batch, todo[0]), tests) > budget:
                    break
                batch.append(todo.pop(0))
            while batch:
                failed, finished = pytest_run(batch, tests)
                outcome.ran += len(finished)
                if failed is None:
                    break
                if confirmed(failed, place.path, original, broken, tests):
                    outcome.caught_by = failed
                    return outcome
                notes.append(failed)
                batch = [n for n in batch if n not in finished]
    finally:
        _slot.write(place.path, original)
        outcome.seconds = round(time.monotonic() - began, 1)
        outcome.note = f"failed, but not only with the mutation: {', '.join(notes)}" if notes else ""
    return outcome


def confirmed(test: str, path: Path, original: bytes, broken: bytes, tests: Mapping[str, Measured]) -> bool:
    """Whether the test alone fails with the mutation, too, and passes without it."""
    if not test.startswith("tests/core/") and pytest_run([test], tests)[0] is None:
        return False
    if test in tests and not tests[test].failed:
        return True
    _slot.write(path, original)
    try:
        passes = _slot.out.parent / "passes"
        passes.mkdir(exist_ok=True)
        known = passes / f"{abs(hash_of(test)):x}"
        if not known.exists():
            failed, finished = pytest_run([test], tests)
            known.write_text(f"{failed is None and bool(finished)}\t{test}")
        return known.read_text().startswith("True")
    finally:
        _slot.write(path, broken)


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[-200:], "big") % (1 << 61)


def pytest_run(names: Sequence[str], tests: Mapping[str, Measured]) -> tuple[str | None, set[str]]:
    """The first test that failed, and all that have run, in a process of their own.

    Where none of several tests can be collected or the process dies, the test that was running has failed.
    """
    out = _slot.out
    for path in out.glob("*"):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    files = [file for file in dict.fromkeys(n.partition("::")[0] for n in names) if (_slot.tree / file).exists()]
    if not files:
        return None, set()
    (out / "wanted.json").write_text(json.dumps(names))
    longest, expected = max(seconds_of([name], tests) for name in names), seconds_of(names, tests)
    limit = max(60.0, 5 * longest)
    args = [
        "-p", "scripts.mutations_plugin", "-p", "no:randomly", "-p", "no:cacheprovider", "-n", "0", "-x", "-q",
        f"--timeout={limit:.0f}", "--continue-on-collection-errors", *files,
    ]  # fmt: skip
    process = os.fork()
    if not process:
        _become_pytest(args)
    deadline = time.monotonic() + 3 * expected + 2 * limit + 60
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what a broken test has left
    rows = [json.loads(line) for line in lines_of(out / "tests-main.jsonl")]
    finished = {row["test"] for row in rows}
    failed = next((row["test"] for row in rows if row["failed"]), None)
    missing = [name for name in names if name not in finished]
    if failed is None and missing:
        if not (out / "done").exists():
            current = "".join(lines_of(out / "current-main")[:1])
            failed = current if current in missing else missing[0]  # it hung, or nothing could be imported
            finished.add(failed)
        elif lines_of(out / "uncollected"):
            failed = missing[0]
            finished.add(failed)
    return failed, finished


def seconds_of(names: Iterable[str], tests: Mapping[str, Measured]) -> float:
    return sum(tests[name].seconds if name in tests else UNKNOWN_SECONDS for name in names)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _become_pytest(args: Sequence[str]) -> None:
    """Run pytest in this process, which was forked for it."""
    code = 70
    try:
        os.setsid()
        os.chdir(_slot.tree)
        log = os.open(_slot.out / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(environment(_slot.tree, _slot.out))
        sys.path[:] = [
            str(_slot.tree), str(_slot.tree / "embedded_cluster" / "src"),
            *(path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT) or ".venv" in path),
        ]  # fmt: skip
        for name in list(sys.modules):  # Airflow imports the package for its configuration
            if name.partition(".")[0] in ("scripts", "tests", PACKAGE):
                del sys.modules[name]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        import pytest

        code = int(pytest.main(list(args)))
        (_slot.out / "done").write_text(str(code))
    finally:
        sys.stdout.flush()
        os._exit(code)


# reports


def words_of(outcome: Outcome) -> str:
    said = outcome.caught_by or f"{outcome.ran} of {outcome.covering} covering tests"
    return f"{outcome.mutation}: {said}{f' ({outcome.note})' if outcome.note else ''}"


def report(data: Path, to: Path, note: str) -> None:
    """Write the table of outcomes, and that of tests, seconds and CPU for each folder.

    :param note: how it was measured.
    """
    tree = Tree(ROOT)
    found = outcomes(data)
    rows, rules = list[str](), list[str]()
    for m in mutations():
        o = found.get(m.name)
        if o is None:
            said = "not measured"
        elif o["caught_by"]:
            said = f"`{o['caught_by']}`"
        else:
            said = f"**survived** {o['ran']} of {o['covering']} covering tests"
        said = said.replace("|", "\\|")
        if m.kind == "rule":
            rules.append(f"| {m.old} | {said} |")
        else:
            where = tree.place(m).path.relative_to(ROOT / PACKAGE).as_posix()
            change = f"`{cell(m.old)}` → `{cell(m.new)}`"
            rows.append(f"| {m.name} | {where}: `{m.function}` | {m.kind} | {change} | {said} |")
    caught = {True: 0, False: 0}
    totals = {True: 0, False: 0}
    for m in mutations():
        totals[m.kind == "rule"] += 1
        caught[m.kind == "rule"] += bool(found.get(m.name, {}).get("caught_by"))
    commits = ", ".join(sorted({o["commit"][:8] for o in found.values()}))
    text = [
        f"# What the tests of {commits} notice",
        "",
        "Written by `python scripts/mutations.py report`. A mutation is caught by a test that fails with it, "
        "outside tests/core twice, and passes without it. The cheapest tests run first, until a budget of seconds.",
        *(["", note] if note else []),
        "",
        f"- Rules removed: {caught[True]} of {totals[True]} caught.",
        f"- Other changes: {caught[False]} of {totals[False]} caught.",
        "",
        "## Small changes",
        "",
        "| id | function | kind | change | caught by |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "## Rules of core/end_rules.py removed",
        "",
        "| rule | caught by |",
        "|---|---|",
        *rules,
        "",
    ]
    if measured(data):
        text += ["## Tests, seconds and CPU by folder", "", *folders(data), ""]
    to.write_text("\n".join(text))
    print("\n".join(line for line in text if line.startswith("- ")))


def cell(code: str) -> str:
    return " ".join(code.split()).replace("|", "\\|")


def folders(data: Path) -> Iterator[str]:
    """What the run with probes measured, by folder."""
    yield "| folder | tests | failed | seconds | CPU seconds |"
    yield "|---|---|---|---|---|"
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for name, test in measured(data).items():
        parts = name.partition("::")[0].split("/")
        folder = "/".join(parts[:2] if len(parts) > 2 and parts[0] == "tests" else parts[:-1])
        for key in (folder, "**all**"):
            for i, value in enumerate((1, test.failed, test.seconds, test.cpu)):
                sums[key][i] += value
    for folder in sorted(sums, key=lambda f: (f == "**all**", f)):
        yield f"| {folder} | {' | '.join(f'{value:.0f}' for value in sums[folder])} |"
    whole = [json.loads(line) for path in (data / "map").glob("session-*.json") for line in lines_of(path)]
    yield f"| processes of pytest, with imports and children | | | | {sum(row['cpu'] for row in whole):.0f} |"


# command line


def toml_of(drawn: Sequence[Candidate]) -> str:
    numbers = Counter[str]()
    blocks = []
    for c in drawn:
        numbers[c.kind] += 1
        name = f"{QUOTA[c.kind][1]}-{numbers[c.kind]}"
        fields = {"id": name, "kind": c.kind, "function": c.function, "old": c.old, "new": c.new}
        lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
        blocks.append("\n".join(("[[mutation]]", *lines)))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / ".mutations", help="folder of copies and measurements")
    parser.add_argument("--commit", default="HEAD", help="whose code and tests are examined")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    commands.add_parser("check")
    probes = commands.add_parser("probe", help="further arguments are passed to pytest")
    probes.add_argument("--add", action="store_true", help="to the notes of earlier runs, of other tests")
    runs = commands.add_parser("run")
    runs.add_argument("--only", nargs="+")
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--budget", type=float, default=300.0, help="seconds of tests for each mutation")
    runs.add_argument("--core", action="store_true", help="only tests of tests/core")
    runs.add_argument("--hints", type=Path, action="append", default=[], help="--data of an earlier run")
    reports = commands.add_parser("report")
    reports.add_argument("to", type=Path)
    reports.add_argument("--note", default="", help="how it was measured")
    args, others = parser.parse_known_args()
    if others and args.command != "probe":
        parser.error(f"unknown arguments: {' '.join(others)}")
    args.data = args.data.resolve()
    if args.command == "draw":
        listed = tomllib.loads(LIST.read_text())
        left_out: list[dict[str, str]] = listed.get("excluded", [])
        excluded = [(e["function"], e["old"]) for e in left_out]
        copy = copy_of(listed["commit"], args.data / "tree-draw")
        print(toml_of(draw(Tree(copy), listed["seed"], excluded)))
        remove(copy)
    elif args.command == "check":
        tree = Tree(ROOT)
        found = list(map(tree.place, mutations()))
        missing = {name for name, _ in tree.rules()} - {m.old for m in mutations() if m.kind == "rule"}
        print(f"{len(found)} places found. Rules that are not listed: {sorted(missing)}")
    elif args.command == "probe":
        sys.exit(probe(args.commit, args.data, args.add, others))
    elif args.command == "run":
        run(args.commit, args.data, args.only, args.jobs, args.budget, args.core, args.hints)
    else:
        report(args.data, args.to, args.note)


if __name__ == "__main__":
    main()
