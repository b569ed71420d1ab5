"""Simulated training runs: accounting, replay, the published results of SPARe (arXiv 2603.00357), and bad input."""

from statistics import mean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ft.core.replication.placement import consecutive
from megatron_ft.core.scheduling.assignment import least_load
from megatron_ft.errors import ConfigError
from megatron_ft.plan import Cluster, closed_forms, evaluate
from megatron_ft.plan.failures import Stream
from megatron_ft.plan.policy_models import POLICIES
from megatron_ft.plan.setting import Failures, Setting
from megatron_ft.plan.training_run import simulate

ALLREDUCE_S = {200: 2.0, 600: 6.0, 1000: 10.0}  # "2-10 s, growing with N"


def published(N: int, **changes) -> Cluster:
    """SPARe's simulation: 600k GPUs, a failure every 300 s, stacks of 64 s."""
    times = {
        "step_s": 64 + ALLREDUCE_S[N],
        "allreduce_s": ALLREDUCE_S[N],
        "restart_s": 3600.0,
        "checkpoint_s": 60.0,
        "steps": 10_000,
    }
    sizes = {"gpus": 1000 * N, "gpus_per_group": 1000, "mtbf_s": 300.0, "detection_s": 0.0, "reconfigure_s": 0.2}
    return Cluster(**{**times, **sizes, **changes})


def small(**changes) -> Cluster:
    times = {"step_s": 10.0, "allreduce_s": 1.0, "restart_s": 100.0, "checkpoint_s": 5.0, "rejoin_s": 60.0}
    return Cluster(
        **{**times, "gpus": 24, "gpus_per_group": 2, "mtbf_s": 200.0, "microbatches": 4, "steps": 300, **changes}
    )


def overhead(setting: Setting, policy: str, trials: int = 3) -> float:
    return mean(simulate(setting, policy, seed).overhead for seed in range(trials))


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1000),
    renewal=st.sampled_from(["system", "groups", "replaced"]),
    in_restart=st.sampled_from(["missing", "none", "again", "after"]),
    living=st.booleans(),
    finds=st.sampled_from(["everybody", "survivors", "divisor"]),
    mix=st.booleans(),
    racks=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60)
def test_every_second_is_accounted_for(policy, seed, renewal, in_restart, finds, living, mix, racks):
    failures = Failures(renewal=renewal, of_the_living=living, mix=mix, rack_share=racks)
    finds = "everybody" if policy in ("spare", "replication") else finds
    setting = Setting(cluster=small(), redundancy=3, failures=failures, in_restart=in_restart, restart_finds=finds)
    result = simulate(setting, policy, seed)
    parts = (result.compute_s, result.patch_s, result.allreduce_s, result.recovery_s)
    parts += (result.checkpoint_s, result.restart_s, result.lost_s)
    assert min(parts) >= 0 and sum(parts) == pytest.approx(result.time_s)
    assert result.finished == (result.steps == 300) and result.masked <= result.failures
    assert result.finished or policy in ("restart", "replication") or finds != "everybody"
    assert 0 <= result.availability <= 1


def test_one_seed_gives_the_same_bytes_and_two_trials_differ():
    setting = Setting(cluster=small(), redundancy=3)
    for policy in POLICIES:
        assert (
            repr(simulate(setting, policy, 1))
            == repr(simulate(setting, policy, 1))
            != repr(simulate(setting, policy, 2))
        )


@example(2, [4, 5, 6, 5])
@given(st.integers(2, 4), st.lists(st.integers(0, 11), max_size=40))
def test_a_load_that_is_kept_through_losses_and_returns_is_that_of_the_plan(r, changes):
    """Also while shards have no host."""
    setting = Setting(cluster=small(microbatches=3), redundancy=r, placement="consecutive", hosted=True)
    model, place = POLICIES["stacked_quota_rejoin"](setting), consecutive(12, r)
    for group in changes:
        model.lose([group]) if group in model.live else model.rejoin(group)
        if not model.live:
            return
        assert model.stacks() == least_load(12, 3, model.live, place) / 3


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"replication"}))
def test_without_failures_only_checkpoints_cost_time(policy):
    setting = Setting(cluster=small(), redundancy=3, failures=Failures(trace=((1e9, 0),)), period_s=500.0, jitter=0.0)
    result = simulate(setting, policy, 0)
    assert result.time_s == pytest.approx(setting.cluster.failure_free_s + result.checkpoint_s)
    assert result.checkpoints == pytest.approx(setting.cluster.failure_free_s / 500, abs=1)


