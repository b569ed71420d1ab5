"""ReCtlr as a running record: a loss repairs the present contributions instead of deciding them anew (SPARe, ReCtlr).

``rectlr.reconfigure`` is the reference: the same S, the same number of moves, the same number of shards to patch. This
module remembers the contributor of each shard, and after a loss searches new contributors of the lost shards only:
shortest augmenting paths in the residual graph of the min-cost flow, nearly always a few edges long. It makes
simulations of thousands of losses possible, and the decision nearly free of charge in a run that keeps the record.

Costs are those of ``rectlr``: 0 for an entry that its group has computed in this step, 1 for one that it has to patch,
N + 2 for one that has to be moved among the first S as well.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from megatron_ft.core.replication.placement import Placement
from megatron_ft.core.scheduling.policies.rectlr import lower_bound
from megatron_ft.types import GroupId

Shard = int


@dataclass(frozen=True)
class Repaired:
    """The repair after a loss.

    Attributes:
        phase: as in ``rectlr.Outcome``.
        S: the new S.
        moves: number of stack entries that came forward.
        patch: (group, shard) of each shard that a group has yet to compute in this step.
        wiped_out: with ``wipe-out``, the shards without a live host.
    """

    phase: Literal["fixed", "free", "wipe-out"]
    S: int
    moves: int = 0
    patch: tuple[tuple[GroupId, Shard], ...] = ()
    wiped_out: tuple[Shard, ...] = ()

    @property
    def depth(self) -> int:
        """The largest number of shards that one group has to patch, one after the other."""
        counts: dict[GroupId, int] = {}
        for group, _ in self.patch:
            counts[group] = counts.get(group, 0) + 1
        return max(counts.values(), default=0)


class Stacks:
    """The orders inside the stacks, S, and the contributor of each shard, through losses; at first as after a restart."""

    def __init__(self, placement: Placement) -> None:
        N = placement.groups
        self.N, self.S = N, 1
        self.orders = [list(stack) for stack in placement.stacks]
        self.hosts = [list(hosts) for hosts in placement.hosts]
        self.live = set(range(N))
        self.owner: list[GroupId] = list(range(N))
        self._own: list[set[Shard]] = [{shard} for shard in range(N)]
        self._covered = [1] * N  # number of live groups that have the shard among their first S
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, in which every live group computes the first S of its stack."""
        self._step_S = self.S
        self._step_first: dict[GroupId, list[Shard]] = {}  # of groups whose order has changed in this step
        self._patched: set[tuple[GroupId, Shard]] = set()

    def computed(self, group: GroupId, shard: Shard) -> bool:
        """Return whether the group has computed the shard in this step, or computes it in any case."""
        first = self._step_first.get(group) or self.orders[group][: self._step_S]
        return shard in first or (group, shard) in self._patched

    def lose(self, group: GroupId) -> Repaired:
        """Find other contributors for the shards of ``group``, which is lost (ReCtlr, phases 1 to 3)."""
        self.live.remove(group)
        for shard in self.orders[group][: self.S]:
            self._covered[shard] -= 1
        orphans, self._own[group] = sorted(self._own[group]), set()
        if all(self._covered[shard] for shard in self.orders[group][: self.S]):
            return Repaired("fixed", self.S, patch=self._hand_over(orphans))
        wiped = [s for s in self.orders[group] if not any(g in self.live for g in self.hosts[s])]
        if wiped:
            return Repaired("wipe-out", self.S, wiped_out=tuple(sorted(wiped)))
        return self._free(orphans)

    def _hand_over(self, orphans: list[Shard]) -> tuple[tuple[GroupId, Shard], ...]:
        """Hand orphans to groups that have them among their first S, and return those to patch: if S grew in this step,
        a group may not have computed them yet."""
        patch = []
        for shard in orphans:
            present = [g for g in self.hosts[shard] if g in self.live and shard in self.orders[g][: self.S]]
            group = min(present, key=lambda g: (not self.computed(g, shard), g))
            if not self.computed(group, shard):
                patch.append((group, shard))
            self._adopt(shard, group)
        self._patched.update(patch)
        return tuple(patch)

    def _adopt(self, shard: Shard, group: GroupId) -> None:
        self.owner[shard] = group
        self._own[group].add(shard)

    def _free(self, orphans: list[Shard]) -> Repaired:
        least = max(self.S, lower_bound(self.N, len(self.live)))
        while True:
            search = _Search(self, least)
            if all(search.place(shard) for shard in orphans):
                return self._commit(search, least)
            search.undo()
            least += 1

    def _commit(self, search: _Search, least: int) -> Repaired:
        """Take over the result of the search: new orders at S = ``least``, and the shards to compute for them."""
        patch, moves = [], 0
        if least > self.S:
            for group in self.live:
                for shard in self.orders[group][self.S : least]:
                    self._covered[shard] += 1
        for group in sorted({self.owner[shard] for shard in search.touched}):
            order, own = self.orders[group], self._own[group]
            first = order[:least]
            moved = [shard for shard in order[least:] if shard in own]
            if moved:
                idle = [shard for shard in first if shard not in own]
                out = idle[len(idle) - len(moved) :]
                stay = [shard for shard in first if shard not in out]
                self._step_first.setdefault(group, order[: self._step_S])
                self.orders[group] = [*stay, *moved, *out, *(s for s in order[least:] if s not in moved)]
                moves += len(moved)
                for shard in moved:
                    self._covered[shard] += 1
                for shard in out:
                    self._covered[shard] -= 1
            patch += [(group, s) for s in self.orders[group][:least] if s in own and not self.computed(group, s)]
        self._patched.update(patch)
        self.S = least
        return Repaired("free", least, moves, tuple(patch))


