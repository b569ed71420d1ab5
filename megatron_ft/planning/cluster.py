"""What the planner is asked about: a cluster, its failures and the times of a job on it. Units are in the names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from megatron_ft.errors import ConfigError

WHOLE = ("gpus", "gpus_per_group", "gpus_per_node", "microbatches", "steps")
POSITIVE = ("mtbf_s", "step_s", "checkpoint_s")
NOT_NEGATIVE = ("allreduce_s", "restart_s", "detection_s", "reconfigure_s", "rejoin_s", "price_per_gpu_hour")
OPTIONAL = ("rejoin_s", "price_per_gpu_hour")
MOST_GROUPS = 100_000
"""Far beyond any cluster; the equations sum over groups."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One training job on one cluster. Raises ``ConfigError`` for what cannot be.

    ``mtbf_s`` is that of the whole system: mean time between two failures of anything the job runs on. ``step_s`` is a
    failure-free step, ``allreduce_s`` the part of it that does not overlap with computing. ``detection_s``: until the
    survivors know of a failure; ``reconfigure_s``: until they go on (agree, decide, shrink). ``restart_s``: the whole job,
    from its end to the next step. ``rejoin_s``: until a lost group is back; None: it does not come back.
    """

    gpus: int
    gpus_per_group: int
    mtbf_s: float
    step_s: float
    restart_s: float
    checkpoint_s: float
    allreduce_s: float = 0.0
    microbatches: int = 16
    steps: int = 10_000
    detection_s: float = 5.0
    reconfigure_s: float = 2.0
    rejoin_s: float | None = 900.0
    price_per_gpu_hour: float | None = None
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in WHOLE:
            _whole(name, getattr(self, name))
        for name in POSITIVE:
            _number(name, getattr(self, name), positive=True)
        for name in NOT_NEGATIVE:
            if name not in OPTIONAL or getattr(self, name) is not None:
                _number(name, getattr(self, name), positive=False)
        self._check_sizes()
        self._check_times()

    @property
    def groups(self) -> int:
        """N."""
        return self.gpus // self.gpus_per_group

    @property
    def nodes(self) -> float:
        """May be a fraction: a test machine with four GPUs is half a node of eight."""
        return self.gpus / self.gpus_per_node

    @property
    def compute_s(self) -> float:
        """One shard on one group: one stack."""
        return self.step_s - self.allreduce_s

    @property
    def microbatch_s(self) -> float:
        return self.compute_s / self.microbatches

    @property
    def down_s(self) -> float:
        """From a failure that nobody masks to the next step."""
        return self.detection_s + self.restart_s

    @property
    def failure_free_s(self) -> float:
        """T_0: all steps without a failure and without a checkpoint."""
        return self.steps * self.step_s

    def scaled(self, groups: int) -> Cluster:
        """The same job with more or fewer groups of the same nodes: failures as often per node, times as they are."""
        return replace(self, gpus=groups * self.gpus_per_group, mtbf_s=self.mtbf_s * self.groups / groups)

    def _check_sizes(self) -> None:
        if self.gpus % self.gpus_per_group:
            raise ConfigError(
                f"gpus is {self.gpus} and gpus_per_group is {self.gpus_per_group}; groups are of equal size, so the second "
                f"must divide the first: use {self.gpus - self.gpus % self.gpus_per_group or self.gpus_per_group} GPUs"
            )
        if self.groups > MOST_GROUPS:
            raise ConfigError(
                f"gpus is {self.gpus} and gpus_per_group is {self.gpus_per_group}, which makes {self.groups} groups; the "
                f"planner takes at most {MOST_GROUPS}: use larger groups"
            )

    def _check_times(self) -> None:
        if self.allreduce_s >= self.step_s:
            raise ConfigError(
                f"allreduce_s is {self.allreduce_s:g} and step_s is {self.step_s:g}; a step contains its all-reduce and "
                f"computes besides: give the part of the all-reduce that does not overlap with computing"
            )
        if self.mtbf_s < self.step_s:
            raise ConfigError(
                f"the whole system fails every {self.mtbf_s:.3g} s, more often than one step of {self.step_s:g} s; no "
                f"policy gets on like that: check the failure rate and its unit, or make steps shorter"
            )


def check_redundancy(redundancy: int, groups: int) -> None:
    _whole("redundancy", redundancy)
    if redundancy > groups:
        raise ConfigError(
            f"redundancy is {redundancy} but there are {groups} groups, and a group hosts a shard once; lower it to at most "
            f"{groups}, or use smaller groups"
        )


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number >= 1")


def _number(name: str, value: object, *, positive: bool) -> None:
    rule = "> 0" if positive else ">= 0"
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a number {rule}")
    if value < 0 or (positive and value == 0):
        raise ConfigError(f"{name} is {value:g}; it must be a number {rule}")
