"""Every policy through random losses and entries: what the port promises, and each policy against its definition."""

from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ft.core.replication import placement as replication
from megatron_ft.core.scheduling.assignment import microbatches_of_step
from megatron_ft.core.scheduling.policies import POLICIES, Batch, policy, recover_roles
from megatron_ft.core.scheduling.policies.rectlr import Stacks
from megatron_ft.core.scheduling.policies.replication import replica_sets
from megatron_ft.core.scheduling.policies.restart import divisible_world
from megatron_ft.types import Microbatch, PlanOrigin

KEEPING = ["stacked_quota", "slack", "spare", "recover", "replication"]
"""The policies that finish the step of a loss with all of its microbatches."""


def made(name, groups, per_shard, r):
    """Return a policy and a batch that suits it; r: the redundancy, as far as there is one."""
    where = {"spare": replication.consecutive, "replication": replication.sets}.get(name, replication.consecutive)
    place = None if name in ("recover", "drop", "restart") else where(groups, r)
    slack = name == "slack"
    return policy("stacked_quota" if slack else name, copies=r, slack=slack), Batch(groups, per_shard, place)


@st.composite
def runs(draw, names=tuple(KEEPING)):
    """Draw a policy, a batch, and the plan origins of a run: every one that a step ever had."""
    name = draw(st.sampled_from(names))
    groups = draw(st.integers(2, 9))
    r = draw(st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0]))
    chosen, batch = made(name, groups, draw(st.integers(1, 4)), r)
    origin, live, found = PlanOrigin(tuple(range(groups))), set(range(groups)), []
    found.append(origin)
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["loss", "loss", "step", "join"]))
        if kind == "loss" and len(live) > 1:
            lost = draw(st.sets(st.sampled_from(sorted(live)), min_size=1, max_size=min(3, len(live) - 1)))
            back = draw(st.sets(st.sampled_from(sorted(lost)), max_size=1))  # a new start may be there already
            live = live - lost | back
            origin = origin.after(lost, back)
        elif kind == "join" and len(live) < groups + 2:
            free = sorted(set(range(groups + 2)) - live)
            joined = draw(st.sets(st.sampled_from(free), min_size=1, max_size=2))
            live |= joined
            origin = origin.after((), joined)
        else:
            origin = origin.following(tuple(sorted(live)), chosen.remembers)
        found.append(origin)
    return name, chosen, batch, found


@given(runs(), st.dictionaries(st.integers(0, 8), st.floats(0.2, 0.9), max_size=2))
@settings(max_examples=100)
def test_after_any_losses_each_microbatch_is_contributed_once(run, slow):
    name, chosen, batch, origins = run
    whole = sorted(microbatches_of_step(3, batch.shards, batch.per_shard))
    for origin in origins:
        plan = chosen.plan(batch, 3, origin, slow if chosen.balances else {})
        if plan.wipe_out:
            assert chosen.wipes_out and not plan.assignment
            return  # the run goes back to its checkpoint
        assert sorted(chain(*plan.assignment.values())) == whole, plan.reason
        left = set(origin.live)
        for lost, joined in origin.changes:
            left = left - set(lost) | set(joined)
        assert {group for group, own in plan.assignment.items() if own} <= left


@given(runs())
@settings(max_examples=100)
def test_a_standby_part_belongs_to_one_contributor_and_is_promoted_as_a_whole(run):
    name, chosen, batch, origins = run
    for origin in origins:
        begun = chosen.plan(batch, 3, PlanOrigin(origin.live, past=origin.past), {})
        plan = chosen.plan(batch, 3, origin, {})
        if begun.wipe_out or plan.wipe_out:
            return
        lost = {group for gone, _ in origin.changes for group in gone}
        left = {group: parts for group, parts in begun.standby.items() if group not in lost}
        assert plan.standby == left, "the numbers of the parts are those of the step's beginning"
        parts = [(group, part) for group, own in plan.standby.items() for part in own]
        assert max(map(len, plan.standby.values()), default=0) <= chosen.most_parts(batch)
        for group, part in parts:
            assert part and not set(part) & set(begun.of(group)), "a group does not stand by for itself"
            assert sum(set(part) <= set(own) for own in begun.assignment.values()) == 1
            assert all(other == part or not set(other) & set(part) for _, other in parts)
            mine = set(part) & set(plan.of(group))
            assert mine in (set(), set(part)), "a part is contributed as a whole or not at all"
            if group in plan.assignment:
                assert bool(mine) == (plan.part(group, part[0]) in plan.promoted(group))
                assert not mine & plan.patched, "what is promoted is not computed again"
                assert set(plan.standby_of(group)).isdisjoint(plan.of(group))


