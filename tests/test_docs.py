"""Tests of README and docs/: their code runs, their links resolve, and the names that they use exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import re
import textwrap
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import BaseOperator

from airflow_provider_ktrain.cli import main
from airflow_provider_ktrain.core.checks import check
from airflow_provider_ktrain.core.kinds import KINDS
from airflow_provider_ktrain.core.manifest.overlay import JobOptions
from airflow_provider_ktrain.operators.job_control import (
    DeleteTrainingJobOperator,
    ResumeTrainingJobOperator,
    ScaleTrainingJobOperator,
    SuspendTrainingJobOperator,
)
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator
from airflow_provider_ktrain.sensors.training import MPIJobSensor, PyTorchJobSensor, TrainJobSensor
from airflow_provider_ktrain.volumes import ClaimVolume, HostPath, SharedMemory
from scripts import installation
from scripts.signatures import FILES, updated
from scripts.tables import PAGES as TABLES
from tests.leaks import restored_signals

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "embedded_cluster/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        PyTorchJobOperator, MPIJobOperator, TrainJobOperator, PyTorchJobSensor, MPIJobSensor, TrainJobSensor,
        ScaleTrainingJobOperator, SuspendTrainingJobOperator, ResumeTrainingJobOperator, DeleteTrainingJobOperator,
        ReapTrainingJobsOperator, ClaimVolume, HostPath, SharedMemory,
    )
}  # fmt: skip
#: Names that an excerpt of a DAG may use without an import.
PRELUDE = "\n".join(
    [
        "from datetime import timedelta",
        "import pendulum",
        "from airflow.sdk import DAG, task",
        *(f"from {cls.__module__} import {name}" for name, cls in CLASSES.items()),
        "",
    ]
)
COMMENT = re.compile(r"<!--.*?-->")
NO_DAG = "# in the training program"  #: First line of code that runs in a job instead of a DAG.


class Block(NamedTuple):
    """A fenced block of code and its location."""

    place: str
    language: str
    text: str


def blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            place = f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            if match[1] == language:
                found.append(pytest.param(Block(place, match[1], match[2]), id=place))
    assert found
    return found


@pytest.mark.parametrize("cls", [cls for cls in CLASSES.values() if issubclass(cls, BaseOperator)])
def test_operators_have_an_example_and_a_guide(cls: type, tmp_path: pathlib.Path) -> None:
    text = inspect.getdoc(cls) or ""
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert example.startswith(f"{cls.__name__}(")
    test_python_runs(Block(cls.__name__, "python", example), tmp_path)
    (guide,) = re.findall(r"Guide: (docs/[\w/-]+\.md)\.", text)
    assert cls.__name__ in (ROOT / guide).read_text()


def prose(page: pathlib.Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: Block, tmp_path: pathlib.Path) -> None:
    """Load DAG files and excerpts as Airflow does. Code that a job or a test runs is only compiled."""
    compile(block.text, block.place, "exec")
    if block.text.startswith(NO_DAG) or "EmbeddedCluster" in block.text or "ktrain_cluster" in block.text:
        return
    text = block.text
    if "from airflow.sdk import" not in text:
        text = PRELUDE + (text if "with DAG(" in text else f'with DAG("docs"):\n{textwrap.indent(text, "    ")}')
    (tmp_path / "documented.py").write_text(text)
    with restored_signals():
        bag = DagBag(tmp_path, load_op_links=False)
    assert not bag.import_errors
    assert [dag for dag in bag.dags.values() if dag.tasks]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_manifests_have_no_problems(block: Block) -> None:
    for manifest in yaml.safe_load_all(block.text):
        if manifest["apiVersion"] == "v1":  # what a job uses, such as a PersistentVolumeClaim
            continue
        assert manifest["kind"] in KINDS
        assert [str(problem) for problem in check(manifest)] == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / "example_dags" / "manifests").glob("trainjob_*.yaml")), ids=lambda file: file.name
)
def test_migrated_manifests_have_no_problems(file: pathlib.Path) -> None:
    assert file.name in (DOCS / "how-to" / "migrate-to-trainjob.md").read_text()
    assert [str(problem) for problem in check(yaml.safe_load(file.read_text()))] == []


def commands() -> Iterator[tuple[str, str]]:
    """Each use of `ktrain` in a console block as one line: its location and its words."""
    for block in (param.values[0] for param in blocks("console")):
        for command in re.findall(r"^\$ (.*)$", block.text.replace("\\\n", " "), re.MULTILINE):
            if match := re.search(r"(?:^|/| )ktrain[ -](\w+.*?)(?: \||$)", command):
                yield block.place, match[1]


@pytest.mark.parametrize(("place", "command"), commands())
def test_commands_have_their_options(place: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.partition(" -- ")[0].split()  # what follows are words of another program
    name = words[:2] if words[0] == "cluster" else words[:1]
    with pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert ended.value.code == 0, place
    help_text = capsys.readouterr().out
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text), f"{place}: {name} has no {option}"


def test_commands_are_found() -> None:
    assert {words.split()[0] for _, words in commands()} == {"run", "check", "rbac", "cluster"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} doesn't exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_tests_exist(page: pathlib.Path) -> None:
    text = COMMENT.sub("", page.read_text())
    project = page.parent if page.parent.name == "embedded_cluster" else ROOT
    named = re.findall(r"(?<![\w./-])((?:example_dags|examples|tests|scripts|benchmarks|docs)/[\w./-]*\w)", text)
    for path in named:
        assert (project / path).exists(), f"{path} doesn't exist"
    for path in re.findall(r"(?<![\w./-])((?:core|engine|hooks|operators)/\w+\.py)", text):
        assert (ROOT / "airflow_provider_ktrain" / path).exists(), f"{path} doesn't exist"
    tests = {
        name
        for folder in ("tests", "embedded_cluster/tests")
        for file in (ROOT / folder).rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for name in re.findall(r"(?:`|\.py::)(test_\w+)`", text):
        assert name in tests, f"{name} isn't a test"
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", text):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{name} isn't in {path}"


def own_parameters(cls: type) -> set[str]:
    """The parameters of the constructor that a class defines itself."""
    return set(inspect.signature(vars(cls)["__init__"]).parameters) if "__init__" in vars(cls) else set()


def parameters(cls: type) -> set[str]:
    """The parameters of a class's constructor, including Airflow's."""
    return set().union(*map(own_parameters, cls.__mro__))


def tables() -> list[Any]:
    """Tables with a class as first column heading: the page, the class, and the names in the column."""
    found = []
    for page in PAGES:
        for match in re.finditer(r"^\| `(\w+)` \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
            cells = [row.split("|")[1] for row in match[2].splitlines()]
            names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
            found.append(pytest.param(match[1], names, id=f"{page.stem}-{match[1]}"))
    return found


@pytest.mark.parametrize(("cls", "names"), tables())
def test_named_parameters_exist(cls: str, names: list[str]) -> None:
    assert names
    assert set(names) <= parameters(CLASSES[cls])


@pytest.mark.parametrize("cls", [*CLASSES.values(), JobOptions], ids=lambda cls: cls.__name__)
def test_signature_is_what_the_docstring_documents(cls: type) -> None:
    """In the docstring of the class or of a base, from which the reference is generated."""
    signature = inspect.signature(cls).parameters
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("airflow_provider_ktrain.")]
    texts = "\n".join(base.__doc__ or "" for base in ours)
    documented = dict(re.findall(r":param (\w+):(.*?)(?=\n\s*:|\n\n|\Z)", texts, re.DOTALL))
    assert set(signature) == set(documented)
    for name, parameter in signature.items():
        if parameter.kind is not parameter.VAR_KEYWORD and cls is not JobOptions:  # which describes its defaults once
            assert parameter.annotation is not parameter.empty, name
            has_default = parameter.default is not parameter.empty
            assert has_default == ("default" in documented[name].lower()), f"{name}: {documented[name]}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_parameters_of_base_classes_are_up_to_date(file: pathlib.Path) -> None:
    assert file.read_text() == updated(file), "run `python scripts/signatures.py`"


def test_files_that_the_tutorial_creates_are_ignored_by_git() -> None:
    tutorial, ignored = (DOCS / "tutorial.md").read_text(), (ROOT / ".gitignore").read_text().splitlines()
    created = re.findall(r"(?:AIRFLOW_HOME=\$PWD|--kubeconfig \.)(/\w+)", tutorial)
    assert sorted(created) == ["/airflow", "/kubeconfig"]
    assert {"/airflow/", "/kubeconfig", ".venv*"} <= set(ignored)


@pytest.mark.parametrize("page", installation.COMMANDS)
def test_release_changes_how_the_provider_is_installed(page: str) -> None:
    made = installation.COMMANDS[page]
    before, after = made(published=False), made(published=True)
    assert "no release on PyPI" in before
    assert "no release on PyPI" not in after
    assert not any(name in before for name in (installation.PROVIDER, installation.CLUSTER))
    assert any(name in after for name in (installation.PROVIDER, installation.CLUSTER))


def test_commands_that_install_the_provider_are_generated() -> None:
    texts = {page: installation.PAGES.text_around(page) for page in PAGES}
    named = re.compile(r"pip install [^`\n]*(?:airflow-provider-ktrain|ktrain-cluster)")
    assert not [str(page) for page, text in texts.items() if named.search(text)]


def test_named_extras_exist() -> None:
    project = ROOT / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    texts = [file.read_text() for file in (project, *PAGES, *ROOT.glob("airflow_provider_ktrain/**/*.py"))]
    named = {extra for text in texts for extra in re.findall(r"(?:airflow-provider-ktrain|'\.)\[(\w+)", text)}
    assert {"local", "demo"} <= named <= set(extras)


def script(path: pathlib.Path) -> Any:
    """Load a Python file that isn't in a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _hook() -> Any:
    """The hook of MkDocs. It is plain Python and doesn't need MkDocs."""
    return script(DOCS / "generate.py")


