"""Histories with each policy: no violations, what is rare is reached, and planted bugs are found."""

from collections import Counter
from functools import partial

import pytest

from megatron_ft.core.protocol.machine import Job
from megatron_ft.core.scheduling.policies import POLICIES
from megatron_ft.proof.scenario import DRAWN, draw_of
from megatron_ft.proof.simulated_cluster import _job, play
from megatron_ft.types import PlanOrigin, View
from tests.sim.planted import SEEDS, check_histories
from tests.sim.policy_mutations import MUTATIONS


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("policy", sorted(set(DRAWN) - {"stacked_quota"}))
def test_histories_without_a_violation(policy, seeds):
    check_histories(seeds, partial(draw_of, policy), f"--policy {policy}", finish=0.3)


def test_every_policy_is_drawn():
    assert set(POLICIES) < set(DRAWN)
    for policy in POLICIES:
        scenario = draw_of(policy, 3)
        assert type(_job(scenario).policy) is type(_job(draw_of(policy, 4)).policy) and scenario.policy == policy


RARE = (
    "spare: wipe-out",
    "replication: wipe-out",
    "spare: promotion",
    "replication: promotion",
    "recover: promotion",
    "slack: promotion",
    "recover: boundary",
    "spare: free",
    "spare: fixed",
    "replication: a promoted group is lost in the same step",
    "recover: after losses of earlier steps",
    "spare: after losses of earlier steps",
)


def test_the_histories_reach_what_is_rare():
    seen = Counter()
    for policy in ("spare", "recover", "replication", "slack"):
        for seed in range(250):
            if all(seen[name] for name in RARE if name.startswith(policy)):
                break
            scenario = draw_of(policy, seed)
            job = _job(scenario)
            for line in play(scenario).lines:
                if line["event"] == "stop":
                    seen[f"{policy}: wipe-out"] += line["wiped_out"]
                if line["event"] == "view" and line["begun"][1] and line["live"]:
                    tell(job, policy, View.from_json(line), seen)
    missing = [name for name in RARE if not seen[name]]
    assert not missing, f"no history reached: {missing}; reached: {seen}"


def tell(job: Job, policy: str, view: View, seen: Counter) -> None:
    """Count what the plan of the view's step shows."""
    origin = view.plan_origin
    plan = job.policy.plan(job.batch, view.step, origin, {})
    seen[f"{policy}: promotion"] += bool(plan.standing_in)
    seen[f"{policy}: after losses of earlier steps"] += bool(origin.past)
    for name in ("phase", "recovery"):
        seen[f"{policy}: {plan.facts.get(name)}"] += 1
    begun = {m for lost, _ in origin.changes[:1] for group in lost for m in plan_before(job, view).of(group)}
    again = len(origin.changes) > 1 and begun & plan.standing_in
    seen[f"{policy}: a promoted group is lost in the same step"] += bool(again)


def plan_before(job: Job, view: View):
    origin = view.plan_origin
    return job.policy.plan(job.batch, view.step, PlanOrigin(origin.live, past=origin.past), {})


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    assert MUTATIONS[name].caught_by(monkeypatch) is not None, f"no history shows that {name}"
