"""The assignment of a step's microbatches to groups by quotas (policy ``stacked_quota``), and patches for every policy.

It joins SPARe's stacks (arXiv 2603.00357, section 4) with ReCoVer's microbatch quotas (arXiv 2605.11215, versatile
workload). Intuition: a shard is G microbatches; the groups that host it may compute it, and any group may compute a
shard without a live host. So a plan is a flow from shards (supply G each) through hosting edges to groups (capacity:
its share of the largest load). The least largest load is found with maximum flows, and among the plans of that load the
one that moves fewest microbatches with one minimum-cost flow. Flows come from scipy and ortools.

With stragglers the longest time is minimised, not the load: they get less, even of shards that they host. Fetching
samples takes milliseconds, a microbatch that all groups wait for takes seconds.

Everything here is a pure function, so every group computes the same plan by itself: all nodes must run the same
versions of those libraries. A difference would show at once, because every reduction counts its microbatches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from megatron_ft.types import Assignment, GroupId, Microbatch, Part, Plan, listed

if TYPE_CHECKING:
    from megatron_ft.core.replication.placement import Placement
    from megatron_ft.core.scheduling import maxflow

Counts = Mapping[GroupId, Mapping[int, int]]
"""The number of microbatches per group and shard."""
Item = TypeVar("Item")
Chosen = Mapping[GroupId, Mapping[int, Sequence[int]]]
"""The indices of the microbatches per group and shard."""


def microbatches_of_step(step: int, shards: int, per_shard: int) -> tuple[Microbatch, ...]:
    """Return all N*G microbatches of one step, in the order of their ids."""
    return tuple(Microbatch(step, shard, index) for shard in range(shards) for index in range(per_shard))


def plan_step(
    step: int,
    shards: int,
    per_shard: int,
    live: Sequence[GroupId],
    placement: Placement | None = None,
    weights: Mapping[GroupId, float] | None = None,
) -> Plan:
    """Assign the N*G microbatches of ``step`` to the groups of ``live``.

    Args:
        step: the step.
        shards: number N of shards.
        per_shard: number G of microbatches of a shard.
        live: the live groups.
        placement: the groups that host each shard; None if every group hosts every shard.
        weights: speed of the stragglers relative to the others', which is 1; a group of weight 0.5 gets half the load.

    The largest load is the least possible, and as few microbatches as possible leave their home: shard i belongs to
    group i. With different weights the longest time (load divided by weight) is the least possible, if every group of
    ``weights`` keeps a microbatch: a group that computes nothing could never show that it is fast again.
    Raises ``ValueError`` for an empty ``live`` or a weight that is not positive.
    """
    if not live:
        raise ValueError("plan_step needs at least one live group, got none")
    members = tuple(sorted(live))
    speed = tuple(float(weights.get(group, 1.0)) for group in members) if weights else (1.0,)
    if min(speed) <= 0:
        raise ValueError(f"weights must be positive, got {dict(zip(members, speed, strict=True))}")
    placement = _restricting(placement)
    fastest = max(speed)
    less = ""
    if weights and min(speed) < fastest:
        tested = tuple(group in weights for group in members)
        chosen, reason = _by_time(shards, per_shard, members, placement, speed, tested)
        slower = [group for group, own in zip(members, speed, strict=True) if own < fastest]
        less = f", less for the slow groups {listed(sorted(slower))}"
    else:
        chosen, reason = _even(shards, per_shard, members, placement)
    return Plan(step, Named(step, chosen), reason + less)


def least_load(shards: int, per_shard: int, live: Collection[GroupId], placement: Placement | None = None) -> int:
    """Return the largest load of the plan of :func:`plan_step` for equally fast groups, without making the plan.

    Simulations ask for millions of them: a plan of 1000 groups takes about ten times as long. Raises ``ValueError`` for
    an empty ``live``.
    """
    if not live:
        raise ValueError("least_load needs at least one live group, got none")
    placement = _restricting(placement)
    if placement is None:
        return -(-shards * per_shard // len(live))
    from megatron_ft.core.scheduling import maxflow

    edges = _edges(np.arange(shards), sorted(live), placement)
    return maxflow.least_limit(np.full(shards, per_shard, dtype=np.int64), edges, len(live))


def _summary(shards: int, per_shard: int, chosen: Chosen) -> str:
    largest = max(sum(map(len, own.values())) for own in chosen.values())
    moved = shards * per_shard - sum(len(own.get(group, ())) for group, own in chosen.items())
    return f"{len(chosen)} of {shards} groups live, at most {largest} microbatches each, {moved} taken over"


def patch_plan(plan: Plan, lost: Collection[GroupId], placement: Placement | None = None) -> Plan:
    """Hand the microbatches of ``lost`` groups to the others, which keep their own.

    Groups that stand by for them are promoted first (:func:`promotions`); the rest is spread over all.
    The survivors have usually computed their own share when a peer is found dead, so the *added* work is levelled:
    patch compute takes ceil(lost / survivors) microbatches. Within that limit, as many as possible are computed by
    hosts of their shards, which have the samples at hand; the samples of the others have to be fetched (:func:`fetched`).
    """
    gone = set(lost)
    plan = plan.without_standby_of(gone)
    added: dict[GroupId, list[Microbatch]] = {group: [] for group in plan.assignment if group not in gone}
    if not added:
        raise ValueError(f"patch_plan: no survivor of step {plan.step} among {sorted(plan.assignment)}")
    pool = sorted(microbatch for group in lost for microbatch in plan.of(group))
    if not pool:
        return replace(plan, assignment=_Patched(plan.assignment, added))
    taken = promotions(plan, pool, added)
    standing_by = sum(map(len, taken.values()))
    if taken:
        covered = {microbatch for own in taken.values() for microbatch in own}
        pool = [microbatch for microbatch in pool if microbatch not in covered]
    base = {group: _load(plan.assignment, group) for group in added}
    placement = _restricting(placement)
    if placement is None:
        _level(added, pool, base)
    elif pool:
        _spread(added, pool, placement, base)
    of = f"microbatches of groups {listed(sorted(lost))}"
    promoted = f"{standing_by} {of} contributed by groups that stood by, " if taken else ""
    return replace(
        plan,
        assignment=_Patched(plan.assignment, {group: [*taken.get(group, ()), *more] for group, more in added.items()}),
        reason=f"{promoted}{len(pool)} {of} taken over by groups {listed(sorted(added))}",
        patched=plan.patched | set(pool),
    )


def promotions(
    plan: Plan, pool: Collection[Microbatch], survivors: Collection[GroupId]
) -> dict[GroupId, list[Microbatch]]:
    """Return which of ``survivors`` contribute standby parts from now on, because their microbatches are in ``pool``.

    Of the groups with the same part the one that contributes least is promoted; ties: the lowest number.
    """
    if not plan.standby:
        return {}
    lost, able = set(pool), dict[Part, list[GroupId]]()
    for group in sorted(survivors):
        for part in plan.standby.get(group, ()):
            if part[0] in lost:
                able.setdefault(part, []).append(group)
    taken: dict[GroupId, list[Microbatch]] = {}
    for part, groups in sorted(able.items()):
        least = min(groups, key=lambda group: (_load(plan.assignment, group) + len(taken.get(group, ())), group))
        taken.setdefault(least, []).extend(part)
    return taken


def admit(plan: Plan, joined: Collection[GroupId]) -> Plan:
    """Return the same plan with groups that have no share of the step yet; a later patch may give them one."""
    nothing_new: dict[GroupId, list[Microbatch]] = {group: [] for group in sorted({*plan.assignment, *joined})}
    return replace(plan, assignment=_Patched(plan.assignment, nothing_new))


def fetched(microbatches: Iterable[Microbatch], group: GroupId, placement: Placement | None) -> tuple[Microbatch, ...]:
    """Return the microbatches whose samples ``group`` has to fetch now, because their shard is not in its stack."""
    placement = _restricting(placement)
    return () if placement is None else tuple(m for m in microbatches if not placement.is_host(group, m.shard))


def _restricting(placement: Placement | None) -> Placement | None:
    """Return None for a placement of every shard at every group."""
    return None if placement is None or placement.redundancy >= placement.groups else placement


class Named(Mapping[GroupId, tuple[Microbatch, ...]]):
    """An assignment that makes the ids of a group's microbatches on demand.

    A group needs only its own in every step; making all N*G ids takes longer than the rest of a plan.
    """

    def __init__(self, step: int, chosen: Chosen) -> None:
        self._step, self.chosen = step, chosen
        self._named: dict[GroupId, tuple[Microbatch, ...]] = {}

    def __getitem__(self, group: GroupId) -> tuple[Microbatch, ...]:
        if group not in self._named:
            own = self.chosen[group].items()
            self._named[group] = tuple(
                Microbatch(self._step, shard, index) for shard, indices in own for index in indices
            )
        return self._named[group]

    def __iter__(self) -> Iterator[GroupId]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def load(self, group: GroupId) -> int:
        return sum(map(len, self.chosen[group].values()))


class NamedParts(Mapping[GroupId, tuple[Part, ...]]):
    """Standby parts of whole shards, made on demand; ``chosen``: the shards of each group."""

    def __init__(self, step: int, chosen: Mapping[GroupId, Sequence[int]], per_shard: int) -> None:
        self._step, self._chosen, self._per_shard = step, chosen, per_shard

    def __getitem__(self, group: GroupId) -> tuple[Part, ...]:
        indices = range(self._per_shard)
        return tuple(tuple(Microbatch(self._step, shard, i) for i in indices) for shard in self._chosen[group])

    def __iter__(self) -> Iterator[GroupId]:
        return iter(self._chosen)

    def __len__(self) -> int:
        return len(self._chosen)


class _Patched(Mapping[GroupId, tuple[Microbatch, ...]]):
    """An assignment with added microbatches; the groups of ``added`` are those that are left or have joined."""

    def __init__(self, before: Assignment, added: Mapping[GroupId, Sequence[Microbatch]]) -> None:
        self._before, self._added = before, added

    def __getitem__(self, group: GroupId) -> tuple[Microbatch, ...]:
        more = tuple(self._added[group])
        return self._before.get(group, ()) + more

    def __iter__(self) -> Iterator[GroupId]:
        return iter(self._added)

    def __len__(self) -> int:
        return len(self._added)

    def load(self, group: GroupId) -> int:
        more = len(self._added[group])
        return (_load(self._before, group) if group in self._before else 0) + more


def _load(assignment: Assignment, group: GroupId) -> int:
    """Return the number of a group's microbatches, without making their ids where that can be avoided."""
    return assignment.load(group) if isinstance(assignment, Named | _Patched) else len(assignment[group])


