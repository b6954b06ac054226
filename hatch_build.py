"""Makes the links of the distribution from `[tool.ktrain]` in pyproject.toml: hatchling calls this when it builds."""

import pathlib
import re
import tomllib
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # where tests call the functions
    MetadataHookInterface = object  # type: ignore[assignment, misc]

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<path>[^):]+)\)")


def urls(repository: str, documentation: str) -> dict[str, str]:
    """The project's links on PyPI. Without a repository there are none."""
    if not repository:
        return {}
    repository = repository.rstrip("/")
    return {
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Documentation": documentation or f"{repository}/blob/main/docs/index.md",
    }


def absolute(readme: str, repository: str, version: str, folder: str = "") -> str:
    """A README with links to the files of this version, which work on PyPI. Without a repository it is unchanged.

    :param folder: of the README in the repository, with a slash at its end. Default: the root.
    """

    def link(found: re.Match[str]) -> str:
        view = "raw" if found["image"] else "blob"
        return f"{found['image']}[{found['text']}]({repository.rstrip('/')}/{view}/v{version}/{folder}{found['path']})"

    return LINK.sub(link, readme) if repository else readme


class Links(MetadataHookInterface):
    """Sets the fields `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        root = pathlib.Path(self.root)
        addresses = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ktrain"]
        repository = addresses["repository"]
        text = absolute((root / "README.md").read_text(), repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(repository, addresses["documentation"])