@pytest.mark.parametrize(
    ("source", "level", "message"),
    [("Master 0", "info   ", "[Master 0] [1] lesson one"), ("job", "warning", "Manifest: doubtful")],
)
def test_the_demo_shows_log_lines_of_the_job_and_its_replicas(source: str, level: str, message: str) -> None:
    shown = script(ROOT / "scripts" / "demo.py").shown
    line = f"2026-11-21T18:47:58.141537Z [{level}  ] {message} [{source}] loc=x.py:1\n"
    assert shown(line) == f"  18:47:58.141 {'' if 'info' in level else 'warning: '}{message}"
    assert (
        shown("2026-11-21T18:48:02.815848Z [info     ] [DAG TEST] end task     [airflow.sdk.dag] loc=dag.py:1\n")
        is None
    )


def test_the_demo_shows_messages_of_several_lines_and_no_manifest() -> None:
    time = "2026-11-21T18:47:58.141537Z [info     ]"
    lines = [
        f"{time} ::group::Manifest [job] loc=x.py:1\n",
        f"{time} kind: PyTorchJob\n",
        "spec: {} [job] loc=x.py:2\n",
        f"{time} ::endgroup:: [job] loc=x.py:3\n",
        f"{time} PyTorchJob default/train succeeded after 19 s.\n",
        "3 GPUs released. [job] loc=x.py:4\n",
        f"{time} Task instance state updated [airflow.api] loc=y.py:1\n",
        f"{time} PyTorchJob default/train deleted. [job] loc=x.py:5\n",
    ]
    assert list(script(ROOT / "scripts" / "demo.py").shown_records(lines)) == [
        "  18:47:58.141 PyTorchJob default/train succeeded after 19 s.\n               3 GPUs released.",
        "  18:47:58.141 PyTorchJob default/train deleted.",
    ]


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_import_paths_are_documented(cls: type) -> None:
    """The reference has a table row with the class and the module from which users import it."""
    rows = [row for page in (DOCS / "reference").glob("*.md") for row in page.read_text().splitlines()]
    matches = [
        re.search(r"`(airflow_provider_ktrain\.[\w.]+)`", row)
        for row in rows
        if f"| `{cls.__name__}`" in row or f", `{cls.__name__}`" in row
    ]
    modules = {match[1] for match in matches if match}
    assert modules
    assert all(getattr(importlib.import_module(module), cls.__name__) is cls for module in modules)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f"- {page.relative_to(DOCS)}\n" in text


