"""Claims of the two papers, and of what goes beyond them, that span several packages of the core or need no other home.

SPARe is arXiv 2603.00357, ReCoVer arXiv 2605.11215; "beyond" is stacked quotas, measured before this project began: its
published means carry the error of their own samples, so every tolerance below says how it was chosen.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.protocol.machine import Job
from megatron_ft.core.replication.placement import consecutive, golomb, is_golomb, largest_redundancy, sets
from megatron_ft.core.scheduling.assignment import fetched, microbatches_of_step, patch_plan, plan_step
from megatron_ft.core.scheduling.policies import POLICIES, Batch, policy, rectlr
from megatron_ft.types import Plan, PlanOrigin
from tests.rectlr_reference import patch


def gradient(plan: Plan, gradients: dict[tuple[int, int], int], divisor: int) -> Fraction:
    """Return the SUM over the contributions, divided; ``gradients`` are those of (shard, index)."""
    return Fraction(sum(gradients[m.shard, m.index] for own in plan.assignment.values() for m in own), divisor)


def after_losses(name: str, N: int, G: int, live: list[int], lost: int) -> list[Plan]:
    """Return plans of a policy after losses: of the step in which ``lost`` goes, and of the step after."""
    r = min(2, largest_redundancy(N))
    where = {"stacked_quota": golomb(N, r), "spare": golomb(N, r), "replication": sets(N, 1 + (N % 2 == 0))}.get(name)
    chosen, batch = policy(name, copies=1 + (N % 2 == 0)), Batch(N, G, where)
    origin = PlanOrigin(tuple(live)).after([lost], ())
    left = tuple(group for group in live if group != lost)
    plans = [chosen.plan(batch, 0, one, {}) for one in (origin, origin.following(left, chosen.remembers))]
    return [plan for plan in plans if not plan.wipe_out]


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"drop"}))
@given(st.integers(2, 9), st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_the_gradient_is_the_sum_divided_by_B_always(name, N, G, data):
    """ReCoVer, invariant: B = W_init * G_init microbatches, SUM divided by B, whichever groups are left; so nothing
    changes."""
    job = Job(shards=N, per_shard=G, buckets=1, steps=1)
    gradients = {(s, i): data.draw(st.integers(-9, 9)) for s in range(N) for i in range(G)}
    live = sorted(data.draw(st.sets(st.integers(0, N - 1), min_size=2)))
    whole = Fraction(sum(gradients.values()), N * G)
    for plan in after_losses(name, N, G, live, data.draw(st.sampled_from(live))):
        assert gradient(plan, gradients, job.microbatches) == whole


@given(st.integers(2, 9), st.integers(1, 5), st.data())
def test_a_batch_that_shrinks_has_another_gradient(N, G, data):
    """ReCoVer, ablation: ``drop`` is off by exactly what the lost microbatches differ from the others in the mean."""
    live = data.draw(st.sets(st.integers(0, N - 1), min_size=1, max_size=N - 1))
    gradients = {(s, i): 0 if s in live else 1 for s in range(N) for i in range(G)}
    plan = policy("drop").plan(Batch(N, G), 0, PlanOrigin(tuple(sorted(live))), {})
    assert gradient(plan, gradients, sum(map(len, plan.assignment.values()))) == 0
    assert Fraction(sum(gradients.values()), N * G) == Fraction(N - len(live), N), "what the failure-free step has"


# --- SPARe ------------------------------------------------------------------------------------------------------------


def states(N: int, samples: int, seed: int = 0):
    """Return random survivors, any number of them."""
    rng = np.random.default_rng([seed, N])
    for dead in rng.integers(1, N, samples).tolist():
        yield sorted(rng.permutation(N)[dead:].tolist())


def misses(placement, samples: int) -> tuple[float, int]:
    """Return the share of the states without wipe-out in which S is not ceil(N / (N - k)), and the number of those
    states."""
    orders, missed = tuple(placement.stacks), []
    for live in states(placement.groups, samples):
        outcome = rectlr.reconfigure(orders, live, 1)
        if not outcome.wiped_out:
            missed.append(rectlr.lower_bound(placement.groups, len(live)) != outcome.S)
    return float(np.mean(missed)), len(missed)


@pytest.mark.slow
def test_golomb_reaches_the_lower_bound_of_S_where_consecutive_offsets_miss_it():
    """SPARe section 4 against its own text, N = 600, r = 8: Golomb reaches c(k) in 99.8%, consecutive misses 23%.

    Of 400 states about 170 are no wipe-out; three standard errors of a share of 23% are then 10 points.
    """
    missed, of = misses(golomb(600, 8), 400)
    assert of > 100 and missed <= 0.01
    missed, of = misses(consecutive(600, 8), 400)
    assert of > 100 and missed == pytest.approx(0.23, abs=0.1)


@given(st.sets(st.integers(1, 60), max_size=6), st.integers(0, 100))
def test_an_integer_ruler_shorter_than_half_the_ring_is_a_cyclic_one(marks, more):
    """SPARe section 4: so the known optimal rulers serve; at twice the length the longest difference meets itself."""
    ruler = (0, *sorted(marks))
    differences = [b - a for i, a in enumerate(ruler) for b in ruler[i + 1 :]]
    if len(differences) == len(set(differences)):
        assert is_golomb(2 * ruler[-1] + 1 + more, ruler)
        assert ruler[-1] == 0 or not is_golomb(2 * ruler[-1], ruler)


@pytest.mark.parametrize("N", [200, 600, 1000])
def test_the_first_failure_doubles_every_step_of_spare(N):
    """Beyond, section 3: SPARe's price is granularity, S is an integer; a quota grows by one microbatch of G."""
    live = [group for group in range(N) if group != 17]
    placement = golomb(N, 9)
    outcome = rectlr.reconfigure(tuple(placement.stacks), live, 1)
    assert outcome.S == rectlr.lower_bound(N, N - 1) == 2
    for G in (16, 64):
        plan = plan_step(0, N, G, live, placement)
        assert max(map(len, plan.assignment.values())) == G + 1


