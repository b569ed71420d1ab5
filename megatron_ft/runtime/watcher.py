"""The thread that listens for notices on the control store while the training thread trains.

It blocks in the store client without the GIL, so a fault-free run pays nothing for it. When the store is gone it ends
and says so once: training goes on, and only a recovery needs the store again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron_ft.core import detector
from megatron_ft.errors import StoreError
from megatron_ft.runtime.store import NOTICES, ControlStore

_WAIT_S = 3600.0
"""A wait that ends without an entry is simply begun again."""


class Watcher:
    """Feeds the verdict on every notice, in order, to ``heard``; ``lost`` is told when the store is gone."""

    def __init__(
        self, store: ControlStore, heard: Callable[[detector.Verdict], None], lost: Callable[[StoreError], None]
    ) -> None:
        self._store, self._heard, self._lost = store, heard, lost
        self._thread = threading.Thread(target=self._listen, name="megatron_ft-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _listen(self) -> None:
        index = 0
        try:
            while True:
                entry = self._store.entry(NOTICES, index, _WAIT_S)
                if entry is None:
                    continue
                self._heard(detector.judge(detector.from_json(entry)))
                index += 1
        except StoreError as error:
            self._lost(error)


def announce(store: ControlStore, signal: detector.Signal) -> None:
    """Tell every group. The caller's thread must own ``store``."""
    store.append(NOTICES, detector.to_json(signal))
