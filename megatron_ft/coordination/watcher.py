"""The thread that listens for notices on the control store while the training thread trains.

It blocks in the store client without the GIL, so a fault-free run pays nothing for it.

Failures it assumes: the store is gone, silent, or comes back empty, any number of times. It never ends for that: it keeps
trying with growing pauses and tells each change once. Training goes on meanwhile; only a recovery needs the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron_ft.core import detector, places
from megatron_ft.errors import StoreError
from megatron_ft.runtime.store import AWAY, NOTICES, ControlStore, StoreConflict, StoreLostMemory
from megatron_ft.runtime.store.port import RETRY_PAUSE_S

_WAIT_S = 120.0
"""A wait that ends without an entry is begun again, by each of perhaps 100,000 processes. A store that freezes meanwhile is
noticed that much later."""


def _nothing(*_: object) -> None:
    return None


class Watcher:
    """Listens on ``store``, which is its own from here on. The functions are called in the watcher's thread.

    Args:
        heard: gets the verdict on every notice, in order. After ``empty`` the log begins again, and what is announced
            again is heard again.
        lost: the store is away (``StoreGone``, ``StoreSilent``) or came back empty (``StoreLostMemory``); told once, until
            ``back``. ``StoreConflict`` is told when there is no cure, and the watcher ends.
        back: the store answers again, with its memory or with the one that was rebuilt.
        empty: the store answers and has forgotten the run. To rebuild it: call ``store.restore`` on what it is handed. Not
            given, the watcher waits until another client of this process has done so.
    """

    def __init__(
        self,
        store: ControlStore,
        heard: Callable[[detector.Verdict], None],
        lost: Callable[[StoreError], None],
        back: Callable[[], None] = _nothing,
        empty: Callable[[ControlStore], None] = _nothing,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._wait_s = wait_s
        self._store, self._heard, self._lost, self._back, self._empty = store, heard, lost, back, empty
        self._stopped = threading.Event()
        self._away = False
        self._index, self._memory = 0, store.memory
        self._places = places.Places()
        self._thread = threading.Thread(target=self._listen, name="megatron_ft-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends it; nothing is told any more."""
        self._stopped.set()
        self._store.cut()

    def _listen(self) -> None:
        pause, longest = RETRY_PAUSE_S
        while not self._stopped.is_set():
            try:
                self._turn()
                pause = RETRY_PAUSE_S[0]
            except StoreConflict as error:
                self._lost(error)
                return
            except AWAY as error:
                self._leave(error)
                self._stopped.wait(pause)
                pause = min(2 * pause, longest)

    def _turn(self) -> None:
        """Look for the next notice once, after whatever is needed to get there."""
        if self._away:
            self._return()
        self._follow_memory()
        entry = self._store.entry(NOTICES, self._index, self._wait_s)
        # Rebuilt meanwhile: what was read belongs to another log.
        if not self._follow_memory() and entry is not None and not self._stopped.is_set():
            self._index += 1
            self._places, verdicts = places.hear(self._places, detector.from_json(entry))
            for verdict in verdicts:
                self._heard(verdict)

    def _follow_memory(self) -> bool:
        """Whether the store was rebuilt since the last look; its log then begins again."""
        known, self._memory = self._memory, self._store.memory
        rebuilt = known not in (None, self._memory)
        if rebuilt:
            self._index = 0
        return rebuilt

    def _return(self) -> None:
        """Ask for something that is answered at once, so that ``back`` is not told only after a wait."""
        try:
            self._store.get(NOTICES)
        except StoreLostMemory:
            self._empty(self._store)
            self._store.get(NOTICES)
        self._away = False
        self._back()

    def _leave(self, error: StoreError) -> None:
        if not self._away and not self._stopped.is_set():
            self._away = True
            self._lost(error)


def announce(store: ControlStore, signal: detector.Signal, by: str | None = None) -> None:
    """Tell every group. The caller's thread must own ``store``.

    Who may have to try again passes the same ``by`` each time (any unique string): the notice is then there once.
    """
    store.append(NOTICES, detector.to_json(signal), detector.once(signal) or by)
