"""What one chaos run is: a job and a schedule of faults, both drawn from nothing but a seed.

One group of every run, the *keeper*, is never taken, so that a run always has somebody to reach its end. Some of the others
die, leave or freeze for longer than the limit; everybody, keeper included, may be slow, frozen for a moment, or hold the
GIL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.faults.schedule import Fault, Schedule

STOPPED_LIMIT_S = 0.5
"""A rank that is stopped for longer is given up (``stopped_timeout_s``)."""
_LONG_S, _SHORT_S, _GIL_S, _STORE_S = (0.6, 1.2), (0.05, 0.2), (1.0, 1.5), (0.3, 1.5)
"""How long a stop that costs the group lasts, one that does not, a held GIL, and a stop of the agent with its store."""
_JOBS = {
    2: ((1, 14), (4, 10)),
    3: ((2, 12), (3, 9)),
    4: ((1, 13), (2, 11), (4, 8)),
    5: ((2, 12), (3, 8)),
    6: ((1, 14), (2, 9)),
}
"""By number of groups: microbatches of each, and steps. Few, because each needs a reference run."""
_GROUPS_WEIGHTS = (3, 5, 6, 3, 3)
_BUCKET_MB = (0.05, 0.1, 0.3, 25.0)
_STEP_POINTS = ("begin", "forward", "backward", "reduce", "bucket", "gate", "update", "finish")
_RECOVERY_POINTS = ("recover", "connect", "patch")
_SINGLES = {"kill": 6, "stop": 4, "terminate": 2, "exception": 2, "oom": 1}
_FORMS = {"single": 5, "split": 3, "rack": 3, "pair": 3, "in the recovery": 4}
"""Ways to take groups. split: one dies in the reductions or right after them, while another is frozen behind a bucket."""
_HARMLESS = {"stop": 5, "slow": 4, "store": 2, "agent": 1, "gil": 2}
_NEXT_TIME = {"after_s": 0.0}
"""As the time of a fault at a point: whenever the rank gets there next."""


@dataclass(frozen=True)
class Job:
    """What is trained. ``key`` names what decides the losses."""

    groups: int
    per_group: int
    steps: int
    bucket_mb: float

    @property
    def key(self) -> tuple[int, int, int]:
        return self.groups, self.per_group, self.steps


@dataclass(frozen=True)
class Plan:
    """One run of the campaign; ``keeper`` is the group that no fault takes."""

    seed: int
    job: Job
    keeper: int
    schedule: Schedule


def draw(seed: int) -> Plan:
    """The run of that seed: always the same."""
    rng = random.Random(seed)
    groups = rng.choices(tuple(_JOBS), _GROUPS_WEIGHTS)[0]
    per_group, steps = rng.choice(_JOBS[groups])
    job = Job(groups, per_group, steps, rng.choice(_BUCKET_MB))
    keeper, *others = rng.sample(range(groups), groups)
    drawn = _Draw(rng, job, keeper)
    blocks = list(drawn.takings(others[: rng.randint(1, len(others))]))
    for fault in drawn.troubles(rng.randint(4, 7)):
        blocks.insert(rng.randint(0, len(blocks)), [fault])
    return Plan(seed, job, keeper, Schedule(tuple(fault for block in blocks for fault in block), seed))


def is_long(fault: Fault) -> bool:
    """Whether it is a stop after which the group is out."""
    return fault.signal is not None and fault.signal.name == "SIGSTOP" and (fault.duration_s or 0) > STOPPED_LIMIT_S


def takes(fault: Fault) -> frozenset[int]:
    """The groups that may be lost to it, as the run is set up: none to a short stop, nor to one of the agent."""
    if fault.signal is not None and fault.signal.name == "SIGSTOP" and not is_long(fault):
        return frozenset()
    return frozenset() if fault.of_agent else fault.takes(0)


@dataclass
class _Draw:
    """The dice, and what they are thrown for."""

    rng: random.Random
    job: Job
    keeper: int

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
        first = Fault(kind="kill", group=groups[0], **self._moment(step))
        if form == "pair":
            return [first, Fault(kind="kill", group=groups[1], wait_s=self._seconds(0.0, 0.1))]
        point = self.rng.choice(_RECOVERY_POINTS)
        # The first connection of all is that of the start; here it is to be the one after the first fault.
        when = {"step": step if first.step is None else first.step} if point == "connect" else _NEXT_TIME
        return [first, Fault(kind=self._one_of({"kill": 4, "exception": 1}), group=groups[1], point=point, **when)]

    def _single(self, group: int, step: int) -> Fault:
        kind = self._one_of(_SINGLES)
        lasting = {"duration_s": self._seconds(*_LONG_S)} if kind == "stop" else {}
        if kind in ("exception", "oom"):
            return Fault(kind=kind, group=group, **self._at_point(step))
        return Fault(kind=kind, group=group, **lasting, **self._moment(step))

    def _split(self, victim: int, step: int) -> list[Fault]:
        other = self.keeper
        if self.rng.random() < 0.5:
            other = self.rng.choice([group for group in range(self.job.groups) if group != victim])
        bucket = self.rng.randrange(3) if self.job.bucket_mb <= 0.1 else 0
        held = Fault(
            kind="stop", group=other, step=step, point="bucket", bucket=bucket, duration_s=self._seconds(*_SHORT_S)
        )
        point = self.rng.choice(("reduce", "gate", "update"))
        last = {"bucket": bucket + 1} if point == "reduce" and self.job.bucket_mb <= 0.1 else {}
        return [held, Fault(kind="kill", group=victim, step=step, point=point, **last)]

    def _rack(self, groups: list[int], step: int) -> Fault:
        how = self._one_of({"kill": 4, "stop": 1, "terminate": 1})
        lasting = {"duration_s": self._seconds(*_LONG_S)} if how == "stop" else {}
        # At a point all of them have to be there together, so not where one waits for what the others do after theirs.
        when = {"step": step, "point": self.rng.choice(_STEP_POINTS[:5])} if self.rng.random() < 0.5 else {"step": step}
        return Fault(kind="rack", groups=tuple(sorted(groups)), how=how, **lasting, **when)

    def troubles(self, count: int) -> Iterator[Fault]:
        """Faults that nobody is lost to."""
        weights = dict(_HARMLESS)
        for _ in range(count):
            kind = self._one_of(weights)
            if kind == "gil":
                weights["gil"] = 0  # one is a second or more
            yield self._trouble(kind)

    def _trouble(self, kind: str) -> Fault:
        # Often the keeper: the others may be gone by then.
        group = self.keeper if self.rng.random() < 0.4 else self.rng.randrange(self.job.groups)
        step = self.rng.randrange(self.job.steps)
        match kind:
            case "slow":
                factor = round(self.rng.uniform(1.5, 4.0), 1)
                return Fault(kind="slow", group=group, step=step, factor=factor, steps=self.rng.randint(1, 3))
            case "gil":
                return Fault(kind="gil", group=group, duration_s=self._seconds(*_GIL_S), **self._at_point(step))
            case "stop":
                return Fault(kind="stop", group=group, duration_s=self._seconds(*_SHORT_S), **self._moment(step))
        when = {"step": step} if self.rng.random() < 0.7 else {"wait_s": self._seconds(0.0, 0.3)}
        return Fault(kind=kind, how="stop", duration_s=self._seconds(*_STORE_S), **when)

    # --- moments ------------------------------------------------------------------------------------------------------

    def _moment(self, step: int) -> dict:
        """Mostly a point of that step; else right after the commit of it, some time after another fault, or anywhen."""
        form = self._one_of({"point": 6, "step": 2, "wait": 2, "clock": 1})
        if form == "wait":
            return {"wait_s": self._seconds(0.0, 0.4)}
        if form == "clock":
            return {"after_s": self._seconds(0.5, 6.0)}
        return self._at_point(step) if form == "point" else {"step": step}

    def _at_point(self, step: int) -> dict:
        if self.rng.random() < 0.2:
            return {"point": self.rng.choice(_RECOVERY_POINTS), **_NEXT_TIME}
        point = self.rng.choice(_STEP_POINTS)
        if point == "finish":
            return {"point": point, "step": self.job.steps}
        many = point in ("reduce", "bucket") and self.job.bucket_mb <= 0.1
        return {"point": point, "step": step} | ({"bucket": self.rng.randrange(4)} if many else {})

    def _seconds(self, least: float, most: float) -> float:
        return round(self.rng.uniform(least, most), 3)

    def _one_of(self, weights: dict[str, int]) -> str:
        return self.rng.choices(tuple(weights), tuple(weights.values()))[0]
