"""The supervisor of a Slurm job: every job comes to one end, and that is the right one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core import restarts
from megatron_ft.core.supervision import (
    CancelSteps,
    Drain,
    Finish,
    Job,
    Limits,
    Node,
    Requeue,
    Seen,
    StartAll,
    StartSpare,
    StopRun,
    begun,
    look,
    started,
)
from megatron_ft.errors import WIPED_OUT

LIMITS = Limits(whole=restarts.Limits(per_hour=2))
NAMES = ("n1", "n2", "n3")
UP = dict.fromkeys(NAMES, True)


def running() -> Job:
    return begun(Job(dict.fromkeys(NAMES, Node())), {name: f"0/{name}" for name in NAMES})


def seen(now: float, job: Job, without=(), **more) -> Seen:
    steps = frozenset(node.step for name, node in job.nodes.items() if node.step and name not in without)
    return Seen(**{"now": now, "steps": steps, "up": UP, **more})


def test_while_all_goes_well_nothing_is_done():
    job = running()
    assert look(job, seen(5.0, job), LIMITS) == (job, ())
    assert look(job, seen(5.0, job, steps=None), LIMITS) == (job, ())


def test_a_node_whose_agent_has_ended_gets_a_spare_and_at_last_nothing_more():
    job, now, done = running(), 0.0, []
    for number in (1, 2, 3):
        job, actions = look(job, seen(now, job, without=["n2"]), LIMITS)
        done += actions
        for later in (0.5, 100.0):
            now += later
            job, actions = look(job, seen(now, job), LIMITS)
            done += actions
            if actions:
                job = started(job, "n2", f"spare {number}")
    drained = [action for action in done if isinstance(action, Drain)]
    assert done[:2] == [StartSpare("n2", 1), StartSpare("n2", 2)] and done[2:] == drained
    assert "3 agents have ended there" in drained[0].why and job.nodes["n2"].due is None


def test_a_node_that_is_down_is_waited_for():
    job = running()
    job, actions = look(job, seen(0.0, job, without=["n2"], up={"n2": None}), LIMITS)
    for now, up, expected in ((10.0, None, ()), (20.0, False, ()), (30.0, True, (StartSpare("n2", 1),))):
        job, actions = look(job, seen(now, job, up={"n2": up}), LIMITS)
        assert actions == expected
    job = started(job, "n2", "")
    job, actions = look(job, seen(31.0, job, without=["n2"]), LIMITS)
    assert actions == () and job.nodes["n2"].failures == 2, "what could not be started has failed"


def test_in_time_before_the_limit_the_run_is_stopped_and_the_job_requeued():
    job = running()
    job, actions = look(job, seen(0.0, job, left_s=301.0), LIMITS)
    assert actions == ()
    job, (stop,) = look(job, seen(1.0, job, left_s=299.6), LIMITS)
    assert stop == StopRun("the job's time is up in 300 s")
    assert look(job, seen(2.0, job, left_s=298.0), LIMITS)[1] == (), "once"
    assert look(job, seen(3.0, job, without=NAMES, over=3), LIMITS)[1] == (Requeue(stop.why),)
    assert look(job, seen(3.0, job, without=NAMES, over=0), LIMITS)[1][0].code == 0, "it has just got to its end"


def test_steps_that_do_not_end_are_cancelled_and_those_of_lost_nodes_not_waited_for():
    job = running()
    job, actions = look(job, seen(0.0, job, over=0), LIMITS)
    assert actions == ()
    job, actions = look(job, seen(LIMITS.grace_s, job, without=["n1", "n3"], over=0), LIMITS)
    assert actions == (CancelSteps(("0/n2",)),)
    job, (end,) = look(job, seen(2 * LIMITS.grace_s, job, without=["n1", "n3"], over=0), LIMITS)
    assert isinstance(end, Finish) and end.code == 0


def test_a_job_without_groups_is_started_again_as_often_as_is_allowed():
    job, now = running(), 0.0
    for attempt in (1, 2):
        actions = ()
        while not actions:
            job, actions = look(job, seen(now, job, without=NAMES), LIMITS)
            now += 10.0
        assert actions == (StartAll(attempt),)
        job = begun(job, {name: f"{attempt}/{name}" for name in NAMES})
    job, (end,) = look(job, seen(now, job, without=NAMES, over=WIPED_OUT), LIMITS)
    assert end.code == WIPED_OUT and "started again 2 times within an hour" in end.why
    never = look(running(), seen(0.0, running(), without=NAMES), Limits())[1]
    assert never[0].code == WIPED_OUT and "no checkpoints" in never[0].why


def test_a_run_that_has_stopped_by_itself_is_not_started_again():
    job = running()
    job, (end,) = look(job, seen(0.0, job, without=NAMES, over=2), LIMITS)
    assert end == Finish(2, "the run has stopped; its record says why")


@given(
    st.lists(
        st.tuples(st.floats(0.1, 50.0), st.sets(st.sampled_from(NAMES)), st.booleans(), st.sampled_from([None, 0, 3, 7])),
        max_size=30,
    )
)
def test_whatever_is_seen_a_node_has_one_step_at_most_and_an_end_is_an_end(looks):
    job, now, number = running(), 0.0, 0
    for after_s, without, answers, over in looks:
        now += after_s
        what = seen(now, job, without, over=over) if answers else seen(now, job, steps=None, over=over)
        job, actions = look(job, what, LIMITS)
        ends = [action for action in actions if isinstance(action, Finish | Requeue)]
        assert len(ends) <= 1 and (not ends or len(actions) == 1)
        for action in actions:
            if isinstance(action, StartSpare):
                assert not job.nodes[action.node].step and over is None
                assert job.nodes[action.node].failures < LIMITS.per_node
                job, number = started(job, action.node, f"spare {number}"), number + 1
            elif isinstance(action, StartAll):
                job = begun(job, {name: f"{action.attempt}/{name}" for name in NAMES})
        if ends:
            return
