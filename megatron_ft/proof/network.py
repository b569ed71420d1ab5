"""Links between hosts: every message takes its own time, so any two may overtake each other; cut links lose them.

A link has a direction, so partitions can be asymmetric. A message is lost when it is sent into a cut, late when it is
sent while the link is slow; what is on its way when the sender dies arrives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product

from megatron_ft.proof.kernel import Kernel

Host = int
STORE: Host = -1
LATE_SHARE = 0.05
"""Share of the messages that take ten times as long, on every link."""


class Network:
    """Times are in the unit of the kernel; a message takes between ``fastest`` and ``slowest``."""

    def __init__(self, kernel: Kernel, rng: random.Random, fastest: float = 0.05, slowest: float = 0.5) -> None:
        self._kernel, self._rng = kernel, rng
        self._fastest, self._slowest = fastest, slowest
        self._cut: dict[tuple[Host, Host], float] = {}
        self._slow: dict[Host, tuple[float, float]] = {}
        self._loss: tuple[float, float] = (0.0, 0.0)

    def cut(self, sources: Iterable[Host], targets: Iterable[Host], until: float) -> None:
        """Lose everything sent from any source to any target until then."""
        for link in product(sources, targets):
            self._cut[link] = max(until, self._cut.get(link, 0.0))

    def slow(self, host: Host, factor: float, until: float) -> None:
        """Messages from and to ``host`` take ``factor`` times as long until then."""
        self._slow[host] = (factor, until)

    def lose(self, share: float, until: float) -> None:
        """Lose this share of all messages until then."""
        self._loss = (share, until)

    def open(self, source: Host, target: Host) -> bool:
        """Returns True if a message that is sent now arrives."""
        share, until = self._loss
        lost = self._kernel.now < until and self._rng.random() < share
        return source == target or not (lost or self._kernel.now < self._cut.get((source, target), 0.0))

    def send(self, source: Host, target: Host, deliver: Callable[[], None]) -> bool:
        """False when the message is lost, which only a sender that awaits an answer would ever find out."""
        now = self._kernel.now
        delay = self._rng.uniform(self._fastest, self._slowest)
        if self._rng.random() < LATE_SHARE:
            delay *= 10
        for host in (source, target):
            factor, until = self._slow.get(host, (1.0, 0.0))
            delay *= factor if now < until else 1.0
        if not self.open(source, target):
            return False
        self._kernel.after(delay, deliver)
        return True
