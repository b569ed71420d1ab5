"""Who computes which microbatches of a step: the policy ``stacked_quota``.

It joins SPARe's stacks (arXiv 2603.00357) with ReCoVer's microbatch quotas (arXiv 2605.11215, versatile workload).

In this version every group hosts every shard (any group can compute any microbatch), so the flow over hosting edges
reduces to levelling loads. What is fixed already: the plan is a pure function of its arguments, every microbatch of the
step is assigned exactly once, the largest load is the least possible, and a group keeps what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_ft.types import Assignment, GroupId, Microbatch, Plan


def microbatches_of_step(step: int, shards: int, per_shard: int) -> tuple[Microbatch, ...]:
    """All N*G microbatches of one step, in the order of their ids."""
    return tuple(Microbatch(step, shard, index) for shard in range(shards) for index in range(per_shard))


def plan_step(step: int, shards: int, per_shard: int, live: Sequence[GroupId]) -> Plan:
    """Assign the N*G microbatches of ``step`` to the groups of ``live``.

    A group keeps the microbatches of its own shard (shard i belongs to group i) up to the least possible largest load
    ceil(N*G / live); the rest goes to whoever has least. Deterministic: all groups compute the same plan by themselves.
    """
    if not live:
        raise ValueError("plan_step needs at least one live group, got none")
    members = sorted(live)
    quota = -(-shards * per_shard // len(members))
    assigned: dict[GroupId, list[Microbatch]] = {group: [] for group in members}
    pool: list[Microbatch] = []
    for microbatch in microbatches_of_step(step, shards, per_shard):
        own = assigned.get(microbatch.shard)
        if own is not None and len(own) < quota:
            own.append(microbatch)
        else:
            pool.append(microbatch)
    _level(assigned, pool)
    return Plan(
        step=step,
        assignment={group: tuple(own) for group, own in assigned.items()},
        reason=f"{len(members)} of {shards} groups live, at most {quota} microbatches each, {len(pool)} taken over",
    )


def patch_plan(plan: Plan, lost: Collection[GroupId]) -> Plan:
    """Spread the microbatches of ``lost`` groups over the others; nobody loses what it already has.

    The survivors are usually done with their own share when a peer is found dead, so the *added* work is levelled
    first: patch compute takes ceil(lost / survivors) microbatches (papers.md, section 3).
    """
    survivors = {group: own for group, own in plan.assignment.items() if group not in lost}
    if not survivors:
        raise ValueError(f"patch_plan: no survivor of step {plan.step} among {sorted(plan.assignment)}")
    pool = [microbatch for group in sorted(lost) for microbatch in plan.of(group)]
    added: dict[GroupId, list[Microbatch]] = {group: [] for group in survivors}
    _level(added, pool, base={group: len(own) for group, own in survivors.items()})
    return Plan(
        step=plan.step,
        assignment={group: own + tuple(added[group]) for group, own in survivors.items()},
        reason=f"{len(pool)} microbatches of groups {_names(lost)} taken over by groups {_names(survivors)}",
        patched=plan.patched | set(pool),
    )


def check_exactly_once(assignment: Assignment, expected: Collection[Microbatch]) -> None:
    """Raise ``AssertionError`` unless every expected microbatch is assigned exactly once and nothing else is."""
    seen = [microbatch for own in assignment.values() for microbatch in own]
    assert len(seen) == len(set(seen)), f"assigned twice: {sorted(m for m in set(seen) if seen.count(m) > 1)}"
    assert set(seen) == set(expected), f"assigned and expected differ: {sorted(set(seen) ^ set(expected))}"


def _level(
    assigned: Mapping[GroupId, list[Microbatch]],
    pool: Iterable[Microbatch],
    base: Mapping[GroupId, int] | None = None,
) -> None:
    """Append each microbatch of ``pool`` to the group with least; ties: the smaller base load, then the lower id."""
    base = base or {}
    for microbatch in pool:
        group = min(assigned, key=lambda g: (len(assigned[g]), base.get(g, 0), g))
        assigned[group].append(microbatch)


def _names(groups: Iterable[GroupId]) -> str:
    return " ".join(str(group) for group in sorted(groups))
