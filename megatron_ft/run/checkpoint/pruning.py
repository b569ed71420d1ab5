"""Delete checkpoints so that an incomplete one never looks complete: the manifest is deleted first, durably.

An interrupted deletion leaves a directory without a manifest. Loading ignores it, and the next deletion removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_ft.core.lifecycle.checkpoint_policy import to_delete
from megatron_ft.run.checkpoint.reader import find
from megatron_ft.run.checkpoint.writer import MANIFEST, STEP
from megatron_ft.utils import durable_file


def prune(directory: Path, keep: int, log: Callable[[str], None] = print) -> list[str]:
    """Delete the checkpoints that ``core.lifecycle.checkpoint_policy.to_delete`` names. Returns their paths.

    A checkpoint that cannot be deleted is reported to ``log``, and the next call tries again. Raises
    ``CheckpointError`` only where the directory cannot be read.
    """
    gone = []
    for found in to_delete(find(directory), keep):
        try:
            _delete(Path(found.path))
            gone.append(found.path)
        except OSError as error:
            log(f"the old checkpoint {found.path} could not be deleted; the next save tries again: {error}")
    return gone


def discard(directory: Path, step: int, attempt: str, log: Callable[[str], None] = print) -> None:
    """Delete a failed attempt to save. On a full disk its files would make the next one fail, too."""
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
        durable_file.sync_directory(place)
    shutil.rmtree(place)
    durable_file.sync_directory(place.parent)
