"""The plan of one chaos run: a job and a schedule of faults, both drawn from nothing but a seed.

Kinds of runs (``Job.kind``). ``plain``: faults of every kind strike processes, the store and, in a share of the runs,
the disk of the run directory. ``hosts``: groups on hosts of their own, whose links are cut or lose packets.
``numbers``: a few gradients become NaN or lose a bit, under one of the policies for that; few other faults, because the
effect of a silent error on the losses is not promised.

One group of every run, the *keeper*, is never taken, so that a run always has a group that reaches its end. Some of the
others die, leave or freeze for longer than the limit; every group, keeper included, may be slow, frozen for a moment,
or hold the GIL.

Left out on purpose: two groups whose scripts raise in the forward or backward pass of the same step. They may die
computing the same microbatch, and then the run has to stop (``core.protocol.machine``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_ft.cluster.faults.schedule import RAISING, Fault, Schedule
from megatron_ft.core.scheduling.policies import DROP, RECOVER, REPLICATION, SLACK, SPARE, STACKED_QUOTA

OTHERS = (SPARE, RECOVER, REPLICATION, SLACK, DROP)
"""The policies beside the default that mask a loss; all but ``drop`` keep the microbatches of the step. With ``restart`` the
first loss ends the attempt: see ``tests.checkpoint_kills``."""
SHORT = (1415, 1416, 1421, 1423, 1424, 1425)
"""Seeds of the short campaign: runs of all kinds, on few different jobs, each of which needs a run without failures."""
STOPPED_LIMIT_S = 0.5
"""A rank that is stopped for longer is given up (``stopped_timeout_s``)."""
SILENCE_LIMIT_S = 5.0
"""A host that is not heard for longer may be given up (``heartbeat_timeout_s``), after 3/8 of that where most hosts agree.
Longer than by default: on a busy machine an agent may not run for a second."""
_LONG_S, _SHORT_S, _GIL_S, _STORE_S = (0.6, 1.2), (0.05, 0.2), (1.0, 1.5), (0.3, 1.5)
"""The length of a stop that costs the group, of one that does not, of a held GIL, and of a stop of the agent or the
store."""
_CUT_LONG_S, _CUT_SHORT_S, _LOSS_S, _DISK_S = (6.0, 7.0), (0.1, 0.3), (0.5, 2.0), (0.2, 0.6)
_KINDS = {"plain": 13, "numbers": 4, "hosts": 3}
_SEVERAL_RANKS, _FULL_DISK = 0.35, 0.25
"""Shares of the plain runs."""
_JOBS = {
    2: ((1, 14), (4, 10)),
    3: ((2, 12), (3, 9)),
    4: ((1, 13), (2, 11), (4, 8)),
    5: ((2, 12), (3, 8)),
    6: ((1, 14), (2, 9)),
}
"""By number of groups: microbatches of each, and number of steps. Few jobs, because each needs a reference run."""
_GROUPS_WEIGHTS = (3, 5, 6, 3, 3)
_JOBS_OF_TWO = ((2, 4, 10), (3, 2, 12), (3, 3, 9))
"""Jobs with groups of two ranks: number of groups, microbatches of each, and number of steps."""
_HOSTS = ((3, 3), (3, 4), (2, 4), (2, 3))
"""Numbers of hosts and groups."""
_BUCKET_MB = (0.05, 0.1, 0.3, 25.0)
_POLICIES = ("skip", "recompute", "stop")
_STEP_POINTS = ("begin", "forward", "backward", "reduce", "bucket", "gate", "update", "finish")
_RECOVERY_POINTS = ("recover", "connect", "patch")
_LEADERS_POINTS = ("recover", "finish")
"""The points that only position 0 of a group gets to."""
_COMPUTING = ("forward", "backward")
_SINGLES = {"kill": 6, "stop": 4, "terminate": 2, "exception": 2, "oom": 1}
_FORMS = {"single": 5, "split": 3, "rack": 3, "pair": 3, "in the recovery": 4}
"""Ways to take groups. split: one dies in the reductions or right after them, while another is frozen behind a bucket."""
_HARMLESS = {"stop": 5, "slow": 4, "store": 3, "agent": 1, "gil": 2}
_NEXT_TIME = {"after_s": 0.0}
"""The time of a fault at a point: whenever the rank gets there next."""


@dataclass(frozen=True)
class Job:
    """The training job and its hosts. ``key`` names what decides the losses: not the numbers of ranks and hosts of a
    group."""

    groups: int
    per_group: int
    steps: int
    bucket_mb: float
    ranks: int = 1
    hosts: int = 1
    kind: str = "plain"
    nonfinite: str = "skip"
    policy: str = STACKED_QUOTA
    redundancy: int = 0
    exact: bool = False
    engine: str = ""
    """One of ``tests.chaos.play.ENGINES``, whose ranks compute together; empty: plain PyTorch."""

    @property
    def settings(self) -> dict[str, object]:
        """The settings of the policy and of the reduction, as a config has them."""
        return {**self._of_policy(), **({"reduction": "exact"} if self.exact else {})}

    def _of_policy(self) -> dict[str, object]:
        if self.policy == SLACK:
            return {"standby": SLACK}
        whole = {"placement": "full"} if self.redundancy == self.groups else {"placement": "consecutive"}
        stacked = {"redundancy": self.redundancy, **whole} if self.policy == SPARE else {}
        return {
            "policy": self.policy,
            **stacked,
            **({"redundancy": self.redundancy} if self.policy == REPLICATION else {}),
        }

    @property
    def key(self) -> tuple[int, int, int, str]:
        return self.groups, self.per_group, self.steps, ("exact" if self.exact else "fast") + self.engine

    def groups_of(self, host: int) -> frozenset[int]:
        """Return the groups of a host, as the launcher spreads them."""
        return frozenset(range(host * self.groups // self.hosts, (host + 1) * self.groups // self.hosts))


@dataclass(frozen=True)
class Plan:
    """One run of the campaign; ``keeper`` is the group that no fault takes.

    Hosts are called host0, host1, ... and the run directory RUN in the schedule; :meth:`placed` replaces these names.
    """

    seed: int
    job: Job
    keeper: int
    schedule: Schedule

    @property
    def fills_disk(self) -> bool:
        return any(fault.kind == "disk_full" for fault in self.schedule.faults)

    def placed(self, run_dir: Path, namespaces: dict[str, str]) -> Schedule:
        """Return the schedule with the real names of hosts and run directory."""
        return replace(
            self.schedule, faults=tuple(_placed(fault, run_dir, namespaces) for fault in self.schedule.faults)
        )


def _placed(fault: Fault, run_dir: Path, namespaces: dict[str, str]) -> Fault:
    if fault.kind == "disk_full":
        return replace(fault, directory=str(run_dir))
    return replace(fault, netns=namespaces.get(fault.netns, fault.netns)) if fault.kind == "cut" else fault


def address(host: int) -> str:
    """Return the address of a host in its network (``tests.netlab``)."""
    return f"10.99.0.{host + 1}"


def draw_with(policy: str, seed: int) -> Plan:
    """Draw the run of that seed with a policy: the same faults strike the same groups. In a run on several hosts or with
    corrupted numbers a shard has as many hosts as there are groups, so that it is not wiped out."""
    plan, rng = draw(seed), random.Random(f"{policy} {seed}")
    groups, whole = plan.job.groups, plan.job.kind != "plain"
    able = {
        SPARE: [groups] if whole else range(2, groups + 1),
        REPLICATION: [groups] if whole else [n for n in range(2, groups + 1) if groups % n == 0],
    }
    return replace(plan, job=replace(plan.job, policy=policy, redundancy=rng.choice(able.get(policy, [0]))))


def draw_exact(seed: int, policy: str = "") -> Plan:
    """Draw the run of that seed with exact reduction, and with a policy: by default the seeds take turns."""
    turns = ("", SLACK, SPARE, RECOVER, REPLICATION)
    policy = policy or turns[seed % len(turns)]
    plan = draw_with(policy, seed) if policy else draw(seed)
    return replace(plan, job=replace(plan.job, exact=True))


def draw_for(engine: str, seed: int, policy: str = "", exact: bool = False) -> Plan:
    """Draw a run for an engine: of the runs with groups of two ranks, that of the seed."""
    for number in range(seed * 1000, (seed + 1) * 1000):
        plan = draw_exact(number, policy) if exact else draw_with(policy, number) if policy else draw(number)
        if plan.job.ranks == 2 and plan.job.hosts == 1 and plan.job.kind == "plain":
            schedule = replace(plan.schedule, faults=_one_slow_rank(plan.schedule.faults))
            return replace(plan, seed=seed, job=replace(plan.job, engine=engine), schedule=schedule)
    raise AssertionError("one run in some has groups of two ranks")


def _one_slow_rank(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Leave out what slows down another rank of a group. A rank is slowed down by a multiple of the time that it takes, and
    waits for the other one in it: two such ranks would slow each other down without end."""
    slow: dict[int | None, int | None] = {}
    kept = []
    for fault in faults:
        if fault.kind == "slow" and slow.setdefault(fault.group, fault.position) != fault.position:
            continue
        kept.append(fault)
    return tuple(kept)


