"""Writes how to install the provider into the pages that say so.

    python scripts/installation.py

`[tool.ktrain] published` in pyproject.toml decides whether the commands install from PyPI or from a checkout.
`tests/test_docs.py` fails if a page is out of date.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where this file is run as a script

from scripts.pages import Pages  # noqa: E402

PROVIDER, CLUSTER = "airflow-provider-ktrain", "ktrain-cluster"
NOT_PUBLISHED = "There is no release on PyPI yet. In a checkout, run:\n\n"
WHEELS = (
    "\n\nFor machines without a checkout, build wheels of the provider and the embedded cluster, and install them:\n\n"
    "```console\n$ pip wheel --no-deps --wheel-dir dist . ./embedded_cluster\n```"
)


def is_published() -> bool:
    """Whether both distributions are on PyPI."""
    return bool(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ktrain"]["published"])


def installation(*commands: str, wheels: bool = False, published: bool | None = None) -> str:
    """What to run, and where.

    :param commands: arguments of pip, with `{PROVIDER}` and `{CLUSTER}` for the distributions. `[EXTRA]` may follow.
    :param wheels: whether to say how wheels are built where there is no release. Default: False.
    :param published: default: as pyproject.toml says.
    """
    published = is_published() if published is None else published
    places = (
        {"PROVIDER": PROVIDER, "CLUSTER": CLUSTER} if published else {"PROVIDER": ".", "CLUSTER": "./embedded_cluster"}
    )
    lines = "\n".join(f"$ pip install {_with_cluster(command, published).format(**places)}" for command in commands)
    return f"{'' if published else NOT_PUBLISHED}```console\n{lines}\n```{WHEELS if wheels and not published else ''}"


def _with_cluster(command: str, published: bool) -> str:
    """The extra `local` needs the embedded cluster, which pip finds only on PyPI."""
    return command if published or "[local]" not in command else f"{{CLUSTER}} {command}"


COMMANDS = {
    "README.md": functools.partial(installation, "{PROVIDER}"),
    "docs/tutorial.md": functools.partial(installation, "{PROVIDER}", wheels=True),
    "docs/how-to/embedded-cluster.md": functools.partial(installation, "'{PROVIDER}[local]'"),
    "docs/how-to/openlineage.md": functools.partial(installation, "'{PROVIDER}[openlineage]'"),
    "docs/how-to/run.md": functools.partial(
        installation, "--no-deps {PROVIDER}", "aiohttp kubernetes kubernetes_asyncio pathspec pyyaml {CLUSTER}"
    ),
    "docs/how-to/test-your-dags.md": functools.partial(installation, "'{PROVIDER}[local]' pytest"),
    "embedded_cluster/README.md": functools.partial(installation, "{CLUSTER}"),
}
PAGES = Pages("scripts/installation.py", {ROOT / page: made for page, made in COMMANDS.items()})

if __name__ == "__main__":
    PAGES.write()