@lru_cache(maxsize=64)
def _even(shards: int, per_shard: int, members: tuple[GroupId, ...], placement: Placement | None) -> tuple[Chosen, str]:
    """Return the plan of equally fast groups: it is the same in every step, so it is cached per membership."""
    if placement is None:
        chosen = _levelled(shards, per_shard, members)
    else:
        chosen = _choose(per_shard, _quota(shards, per_shard, members, placement))
    return chosen, _summary(shards, per_shard, chosen)


# --- every group hosts every shard: levelling is enough ---------------------------------------------------------------


def _levelled(shards: int, per_shard: int, members: tuple[GroupId, ...]) -> Chosen:
    """Let each group keep its own shard up to the quota ceil(N*G / live), and give the rest to the groups with least."""
    quota = -(-shards * per_shard // len(members))
    keeps = {group: min(quota, per_shard) if group < shards else 0 for group in members}
    loads: dict[GroupId, list[tuple[int, int]]] = {
        group: [(group, index) for index in range(keep)] for group, keep in keeps.items()
    }
    pool = [(shard, index) for shard in range(shards) for index in range(keeps.get(shard, 0), per_shard)]
    _level(loads, pool)
    chosen: dict[GroupId, dict[int, list[int]]] = {group: {} for group in members}
    for group, own in loads.items():
        for shard, index in own:
            chosen[group].setdefault(shard, []).append(index)
    return chosen


def _level(
    assigned: Mapping[GroupId, list[Item]], pool: Iterable[Item], base: Mapping[GroupId, int] | None = None
) -> None:
    """Append each item of ``pool`` to the group with the fewest; ties: the smaller base load, then the lower id."""
    base = base or {}
    waiting = [(len(own), base.get(group, 0), group) for group, own in assigned.items()]
    heapify(waiting)
    for item in pool:
        count, under, group = waiting[0]
        assigned[group].append(item)
        heapreplace(waiting, (count + 1, under, group))


# --- stragglers: the least longest time -----------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _by_time(
    shards: int,
    per_shard: int,
    members: tuple[GroupId, ...],
    placement: Placement | None,
    speed: tuple[float, ...],
    tested: tuple[bool, ...],
) -> tuple[Chosen, str]:
    """Return the plan of the least longest time; hosts compute as much as possible, and as little as possible changes hands.

    ``tested``: per member, True if it gets at least one microbatch however slow it is, as far as there are enough.
    """
    limits = _limits(shards * per_shard, speed, tested)
    if placement is None:
        counts = _fill(shards, per_shard, members, speed, limits)
    else:
        counts = _quota(shards, per_shard, members, placement, limits)
    pace, least = dict(zip(members, speed, strict=True)), dict(zip(members, tested, strict=True))
    for group in members:
        if least[group] and not counts[group]:
            _give_one(counts, group, pace, least, placement)
    chosen = _choose(per_shard, counts)
    return chosen, _summary(shards, per_shard, chosen)


