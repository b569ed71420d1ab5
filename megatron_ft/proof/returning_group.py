"""A simulated group that comes back: it follows donors until it has a seat and the state its view's step starts from.

A following group has ``RANKS`` ranks, which put a state in place one after the other, so one of them may be behind when all
donors are lost, or have nothing yet. In the rest of the simulated world a group is one process.

Each donor sends the state it stands at, and from then on what every step it commits comes to: in a real run the gradients,
here the state after it. A state counts once all donors have sent it; where two of them do not agree on it, neither is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.types import GroupId

Donor = tuple[GroupId, int]
RANKS = 2


@dataclass(frozen=True)
class Outcome:
    """A committed model. ``step`` is the one to go on with, ``attempt`` how often its sums were discarded."""

    step: int
    params: str
    speeds: Speeds
    attempt: int = 0
    epoch: int = -1
    """The epoch in which the sender has committed the step before; -1: it took the state from another group."""


@dataclass
class Following:
    """The data that one incarnation has received. ``asked``: when it asked for a seat; ``arrived`` is called when there
    is news."""

    donors: tuple[Donor, ...]
    since: float
    asked: float | None = None
    lost: set[Donor] = field(default_factory=set)
    arrived: Callable[[], None] = lambda: None
    _sent: dict[Donor, dict[int, Outcome]] = field(default_factory=dict)
    held: list[list[tuple[float, Outcome | None]]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    """For each rank the states that it has put in place, each with the time; None: one that may be of two versions."""
    _stands: int | None = None
    _one_version: bool = True

    def hold(self, outcome: Outcome, now: float, lags: Sequence[float]) -> None:
        """All ranks of the group put a state in place, each when it has finished with the one before."""
        for states, lag in zip(self.held, lags, strict=True):
            states.append((max([now, *(at for at, _ in states)]) + lag, outcome if self._one_version else None))

    def holds(self, rank: int, now: float) -> Outcome | None:
        """Return what a rank holds at that time."""
        return next((outcome for at, outcome in reversed(self.held[rank]) if at <= now), None)

    def take(self, donor: Donor, outcome: Outcome) -> None:
        self._sent.setdefault(donor, {})[outcome.step] = outcome
        self.arrived()

    def lose(self, donor: Donor) -> None:
        """The connection to it is gone; what it has sent is there."""
        self.lost.add(donor)
        self.arrived()

    @property
    def newest(self) -> int:
        """The latest step that a donor was known to work on."""
        return max(step for sent in self._sent.values() for step in sent)

    def advance(self, limit: int | None = None) -> Outcome | None:
        """Go on to the latest state that all have sent, step by step, but not beyond ``limit``; None while there is none."""
        if len(self._sent) < len(self.donors):
            return None
        if self._stands is None:
            self._stands = max(min(sent) for sent in self._sent.values())
        if not all(self._stands in sent for sent in self._sent.values()):
            return None
        while self._stands != limit and all(self._stands + 1 in sent for sent in self._sent.values()):
            self._stands += 1
            self._one_version &= len({sent[self._stands].epoch for sent in self._sent.values()}) == 1
        found = [sent[self._stands] for sent in self._sent.values()]
        agree = len({outcome.params for outcome in found}) == 1
        self._one_version &= agree  # a real receiver compares the checksums of its donors' states
        params = found[0].params if agree else f"mixed {found}"
        return Outcome(self._stands, params, found[0].speeds)
