"""The planner's estimates: whole runs, played event by event under the same assumptions, and advice."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, isfinite

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.config import schema
from megatron_ft.core.replication.placement import golomb
from megatron_ft.errors import ConfigError
from megatron_ft.plan import Cluster, config_section, estimate, evaluate, inputs, policy_models, recommend
from megatron_ft.plan.closed_forms import patch_chance
from megatron_ft.plan.estimate import POLICIES, PREFERENCE, search
from megatron_ft.plan.presets import PRESETS

SPARE = inputs.cluster("spare-600k", None, {})
ALLREDUCE_S = {200: 2.0, 600: 6.0, 1000: 10.0}


def published(N: int) -> Cluster:
    """SPARe's simulation at N, with no time for detection."""
    return replace(SPARE, gpus=N * 1000, allreduce_s=ALLREDUCE_S[N], step_s=64 + ALLREDUCE_S[N])


def small(**values) -> Cluster:
    """Twelve groups that fail often, with times that all matter."""
    base = {"gpus": 96, "gpus_per_group": 8, "mtbf_s": 400.0, "step_s": 20.0, "allreduce_s": 2.0, "restart_s": 600.0}
    return Cluster(**{**base, "checkpoint_s": 15.0, "steps": 10_000, "rejoin_s": 500.0, "microbatches": 16, **values})


class Played:
    """One long run, event by event: the assumptions of the planner's docstring, and none of its equations but q_k."""

    def __init__(self, cluster: Cluster, steps: int, seed: int = 0) -> None:
        self.cluster, self.steps = cluster, steps
        self.rng = np.random.default_rng(seed)
        self.wall, self.done, self.next = 0.0, 0, self.rng.exponential(cluster.mtbf_s)
        self.dead: list[int] = []
        self.back: list[float] = []

    def gap(self) -> None:
        self.next = self.wall + self.rng.exponential(self.cluster.mtbf_s)

    def step(self, load_s: float, stalled) -> bool:
        """Make one step; ``stalled()`` takes a failure and returns the length of its stall, None for a wipe-out."""
        left = load_s
        while self.next < self.wall + left:
            left -= self.next - self.wall
            self.wall = self.next
            self.gap()
            stall = stalled()
            if stall is None:
                return False
            left += stall
        self.wall += left
        self.done += 1
        return True

    def relative(self) -> float:
        return self.wall / (self.done * self.cluster.step_s)


def play_quotas(cluster: Cluster, steps: int, rejoin: bool, K: int) -> float:
    run, N, G = Played(cluster, steps), cluster.groups, cluster.microbatches
    extra_s = cluster.detection_s + cluster.reconfigure_s

    def quota() -> int:
        return ceil(N * G / (N - len(run.back)))

    def stalled() -> float:
        lost = quota()
        run.back.append(run.wall + cluster.detection_s + (cluster.rejoin_s if rejoin else inf))
        patch = ceil(lost / (N - len(run.back)))
        return extra_s + patch * cluster.microbatch_s + (cluster.reconfigure_s if rejoin else 0.0)

    while run.done < steps:
        run.step(quota() * cluster.microbatch_s + cluster.allreduce_s, stalled)
        run.back = [time for time in run.back if time > run.wall]
        if not rejoin and len(run.back) >= K:
            run.wall += cluster.checkpoint_s + cluster.restart_s
            run.back = []
            run.gap()
    return run.relative()


def play_spare(cluster: Cluster, steps: int, r: int, period_s: float) -> float:
    run, N = Played(cluster, steps), cluster.groups
    hosts = np.array(list(golomb(N, r).hosts))
    extra_s = cluster.detection_s + cluster.reconfigure_s
    alive, saved, last = np.ones(N, dtype=bool), 0, 0.0

    def stalled() -> float | None:
        k = int(N - alive.sum())
        alive[run.rng.choice(np.flatnonzero(alive))] = False
        if not alive[hosts].any(axis=1).all():
            return None
        return extra_s + (run.rng.random() < patch_chance(N, k)) * cluster.compute_s

    while run.done < steps:
        if run.wall - last >= period_s:
            run.wall += cluster.checkpoint_s
            saved, last = run.done, run.wall
        stack_s = ceil(N / alive.sum()) * cluster.compute_s
        if not run.step(stack_s + cluster.allreduce_s, stalled):
            run.wall += cluster.down_s
            run.done, last, alive[:] = saved, run.wall, True
            run.gap()
    return run.relative()


def test_rejoin_against_a_played_run():
    cluster = small()
    found = evaluate(cluster, "stacked_quota_rejoin")
    assert found.slowdown == pytest.approx(play_quotas(cluster, 40_000, True, 0), rel=0.01)


