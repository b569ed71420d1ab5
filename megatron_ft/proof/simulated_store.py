"""The simulated control store: the operations of ``run.store`` as one actor behind the network.

It can be dead for a while (requests are lost, clients try again) or frozen (requests wait); what it holds survives both.
A request whose answer was lost is sent again and answered from memory, so it takes effect once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ft.proof.kernel import Future, Kernel
from megatron_ft.proof.network import STORE, Host, Network

RETRY = 2.0
"""A client that gets no answer sends its request again after this time."""

Operation = Callable[["Store"], Any]
"""A request; it returns None if it has to be asked again when something has changed."""


class Request:
    """One operation on its way. It is sent again until it is answered, or its client is gone."""

    def __init__(self, store: Store, client: Host, operation: Operation, gone: Callable[[], bool]) -> None:
        self.store, self.client, self.operation, self.gone = store, client, operation, gone
        self.future = Future()
        self.result: Any = None

    def send(self) -> None:
        if not self.gone() and not self.store.network.send(self.client, STORE, lambda: self.store.arrived(self)):
            self.again()

    def again(self) -> None:
        self.store.kernel.after(RETRY, self.send)

    def serve(self) -> None:
        if self.result is None:
            self.result = self.operation(self.store)
        if self.result is None:
            self.store.parked.append(self)
        elif not self.store.network.send(STORE, self.client, lambda: self.future.resolve(self.result)):
            self.again()


class Store:
    """Keys, and the log of notices.

    ``forgets``: when it dies it comes back empty, and with another ``birth``.
    """

    def __init__(self, kernel: Kernel, network: Network, host: Host = STORE, forgets: bool = False) -> None:
        self.kernel, self.network, self.host, self.forgets = kernel, network, host, forgets
        self.birth = 0
        self.values: dict[tuple, Any] = {}
        self.notices: list[Any] = []
        self.queue: list[Any] = []
        self.parked: list[Any] = []
        self.dead_until = self.frozen_until = 0.0

    @property
    def dead(self) -> bool:
        return self.kernel.now < self.dead_until

    @property
    def frozen(self) -> bool:
        return self.kernel.now < self.frozen_until

    def arrived(self, request: Any) -> None:
        """Serve what has been sent (:class:`Request`, ``store_client.Attempt``), now or when the store is back."""
        if self.dead:
            request.again()
        elif self.frozen:
            self.queue.append(request)
        else:
            request.serve()

    # --- operations, as the server carries them out -------------------------------------------------------------------

    def set(self, key: tuple, value: Any) -> bool:
        self.values[key] = value
        return True

    def create(self, key: tuple, value: Any) -> Any:
        """Compare-and-set: the first value stands; returns what stands."""
        return self.values.setdefault(key, value)

    def append(self, notice: Any) -> bool:
        self.notices.append(notice)
        waiting, self.parked = self.parked, []
        for request in waiting:
            request.serve()
        return True

    def news(self, index: int) -> list[Any] | None:
        """Returns all notices from ``index`` on; a new process reads the whole log."""
        return self.notices[index:] or None

    # --- faults -------------------------------------------------------------------------------------------------------

    def die(self, lasts: float) -> None:
        """The store is gone for this long, with all connections; processes that waited for a notice have to ask again."""
        until = self.kernel.now + lasts
        self.dead_until = max(self.dead_until, until) if self.forgets else until
        if self.forgets:
            self.values, self.notices = {}, []
            self.birth += 1
        broken, self.parked = self.parked + self.queue, []
        self.queue = []
        for request in broken:
            request.again()

    def freeze(self, lasts: float) -> None:
        """The store answers nothing for this long, then everything."""
        self.frozen_until = max(self.frozen_until, self.kernel.now + lasts)
        self.kernel.at(self.frozen_until, self._thaw)

    def _thaw(self) -> None:
        if self.frozen or self.dead:
            return
        waiting, self.queue = self.queue, []
        for request in waiting:
            request.serve()
