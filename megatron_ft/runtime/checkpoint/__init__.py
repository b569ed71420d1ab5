"""Checkpoints on a file system that all hosts share (docs/checkpoints.md): complete or absent, sharded, never pickled.

``write`` makes one, ``read`` finds and loads, ``pruning`` deletes, ``locking`` keeps a second job out, ``saver`` does the
slow part beside training. ``tensors`` is the file format, ``files`` what makes a file durable.

Failures assumed: any process dies or stops at any instant, a disk is full, read-only, gone or returns other bytes than it
was given, the directory is not shared after all. A writer that wakes up late can do no harm: every attempt to save has
a directory of its own, and nothing in it is changed once its manifest is there. Nothing is assumed about clocks.
"""

from megatron_ft.runtime.checkpoint.locking import Lock, lock
from megatron_ft.runtime.checkpoint.pruning import discard, prune
from megatron_ft.runtime.checkpoint.read import find, load, load_newest, look, newest, verify
from megatron_ft.runtime.checkpoint.saver import Saved, Saver
from megatron_ft.runtime.checkpoint.write import Snapshot, complete, snapshot, write_part

__all__ = [
    "Lock",
    "Saved",
    "Saver",
    "Snapshot",
    "complete",
    "discard",
    "find",
    "load",
    "load_newest",
    "lock",
    "look",
    "newest",
    "prune",
    "snapshot",
    "verify",
    "write_part",
]