def draw(seed: int) -> Plan:
    """Draw the run of that seed: always the same."""
    rng = random.Random(seed)
    kind = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))[0]
    job = _job(rng, kind)
    keeper, *others = rng.sample(range(job.groups), job.groups)
    if kind == "hosts":  # the store is on host 0: a host that is cut off from it has to leave
        keeper = rng.choice(sorted(job.groups_of(0)))
        others = [group for group in rng.sample(range(job.groups), job.groups) if group != keeper]
    drawn = _Draw(rng, job, keeper)
    if kind == "numbers":
        blocks = drawn.corruptions(others)
    else:
        blocks = list(drawn.takings(others[: rng.randint(1, len(others))]))
        if kind == "hosts":
            blocks = [*drawn.cuts(), *blocks[: rng.randint(0, 1)]]
            rng.shuffle(blocks)
        elif rng.random() < _FULL_DISK:
            blocks.insert(0, drawn.full_disk())
    for fault in drawn.troubles(rng.randint(4, 7) if kind == "plain" else rng.randint(2, 3)):
        blocks.insert(rng.randint(0, len(blocks)), [fault])
    return Plan(seed, job, keeper, Schedule(tuple(fault for block in blocks for fault in block), seed))


def _job(rng: random.Random, kind: str) -> Job:
    ranks, hosts = 1, 1
    groups = rng.choices(tuple(_JOBS), _GROUPS_WEIGHTS)[0]
    if kind == "hosts":
        hosts, groups = rng.choice(_HOSTS)
    per_group, steps = rng.choice(_JOBS[groups])
    if kind != "hosts" and rng.random() < _SEVERAL_RANKS:
        ranks, (groups, per_group, steps) = 2, rng.choice(_JOBS_OF_TWO)
    policy = rng.choice(_POLICIES) if kind == "numbers" else "skip"
    return Job(groups, per_group, steps, rng.choice(_BUCKET_MB), ranks, hosts, kind, policy)


