"""ReCoVer's versatile workload (arXiv 2605.11215): the number of contributed microbatches never changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.scheduling.policies.recover_roles import initial, next_step, on_failure, patch, plan
from megatron_ft.types import Microbatch

clusters = st.tuples(st.integers(1, 24), st.integers(1, 20))


def check_roles(roles):
    """The published rules, for any state between two steps."""
    assert len(roles.minor) <= 1, "at most one minor"
    assert len(set(roles.live)) == roles.W
    assert len(roles.majors) == roles.B // roles.quota, "majors = floor(B / G)"
    assert roles.remainder == roles.B % roles.quota and bool(roles.minor) == bool(roles.remainder)
    assert roles.minor or not roles.minor_spares
    assert roles.W * roles.quota >= roles.B


def ids(roles, step):
    return [Microbatch(step, shard, index) for shard in range(roles.W_init) for index in range(roles.G_init)]


def planned(any_plan):
    return sorted(m for own in any_plan.assignment.values() for m in own)


@pytest.mark.slow
@settings(max_examples=100)
@given(clusters, st.data())
def test_B_is_constant_under_any_sequence_of_failures(cluster, data):
    """ReCoVer, invariant: every step aggregates B = W_init * G_init microbatches; here each id exactly once."""
    roles = initial(*cluster)
    step = 0
    while True:
        check_roles(roles)
        assert sum(roles.contributed.values()) == cluster[0] * cluster[1], "constant B"
        running = plan(roles, step, *cluster)
        assert planned(running) == ids(roles, step)
        for _ in range(data.draw(st.integers(0, 3))):  # losses within one step
            lost = data.draw(st.sets(st.sampled_from(roles.live), min_size=1, max_size=3))
            recovery = on_failure(roles, lost)
            if recovery.kind == "wipe-out":
                assert lost == set(roles.live) and recovery.roles == roles
                return
            check_recovery(roles, lost, recovery)
            roles = recovery.roles
            running = patch(running, recovery)
            assert planned(running) == ids(roles, step), "the step in which it happens, too"
            assert {g: len(own) for g, own in running.assignment.items()} == dict(roles.contributed)
        roles, step = next_step(roles), step + 1
        if step > 4:
            return


def check_recovery(before, lost, recovery):
    after = recovery.roles
    assert set(after.live) == set(before.live) - lost
    check_roles(after)
    assert sum(after.contributed.values()) == before.B
    assert recovery.reason
    if recovery.kind == "boundary":
        check_boundary(before, lost, recovery)
        return
    assert recovery.b == recovery.z == 0 and not any(extra(before, recovery).values()), "nothing is recomputed"
    if not before.boundary:
        assert after.quota == before.quota
        dead_majors, dead_minor = len(lost & set(before.majors)), len(lost & set(before.minor))
        assert len(recovery.promoted) == dead_majors + dead_minor
        # Matching spare: a major's place is taken by a major spare, the minor's by a minor spare.
        for dead, spare in recovery.promoted.items():
            kind = "majors" if dead in before.majors else "minor"
            assert spare in getattr(after, kind)
            assert spare in (before.major_spares if kind == "majors" else before.minor_spares)
            computed = before.quota if kind == "majors" else before.remainder
            assert computed == before.contributed[dead], "it has computed as much already"


def extra(before, recovery):
    """Return the further microbatches that each survivor computes in the running step; a promoted one has its role's."""
    had = {**before.contributed, **{spare: before.contributed[dead] for dead, spare in recovery.promoted.items()}}
    return {group: count - had[group] for group, count in recovery.roles.contributed.items()}


def check_boundary(before, lost, recovery):
    """Check by brute force over b: the least b >= 1 with contributed + W * b >= B; z boundary minors do b - 1."""
    after = recovery.roles
    contributed = before.B - sum(before.contributed[g] for g in lost)
    contributed += sum(before.contributed[dead] for dead in recovery.promoted)
    b = next(b for b in range(1, before.B + 1) if contributed + after.W * b >= before.B)
    assert recovery.b == b and recovery.z == contributed + after.W * b - before.B
    assert sorted(extra(before, recovery).values()) == [b - 1] * recovery.z + [b] * (after.W - recovery.z)
    assert after.quota == next(G for G in range(1, before.B + 1) if after.W * G >= before.B), "least G, W * G >= B"
    assert next_step(after).contributed == {
        **dict.fromkeys(after.live, 0),
        **dict.fromkeys(after.majors, after.quota),
        **dict.fromkeys(after.minor, after.remainder),
    }


