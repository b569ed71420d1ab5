"""Settings of a simulated training run: the planner's cluster, the failures, and the switches of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from megatron_ft.config.validators import POSITIVE, Rule, check, number, one_of, or_none, setting, whole_number
from megatron_ft.errors import ConfigError
from megatron_ft.plan.cluster import Cluster, check_redundancy

Renewal = Literal["system", "groups", "replaced"]
InRestart = Literal["missing", "none", "again", "after"]
RestartFinds = Literal["everybody", "survivors", "divisor"]
Placement = Literal["golomb", "consecutive"]
PatchInSpare = Literal["needed", "one", "step"]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """When groups fail, and of which cause.

    Attributes:
        shape: Shape of the Weibull distribution of the times between failures. Below 1, groups fail more often right
            after they start.
        renewal: "system": the time between two failures of the whole system has the cluster's mean, and each failure
            hits one of the N groups. "groups": every group has a clock of its own, with N times that mean, which begins
            anew whenever the group starts. "replaced": the clock begins anew only when the group was replaced. SPARe
            (arXiv 2603.00357) does not say which of them it uses.
        of_the_living: With "system", a failure always hits a live group; otherwise the group may be lost already.
        rack_share: Share of the failures that take a whole rack.
        rack_groups: Number of neighbouring groups in a rack.
        mix: Causes are drawn from ``cluster.faults.causes``; otherwise every failure is a crash.
        trace: Recorded failures, (seconds since the start, group), in place of all this.
    """

    shape: float = setting(0.78, POSITIVE)
    renewal: Renewal = setting("system", one_of(*get_args(Renewal)))
    of_the_living: bool = True
    rack_share: float = setting(0.0, number(0, 1))
    rack_groups: int = setting(4, whole_number(1))
    mix: bool = False
    trace: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training run. The defaults are those of SPARe's published simulation (arXiv 2603.00357).

    Attributes:
        cluster: Cluster and job.
        redundancy: r, the number of groups that host each shard.
        failures: Distribution of the failures.
        period_s: Seconds between two checkpoints. None: the planner's T_c* for the policy.
        jitter: Every duration is multiplied by N(1, jitter^2). Above 0.3 durations would be negative.
        in_restart: "missing": a group that fails during a restart is absent after it. "none": no group fails then.
            "after": a group that fails in it is lost right after it. "again": the restart begins anew, which never ends
            with the published numbers (a failure every 300 s, a restart of 3600 s).
        restart_finds: Groups after a restart. "everybody": spare nodes replace the lost ones. "survivors": only the
            others, which share the same global batch. "divisor": as many of the survivors as divide the batch (for an
            engine without uneven quotas).
        duration_s: Seconds after which the job's time is over.
        placement: Which groups host which shards.
        hosted: Quotas are planned on stacks of ``redundancy`` shards. False: every group may compute every shard.
        patch_in_replication: A masked failure costs replication one stack, although a copy of the work exists; that
            explains the published times. False: the copy is used.
        patch_in_spare: "needed": a loss that SPARe masks costs the stacks that no living group has computed. "one": at least
            one stack, as for replication. "step": all S stacks of the step again, if any is missing. The paper does not say;
            docs/results compares them.
        entry_s: Seconds for which the others wait when a group comes back. None: as long as after a loss.
    """

    cluster: Cluster
    redundancy: int = 9
    failures: Failures = field(default_factory=Failures)
    period_s: float | None = setting(None, or_none(POSITIVE))
    jitter: float = setting(0.05, number(0, 0.3))
    in_restart: InRestart = setting("missing", one_of(*get_args(InRestart)))
    restart_finds: RestartFinds = setting("everybody", one_of(*get_args(RestartFinds)))
    duration_s: float = setting(inf, Rule("a number > 0", lambda value: value == inf or POSITIVE.accepts(value)))
    placement: Placement = setting("golomb", one_of(*get_args(Placement)))
    hosted: bool = True
    patch_in_replication: bool = True
    patch_in_spare: PatchInSpare = setting("needed", one_of(*get_args(PatchInSpare)))
    entry_s: float | None = None

    def __post_init__(self) -> None:
        check(self)
        check_redundancy(self.redundancy, self.cluster.groups)
        if self.failures.rack_groups > self.cluster.groups:
            raise ConfigError(
                f"rack_groups is {self.failures.rack_groups}, the cluster has {self.cluster.groups} groups"
            )
        for time, group in self.failures.trace:
            if not 0 <= group < self.cluster.groups or time < 0:
                raise ConfigError(
                    f"the trace says that group {group} fails at {time:g} s; groups are 0 to {self.cluster.groups - 1}, "
                    f"times at least 0"
                )
