"""Tables that fit the terminal. Where the width does not suffice for the longest word of every column, columns are left
out, and where it still does not suffice, each row is a paragraph. No word is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_GAP = 2
"""Width between two columns; there is one more character at the edge."""
_EDGE = 1


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the heading.
        right: True for numbers.
        last: among the columns that do not fit, the one with the largest number is left out first, but not the last one;
            0: never.
        least: least width, for texts of many short words.
    """

    name: str
    right: bool = False
    last: int = 0
    least: int = 0


def _one_line(column: Column) -> str:
    return column.name.replace("-\n", "").replace("\n", " ")


@dataclass(frozen=True)
class FittedTable:
    """A table for a console of any width. Texts are wrapped at spaces only.

    Attributes:
        title: the line above it.
        columns: all columns, in order.
        rows: a text for each column, without markup; a rich ``Text`` has its own style.
        empty: the sentence in place of a table without rows.
        caption: text below it.
        bold: number of the row in bold type.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]
    empty: str
    caption: str = ""
    bold: int | None = None

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(self, crop=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if not self.rows:
            yield Text(self.empty)
            return
        shown = list(range(len(self.columns)))
        while (widths := self._widths(shown, options.max_width)) is None:
            optional = [place for place in shown if self.columns[place].last]
            if not optional or len(shown) == 1:
                yield from self._paragraphs()
                break
            shown.remove(max(optional, key=lambda place: self.columns[place].last))
        else:
            yield self._made(shown, widths)
            left_out = [column for place, column in enumerate(self.columns) if place not in shown]
            if left_out:
                yield Text(f"not shown at this width: {', '.join(map(_one_line, left_out))}")
        if self.caption:
            yield Text(self.caption)

    def _widths(self, shown: Sequence[int], room: int) -> list[int] | None:
        """Return a width for each column, at least that of its longest word; None if they do not fit."""
        texts = [[self.columns[place].name, *(str(row[place]) for row in self.rows)] for place in shown]
        widths = [max(map(cell_len, " ".join(column).split()), default=0) for column in texts]
        wanted = [max(map(cell_len, "\n".join(column).split("\n"))) for column in texts]
        widths = [
            max(width, min(self.columns[place].least, most))
            for place, width, most in zip(shown, widths, wanted, strict=True)
        ]
        left = room - sum(widths) - _GAP * len(shown) - _EDGE
        if left < 0:
            return None
        for _ in range(left):
            short = [number for number, width in enumerate(widths) if width < wanted[number]]
            if not short:
                break
            widths[min(short, key=lambda number: widths[number] / wanted[number])] += 1
        return widths

    def _paragraphs(self) -> Iterator[Text]:
        yield Text(self.title, style="italic")
        for row in self.rows:
            yield Text()
            for column, cell in zip(self.columns, row, strict=True):
                if cell:
                    name = _one_line(column)
                    line = Text.assemble(f"{name}: " if name else "", cell)
                    line.no_wrap, line.overflow = True, "ignore"
                    yield line

    def _made(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        title = Text(self.title, style="italic")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0))
        table.show_header = any(column.name for column in self.columns)
        for place, width in zip(shown, widths, strict=True):
            column = self.columns[place]
            table.add_column(Text(column.name), justify="right" if column.right else "left", width=width)
        for number, row in enumerate(self.rows):
            cells = [row[place] if isinstance(row[place], Text) else Text(str(row[place])) for place in shown]
            table.add_row(*cells, style="bold" if number == self.bold else None)
        return table