def test_no_rejoin_against_a_played_run():
    cluster = small(restart_s=2000.0)
    found = evaluate(cluster, "stacked_quota")
    played = play_quotas(cluster, 100_000, False, round(found.endured))
    assert found.relative_time == pytest.approx(played, rel=0.02)


def test_spare_against_a_played_run():
    """N = 60 with Golomb stacks; mu is 5% too low there, which is less than 2% of the time."""
    cluster = small(gpus=480, mtbf_s=120.0)
    found = evaluate(cluster, "spare", 5)
    assert found.relative_time == pytest.approx(play_spare(cluster, 30_000, 5, found.period_s), rel=0.04)


# --- published --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N, r, time", [(200, 9, 2.92), (600, 8, 2.49), (1000, 9, 2.34)])
def test_time_to_train_of_spare_as_published(N, r, time):
    """No error is published for it; the closed forms lie up to 9% below the paper's simulation."""
    assert evaluate(published(N), "spare", r).relative_time == pytest.approx(time, rel=0.09)


@pytest.mark.parametrize("N, time, error", [(200, 6.07, 0.20), (600, 4.27, 0.06), (1000, 3.88, 0.06)])
def test_time_to_train_of_replication_as_published(N, time, error):
    """At r = 3. At N = 200 the published availability is 10 points below the closed form, and the time as much above."""
    assert evaluate(published(N), "replication", 3).relative_time == pytest.approx(time, rel=error)


@pytest.mark.parametrize("N", [200, 600, 1000])
def test_checkpoints_alone_make_almost_no_progress(N):
    assert evaluate(published(N), "restart").availability < 0.05


MEASURED = [(200, 1.42, 1.15, 1.10), (600, 1.25, 1.14, 1.09), (1000, 1.19, 1.14, 1.09)]


@pytest.mark.parametrize("N, without, back, finer", MEASURED)
def test_quotas_as_measured_before(N, without, back, finer):
    """Measured before this project began, by a rough simulation with 5 s of detection: within 7%."""
    cluster = replace(published(N), detection_s=5.0)
    fine = replace(cluster, microbatches=64)
    assert evaluate(cluster, "stacked_quota").relative_time == pytest.approx(without, rel=0.07)
    assert evaluate(cluster, "stacked_quota_rejoin").relative_time == pytest.approx(back, rel=0.07)
    assert evaluate(fine, "stacked_quota_rejoin").relative_time == pytest.approx(finer, rel=0.07)


# --- advice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_section_is_accepted_by_the_config(name):
    cluster = inputs.cluster(name, None, {})
    plan = recommend(cluster)

    def refused(found):
        schema.resolve(found, groups=cluster.groups)

    pasted, hints = config_section.choose(cluster, plan, refused)
    run = schema.resolve(pasted, groups=cluster.groups)
    assert run.fault_tolerance.redundancy == plan.best.redundancy
    assert run.fault_tolerance.checkpoint.period_s == pytest.approx(plan.best.period_s, rel=0.01)
    assert run.fault_tolerance.rejoin.enabled == (plan.best.policy == "stacked_quota_rejoin")
    topics = ("checkpoint.period_s: every", "spare nodes: ", "failures of the whole job")
    assert all(hint.startswith(topic) for topic, hint in zip(topics, hints, strict=True)), hints


def test_a_policy_that_cannot_run_yet_is_reported_and_the_next_one_taken():
    cluster = small()
    plan = recommend(cluster)
    assert plan.best.policy == "stacked_quota_rejoin"
    pasted, hints = config_section.choose(
        cluster, plan, lambda s: "no" if "quota" in s["fault_tolerance"]["policy"] else None
    )
    assert pasted["fault_tolerance"]["policy"] == plan.estimates[1].policy == "recover"
    assert hints[0].startswith("this version cannot run stacked_quota with rejoin")
    assert config_section.choose(cluster, plan, lambda _: "no")[0] is None


def test_rare_failures_need_nothing_but_checkpoints():
    plan = recommend(small(mtbf_s=1e9, checkpoint_s=1.0))
    assert plan.best.policy == "restart"
    assert "rare" in plan.reason


def test_one_group_can_only_restart():
    cluster = small(gpus=8)
    assert [estimate.policy for estimate in recommend(cluster).estimates] == ["restart"]
    with pytest.raises(ConfigError, match="there is only one group"):
        evaluate(cluster, "spare")


def test_failures_faster_than_any_stall_are_reported():
    plan = recommend(small(mtbf_s=21.0, detection_s=100.0, checkpoint_s=20_000.0))
    assert not isfinite(plan.best.relative_time)
    assert plan.reason.startswith("no policy makes progress")
    assert any("makes no progress" in note for note in plan.best.notes)


