"""What a simulated history is made of: the job and a list of faults, both drawn from one seed.

A scenario is plain data: a shorter list of faults with the same seed is a scenario too, which is how a failing one is
shrunk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_ft.sim.network import STORE

REPORT_TIMEOUT = 15.0
PATIENCE = 25.0


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``targets`` at ``at`` and lasts for ``lasts`` where that means anything.

    kill: the process dies, its agent says so       vanish: its host is gone too, nobody says so
    freeze: stopped, then goes on                   accuse: everybody is told that it is dead, it is not
    break: its connections reset, nobody died       start: a new incarnation asks for a seat
    cut: what the first sends to the second is lost isolate: it sends and receives nothing
    slow: its messages take ten times as long       lose: a third of all messages are lost
    store dies, store freezes: it comes back with what it held
    """

    at: float
    kind: str
    targets: tuple[int, ...] = ()
    lasts: float = 0.0

    def __str__(self) -> str:
        names = " ".join("store" if target == STORE else str(target) for target in self.targets)
        lasts = f" for {self.lasts:.2f}" if self.lasts else ""
        return f"at {self.at:.2f}: {self.kind}{' ' + names if names else ''}{lasts}"


@dataclass(frozen=True)
class Scenario:
    """``redundancy`` 0 means that every group hosts every shard; see ``core.recovery.Job`` for the rest."""

    seed: int
    groups: int
    per_shard: int
    buckets: int
    steps: int
    min_groups: int = 1
    redundancy: int = 0
    faults: tuple[Fault, ...] = ()

    @property
    def quiet(self) -> float:
        """From here on nothing more happens."""
        return max((fault.at + fault.lasts for fault in self.faults), default=0.0)

    def __str__(self) -> str:
        hosting = f"redundancy {self.redundancy}" if self.redundancy else "every group hosts everything"
        size = f"{self.groups} groups, {self.per_shard} microbatches each, {self.buckets} buckets, {self.steps} steps"
        return f"seed {self.seed}: {size}, min_groups {self.min_groups}, {hosting}"


_ANY = {
    "kill": 6,
    "vanish": 2,
    "rack": 1,
    "freeze": 3,
    "accuse": 2,
    "break": 2,
    "start": 6,
    "cut": 3,
    "isolate": 1,
    "slow": 1,
    "lose": 1,
    "store dies": 1,
    "store freezes": 1,
}
GENTLE = {"kill": 4, "break": 2, "start": 4, "store dies": 3, "store freezes": 3}
"""Faults that are no reason to leave out anybody who lives; a third of all scenarios has no others."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed: up to 5 groups, up to 7 faults, half of them close upon another, some all at the start.

    In a quarter of them groups come back, and meet the next fault on their way (:func:`_coming_back`), in a longer job.
    """
    rng = random.Random(seed)
    groups = rng.randint(1, 5)
    returns = rng.random() < 0.25
    scenario = Scenario(
        seed=seed,
        groups=groups,
        per_shard=1 if returns else rng.randint(1, 3),
        buckets=rng.randint(1, 2 if returns else 3),
        steps=rng.randint(4, 8) if returns else rng.randint(1, 4),
        min_groups=2 if groups > 2 and rng.random() < 0.1 else 1,
        redundancy=rng.choice([0, 0, 1, 2, 2]) if groups > 2 else 0,
    )
    weights = GENTLE if rng.random() < 1 / 3 else _ANY
    length = rng.choice([scenario.steps * (scenario.per_shard + 3.0)] * 4 + [5.0])
    faults: list[Fault] = []
    if returns:
        for _ in range(rng.randint(1, 2)):
            faults += _coming_back(rng, rng.uniform(0, 0.5 * length), groups, weights is GENTLE)
    at = 0.0
    for _ in range(rng.randint(0, 2 if returns else 7)):
        at = at + rng.uniform(0, 6) if faults and rng.random() < 0.5 else rng.uniform(0, 1.3 * length)
        faults += _fault(rng, rng.choices(list(weights), list(weights.values()))[0], at, groups)
    return Scenario(**{**vars(scenario), "faults": tuple(sorted(faults, key=lambda fault: fault.at))})


def _coming_back(rng: random.Random, at: float, groups: int, gentle: bool) -> list[Fault]:
    """One or two groups are lost, or new, and start; soon after one of those they may follow, or they themselves, fail; and
    those may start again.
    """
    coming = rng.sample(range(groups + 2), rng.choice([1, 1, 1, 2]))
    faults = [Fault(at + rng.uniform(0, 1), "kill", (group,)) for group in coming if group < groups]
    for _ in range(rng.randint(1, 4)):
        at += rng.uniform(1, 6)
        faults += [Fault(at + rng.uniform(0, 1.5), "start", (group,)) for group in coming]
        at += rng.uniform(0.5, 16)
        if rng.random() < 0.3:
            continue
        kind = rng.choice(["kill", "kill", "break"] if gentle else ["kill", "kill", "vanish", "freeze", "accuse", "break"])
        victim = rng.choice([*coming, *coming, *range(groups)])
        faults.append(Fault(at, kind, (victim,), rng.uniform(1, 30) if kind == "freeze" else 0.0))
        coming = sorted({*coming, victim})[: rng.randint(1, 3)] if kind in ("kill", "vanish") else coming
    return faults


def _fault(rng: random.Random, kind: str, at: float, groups: int) -> list[Fault]:
    group = rng.randrange(groups)
    lasts = rng.choice([rng.uniform(0.1, 5), rng.uniform(5, 60)])
    match kind:
        case "rack":  # neighbours die together, with their agents or without
            how = rng.choice(["kill", "vanish"])
            return [Fault(at, how, (member,)) for member in range(group // 2 * 2, min(group // 2 * 2 + 2, groups))]
        case "start":
            return [Fault(at, "start", (rng.randrange(groups + 2),))]
        case "cut":
            ends = rng.sample([STORE, *range(groups)], 2)
            return [Fault(at, "cut", tuple(ends), lasts)]
        case "kill" | "vanish" | "accuse" | "break":
            return [Fault(at, kind, (group,))]
        case "freeze" | "isolate" | "slow":
            return [Fault(at, kind, (group,), lasts)]
    return [Fault(at, kind, (), lasts)]
