"""What launchers tell whoever started them. A terminal that has gone away, or a full disk under it, ends nothing."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """In megatron_ft's name."""
    show(f"megatron_ft: {line}")


def show(line: str) -> None:
    """As it is: what others have said."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(line, file=sys.stderr, flush=True)
