"""The planner's input: a cluster, its failures and the times of a job on it. Names end in the unit."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from math import inf

from megatron_ft.config.validators import POSITIVE, check, number, or_none, setting, whole_number
from megatron_ft.errors import ConfigError

MOST_GROUPS = 100_000
"""Largest number of groups. The equations sum over groups."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One training job on one cluster.

    Attributes:
        gpus: Number of GPUs, a multiple of ``gpus_per_group``.
        gpus_per_group: Number of GPUs in each group.
        mtbf_s: Mean time between two failures of anything the job runs on, in seconds.
        step_s: Time of a failure-free step, in seconds.
        restart_s: Time from the end of the job to its next step, in seconds.
        checkpoint_s: Time of a checkpoint, in seconds.
        steps: Number of steps of the whole run. Where no wipe-out is expected in it, the checkpoint period depends on it.
        allreduce_s: Part of the step's all-reduce that does not overlap with computation, in seconds.
        microbatches: G, the number of microbatches of a shard.
        detection_s: Time until the survivors know of a failure, in seconds.
        reconfigure_s: Time from there until they continue (agree, decide, shrink), in seconds.
        rejoin_s: Time until a lost group is back, in seconds. None: it does not come back.
        gpus_per_node: Number of GPUs in each node.
        job_mtbf_hours: Mean time between failures that end the whole job whatever the policy (fabric, shared file
            system, scheduler), in hours, beside those of ``mtbf_s``. None: they are left out.
        repair_hours: Time until a node that failed is in service again, in hours. None: unknown.

    Raises:
        ConfigError: a value is out of range, or values contradict each other.
    """

    gpus: int = setting(MISSING, whole_number(1))
    gpus_per_group: int = setting(MISSING, whole_number(1))
    mtbf_s: float = setting(MISSING, POSITIVE)
    step_s: float = setting(MISSING, POSITIVE)
    restart_s: float = setting(MISSING, number(0))
    checkpoint_s: float = setting(MISSING, POSITIVE)
    steps: int = setting(MISSING, whole_number(1))
    allreduce_s: float = setting(0.0, number(0))
    microbatches: int = setting(16, whole_number(1))
    detection_s: float = setting(5.0, number(0))
    reconfigure_s: float = setting(2.0, number(0))
    rejoin_s: float | None = setting(900.0, or_none(number(0)))
    gpus_per_node: int = setting(8, whole_number(1))
    job_mtbf_hours: float | None = setting(None, or_none(POSITIVE))
    repair_hours: float | None = setting(None, or_none(POSITIVE))

    def __post_init__(self) -> None:
        check(self)
        self._check_sizes()
        self._check_times()

    @property
    def groups(self) -> int:
        """N, the number of groups."""
        return self.gpus // self.gpus_per_group

    @property
    def nodes(self) -> float:
        """Number of nodes. It may be a fraction: a test machine with four GPUs is half a node of eight."""
        return self.gpus / self.gpus_per_node

    @property
    def compute_s(self) -> float:
        """Time in which one group computes one shard (one stack), in seconds."""
        return self.step_s - self.allreduce_s

    @property
    def microbatch_s(self) -> float:
        return self.compute_s / self.microbatches

    @property
    def down_s(self) -> float:
        """Time from a failure that ends the job to its next step, in seconds."""
        return self.detection_s + self.restart_s

    @property
    def job_mtbf_s(self) -> float:
        """Mean time between failures that end the whole job, in seconds; infinite where they are left out."""
        return inf if self.job_mtbf_hours is None else self.job_mtbf_hours * 3600

    @property
    def failure_free_s(self) -> float:
        """T_0: time of all steps without a failure and without a checkpoint, in seconds."""
        return self.steps * self.step_s

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
                f"computation: give the part of the all-reduce that does not overlap with computation"
            )
        if self.mtbf_s < self.step_s:
            raise ConfigError(
                f"the whole system fails every {self.mtbf_s:.3g} s, more often than one step of {self.step_s:g} s; no "
                f"policy makes progress then: check the failure rate and its unit, or make steps shorter"
            )


OPTIONAL = tuple(field.name for field in fields(Cluster) if field.metadata["rule"].accepts(None))


def check_redundancy(redundancy: int, groups: int) -> None:
    """Raise ``ConfigError`` unless ``groups`` groups can host each shard ``redundancy`` times."""
    whole_number(1)("redundancy", redundancy)
    if redundancy > groups:
        raise ConfigError(
            f"redundancy is {redundancy} but there are {groups} groups, and a group hosts a shard once; lower it to at most "
            f"{groups}, or use smaller groups"
        )
