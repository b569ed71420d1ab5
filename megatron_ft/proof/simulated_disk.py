"""The simulated run directory: the log of claims, in which entry n can be created once and only after entry n - 1.

It can be slow, or away, for some hosts or for all. A request that finds it away waits, as on a hard mount, and takes effect
when the directory is back. A request that has taken effect may be answered much later, or be told that the file exists,
because its client has sent it twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.proof.kernel import Future, Kernel
from megatron_ft.proof.network import Host

SENT_TWICE_SHARE = 0.1
FASTEST, SLOWEST = 0.01, 0.2


class Disk:
    """Times are in the unit of the kernel; a request takes between two times ``FASTEST`` and two times ``SLOWEST``.

    ``told`` hears of every claim that is made, with its makers (see :meth:`create`).
    """

    def __init__(self, kernel: Kernel, rng: random.Random, told: Callable[..., None]) -> None:
        self._kernel, self._rng, self._told = kernel, rng, told
        self._away: dict[Host, float] = {}
        self._slow: dict[Host, float] = {}
        self.log: list[Claim] = []

    def away(self, hosts: Iterable[Host], until: float) -> None:
        """No request of these hosts takes effect, or is answered, until then."""
        self._away.update({host: max(until, self._away.get(host, 0.0)) for host in hosts})

    def slow(self, hosts: Iterable[Host], until: float) -> None:
        """Requests of these hosts take twenty times as long until then."""
        self._slow.update(dict.fromkeys(hosts, until))

    def read(self, host: Host, start: int) -> Future:
        """The claims from number ``start`` on."""
        return self._request(host, lambda: self.log[start:])

    def create(self, host: Host, claim: Claim, makers: Iterable[tuple[int, int]]) -> Future:
        """Returns True if the claim was made; False is possible even if it was. ``makers``: the seats that claim."""

        def effect() -> bool:
            assert claim.number <= len(self.log), f"claim {claim.number} is made when {len(self.log)} are there"
            if claim.number < len(self.log):
                return False
            self.log.append(claim)
            self._told(claim, sorted(makers))
            return self._rng.random() > SENT_TWICE_SHARE

        return self._request(host, effect)

    def _request(self, host: Host, effect: Callable[[], Any]) -> Future:
        future = Future()
        arrive = lambda: self._when_there(host, lambda: self._after(host, effect(), future))  # noqa: E731
        self._kernel.after(self._delay(host), arrive)
        return future

    def _after(self, host: Host, result: Any, future: Future) -> None:
        self._kernel.after(self._delay(host), lambda: self._when_there(host, lambda: future.resolve(result)))

    def _when_there(self, host: Host, call: Callable[[], None]) -> None:
        until = self._away.get(host, 0.0)
        if self._kernel.now < until:
            self._kernel.at(until, lambda: self._when_there(host, call))
        else:
            call()

    def _delay(self, host: Host) -> float:
        slow = 20.0 if self._kernel.now < self._slow.get(host, 0.0) else 1.0
        return slow * self._rng.uniform(FASTEST, SLOWEST)
