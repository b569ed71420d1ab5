"""A run again in the simulator: the plans that the groups make cost what the closed models of the policies say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft import cli
from megatron_ft.core.protocol.state import Job
from megatron_ft.core.replication import placement
from megatron_ft.core.scheduling.policies import policy
from megatron_ft.plan import Cluster, policy_models
from megatron_ft.plan.planned import Planned
from megatron_ft.plan.setting import Failures, Setting
from megatron_ft.plan.training_run import simulate

GROUPS, PER_SHARD = 8, 6
PLACEMENTS = {"stacked_quota": placement.full, "spare": lambda N: placement.consecutive(N, 3)}
PLACEMENTS |= {"replication": lambda N: placement.sets(N, 2), "restart": placement.full}


def setting(redundancy: int, **changes) -> Setting:
    cluster = Cluster(
        gpus=GROUPS, gpus_per_group=1, gpus_per_node=1, mtbf_s=100.0, step_s=10.0, allreduce_s=1.0, restart_s=20.0,
        checkpoint_s=1.0, steps=200, microbatches=PER_SHARD, detection_s=1.0, reconfigure_s=0.5, rejoin_s=30.0,
    )  # fmt: skip
    failures = changes.pop("failures", Failures())
    return Setting(
        cluster=cluster, redundancy=redundancy, failures=failures, placement="consecutive", patch_in_replication=False,
        hosted=False, jitter=0.0, period_s=60.0, **changes,
    )  # fmt: skip


def planned(name: str, given: Setting, rejoins: bool = False, slack: bool = False) -> Planned:
    where = PLACEMENTS[name](GROUPS)
    return Planned(given, Job(GROUPS, PER_SHARD, 1, 200, placement=where, policy=policy(name, slack=slack)), rejoins)


losses = st.lists(st.sets(st.integers(0, GROUPS - 1), min_size=1, max_size=2), min_size=1, max_size=5)


@pytest.mark.parametrize("name, redundancy", [("stacked_quota", 8), ("spare", 3), ("replication", 2), ("restart", 1)])
@given(lost=losses)
@settings(max_examples=60)
def test_plans_cost_what_the_model_of_the_policy_says(name, redundancy, lost):
    """The models take all groups for the busiest one, and ``spare``'s has two lost groups patched one after the other."""
    coarse = {"stacked_quota": 1 / PER_SHARD, "spare": 1.0}.get(name, 0.0)
    ours = planned(name, setting(redundancy))
    model = policy_models.POLICIES[name](setting(redundancy))
    for groups in lost:
        there = sorted(groups & ours.live)
        if not there or len(there) == len(ours.live):
            return
        assert ours.stacks() == pytest.approx(model.stacks())
        of_plans, of_model = ours.lose(there), model.lose(there)
        assert of_plans.wiped_out == of_model.wiped_out
        if of_plans.wiped_out:
            return
        assert of_plans.patch == pytest.approx(of_model.patch) or 0 < of_model.patch - of_plans.patch <= coarse + 1e-9
        ours.begin_step()
        model.begin_step()


def test_a_group_that_comes_back_computes_its_share_again():
    trace = ((55.0, 3),)
    found = simulate(
        setting(8, failures=Failures(trace=trace)), "stacked_quota", 0, planned("stacked_quota", setting(8), True)
    )
    without = simulate(
        setting(8, failures=Failures(trace=trace)), "stacked_quota", 0, planned("stacked_quota", setting(8))
    )
    assert found.rejoins == 1 and found.time_s < without.time_s and without.rejoins == 0


def test_copies_in_the_slack_cost_nothing_and_make_a_patch_smaller():
    """Seven groups have 48 microbatches: most compute 7, some 6 and a copy. A loss is patched with what is not covered."""
    plain, slack = (planned("stacked_quota", setting(8), slack=one) for one in (False, True))
    for one in (plain, slack):
        one.lose([7])
        one.begin_step()
    assert plain.stacks() == slack.stacks()
    assert slack.lose([0]).patch <= plain.lose([0]).patch


@pytest.mark.parametrize("flags", [["--preset", "lab-64"], ["--policy", "spare"]])
def test_an_option_that_the_run_decides_is_refused(flags, tmp_path, capsys):
    assert cli.main(["simulate", "--like", str(tmp_path), *flags]) == 2
    assert f"leave {flags[0]} out" in " ".join(capsys.readouterr().err.split())


def test_a_directory_without_a_record_is_refused(tmp_path, capsys):
    assert cli.main(["simulate", "--like", str(tmp_path)]) == 2
    assert "holds no run record" in " ".join(capsys.readouterr().err.split())