@given(runs())
@settings(max_examples=100)
def test_a_lost_microbatch_is_computed_again_only_if_no_group_stands_by_for_it(run):
    """Every policy promotes first; ``recover`` and ``spare`` at the first loss of a step, where nothing was patched yet."""
    name, chosen, batch, origins = run
    for origin in origins:
        if len(origin.changes) != 1 or origin.changes[0][1]:
            continue
        lost = set(origin.changes[0][0])
        begun = chosen.plan(batch, 0, PlanOrigin(origin.live, past=origin.past), {})
        plan = chosen.plan(batch, 0, origin, {})
        if plan.wipe_out or begun.wipe_out:
            continue
        covered = {m for group, parts in begun.standby.items() if group not in lost for part in parts for m in part}
        gone = {microbatch for group in lost for microbatch in begun.of(group)}
        assert plan.patched == gone - covered


@given(st.integers(2, 12), st.integers(1, 4), st.data())
def test_spare_repeats_the_record_that_is_kept_from_loss_to_loss(groups, per_shard, data):
    """``Stacks`` decides S from its own record; ``spare`` makes ReCtlr's decisions anew from the losses."""
    r = data.draw(st.integers(1, groups))
    place = replication.consecutive(groups, r)
    chosen, batch, kept = policy("spare"), Batch(groups, per_shard, place), Stacks(place.stacks)
    origin = PlanOrigin(tuple(range(groups)))
    for victim in data.draw(st.permutations(range(groups)))[:-1]:
        kept.begin_step()
        repaired = kept.lose(victim)
        origin = origin.after([victim], ())
        plan = chosen.plan(batch, 0, origin, {})
        live = tuple(sorted(kept.live))
        assert bool(plan.wipe_out) == (repaired.phase == "wipe-out") == place.wiped_out(live)
        if plan.wipe_out:
            assert "wipe-out" in plan.wipe_out
            return
        assert plan.facts["S"] == repaired.S and plan.facts["phase"] in ("fixed", "free")
        origin = origin.following(live, chosen.remembers)
        after = chosen.plan(batch, 1, origin, {})
        assert after.facts == {"S": repaired.S, "phase": "fixed", "moves": 0}
        for group in live:
            shards = {m.shard for m in after.of(group) + after.standby_of(group)}
            assert len(shards) == repaired.S, "every live group computes the first S of its stack"


@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_recover_keeps_to_the_roles(groups, per_shard, data):
    chosen, batch = policy("recover"), Batch(groups, per_shard)
    roles, origin = recover_roles.initial(groups, per_shard), PlanOrigin(tuple(range(groups)))
    for step, victim in enumerate(data.draw(st.permutations(range(groups)))[:-1]):
        recovery = recover_roles.on_failure(roles, [victim], exact=True)
        plan = chosen.plan(batch, step, origin.after([victim], ()), {})
        assert plan.facts["recovery"] == recovery.kind and (plan.facts["b"], plan.facts["z"]) == (
            recovery.b,
            recovery.z,
        )
        assert {group: len(own) for group, own in plan.assignment.items()} == recovery.roles.contributed
        if recovery.kind == "promotion":
            assert not plan.patched, "a promotion recomputes nothing"
        roles = recover_roles.next_step(recovery.roles)
        origin = origin.after([victim], ()).following(tuple(sorted(roles.live)), chosen.remembers)
        begun = chosen.plan(batch, step + 1, origin, {})
        assert {group: len(begun.of(group)) for group in roles.live} == roles.contributed
        for spare, (contributor, count) in roles.shadows.items():
            assert begun.standby[spare] == (begun.of(contributor),) and len(begun.of(contributor)) == count


def test_of_two_minor_spares_the_second_stands_by_for_the_first_that_was_promoted():
    """A promoted standby that is lost again: B = 15 over 9 groups are quotas of 2, so 7 majors, a minor with 1, a spare."""
    roles = recover_roles.Roles(5, 3, 7, (0, 1), (), (2,), (3, 4))
    roles = recover_roles.next_step(roles)
    first = recover_roles.on_failure(roles, [2], exact=True)
    assert (first.kind, dict(first.promoted)) == ("promotion", {2: 3})
    second = recover_roles.on_failure(first.roles, [3], exact=True)
    assert (second.kind, dict(second.promoted)) == ("promotion", {3: 4})
    assert recover_roles.on_failure(second.roles, [4], exact=True).kind == "boundary"


