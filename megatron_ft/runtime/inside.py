"""Process groups that the user's own engine keeps inside a group (tensor, pipeline, inner data parallelism).

Every rank that is in one of them hands it over (``Session.watch``). When NCCL's watchdog, or the timing of gloo's works,
finds that one is broken, the group is out by the word of this rank; and when the group is out for any other reason, its
healthy ranks abort theirs, so that nobody stays stuck in an NCCL collective whose other end is dead. (gloo's abort does
nothing: such a rank stays stuck until gloo's own timeout.)

Failures it assumes: the store is away when there is something to tell, for as long as it likes; an abort that hangs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from megatron_ft.core import detector
from megatron_ft.runtime import watchdog, watcher
from megatron_ft.runtime.store import ControlStore, patient

_ABORT_S = 5.0
_SHOWN = 4
"""Collectives in the reason; the rank's log has all that are known."""


class Inside:
    """One rank's. ``patience_s``: how long a store that is away is asked again; ``incarnation``: of its group."""

    def __init__(
        self, group: int, position: int, store: ControlStore, patience_s: float, incarnation: int = 0
    ) -> None:
        self._group, self._position, self._incarnation = group, position, incarnation
        self._store, self._patience_s = store, patience_s
        self._watched: list[tuple[watchdog.Watchdog, Mapping[str, Any]]] = []

    def watch(self, groups: Mapping[str, Any], timeout_s: float) -> watchdog.Watchdog:
        """See ``Session.watch``."""
        dog = watchdog.Watchdog(0, groups, self._tell, timeout_s)
        self._watched.append((dog, dict(groups)))
        return dog

    def _tell(self, event: watchdog.WatchdogEvent) -> None:
        """In the watchdog's thread."""
        last = "; ".join(event.collectives[-_SHOWN:])
        why = f"reports a broken process group ({event.kind}): {event.message}" + (f" [last: {last}]" if last else "")
        print(f"megatron_ft: group {self._group}: rank {self._position} {why}", *event.collectives, sep="\n  ", flush=True)
        here = (self._group, self._position, os.getpid(), socket.gethostname())
        said = detector.GivenUp(*here, why, self._incarnation)
        store = self._store.clone()
        patient(lambda: watcher.announce(store, said), patience_s=self._patience_s)

    def abort(self) -> None:
        """The group is out: let go of whoever waits in one of them. Any thread."""
        watched, self._watched = self._watched, []
        for dog, groups in watched:
            dog.close(timeout_s=0)
            for name, group in groups.items():
                if detail := watchdog.abort(group, _ABORT_S):
                    print(f"megatron_ft: group {self._group}: process group {name} is left behind: {detail}", flush=True)
