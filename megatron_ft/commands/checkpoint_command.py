"""The command ``megatron-ft checkpoint``: list and check the checkpoints in a directory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.utils import terminal
from megatron_ft.utils.tables import Column, FittedTable


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft checkpoint``."""
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, text in (
        ("list", "show the checkpoints in a directory, the newest first"),
        ("verify", "read all files of the complete checkpoints and compare their checksums"),
    ):
        kind = kinds.add_parser(what, help=text, description=text)
        kind.add_argument("directory", type=Path, help="checkpoint.directory of the run")
        kind.set_defaults(run=run)
        if what == "verify":
            kind.add_argument("--step", type=int, metavar="N", help="only the checkpoint of this step (default: all)")


def run(options: argparse.Namespace) -> int:
    """Carry out what ``options.what`` says, and return the exit code. Raises ``FTError``."""
    if not options.directory.is_dir():
        raise ConfigError(f"{options.directory} is not a directory; give the checkpoint.directory of a run")
    from megatron_ft.run import checkpoint  # it imports torch, which the options do without

    found = checkpoint.find(options.directory)
    if options.what == "list":
        return _list(found, options.directory)
    return _verify(complete(found, options.directory, options.step))


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


def complete(found: list[Found], directory: Path, step: int | None) -> list[Found]:
    """Return the complete ones of the checkpoints ``found`` in a directory, or that of one step.

    Raises ``CheckpointError`` if there is none.
    """
    chosen = [one for one in found if one.complete and step in (None, one.step)]
    if not chosen:
        of = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"there is no complete checkpoint{of} in {directory}; megatron-ft checkpoint list shows what is there"
        )
    return chosen


def _verify(chosen: list[Found]) -> int:
    """Read all files of each; the exit code is 1 if one is damaged."""
    from megatron_ft.run import checkpoint

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
