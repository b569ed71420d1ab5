"""The measured numbers of README and docs, compared with the files they come from.

    python benchmarks/claims.py            # what disagrees, and which measured numbers have no file
    python benchmarks/claims.py --write    # put the numbers of the files into the pages; read the sentences around them

``docs/numbers.toml`` lists the numbers: a text of a page in which ``{formula:format}`` stands for each number, and the
result whose fields the formula reads. ``tests/unit/test_evidence.py`` fails while there is a problem.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evidence import KEPT, ROOT

MANIFEST = Path("docs/numbers.toml")
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
_UNITS = r"%|s|ms|us|min|h|GB|MB|kB|MiB|Gbit/s|Mbit/s|times|bytes|steps|runs|faults|kills|histories"
_HIDDEN = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|<[^>\n]*>|https?://\S+", re.DOTALL)
_TELLS = re.compile(r"benchmarks/results|\.\./results/|\b[Mm]easured\b|\bmedians?\b")
"""A paragraph, list item or table row with one of these is measured."""


class _Fields(dict):
    """A JSON object whose fields are attributes, too."""

    __getattr__ = dict.__getitem__


FORMULAS = {
    **{f.__name__: f for f in (abs, len, max, min, round, sorted, sum, zip, statistics.median, statistics.mean)},
    "ratios": lambda some, others: [a / b for a, b in zip(some, others, strict=True)],
    "only": lambda rows, **wanted: _only(row for row in rows if all(row[key] == wanted[key] for key in wanted)),
    "where": lambda rows, **wanted: [row for row in rows if all(row[key] == wanted[key] for key in wanted)],
}
"""The names that a formula may use beside the fields of its result."""


def _only(rows: Iterator[Any]) -> Any:
    (row,) = rows
    return row


@dataclass(frozen=True)
class Claim:
    """A text of a page, and the result that its numbers come from; ``names`` are formulas that its formulas may use."""

    page: str
    result: str
    text: str
    names: tuple[tuple[str, str], ...] = ()

    @property
    def formulas(self) -> list[str]:
        return re.findall(r"\{([^{}]+)\}", self.text)

    def find(self, page: str) -> re.Match[str]:
        """Return where the page has the text, whatever its numbers; exactly once."""
        literal = re.split(r"\{[^{}]+\}", self.text.strip())
        spaced = [re.escape(part).replace(r"\ ", r"\s+").replace("\\\n", r"\s+") for part in literal]
        found = list(re.finditer(rf"([-+]?{_NUMBER})".join(spaced), page))
        if len(found) != 1:
            raise ValueError(f"{self.page} has this text of {MANIFEST} {len(found)} times: {self.text.strip()}")
        return found[0]

    def numbers(self, root: Path = ROOT) -> list[str]:
        """Return the numbers as the result gives them."""
        fields = _fields(self.result, root)
        known = {"__builtins__": {}, **FORMULAS, "fields": fields, **fields}
        for name, formula in self.names:
            known[name] = eval(formula, known)  # of our own manifest
        return [_written(eval(expression, known), form) for expression, form in map(_parted, self.formulas)]


def _parted(formula: str) -> tuple[str, str]:
    """Return a formula and its format, which follows the last colon."""
    expression, colon, form = formula.rpartition(":")
    return (expression, form) if colon else (form, "")


def _written(value: Any, form: str) -> str:
    return re.sub(r"e([-+])0(\d)$", lambda e: f"e{e[1].strip('+')}{e[2]}", format(value, form))


@cache
def _fields(result: str, root: Path) -> dict[str, Any]:
    """Return the fields of a result: those of a JSON file, or the ``rows`` of a CSV file."""
    file = root / (KEPT[result].path if result in KEPT else f"docs/results/{result}")
    if file.suffix == ".csv":
        with file.open(encoding="utf-8", newline="") as lines:
            return {"rows": [_Fields({k: _value(v) for k, v in row.items()}) for row in csv.DictReader(lines)]}
    return json.loads(file.read_text(encoding="utf-8"), object_hook=_Fields)


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def load(root: Path = ROOT) -> tuple[list[Claim], dict[str, list[str]], list[str]]:
    """Return the claims, the fragments of each page that are settings, and the sections that are measured as a whole."""
    manifest = tomllib.loads((root / MANIFEST).read_text(encoding="utf-8"))
    claims = [
        Claim(one["page"], one["result"], text, tuple(one.get("let", {}).items()))
        for one in manifest["claims"]
        for text in one["texts"]
    ]
    return claims, manifest["settings"], manifest["sections"]


def problems(root: Path = ROOT) -> list[str]:
    """Return what disagrees, in words: a number that its file gives otherwise, and a measured number without a file."""
    claims, settings, sections = load(root)
    found = []
    for page in pages(root):
        text = (root / page).read_text(encoding="utf-8")
        claimed: list[tuple[int, int]] = []
        for claim in (claim for claim in claims if claim.page == page):
            try:
                match = claim.find(text)
            except ValueError as error:
                found.append(str(error))
                continue
            claimed.append(match.span())
            for formula, there, wanted in zip(claim.formulas, match.groups(), claim.numbers(root), strict=True):
                if there != wanted:
                    found.append(f"{page}: {there} is {wanted} in {claim.result} ({formula}): {match[0]}")
        covered = list(claimed)
        for fragment in settings.get(page, ()):
            pattern = re.escape(fragment).replace(r"\ ", r"\s+")
            spans = [one.span() for one in re.finditer(pattern, text)]
            found += [] if spans else [f"{page} lacks the setting of {MANIFEST}: {fragment}"]
            covered += spans
        for start, end in _measured(text, [s.partition("#")[2] for s in sections if s.startswith(f"{page}#")], claimed):
            number, line = text[start:end], text.count("\n", 0, start) + 1
            if not any(a <= start and end <= b for a, b in covered):
                found.append(f"{page}:{line}: {number} is in a measured part, and {MANIFEST} names no file for it")
    return found


def pages(root: Path = ROOT) -> list[str]:
    """Return README and the pages of docs; docs/host-losses.md is written from its result as a whole."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "docs/results/README.md"]
    return [str(page.relative_to(root)) for page in found if page.name != "host-losses.md"]