def _limits(total: int, speed: Sequence[float], tested: Sequence[bool]) -> list[int]:
    """Return each group's limit floor(T * speed) for the least time T in which all microbatches find a place.

    T is searched among the times at which some group finishes a microbatch; the microbatch of a tested group does not
    make T longer for the others.
    """

    def within(time: float) -> list[int]:
        # A product that should be a whole number may come out a little less.
        return [max(int(time * own + 1e-9), test) for own, test in zip(speed, tested, strict=True)]

    times = sorted({load / own for own in set(speed) for load in range(1, total + 1)})
    return within(times[bisect_left(times, total, key=lambda time: sum(within(time)))])


def _fill(
    shards: int, per_shard: int, members: Sequence[GroupId], speed: Sequence[float], limits: Sequence[int]
) -> dict[GroupId, dict[int, int]]:
    """Assign without a placement: a group keeps its own shard up to its limit; the group that would be done first takes
    the next of the rest."""
    keeps = [min(limit, per_shard) if group < shards else 0 for group, limit in zip(members, limits, strict=True)]
    counts = {group: {group: keep} if keep else {} for group, keep in zip(members, keeps, strict=True)}
    loads, pace = dict(zip(members, keeps, strict=True)), dict(zip(members, speed, strict=True))
    room = dict(zip(members, limits, strict=True))
    rest = [shard for shard in range(shards) for _ in range(per_shard - loads.get(shard, 0))]
    waiting = [((loads[group] + 1) / pace[group], group) for group in members if loads[group] < room[group]]
    heapify(waiting)
    for shard in rest:
        _, group = waiting[0]
        counts[group][shard] = counts[group].get(shard, 0) + 1
        loads[group] += 1
        if loads[group] < room[group]:
            heapreplace(waiting, ((loads[group] + 1) / pace[group], group))
        else:
            heappop(waiting)
    return counts


