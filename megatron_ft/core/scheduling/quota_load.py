"""The largest load of a quota plan, without making the plan (papers: SPARe's stacks, ReCoVer's quotas).

Intuition: one loss changes little. The number of microbatches per group and shard is remembered, and only those of the
lost group need a new place: a host with room, or one that gets room by passing some of its own on. If no such chain
exists, the hosts in reach are full, and full of shards that have no other host: no plan of that load exists. That is
the augmenting path argument of maximum flow, so the answer is exact, and found about ten times faster than with a flow.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection

from megatron_ft.core.replication.placement import Placement
from megatron_ft.types import GroupId

Shard = int


class Memory:
    """A cache that makes :func:`least_load` faster when it is passed again after losses and joins. It changes no answer.

    It belongs to one placement and one number of microbatches per shard, those of its first use.
    """

    balance: _Balance | None = None


def least_load(
    shards: int,
    per_shard: int,
    live: Collection[GroupId],
    placement: Placement | None = None,
    memory: Memory | None = None,
) -> int:
    """Return the least largest load, in microbatches, with which the groups of ``live`` can compute all N*G of them.

    It is that of ``assignment.plan_step`` for equally fast groups. Shards without a live host go to any group.
    Raises ``ValueError`` for an empty ``live``.
    """
    if not live:
        raise ValueError("least_load needs at least one live group, got none")
    if placement is not None and max(live) >= placement.groups:
        raise ValueError(f"least_load knows the {placement.groups} groups of the placement, not group {max(live)}")
    ideal = -(-shards * per_shard // len(live))
    if placement is None or placement.redundancy >= placement.groups:
        return ideal
    memory = memory or Memory()
    if memory.balance is None:
        memory.balance = _Balance(per_shard, placement)
    return memory.balance.follow(set(live), ideal)


class _Balance:
    """A flow of microbatches from shards to live hosts that is kept through changes; no group has more than ``limit``.

    At first all groups are live and compute their own shards. Shards without a live host are not in the flow: they only
    need room, and the ideal load leaves enough.
    """

    def __init__(self, per_shard: int, placement: Placement) -> None:
        self.per_shard = per_shard
        self.hosts: list[list[GroupId]] = placement.host_table.tolist()
        self.stacks = [list(stack) for stack in placement.stacks]
        self._begin()

    def _begin(self) -> None:
        groups = len(self.hosts)
        self.limit = self.per_shard
        self.live = set(range(groups))
        self.amounts: list[dict[Shard, int]] = [{shard: self.per_shard} for shard in range(groups)]
        self.room = [0] * groups  # below the limit; of a dead group 0
        self.waiting: dict[Shard, int] = {}

    def follow(self, live: set[GroupId], ideal: int) -> int:
        """Take over the live groups, and return the least limit at which all hosted microbatches have a place."""
        if len(live) == len(self.hosts):
            self._begin()  # no search is needed: each group can compute its own shard
        joined = live - self.live
        for group in sorted(self.live - live):
            self._leave(group, live)
        self._change_limit(ideal if joined else max(ideal, self.limit))  # losses alone never lower the limit
        for group in sorted(joined):
            self._join(group)
        self.live = live
        while self.waiting:
            self._place()
            if self.waiting and not self._chains():
                self._change_limit(self.limit + 1)
        return self.limit

    def _leave(self, group: GroupId, live: set[GroupId]) -> None:
        for shard, amount in self.amounts[group].items():
            if any(host in live for host in self.hosts[shard]):
                self.waiting[shard] = self.waiting.get(shard, 0) + amount
        self.amounts[group] = {}
        self.live.remove(group)
        self.room[group] = 0

    def _join(self, group: GroupId) -> None:
        for shard in self.stacks[group]:
            if not any(host in self.live for host in self.hosts[shard]):
                self.waiting[shard] = self.per_shard
        self.live.add(group)
        self.room[group] = self.limit
        self._relieve(group, (self.per_shard * len(self.hosts)) // len(self.live))

    def _relieve(self, group: GroupId, share: int) -> None:
        """Move a share to the group from the fullest other hosts of its shards: room in many places keeps chains short."""
        for shard in itertools.cycle(self.stacks[group]):
            fullest = min(self.hosts[shard], key=lambda host: (shard not in self.amounts[host], self.room[host]))
            if self.limit - self.room[group] >= share or shard not in self.amounts[fullest] or fullest == group:
                return
            self._add(fullest, shard, -1)
            self._add(group, shard, 1)

    def _change_limit(self, limit: int) -> None:
        """Set the limit; groups with more than a lower limit give the surplus back."""
        change, self.limit = limit - self.limit, limit
        if not change:
            return
        for group in sorted(self.live):
            self.room[group] += change
            while self.room[group] < 0:
                shard, amount = next(iter(self.amounts[group].items()))
                given = min(amount, -self.room[group])
                self._add(group, shard, -given)
                self.waiting[shard] = self.waiting.get(shard, 0) + given

    def _add(self, group: GroupId, shard: Shard, amount: int) -> None:
        own = self.amounts[group]
        own[shard] = own.get(shard, 0) + amount
        if not own[shard]:
            del own[shard]
        self.room[group] -= amount

    def _place(self) -> None:
        """Place waiting microbatches at hosts with room, evenly: room in many places keeps later chains short."""
        for shard in list(self.waiting):
            while shard in self.waiting:
                emptiest = max(self.hosts[shard], key=self.room.__getitem__)
                if self.room[emptiest] <= 0:
                    break
                self._add(emptiest, shard, 1)
                self._placed(shard, 1)

    def _chains(self) -> bool:
        """Use chains of groups in which each passes on microbatches that the next one hosts too, and the last has room;
        shortest first. Return whether one was found.

        One search serves all waiting shards: the amounts along a chain are checked again for each. If no chain was
        found, nothing has changed during the search, so it has seen all chains: no waiting microbatch finds a place.
        """
        came: dict[GroupId, Shard] = {}  # for the sake of which shard a group was reached
        giver: dict[Shard, GroupId | None] = dict.fromkeys(self.waiting)
        queue = deque(self.waiting)
        found = False
        while queue:
            wanted = queue.popleft()
            for host in self.hosts[wanted]:
                if host in came or host not in self.live:
                    continue
                came[host] = wanted
                if self.room[host] > 0 and self._shift(host, came, giver):
                    found = True
                    if not self.waiting:
                        return True
                for other in self.amounts[host]:
                    if other not in giver:
                        giver[other] = host
                        queue.append(other)
        return found

    def _shift(self, last: GroupId, came: dict[GroupId, Shard], giver: dict[Shard, GroupId | None]) -> bool:
        """Shift along the chain, back from ``last``, as much as all its groups can pass on; return False if that is zero."""
        links: list[tuple[GroupId, Shard, GroupId]] = []
        group, amount = last, self.room[last]
        while (before := giver[came[group]]) is not None:
            links.append((group, came[group], before))
            amount = min(amount, self.amounts[before].get(came[group], 0))
            group = before
        first = came[group]
        amount = min(amount, self.waiting.get(first, 0))
        if not amount:
            return False
        for to, shard, before in links:
            self._add(to, shard, amount)
            self._add(before, shard, -amount)
        self._add(group, first, amount)
        self._placed(first, amount)
        return True

    def _placed(self, shard: Shard, amount: int) -> None:
        self.waiting[shard] -= amount
        if not self.waiting[shard]:
            del self.waiting[shard]
