"""A healthy rank whose group has lost another rank: it is released from the group's work, and waits.

It keeps its process and its model, so that it can serve the group again. It no longer uses the outer communicator or
the protocol; the other groups go on without its group.

Failures it assumes: the store may be away for any time; every other group may be lost, too.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import GroupFailed, HostSilent, JoinRequested, LeaveAnnounced, RunHalted
from megatron_ft.errors import InvariantBroken, RunStopped, StoreError
from megatron_ft.run.rank_executor import RankExecutor
from megatron_ft.run.store import ControlStore
from megatron_ft.types import View

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_CULPRIT_S = 2.0
"""Seconds that an agent has to name the missing rank, before this rank reports that the group has come apart."""


class LivenessTracker:
    """The groups that may still be alive, according to the verdicts. The watcher's thread writes, the training thread
    reads.

    ``halted``: the reason why every group has to end, once there is one.
    """

    def __init__(self, groups: int) -> None:
        self._gone: dict[int, int] = {}  # group -> its newest start that is gone
        self._silent: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._groups = set(range(groups))
        self.halted = ""
        self.changed = threading.Event()

    def on_signal(self, verdict: signals.Verdict) -> None:
        match verdict:
            case HostSilent(heard=heard):
                (self._silent.discard if heard else self._silent.add)(verdict.units)
            case GroupFailed(group=group, incarnation=number) | LeaveAnnounced(group=group, incarnation=number):
                self._gone[group] = max(number, self._gone.get(group, 0))
            case JoinRequested(group=group, incarnation=number) if number > self._gone.get(group, -1):
                self._groups.add(group)
                self._gone.pop(group, None)
            case RunHalted(why=reason):
                self.halted = self.halted or reason
        self.changed.set()

    def lost(self, view: View) -> set[int]:
        """Return the members of a view that are known to be gone, or on a host that is not heard."""
        unheard = {group for _, about in list(self._silent) for group in about}
        gone = {group for group, start in view.members if self._gone.get(group, -1) >= start}
        return gone | (unheard & set(view.live))

    def anybody(self, me: int) -> bool:
        """Return True if ``me`` may wait for some group: not known to be gone, on a host that still reports."""
        unheard = {group for by, about in list(self._silent) if me in by for group in about}
        return bool(self._groups - self._gone.keys() - unheard)


def wait_for_return(
    executor: RankExecutor, store: ControlStore, census: LivenessTracker, why: str, leaving: Callable[[], str]
) -> None:
    """Wait until the run has ended, or no group is left, or this rank is told to leave.

    Always raises ``RunStopped``, or ``StoreError`` when the store was away for ``store_patience_s``: no group can come back
    meanwhile. Raises ``InvariantBroken`` when every group has to end: the other rank has ended for that, and on another
    host no rank may have seen it.

    Args:
        why: the failure, if no agent has named a rank.
        leaving: returns the reason why this rank was told to leave; empty without one.
    """
    rank, patience_s = executor.rank, executor.rank.env.config.fault_tolerance.store_patience_s
    rank.progress.enter("waiting")
    executor.close_epoch()
    # no limit: each turn is news of one loss; without any it ends after _CULPRIT_S
    while not (rank.lost_because or census.halted) and census.changed.wait(_CULPRIT_S):
        census.changed.clear()
    if not (rank.lost_because or census.halted):
        given_up = signals.RankUnresponsive(
            group=rank.group,
            position=rank.position,
            pid=os.getpid(),
            host=socket.gethostname(),
            why=f"has lost the other ranks of its group: {why}",
            incarnation=rank.env.incarnation,
            host_rank=rank.env.host_rank,
        )
        rank.agreement.announce(given_up)
    reason = rank.lost_because or why
    _log.info(f"group {rank.group} is out: {reason}; rank {rank.position} waits")
    answered = time.monotonic()
    while not (leaving() or census.halted) and census.anybody(rank.group) and time.monotonic() - answered < patience_s:
        with suppress(StoreError):
            if store.get("ended") is not None:
                break
            answered = time.monotonic()
        census.changed.wait(_LOOK_EVERY_S)
        census.changed.clear()
    if census.halted:
        raise InvariantBroken(census.halted)
    if time.monotonic() - answered >= patience_s:
        raise StoreError(
            f"no control store has answered for {patience_s:g} s; group {rank.group} was left out: {reason}"
        )
    raise RunStopped(f"group {rank.group} was left out: {reason}")
