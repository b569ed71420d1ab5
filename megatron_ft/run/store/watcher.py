"""The thread that listens for notices on the control store while the training thread trains.

It blocks in the store client without the GIL, so a fault-free run pays nothing for it.

Failures it assumes: the store is gone, silent, or comes back empty, any number of times. It never ends for that: it keeps
trying with growing pauses and tells each change once. Training goes on meanwhile; only a recovery needs the store. A bug
in what it calls ends the thread, and so the rank: without it, all other groups would wait for this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megatron_ft.core.protocol import group_locations, signals
from megatron_ft.errors import StoreError
from megatron_ft.run.store import AWAY, NOTICES, ControlStore, StoreConflict, StoreLostMemory, garbage_collection
from megatron_ft.run.store.base import RETRY_PAUSE_S
from megatron_ft.utils.vital_thread import VitalThread

_WAIT_S = 120.0
"""A wait that ends without an entry is begun again, by each of perhaps 100,000 processes. A store that freezes meanwhile is
noticed that much later."""

_SOON_S = 1.0
"""The length of the first wait after a notice: a process that lags behind notices then that the next ones are gone."""


def _nothing(*_: object) -> None:
    return None


class Watcher:
    """Listens on ``store``, which is its own from here on. The functions are called in the watcher's thread.

    Args:
        heard: gets the verdict on every notice, in order. After ``empty`` the log begins again, and what is announced
            again is heard again.
        lost: the store is away (``StoreGone``, ``StoreSilent``) or came back empty (``StoreLostMemory``); called once,
            until ``back``. It gets ``StoreConflict`` when there is no remedy, and the watcher ends.
        back: the store answers again, with its memory or with the one that was rebuilt.
        empty: the store answers and has forgotten the run. To rebuild it, call ``restore`` of the store that it gets.
            Without it, the watcher waits until another client of this process has done so.
        told: gets every notice itself, before its verdicts.
        failed: gets any other exception, of these functions too, and the watcher ends. By default it ends this rank.
    """

    def __init__(
        self,
        store: ControlStore,
        heard: Callable[[signals.Verdict], None],
        lost: Callable[[StoreError], None],
        back: Callable[[], None] = _nothing,
        empty: Callable[[ControlStore], None] = _nothing,
        wait_s: float = _WAIT_S,
        told: Callable[[signals.Signal], None] = _nothing,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._wait_s, self._told = wait_s, told
        self._store, self._heard, self._lost, self._back, self._empty = store, heard, lost, back, empty
        self._stopped = threading.Event()
        self._away = False
        self._index, self._memory = 0, store.memory
        self._quiet = False
        self._places = group_locations.GroupLocations()
        self._thread = VitalThread(self._listen, "megatron_ft-watcher", failed=failed)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the watcher; no function is called any more."""
        self._stopped.set()
        self._store.cut()

    def _listen(self) -> None:
        pause, longest = RETRY_PAUSE_S
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stopped.is_set():
            try:
                self._turn()
                pause = RETRY_PAUSE_S[0]
            except StoreConflict as error:
                self._lost(error)
                return
            except AWAY as error:
                if not self._away and not self._stopped.is_set():
                    self._away = True
                    self._lost(error)
                self._stopped.wait(pause)
                pause = min(2 * pause, longest)

    def _turn(self) -> None:
        """Look for the next notice once, after whatever is needed to get there."""
        if self._away:
            self._return()
        self._follow_memory()
        if self._index == 0 or self._quiet:  # notices may have been deleted unread
            self._skip()
        self._follow_memory()
        entry = self._store.entry(NOTICES, self._index, self._wait_s if self._quiet else min(_SOON_S, self._wait_s))
        # If the store was rebuilt meanwhile, the entry belongs to another log.
        if not self._follow_memory() and not self._stopped.is_set():
            self._quiet = entry is None
            if entry is not None:
                self._index += 1
                self._take(entry)

    def _skip(self) -> None:
        memory, found = self._memory, garbage_collection.skipped(self._store, self._index)
        if found is None or self._store.memory != memory:
            return
        self._index, kept = found
        for entry in kept:
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        signal = signals.from_json(entry)
        self._told(signal)
        self._places, verdicts = group_locations.apply(self._places, signal)
        for verdict in verdicts:
            self._heard(verdict)

    def _follow_memory(self) -> bool:
        """Return whether the store was rebuilt since the last look; its log then begins again."""
        known, self._memory = self._memory, self._store.memory
        rebuilt = known not in (None, self._memory)
        if rebuilt:
            self._index = 0
        return rebuilt

    def _return(self) -> None:
        """Send a request that is answered at once, so that ``back`` is not called only after a wait."""
        try:
            self._store.get(NOTICES)
        except StoreLostMemory:
            self._empty(self._store)
            self._store.get(NOTICES)
        self._away = False
        self._back()


def announce(store: ControlStore, signal: signals.Signal, by: str | None = None) -> None:
    """Tell every group. The caller's thread must own ``store``.

    A caller that may have to try again passes the same ``by`` each time (any unique string): the notice is then there once.
    """
    store.append(NOTICES, signals.to_json(signal), signals.once(signal) or by)
