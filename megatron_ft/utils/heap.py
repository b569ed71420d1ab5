"""The heap of this process: memory that was freed but is still held by the C library."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Return the free pages of all of malloc's arenas to the operating system; do nothing where the C library is not glibc.

    glibc itself returns only the end of an arena. Freed memory stays between blocks in use (``docs/notes/pytorch.md``),
    and a process that builds communicators again and again grows although it frees all of them. A call takes about 1 ms, and
    longer with thousands of holes.
    """
    if _trim is not None:
        _trim(0)
