"""``stacked_quota`` on restricted stacks: least largest load, fewest moves, hosting kept."""

from __future__ import annotations

import math

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from megatron_ft.core.replication.placement import cyclic, golomb
from megatron_ft.core.scheduling.assignment import (
    fetched,
    microbatches_of_step,
    patch_plan,
    plan_step,
)
from tests.support import check_exactly_once


@st.composite
def cases(draw):
    """A small job: placement with r < N, some groups dead."""
    groups = draw(st.integers(3, 9))
    others = draw(st.sets(st.integers(1, groups - 1), min_size=1, max_size=groups - 2))
    dead = draw(st.sets(st.integers(0, groups - 1), max_size=groups - 1))
    return cyclic(groups, (0, *sorted(others))), draw(st.integers(1, 5)), sorted(set(range(groups)) - dead)


def hosting(placement, live) -> list[tuple[int, int]]:
    """Return the (shard, group) pairs that are allowed: hosts, or every group where no host lives."""
    pairs = []
    for shard in range(placement.groups):
        hosts = [group for group in placement.hosts[shard] if group in live] or live
        pairs += [(shard, group) for group in hosts]
    return pairs


def feasible(placement, per_shard: int, live, limits: dict[int, int]) -> bool:
    """Check with an independent maximum flow (networkx)."""
    graph = networkx.DiGraph()
    for shard in range(placement.groups):
        graph.add_edge("source", ("shard", shard), capacity=per_shard)
    for shard, group in hosting(placement, live):
        graph.add_edge(("shard", shard), ("group", group))
    for group, limit in limits.items():
        graph.add_edge(("group", group), "sink", capacity=limit)
    return networkx.maximum_flow_value(graph, "source", "sink") == placement.groups * per_shard


def fewest_moves(placement, per_shard: int, live, limit: int, home: dict[tuple[int, int], int]) -> int:
    """Solve an independent linear program: a microbatch that does not stay on its edge has moved."""
    pairs = hosting(placement, live)
    n = len(pairs)
    gain = np.array([0.0] * n + [-1.0] * n)  # amounts, then the part of them that stays
    row_of = np.zeros((placement.groups, 2 * n))
    column_of = np.zeros((len(live), 2 * n))
    stays = np.zeros((n, 2 * n))
    for i, (shard, group) in enumerate(pairs):
        row_of[shard, i] = 1
        column_of[live.index(group), i] = 1
        stays[i, i], stays[i, n + i] = -1, 1
    bounds = [(0, per_shard)] * n + [(0, home.get(pair, 0)) for pair in pairs]
    found = linprog(
        gain,
        A_ub=np.vstack([column_of, stays]),
        b_ub=[limit] * len(live) + [0] * n,
        A_eq=row_of,
        b_eq=[per_shard] * placement.groups,
        bounds=bounds,
    )
    return placement.groups * per_shard + round(found.fun)


@given(cases())
@settings(max_examples=100)
def test_plans_are_exact_hosted_level_and_still(case):
    placement, per_shard, live = case
    plan = plan_step(3, placement.groups, per_shard, live, placement)
    check_exactly_once(plan.assignment, microbatches_of_step(3, placement.groups, per_shard))
    allowed = set(hosting(placement, live))
    assert all((m.shard, group) in allowed for group, own in plan.assignment.items() for m in own)
    load = max(len(own) for own in plan.assignment.values())
    assert not feasible(placement, per_shard, live, dict.fromkeys(live, load - 1))
    moved = sum(m.shard != group for group, own in plan.assignment.items() for m in own)
    home = {(group, group): per_shard for group in live}
    assert moved == fewest_moves(placement, per_shard, live, load, home)


@given(cases(), st.booleans(), st.integers(0, 2), st.data())
@settings(max_examples=100)
def test_slow_groups_get_less(case, restricted, more, data):
    """The time of the slowest group is the least possible for the given hosts, if each straggler keeps a microbatch."""
    placement, per_shard, live = case
    groups, live = placement.groups, [*live, *range(placement.groups, placement.groups + more)]
    slow = data.draw(
        st.dictionaries(st.sampled_from(live), st.sampled_from([0.05, 0.25, 1 / 3, 0.5, 0.61]), max_size=3)
    )
    plan = plan_step(0, groups, per_shard, live, placement if restricted else None, slow)
    check_exactly_once(plan.assignment, microbatches_of_step(0, groups, per_shard))
    assert list(plan.assignment) == live and plan.patched == frozenset()
    pace = {group: slow.get(group, 1.0) for group in live}
    if len(set(pace.values())) == 1:
        assert plan == plan_step(0, groups, per_shard, live, placement if restricted else None)
        return
    loads = {group: len(plan.of(group)) for group in live}
    if groups * per_shard >= len(slow):
        assert all(loads[group] for group in slow)
    # The excess over the one microbatch by which a straggler is measured is spread so that no other way is faster.
    time = max((loads[g] / pace[g] for g in live if g not in slow or loads[g] > 1), default=0)
    if not time:
        return
    faster = {group: math.ceil(time * pace[group] - 1e-9) - 1 for group in live}
    assert sum(max(limit, group in slow) for group, limit in faster.items()) < groups * per_shard


