"""The narrow port to the store that a run coordinates through, and the errors for the ways in which it fails.

Two implementations: :mod:`.tcp_store` (torch's TCPStore, one process) and :mod:`.etcd_store` (three nodes, survives
one). Keys and values are strings here (bytes that are no UTF-8 as surrogates); :class:`.run_store.ControlStore` puts
JSON, run ids and logs on top.

Failures it assumes: the store is gone, is frozen or cut off (it is silent), or comes back empty. Every call ends within
its bound in all of them. **A call that ended with StoreGone or StoreSilent may still take effect later**, when a frozen
store wakes up and reads what was sent. So every write through this port must tolerate that: a key is either written by
one owner with one value, or with ``create`` and a value that carries an id, so that a retry recognises its own value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from megatron_ft.errors import StoreError

Answer = TypeVar("Answer")

Verify = Callable[[Callable[[str], str | None]], None]
"""Called with ``get`` on every new connection, before any other use of it; raises to refuse the connection."""

RETRY_PAUSE_S = (0.02, 1.0)
"""First and longest pause between two attempts to reach a store that is away."""


class StoreGone(StoreError):
    """Nothing listens at the store's address, or the connection broke and no new one can be made."""


class StoreSilent(StoreError):
    """The store took the call and did not answer in time: frozen, overloaded or cut off."""


class StoreLostMemory(StoreError):
    """A store answers, but it is not the memory this run wrote to: it was restarted empty. ``ControlStore.restore`` is the
    remedy, also when another survivor has begun to rebuild it."""


class StoreConflict(StoreError):
    """The rebuilt store holds another view under this group's epoch. There is no remedy: this group must stop."""


def decode(value: bytes) -> str:
    """Return a value as text; any bytes can be decoded, because any process can write some."""
    return value.decode(errors="surrogateescape")


def encode(text: str) -> bytes:
    """Return the bytes that :func:`decode` turns into that text."""
    return text.encode(errors="surrogateescape")


class Store(Protocol):
    """One client. Its calls are carried out one after the other; a thread that waits needs a client of its own.

    All may raise ``StoreGone``, ``StoreSilent`` and whatever the verification of a new connection raises.
    """

    @property
    def name(self) -> str:
        """The store's address, for people."""

    def set(self, key: str, value: str) -> None:
        """Write; when the call returns the store has the value."""

    def get(self, key: str) -> str | None:
        """Return the value, or None when there is none, without waiting for it."""

    def create(self, key: str, value: str) -> str:
        """Write unless the key exists, atomically; return what stands there now."""

    def add(self, collection: str, member: str, value: str) -> None:
        """Write one member's value in a collection that is read as a whole; a member's last value counts."""

    def members(self, collection: str) -> list[tuple[str, str]]:
        """Return all members and their values, in the order in which they were written, in one request for any number."""

    def swap(self, key: str, old: str | None, new: str) -> str | None:
        """Write ``new`` if ``old`` stands there (None: no value), atomically; return what stands there now, if anything.

        A call that takes effect late changes nothing, as long as no value comes twice.
        """

    def keys(self, prefix: str) -> list[str]:
        """Return all keys with that prefix, in one answer. Members of collections may be keys of their own."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove these keys. Keys that do not exist are no error."""

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return the value as soon as the key exists; None after ``timeout_s``, or when the key was deleted."""

    def rendezvous(self, prefix: str) -> Any:
        """Return a torch store for building a process group. Its calls have torch's timeouts, not this client's."""

    def clone(self) -> Store:
        """Return another client of the same store, with a connection of its own that is made when first used."""

    def close(self) -> None:
        """Give back the connection. A later call makes a new one."""

    def cut(self) -> None:
        """End the call that waits, if one does, and refuse all later calls. Any thread may call it. At a process's end
        no thread may be left in torch: it would abort the process."""


AWAY = (StoreGone, StoreSilent, StoreLostMemory)
"""The errors that pass when the store returns, or when another process has rebuilt it."""


def patient(
    operation: Callable[[], Answer],
    *,
    patience_s: float = float("inf"),
    interrupted: Callable[[], bool] = lambda: False,
) -> Answer:
    """Try ``operation`` until the store answers it. Raises the last error after ``patience_s``, or when ``interrupted`` has
    become true. The operation is tried at least once, and must tolerate repetition."""
    deadline = time.monotonic() + patience_s
    pause, longest = RETRY_PAUSE_S
    while True:
        try:
            return operation()
        except AWAY:
            until = time.monotonic() + pause
            if until > deadline:
                raise
            while time.monotonic() < until:
                if interrupted():
                    raise
                time.sleep(min(0.01, pause))
        pause = min(2 * pause, longest)
