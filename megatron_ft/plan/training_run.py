"""Simulate one training run: steps, failures, checkpoints, restarts and rejoins on one time axis.

A step is computation, then an all-reduce, in which a loss is noticed. Then the policy decides, survivors patch, and the
all-reduce is repeated until one completes without another loss. Steps between failures are simulated together: the time
of n steps with independent jitter is drawn as one sum.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, sqrt
from typing import Any, cast

import numpy as np

from megatron_ft.plan.estimate import SEARCHED, Estimate, evaluate
from megatron_ft.plan.estimate import Policy as PolicyName
from megatron_ft.plan.failures import Failure, Stream
from megatron_ft.plan.policy_models import POLICIES, Policy
from megatron_ft.plan.setting import Setting
from megatron_ft.types import GroupId, given

PARTS = ("compute", "patch", "allreduce", "recovery", "checkpoint", "restart", "lost")
"""Parts of the time of a run."""
LIMIT = 50.0
"""A run is stopped when it has taken this many times the ideal time; its result has the steps done so far."""
HANG_S = 30.0
"""Time until inspection finds a hang without a dead process (ByteRobust, arXiv 2509.16293: 2 to 60 s)."""
FLAP_S = (5.0, 60.0)
"""Range of the time for which a flapping link is down."""
STRAGGLER, STRAGGLER_S = 1.1, 3600.0
"""A straggler takes 10% longer, for an hour."""


@dataclass(frozen=True)
class Result:
    """The parts of a run's time, in seconds, and the numbers of its events.

    ``finished`` is False when the run was stopped before its last step (``LIMIT``). ``overhead`` is the time-to-train
    over T_0; ``availability`` the share of the time that was neither checkpoint, restart nor work done twice.
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


def simulate(setting: Setting, policy: str, seed: int, model: Policy | None = None) -> Result:
    """Simulate one run. Equal arguments give equal results, on every machine. ``model`` takes the place of the one that
    ``policy`` names; the setting then has a period for checkpoints."""
    return _Run(setting, policy, seed, model).run()


class _Run:
    """State of the run: the time ``now``, the committed ``step``, and the last checkpoint."""

    def __init__(self, setting: Setting, policy: str, seed: int, model: Policy | None) -> None:
        self.setting, self.cluster, self.name, self.seed = setting, setting.cluster, policy, seed
        if model is None:
            estimate = planners_estimate(setting, policy)
            self.period_s = setting.period_s or estimate.period_s
            self.average_s = estimate.relative_time * self.cluster.step_s
        else:
            self.period_s, self.average_s = given(setting.period_s), inf
        self.policy: Policy = model or POLICIES[policy](setting)
        self.stream = Stream(setting, seed)
        self.noise = np.random.default_rng([seed, 0])
        self.now = 0.0
        self.step = 0
        self.started = 0  # step of the last (re)start
        self.slow_until = 0.0
        self.returns: dict[GroupId, float] = {}
        self.spares = setting.restart_finds == "everybody"
        self.gone: set[GroupId] = set()  # without spare nodes; only repaired groups come back
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
        times: dict[str, Any] = {f"{name}_s": value for name, value in self.spent.items()}
        finished = self.step >= cluster.steps
        return Result(
            self.name, self.seed, self.step, finished, self.now, cluster.failure_free_s, **times, **self.count
        )

    # --- between steps ------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Let groups enter, save a checkpoint that is due, and restart if that is worth it."""
        for group in [group for group, at in self.returns.items() if at <= self.now]:
            del self.returns[group]
            self.gone.discard(group)
            self.policy.rejoin(group)
            self.stream.started(self.now, (group,))
            self.count["rejoins"] += 1
            entry_s = self.setting.entry_s
            self._spend("recovery", self._jitter(self.cluster.reconfigure_s if entry_s is None else entry_s))
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
        """Return whether the next step takes longer than the average step of the best cycles, restart included.

        The average is the planner's (renewal reward). That of the present cycle would postpone the restart for ever
        after an early failure.
        """
        complete = len(self.policy.live) == self.cluster.groups
        if not self.policy.plans_restarts or not self.spares or complete or self.step == self.started:
            return False
        cluster = self.cluster
        interruption_s = cluster.detection_s + cluster.reconfigure_s + cluster.microbatch_s
        return self._step_s() * (1 + interruption_s / cluster.mtbf_s) > self.average_s

    def _restart(self) -> None:
        """Stop all groups, and start them again from the last checkpoint."""
        self.spent |= self._kept  # work since the checkpoint is done again and counts as lost
        self.spent["lost"] += self.now - self.saved_at
        missing = self._start_all()
        while self.spares and missing and self.policy.lose(sorted(missing)).wiped_out:
            self.count["wipe_outs"] += 1
            missing = self._start_all()
        if self.policy.rejoins:
            self.returns |= dict.fromkeys(sorted(missing), self.now + given(self.cluster.rejoin_s))
        self.step = self.saved
        self._save()
        self.started = self.step

    def _start_all(self) -> set[GroupId]:
        """Start every group. Returns the groups that are missing at the end because they failed meanwhile."""
        mode = self.setting.in_restart
        living = set(range(self.cluster.groups)) - self.gone
        ends = self.now + self._jitter(self.cluster.restart_s)
        while mode in ("missing", "again") and self.stream.next_time(living) < ends:
            failure = self.stream.take(living)
            if mode == "missing":
                living -= set(failure.groups)
            else:
                ends = max(failure.time, self.now) + self._jitter(self.cluster.restart_s)
        self._spend("restart", ends - self.now)
        if mode != "after":
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
        """The groups that can fail: the live groups, and those that are coming back."""
        return self.policy.live | self.returns.keys() if self.returns else self.policy.live

    def _compute_s(self) -> float:
        """Return the compute part of a step. A straggler delays all groups, unless the policy gives it less work."""
        held_up = self.now < self.slow_until and not self.policy.spares_stragglers
        return self.policy.stacks() * self.cluster.compute_s * (STRAGGLER if held_up else 1.0)

    def _step_s(self) -> float:
        return self._compute_s() + self.cluster.allreduce_s

    def _jump(self) -> None:
        """Simulate together all steps that end well before the next event."""
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
        """Simulate one step with its losses."""
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
        """Process the failures before the all-reduce's end: detection, decision, patch. False: the attempt has
        ended."""
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
        """Schedule the return of the lost groups, where groups rejoin. A group that fails on its way back begins
        anew."""
        if not self.policy.rejoins:
            return
        away = given(self.cluster.rejoin_s)
        if failure.cause == "flap":  # the processes live, but their link is down for a while
            away = self.noise.uniform(*FLAP_S)
        for group in failure.groups:
            self.returns[group] = failure.time + away

    def _jitter(self, duration: float) -> float:
        """Every duration is multiplied by N(1, jitter^2), as in SPARe's simulation, but is never negative."""
        return max(0.0, duration * (1.0 + self.setting.jitter * self.noise.standard_normal()))

    def _spend(self, what: str, duration: float) -> None:
        self.now += duration
        self.spent[what] += duration


def planners_estimate(setting: Setting, policy: str) -> Estimate:
    """Return the planner's estimate for this policy on this cluster, with its T_c* and its average step."""
    hosts = POLICIES[policy].stacked and (setting.hosted or policy in SEARCHED)
    return evaluate(setting.cluster, cast(PolicyName, policy), setting.redundancy if hosts else None)
