"""Write a checkpoint: copy and write each part, and, when all parts are written, the manifest that makes it complete.

    <directory>/step-00000812-<attempt>/manifest.json                     written last; without it there is no
                                        checkpoint position-0003/skeleton.json       the state without its tensors
                                        part-00001-of-00004.safetensors

Each writer's receipt has the checksums of the data in memory, not of the file on disk. The leader puts the receipts
into the manifest, so that a file of another attempt, or one that was changed later, is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ft.core.lifecycle import checkpoint_policy
from megatron_ft.errors import CheckpointError
from megatron_ft.run.checkpoint import tensor_files
from megatron_ft.run.collectives import device_copies
from megatron_ft.run.collectives.state_transfer import flatten, named
from megatron_ft.utils import durable_file, shared_file

VERSION = 1
MANIFEST = "manifest.json"
SKELETON = "skeleton.json"
STEP = "step-{:08d}-{}"
POSITION = "position-{:04d}"
PART = "part-{:05d}-of-{:05d}.safetensors"
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Snapshot:
    """A copy of one part of a state; training may change the original.

    Attributes:
        part: Number of the part, from 0.
        parts: Number of parts.
        skeleton: The whole state without the contents of its tensors.
        names: Names of all tensors of the state, in order.
        tensors: The tensors of this part by name.
    """

    part: int
    parts: int
    skeleton: Any
    names: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]


def snapshot(state: Any, part: int, parts: int) -> Snapshot:
    """Copy part ``part`` of ``parts`` of a state to the CPU. Other groups copy the other parts. When it returns, the copy is
    complete, also of tensors on a device, which come through pinned memory (``run.collectives.device_copies``)."""
    skeleton, found = flatten(state, devices=False)  # the loading process chooses its own
    paths = [path for path, _ in named(state)]
    for path, tensor in zip(paths, found, strict=True):
        if tensor.dtype not in tensor_files.CODES or tensor.layout != torch.strided:
            raise CheckpointError(
                f"state.{path} is a {tensor.layout} tensor of {tensor.dtype}; a checkpoint holds dense tensors of "
                f"{', '.join(sorted(tensor_files.CODES.values()))}: convert it in the engine's state()"
            )
    names = _unique(paths)
    own = checkpoint_policy.parts([tensor.nbytes for tensor in found], parts)[part]
    copies = device_copies.to_host([found[index] for index in own])
    return Snapshot(part, parts, skeleton, names, dict(zip((names[index] for index in own), copies, strict=True)))


def write_part(directory: Path, step: int, attempt: str, position: int, snapshot: Snapshot) -> dict[str, Any]:
    """Write one part. Returns the receipt for :func:`complete`, which can be sent as JSON.

    Args:
        directory: The checkpoint directory, which must exist.
        step: The step that starts from this state.
        attempt: Name of this attempt to save the step, equal for all its writers and never used again, such as the run
            and the epoch.
        position: Number of the rank in its group.
        snapshot: The part.

    Raises:
        CheckpointError: the file system refuses; the message has the remedy.
    """
    name = _name(step, attempt)
    skeleton = json.dumps({"names": snapshot.names, "state": snapshot.skeleton}, separators=(",", ":")).encode()
    part, parts = snapshot.part, snapshot.parts
    place = None
    try:
        with durable_file.explained("writing a checkpoint to", directory):
            place = durable_file.make_directories(Path(directory), name, POSITION.format(position))
            written = {PART.format(part + 1, parts): tensor_files.encode(snapshot.tensors)}
            if part == 0:
                written[SKELETON] = iter([skeleton])
            found = {
                f"{place.name}/{file}": durable_file.write(place / file, pieces) for file, pieces in written.items()
            }
    except CheckpointError:
        if place is None or place.is_dir() or not Path(directory).is_dir():
            raise
        # The group that conducts the attempt has deleted its place.
        raise CheckpointError("this attempt was given up meanwhile, because another group could not save") from None
    return {
        "step": step,
        "attempt": attempt,
        "position": position,
        "part": part,
        "parts": parts,
        "skeleton": hashlib.sha256(skeleton).hexdigest(),
        "files": found,
    }


def complete(
    directory: Path,
    step: int,
    attempt: str,
    receipts: Sequence[Mapping[str, Any]],
    *,
    run_id: str,
    groups: int,
    ranks_per_group: int,
    meta: Any = None,
) -> Path:
    """Complete a checkpoint: write its manifest. Returns its path. ``meta`` is any value that JSON can hold.

    Raises ``CheckpointError`` when a part is missing or does not belong to the others; then there is no checkpoint.
    """
    directory = Path(directory)
    place = directory / _name(step, attempt)
    _check(place, step, attempt, receipts, ranks_per_group)
    listed = {name: entry for receipt in receipts for name, entry in receipt["files"].items()}
    for name, entry in listed.items():
        _check_seen(place / name, entry["bytes"])
    body = {
        "run_id": run_id,
        "step": step,
        "attempt": attempt,
        "groups": groups,
        "ranks_per_group": ranks_per_group,
        "parts": receipts[0]["parts"],
        "saved_at": time.time(),
        "files": dict(sorted(listed.items())),
        "meta": meta,
    }
    with durable_file.explained("completing the checkpoint", place):
        # The process that created these directories syncs them, but perhaps after the others were done.
        durable_file.sync_directory(place)
        durable_file.sync_directory(directory)
        durable_file.write(place / MANIFEST, [sealed(body)])
    return place


def sealed(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with a checksum of itself, because a flipped digit is valid JSON, too."""
    return json.dumps({"version": VERSION, "sha256": seal(body), "checkpoint": body}, indent=1).encode() + b"\n"


