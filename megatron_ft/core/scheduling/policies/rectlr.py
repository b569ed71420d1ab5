"""ReCtlr: orders inside the stacks that keep every shard contributed when groups are lost (SPARe, arXiv 2603.00357).

N groups host r shards each. Every live group computes the first S entries of its stack and contributes some of them, so
that each of the N shards is contributed exactly once. After a loss the controller goes through three phases:

1. *HK-fixed*: if the present orders and the present S still cover every shard, nothing moves.
2. *HK-free*: find the smallest S* >= S for which some order inside the stacks does. Every live group may put any S* of
   its shards first, so this is a matching of the shards into S* interchangeable slots per group.
3. *MCMF*: at S*, find the orders with the fewest moved entries.

A stack entry counts as **moved** when it stood behind the first S* entries and now stands among them. The entry that
makes room for it falls right behind the first S*; this is the other half of the same move and is not counted. All other
entries keep their relative order. Among the orders with the fewest moves, one with the fewest shards to patch is taken
(not in the paper; it breaks ties).

The paper matches all shards anew (Hopcroft-Karp, then a min-cost flow). Here only those without a contributor are
placed, by shortest augmenting paths from the present contributions, which cost nothing and so are a min-cost flow
already: the optimum is the same. It is found in microseconds in a record that is kept from loss to loss (``Stacks``, in
the simulator, which decides millions of losses), and in a few milliseconds from nothing (``reconfigure``, in the plans).
Costs: 0 for an entry that its group has computed in this step, 1 for one that it has to patch, N + 2 for one that has to
be moved among the first S as well.

Assumed: a group is lost as a whole, and ``live`` is the same at all callers. The outcome is then the same, too, because
it is a pure function of the arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ft.types import GroupId, listed

Shard = int
Orders = Sequence[Sequence[Shard]]
"""``orders[g]`` is the stack of group g, present order first to last; those of dead groups are kept as they were."""
Phase = Literal["fixed", "free", "wipe-out"]


@dataclass(frozen=True)
class Outcome:
    """The controller's decision.

    Attributes:
        phase: the phase that decided: ``fixed`` (nothing moves, S stays), ``free`` (S grew, orders changed, or both) or
            ``wipe-out`` (the run restarts with S = 1).
        S: the new S; with ``wipe-out`` the old one.
        orders: the new orders; with ``wipe-out`` the old ones.
        contributes: the shards of every live group; each shard is there once.
        moves: (group, shard) of each entry that came forward.
        wiped_out: with ``wipe-out``, the shards without a live host.
        reason: why, for people.
    """

    phase: Phase
    S: int
    orders: tuple[tuple[Shard, ...], ...]
    contributes: Mapping[GroupId, tuple[Shard, ...]]
    moves: tuple[tuple[GroupId, Shard], ...] = ()
    wiped_out: tuple[Shard, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Repaired:
    """What a loss changes in a record: as in :class:`Outcome`, and in ``patch`` the (group, shard) of each shard that a
    group has yet to compute in this step."""

    phase: Phase
    S: int
    moves: tuple[tuple[GroupId, Shard], ...] = ()
    patch: tuple[tuple[GroupId, Shard], ...] = ()
    wiped_out: tuple[Shard, ...] = ()

    @property
    def depth(self) -> int:
        """The largest number of shards that one group has to patch, one after the other."""
        groups = [group for group, _ in self.patch]
        return max(map(groups.count, groups), default=0)


def lower_bound(groups: int, live: int) -> int:
    """Return c(k) = ceil(N / (N - k)), the least S with which N - k live groups can compute N shards (SPARe, step)."""
    return -(-groups // live)


def reconfigure(orders: Orders, live: Collection[GroupId], S: int) -> Outcome:
    """Decide S, the orders and the contributions for the groups of ``live`` (SPARe, ReCtlr, phases 1 to 3)."""
    alive = sorted(live)
    stacks = Stacks(orders, S, alive)
    before = tuple(stacks.orders)
    done = stacks.repair([shard for shard, owner in enumerate(stacks.owner) if owner < 0])
    there = f"{len(alive)} of {stacks.N} groups live"
    if done.phase == "wipe-out":
        reason = f"wipe-out: no live group hosts shard {listed(done.wiped_out, most=8)} any more, {there}"
        return Outcome("wipe-out", S, before, {}, wiped_out=done.wiped_out, reason=reason)
    if done.phase == "fixed":
        reason = f"{there}; the first {S} of the present orders cover every shard"
    else:
        why = "the present orders leave shards uncovered" if done.S == S else f"no order works with S = {S}"
        reason = f"{there}; {why}: S = {done.S}, {len(done.moves)} stack entries moved"
    contributes = {g: tuple(s for s in stacks.orders[g][: done.S] if s in stacks.own[g]) for g in alive}
    return Outcome(done.phase, done.S, tuple(stacks.orders), contributes, done.moves, reason=reason)


class Stacks:
    """The orders inside the stacks, S, and the contributor of each shard, through losses; at first as after a restart.

    A shard is first contributed from its lowest slot; ties go to the lowest group. ``owner`` is -1 where no group of
    ``live`` (None: all groups) has the shard among its first S, until :meth:`repair` finds one.
    """

    def __init__(self, orders: Orders, S: int = 1, live: Collection[GroupId] | None = None) -> None:
        self.N, self.S = len(orders), S
        self.orders = list(map(tuple, orders))
        self.live = set(range(self.N) if live is None else live)
        self.hosts: list[list[GroupId]] = [[] for _ in orders]
        for group, order in enumerate(self.orders):
            for shard in order:
                self.hosts[shard].append(group)
        self.owner: list[GroupId] = [-1] * self.N
        self.own: list[set[Shard]] = [set() for _ in orders]
        for slot in range(S):
            for group in sorted(self.live):
                if self.owner[shard := self.orders[group][slot]] < 0:
                    self._adopt(shard, group)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, in which every live group computes the first S of its stack."""
        self._step_S = self.S
        self._step_first: dict[GroupId, tuple[Shard, ...]] = {}  # of groups whose order has changed in this step
        self._patched: set[tuple[GroupId, Shard]] = set()

    def computed(self, group: GroupId, shard: Shard) -> bool:
        """Return whether the group has computed the shard in this step, or computes it in any case."""
        first = self._step_first.get(group) or self.orders[group][: self._step_S]
        return shard in first or (group, shard) in self._patched

    def lose(self, group: GroupId) -> Repaired:
        """Find other contributors for the shards of ``group``, which is lost."""
        self.live.remove(group)
        orphans, self.own[group] = sorted(self.own[group]), set()
        return self.repair(orphans)

    def repair(self, orphans: Sequence[Shard]) -> Repaired:
        """Find contributors for the shards that have none (ReCtlr, phases 1 to 3)."""
        hosts = {shard: [group for group in self.hosts[shard] if group in self.live] for shard in orphans}
        if wiped := tuple(shard for shard in orphans if not hosts[shard]):
            return Repaired("wipe-out", self.S, wiped_out=wiped)
        present = {shard: [g for g in hosts[shard] if shard in self.orders[g][: self.S]] for shard in orphans}
        if all(present.values()):
            return Repaired("fixed", self.S, patch=self._hand_over(present))
        least = max(self.S, lower_bound(self.N, len(self.live)))
        while True:
            search = _Search(self, least)
            if all(search.place(shard) for shard in orphans):
                return self._commit(search, least)
            search.undo()
            least += 1

    def _hand_over(self, present: Mapping[Shard, list[GroupId]]) -> tuple[tuple[GroupId, Shard], ...]:
        """Hand orphans to groups that have them among their first S, and return those to patch: if S grew in this step,
        a group may not have computed them yet."""
        patch = []
        for shard, groups in present.items():
            group = min(groups, key=lambda g: (not self.computed(g, shard), g))
            if not self.computed(group, shard):
                patch.append((group, shard))
            self._adopt(shard, group)
        self._patched.update(patch)
        return tuple(patch)

    def _adopt(self, shard: Shard, group: GroupId) -> None:
        self.owner[shard] = group
        self.own[group].add(shard)

    def _commit(self, search: _Search, least: int) -> Repaired:
        """Take over the result of the search: new orders at S = ``least``, and the shards to compute for them."""
        patch, moves = [], []
        for group in sorted({self.owner[shard] for shard in search.before}):
            order, own = self.orders[group], self.own[group]
            first, rest = order[:least], order[least:]
            if moved := [shard for shard in rest if shard in own]:
                out = [shard for shard in first if shard not in own][-len(moved) :]
                stay = [shard for shard in first if shard not in out]
                self._step_first.setdefault(group, order[: self._step_S])
                self.orders[group] = (*stay, *moved, *out, *(shard for shard in rest if shard not in own))
                moves += [(group, shard) for shard in moved]
            patch += [(group, s) for s in self.orders[group][:least] if s in own and not self.computed(group, s)]
        self._patched.update(patch)
        self.S = least
        return Repaired("free", least, tuple(moves), tuple(patch))