def _give_one(
    counts: Mapping[GroupId, dict[int, int]],
    group: GroupId,
    pace: Mapping[GroupId, float],
    least: Mapping[GroupId, int],
    placement: Placement | None,
) -> None:
    """Move one microbatch to a group that has none, from the group that needs longest; if possible of a hosted shard."""
    givers = [giver for giver, own in counts.items() if sum(own.values()) > least[giver]]
    if givers:
        own = counts[max(givers, key=lambda giver: (sum(counts[giver].values()) / pace[giver], -giver))]
        shard = min(own, key=lambda shard: (placement is not None and not placement.is_host(group, shard), shard))
        own[shard] -= 1
        if not own[shard]:
            del own[shard]
        counts[group][shard] = 1


# --- restricted stacks: flows -----------------------------------------------------------------------------------------


def _quota(
    shards: int, per_shard: int, members: Sequence[GroupId], placement: Placement, limits: Sequence[int] | None = None
) -> dict[GroupId, dict[int, int]]:
    """Return the number of microbatches of each shard that every group computes, with the fewest moves at these ``limits``
    of the groups; None: at the least limit of all of them."""
    from megatron_ft.core.scheduling import maxflow  # half a second of imports that a run with full hosting never needs

    edges = _edges(np.arange(shards), members, placement)
    supply = np.full(shards, per_shard, dtype=np.int64)
    home = np.where(np.array(members)[edges.columns] == edges.rows, per_shard, 0)  # all of a shard at its own group
    if limits is None:
        found = maxflow.balance(supply, edges, len(members), home)
    else:
        found = maxflow.place(supply, edges, np.array(limits, dtype=np.int64), home)
    return dict(zip(members, found, strict=True))


