"""An agent notices that its ranks can neither go on nor find out why: a host is silent and no control store answers."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.detection.rank_health import Health, Sample
from megatron_ft.host.stall_watch import Standstill

PATIENCE_S, ROUND_S = 3.0, 5.25
PHASES = st.lists(st.sampled_from(["waiting", "waiting", "waiting", "working", "outside"]), min_size=1, max_size=2)
LOOKS = st.lists(st.tuples(PHASES, st.booleans(), st.booleans(), st.sampled_from([0.1, 0.25, ROUND_S])), max_size=120)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ranks(phases):
    healths = [Health(last=Sample("S", 1.0, 1, 1, phase)) for phase in phases]
    return [SimpleNamespace(watched=SimpleNamespace(health=health)) for health in healths]


@given(LOOKS)
def test_it_stands_still_after_as_much_unbroken_waiting_as_the_store_is_waited_for(looks):
    """Also when the agent looks seldom, because each call to a store that does not answer blocks it for seconds."""
    clock = Clock()
    standstill, since = Standstill(PATIENCE_S, ROUND_S, clock), clock.now
    for phases, silent, away, pause_s in looks:
        clock.now += pause_s
        stands = silent and away and set(phases) == {"waiting"}
        found = standstill.poll_ranks(ranks(phases), silent, away)
        since = since if stands else clock.now
        margin_s = 1e-6
        assert not found or clock.now - since > PATIENCE_S - margin_s
        assert found or clock.now - since <= PATIENCE_S + margin_s


def test_a_host_without_ranks_and_an_agent_that_was_suspended_see_nothing():
    clock = Clock()
    standstill = Standstill(30.0, ROUND_S, clock)
    for _ in range(100):
        clock.now += 0.25
        assert not standstill.poll_ranks([], silent=True, away=True)
    clock.now += 3600.0
    assert not standstill.poll_ranks(ranks(["waiting"]), silent=True, away=True)
