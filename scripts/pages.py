"""Writes generated text between two comments of a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def table(head: tuple[object, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = ("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in (head, *rows))
    return "\n".join((next(lines), "|" + "---|" * len(head), *lines))


class Pages:
    """The pages that one script writes: by path, what makes the generated text.

    :param script: its name in the comments.
    """

    def __init__(self, script: str, pages: Mapping[Path, Callable[[], str]]) -> None:
        self.script, self.pages = script, pages
        self._generated = re.compile(rf"(<!-- begin: {re.escape(script)} -->\n).*?(<!-- end -->)", re.DOTALL)

    def updated(self, page: Path) -> str:
        """A page with its generated text as the code is now."""
        made = self.pages[page]()
        text, replaced = self._generated.subn(lambda found: f"{found[1]}\n{made}\n\n{found[2]}", page.read_text())
        assert replaced == 1, f"{page} needs the comments around its generated text"
        return text

    def text_around(self, page: Path) -> str:
        """A page without its generated text; any page."""
        return self._generated.sub("", page.read_text())

    def write(self) -> None:
        for page in self.pages:
            page.write_text(self.updated(page))
