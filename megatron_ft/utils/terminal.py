"""Make text of other hosts, processes and files safe for a terminal: control characters are shown as escapes.

A notice, an exception's text or a line of the run record may come from another host, or from any client of the control
store. An escape sequence in it could move the cursor, rewrite the screen or set the clipboard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
    from rich.segment import Segment

_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_DIRECTIONS = {0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
"""Characters that change the direction of text."""
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS | _DIRECTIONS}


def printable(text: str) -> str:
    r"""Return ``text`` with control characters as escapes (``\x1b``); newline and tab stay."""
    return text.translate(_ESCAPES)


def put(line: str, stream: TextIO) -> None:
    """Write a line and its end at once, also where Python does not buffer: other threads and processes write there, too. A
    terminal that has gone away, or a full disk, ends nothing."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        stream.write(f"{line}\n")
        stream.flush()


def console(**options: Any) -> Console:
    """Return a rich ``Console`` with these options that prints all text as :func:`printable`."""
    from rich.console import Console

    made = Console(**options)
    made.push_render_hook(cast("RenderHook", _Escapes()))
    return made


class _Escapes:
    """A hook of rich that renders every renderable, and escapes the text of the result."""

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for segment in console.render(self._renderable, options):
            # Control segments and styles hold rich's own sequences.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
