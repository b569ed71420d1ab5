"""``replication``: sets of r groups compute the same r shards (``Rep+CKPT`` in SPARe, arXiv 2603.00357).

A step takes r times as long from the start, and a lost group costs nothing until its set has no copy left, which is a
wipe-out. One copy of a set contributes its shards; the others have them as one standby part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_ft.core.scheduling.policies.policy_port import Batch, StepPolicy, wiped_out
from megatron_ft.types import GroupId, Microbatch, Part, Plan, listed


@dataclass(frozen=True)
class Replication(StepPolicy):
    """``copies``: number r of groups in a set, from 1 to the number of shards."""

    copies: int = 2
    wipes_out = True

    def begin(self, batch: Batch, step: int, live: tuple[GroupId, ...], speeds: Mapping[GroupId, float]) -> Plan:
        alive, sets = set(live), replica_sets(batch.shards, self.copies)
        if ended := self._ended(batch, step, alive):
            return ended
        own: dict[GroupId, tuple[Microbatch, ...]] = dict.fromkeys(live, ())
        standby: dict[GroupId, tuple[Part, ...]] = {}
        for members in sets:
            work = tuple(Microbatch(step, shard, index) for shard in members for index in range(batch.per_shard))
            first, *others = sorted(alive & set(members))
            own[first] = work
            standby |= dict.fromkeys(others, (work,))
        fewest = min(len(alive & set(members)) for members in sets)
        here = sum(group < batch.shards for group in live)
        reason = f"{here} of {batch.shards} groups live, every set of {self.copies} copies has at least {fewest}"
        return Plan(step, own, reason, standby=standby, facts={"copies": self.copies, "fewest_copies": fewest})

    def change(self, batch: Batch, plan: Plan, lost: Collection[GroupId], joined: Collection[GroupId]) -> Plan:
        alive = (plan.assignment.keys() - set(lost)) | set(joined)
        return self._ended(batch, plan.step, alive) or super().change(batch, plan, lost, joined)

    def _ended(self, batch: Batch, step: int, alive: set[GroupId]) -> Plan | None:
        """Return the plan after a wipe-out if a set has no copy left."""
        gone = next((m for m in replica_sets(batch.shards, self.copies) if not alive & set(m)), None)
        if gone is None:
            return None
        return wiped_out(step, f"wipe-out: all copies of a set are lost (groups {listed(gone, most=8)})")

    def most_parts(self, batch: Batch) -> int:
        return int(self.copies > 1)


def replica_sets(groups: int, copies: int) -> list[range]:
    """Return the sets of groups that compute the same shards; a set's groups and its shards have the same numbers.

    The last set is smaller if ``copies`` does not divide ``groups``: it has fewer copies, and fewer shards by as many.
    """
    if not 1 <= copies <= groups:
        raise ValueError(f"copies must lie between 1 and the number of groups, {groups}, got {copies}")
    return [range(first, min(first + copies, groups)) for first in range(0, groups, copies)]