def _measured(text: str, sections: list[str], claimed: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the place of each number of a measured part: of the sections, of blocks with a claim, and of those that say
    so.

    A number counts if it has a unit, a point, a comma or an exponent, or is 20 and more: smaller ones count groups and
    ranks.
    """
    shown = _HIDDEN.sub(lambda hidden: re.sub(r"[^\n]", "\0", hidden[0]), text)
    inside = False
    for start, end in _blocks(text):
        if heading := re.match(r"#+ (.*)", text[start:end]):
            inside = heading[1].strip() in sections
        elif inside or _TELLS.search(text[start:end]) or any(a < end and start < b for a, b in claimed):
            for number in re.finditer(
                rf"(?<![\w.\-\0])({_NUMBER})(?!\.?\d)(\s?(?:{_UNITS})\b|\s?%)?", shown[start:end]
            ):
                if number[2] or re.search(r"[.,e]", number[1]) or float(number[1]) >= 20:
                    yield start + number.start(1), start + number.end(1)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield the place of each paragraph, list item, table row and heading."""
    start = end = 0
    for line in text.splitlines(keepends=True):
        if not line.strip() or re.match(r"[|#]|\s*[-*] |\d+\. ", line) or text[start] in "|#":
            yield start, end
            start = end
        end += len(line)
    yield start, end


def write(root: Path = ROOT) -> None:
    """Put the numbers of the files into the pages."""
    for claim in load(root)[0]:
        file = root / claim.page
        text = file.read_text(encoding="utf-8")
        match = claim.find(text)
        for group, number in reversed(list(enumerate(claim.numbers(root), start=1))):
            text = text[: match.start(group)] + number + text[match.end(group) :]
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    found = problems()
    print(*found, sep="\n")
    sys.exit(bool(found))
