"""The narrow port to the store that a run coordinates through, and the words for how it fails.

Two implementations: :mod:`.tcp` (torch's TCPStore, one process) and :mod:`.etcd` (three nodes, survives one). Keys and
values are strings here; :class:`.control.ControlStore` puts JSON, run ids and logs on top.

Failures it assumes: the store is gone, is frozen or cut off (it is silent), or comes back empty. Every call ends within
its bound in all of them. **A call that ended with StoreGone or StoreSilent may still take effect later**, when a frozen
store wakes up and reads what was sent. So everything written through this port must bear that: a key is either written
by one owner with one value, or with ``create`` and a value that carries an id, so that who retries recognises its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from megatron_ft.errors import StoreError

Answer = TypeVar("Answer")

Verify = Callable[[Callable[[str], str | None]], None]
"""Asked with ``get`` on every new connection, before anything else uses it; raises to refuse the connection."""

RETRY_PAUSE_S = (0.02, 1.0)
"""First and longest pause between two attempts to reach a store that is away."""


class StoreGone(StoreError):
    """Nothing listens at the store's address, or the connection broke and no new one can be made."""


class StoreSilent(StoreError):
    """The store took the call and did not answer for ``silent_s`` seconds: frozen, overloaded or cut off."""

    def __init__(self, message: str, silent_s: float) -> None:
        super().__init__(message)
        self.silent_s = silent_s


class StoreLostMemory(StoreError):
    """A store answers, but it is not the memory this run wrote to: it was restarted empty.

    ``restored``: another survivor has begun to rebuild it already. ``ControlStore.restore`` is the cure.
    """

    def __init__(self, message: str, restored: bool) -> None:
        super().__init__(message)
        self.restored = restored


class StoreConflict(StoreError):
    """The rebuilt store holds another view under this group's epoch. There is no cure: this group must stop."""


class Store(Protocol):
    """One client. Calls of one client are one after the other; a thread that waits needs a client of its own.

    All may raise ``StoreGone``, ``StoreSilent`` and whatever the verification of a new connection raises.
    """

    name: str
    """For people: the address."""

    def set(self, key: str, value: str) -> None:
        """Write; when it returns the store has it."""

    def get(self, key: str) -> str | None:
        """The value; None when there is none. Never waits for it."""

    def create(self, key: str, value: str) -> str:
        """Write unless the key exists, atomically; returns what stands there now."""

    def add(self, collection: str, member: str, value: str) -> None:
        """Write one member's value in a collection that is read as a whole; a member's last value counts."""

    def members(self, collection: str) -> dict[str, str]:
        """All of them, with one question, however many."""

    def wait(self, key: str, timeout_s: float) -> str | None:
        """The value as soon as the key exists; None after ``timeout_s``."""

    def beat(self, key: str, ttl_s: float) -> None:
        """The owner's sign of life; repeat it at least every third of ``ttl_s``."""

    def beating(self, key: str) -> bool:
        """Whether the owner of ``key`` has given a sign of life within its ``ttl_s`` (measured, by some, from now on)."""

    def rendezvous(self, prefix: str) -> Any:
        """A torch store of its own, to build a process group through. Its calls have torch's timeouts, not ours."""

    def clone(self) -> Store:
        """Another client of the same store, with a connection of its own that is made when first used."""

    def close(self) -> None:
        """Give back the connection. A later call makes a new one."""

    def cut(self) -> None:
        """From any thread: end the call that waits, if one does, and refuse all that come. At a process's end no thread may
        be left in torch: it would abort it."""


AWAY = (StoreGone, StoreSilent, StoreLostMemory)
"""What passes when the store returns, or when somebody has rebuilt it."""


def patient(
    operation: Callable[[], Answer], *, patience_s: float = float("inf"), interrupted: Callable[[], bool] = lambda: False
) -> Answer | None:
    """Try ``operation`` until the store answers it; None when ``interrupted`` became true first.

    Raises the last error after ``patience_s``. The operation is tried at least once, and must bear to be repeated.
    """
    deadline = time.monotonic() + patience_s
    pause, longest = RETRY_PAUSE_S
    while True:
        try:
            return operation()
        except AWAY:
            if time.monotonic() + pause > deadline:
                raise
        until = time.monotonic() + pause
        while time.monotonic() < until:
            if interrupted():
                return None
            time.sleep(min(0.01, pause))
        pause = min(2 * pause, longest)
