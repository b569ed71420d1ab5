"""The faults of a burn-in and their targets, drawn from a seed so that a burn-in can be repeated."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.errors import ConfigError

KINDS = {
    "rank": "SIGKILL to one rank",
    "agent": "SIGKILL to a node's agent, which ends its ranks, too",
    "step": "SIGKILL to all processes of the run on a node (scancel)",
    "freeze": "SIGSTOP to a node's agent and all its ranks, for some seconds",
}
DEFAULT = tuple(KINDS)

_POINTS = (None, "forward", "backward", "gate", "update")


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        number: number of the fault, from 1.
        kind: one of ``KINDS``.
        after_s: time since the recovery from the fault before.
        pick: selects the target among all possible ones; 0 to 1.
        point: point of a step at which a rank is killed; None: at any moment.
    """

    number: int
    kind: str
    after_s: float
    pick: float
    point: str | None = None


def draw(count: int, seed: int, every_s: float, kinds: Sequence[str]) -> list[Strike]:
    """Draws the faults; each kind occurs once, in random order, before any is repeated. Raises ``ConfigError``."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--kinds has {unknown[0]!r}, which is unknown; choose from {', '.join(KINDS)}")
    if count < 1 or every_s <= 0 or not kinds:
        raise ConfigError(
            f"--faults is {count} and --every-s {every_s:g}; both must be greater than 0, and --kinds not empty"
        )
    rng, drawn = random.Random(f"burn-in/{seed}"), []
    bag: list[str] = []
    for number in range(1, count + 1):
        bag = bag or rng.sample(list(kinds), len(kinds))
        kind, after_s = bag.pop(), round(rng.expovariate(1.0 / every_s), 3)
        drawn.append(Strike(number, kind, after_s, rng.random(), rng.choice(_POINTS) if kind == "rank" else None))
    return drawn


@dataclass(frozen=True)
class Victim:
    """The target: a ``node`` with all its ``groups``, or one rank by its group and ``position``."""

    node: str
    groups: tuple[int, ...]
    position: int = 0


def choose(strike: Strike, at: Mapping[tuple[int, int], str], spared: Collection[str]) -> Victim | None:
    """Returns the target of a fault; None when there is none.

    Args:
        strike: the fault.
        at: node of each living rank.
        spared: nodes that must not be lost as a whole.
    """
    if strike.kind == "rank":
        ranks = sorted(at)
        if not ranks:
            return None
        group, position = ranks[int(strike.pick * len(ranks))]
        return Victim(at[group, position], (group,), position)
    nodes = sorted(set(at.values()) - set(spared))
    if not nodes:
        return None
    node = nodes[int(strike.pick * len(nodes))]
    return Victim(node, tuple(sorted({group for (group, _), its in at.items() if its == node})))