# --- beyond: stacked quotas -------------------------------------------------------------------------------------------


def load(N: int, live: list[int], placement) -> float:
    """Return the load of the busiest group, relative to the failure-free step."""
    return max(map(len, plan_step(0, N, 16, live, placement).assignment.values())) / 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("N", "r", "dead", "published", "published_consecutive", "samples"),
    [
        (200, 5, 20, 1.125, 1.18, 100),
        (200, 9, 60, 1.438, 1.523, 100),
        pytest.param(600, 5, 60, 1.125, 1.289, 60, marks=pytest.mark.long),
        pytest.param(600, 9, 180, 1.438, 1.719, 60, marks=pytest.mark.long),
    ],
)
def test_the_table_of_loads(N, r, dead, published, published_consecutive, samples):
    """Beyond, section 3, G = 16: load on Golomb stacks = ideal = ceil(16 N / (N - k)) / 16, consecutive, SPARe's S.

    Golomb and ideal within the published rounding (0.0005), the mean load too but for the one state in fifty at
    r = 5 that needs one microbatch more (0.005). One state's load on consecutive stacks scatters by 0.08 to 0.33
    (measured), so the mean over these samples by 0.007 to 0.04, and the published one by as much or more: 0.1.
    """
    ideal = ceil(16 * N / (N - dead)) / 16
    assert ideal == pytest.approx(published, abs=0.0006)
    rng = np.random.default_rng([N, r])
    spread, near = golomb(N, r), consecutive(N, r)
    golomb_loads, consecutive_loads, S = [], [], []
    for _ in range(samples):
        live = sorted(rng.permutation(N)[dead:].tolist())
        golomb_loads.append(load(N, live, spread))
        consecutive_loads.append(load(N, live, near))
        outcome = rectlr.reconfigure(tuple(spread.stacks), live, 1)
        S.append(0 if outcome.wiped_out else outcome.S)
    assert min(golomb_loads) == ideal and np.mean(golomb_loads) == pytest.approx(ideal, abs=0.005)
    assert np.mean(consecutive_loads) == pytest.approx(published_consecutive, abs=0.1)
    assert np.mean(consecutive_loads) > ideal + 0.03
    assert set(S) <= {0, 2} and S.count(2) >= 0.95 * samples, "SPARe's S is 2, where it is no wipe-out"


@pytest.mark.parametrize("N", [64, 200, 600])
@pytest.mark.parametrize("G", [16, 64])
def test_the_patch_is_a_few_microbatches_and_not_a_stack(N, G):
    """Beyond, section 3: patch = ceil(lost / (N - k)), by all survivors at once, whatever the stacks.

    The r - 1 hosts that are left of the lost shard take as much of it as that allows; the others fetch theirs. SPARe's
    patch of the same loss is a whole stack, G microbatches, at one survivor.
    """
    r, everybody = 9 if N > 64 else 8, range(N)

    for placement in (None, golomb(N, r)):
        plan = plan_step(0, N, G, everybody, placement)
        patched = patch_plan(plan, [5], placement)
        added = {group: patched.of(group)[len(plan.of(group)) :] for group in patched.assignment}
        assert max(map(len, added.values())) == ceil(G / (N - 1)) and sum(map(len, added.values())) == G
        hosted = sum(len(own) - len(fetched(own, group, placement)) for group, own in added.items())
        assert hosted == (G if placement is None else min(G, (r - 1) * ceil(G / (N - 1))))
    orders = tuple(golomb(N, r).stacks)
    outcome = rectlr.reconfigure(orders, set(everybody) - {5}, 1)
    stacks = patch(orders, 1, outcome)
    assert [len(shards) for shards in stacks.values()] == [1], "one survivor computes one shard, G microbatches"


def test_what_wipes_spare_out_is_a_slower_read_for_quotas():
    """Beyond, section 3: a shard with no live host is fetched by any group; SPARe restarts from the checkpoint, S = 1."""
    placement = golomb(200, 4)
    live = [group for group in range(200) if group not in placement.hosts[77]]
    outcome = rectlr.reconfigure(tuple(placement.stacks), live, 2)
    assert outcome.phase == "wipe-out" and outcome.wiped_out == (77,)
    plan = plan_step(3, 200, 16, live, placement)
    planned = sorted(m for own in plan.assignment.values() for m in own)
    assert planned == list(microbatches_of_step(3, 200, 16))
    assert max(map(len, plan.assignment.values())) == ceil(200 * 16 / 196), "and the load is the ideal one all the same"
