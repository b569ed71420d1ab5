"""The commands that the documentation shows, as a reader would copy them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import support

PAGES = ("README.md", "docs/*.md", "docs/*/*.md", "slurm/README.md", "tools/README.md", "examples/*/README*")
_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"\s#\s.*$")


@dataclass(frozen=True)
class Command:
    """One command of the documentation. ``line`` is written there, without its comment; ``words`` are its words."""

    page: str
    number: int
    line: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.line}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def pages() -> list[Path]:
    return sorted({page for pattern in PAGES for page in support.ROOT.glob(pattern)})


def commands() -> list[Command]:
    """Return the commands of all blocks of ``sh``, in the order of the pages."""
    return [command for page in pages() for command in of(page.relative_to(support.ROOT).as_posix(), page.read_text())]


def of(page: str, text: str) -> Iterator[Command]:
    """Return the commands of one page; a line that ends with a backslash goes on in the next."""
    language, parts, begun = None, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if fence := _FENCE.match(line):
            language = None if language is not None else fence[1]
        elif language == "sh" and line.strip() and not line.startswith("#"):
            begun = begun or number
            parts += _COMMENT.sub("", line.strip())
            if parts.endswith("\\"):
                parts = parts[:-1]
                continue
            yield Command(page, begun, " ".join(parts.split()))
            parts, begun = "", 0