class _Search:
    """Shortest augmenting paths at a fixed S, one orphaned shard after the other."""

    def __init__(self, stacks: Stacks, S: int) -> None:
        self.stacks, self.S = stacks, S
        self.touched: set[Shard] = set()
        self._before: dict[Shard, GroupId] = {}
        self._paid = 0  # the cost of all placed orphans so far: no path can gain more by undoing it

    def _cost(self, shard: Shard, group: GroupId) -> int:
        stacks = self.stacks
        if shard not in stacks.orders[group][: self.S]:
            return stacks.N + 2
        return 0 if stacks.computed(group, shard) else 1

    def place(self, orphan: Shard) -> bool:
        """Find a contributor for ``orphan``, moving other shards if that is cheapest; return False if S allows none."""
        stacks = self.stacks
        best: dict[GroupId, int] = {}
        came: dict[GroupId, tuple[Shard, GroupId | None]] = {}
        heap: list[tuple[int, GroupId]] = []

        def reach(shard: Shard, before: GroupId | None, so_far: int) -> None:
            for group in stacks.hosts[shard]:
                if group in stacks.live and group != before:
                    cost = so_far + self._cost(shard, group)
                    if cost < best.get(group, 1 << 60):
                        best[group], came[group] = cost, (shard, before)
                        heapq.heappush(heap, (cost, group))

        reach(orphan, None, 0)
        end: tuple[int, GroupId] | None = None
        while heap:
            cost, group = heapq.heappop(heap)
            if end is not None and cost - self._paid >= end[0]:
                break
            if cost > best[group]:
                continue
            if len(stacks._own[group]) < self.S:
                end = min(end or (cost, group), (cost, group))
                continue
            for shard in sorted(stacks._own[group]):
                reach(shard, group, cost - self._cost(shard, group))
        if end is None:
            return False
        self._paid += end[0]
        self._shift(end[1], came)
        return True

    def _shift(self, group: GroupId | None, came: dict[GroupId, tuple[Shard, GroupId | None]]) -> None:
        """Move each shard along the path, back from ``group``, to the group that was found for it."""
        while group is not None:
            shard, before = came[group]
            self._before.setdefault(shard, self.stacks.owner[shard])
            self.touched.add(shard)
            if before is not None:
                self.stacks._own[before].remove(shard)
            self.stacks._adopt(shard, group)
            group = before

    def undo(self) -> None:
        """Restore the contributions from before the search; the orphans have no contributor again."""
        for shard, group in self._before.items():
            self.stacks._own[self.stacks.owner[shard]].discard(shard)
            self.stacks.owner[shard] = group
            if group in self.stacks.live:
                self.stacks._own[group].add(shard)
