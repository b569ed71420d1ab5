"""The scenario of a simulated history: the job and a list of faults, both drawn from one seed.

A scenario is plain data: a shorter list of faults with the same seed is a scenario too, which is how a failing one is
shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ft.core.scheduling.policies import DROP, POLICIES, REPLICATION, SLACK, SPARE, STACKED_QUOTA
from megatron_ft.proof.network import STORE

DRAWN = (*POLICIES, SLACK)
EACH = "each"
"""The names that :func:`draw_of` takes are those of ``DRAWN``, and ``EACH``."""

REPORT_TIMEOUT = 15.0
PATIENCE = 25.0


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``targets`` at ``at`` and lasts for ``lasts`` where that means anything.

    kill: the process dies, its agent says so       vanish: its host is gone too, without a notice
    freeze: stopped, then goes on                   accuse: a notice says that it is dead, it is not
    break: its connections reset, no group died     start: a new incarnation asks for a seat
    cut: what the first sends to the second is lost isolate: it sends and receives nothing
    slow: its messages take ten times as long       lose: a third of all messages are lost
    store dies, store freezes: it comes back with what it held; where the store can fail over, it has forgotten all
    init hangs, abort hangs: the next of the group's device does       exits in init: the process does, the next time
    hangs: its training thread does nothing, then goes on

    Where it can, these happen to hosts, each of which has an agent, one group at most, and perhaps the store; without a
    target, to the host of the newest claim:

    host dies: with all that is on it               host freezes: all that is on it, then goes on
    split: these hosts and the others do not hear each other, and all reach the disk
    host isolated: from all hosts, not the disk     successor dies: soon after it has taken the store over
    disk slow, away, away from all: a directory     claims race: these hosts claim the store for no reason
    agent stops: the agent alone, then goes on
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
    """``redundancy`` 0 means that every group hosts every shard; see ``core.protocol.machine.Job`` for the rest.
    ``ramp``: the script sets the number of microbatches in a shard, the second number, before the step of the first number.
    ``discards``: steps and attempts whose sums are discarded before the update (``messages.Discarded``).
    ``verify``: number of microbatches of a step that a second group computes, too.
    ``policy``, ``slack``: see ``core.scheduling.policies.policy``; the copies of ``replication`` are ``redundancy``.
    ``device``: reductions run on devices whose communicators behave like NCCL's (``simulated_device``), not gloo's.
    ``impure``: every group that comes back lacks something that only its script knows: its state differs ``before`` it
    enters, or ``after`` its first step of its own. Empty: none does.
    ``spare_hosts``: number of hosts without a group where the store can fail over; None: the store is on no host and
    outlives everything.
    ``rejoins``: agents start lost groups again; else the fault "start" does."""

    seed: int
    groups: int
    per_shard: int
    buckets: int
    steps: int
    min_groups: int = 1
    redundancy: int = 0
    faults: tuple[Fault, ...] = ()
    spare_hosts: int | None = None
    ramp: tuple[int, int] = (0, 0)
    discards: tuple[tuple[int, int], ...] = ()
    verify: int = 0
    policy: str = STACKED_QUOTA
    slack: bool = False
    device: bool = False
    impure: str = ""
    rejoins: bool = False

    def per_shard_at(self, step: int) -> int:
        """Return the number of microbatches in a shard of that step."""
        begins, per_shard = self.ramp
        return per_shard if 0 < begins <= step else self.per_shard

    @property
    def fails_over(self) -> bool:
        """The store is on a host, and can be lost with it."""
        return self.spare_hosts is not None

    @property
    def hosts(self) -> tuple[int, ...]:
        """All that have an agent at the start: those of the groups, and spare ones, whose numbers no group ever has."""
        return (*range(self.groups), *range(self.groups + 2, self.groups + 2 + (self.spare_hosts or 0)))

    @property
    def quiet(self) -> float:
        """From here on nothing more happens."""
        return max((fault.at + fault.lasts for fault in self.faults), default=0.0)

    def __str__(self) -> str:
        hosting = f"redundancy {self.redundancy}" if self.redundancy else "every group hosts everything"
        size = f"{self.groups} groups, {self.per_shard} microbatches each, {self.buckets} buckets, {self.steps} steps"
        ramp = f", {self.ramp[1]} from step {self.ramp[0]} on" if self.ramp[0] else ""
        name = self.policy + (" with copies in the slack" if self.slack else "")
        where = ", on devices" if self.device else ""
        return f"seed {self.seed}: {size}{ramp}, min_groups {self.min_groups}, {hosting}, policy {name}{where}"


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
"""Faults that are no reason to leave out a living group; a third of all scenarios has no others."""


_HOSTS = {
    "host dies": 6,
    "successor dies": 3,
    "host freezes": 4,
    "host isolated": 4,
    "split": 4,
    "disk away": 2,
    "disk away from all": 1,
    "disk slow": 2,
    "claims race": 2,
    "kill": 4,
    "freeze": 2,
    "accuse": 2,
    "break": 2,
    "start": 6,
    "cut": 3,
    "slow": 1,
    "lose": 1,
    "store dies": 4,
    "store freezes": 1,
}
GENTLE_TO_HOSTS = {
    "host dies": 6,
    "successor dies": 3,
    "disk away from all": 3,
    "disk slow": 2,
    "kill": 2,
    "break": 2,
    "start": 5,
    "store dies": 6,
}
"""The same as ``GENTLE`` where the store can fail over."""

ON_DEVICE = ("init hangs", "abort hangs", "exits in init")
"""Faults of groups with a device. They, too, are no reason to leave out a living group."""
GENTLE_ON_DEVICE = {"init hangs", "exits in init"}
"""Those of them by which no living group ends."""
DEVICE_SHARE = 0.25
"""Share of the seeds in which groups have devices."""

OF_AGENTS = ("agent stops", "hangs")
"""Faults that only agents notice."""

KINDS = sorted(_ANY.keys() - {"rack"} | _HOSTS.keys() | set(ON_DEVICE) | set(OF_AGENTS))
"""Every value of ``Fault.kind``; a drawn "rack" becomes several faults."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed; in every fourth the store can fail over, in another fourth groups have devices."""
    scenario = _draw(seed)
    on_devices = random.Random(f"devices {seed}").random() < DEVICE_SHARE
    return with_devices(scenario) if on_devices else scenario


