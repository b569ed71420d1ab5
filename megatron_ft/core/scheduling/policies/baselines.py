"""The baselines of the two papers: replication, a shrinking batch, checkpoint-restart.

- ``replication`` (Rep+CKPT in SPARe, arXiv 2603.00357, published simulation): sets of r groups compute the same r
  shards, so a step takes r times as long from the start, and a lost group costs nothing until its set has no copy left.
- ``drop`` (ReCoVer, arXiv 2605.11215, ablation): a lost group's shard is left out. The batch shrinks and the gradient is
  divided by the number of microbatches left, so it differs from the failure-free run's; the paper shows loss spikes.
- ``restart`` (checkpoint-restart): any loss ends the attempt, and the run goes on from the last checkpoint.

Each is a pure function of the live groups: a :class:`Decision` with a plan, or with none when the run has to restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_ft.types import GroupId, Microbatch, Plan, listed

Shard = int


@dataclass(frozen=True)
class Decision:
    """The decision of a baseline about one step.

    Attributes:
        kind: ``go`` on, ``restart`` from the checkpoint, or ``wipe-out``: a restart because the losses leave no choice.
        reason: why, for people.
        plan: the plan of the step with ``go``, else None.
        computes: the shards that each live group computes, contributed or not.
        divisor: the number of microbatches that the gradient sum is divided by.
    """

    kind: Literal["go", "restart", "wipe-out"]
    reason: str
    plan: Plan | None = None
    computes: Mapping[GroupId, tuple[Shard, ...]] = field(default_factory=dict)
    divisor: int = 0

    @property
    def stacks(self) -> int:
        return max(map(len, self.computes.values()), default=0)


def replica_set(group: GroupId, groups: int, copies: int) -> range:
    """Return the groups that compute the same as ``group``, itself included; these are also the numbers of their shards.

    The last set is smaller if ``copies`` does not divide ``groups``: it has fewer copies, and fewer shards by as many.
    """
    first = group // copies * copies
    return range(first, min(first + copies, groups))


def replication(step: int, shards: int, per_shard: int, live: Collection[GroupId], copies: int) -> Decision:
    """Decide with r-fold replication: all copies compute the shards of their set, the lowest live one contributes them."""
    alive = _checked(shards, per_shard, live)
    if not 1 <= copies <= shards:
        raise ValueError(f"copies must lie between 1 and the number of groups, {shards}, got {copies}")
    sets = [replica_set(first, shards, copies) for first in range(0, shards, copies)]
    gone = [members for members in sets if not alive & set(members)]
    if gone:
        names = "; ".join(listed(members, most=8) for members in gone)
        return Decision("wipe-out", f"all copies of a set are lost (groups {names}): restart from the checkpoint")
    computes = {group: tuple(replica_set(group, shards, copies)) for group in sorted(alive)}
    contributors = {min(alive & set(members)) for members in sets}
    contributes = {group: own if group in contributors else () for group, own in computes.items()}
    fewest = min(len(alive & set(members)) for members in sets)
    reason = f"{len(alive)} of {shards} groups live, every set of {copies} copies has at least {fewest}"
    return _go(step, per_shard, contributes, computes, reason)


def drop(step: int, shards: int, per_shard: int, live: Collection[GroupId]) -> Decision:
    """Decide with a shrinking batch: every live group computes its own shard; the shards of lost groups are left out."""
    alive = _checked(shards, per_shard, live)
    if not alive:
        return Decision("wipe-out", f"none of {shards} groups is live: restart from the checkpoint")
    own = {group: (group,) for group in sorted(alive)}
    left, whole = len(alive) * per_shard, shards * per_shard
    reason = f"{len(alive)} of {shards} groups live: {left} of {whole} microbatches, the gradient is divided by {left}"
    return _go(step, per_shard, own, own, reason)


def restart(step: int, shards: int, per_shard: int, live: Collection[GroupId]) -> Decision:
    """Decide with checkpoint-restart: if all groups are live, each computes its own shard; any loss ends the attempt."""
    alive = _checked(shards, per_shard, live)
    if len(alive) < shards:
        dead = listed(sorted(set(range(shards)) - alive), most=8)
        return Decision("restart", f"group {dead} lost: step {step} is thrown away, restart from the checkpoint")
    own = {group: (group,) for group in range(shards)}
    return _go(step, per_shard, own, own, f"all {shards} groups live")


def divisible_world(live: int, total: int) -> int:
    """Return the number of groups, of ``live``, with which an engine restarts that divides ``total`` microbatches evenly.

    It is the largest number that divides ``total``: one group less than a power of two is as good as half of it.
    """
    if live < 1 or total < 1:
        raise ValueError(f"live and total must both be at least 1, got {live} and {total}")
    return next(world for world in range(live, 0, -1) if total % world == 0)


def _go(
    step: int,
    per_shard: int,
    contributes: Mapping[GroupId, tuple[Shard, ...]],
    computes: Mapping[GroupId, tuple[Shard, ...]],
    reason: str,
) -> Decision:
    assignment = {
        group: tuple(Microbatch(step, shard, index) for shard in own for index in range(per_shard))
        for group, own in contributes.items()
    }
    divisor = sum(map(len, assignment.values()))
    return Decision("go", reason, Plan(step, assignment, reason), computes, divisor)


def _checked(shards: int, per_shard: int, live: Collection[GroupId]) -> set[GroupId]:
    if shards < 1 or per_shard < 1:
        raise ValueError(f"shards and per_shard must both be at least 1, got {shards} and {per_shard}")
    alive = set(live)
    if not alive <= set(range(shards)):
        raise ValueError(f"live groups must be of 0 to {shards - 1}, got {sorted(alive - set(range(shards)))}")
    return alive
