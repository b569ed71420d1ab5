"""Delete what is no longer needed from the control store (``core.protocol.key_lifetimes``), and let late readers go on.

One agent does it, in a thread of its own: the agent on whose host the lowest live group has its position 0. When that
host is lost, so is its group, and the next view names another one. Two agents that collect at the same time do no harm.

The order makes it safe: first ``kept/<index>`` is written, the notices before ``index`` that still matter; then the
floor is raised; only then is anything below it deleted. A reader that finds nothing looks at the floor.

Failures it assumes: the store is gone or silent for a while (the collection is made later), or comes back empty (it begins
anew). A call that takes effect late leaves at most a key that the next collection finds: a collection lists all keys that
exist.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from megatron_ft.core.protocol import key_lifetimes, signals
from megatron_ft.errors import StoreError
from megatron_ft.run.store import NOTICES, ControlStore
from megatron_ft.types import View
from megatron_ft.utils.vital_thread import described

_log = logging.getLogger(__name__)

MANY = 256
"""A collection is made after this number of notices without a new view: checkpoints write some while nothing is lost."""
_AGAIN_S = 60.0
"""A collection that failed is tried again after that time, or at the next view."""

_END_S = 5.0
"""The longest wait for a collection that is under way at the end; an etcd node may be silent."""


def kept_key(index: int) -> str:
    """Return the key of the notices before ``index`` that still matter."""
    return f"kept/{index}"


def skipped(store: ControlStore, index: int) -> tuple[int, list[dict[str, Any]]] | None:
    """Return, for a reader that waits for notice ``index``, None if that can still come; otherwise the index where to
    read on, and the notices to take in instead of the earlier entries. The reader may have read some of them already."""
    while (floor := store.floor()).index > index:
        said = store.get(kept_key(floor.index))
        if said is not None:
            return floor.index, said
        if store.floor() == floor:
            return None  # the store is being rebuilt; the reader asks again
    return None


def find_view(store: ControlStore, epoch: int) -> Any | None:
    """Return the wire form of the view of ``epoch``, or of the oldest one that is left if that was deleted; None if it can
    still come."""
    found = store.get(f"view/{epoch}")
    while found is None and (floor := store.floor()).epoch > epoch:
        epoch = floor.epoch
        found = store.get(f"view/{epoch}")
    return found


class GarbageCollector:
    """The garbage collector of one agent.

    Args:
        store: a client that only the collector uses from here on.
        mine: returns whether this host has position 0 of a group, and so collects when that group is the lowest.
        view: the first view of the run.
    """

    def __init__(self, store: ControlStore, mine: Callable[[int], bool], view: View) -> None:
        self._store, self._mine, self._view = store, mine, view
        self._stirred, self._over = threading.Event(), False
        self._old: list[signals.Signal]  # notices before ``_end`` that matter
        self._recent: list[signals.Signal]  # notices from there to ``_read``
        self._end: int
        self._read: int
        self._memory: str | None
        self._forget()
        self._notices_heard = 0
        self._thread = threading.Thread(target=self._run, name="megatron_ft-gc", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Take in any notice, and return at once. To be called by one thread."""
        self._notices_heard += 1
        if isinstance(verdict, signals.ViewAgreed) or self._notices_heard >= MANY:
            self._notices_heard = 0
            self._stirred.set()

    def stop(self) -> None:
        """End the thread."""
        self._over = True
        self._stirred.set()
        self._store.cut()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        failed = False
        # no limit: a thread of its own; whoever has started it tells it to stop
        while self._stirred.wait(_AGAIN_S if failed else None) or failed:
            self._stirred.clear()
            if self._over:
                return
            try:
                self.collect()
                failed = False
            except StoreError:
                failed = True
            except Exception as error:  # a bug: without collections, the store of a run of weeks outgrows its host
                failed = True
                _log.warning(
                    f"a garbage collection of the control store {described(error)}; it is tried again in {_AGAIN_S:g} s"
                )

    def collect(self) -> None:
        """Look once for what can be deleted, and delete it if this host is the collecting one. Raises ``StoreError``."""
        if self._memory != self._store.memory:
            self._forget()
        while (raw := find_view(self._store, self._view.epoch + 1)) is not None:
            self._view = View.from_json(raw)
        if not self._view.live or not self._mine(min(self._view.live)):
            return
        self._read_notices()
        index, end = self._end, self._read
        kept = key_lifetimes.kept(self._old, self._view)
        if index:
            self._store.set(kept_key(index), [signals.to_json(signal) for signal in kept])
        floor = self._store.raise_floor(key_lifetimes.floor_of(self._view, index))
        if floor.index > index:
            self._forget()  # another agent was faster, and is right
            return
        everything = (*kept, *self._recent)
        present = key_lifetimes.Present(self._view, floor, key_lifetimes.graves(everything))
        self._store.delete([key for key in self._store.listed() if key_lifetimes.expired(key, present)])
        self._old, self._recent, self._end = list(everything), [], end  # the next one deletes the recent ones

    def _forget(self) -> None:
        self._old, self._recent = [], []
        self._end = self._read = 0
        self._memory = self._store.memory

    def _read_notices(self) -> None:
        found = skipped(self._store, self._read)
        if found is not None:
            self._read, said = found
            self._end = self._read
            self._old, self._recent = list(map(signals.from_json, said)), []
        while (entry := self._store.get(f"{NOTICES}/{self._read}")) is not None:
            self._read += 1
            self._recent.append(signals.from_json(entry))