def draw_on_devices(draw: Callable[[int], Scenario], seed: int) -> Scenario:
    """The scenario that ``draw`` makes of a seed, with devices."""
    scenario = draw(seed)
    return scenario if scenario.device else with_devices(scenario)


def draw_impure(seed: int) -> Scenario:
    """The scenario that :func:`draw_fixed` makes of a seed, with groups that come back with another state."""
    rng = random.Random(f"impure {seed}")
    scenario = draw_fixed(seed)
    steps = scenario.steps + rng.randint(2, 6)
    return replace(scenario, steps=steps, impure=rng.choice(["before", "after"]))


def draw_wiped_out(seed: int) -> Scenario:
    """A scenario in which some groups are on their way back when all others die, at nearly the same moment."""
    rng = random.Random(f"wiped out {seed}")
    groups = rng.randint(2, 4)
    back = rng.sample(range(groups), rng.randint(1, groups - 1))
    first = rng.uniform(3.0, 12.0)
    last = first + rng.uniform(2.0, 25.0)
    faults = [Fault(first + rng.uniform(0.0, 2.0), "kill", (group,)) for group in back]
    faults += [Fault(first + rng.uniform(2.5, 6.0), "start", (group,)) for group in back]
    faults += [Fault(last + rng.uniform(0.0, 2.0), "kill", (group,)) for group in range(groups) if group not in back]
    per_shard, buckets, steps = rng.randint(1, 3), rng.randint(1, 4), rng.randint(4, 8)
    return Scenario(seed, groups, per_shard, buckets, steps, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def with_devices(scenario: Scenario) -> Scenario:
    """The same scenario on devices, with up to 3 faults of theirs, most of them close upon another fault."""
    rng = random.Random(f"device {scenario.seed}")
    length = scenario.steps * (scenario.per_shard + 3.0)
    faults = list(scenario.faults)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        near = rng.choice(scenario.faults).at if scenario.faults and rng.random() < 0.7 else rng.uniform(0, length)
        at = max(0.0, near - rng.uniform(0, 5))
        faults.append(Fault(at, rng.choice(ON_DEVICE), (rng.randrange(scenario.groups),)))
    return replace(scenario, device=True, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _draw(seed: int) -> Scenario:
    scenario = draw_fail_over(seed) if seed % 4 == 3 else draw_fixed(seed)
    rng = random.Random(f"ramp {seed}")  # of its own: the scenarios without a ramp are those of before
    if scenario.steps > 1 and rng.random() < 0.25:
        scenario = replace(scenario, ramp=(rng.randrange(1, scenario.steps), rng.randint(1, 4)))
    rng = random.Random(f"discards {seed}")
    if rng.random() < 0.3:
        steps = rng.sample(range(scenario.steps), rng.randint(1, min(3, scenario.steps)))
        attempts = {step: rng.choice([1, 1, 2]) for step in steps}
        discards = tuple((step, attempt) for step in sorted(steps) for attempt in range(attempts[step]))
        scenario = replace(scenario, discards=discards, verify=rng.choice([0, 1, scenario.groups]))
    return scenario


def draw_of(policy: str, seed: int) -> Scenario:
    """The scenario of a seed with a policy; ``"slack"`` is ``stacked_quota`` with copies in the slack, ``EACH``
    draws one of ``DRAWN``."""
    if policy == EACH:
        policy = random.Random(f"policy {seed}").choice(DRAWN)
    scenario, rng = draw(seed), random.Random(f"{policy} {seed}")
    groups = scenario.groups
    able = {
        SPARE: range(1, groups + 1),
        REPLICATION: [copies for copies in range(1, groups + 1) if groups % copies == 0],
        SLACK: [0, *range(1, groups + 1)],
    }
    redundancy = rng.choice(able.get(policy, [0]))
    name = STACKED_QUOTA if policy == SLACK else policy
    if policy == DROP:  # exact reduction is not for a batch that shrinks
        scenario = replace(scenario, discards=(), verify=0)
    return replace(scenario, policy=name, slack=policy == SLACK, redundancy=redundancy)


def draw_fail_over(seed: int) -> Scenario:
    """The scenario of a seed in which the store can fail over: up to 4 groups, up to 2 spare hosts and up to 6 faults, half
    of them close upon another; in most of them the store's host is struck. In a fifth of them
    groups are lost and come back. Up to 2 faults are of agents, and in two fifths agents start lost groups again.
    """
    rng = random.Random(f"fail-over {seed}")
    groups, spare = rng.choice([1, 2, 2, 3, 3, 4]), rng.choice([0, 0, 1, 2])
    scenario = Scenario(
        seed=seed,
        groups=groups,
        per_shard=rng.randint(1, 2),
        buckets=rng.randint(1, 2),
        steps=rng.randint(2, 8),
        min_groups=2 if groups > 2 and rng.random() < 0.1 else 1,
        spare_hosts=spare,
    )
    weights = GENTLE_TO_HOSTS if rng.random() < 1 / 3 else _HOSTS
    length = rng.choice([scenario.steps * (scenario.per_shard + 3.0)] * 3 + [5.0])
    faults: list[Fault] = []
    at = rng.uniform(0, length)
    if rng.random() < 0.7:
        kind = "host dies" if weights is GENTLE_TO_HOSTS else rng.choice(["host dies", "host freezes", "host isolated"])
        faults.append(
            Fault(at, kind, (), 0.0 if kind == "host dies" else rng.choice([8.0, 60.0, 150.0]) * rng.random())
        )
    if rng.random() < 0.2:
        faults += _coming_back(rng, rng.uniform(0, length), groups, weights is GENTLE_TO_HOSTS)
    for _ in range(rng.randint(0, 5)):
        at = at + rng.uniform(0, 8) if faults and rng.random() < 0.5 else rng.uniform(0, 1.3 * length)
        kind = rng.choices(list(weights), list(weights.values()))[0]
        faults += _host_fault(rng, kind, at, groups, scenario.hosts)
    rng = random.Random(f"agents {seed}")
    for _ in range(0 if weights is GENTLE_TO_HOSTS else rng.choice([0, 1, 2])):
        near = rng.choice(faults).at if faults and rng.random() < 0.7 else rng.uniform(0, length)
        faults += _host_fault(rng, rng.choice(OF_AGENTS), max(0.0, near + rng.uniform(-5, 5)), groups, scenario.hosts)
    rejoins = rng.random() < 0.4
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)), rejoins=rejoins)


