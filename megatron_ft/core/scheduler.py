"""Who computes which microbatches of a step: the policy ``stacked_quota`` (docs/architecture.md).

It joins SPARe's stacks (arXiv 2603.00357, section 4) with ReCoVer's microbatch quotas (arXiv 2605.11215, versatile
workload). Intuition: a shard is G microbatches; it may be computed by the groups that host it, and a shard without a
live host by anybody. So a plan is a flow from shards (supply G each) through hosting edges to groups (capacity: its
share of the largest load). The least largest load is found with maximum flows, and among the plans of that load the one
that moves fewest microbatches with one minimum-cost flow. Flows come from scipy and ortools.

Everything here is a pure function, so every group computes the same plan by itself: all nodes must run the same
versions of those libraries. A difference would show at once, because every reduction counts its microbatches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from megatron_ft.types import Assignment, GroupId, Microbatch, Plan

if TYPE_CHECKING:
    from megatron_ft.core import flow
    from megatron_ft.core.replication import Placement

Counts = Mapping[GroupId, Mapping[int, int]]
"""Per group and shard, how many microbatches."""
Chosen = Mapping[GroupId, Mapping[int, Sequence[int]]]
"""Per group and shard, the indices of the microbatches."""


def microbatches_of_step(step: int, shards: int, per_shard: int) -> tuple[Microbatch, ...]:
    """All N*G microbatches of one step, in the order of their ids."""
    return tuple(Microbatch(step, shard, index) for shard in range(shards) for index in range(per_shard))


def plan_step(
    step: int,
    shards: int,
    per_shard: int,
    live: Sequence[GroupId],
    placement: Placement | None = None,
    weights: Mapping[GroupId, float] | None = None,
    previous: Plan | None = None,
) -> Plan:
    """Assign the N*G microbatches of ``step`` to the groups of ``live``.

    Args:
        placement: who hosts what; None when everybody hosts everything.
        weights: relative speed of each group, 1 where not given; a group of weight 0.5 gets half the load of others.
        previous: the plan whose microbatches (by shard and index) should stay where they are; without it, a group's
            home is its own shard (shard i belongs to group i).

    The largest load (divided by the weight) is the least possible, and as few microbatches as possible change hands.
    Raises ``ValueError`` for an empty ``live`` or a weight that is not positive.
    """
    if not live:
        raise ValueError("plan_step needs at least one live group, got none")
    members = tuple(sorted(live))
    speed = tuple(float((weights or {}).get(group, 1.0)) for group in members)
    if min(speed) <= 0:
        raise ValueError(f"weights must be positive, got {dict(zip(members, speed, strict=True))}")
    if previous is None and min(speed) == max(speed):
        chosen = _even(shards, per_shard, members, None if _hosts_everything(placement) else placement)
    else:
        home = _home(shards, per_shard, members, previous)
        chosen = _choose(per_shard, _quota(shards, per_shard, members, placement, speed, home), home)
    largest = max(sum(map(len, own.values())) for own in chosen.values())
    moved = shards * per_shard - sum(len(own.get(group, ())) for group, own in chosen.items())
    reason = f"{len(members)} of {shards} groups live, at most {largest} microbatches each, {moved} taken over"
    return Plan(step, _Named(step, chosen), reason)


def patch_plan(plan: Plan, lost: Collection[GroupId], placement: Placement | None = None) -> Plan:
    """Spread the microbatches of ``lost`` groups over the others; nobody loses what it already has.

    The survivors are usually done with their own share when a peer is found dead, so the *added* work is levelled:
    patch compute takes ceil(lost / survivors) microbatches (papers.md, section 3) where the hosting allows it.
    """
    survivors = {group: own for group, own in plan.assignment.items() if group not in lost}
    if not survivors:
        raise ValueError(f"patch_plan: no survivor of step {plan.step} among {sorted(plan.assignment)}")
    pool = sorted(microbatch for group in lost for microbatch in plan.of(group))
    if not pool:
        return Plan(plan.step, survivors, plan.reason, plan.patched)
    added: dict[GroupId, list[Microbatch]] = {group: [] for group in survivors}
    if _hosts_everything(placement):
        _level(added, pool, base={group: len(own) for group, own in survivors.items()})
    else:
        _spread(added, pool, placement)
    return Plan(
        step=plan.step,
        assignment={group: own + tuple(added[group]) for group, own in survivors.items()},
        reason=f"{len(pool)} microbatches of groups {_names(lost)} taken over by groups {_names(survivors)}",
        patched=plan.patched | set(pool),
    )


def admit(plan: Plan, joined: Collection[GroupId]) -> Plan:
    """The same plan with groups that have no share of the step yet; a later patch may give them one."""
    assignment = {**dict.fromkeys(sorted(joined), ()), **plan.assignment}
    return Plan(plan.step, dict(sorted(assignment.items())), plan.reason, plan.patched)


def fetched(microbatches: Iterable[Microbatch], group: GroupId, placement: Placement | None) -> tuple[Microbatch, ...]:
    """Those whose samples ``group`` has to fetch now, because their shard is not in its stack."""
    if _hosts_everything(placement):
        return ()
    return tuple(m for m in microbatches if not placement.is_host(group, m.shard))


def check_exactly_once(assignment: Assignment, expected: Collection[Microbatch]) -> None:
    """Raise ``AssertionError`` unless every expected microbatch is assigned exactly once and nothing else is."""
    seen = [microbatch for own in assignment.values() for microbatch in own]
    assert len(seen) == len(set(seen)), f"assigned twice: {sorted(m for m in set(seen) if seen.count(m) > 1)}"
    assert set(seen) == set(expected), f"assigned and expected differ: {sorted(set(seen) ^ set(expected))}"


def _hosts_everything(placement: Placement | None) -> bool:
    return placement is None or placement.redundancy >= placement.groups


class _Named(Mapping):
    """An assignment that names a group's microbatches when it is asked for them.

    A group asks for its own only, in every step; naming all N*G takes longer than the rest of a plan.
    """

    def __init__(self, step: int, chosen: Chosen) -> None:
        self._step, self._chosen = step, chosen

    def __getitem__(self, group: GroupId) -> tuple[Microbatch, ...]:
        own = self._chosen[group].items()
        return tuple(Microbatch(self._step, shard, index) for shard, indices in own for index in indices)

    def __iter__(self) -> Iterator[GroupId]:
        return iter(self._chosen)

    def __len__(self) -> int:
        return len(self._chosen)


@lru_cache(maxsize=64)
def _even(shards: int, per_shard: int, members: tuple[GroupId, ...], placement: Placement | None) -> Chosen:
    """The plan of equally fast groups: it is the same in every step, so it is made once per membership."""
    if placement is None:
        return _levelled(shards, per_shard, members)
    home = _home(shards, per_shard, members, None)
    return _choose(per_shard, _quota(shards, per_shard, members, placement, (1.0,) * len(members), home), home)


# --- everybody hosts everything: levelling is enough ------------------------------------------------------------------


def _levelled(shards: int, per_shard: int, members: tuple[GroupId, ...]) -> Chosen:
    """A group keeps its own shard up to the quota ceil(N*G / live); the rest goes to whoever has least."""
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


def _level(assigned: Mapping[GroupId, list], pool: Iterable, base: Mapping[GroupId, int] | None = None) -> None:
    """Append each item of ``pool`` to the group with least; ties: the smaller base load, then the lower id."""
    base = base or {}
    for item in pool:
        group = min(assigned, key=lambda g: (len(assigned[g]), base.get(g, 0), g))
        assigned[group].append(item)


# --- restricted stacks, weights, a previous plan: flows ---------------------------------------------------------------


def _home(shards: int, per_shard: int, members: Sequence[GroupId], previous: Plan | None) -> Chosen:
    """Where each microbatch would like to stay; those of absent groups have no home."""
    if previous is None:
        return {group: {group: range(per_shard)} if group < shards else {} for group in members}
    home: dict[GroupId, dict[int, list[int]]] = {group: {} for group in members}
    for group, own in home.items():
        for microbatch in previous.of(group):
            own.setdefault(microbatch.shard, []).append(microbatch.index)
    return home


def _quota(
    shards: int,
    per_shard: int,
    members: Sequence[GroupId],
    placement: Placement | None,
    speed: Sequence[float],
    home: Chosen,
) -> Counts:
    """How many microbatches of each shard every group computes: least largest load, then fewest moves."""
    from megatron_ft.core import flow  # half a second of imports that a run with full hosting never needs

    edges = _edges(range(shards), members, placement)
    rows, columns = edges.rows.tolist(), edges.columns.tolist()
    kept = [len(home[members[column]].get(row, ())) for row, column in zip(rows, columns, strict=True)]
    supply = np.full(shards, per_shard, dtype=np.int64)
    loads = flow.balance(supply, edges, np.asarray(speed), np.asarray(kept, dtype=np.int64))
    return dict(zip(members, loads, strict=True))


def _choose(per_shard: int, counts: Counts, home: Chosen) -> Chosen:
    """Turn counts into indices: each group first keeps what was its own, then takes what is left, in order."""
    chosen: dict[GroupId, dict[int, list[int]]] = {group: {} for group in counts}
    kept: dict[int, set[int]] = {}
    for group, row in counts.items():
        for shard, count in row.items():
            own = list(home[group].get(shard, ())[:count])
            chosen[group][shard] = own
            kept.setdefault(shard, set()).update(own)
    free = {shard: iter([i for i in range(per_shard) if i not in taken]) for shard, taken in kept.items()}
    for group, row in sorted(counts.items()):
        for shard, count in sorted(row.items()):
            own = chosen[group][shard]
            own.extend(islice(free[shard], count - len(own)))
    return chosen


def _spread(added: Mapping[GroupId, list[Microbatch]], pool: Sequence[Microbatch], placement: Placement) -> None:
    """Hand the lost microbatches to hosts of their shards, with the least largest addition."""
    from megatron_ft.core import flow

    members = sorted(added)
    by_shard: dict[int, list[Microbatch]] = {}
    for microbatch in pool:
        by_shard.setdefault(microbatch.shard, []).append(microbatch)
    names = sorted(by_shard)
    supply = np.array([len(by_shard[shard]) for shard in names], dtype=np.int64)
    loads = flow.balance(supply, _edges(names, members, placement), np.ones(len(members)), None)
    for group, row in zip(members, loads, strict=True):
        for position, count in sorted(row.items()):
            rest = by_shard[names[position]]
            added[group].extend(rest[:count])
            del rest[:count]


def _edges(shards: Iterable[int], members: Sequence[GroupId], placement: Placement | None) -> flow.Edges:
    """Hosting edges as (position of the shard, position of the group); shards without a live host go to anybody."""
    from megatron_ft.core import flow

    position = {group: i for i, group in enumerate(members)}
    rows: list[int] = []
    columns: list[int] = []
    anybody: list[int] = []
    beyond: dict[int, list[int]] = {}
    for group in members if placement else ():
        if group >= placement.groups:
            for shard in placement.stack(group):
                beyond.setdefault(shard, []).append(position[group])
    for row, shard in enumerate(shards):
        hosts = members if placement is None else placement.hosts[shard]
        live = [position[group] for group in hosts if group in position] + beyond.get(shard, [])
        if live:
            rows.extend([row] * len(live))
            columns.extend(live)
        else:
            anybody.append(row)
    return flow.Edges(np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64), np.array(anybody, dtype=np.int64))


def _names(groups: Iterable[GroupId]) -> str:
    return " ".join(str(group) for group in sorted(groups))
