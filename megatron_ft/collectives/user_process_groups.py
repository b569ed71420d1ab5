"""Process groups that the user's own engine keeps inside a group (tensor, pipeline, inner data parallelism).

Every rank that is in one of them passes it to ``Session.watch``. When NCCL's watchdog, or the timing of gloo's works,
finds that one is broken, this rank reports its group as lost. When the group is lost for any other reason, its healthy
ranks abort their process groups, so that no rank stays stuck in an NCCL collective whose other end is dead. (gloo's
abort does nothing: such a rank stays stuck until gloo's own timeout.)

Failures it assumes: the store is away when there is something to report, for any time; an abort that hangs.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from megatron_ft.collectives import nccl_watchdog
from megatron_ft.coordination import watcher
from megatron_ft.coordination.store import ControlStore, patient
from megatron_ft.core.protocol import signals

_log = logging.getLogger(__name__)

_ABORT_S = 5.0
_SHOWN = 4
"""Number of collectives in the reason; the rank's log has all that are known."""


class UserProcessGroups:
    """One rank's process groups. ``patience_s``: how long an absent store is retried; ``incarnation``: the group's."""

    def __init__(
        self,
        group: int,
        position: int,
        store: ControlStore,
        patience_s: float,
        incarnation: int = 0,
        host_rank: int | None = None,
    ) -> None:
        self._group, self._position, self._incarnation, self._host_rank = group, position, incarnation, host_rank
        self._store, self._patience_s = store, patience_s
        self._watched: list[tuple[nccl_watchdog.Watchdog, Mapping[str, Any]]] = []

    def watch(self, groups: Mapping[str, Any], timeout_s: float) -> nccl_watchdog.Watchdog:
        """See ``Session.watch``."""
        dog = nccl_watchdog.Watchdog(0, groups, self._tell, timeout_s)
        self._watched.append((dog, dict(groups)))
        return dog

    def _tell(self, event: nccl_watchdog.WatchdogEvent) -> None:
        """Report a broken process group, in the watchdog's thread."""
        last = "; ".join(event.collectives[-_SHOWN:])
        why = f"reports a broken process group ({event.kind}): {event.message}" + (f" [last: {last}]" if last else "")
        _log.info("\n  ".join([f"group {self._group}: rank {self._position} {why}", *event.collectives]))
        said = signals.RankUnresponsive(
            group=self._group,
            position=self._position,
            pid=os.getpid(),
            host=socket.gethostname(),
            why=why,
            incarnation=self._incarnation,
            host_rank=self._host_rank,
        )
        store = self._store.clone()
        patient(lambda: watcher.announce(store, said), patience_s=self._patience_s)

    def abort(self) -> None:
        """Release the threads that wait in one of the process groups: the group is lost. Callable from any thread."""
        watched, self._watched = self._watched, []
        for dog, groups in watched:
            dog.close(timeout_s=0)
            for name, group in groups.items():
                if detail := nccl_watchdog.abort(group, _ABORT_S):
                    _log.info(f"group {self._group}: process group {name} is left behind: {detail}")
