"""Where a rank is among those of its group that compute together.

Failures it assumes: none.
"""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """``stage`` of ``stages`` of the pipeline, ``slice`` of ``slices`` (tensor parallel), ``shard`` of ``shards`` among
    which the samples of a microbatch are divided. Positions count slices first, then shards, then stages."""

    stage: int = 0
    stages: int = 1
    slice: int = 0
    slices: int = 1
    shard: int = 0
    shards: int = 1

    @classmethod
    def of(cls, position: int, *, stages: int = 1, slices: int = 1, shards: int = 1) -> Layout:
        """Return the layout of the rank at ``position``."""
        rest, slice_ = divmod(position, slices)
        stage, shard = divmod(rest, shards)
        return cls(stage, stages, slice_, slices, shard, shards)

    @property
    def width(self) -> int:
        """The number of ranks of a stage."""
        return self.shards * self.slices

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self.stages * self.width

    @property
    def head(self) -> int:
        """The position that decides for its stage."""
        return self.stage * self.width

    @property
    def position(self) -> int:
        return self.head + self.shard * self.slices + self.slice
