"""One training run: steps, failures, checkpoints, restarts and rejoins on one time axis.

A step is compute, then the all-reduce in which a loss is noticed. Then the policy decides, survivors patch, and the
all-reduce is repeated, until one goes through without another loss. Stretches without a failure are jumped: the time of
n steps with independent jitter is drawn as one sum.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

import numpy as np

from megatron_ft.planner.estimate import Estimate, evaluate
from megatron_ft.sim.training.failures import Failure, Stream
from megatron_ft.sim.training.policies import POLICIES, Policy, StackedQuota
from megatron_ft.sim.training.setting import Setting
from megatron_ft.types import GroupId

PARTS = ("compute", "patch", "allreduce", "recovery", "checkpoint", "restart", "lost")
"""Where the time of a run can go."""
LIMIT = 50.0
"""A run that takes this many times the ideal is given up; it is then reported with the steps it has."""
HANG_S = 30.0
"""Until a hang without a dead process is found by inspection (ByteRobust, arXiv 2509.16293: 2 to 60 s)."""
FLAP_S = (5.0, 60.0)
STRAGGLER, STRAGGLER_S = 1.1, 3600.0
"""A straggler is 10% slow, for an hour."""


@dataclass(frozen=True)
class Result:
    """Where the time went, in seconds, and what happened how often. ``overhead`` is time-to-train over T_0.

    ``availability`` is the share of the time that was neither checkpoint, restart nor work done twice; ``mean_stacks``
    the compute part of a committed step, in stacks, patches included; ``finished`` False when it was given up.
    """

    policy: str
    seed: int
    steps: int
    finished: bool
    time_s: float
    ideal_s: float
    compute_s: float = 0.0
    patch_s: float = 0.0
    allreduce_s: float = 0.0
    recovery_s: float = 0.0
    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    lost_s: float = 0.0
    failures: int = 0
    masked: int = 0
    wipe_outs: int = 0
    planned_restarts: int = 0
    rejoins: int = 0
    checkpoints: int = 0

    @property
    def overhead(self) -> float:
        return self.time_s / self.ideal_s * (1.0 if self.finished else float("inf"))

    @property
    def availability(self) -> float:
        return 1.0 - (self.checkpoint_s + self.restart_s + self.lost_s) / self.time_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "overhead": self.overhead, "availability": self.availability}


def simulate(setting: Setting, policy: str, seed: int) -> Result:
    """Simulate one run. The same arguments give the same result, on every machine."""
    return _Run(setting, policy, seed).run()


class _Run:
    """The run in the making: ``now``, the committed ``step``, and what the last checkpoint holds."""

    def __init__(self, setting: Setting, policy: str, seed: int) -> None:
        self.setting, self.cluster, self.name, self.seed = setting, setting.cluster, policy, seed
        estimate = _estimate(setting, policy)
        self.period_s = setting.period_s or estimate.period_s
        self.average_s = estimate.relative_time * self.cluster.step_s
        self.policy: Policy = POLICIES[policy](setting)
        self.stream = Stream(setting, seed)
        self.noise = np.random.default_rng([seed, 0])
        self.now = 0.0
        self.step = 0
        self.started = 0  # step of the last (re)start
        self.slow_until = 0.0
        self.returns: dict[GroupId, float] = {}
        self.spares = setting.restart_finds == "everybody"
        self.gone: set[GroupId] = set()  # where there are no spares; only repaired ones come back
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.count = dict.fromkeys(("failures", "masked", "wipe_outs", "planned_restarts", "rejoins", "checkpoints"), 0)
        self._save()

    def run(self) -> Result:
        cluster = self.cluster
        ends = min(LIMIT * cluster.failure_free_s, self.setting.duration_s)
        while self.step < cluster.steps and self.now < ends and self.policy.live:
            self._boundary()
            self._jump()
            self._step()
        times = {f"{name}_s": value for name, value in self.spent.items()}
        finished = self.step >= cluster.steps
        return Result(self.name, self.seed, self.step, finished, self.now, cluster.failure_free_s, **times, **self.count)

    # --- between steps ------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Entries, a checkpoint if one is due, a restart if capacity is worth it."""
        for group in [group for group, at in self.returns.items() if at <= self.now]:
            del self.returns[group]
            self.gone.discard(group)
            self.policy.rejoin(group)
            self.stream.started(self.now, (group,))
            self.count["rejoins"] += 1
            self._spend("recovery", self._jitter(self.cluster.reconfigure_s))
        if self.now - self.saved_at >= self.period_s:
            self._checkpoint()
        if self._worth_a_restart():
            if self.saved < self.step:
                self._checkpoint()
            self.count["planned_restarts"] += 1
            self._restart()

    def _checkpoint(self) -> None:
        self._spend("checkpoint", self._jitter(self.cluster.checkpoint_s))
        self.count["checkpoints"] += 1
        self._save()

    def _save(self) -> None:
        self.saved, self.saved_at = self.step, self.now
        self._kept = dict(self.spent)

    def _worth_a_restart(self) -> bool:
        """Renewal reward: restart when the next step takes longer than the average one of the best cycles, restart included.

        The planner knows that average. The present cycle's own says little after an early failure: it would wait for ever.
        """
        complete = len(self.policy.live) == self.cluster.groups
        if not self.policy.plans_restarts or not self.spares or complete or self.step == self.started:
            return False
        cluster = self.cluster
        interruption_s = cluster.detection_s + cluster.reconfigure_s + cluster.microbatch_s
        return self._step_s() * (1 + interruption_s / cluster.mtbf_s) > self.average_s

    def _restart(self) -> None:
        """Everybody stops and starts again from the last checkpoint."""
        self.spent |= self._kept  # what was done since the checkpoint is done again: it counts as lost only
        self.spent["lost"] += self.now - self.saved_at
        missing = self._start_all()
        while self.spares and missing and self.policy.lose(sorted(missing)).wiped_out:
            self.count["wipe_outs"] += 1
            missing = self._start_all()
        if self.policy.rejoins:
            self.returns |= dict.fromkeys(sorted(missing), self.now + self.cluster.rejoin_s)
        self.step = self.saved
        self._save()
        self.started = self.step

    def _start_all(self) -> set[GroupId]:
        """Start every group; returns those that are missing at the end because they failed meanwhile."""
        mode = self.setting.in_restart
        living = set(range(self.cluster.groups)) - self.gone
        ends = self.now + self._jitter(self.cluster.restart_s)
        while mode != "none" and self.stream.next_time(living) < ends:
            failure = self.stream.take(living)
            if mode == "missing":
                living -= set(failure.groups)
            else:
                ends = max(failure.time, self.now) + self._jitter(self.cluster.restart_s)
        self._spend("restart", ends - self.now)
        self.stream.skip_to(self.now)
        self.stream.started(self.now, living)
        missing = set(range(self.cluster.groups)) - self.gone - living
        if self.spares:
            self.returns.clear()
        else:
            self.gone |= missing
        self.policy.restart(self.gone)
        return missing

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def targets(self) -> set[GroupId]:
        """Who can fail: the live groups, and those on their way back."""
        return self.policy.live | self.returns.keys() if self.returns else self.policy.live

    def _compute_s(self) -> float:
        """The compute part of a step, which waits for the samples of the stack, read ahead during the step before.

        A straggler holds up everybody who cannot give it less to do.
        """
        held_up = self.now < self.slow_until and not isinstance(self.policy, StackedQuota)
        compute_s = self.policy.stacks() * self.cluster.compute_s * (STRAGGLER if held_up else 1.0)
        return max(compute_s, self.policy.hosts * self.setting.read_s)

    def _step_s(self) -> float:
        return self._compute_s() + self.cluster.allreduce_s

    def _jump(self) -> None:
        """All steps at once that end well before anything happens."""
        due = (self.saved_at + self.period_s, self.setting.duration_s, *self.returns.values())
        horizon = min(self.stream.next_time(self.targets), *due)
        if self.now < self.slow_until:
            horizon = min(horizon, self.slow_until)
        compute_s, reduce_s = self._compute_s(), self.cluster.allreduce_s
        one = compute_s + reduce_s
        margin = 5 * self.setting.jitter * sqrt(max(horizon - self.now, 0.0) * one)
        number = min(int((horizon - self.now - margin) / one) - 1, self.cluster.steps - self.step - 1)
        if number < 2:
            return
        for name, each in (("compute", compute_s), ("allreduce", reduce_s)):
            noise = sqrt(number) * self.setting.jitter * each * self.noise.standard_normal()
            self._spend(name, max(0.0, number * each + noise))
        self.step += number

    def _step(self) -> None:
        """One step, with whatever is lost in it."""
        if self.step >= self.cluster.steps:
            return
        self.policy.begin_step()
        self._spend("compute", self._jitter(self._compute_s()))
        while True:
            takes = self._jitter(self.cluster.allreduce_s)
            if self.stream.next_time(self.targets) > self.now + takes:
                self._spend("allreduce", takes)
                self.step += 1
                return
            if not self._interrupted(self.now + takes):
                return

    def _interrupted(self, ends: float) -> bool:
        """Take in what fails until the all-reduce would end: notice, decide, patch. False: the end of the attempt."""
        cluster = self.cluster
        lost: list[GroupId] = []
        noticed, announced = self.now, True
        while (at := self.stream.next_time(self.targets)) <= max(noticed, ends if not lost else noticed):
            failure = self.stream.take(self.targets)
            self.count["failures"] += len(failure.groups)
            if failure.cause == "straggler":
                self.slow_until = at + STRAGGLER_S
                continue
            if failure.cause == "corruption":
                self.count["wipe_outs"] += 1
                self._restart()
                return False
            if failure.cause != "maintenance":
                announced = False
                extra = HANG_S if failure.cause == "hang" else 0.0
                noticed = max(noticed, at + cluster.detection_s + extra)
            lost += [group for group in failure.groups if group in self.policy.live and group not in lost]
            self._send_back(failure)
        if not lost:
            return True
        if not self.spares:
            self.gone |= set(lost)
        self._spend("recovery", noticed - self.now + self._jitter(cluster.reconfigure_s))
        loss = self.policy.lose(lost)
        if loss.wiped_out:
            self.count["wipe_outs"] += 1
            self._restart()
            return False
        self.count["masked"] += len(lost)
        if not announced:
            self._spend("patch", self._jitter(loss.patch * cluster.compute_s))
        return True

    def _send_back(self, failure: Failure) -> None:
        """Where groups rejoin, the lost ones are on their way back; one that fails on its way begins anew."""
        if not self.policy.rejoins:
            return
        away = self.cluster.rejoin_s
        if failure.cause == "flap":  # the processes live, only the way to them is gone for a while
            away = self.noise.uniform(*FLAP_S)
        for group in failure.groups:
            self.returns[group] = failure.time + away

    def _jitter(self, duration: float) -> float:
        """Every duration is multiplied by N(1, jitter^2), as in SPARe's simulation; never less than nothing."""
        return max(0.0, duration * (1.0 + self.setting.jitter * self.noise.standard_normal()))

    def _spend(self, what: str, duration: float) -> None:
        self.now += duration
        self.spent[what] += duration


def _estimate(setting: Setting, policy: str) -> Estimate:
    """What the planner expects of this policy on this cluster: its T_c*, and the average step of the best cycles."""
    hosts = policy in ("spare", "replication") or (setting.hosted and issubclass(POLICIES[policy], StackedQuota))
    return evaluate(setting.cluster, policy, setting.redundancy if hosts else None)
