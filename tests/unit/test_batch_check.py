"""What ranks do when their batches differ: which group leaves, with which words, and what the others make of the step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatron_ft.errors import InvariantBroken, StartOver
from megatron_ft.run.batch_check import BatchCheck
from megatron_ft.run.engines.port import TAIL
from megatron_ft.run.step_timer import Slots, slots_of_group
from megatron_ft.types import Microbatch, PlanOrigin, View

GROUPS = (0, 1, 2)


class Store(dict):
    """The part of a store's client that publishes."""

    def clone(self, timeout_s):
        return self

    put = dict.__setitem__


class Rank:
    """One rank of a group whose ranks share bucket 0 if there are several ``positions``; ``returned``: incarnations."""

    def __init__(self, store, group, position, positions, load, returned):
        slots = len(GROUPS) * slots_of_group(positions)
        self.engine = SimpleNamespace(slots=slots, buckets=[torch.zeros(slots + TAIL)])
        self.engine.local = self.engine.reduced = self.engine.buckets.__getitem__
        env = SimpleNamespace(incarnation=returned.get(group, 0))
        rank = SimpleNamespace(group=group, position=position, env=env, agreement=store)
        guard = SimpleNamespace(slots=Slots(self.engine, group, position, positions), halt=self.halt)
        self.check = BatchCheck(rank, guard, load)
        self.group, self.position = group, position

    def halt(self, step, why):
        raise InvariantBroken(why)


def outcomes(wrong, returned, positions=1, store=None, ranks=None):
    """Make a step with one microbatch for each group. ``wrong``: ranks, (group, position), that load another batch.

    Return what came of it at each rank, and the ranks."""
    store = Store() if store is None else store
    shares = {group: (Microbatch(3, group, 0),) for group in GROUPS}
    plan = SimpleNamespace(assignment=shares, of=shares.__getitem__)
    view = View(1, GROUPS, "", 3, PlanOrigin(GROUPS), incarnations=returned)

    def rank(group, position):
        load = lambda one: {"x": torch.tensor([one.shard + 100 * ((group, position) in wrong)])}  # noqa: E731
        return Rank(store, group, position, positions, load, returned)

    ranks = ranks or [rank(group, position) for group in GROUPS for position in range(positions)]
    for one in ranks:
        one.check.begin()
        one.engine.buckets[0].zero_()
        one.check.say(one.check.chosen(plan, view))
    total = sum(one.engine.buckets[0] for one in ranks)
    for one in ranks:
        one.engine.buckets[0].copy_(total)

    def compare(one):
        assert one.check.sent()
        try:
            return one.check.compare(3, view)
        except (StartOver, InvariantBroken) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        found = {(one.group, one.position): said for one, said in zip(ranks, threads.map(compare, ranks), strict=True)}
    return found, ranks, view


@pytest.mark.parametrize(("positions", "at"), [(1, 0), (2, 1)])
def test_only_a_group_that_came_back_and_loads_other_data_leaves(positions, at):
    """With several ranks that share microbatches, each may read files of its own host."""
    found, ranks, view = outcomes({(2, at)}, {2: 1}, positions)
    for (group, _), said in found.items():
        if group != 2:
            assert said == {2}
            continue
        assert isinstance(said, StartOver)
        assert str(said).startswith(
            "group 2 leaves: groups 2 and 1 have loaded different batches for microbatch 3/2.0: "
        )
        assert "batch['x'] (tensor int64 [1]) has another content in group 2 than in group 1" in str(said)
    assert all(one.check.due(view) for one in ranks)  # in the next attempt they compare again


def test_equal_batches_are_compared_once():
    found, ranks, view = outcomes(set(), {2: 1})
    assert not any(found.values()) and not any(one.check.due(view) for one in ranks)


def test_the_run_stops_where_it_is_not_known_which_group_is_right():
    found, _, _ = outcomes({(1, 0)}, {})
    for said in found.values():
        assert isinstance(said, InvariantBroken)
        assert "have loaded different batches for microbatch" in str(said) and "Step 3 was not made" in str(said)