def is_long(fault: Fault) -> bool:
    """Return whether the fault is a stop after which the group is out."""
    return fault.signal is not None and fault.signal.name == "SIGSTOP" and (fault.duration_s or 0) > STOPPED_LIMIT_S


def takes(fault: Fault, job: Job) -> frozenset[int]:
    """Return the groups that may be lost to the fault, as the run is set up: none to a short stop, nor to one of the
    agent."""
    if fault.kind == "cut":
        return _cuts_off(fault, job)
    if fault.kind in ("nan", "bitflip"):
        return frozenset([fault.group]) if job.nonfinite == "recompute" else frozenset()
    if fault.signal is not None and fault.signal.name == "SIGSTOP" and not is_long(fault):
        return frozenset()
    return frozenset() if fault.kind == "agent" else fault.takes(0)


def _cuts_off(fault: Fault, job: Job) -> frozenset[int]:
    """Return the groups that may leave for a long cut of a link: those of its ends, but not those of the store's
    host."""
    if fault.share is not None or fault.duration_s < SILENCE_LIMIT_S:
        return frozenset()
    ends = {host for host in range(1, job.hosts) if address(host) == fault.peer or fault.netns.endswith(f"host{host}")}
    return frozenset().union(*map(job.groups_of, ends))


@dataclass
class _Draw:
    """The dice and the state of a draw. ``raised``: the steps in which a script raises while it computes."""

    rng: random.Random
    job: Job
    keeper: int
    raised: set[int] = field(default_factory=set)

    def takings(self, victims: list[int]) -> Iterator[list[Fault]]:
        """Take all the victims, in one way or another, in the order of the steps; faults of one list belong together."""
        steps = sorted(self.rng.choices(range(self.job.steps), k=len(victims)))
        while victims:
            form = self._one_of(_FORMS if len(victims) > 1 else {"single": 3, "split": 1})
            count = 1 if form in ("single", "split") else 2
            if form == "rack":
                count = self.rng.randint(2, min(3, len(victims)))
            taken, victims = victims[:count], victims[count:]
            yield self._taking(form, taken, steps.pop(0))

    def _taking(self, form: str, groups: list[int], step: int) -> list[Fault]:
        if form == "rack":
            return [self._rack(groups, step)]
        if form == "single":
            return [self._single(groups[0], step)]
        if form == "split":
            return self._split(groups[0], step)
        first = self._aimed("kill", groups[0], step)
        if form == "pair":
            return [first, Fault(kind="kill", **self._rank(groups[1]), wait_s=self._seconds(0.0, 0.1))]
        whom = self._rank(groups[1])
        point = self.rng.choice(self._there(_RECOVERY_POINTS, whom))
        # The first connection of all is that of the start; here it is to be the one after the first fault.
        when = {"step": step if first.step is None else first.step} if point == "connect" else _NEXT_TIME
        return [first, Fault(kind=self._one_of({"kill": 4, "exception": 1}), **whom, point=point, **when)]

    def _single(self, group: int, step: int) -> Fault:
        kind = self._one_of(_SINGLES)
        lasting = {"duration_s": self._seconds(*_LONG_S)} if kind == "stop" else {}
        if kind in RAISING:
            whom = self._rank(group)
            return Fault(kind=kind, **whom, **self._at_point(step, whom, raises=True))
        if self.job.ranks > 1 and kind in ("kill", "stop") and self.rng.random() < 0.25:  # a node
            return Fault(kind=kind, group=group, position="all", step=step, **lasting)
        return self._aimed(kind, group, step, **lasting)

    def _aimed(self, kind: str, group: int, step: int, **fields) -> Fault:
        """Aim at one rank of the group, in or about that step."""
        whom = self._rank(group)
        return Fault(kind=kind, **whom, **fields, **self._moment(step, whom))

    def _rank(self, group: int) -> dict:
        """Draw any of the group's ranks."""
        position = self.rng.randrange(self.job.ranks)
        return {"group": group} | ({"position": position} if position else {})

    def _split(self, victim: int, step: int) -> list[Fault]:
        other = self.keeper
        if self.rng.random() < 0.5:
            other = self.rng.choice([group for group in range(self.job.groups) if group != victim])
        bucket = self.rng.randrange(3) if self.job.bucket_mb <= 0.1 else 0
        # Every rank of a group reduces the buckets it owns: one after the other.
        owner, own = bucket % self.job.ranks, (bucket + 1) % self.job.ranks
        held = Fault(
            kind="stop",
            group=other,
            step=step,
            point="bucket",
            bucket=bucket,
            duration_s=self._seconds(*_SHORT_S),
            **({"position": owner} if owner else {}),
        )
        point = self.rng.choice(("reduce", "gate", "update"))
        last = {"bucket": bucket + 1} if point == "reduce" and self.job.bucket_mb <= 0.1 else {}
        whom = {"position": own} if last and own else {}
        return [held, Fault(kind="kill", group=victim, step=step, point=point, **last, **whom)]

    def _rack(self, groups: list[int], step: int) -> Fault:
        how = self._one_of({"kill": 4, "stop": 1, "terminate": 1})
        lasting = {"duration_s": self._seconds(*_LONG_S)} if how == "stop" else {}
        # At a point all of them have to be there together, so not where one waits for what the others do after theirs.
        together = _STEP_POINTS[:5] if self.job.ranks == 1 else _STEP_POINTS[:1]
        when = {"step": step, "point": self.rng.choice(together)} if self.rng.random() < 0.5 else {"step": step}
        return Fault(kind="rack", groups=tuple(sorted(groups)), how=how, **lasting, **when)

    def full_disk(self) -> list[Fault]:
        """Fill the disk early, while a group is slow: a line that cannot be written waits for room, but not longer
        than the run."""
        whole = Fault(kind="disk_full", directory="RUN", duration_s=self._seconds(*_DISK_S), step=self.rng.randrange(3))
        slow = Fault(kind="slow", group=self.keeper, step=0, factor=6.0, steps=self.job.steps)
        return [slow, whole]

    def corruptions(self, others: list[int]) -> list[list[Fault]]:
        """Corrupt gradients, each in a step of its own; where the run does not stop for it, a group may die as well."""
        steps = self.rng.sample(range(self.job.steps), min(self.rng.randint(2, 4), len(others) + 1))
        policy, found = self.job.nonfinite, []
        for number, step in enumerate(sorted(steps)):
            kind = self._one_of({"nan": 1, "bitflip": 1})
            # Under recompute a group leaves for it, and is not there for another one.
            group = self.rng.randrange(self.job.groups) if policy != "recompute" else others[number % len(others)]
            what = {"what": self.rng.choice(("gradient", "loss"))} if kind == "nan" else {}
            found.append([Fault(kind=kind, **self._rank(group), step=step, **what)])
        if policy != "stop" and self.rng.random() < 0.5:
            found.append([self._aimed("kill", others[-1], self.rng.randrange(self.job.steps))])
        return found

    def cuts(self) -> list[list[Fault]]:
        """Cut links: most often a host is cut off for good; other links are cut for a moment, or lose some packets."""
        steps = sorted(self.rng.sample(range(self.job.steps - 1), 3))
        found = [[self._cut(step, *self._link(), duration_s=self._seconds(*_CUT_SHORT_S))] for step in steps[:1]]
        share = round(self.rng.uniform(0.02, 0.15), 3)
        found.append([self._cut(steps[1], *self._link(), share=share, duration_s=self._seconds(*_LOSS_S))])
        if self.rng.random() < 0.75:
            lasting = {"duration_s": self._seconds(*_CUT_LONG_S)}
            form = self._one_of({"host": 2, "link": 1, "one way": 1}) if self.job.hosts > 2 else "host"
            if form == "host":
                host = self.rng.randrange(1, self.job.hosts)
                peers = [peer for peer in range(self.job.hosts) if peer != host]
                first = self._cut(steps[2], host, peers[0], **lasting)
                found.append([first, *(self._cut(None, host, peer, wait_s=0.0, **lasting) for peer in peers[1:])])
            else:  # a link that is not the store's
                way = {"direction": self.rng.choice(("in", "out"))} if form == "one way" else {}
                found.append([self._cut(steps[2], *self.rng.sample((1, 2), 2), **lasting, **way)])
        return found

    def _link(self) -> list[int]:
        return self.rng.sample(range(self.job.hosts), 2)

    def _cut(self, step: int | None, host: int, peer: int, **fields) -> Fault:
        when = {} if step is None else {"step": step}
        group = min(self.job.groups_of(host))
        return Fault(kind="cut", group=group, netns=f"host{host}", peer=address(peer), **when, **fields)

    def troubles(self, count: int) -> Iterator[Fault]:
        """Draw faults to which no group is lost."""
        weights = dict(_HARMLESS)
        if self.job.hosts > 1:
            weights["agent"] = 0  # it would not be heard
        for _ in range(count):
            kind = self._one_of(weights)
            if kind == "gil":
                weights["gil"] = 0  # one is a second or more
            yield self._trouble(kind)

    def _trouble(self, kind: str) -> Fault:
        # Often the keeper: the others may be gone by then.
        group = self.keeper if self.rng.random() < 0.4 else self.rng.randrange(self.job.groups)
        step, whom = self.rng.randrange(self.job.steps), self._rank(group)
        match kind:
            case "slow":
                factor = round(self.rng.uniform(1.5, 8.0), 1)
                return Fault(kind="slow", **whom, step=step, factor=factor, steps=self.rng.randint(1, 8))
            case "gil":
                return Fault(kind="gil", **whom, duration_s=self._seconds(*_GIL_S), **self._at_point(step, whom))
            case "stop":
                lasting = {"duration_s": self._seconds(*_SHORT_S)}
                return Fault(kind="stop", **whom, **lasting, **self._moment(step, whom))
        when = {"step": step} if self.rng.random() < 0.7 else {"wait_s": self._seconds(0.0, 0.3)}
        if kind == "store" and self.rng.random() < 0.6:
            return Fault(kind="store", **when)
        return Fault(kind=kind, how="stop", duration_s=self._seconds(*_STORE_S), **when)

    # --- moments ------------------------------------------------------------------------------------------------------

    def _moment(self, step: int, whom: dict) -> dict:
        """Draw a moment: mostly a point of that step; else right after its commit, some time after another fault, or
        at any time."""
        form = self._one_of({"point": 6, "step": 2, "wait": 2, "clock": 1})
        if form == "wait":
            return {"wait_s": self._seconds(0.0, 0.4)}
        if form == "clock":
            return {"after_s": self._seconds(0.5, 6.0)}
        return self._at_point(step, whom) if form == "point" else {"step": step}

    def _at_point(self, step: int, whom: dict, raises: bool = False) -> dict:
        if self.rng.random() < 0.2:
            return {"point": self.rng.choice(self._there(_RECOVERY_POINTS, whom)), **_NEXT_TIME}
        points = self._there(_STEP_POINTS, whom)
        if raises and step in self.raised:
            points = tuple(point for point in points if point not in _COMPUTING)
        point = self.rng.choice(points)
        if raises and point in _COMPUTING:
            self.raised.add(step)
        if point == "finish":
            return {"point": point, "step": self.job.steps}
        many = point in ("reduce", "bucket") and self.job.bucket_mb <= 0.1
        return {"point": point, "step": step} | ({"bucket": self.rng.randrange(4)} if many else {})

    @staticmethod
    def _there(points: tuple[str, ...], whom: dict) -> tuple[str, ...]:
        """Return the points that this rank gets to."""
        return tuple(point for point in points if not (whom.get("position") and point in _LEADERS_POINTS))

    def _seconds(self, least: float, most: float) -> float:
        return round(self.rng.uniform(least, most), 3)

    def _one_of(self, weights: dict[str, int]) -> str:
        return self.rng.choices(tuple(weights), tuple(weights.values()))[0]