def words(page: pathlib.Path) -> int:
    return len(page.read_text().split())


#: Pages, and the folder of references, with another limit than MAX_WORDS.
LIMITS = {
    "README.md": 950,
    "CONTRIBUTING.md": 900,
    "CHANGELOG.md": 1800,
    "docs/guarantees.md": 1200,
    "docs/reference": 1800,
}
MAX_WORDS, MAX_ALL_WORDS = 1500, 33000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: pathlib.Path) -> None:
    """Readers finish short pages. Tables that scripts write count, too."""
    path = page.relative_to(ROOT)
    assert words(page) <= LIMITS.get(str(path), LIMITS.get(str(path.parent), MAX_WORDS))


def test_docs_are_short() -> None:
    """What says the same twice, on two pages, goes from one of them."""
    assert sum(map(words, (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")))) <= MAX_ALL_WORDS


def test_links_of_readme_work_on_pypi() -> None:
    """If pyproject.toml names the repository, links lead to the files of the version."""
    build, readme = script(ROOT / "hatch_build.py"), (ROOT / "README.md").read_text()
    shown = build.absolute(readme, "https://example.com/team/name", "1.2.3")
    assert "](https://example.com/team/name/blob/v1.2.3/docs/how-to/logs.md#deferred-tasks)" in shown
    assert "](https://example.com/team/name/raw/v1.2.3/docs/images/training-running.png)" in shown
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)\s]+)\)", shown))
    assert build.absolute(readme, "", "1.2.3") == readme
    shown = build.absolute("[Fidelity](fidelity.md)", "https://example.com/team/name/", "1.2.3", "embedded_cluster/")
    assert shown == "[Fidelity](https://example.com/team/name/blob/v1.2.3/embedded_cluster/fidelity.md)"


