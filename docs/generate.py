"""A hook of MkDocs that replaces comments `<!-- generated: NAME -->` with tables and help texts made from the code.

It also adds the plots of the benchmarks and the fidelity of the embedded cluster, which are outside of docs/.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

COMMANDS = ("run", "check", "rbac", "cluster start", "cluster status", "cluster stop", "cluster fault")


ROOT = pathlib.Path(__file__).resolve().parent.parent
FIDELITY = "../embedded_cluster/fidelity.md"  #: as pages in docs/ refer to it, so that their links work on GitHub too
PLOTS = "../benchmarks/plots/"  #: as pages refer to it, so that their links work on GitHub too


def on_config(config: Any, **kwargs: Any) -> Any:
    config.repo_url = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ktrain"]["repository"] or None
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for plot in (pathlib.Path(config.docs_dir) / PLOTS).glob("*.svg"):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot.resolve())))
    fidelity = pathlib.Path(config.docs_dir) / FIDELITY
    files.append(File.generated(config, fidelity.name, abs_src_path=str(fidelity.resolve())))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    markdown = markdown.replace(f"]({PLOTS}", "](plots/").replace(FIDELITY, "fidelity.md")
    return re.sub(r"<!-- generated: ([\w-]+) -->", lambda found: GENERATED[found[1]](), markdown)


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def commands() -> str:
    """The help of every command, as `ktrain` prints it."""
    from airflow_provider_ktrain.cli import main

    def help_of(command: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        return f"## ktrain {command}\n\n```text\n{out.getvalue().strip()}\n```"

    return "\n\n".join(help_of(command) for command in COMMANDS)


def options() -> str:
    """The section of airflow.cfg, from the provider's metadata."""
    from airflow_provider_ktrain.get_provider_info import get_provider_info

    section: dict[str, Any] = get_provider_info()["config"]["ktrain"]["options"]
    rows = (
        (
            f"`{name}`",
            f"`AIRFLOW__KTRAIN__{name.upper()}`",
            o["type"],
            f"`{o['default']}`" if o["default"] else "",
            o["description"],
        )
        for name, o in section.items()
    )
    return table(("option", "environment variable", "type", "default", "meaning"), rows)


def categories() -> str:
    """Which exception each category of cause raises."""
    from airflow_provider_ktrain.exceptions import BY_CATEGORY, TrainingJobError

    rows = [(category, f"`{raised.__name__}`", first_line(raised)) for category, raised in BY_CATEGORY.items()]
    rows.append(("unknown", f"`{TrainingJobError.__name__}`", "No evidence says why."))
    return table(("category", "exception", "meaning"), rows)


def rules() -> str:
    """The rules of `ktrain check`: the docstrings of their functions."""
    from airflow_provider_ktrain.core.checks import rules as registered

    ordered = sorted(registered(), key=lambda rule: (rule.level, rule.code))
    rows = (
        (f"`{r.code}`", str(r.level), r.kind.name if r.kind else "all", " ".join((r.check.__doc__ or "").split()))
        for r in ordered
    )
    return table(("code", "level", "kinds", "rule"), rows)


def rights() -> str:
    """The rules of the Role that `ktrain rbac` prints."""
    from airflow_provider_ktrain.core.checks.rbac import RULES

    rows = ((f"`{g}`" if g else "core", ", ".join(r), ", ".join(v)) for g, r, v in RULES)
    return table(("API group", "resources", "verbs"), rows)


ROOMS = {  # the headings of the messages, with the beginnings of the modules under them; the longest one decides
    "Operators": ("",),
    "Submission": ("core/identity", "engine/submit", "operators/submission"),
    "Following a job": (
        "core/diagnosis/crash_loop", "engine/follow", "triggers", "worker_host",
    ),
    "Causes of failures": ("core/diagnosis",),
    "Ends of jobs and tasks": ("core", "engine"),
    "Logs": ("engine/logs",),
    "Results": ("core/reporting/asset_events", "core/logs/result", "core/text/xcom_values", "operators/asset_events"),
    "Sensors": ("sensors",),
    "Reaper": ("operators/reaper", "core/identity/reaping"),
    "Connections and requests": ("hooks", "engine/api", "engine/submit/preflight", "engine/watch"),
    "Manifests and functions": ("core/manifest", "core/kinds", "decorators"),
    "Checks": ("core/checks", "cli/check"),
    "Command line": ("cli", "embedded"),
}  # fmt: skip


def messages() -> str:
    """All messages, from the source code."""
    sys.path.insert(0, str(ROOT))
    from scripts.message_texts import has_words, lines
    from scripts.messages import Code, Message

    def code(text: str) -> str:
        return f"`{text}`" if "`" not in text else f"`` {text} ``"

    def row(message: Message) -> tuple[str, ...]:
        shown = "<br>".join(code(line) for line in lines(message.text))
        return shown, message.kind, message.when, "<br>".join(lines(message.remedy)) or "-"

    rooms: dict[str, list[tuple[str, ...]]] = {}
    for message in Code().messages():
        if has_words(message.text):
            starts = ((start, room) for room, all_starts in ROOMS.items() for start in all_starts)
            _, room = max((len(start), room) for start, room in starts if message.module.startswith(start))
            rooms.setdefault(room, []).append(row(message))
    head = ("message", "kind", "when", "what to do")
    return "\n\n".join(f"## {room}\n\n{table(head, dict.fromkeys(rooms[room]))}" for room in ROOMS if room in rooms)


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands, "options": options, "categories": categories, "rules": rules, "rights": rights,
    "messages": messages,
}  # fmt: skip
