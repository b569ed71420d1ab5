"""One rank of the run: who it is, where it says what it does, and its connections. All its jobs use it.

The training thread calls everything here except :meth:`Rank.lose`, which the watcher's thread calls: it ends all waits,
so a training thread that waits in a collective returns within milliseconds.

Failures it assumes: another rank of the group may be lost at any moment, also before the ranks have met.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.errors import FTError
from megatron_ft.record.history import History
from megatron_ft.record.timeline import Timeline
from megatron_ft.run.collectives.intra_group import IntraGroup, Lost
from megatron_ft.run.collectives.p2p_channel import P2PChannels
from megatron_ft.run.epoch_link import EpochLink
from megatron_ft.run.injection_points import InjectionPoints
from megatron_ft.run.progress_counters import ProgressCounters
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import Microbatch
from megatron_ft.utils.log import first_line

LONG_S = 0.01
"""Seconds. After a shorter step nothing is loaded ahead, and the record is written about this often: both would cost
such a step more than they are worth."""

T = TypeVar("T")


class Rank:
    """One of the ``size`` ranks of a group, at ``position``.

    ``link`` joins the ranks of equal position in all groups, ``inner`` those of the group (None: it is the only one, or
    they have not met), ``lines`` those of a pipeline. ``lost_because``: why it waits for none of them any more, or "".
    """

    def __init__(self, env: RankEnvironment, agreement: CoordinationClient) -> None:
        self.env, self.agreement, self.history = env, agreement, History(env.run_dir)
        self.group, self.position, self.size = env.group, env.position, env.config.ranks_per_group
        self.points = InjectionPoints.from_env(env.group, env.position, env.incarnation, env.run_dir)
        self.progress = ProgressCounters.from_env()
        self.timeline = Timeline(env.run_dir, env.group, env.position)
        self.link = EpochLink(env, agreement)
        self.inner: IntraGroup | None = None
        self.lines: P2PChannels | None = None
        self.lost_because = ""
        self._began = self._written = 0.0

    def join(self, inner: IntraGroup) -> None:
        """Take the group's communicator: its ranks have met."""
        self.inner = inner
        if self.lost_because:  # a rank was lost before that line
            inner.abort()

    def join_lines(self, peers: Sequence[int]) -> None:
        """Connect to the ranks at these positions, with which this one computes."""
        self.lines = P2PChannels.build(self.env, self.inner, peers, lambda: bool(self.lost_because))
        if self.lost_because:
            self.lines.abort()

    def lose(self, reason: str) -> None:
        """End all waits of this rank: another rank of this group is gone."""
        self.lost_because = self.lost_because or reason
        for means in (self.inner, self.lines):
            if means is not None:
                means.abort()
        self.link.abort()

    def inside(self, operation: Callable[[], T]) -> T:
        """Run an operation in which the engine communicates with the other ranks of the group. Raises ``Lost`` for an error
        of it if another rank is gone or cut off."""
        if self.inner is None:
            return operation()
        self.progress.engine()
        try:
            return operation()
        except RuntimeError as error:
            if not (_broken_inside(error) or self.lost_because):
                raise
            raise Lost(self.lost_because or f"a collective inside the group broke: {first_line(error)}") from None
        finally:
            self.progress.engine()

    @contextmanager
    def blame(self, microbatch: Microbatch) -> Iterator[None]:
        """Add the microbatch to an exception that ends this rank: if it kills another group too, the run has to stop. A
        failure because another rank of the group is gone is not the microbatch's fault."""
        try:
            yield
        except (FTError, Lost):
            raise
        except Exception as error:
            if self.lost_because or _broken_inside(error):
                raise
            error.add_note(f"megatron_ft: while computing microbatch {microbatch}")
            error.microbatch = str(microbatch)  # type: ignore[attr-defined]  # read by ``host.rank_bootstrap``
            raise

    def begin_step(self, step: int) -> bool:
        """Note that ``step`` begins. Return True if the one before was a short one."""
        self.link.begin_step(step)
        now = time.monotonic()
        short, self._began = now - self._began < LONG_S, now
        return short

    def end_step(self, step: int, epoch: int) -> None:
        """Note that ``step`` is committed and recorded."""
        self.timeline.assign(step, epoch)
        if time.monotonic() - self._began > LONG_S:
            self.write_down()  # at once: the next chance may be minutes away

    def write_down(self, every_s: float = 0.0) -> None:
        """Write timeline and record, unless that was done less than ``every_s`` seconds ago."""
        now = time.monotonic()
        if now - self._written >= every_s:
            self._written = now
            self.timeline.write()
            self.history.write()


def _broken_inside(error: Exception) -> bool:
    """Return True if a collective raised the error. gloo's errors have no type, but name its source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
