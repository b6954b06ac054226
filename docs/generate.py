"""A hook of MkDocs that replaces comments `<!-- generated: NAME -->` with what is too large for the pages themselves.

`scripts/tables.py` writes the smaller tables into the pages. The hook also adds the plots of the benchmarks and the
fidelity of the embedded cluster, which are outside of docs/.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import sys
import tomllib
from collections.abc import Callable
from typing import Any

COMMANDS = ("run", "check", "rbac", "cluster start", "cluster status", "cluster stop", "cluster fault")


ROOT = pathlib.Path(__file__).resolve().parent.parent
#: The path as pages in docs/ refer to it, so that their links work on GitHub too.
FIDELITY = "../embedded_cluster/fidelity.md"
PLOTS = "../benchmarks/plots/"  #: The path as pages refer to it, so that their links work on GitHub too.


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


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Link the guides that docstrings name. Only they have the path of a file in docs/ as text."""
    up = "../" * page.url.count("/")
    return re.sub(r"Guide: docs/([\w/-]+)\.md", rf'Guide: <a href="{up}\1/">\1</a>', html)


def commands() -> str:
    """The help of every command, as `ktrain` prints it."""
    from airflow_provider_ktrain.cli import main

    def help_of(command: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        return f"## ktrain {command}\n\n```text\n{out.getvalue().strip()}\n```"

    return "\n\n".join(help_of(command) for command in COMMANDS)


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
    from scripts.messages import Message
    from scripts.messages import messages as all_messages
    from scripts.pages import table

    def code(text: str) -> str:
        return f"`{text}`" if "`" not in text else f"`` {text} ``"

    def row(message: Message) -> tuple[str, ...]:
        shown = "<br>".join(code(line) for line in lines(message.text))
        return shown, message.kind, message.when, "<br>".join(lines(message.remedy)) or "-"

    rooms: dict[str, list[tuple[str, ...]]] = {}
    for message in all_messages():
        if has_words(message.text):
            starts = ((start, room) for room, all_starts in ROOMS.items() for start in all_starts)
            _, room = max((len(start), room) for start, room in starts if message.module.startswith(start))
            rooms.setdefault(room, []).append(row(message))
    head = ("message", "kind", "when", "what to do")
    return "\n\n".join(f"## {room}\n\n{table(head, dict.fromkeys(rooms[room]))}" for room in ROOMS if room in rooms)


def end_rules() -> str:
    """The rules by which a training ends."""
    sys.path.insert(0, str(ROOT))
    from scripts import end_rules

    return end_rules.end_rules()


def parameters() -> str:
    """The parameters of all training operators by group. Their order and groups are those of the constructor."""
    source = (ROOT / "airflow_provider_ktrain" / "operators" / "job_parameters.py").read_text()
    signature = source.partition("def __init__(")[2].partition("**kwargs")[0]
    _, *groups = re.split(r"\n +# (\w+)\n", signature)
    names = (", ".join(f"`{name}`" for name in re.findall(r"(?m)^ +(\w+):", group)) for group in groups[1::2])
    return "\n".join(f"- {group}: {listed}" for group, listed in zip(groups[::2], names, strict=True))


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "end_rules": end_rules,
    "messages": messages,
    "parameters": parameters,
}