def test_jumped_stretches_take_as_long_as_single_steps(monkeypatch):
    """The time of n steps with independent jitter, drawn as one sum, has their mean and deviation."""
    setting = Setting(cluster=small(steps=2000), redundancy=3, failures=Failures(trace=((1e9, 0),)), period_s=1e8)
    jumped = [simulate(setting, "spare", seed).time_s for seed in range(40)]
    monkeypatch.setattr("megatron_ft.plan.training_run._Run._jump", lambda run: None)
    stepped = [simulate(setting, "spare", seed).time_s for seed in range(40)]
    deviation = 0.05 * (2000 * (9.0**2 + 1.0**2)) ** 0.5
    assert abs(mean(jumped) - mean(stepped)) < 4 * deviation / 20**0.5
    for times in (jumped, stepped):
        found = (mean((time - mean(times)) ** 2 for time in times)) ** 0.5
        assert 0.6 * deviation < found < 1.5 * deviation


def test_policies_of_equal_seed_meet_the_same_failures():
    setting = Setting(cluster=small(), failures=Failures(of_the_living=False))
    streams = [Stream(setting, 5), Stream(setting, 5)]
    whole, half = set(range(12)), set(range(6))
    seen = [[streams[0].take(whole) for _ in range(50)], [streams[1].take(half) for _ in range(20)]]
    of_half = [failure for failure in seen[0] if failure.groups[0] in half]
    assert len(of_half) > 20 and of_half[:20] == seen[1]


def test_a_trace_is_played_as_recorded():
    setting = Setting(cluster=small(), redundancy=3, failures=Failures(trace=((205.0, 3), (50.0, 1), (90.0, 1))))
    result = simulate(setting, "spare", 0)
    assert (result.failures, result.masked, result.wipe_outs) == (2, 2, 0), "group 1 is lost already at 90 s"


@pytest.mark.parametrize(
    "policy, finds, late",
    [
        ("restart", "everybody", 10.0),
        ("restart", "survivors", 1 + 9 * 7 / 4),  # 48 microbatches of 9 / 4 s over 7 groups
        ("restart", "divisor", 1 + 9 * 8 / 4),  # over 6
        ("recover", "survivors", 1 + 9 * 7 / 4),
        ("stacked_quota", "survivors", 1 + 9 * 7 / 4),
    ],
)
def test_the_groups_that_a_restart_finds(policy, finds, late):
    """Five of twelve groups are lost before the 2000th second, which sets the duration of later steps."""
    failures = Failures(trace=tuple((150.0 * (k + 1), k) for k in range(5)))
    common = {"cluster": small(steps=1000), "redundancy": 3, "failures": failures, "jitter": 0.0, "period_s": 1e6}
    steps = [
        simulate(Setting(**common, restart_finds=finds, duration_s=end), policy, 0).steps for end in (2000.0, 4000.0)
    ]
    expected = 2000 / late
    assert steps[1] - steps[0] == pytest.approx(expected, abs=1.5)


def test_when_all_groups_are_lost_the_run_ends():
    failures = Failures(trace=tuple((50.0 * (k + 1), k) for k in range(12)))
    setting = Setting(cluster=small(), redundancy=3, failures=failures, restart_finds="survivors")
    for policy in ("restart", "recover", "stacked_quota"):
        result = simulate(setting, policy, 0)
        assert not result.finished and result.steps < 300 and result.time_s < 3000


@pytest.mark.parametrize("policy", ["stacked_quota_rejoin", "stacked_quota", "spare"])
def test_the_closed_forms_agree_with_the_simulation(policy):
    """Under the planner's assumptions: nothing fails in a restart, no jitter."""
    cluster = published(600)
    setting = Setting(cluster=cluster, redundancy=9, in_restart="none", jitter=0.0)
    redundancy = 9 if policy == "spare" else None
    assert overhead(setting, policy) == pytest.approx(evaluate(cluster, policy, redundancy).relative_time, rel=0.05)


@pytest.mark.parametrize("r", [2, 5])
def test_few_hosts_are_planned_as_they_are_simulated(r):
    """Fewer hosts than the ideal load needs: the planner measures the load, and restarts are timed by it."""
    cluster = published(200)
    setting = Setting(cluster=cluster, redundancy=r, in_restart="none", jitter=0.0)
    planned = evaluate(cluster, "stacked_quota", r).relative_time
    assert overhead(setting, "stacked_quota") == pytest.approx(planned, rel=0.07)
    assert planned >= evaluate(cluster, "stacked_quota").relative_time


@pytest.mark.parametrize(
    "N, best, available", [(200, 2.92, 0.87), pytest.param(600, 2.49, 0.939, marks=pytest.mark.long)]
)
def test_spare_as_published(N, best, available):
    """SPARe, published table: time-to-train within 15%, availability within 5 points (N = 1000: test_reproduce.py)."""
    results = {r: [simulate(Setting(cluster=published(N), redundancy=r), "spare", k) for k in range(3)] for r in (8, 9)}
    times = {r: mean(result.overhead for result in found) for r, found in results.items()}
    r = min(times, key=times.get)
    assert times[r] == pytest.approx(best, rel=0.15)
    assert mean(result.availability for result in results[9]) == pytest.approx(available, abs=0.05)
    assert as_published(results[9], published(N)) == pytest.approx(available, abs=0.05)