def _choose(per_shard: int, counts: Counts) -> Chosen:
    """Turn counts into indices: each group first keeps its own microbatches, then takes free ones in order."""
    kept = {group: row.get(group, 0) for group, row in counts.items()}
    chosen = {
        group: {shard: list(range(count if shard == group else 0)) for shard, count in row.items()}
        for group, row in counts.items()
    }
    taken = sorted((group, shard) for group, row in counts.items() for shard in row if shard != group)
    free = {shard: iter(range(kept.get(shard, 0), per_shard)) for _, shard in taken}
    for group, shard in taken:
        chosen[group][shard].extend(islice(free[shard], counts[group][shard]))
    return chosen


def _spread(
    added: Mapping[GroupId, list[Microbatch]],
    pool: Sequence[Microbatch],
    placement: Placement,
    base: Mapping[GroupId, int],
) -> None:
    """Hand the lost microbatches out evenly: as many as possible to hosts of their shards, the rest to groups with least.

    A group that has to fetch the samples first is still faster than a host that computes several, one after the other.
    """
    from megatron_ft.core.scheduling import maxflow

    members = sorted(added)
    by_shard: dict[int, list[Microbatch]] = {}
    for microbatch in pool:
        by_shard.setdefault(microbatch.shard, []).append(microbatch)
    names = sorted(by_shard)
    supply = np.array([len(by_shard[shard]) for shard in names], dtype=np.int64)
    edges = _edges(np.array(names, dtype=np.int64), members, placement)
    most = -(-len(pool) // len(members))
    loads = maxflow.most(supply, edges, np.full(len(members), most, dtype=np.int64))
    for group, row in zip(members, loads, strict=True):
        for position, count in sorted(row.items()):
            rest = by_shard[names[position]]
            added[group].extend(rest[:count])
            del rest[:count]
    _level(added, (microbatch for name in names for microbatch in by_shard[name]), base)


def _edges(shards: np.ndarray, members: Sequence[GroupId], placement: Placement) -> maxflow.Edges:
    """Return hosting edges as (position of the shard, position of the group); shards without a live host go to any group."""
    from megatron_ft.core.scheduling import maxflow

    hosts = placement.host_table[shards]
    position = np.full(max(hosts.max(initial=0), members[-1]) + 1, -1, dtype=np.int64)
    position[list(members)] = np.arange(len(members))
    beyond = members[bisect_left(members, placement.groups) :]  # on top of the first N
    more = [np.where(np.isin(shards, placement.stack(group)), position[group], -1) for group in beyond]
    columns = np.column_stack([position[hosts], *more])
    rows, places = np.nonzero(columns >= 0)
    columns = columns[rows, places]
    anybody = np.flatnonzero(np.bincount(rows, minlength=len(shards)) == 0)
    return maxflow.Edges(rows, columns, anybody)
