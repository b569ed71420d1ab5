"""A simulated group that comes back: it follows donors until it has a seat and the state its view's step starts from.

Each donor sends the state it stands at, and from then on what every step it commits comes to: in a real run the gradients,
here the state after it. A state counts once all donors have sent it; where two of them do not agree on it, neither is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ft.core.detection.stragglers import Speeds
from megatron_ft.types import GroupId

Donor = tuple[GroupId, int]


@dataclass(frozen=True)
class Outcome:
    """A committed model. ``step`` is the one to go on with, ``attempt`` how often its sums were discarded."""

    step: int
    params: str
    speeds: Speeds
    attempt: int = 0


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
    _stands: int | None = None

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
        found = [sent[self._stands] for sent in self._sent.values()]
        params = found[0].params if len({outcome.params for outcome in found}) == 1 else f"mixed {found}"
        return Outcome(self._stands, params, found[0].speeds)
