"""Find checkpoints, and load one position of a checkpoint. Errors name the file and what is wrong with it.

Nothing is unpickled, and no byte is used before the checksum of its file has been compared with the manifest's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ft.core.lifecycle.checkpoint_policy import Found, newest_first
from megatron_ft.errors import CheckpointError
from megatron_ft.run.checkpoint import tensor_files
from megatron_ft.run.checkpoint.memory_copies import Locate, nowhere
from megatron_ft.run.checkpoint.writer import MANIFEST, POSITION, SKELETON, VERSION, seal
from megatron_ft.run.collectives.state_transfer import unflatten
from megatron_ft.types import given
from megatron_ft.utils import durable_file, lfs_pointer, shared_file

NAME = re.compile(r"step-(\d{8,})-([A-Za-z0-9][A-Za-z0-9._-]*)")
_FILE = re.compile(r"position-\d{4,}/(skeleton\.json|part-\d{5,}-of-\d{5,}\.safetensors)")


def find(directory: Path) -> list[Found]:
    """Return all checkpoints in ``directory``, including unfinished ones, newest first. :func:`verify` reads the
    contents.

    A directory that does not exist holds none. One that cannot be read, and one with pointers of Git LFS in place of files,
    raises ``CheckpointError``.
    """
    with durable_file.explained("looking for checkpoints in", directory):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
    return newest_first([inspect(Path(directory) / name) for name in names if NAME.fullmatch(name)])


def inspect(place: Path) -> Found:
    """Return the state of the checkpoint at ``place``, judged by its manifest and the sizes of its files.

    A pointer of Git LFS is no damage, for which an older checkpoint would be used: it raises ``CheckpointError``.
    """
    path, step = os.fspath(place), int(given(NAME.fullmatch(place.name))[1])
    try:
        with shared_file.open_regular(place / MANIFEST) as file:
            text = file.read()
    except FileNotFoundError:
        return Found(path, step, False, f"it has no {MANIFEST}: its save was not finished", unfinished=True)
    except OSError as error:
        return Found(path, step, False, f"{place / MANIFEST} cannot be read: {error.strerror or error}")
    try:
        lfs_pointer.refuse(place / MANIFEST, CheckpointError)
        manifest = _manifest(text, step)
        for name, entry in manifest["files"].items():
            size = os.stat(place / name).st_size
            if size != entry["bytes"]:
                lfs_pointer.refuse(place / name, CheckpointError)
                raise ValueError(f"{name} has {size} bytes, {entry['bytes']} were written")
    except ValueError as error:
        return Found(path, step, False, str(error))
    except OSError as error:
        return Found(path, step, False, f"{error.filename} cannot be read: {error.strerror or error}")
    return Found(path, step, True, saved_at=manifest["saved_at"], manifest=manifest)


def verify(found: Found, copies: Locate = nowhere) -> None:
    """Read every file, or a copy of it in memory, and compare it with the manifest.

    Raises ``CheckpointError`` for the first file that differs.
    """
    _require_complete(found)
    for name, entry in found.manifest["files"].items():
        copy = copies(entry["sha256"], entry["bytes"])
        if copy is not None:
            with contextlib.suppress(OSError):
                if _sha256(copy) == entry["sha256"]:
                    continue
        path = Path(found.path) / name
        with durable_file.explained("reading", path):
            digest = _sha256(path)
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged: its sha256 is {digest}, {entry['sha256']} was written")


def _sha256(path: Path) -> str:
    with shared_file.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(found: Found, position: int, copies: Locate = nowhere) -> Any:
    """Return the state of one position, on the CPU. An intact copy in memory replaces a file.

    Raises ``CheckpointError`` with the file and what is wrong with it.
    """
    _require_complete(found)
    prefix = POSITION.format(position) + "/"
    own = {name: entry for name, entry in found.manifest["files"].items() if name.startswith(prefix)}
    if not own:
        raise CheckpointError(
            f"{found.path} holds the positions 0 to {found.manifest['ranks_per_group'] - 1}, not {position}; start with the "
            f"number of ranks per group that it was saved with"
        )
    read: dict[str, torch.Tensor] = {}
    for name, entry in own.items():
        if not name.endswith(SKELETON):
            read |= _decode(Path(found.path) / name, entry, copies)
    skeleton = _skeleton(Path(found.path) / prefix / SKELETON, own[prefix + SKELETON])
    names = iter(skeleton["names"])
    return unflatten(skeleton["state"], lambda dtype, shape, device: read[next(names)])


def keys(found: Found) -> set[str]:
    """Return the keys of the state of position 0. Raises ``CheckpointError`` as :func:`load` does."""
    _require_complete(found)
    name = f"{POSITION.format(0)}/{SKELETON}"
    skeleton = _skeleton(Path(found.path) / name, found.manifest["files"][name])
    return {key for key, _ in skeleton["state"]["map"]}


def _decode(path: Path, entry: Mapping[str, Any], copies: Locate) -> dict[str, torch.Tensor]:
    copy = copies(entry["sha256"], entry["bytes"])
    if copy is not None:
        with contextlib.suppress(OSError, CheckpointError):
            return tensor_files.decode(copy, entry["sha256"])
    with durable_file.explained("reading", path):
        return tensor_files.decode(path, entry["sha256"])


def newest(directory: Path, log: Callable[[str], None] = print, copies: Locate = nowhere) -> Found | None:
    """Return the newest checkpoint all of whose files are intact; None if no save was ever finished. All files are read, and
    ``log`` gets the reason for each newer checkpoint. Raises ``CheckpointError`` if some are there and none is intact."""
    finished = []
    for found in find(directory):
        reason = found.reason
        if found.complete:
            try:
                verify(found, copies)
                return found
            except CheckpointError as error:
                reason = str(error)
        if not found.unfinished:
            finished.append(found.path)
        log(f"checkpoint {found.path} of step {found.step} is not used: {reason}")
    if finished:
        raise CheckpointError(
            f"none of the {len(finished)} checkpoints in {directory} can be used, and a run that begins anew would lose "
            f"what they hold: restore the files of {finished[0]}, or move all step-* directories away to begin at step 0"
        )
    return None


def _manifest(text: bytes, step: int) -> Mapping[str, Any]:
    """Return the body of a manifest. Raises ``ValueError`` unless this version wrote it for this step."""
    try:
        whole = json.loads(text)
        version = whole["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"its {MANIFEST} is damaged: it is not JSON with a version") from None
    if version != VERSION:
        raise ValueError(
            f"its format version is {version}, this megatron_ft reads {VERSION}: use the one that wrote it"
        )
    body = whole.get("checkpoint")
    if not isinstance(body, dict) or seal(body) != whole.get("sha256"):
        raise ValueError(f"its {MANIFEST} is damaged: the checksum does not fit the content")
    # A writer of this version wrote the rest. Names are checked all the same, because they are opened.
    if strange := [name for name in body["files"] if not _FILE.fullmatch(name)]:
        raise ValueError(f"its {MANIFEST} names the file {strange[0]!r}, which cannot be part of a checkpoint")
    if body["step"] != step:
        raise ValueError(f"its {MANIFEST} is that of step {body['step']}: the directory was renamed")
    return body


def _skeleton(path: Path, entry: Mapping[str, Any]) -> Any:
    with durable_file.explained("reading", path), shared_file.open_regular(path) as file:
        text = file.read()
    if (digest := hashlib.sha256(text).hexdigest()) != entry["sha256"]:
        raise CheckpointError(f"{path} is damaged: its sha256 is {digest}, {entry['sha256']} was written")
    return json.loads(text)


def _require_complete(found: Found) -> None:
    if not found.complete:
        raise CheckpointError(f"{found.path} cannot be loaded: {found.reason}")
