"""What a simulated training run is made of: the planner's cluster, how failures come, and what is switchable."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, get_args

from megatron_ft.errors import ConfigError
from megatron_ft.planner.cluster import Cluster, check_redundancy

Renewal = Literal["system", "groups", "replaced"]
InRestart = Literal["missing", "none", "again"]
RestartFinds = Literal["everybody", "survivors", "divisor"]
Placement = Literal["golomb", "consecutive"]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """When groups fail, and of what.

    ``renewal``: the time between two failures of the whole *system* is Weibull with the cluster's mean, and each hits one
    of the N groups, which may be lost already, or with ``of_the_living`` always one that is not. Or every one of the
    *groups* has a clock of its own, with N times that mean, that starts anew whenever the group does; or only when the
    group was *replaced*. With a shape below 1 groups fail more often right after they start. SPARe (arXiv 2603.00357)
    does not say which it is.

    ``frail_share`` of the groups is hit ``frail_weight`` times as often as the others (system renewal). ``rack_share`` of
    the failures takes a whole rack of ``rack_groups`` neighbouring groups. ``mix``: causes as in ``faults.causes``, else
    every failure is a crash. ``trace``: recorded failures, (seconds since the start, group), in place of all this.
    """

    shape: float = 0.78
    renewal: Renewal = "system"
    of_the_living: bool = True
    frail_share: float = 0.0
    frail_weight: float = 1.0
    rack_share: float = 0.0
    rack_groups: int = 4
    mix: bool = False
    trace: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        _one_of("renewal", self.renewal, get_args(Renewal))
        _number("shape", self.shape, positive=True)
        _number("frail_weight", self.frail_weight, positive=True)
        for name in ("frail_share", "rack_share"):
            if not 0 <= _number(name, getattr(self, name)) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must lie between 0 and 1")
        if not isinstance(self.rack_groups, int) or self.rack_groups < 1:
            raise ConfigError(f"rack_groups is {self.rack_groups!r}; it must be a whole number >= 1")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training run. What the cluster does not say is as in SPARe's published simulation (arXiv 2603.00357).

    ``period_s``: between two checkpoints; None: the planner's T_c* for the policy. ``jitter``: every duration is multiplied
    by N(1, jitter^2). ``patch_in_replication``: the published times of replication are explained by a masked failure
    costing one stack there too, although a copy of the work exists; False takes the copy. ``in_restart``: a group that
    fails during a restart is *missing* after it; or *none* fails then; or the restart begins *again*, which with the
    published numbers (a failure every 300 s, a restart of 3600 s) never ends. ``restart_finds``: *everybody*, as spare
    nodes replace what is lost; or only the *survivors*, who share the same global batch; or only as many of them as
    divide it (*divisor*: an engine that knows no uneven quotas). ``duration_s``: when the job's time is over.
    ``hosted``: quotas plan on their stacks of ``redundancy`` shards; False: everybody may compute everything.
    ``read_s``: reading one shard ahead takes so long, in the background; a step cannot begin before its stack is there.
    ``shard_gb``: memory for one.
    """

    cluster: Cluster
    redundancy: int = 9
    failures: Failures = field(default_factory=Failures)
    period_s: float | None = None
    jitter: float = 0.05
    in_restart: InRestart = "missing"
    restart_finds: RestartFinds = "everybody"
    duration_s: float = inf
    placement: Placement = "golomb"
    hosted: bool = True
    patch_in_replication: bool = True
    read_s: float = 0.0
    shard_gb: float = 0.0

    def __post_init__(self) -> None:
        check_redundancy(self.redundancy, self.cluster.groups)
        _one_of("in_restart", self.in_restart, get_args(InRestart))
        _one_of("restart_finds", self.restart_finds, get_args(RestartFinds))
        _one_of("placement", self.placement, get_args(Placement))
        if not 0 <= _number("jitter", self.jitter) <= 0.3:
            raise ConfigError(f"jitter is {self.jitter!r}; it must lie between 0 and 0.3, or durations would be negative")
        for name in ("read_s", "shard_gb"):
            _number(name, getattr(self, name))
        if self.duration_s != inf:
            _number("duration_s", self.duration_s, positive=True)
        if self.period_s is not None:
            _number("period_s", self.period_s, positive=True)
        if self.failures.rack_groups > self.cluster.groups:
            raise ConfigError(f"rack_groups is {self.failures.rack_groups}, the cluster has {self.cluster.groups} groups")
        for time, group in self.failures.trace:
            if not 0 <= group < self.cluster.groups or time < 0:
                raise ConfigError(
                    f"the trace says that group {group} fails at {time:g} s; groups are 0 to {self.cluster.groups - 1}, "
                    f"times at least 0"
                )


def _number(name: str, value: float, positive: bool = False) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        raise ConfigError(f"{name} is {value!r}; it must be a number {'> 0' if positive else '>= 0'}")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it can be: {', '.join(allowed)}")