def as_published(results, cluster) -> float:
    """Returns A(T_c*), as the published availabilities are, of the measured time between two restarts."""
    uptime_s = mean((result.time_s - result.restart_s) / result.wipe_outs for result in results)
    period_s = closed_forms.checkpoint_period(cluster.checkpoint_s, uptime_s, cluster.restart_s)
    return closed_forms.availability(period_s, cluster.checkpoint_s, uptime_s, cluster.restart_s)


@pytest.mark.long
@pytest.mark.parametrize("N, best, available", [(200, 6.07, 0.6174), (600, 4.27, 0.7989)])
def test_replication_as_published(N, best, available):
    """SPARe, published table: time-to-train within 20%, availability within 5 points, and 3 copies are best.

    Failures go on during a restart, and a group that fails in it is missing after it. Two copies endure few losses, so they
    make little progress; without failures during restarts (in_restart = none) two are better than three.
    """
    settings = {r: Setting(cluster=published(N), redundancy=r) for r in (2, 3, 4)}
    results = {r: [simulate(setting, "replication", seed) for seed in range(3)] for r, setting in settings.items()}
    times = {r: mean(result.overhead for result in found) for r, found in results.items()}
    assert min(times, key=times.get) == 3
    assert times[3] == pytest.approx(best, rel=0.20)
    assert as_published(results[3], published(N)) == pytest.approx(available, abs=0.05)
    eased = {r: overhead(Setting(cluster=published(N), redundancy=r, in_restart="none"), "replication") for r in (2, 3)}
    assert eased[2] < eased[3]


@pytest.mark.parametrize(
    "N, G, limit",
    [(200, 16, 1.16), pytest.param(600, 16, 1.15, marks=pytest.mark.long), (1000, 16, 1.15), (1000, 64, 1.10)],
)
def test_quotas_with_rejoin_halve_it(N, G, limit):
    """The same failures, rejoin after 15 minutes, 5 s of detection: less than half of SPARe's time-to-train."""
    setting = Setting(cluster=published(N, detection_s=5.0, microbatches=G), hosted=N < 1000)
    assert overhead(setting, "stacked_quota_rejoin") <= limit


@pytest.mark.parametrize("N, missed", [(200, 1.556), (600, 1.282), (1000, 1.216)])
def test_quotas_without_rejoin_as_in_docs_results(N, missed):
    """Under the assumptions that fit SPARe's numbers, the first two targets (1.45, 1.28, 1.22) are missed."""
    setting = Setting(cluster=published(N, detection_s=5.0), hosted=False)
    assert overhead(setting, "stacked_quota") == pytest.approx(missed, abs=0.01)


@pytest.mark.parametrize("N, limit", [(200, 1.45), (600, 1.28), (1000, 1.22)])
def test_quotas_without_rejoin_under_other_assumptions(N, limit):
    """Restarting only to regain capacity, with failures that may hit lost groups and none during a restart: a reading that
    docs/results rejects, because SPARe's own numbers do not follow from it."""
    setting = Setting(
        cluster=published(N, detection_s=5.0), failures=Failures(of_the_living=False), in_restart="none", hosted=False
    )
    assert overhead(setting, "stacked_quota") <= limit


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"redundancy": 13}, "12"),
        ({"redundancy": 0}, "redundancy"),
        ({"jitter": -0.1}, "jitter is -0.1"),
        ({"period_s": 0.0}, "period_s is 0.0; it must be a number > 0"),
        ({"in_restart": "never"}, "missing, none, again"),
        ({"restart_finds": "nobody"}, "everybody, survivors, divisor"),
        ({"duration_s": 0.0}, "duration_s is 0.0"),
        ({"redundancy": 3, "failures": Failures(rack_groups=99)}, "rack_groups is 99, the cluster has 12 groups"),
    ],
)
def test_nonsense_is_refused_with_the_rule(changes, words):
    with pytest.raises(ConfigError, match=words):
        Setting(cluster=small(), **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"shape": 0.0}, "shape is 0.0; it must be a number > 0"),
        ({"rack_share": 1.5}, "rack_share is 1.5; it must be a number from 0 to 1"),
        ({"renewal": "daily"}, "system, groups, replaced"),
        ({"rack_groups": 0}, "whole number >= 1"),
    ],
)
def test_nonsense_about_failures_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Failures(**changes)


def test_a_placement_for_all_groups_cannot_restart_with_fewer():
    with pytest.raises(ConfigError, match="spare has a placement for all groups"):
        POLICIES["spare"](Setting(cluster=small(), redundancy=3, restart_finds="survivors"))


def test_a_trace_of_another_cluster_is_refused():
    with pytest.raises(ConfigError, match="group 12 fails at 5 s; groups are 0 to 11"):
        Setting(cluster=small(), redundancy=3, failures=Failures(trace=((5.0, 12),)))
