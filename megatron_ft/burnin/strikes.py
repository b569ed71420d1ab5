"""What a burn-in strikes, and whom: drawn from a seed, so that the same cluster can be asked the same again."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.errors import ConfigError

KINDS = {
    "rank": "SIGKILL to one rank",
    "agent": "SIGKILL to a node's agent, which takes its ranks along",
    "step": "SIGKILL to everything of ours on a node (scancel)",
    "freeze": "SIGSTOP to a node's agent and all its ranks, for some seconds",
    "down": "the node is set down in Slurm, where that is permitted",
}
DEFAULT = ("rank", "agent", "step", "freeze")
_POINTS = (None, "forward", "backward", "gate", "update")


@dataclass(frozen=True)
class Strike:
    """``after_s``: since all groups were there after the strike before; ``pick``: whom of those that can be struck, 0 to 1;
    ``point``: where a rank is killed, None: wherever it is."""

    number: int
    kind: str
    after_s: float
    pick: float
    point: str | None = None


def draw(count: int, seed: int, every_s: float, kinds: Sequence[str]) -> list[Strike]:
    """Each kind once, in random order, before any comes again. Raises ``ConfigError``."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--kinds has {unknown[0]!r}; it can have: {', '.join(KINDS)}")
    if count < 1 or every_s <= 0 or not kinds:
        raise ConfigError(f"--faults is {count}, --every-s {every_s:g}; there must be a fault, and time between two")
    rng, bag, drawn = random.Random(f"burn-in/{seed}"), [], []
    for number in range(1, count + 1):
        bag = bag or rng.sample(list(kinds), len(kinds))
        kind, after_s = bag.pop(), round(rng.expovariate(1.0 / every_s), 3)
        drawn.append(Strike(number, kind, after_s, rng.random(), rng.choice(_POINTS) if kind == "rank" else None))
    return drawn


@dataclass(frozen=True)
class Victim:
    """``node`` with its ``groups``, or one of them; ``position`` of a rank."""

    node: str
    groups: tuple[int, ...]
    position: int = 0


def choose(strike: Strike, at: Mapping[tuple[int, int], str], spared: Collection[str]) -> Victim | None:
    """``at``: node of each rank that lives; ``spared``: nodes that must not be lost as a whole. None: nobody can be."""
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