@given(st.integers(2, 12), st.integers(1, 4), st.data())
def test_replication_ends_when_a_set_has_no_copy_left(groups, per_shard, data):
    copies = data.draw(st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0]))
    chosen, batch = made("replication", groups, per_shard, copies)
    live = tuple(sorted(data.draw(st.sets(st.integers(0, groups - 1), min_size=1))))
    plan, sets = chosen.plan(batch, 0, PlanOrigin(live), {}), replica_sets(groups, copies)
    assert bool(plan.wipe_out) == any(not set(live) & set(members) for members in sets)
    for members in sets if not plan.wipe_out else ():
        work = {Microbatch(0, shard, index) for shard in members for index in range(per_shard)}
        assert sum(bool(plan.of(group)) for group in members) == 1, "one copy contributes"
        for group in set(live) & set(members):
            assert {*plan.of(group), *plan.standby_of(group)} == work, "copies compute the same"


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 9), st.data())
def test_copies_in_the_slack_make_no_group_the_last_one(groups, per_shard, r, data):
    r = min(r, groups)
    chosen, batch = made("slack", groups, per_shard, r)
    live = tuple(sorted(data.draw(st.sets(st.integers(0, groups - 1), min_size=1))))
    slow = data.draw(st.dictionaries(st.sampled_from(live), st.floats(0.2, 0.95), max_size=2))
    plan = chosen.plan(batch, 0, PlanOrigin(live), slow)
    bare = policy("stacked_quota").plan(batch, 0, PlanOrigin(live), slow)
    assert {group: plan.of(group) for group in live} == {group: bare.of(group) for group in live}

    def longest(of):
        return max(len(of(group)) / slow.get(group, 1.0) for group in live)

    assert longest(lambda g: plan.of(g) + plan.standby_of(g)) <= longest(bare.of) + 1e-6
    idle = [g for g in live if (len(bare.of(g)) + 1) / slow.get(g, 1.0) <= longest(bare.of)]
    if len(live) > 1:
        assert set(idle) <= plan.standby.keys() or sum(len(bare.of(g)) for g in live) <= len(plan.standby) + 1


def test_the_copies_are_those_of_slow_groups_first():
    """Four groups with 4 microbatches each, one of them half as fast: the quotas leave slack."""
    chosen, batch = made("slack", 4, 4, 4)
    plan = chosen.plan(batch, 0, PlanOrigin((0, 1, 2, 3)), {2: 0.5})
    slow = set(plan.of(2))
    assert plan.standby and {m for parts in plan.standby.values() for (m,) in parts} & slow


@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_drop_shrinks_the_batch(groups, per_shard, data):
    """ReCoVer, ablation: the batch that shrinks."""
    chosen, batch = made("drop", groups, per_shard, 1)
    live = data.draw(st.sets(st.integers(0, groups - 1), min_size=1))
    lost = data.draw(st.sets(st.sampled_from(sorted(live)), max_size=len(live) - 1))
    plan = chosen.plan(batch, 0, PlanOrigin(tuple(sorted(live))).after(lost, ()), {})
    assert sorted(chain(*plan.assignment.values())) == [
        Microbatch(0, group, i) for group in sorted(live - lost) for i in range(per_shard)
    ]
    assert all(m.shard == group for group in live - lost for m in plan.of(group))


@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_restart_stops_at_the_first_loss(groups, per_shard, data):
    chosen, batch = made("restart", groups, per_shard, 1)
    live = tuple(sorted(data.draw(st.sets(st.integers(0, groups - 1), min_size=1))))
    begun = chosen.plan(batch, 0, PlanOrigin(live), {})
    assert len(list(chain(*begun.assignment.values()))) == groups * per_shard
    assume(len(live) > 1)
    plan = chosen.plan(batch, 0, PlanOrigin(live).after([live[0]], ()), {})
    assert plan.wipe_out.startswith(f"group {live[0]} lost") and not plan.assignment


@given(st.integers(1, 70), st.integers(1, 9000))
def test_an_even_world_leaves_no_group_with_more(live, total):
    world = divisible_world(live, total)
    assert total % world == 0 and not any(total % more == 0 for more in range(world + 1, live + 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replica_sets(4, 5), "copies must lie between 1 and the number of groups, 4, got 5"),
        (lambda: divisible_world(0, 4), "must both be at least 1, got 0 and 4"),
    ],
)
def test_misuse_is_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_name_of_a_policy_has_one():
    assert [type(policy(name)).__module__.rpartition(".")[2] for name in POLICIES] == list(POLICIES)


@pytest.mark.parametrize("name", ["spare", "recover"])
def test_a_process_that_begins_after_a_thousand_losses_has_the_same_plan(name):
    """It decides them all at once, one after the other; the others have decided each as it came."""
    chosen, batch = made(name, 6, 2, 3)
    past = (((5,),), *[((),)] * 1200)
    begun = chosen.plan(batch, 1201, PlanOrigin((0, 1, 2, 3, 4), past=past), {})
    short = chosen.plan(batch, 1201, PlanOrigin((0, 1, 2, 3, 4), past=past[:1]), {})
    assert sorted(chain(*begun.assignment.values())) == sorted(microbatches_of_step(1201, 6, 2))
    assert begun.assignment.keys() == short.assignment.keys()
