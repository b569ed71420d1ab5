"""ReCtlr as a running record: a loss repairs the present contributions instead of deciding them anew (SPARe, ReCtlr).

``rectlr.reconfigure`` is the reference: the same S, the same number of moves, the same number of shards to patch. This
one remembers who contributes what, and after a loss looks for new contributors of the lost shards only: shortest
augmenting paths in the residual graph of the min-cost flow, nearly always a few edges long. It makes simulations of
thousands of losses possible, and the decision nearly free of charge where a run keeps it.

Costs are those of ``rectlr``: nothing for an entry that its group has computed in this step, 1 for one that it has to
patch, N + 2 for one that has to be moved among the first S as well.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from megatron_ft.core.rectlr import lower_bound
from megatron_ft.core.replication import Placement
from megatron_ft.types import GroupId

Shard = int


@dataclass(frozen=True)
class Repaired:
    """``patch`` are the shards each group has to compute yet; ``moves`` how many stack entries came forward."""

    phase: Literal["fixed", "free", "wipe-out"]
    S: int
    moves: int = 0
    patch: tuple[tuple[GroupId, Shard], ...] = ()
    wiped_out: tuple[Shard, ...] = ()

    @property
    def depth(self) -> int:
        """How many shards the group with most to patch computes, one after the other."""
        counts: dict[GroupId, int] = {}
        for group, _ in self.patch:
            counts[group] = counts.get(group, 0) + 1
        return max(counts.values(), default=0)


class Stacks:
    """The orders inside the stacks, S, and who contributes which shard, through losses. Begins as a restart does."""

    def __init__(self, placement: Placement) -> None:
        N = placement.groups
        self.N, self.S = N, 1
        self.orders = [list(stack) for stack in placement.stacks]
        self.hosts = [list(hosts) for hosts in placement.hosts]
        self.live = set(range(N))
        self.owner: list[GroupId] = list(range(N))
        self._own: list[set[Shard]] = [{shard} for shard in range(N)]
        self._covered = [1] * N  # how many live groups have the shard among their first S
        self.begin_step()

    def begin_step(self) -> None:
        """Every live group computes the first S of its stack."""
        self._step_S = self.S
        self._step_first: dict[GroupId, list[Shard]] = {}  # of groups whose order has changed in this step
        self._patched: set[tuple[GroupId, Shard]] = set()

    def computed(self, group: GroupId, shard: Shard) -> bool:
        """Whether the group has computed the shard in this step, or is going to anyway."""
        first = self._step_first.get(group) or self.orders[group][: self._step_S]
        return shard in first or (group, shard) in self._patched

    def lose(self, group: GroupId) -> Repaired:
        """``group`` is lost: find other contributors for what it contributed (ReCtlr, phases 1 to 3)."""
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
        """To groups that have them among their first S; if S grew in this very step they may not be computed there yet."""
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
        """Take over what was found: new orders at S = ``least``, and what has to be computed for them."""
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
        self._paid = 0  # the cost of all that was placed so far: no path can gain more by undoing it

    def _cost(self, shard: Shard, group: GroupId) -> int:
        stacks = self.stacks
        if shard not in stacks.orders[group][: self.S]:
            return stacks.N + 2
        return 0 if stacks.computed(group, shard) else 1

    def place(self, orphan: Shard) -> bool:
        """Find a contributor for it, moving others on where that is cheapest; False if there is none at this S."""
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
        """Along the path back: each shard goes to the group it was found for."""
        while group is not None:
            shard, before = came[group]
            self._before.setdefault(shard, self.stacks.owner[shard])
            self.touched.add(shard)
            if before is not None:
                self.stacks._own[before].remove(shard)
            self.stacks._adopt(shard, group)
            group = before

    def undo(self) -> None:
        """Everything as it was before the search; the orphans are nobody's again."""
        for shard, group in self._before.items():
            self.stacks._own[self.stacks.owner[shard]].discard(shard)
            self.stacks.owner[shard] = group
            if group in self.stacks.live:
                self.stacks._own[group].add(shard)
