"""Makes the links of the distribution from `[tool.ktrain]` of the repository's pyproject.toml.

Hatchling calls this when it builds. Where there is no repository around this folder, there are no links.
"""

import pathlib
import runpy
import tomllib
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):
    """Sets the fields `urls` and `readme`, with the functions of the provider's hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        folder = pathlib.Path(self.root)
        readme, urls, hook = (folder / "README.md").read_text(), {}, folder.parent / "hatch_build.py"
        if hook.exists():
            addresses = tomllib.loads((folder.parent / "pyproject.toml").read_text())["tool"]["ktrain"]
            functions = runpy.run_path(str(hook))
            urls = functions["urls"](addresses["repository"], addresses["documentation"])
            readme = functions["absolute"](readme, addresses["repository"], metadata["version"], "embedded_cluster/")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        metadata["urls"] = urls
