"""What a healthy rank does when another rank of its group is gone: it is released from the group's work, and waits.

It keeps its process and its model, so that it can serve the group again. It touches neither the outer communicator nor the
protocol any more; the other groups go on without its group.

Failures it assumes: the store may be away for as long as it likes; every other group may be lost, too.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from megatron_ft.core import detector
from megatron_ft.core.protocol import Asked, Died, Leaves, Missed
from megatron_ft.errors import RunStopped, StoreError
from megatron_ft.runtime.rank import Rank
from megatron_ft.runtime.store import ControlStore

_LOOK_EVERY_S = 0.2
_CULPRIT_S = 2.0
"""So long an agent has to say which rank of the group is gone, before this rank says that the group has come apart."""


class Census:
    """Which groups may still be there, from what was heard. The watcher's thread writes, the training thread reads."""

    def __init__(self, groups: int) -> None:
        self._gone: dict[int, int] = {}  # group -> the newest start of it that is
        self._silent: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._groups = set(range(groups))
        self.changed = threading.Event()

    def hear(self, verdict: detector.Verdict) -> None:
        match verdict:
            case Missed(by=by, about=about, heard=heard):
                (self._silent.discard if heard else self._silent.add)((by, about))
            case Died(group=group, incarnation=number) | Leaves(group=group, incarnation=number):
                self._gone[group] = max(number, self._gone.get(group, 0))
            case Asked(group=group, incarnation=number) if number > self._gone.get(group, -1):
                self._groups.add(group)
                self._gone.pop(group, None)
        self.changed.set()

    def anybody(self, me: int) -> bool:
        """Whether a group is left that ``me`` could hope for: not known to be gone, on a host that is heard of."""
        unheard = {group for by, about in list(self._silent) if me in by for group in about}
        return bool(self._groups - self._gone.keys() - unheard)


def wait_for_return(
    rank: Rank, store: ControlStore, census: Census, why: str, leaving: Callable[[], str]
) -> None:
    """Until the run has ended, or nobody is left, or this rank is told to leave. Always raises ``RunStopped``.

    Args:
        why: what broke, if nobody has named a culprit.
        leaving: the reason for which this rank was told to go; empty while it was not.
    """
    rank.pulse.enter("waiting")
    rank.close_epoch()
    while not rank.lost_because and census.changed.wait(_CULPRIT_S):
        census.changed.clear()
    if not rank.lost_because:
        here = (rank.group, rank.position, os.getpid(), socket.gethostname())
        lost = f"has lost the other ranks of its group: {why}"
        rank.agreement.announce(detector.GivenUp(*here, lost, rank.incarnation))
    reason = rank.lost_because or why
    print(f"megatron_ft: group {rank.group} is out: {reason}; rank {rank.position} waits", flush=True)
    while not _ended(store) and not leaving() and census.anybody(rank.group):
        census.changed.wait(_LOOK_EVERY_S)
        census.changed.clear()
    raise RunStopped(f"group {rank.group} was left out: {reason}")


def _ended(store: ControlStore) -> bool:
    try:
        return store.get("ended") is not None
    except StoreError:
        return False
