"""Lists of host names with ranges in brackets, as Slurm writes them: ``gpu-[007,009-011],x[1-2]y[3]``."""

from __future__ import annotations

import itertools
import re

from megatron_ft.errors import LaunchError

_LONGEST = 65536
"""More names than a job has hosts."""
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Return the names in their order.

    A range has as many digits as its first number, with leading zeros. Raises ``LaunchError`` for another notation.
    """
    names: list[str] = []
    position = 0
    while position < len(text):
        choices: list[list[str]] = []
        while (piece := _PIECE.match(text, position)) is not None:
            choices.append([piece[2]] if piece[1] is None else _numbers(piece[1], text))
            position = piece.end()
        if not choices or (position < len(text) and text[position] != ","):
            raise _error(text, f"it cannot be read from {text[position:]!r} on")
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(names) + count > _LONGEST:
            raise _error(text, f"it has more than {_LONGEST} names")
        names += ["".join(parts) for parts in itertools.product(*choices)]
        position += 1
    if not names or text.endswith(","):
        raise _error(text, "a name is missing")
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for word in ranges.split(","):
        match = _RANGE.fullmatch(word)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if match is None or int(last) < int(first):
            raise _error(text, f"{word!r} is not a number, or a range from a lower to a higher one")
        if int(last) - int(first) >= _LONGEST:
            raise _error(text, f"it has more than {_LONGEST} names")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def _error(text: str, reason: str) -> LaunchError:
    return LaunchError(f"{text[:200]!r} is not a list of hosts such as gpu-[007,009-011],x1: {reason}")