def test_links_of_the_project_are_made_from_one_address() -> None:
    build = script(ROOT / "hatch_build.py")
    assert build.urls("", "") == {}
    assert build.urls("https://example.com/team/name", "https://docs.example.com") == {
        "Source": "https://example.com/team/name",
        "Issues": "https://example.com/team/name/issues",
        "Changelog": "https://example.com/team/name/blob/main/CHANGELOG.md",
        "Documentation": "https://docs.example.com",
    }


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.name)
def test_workflows_pin_their_actions_and_have_few_rights(workflow: pathlib.Path) -> None:
    text = workflow.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action) for action in used), used
    document = yaml.safe_load(text)
    assert document["permissions"] == {"contents": "read"}
    rights = [job["permissions"] for job in document["jobs"].values() if "permissions" in job]
    assert rights in ([], [{"id-token": "write"}])


def test_generated_parts_match_the_code() -> None:
    """The hook replaces each comment."""
    hook = _hook()
    markers = {name for page in PAGES for name in re.findall(r"<!-- generated: ([\w-]+) -->", page.read_text())}
    assert markers == set(hook.GENERATED)
    for name, part in (
        ("commands", "usage: ktrain-cluster start"),
        ("end_rules", "| **follow** | {job} is still followed. |"),
        ("parameters", "\n- logs: `logs`, `hang_traces`\n- end: `on_finish_action`, "),
        ("messages", "| `Deferred: the triggerer now follows {job}.` | info |"),
    ):
        assert part in hook.on_page_markdown(f"<!-- generated: {name} -->")


@pytest.mark.parametrize(
    ("page", "part"),
    zip(
        TABLES.pages,
        ("| `deployment_id` |", "`TrainingHangError`", "| `container-name` |", "pods/log"),
        strict=True,
    ),
    ids=lambda value: getattr(value, "stem", None),
)
def test_generated_table_is_up_to_date(page: pathlib.Path, part: str) -> None:
    text = page.read_text()
    assert text == TABLES.updated(page), "run `python scripts/tables.py`"
    assert part in text


def test_plots_of_the_benchmarks_are_shown_from_the_site() -> None:
    """MkDocs finds only files in docs/, and those that the hook adds."""
    assert _hook().on_page_markdown("![Growth](../benchmarks/plots/waiting.svg)") == "![Growth](plots/waiting.svg)"
