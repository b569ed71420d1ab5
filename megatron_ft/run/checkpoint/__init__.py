"""Checkpoints on a file system that all hosts share (docs/checkpoints.md): complete or absent, sharded, never pickled.

``writer`` writes a checkpoint, ``reader`` finds and loads one, ``pruning`` deletes old ones, ``saver`` writes beside
training. ``tensor_files`` is the file format, ``utils.directory_lock`` keeps a second job out.

Failures assumed: any process dies or stops at any instant; a disk is full, read-only, gone or returns other bytes than
were written; the directory is not shared after all. A writer that wakes up late does no harm: every attempt to save has
a directory of its own, in which nothing changes once its manifest exists. Nothing is assumed about clocks.
"""

from megatron_ft.run.checkpoint.pruning import discard, prune
from megatron_ft.run.checkpoint.reader import find, inspect, keys, load, newest, verify
from megatron_ft.run.checkpoint.saver import Saved, Saver
from megatron_ft.run.checkpoint.writer import Snapshot, complete, snapshot, write_part

__all__ = [
    "Saved",
    "Saver",
    "Snapshot",
    "complete",
    "discard",
    "find",
    "inspect",
    "keys",
    "load",
    "newest",
    "prune",
    "snapshot",
    "verify",
    "write_part",
]