def _host_fault(rng: random.Random, kind: str, at: float, groups: int, hosts: tuple[int, ...]) -> list[Fault]:
    lasts = rng.choice([rng.uniform(0.1, 5), rng.uniform(5, 150)])
    match kind:
        case "host dies":
            return [Fault(at, kind, rng.choice([(), (rng.choice(hosts),)]))]
        case "successor dies":
            return [Fault(at, kind)]
        case "host freezes" | "host isolated":
            return [Fault(at, kind, rng.choice([(), (rng.choice(hosts),)]), lasts)]
        case "agent stops":
            return [Fault(at, kind, (rng.choice(hosts),), lasts)]
        case "hangs":
            return [Fault(at, kind, (rng.randrange(groups),), lasts)]
        case "split":
            return [Fault(at, kind, tuple(sorted(rng.sample(hosts, len(hosts) // 2))), lasts)]
        case "disk away" | "disk slow":
            return [Fault(at, kind, tuple(sorted(rng.sample(hosts, rng.randint(1, len(hosts))))), lasts)]
        case "claims race":
            return [Fault(at, kind, tuple(rng.sample(hosts, min(2, len(hosts)))))]
        case "cut" if len(hosts) > 1:
            ends = rng.sample(hosts, 2)
            both = [Fault(at, "cut", (ends[0], ends[1]), lasts), Fault(at, "cut", (ends[1], ends[0]), lasts)]
            return both[: rng.randint(1, 2)]
        case "cut":
            return []
        case "store dies" if rng.random() < 0.5:
            return [Fault(at, kind, (), rng.uniform(0.1, 5))]
        case "store dies":  # again and again: it forgets a view that some have read
            times = (at + i * rng.uniform(0.5, 3) for i in range(rng.randint(3, 8)))
            return [Fault(time, kind, (), rng.uniform(0.1, 0.5)) for time in times]
    return _fault(rng, kind, at, groups)


def draw_fixed(seed: int) -> Scenario:
    """The scenario of a seed with a store that outlives everything: up to 5 groups, up to 7 faults, half of them close upon
    another, some all at the start.

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
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


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
        kind = rng.choice(
            ["kill", "kill", "break"] if gentle else ["kill", "kill", "vanish", "freeze", "accuse", "break"]
        )
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
