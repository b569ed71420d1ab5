"""Delete checkpoints so that none ever looks complete that is not: the manifest goes first, and durably.

A deletion that is cut short leaves a directory without a manifest, which is absent for whoever loads, and is deleted by
the next one that gets here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_ft.core.checkpoints import to_delete
from megatron_ft.runtime.checkpoint import files
from megatron_ft.runtime.checkpoint.read import find
from megatron_ft.runtime.checkpoint.write import MANIFEST, STEP


def prune(directory: Path, keep: int, log: Callable[[str], None] = print) -> list[str]:
    """Delete what ``core.checkpoints.to_delete`` says. Returns the paths that are gone.

    What cannot be deleted is said to ``log`` and tried again the next time. Raises ``CheckpointError`` only where the
    directory cannot be read at all.
    """
    gone = []
    for found in to_delete(find(directory), keep):
        try:
            _delete(Path(found.path))
            gone.append(found.path)
        except OSError as error:
            log(f"the old checkpoint {found.path} could not be deleted, it is tried again after the next save: {error}")
    return gone


def discard(directory: Path, step: int, attempt: str, log: Callable[[str], None] = print) -> None:
    """Delete an attempt to save that failed. On a full disk, what it wrote would make the next one fail as well."""
    place = Path(directory) / STEP.format(step, attempt)
    try:
        _delete(place)
    except FileNotFoundError:
        pass
    except OSError as error:
        log(f"the unfinished checkpoint {place} could not be deleted: {error}")


def _delete(place: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place / MANIFEST)
        files.sync_directory(place)
    shutil.rmtree(place)
    files.sync_directory(place.parent)