clusters = st.builds(
    small,
    gpus=st.integers(2, 60).map(lambda n: 8 * n),
    mtbf_s=st.floats(100, 1e7),
    restart_s=st.floats(0, 5000),
    checkpoint_s=st.floats(1, 100),
    detection_s=st.floats(0, 60),
    rejoin_s=st.floats(0, 5000),
    microbatches=st.integers(1, 64),
)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_planner_can_recommend_every_policy_and_the_simulator_plays_it(policy):
    assert estimate._why(small(), evaluate(small(), policy))
    assert sorted(PREFERENCE) == sorted(policy_models.POLICIES) == sorted(POLICIES)


@given(clusters, st.sampled_from(POLICIES))
@settings(max_examples=80)
def test_bounds(cluster, policy):
    found = evaluate(cluster, policy)
    assert found.relative_time >= 1 and found.slowdown >= 1 - 1e-9 and found.mean_stacks >= 1 - 1e-9
    assert 0 <= found.availability <= 1
    assert found.gpu_hours_lost >= 0
    assert found.endured >= 1
    assert 1 <= found.redundancy <= cluster.groups


@given(clusters, st.sampled_from(POLICIES), st.floats(1.05, 10))
@settings(max_examples=60)
def test_worse_conditions_never_make_it_faster(cluster, policy, factor):
    """More failures, longer restarts, later detection. (Insured periods depend on the run itself: 1% of freedom.)"""
    before = evaluate(cluster, policy).relative_time * 0.99
    assert (
        evaluate(replace(cluster, mtbf_s=max(cluster.step_s, cluster.mtbf_s / factor)), policy).relative_time >= before
    )
    assert evaluate(replace(cluster, restart_s=cluster.restart_s * factor), policy).relative_time >= before
    assert evaluate(replace(cluster, detection_s=cluster.detection_s * factor), policy).relative_time >= before


@given(clusters)
@settings(max_examples=25)
def test_the_best_is_the_fastest_but_for_a_tenth_of_a_percent(cluster):
    plan = recommend(cluster)
    assert plan.best.relative_time <= plan.estimates[0].relative_time * 1.001
    for policy in ("spare", "replication"):
        best = min(found.relative_time for found in search(cluster, policy))
        assert best == next(e.relative_time for e in plan.estimates if e.policy == policy)


def test_money_and_gpu_hours():
    found = evaluate(small(steps=1000), "restart")
    assert found.gpu_hours == pytest.approx(96 * found.time_s / 3600)
    assert found.gpu_hours_lost == pytest.approx(96 * 20_000 * (found.relative_time - 1) / 3600)


# --- failures of the whole job, spare nodes, fewest groups ------------------------------------------------------------


@given(policy=st.sampled_from(POLICIES), hours=st.floats(0.05, 1e4), more=st.floats(1.5, 50))
@settings(max_examples=60, deadline=None)
def test_failures_of_the_whole_job_cost_time_under_every_policy_and_less_when_they_are_rare(policy, hours, more):
    without, seldom, often = (
        evaluate(small(mtbf_s=4000.0, job_mtbf_hours=value), policy).relative_time
        for value in (None, hours * more, hours)
    )
    assert without <= seldom * (1 + 1e-9) and seldom <= often * (1 + 1e-9)


@given(hours=st.floats(0.1, 1000))
def test_with_restart_a_failure_of_the_whole_job_is_a_failure_like_the_others(hours):
    both = 1 / (1 / 4000.0 + 1 / (hours * 3600))
    found = evaluate(small(mtbf_s=4000.0, job_mtbf_hours=hours), "restart")
    assert found.relative_time == pytest.approx(evaluate(small(mtbf_s=both), "restart").relative_time)


def test_a_failure_of_the_whole_job_costs_a_restart_and_half_a_period():
    """One in every ten hours, where nothing else ends the job: the lost time per failure is that of the definition."""
    cluster = small(mtbf_s=4000.0, steps=1_000_000, job_mtbf_hours=10.0)
    found = evaluate(cluster, "stacked_quota_rejoin")
    period_s, wall_s = found.period_s, 36_000.0 + cluster.down_s + found.period_s / 2
    assert found.availability == pytest.approx((1 - cluster.checkpoint_s / period_s) * 36_000.0 / wall_s)
    assert isfinite(found.uptime_s) and found.endured == inf


@given(mean_out=st.floats(0.001, 300))
@settings(deadline=None)
def test_the_spare_nodes_suffice_nearly_always_and_one_fewer_does_not(mean_out):
    cluster = small(mtbf_s=3600.0)
    spares = config_section.spare_nodes(cluster, mean_out)  # hours: a failure per hour
    rng = np.random.default_rng(1)
    out = rng.poisson(mean_out, 40_000)
    assert np.mean(out <= spares) > 0.987
    assert spares == 0 or np.mean(out <= spares - 1) < 0.993