@given(cases(), st.data())
@settings(max_examples=100)
def test_microbatches_of_a_slow_group_go_to_hosts_of_their_shard(case, data):
    """Hosts compute as much as is possible in that time (an independent maximum flow gives the amount)."""
    placement, per_shard, live = case
    slow = {data.draw(st.sampled_from(live)): data.draw(st.sampled_from([0.2, 0.4, 0.6]))}
    plan = plan_step(0, placement.groups, per_shard, live, placement, slow)
    loads = {group: len(plan.of(group)) for group in live}
    time = max(
        (load / slow.get(group, 1.0) for group, load in loads.items() if group not in slow or load > 1), default=0
    )
    graph = networkx.DiGraph()
    for shard in range(placement.groups):
        graph.add_edge("source", ("shard", shard), capacity=per_shard)
        graph.add_edges_from([(("shard", shard), group) for group in placement.hosts[shard] if group in live])
    for group in live:
        graph.add_edge(group, "sink", capacity=max(int(time * slow.get(group, 1.0) + 1e-9), group in slow))
    hosted = sum(len(own) - len(fetched(own, group, placement)) for group, own in plan.assignment.items())
    assert hosted == networkx.maximum_flow_value(graph, "source", "sink")


def test_a_slow_group_that_has_no_shard_of_its_own_keeps_a_microbatch():
    """Group 4 has entered on top of the four of the placement, and every other group could keep its own shard."""
    for placement in (None, cyclic(4, (0, 1))):
        plan = plan_step(0, 4, 4, range(5), placement, {4: 0.1})
        assert {group: len(own) for group, own in plan.assignment.items()} == {0: 3, 1: 4, 2: 4, 3: 4, 4: 1}


def test_the_example_of_the_documentation():
    """Four groups of six microbatches; one takes three times as long: 24 = 8 + 7 + 7 + 2, done after 8, not 18."""
    plan = plan_step(0, 4, 6, range(4), None, {1: 1 / 3})
    assert {group: len(own) for group, own in plan.assignment.items()} == {0: 8, 1: 2, 2: 7, 3: 7}
    assert plan.reason.endswith("less for the slow groups 1")
    even = plan_step(0, 4, 6, range(4))
    assert all(set(even.of(group)) <= set(plan.of(group)) for group in (0, 2, 3)) and set(plan.of(1)) <= set(even.of(1))


@given(cases(), st.data())
@settings(max_examples=100)
def test_a_patch_is_level_and_as_much_of_it_as_possible_is_hosted(case, data):
    placement, per_shard, live = case
    plan = plan_step(1, placement.groups, per_shard, live, placement)
    lost = data.draw(st.sets(st.sampled_from(live), max_size=len(live) - 1)) if len(live) > 1 else set()
    patched = patch_plan(plan, lost, placement)
    check_exactly_once(patched.assignment, microbatches_of_step(1, placement.groups, per_shard))
    survivors = sorted(set(live) - lost)
    pool = [m for group in lost for m in plan.of(group)]
    most = -(-len(pool) // len(survivors))
    graph, hosted = networkx.DiGraph(), 0
    for m in pool:
        graph.add_edge("source", m, capacity=1)
        graph.add_edges_from([(m, group) for group in placement.hosts[m.shard] if group in survivors], capacity=1)
    for group in survivors:
        graph.add_edge(group, "sink", capacity=most)
        assert patched.of(group)[: len(plan.of(group))] == plan.of(group)
        new = patched.of(group)[len(plan.of(group)) :]
        assert len(new) <= most
        hosted += len(new) - len(fetched(new, group, placement))
    assert hosted == (networkx.maximum_flow_value(graph, "source", "sink") if pool else 0)


@given(cases())
@settings(max_examples=60)
def test_fetched_microbatches_are_those_the_stack_lacks(case):
    placement, per_shard, live = case
    plan = plan_step(0, placement.groups, per_shard, live, placement)
    unhosted = placement.unhosted(live)
    for group, own in plan.assignment.items():
        lacking = fetched(own, group, placement)
        assert lacking == tuple(m for m in own if m.shard not in placement.stack(group))
        assert all(m.shard in unhosted for m in lacking), "only what no live group hosts is read anew"


def test_an_unhosted_shard_goes_to_any_group_and_is_fetched():
    placement = cyclic(6, (0, 1))  # shard 2 lives on groups 2 and 1
    plan = plan_step(0, 6, 4, [0, 3, 4, 5], placement)
    check_exactly_once(plan.assignment, microbatches_of_step(0, 6, 4))
    takers = {group for group, own in plan.assignment.items() for m in own if m.shard == 2}
    assert takers <= {0, 3, 4, 5}
    missing = [m for group, own in plan.assignment.items() for m in fetched(own, group, placement)]
    assert {m.shard for m in missing} == {2} and len(missing) == 4
    assert fetched(plan.of(0), 0, None) == ()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [200, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_the_load_is_the_ideal_one(groups, share):
    """Beyond both papers: r = 9, G = 16, up to 30% dead groups: ceil(N*G / (N-k)) / G in at least 99% of cases."""
    placement = golomb(groups, 9)
    rng = np.random.default_rng(7)
    tries, ideal = (100, 0) if groups == 200 else (40, 0)
    for _ in range(tries):
        dead = set(rng.choice(groups, int(share * groups), replace=False).tolist())
        live = [group for group in range(groups) if group not in dead]
        plan = plan_step(0, groups, 16, live, placement)
        load = max(len(own) for own in plan.assignment.values())
        ideal += load == -(-groups * 16 // len(live))
    assert ideal >= 0.99 * tries


@pytest.mark.parametrize("weights", [{0: 0.0}, {1: -1.0}])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be positive"):
        plan_step(0, 3, 1, [0, 1, 2], None, weights)