class _Search:
    """Shortest augmenting paths at a fixed S, one orphaned shard after the other."""

    def __init__(self, stacks: Stacks, S: int) -> None:
        self.stacks, self.S = stacks, S
        self.before: dict[Shard, GroupId] = {}
        """The contributor from before the search of each shard that got another one."""
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
            if len(stacks.own[group]) < self.S:
                end = min(end or (cost, group), (cost, group))
                continue
            for shard in sorted(stacks.own[group]):
                reach(shard, group, cost - self._cost(shard, group))
        if end is None:
            return False
        self._paid += end[0]
        self._shift(end[1], came)
        return True

    def _shift(self, group: GroupId | None, came: Mapping[GroupId, tuple[Shard, GroupId | None]]) -> None:
        """Move each shard along the path, back from ``group``, to the group that was found for it."""
        while group is not None:
            shard, before = came[group]
            self.before.setdefault(shard, self.stacks.owner[shard])
            if before is not None:
                self.stacks.own[before].remove(shard)
            self.stacks._adopt(shard, group)
            group = before

    def undo(self) -> None:
        """Restore the contributions from before the search; the orphans have no contributor again."""
        for shard, group in self.before.items():
            self.stacks.own[self.stacks.owner[shard]].discard(shard)
            self.stacks.owner[shard] = group
            if group in self.stacks.live:
                self.stacks.own[group].add(shard)
