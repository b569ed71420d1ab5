"""The command ``megatron-ft checkpoint``: list, check and export the checkpoints in a directory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ft import checkpoint
from megatron_ft.checkpoint import export
from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.utils import terminal
from megatron_ft.utils.tables import Column, FittedTable


def run(options: argparse.Namespace) -> int:
    """Carry out what ``options.what`` says, and return the exit code. Raises ``FTError``."""
    if not options.directory.is_dir():
        raise ConfigError(f"{options.directory} is not a directory; give the checkpoint.directory of a run")
    found = checkpoint.find(options.directory)
    if options.what == "list":
        return _list(found, options.directory)
    chosen = _chosen(found, options)
    return _verify(chosen) if options.what == "verify" else _export(chosen, options)


def _list(found: list[Found], directory: Path) -> int:
    if not found:
        print(f"there is no checkpoint in {directory}")
        return 0
    rows = []
    for one in found:
        if not one.complete:
            continue
        size = sum(entry["bytes"] for entry in one.manifest["files"].values()) / 2**20
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.saved_at))
        counts = (str(one.manifest["groups"]), str(one.manifest["ranks_per_group"]))
        rows.append((str(one.step), saved, f"{size:.1f}", *counts, Path(one.path).name))
    columns = [Column("step", right=True), Column("saved", last=1), Column("MiB", right=True, last=2)]
    columns += [Column("groups", right=True, last=3), Column("ranks", right=True, last=4), Column("checkpoint")]
    FittedTable("Checkpoints", columns, rows, f"there is no complete checkpoint in {directory}").show(
        terminal.console()
    )
    for one in found:
        if not one.complete:
            print(f"{Path(one.path).name} is not complete: {one.reason}")
    return 0


def _chosen(found: list[Found], options: argparse.Namespace) -> list[Found]:
    """Return the complete checkpoints, or that of one step."""
    complete = [one for one in found if one.complete and options.step in (None, one.step)]
    if not complete:
        of = "" if options.step is None else f" of step {options.step}"
        raise CheckpointError(
            f"there is no complete checkpoint{of} in {options.directory}; megatron-ft checkpoint list shows what is there"
        )
    return complete


def _verify(chosen: list[Found]) -> int:
    """Read all files of each; the exit code is 1 if one is damaged."""
    damaged = 0
    for one in chosen:
        try:
            checkpoint.verify(one)
        except CheckpointError as error:
            damaged += 1
            print(f"step {one.step}: damaged: {error}")
        else:
            print(f"step {one.step}: all {len(one.manifest['files'])} files are intact")
    return 1 if damaged else 0


def _export(chosen: list[Found], options: argparse.Namespace) -> int:
    names = {} if options.names is None else _names(options.names)
    one = chosen[0]
    tensors = export.export(one, options.format, options.out, names)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"step {one.step}: {len(tensors)} tensors with {count} elements are in {options.out}")
    if options.format == "hf" and not (options.out / "config.json").exists():
        print(
            f"the run's config has no fault_tolerance.model: from_pretrained needs the model's config.json in {options.out}"
        )
    return 0


def _names(path: Path) -> Mapping[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--names {path} cannot be read: {error}; give a JSON file with old beginning: new one"
        ) from None
    if not isinstance(raw, dict) or not all(isinstance(new, str) for new in raw.values()):
        raise ConfigError(f"--names {path} must be a JSON object with old beginning: new one, both texts")
    return raw
