"""``stacked_quota``: quotas of microbatches by flow (``core.scheduling.assignment``); the default.

With ``standby`` ``"slack"``, groups that would wait for others in every step compute copies meanwhile. Quotas divide
unevenly (48 lost microbatches over 597 groups leave 549 groups idle for one microbatch), so the copies cost no step time,
and a loss then leaves less to compute anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_ft.core.scheduling import assignment
from megatron_ft.core.scheduling.policies.policy_port import Batch, StepPolicy
from megatron_ft.types import GroupId, Microbatch, Plan


@dataclass(frozen=True)
class StackedQuota(StepPolicy):
    """``slack``: groups with less to compute than others compute copies, one each."""

    slack: bool = False
    balances = True

    def begin(self, batch: Batch, step: int, live: tuple[GroupId, ...], speeds: Mapping[GroupId, float]) -> Plan:
        plan = assignment.plan_step(step, batch.shards, batch.per_shard, live, batch.placement, speeds)
        if not self.slack:
            return plan
        copies = _copies(batch, live, tuple(sorted(speeds.items())))
        standby = {group: (tuple(one._replace(step=step) for one in part),) for group, part in copies.items()}
        return replace(plan, standby=standby)

    def most_parts(self, batch: Batch) -> int:
        return int(self.slack)


@lru_cache(maxsize=64)
def _copies(
    batch: Batch, live: tuple[GroupId, ...], speeds: tuple[tuple[GroupId, float], ...]
) -> dict[GroupId, list[Microbatch]]:
    """Return for each group with slack the microbatches that it copies; the same in every step, so they are of step 0.

    A group's slack is what it could compute without being later than the last group. It copies one contributor, so that it
    needs one buffer. First come copies of what slow groups have, then of shards with few live hosts; as many as possible at
    hosts of their shard.
    """
    pace = dict(speeds)
    plan = assignment.plan_step(0, batch.shards, batch.per_shard, live, batch.placement, pace)
    loads = {group: len(own) for group, own in plan.assignment.items()}
    longest = max(load / pace.get(group, 1.0) for group, load in loads.items())
    # A product that should be a whole number may come out a little less.
    slack = {group: int(longest * pace.get(group, 1.0) + 1e-9) - load for group, load in loads.items()}
    able = {group for group, own in slack.items() if own}
    hosts = _live_hosts(batch, live)
    offers = list(_by_need(plan, pace, hosts)) if able else []
    found: dict[GroupId, list[Microbatch]] = {}
    copied: set[Microbatch] = set()
    for hosted in (True, False):
        for one, contributor in offers if able else ():
            others = (hosts[one.shard] & able if hosted else able) - {contributor}
            if others and one not in copied:
                group = min(others)
                rest = [m for m in plan.of(contributor) if m != one and m not in copied]
                at_hand = [m for m in rest if group in hosts[m.shard]]
                far = [m for m in rest if group not in hosts[m.shard]]
                found[group] = sorted([one, *(at_hand + far)[: slack[group] - 1]])
                copied.update(found[group])
                able.discard(group)
    return found


def _live_hosts(batch: Batch, live: tuple[GroupId, ...]) -> list[frozenset[GroupId]]:
    """Return the live groups that host each shard."""
    place = batch.placement
    if place is None or place.redundancy >= place.groups:
        return [frozenset(live)] * batch.shards
    hosts: list[set[GroupId]] = [set() for _ in range(batch.shards)]
    for group in live:
        for shard in place.stack(group):
            hosts[shard].add(group)
    return list(map(frozenset, hosts))


def _by_need(
    plan: Plan, pace: Mapping[GroupId, float], hosts: Sequence[frozenset[GroupId]]
) -> Iterator[tuple[Microbatch, GroupId]]:
    """Yield each microbatch with its contributor, in the order in which copies of them are useful: one of each
    contributor in turn."""
    shares = {
        group: sorted(own, key=lambda one: len(hosts[one.shard])) for group, own in plan.assignment.items() if own
    }
    for turn in range(max(map(len, shares.values()))):
        row = [(share[turn], group) for group, share in shares.items() if turn < len(share)]
        yield from sorted(row, key=lambda offer: (pace.get(offer[1], 1.0), len(hosts[offer[0].shard]), offer))