@given(clusters)
def test_without_failures_all_are_majors(cluster):
    roles = initial(*cluster)
    assert roles.majors == tuple(range(cluster[0])) and roles.live == roles.majors
    running = plan(roles, 7, *cluster)
    assert all(m.shard == group for group in roles.majors for m in running.of(group))
    assert not running.patched


def test_the_published_configuration_after_one_loss():
    """ReCoVer, evaluation: W = 64, G = 128, B = 8192; one replica lost.

    b = ceil(128 / 63) = 3 and z = 8064 + 189 - 8192 = 61; then G = 131, 62 majors and a minor with the remaining 70.
    """
    recovery = on_failure(initial(64, 128), {5})
    assert (recovery.kind, recovery.b, recovery.z) == ("boundary", 3, 61)
    roles = recovery.roles
    assert (roles.quota, len(roles.majors), roles.remainder, len(roles.major_spares)) == (131, 62, 70, 0)
    assert recovery.reason == (
        "group 5 lost without a matching spare: policy boundary, 128 of 8192 microbatches missing, "
        "3 more for each of 63 groups, 2 for 61 of them; then G = 131"
    )


def test_spares_are_about_eighty_to_twenty():
    """ReCoVer, versatile workload: of the spares about 80% are major, 20% minor ones; no minor, no minor spares."""
    roles = on_failure(initial(100, 2), range(52)).roles  # 48 left, 200 microbatches: G = 5 and 40 majors, no minor
    assert (len(roles.majors), len(roles.major_spares), len(roles.minor), len(roles.minor_spares)) == (40, 8, 0, 0)
    roles = on_failure(initial(97, 2), range(60)).roles  # 37 left, 194 microbatches: G = 6, 32 majors, a minor with 2
    assert (len(roles.majors), len(roles.major_spares), len(roles.minor), len(roles.minor_spares)) == (32, 3, 1, 1)


@given(clusters, st.data())
def test_of_the_spares_a_fifth_stands_by_for_the_minor(cluster, data):
    """ReCoVer, versatile workload: about 80% major, 20% minor; to the nearest spare, and none where there is no minor."""
    lost = data.draw(st.sets(st.integers(0, cluster[0] - 1), max_size=cluster[0] - 1))
    roles = on_failure(initial(*cluster), lost).roles if lost else initial(*cluster)
    spares = len(roles.major_spares) + len(roles.minor_spares)
    assert spares == roles.W - len(roles.majors) - len(roles.minor)
    assert abs(len(roles.minor_spares) - (0.2 * spares if roles.minor else 0)) <= 0.5


@given(clusters, st.data())
def test_the_communicator_is_in_the_order_of_the_roles(cluster, data):
    """ReCoVer, versatile workload: [majors | major spares | minor | minor spares]; a boundary deals, it does not shuffle."""
    roles = initial(*cluster)
    for _ in range(3):
        if roles.W == 1:
            return
        lost = set(data.draw(st.permutations(roles.live))[: data.draw(st.integers(1, roles.W - 1))])
        recovery = on_failure(roles, lost)
        after = recovery.roles
        kinds = ("majors", "major_spares", "minor", "minor_spares")
        assert after.live == tuple(group for kind in kinds for group in getattr(after, kind))
        if not recovery.promoted:
            assert after.live == tuple(group for group in roles.live if group not in lost)
        dealt = [group for group, own in plan(after, 0, *cluster).assignment.items() for _ in own]
        assert dealt == [group for group in after.live for _ in range(next_step(after).contributed[group])]
        roles = next_step(after)


def test_spares_stand_in_until_none_matches():
    roles = next_step(on_failure(initial(97, 2), range(60)).roles)
    first, second = roles.major_spares[:2]
    recovery = on_failure(roles, {roles.majors[0], roles.minor[0]})
    assert recovery.kind == "promotion" and recovery.promoted == {
        roles.majors[0]: first,
        roles.minor[0]: roles.minor_spares[0],
    }
    roles = recovery.roles
    assert roles.majors[-1] == first and roles.major_spares[0] == second
    assert on_failure(roles, {second}).kind == "spare"
    assert on_failure(roles, roles.minor).kind == "boundary", "a major spare does not match the minor"


def test_a_second_loss_in_the_step_of_a_boundary_is_a_boundary_again():
    roles = on_failure(initial(4, 3), {0}).roles
    assert roles.contributed == {1: 4, 2: 4, 3: 4} and roles.boundary
    again = on_failure(roles, {3})
    assert (again.kind, again.b, again.z) == ("boundary", 2, 0)
    assert again.roles.contributed == {1: 6, 2: 6}
