"""Pointers of Git LFS: a clone without ``git lfs`` has small text files where the repository keeps large ones elsewhere."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.errors import FTError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_MAX_BYTES = 1024
"""Pointers are shorter than this, says their specification."""


def problem(path: Path) -> str | None:
    """Return what is wrong with a file that is such a pointer, with the remedy; None for any other file, and for one that
    cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size >= _MAX_BYTES:
            return None
        with path.open("rb") as file:
            content = file.read(len(_BEGINNING))
    except OSError:
        return None
    if content != _BEGINNING:
        return None
    return f"{path}: is a pointer of Git LFS, not the file itself: run `git lfs pull` in that repository"


def refuse(path: Path, error: type[FTError]) -> None:
    """Raise ``error`` if a file is such a pointer."""
    message = problem(path)
    if message is not None:
        raise error(message)