def seal(body: Any) -> str:
    """Return the checksum of a manifest's body. It does not depend on the layout of the JSON and the order of keys."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode()).hexdigest()


def _check(place: Path, step: int, attempt: str, receipts: Sequence[Mapping[str, Any]], ranks_per_group: int) -> None:
    """Raise ``CheckpointError`` unless there is one receipt for every part of every position, all of the same state."""
    parts = {receipt["parts"] for receipt in receipts}
    wanted = {(position, part) for position in range(ranks_per_group) for part in range(max(parts, default=0))}
    given = [(receipt["position"], receipt["part"]) for receipt in receipts]
    if len(parts) != 1 or set(given) != wanted or len(given) != len(wanted):
        wrong = sorted(wanted.symmetric_difference(given)) or f"{len(given)} receipts, {len(parts)} divisions"
        raise CheckpointError(
            f"{place} cannot be completed: every part of each of {ranks_per_group} positions must be written once, but "
            f"(position, part) {wrong} is missing, unexpected or duplicate; save again"
        )
    strangers = [receipt for receipt in receipts if (receipt["step"], receipt["attempt"]) != (step, attempt)]
    if strangers:
        other = strangers[0]
        raise CheckpointError(
            f"{place} cannot be completed: position {other['position']}, part {other['part']} was written for step "
            f"{other['step']}, attempt {other['attempt']}; save again"
        )
    for position in range(ranks_per_group):
        differing = {receipt["skeleton"] for receipt in receipts if receipt["position"] == position}
        if len(differing) > 1:
            raise CheckpointError(
                f"{place} cannot be completed: the groups that wrote the parts of position {position} have states with "
                f"different values or shapes; ranks of equal position must hold the same state"
            )


def _check_seen(path: Path, size: int) -> None:
    """Raise ``CheckpointError`` unless this host sees the file. It is opened, because only that asks the server
    (NFS)."""
    try:
        with shared_file.open_regular(path) as file:
            seen = os.fstat(file.fileno()).st_size
        sees = "" if seen == size else f"sees {seen}"
    except OSError as error:
        sees = f"cannot open it: {error.strerror}"
    if sees:
        raise CheckpointError(
            f"{path} was written with {size} bytes, but this host {sees}; checkpoint.directory must be on a file system "
            f"that all hosts share"
        )


def place_of(directory: Path, step: int, attempt: str) -> Path:
    """Return the directory of an attempt, to which names in a receipt are relative."""
    return Path(directory) / _name(step, attempt)


def _name(step: int, attempt: str) -> str:
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(
            f"attempt {attempt!r}: it is part of a directory's name, so it may have letters, digits and . _ - only"
        )
    return STEP.format(step, attempt)


def _unique(paths: Sequence[str]) -> tuple[str, ...]:
    """Return distinct names: the keys 1 and "1", or "a.b" and "a" with "b" below it, have the same path."""
    taken, names = {tensor_files.RESERVED}, []
    for path in paths:
        name, number = path, 1
        while name in taken:
            number += 1
            name = f"{path}#{number}"
        taken.add(name)
        names.append(name)
    return tuple(names)
