"""The supervisor of a Slurm job: every job comes to one end, and that is the right one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle.supervisor_policy import (
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
    observe,
    started,
)
from megatron_ft.errors import NOT_SAVED, WIPED_OUT, StoreError

LIMITS = Limits(whole=2)
NAMES = ("n1", "n2", "n3")
UP = dict.fromkeys(NAMES, True)


def running() -> Job:
    return begun(Job(dict.fromkeys(NAMES, Node())), {name: f"0/{name}" for name in NAMES})


def seen(now: float, job: Job, without=(), **more) -> Seen:
    steps = frozenset(node.step for name, node in job.nodes.items() if node.step and name not in without)
    return Seen(**{"now": now, "steps": steps, "up": UP, **more})


def test_while_all_goes_well_nothing_is_done():
    job = running()
    assert observe(job, seen(5.0, job), LIMITS) == (job, ())
    assert observe(job, seen(5.0, job, steps=None), LIMITS) == (job, ())


def test_a_node_whose_agent_has_ended_gets_a_spare_and_at_last_nothing_more():
    job, now, done = running(), 0.0, []
    for number in (1, 2, 3):
        job, actions = observe(job, seen(now, job, without=["n2"]), LIMITS)
        done += actions
        for later in (0.5, 100.0):
            now += later
            job, actions = observe(job, seen(now, job), LIMITS)
            done += actions
            if actions:
                job = started(job, "n2", f"spare {number}")
    drained = [action for action in done if isinstance(action, Drain)]
    assert done[:2] == [StartSpare("n2", 1), StartSpare("n2", 2)] and done[2:] == drained
    assert "3 agents have ended there" in drained[0].why and job.nodes["n2"].due is None


def test_a_node_that_is_down_is_waited_for():
    job = running()
    job, actions = observe(job, seen(0.0, job, without=["n2"], up={"n2": None}), LIMITS)
    for now, up, expected in ((10.0, None, ()), (20.0, False, ()), (30.0, True, (StartSpare("n2", 1),))):
        job, actions = observe(job, seen(now, job, up={"n2": up}), LIMITS)
        assert actions == expected
    job = started(job, "n2", "")
    job, actions = observe(job, seen(31.0, job, without=["n2"]), LIMITS)
    assert actions == () and job.nodes["n2"].failures == 2, "what could not be started has failed"


def test_in_time_before_the_limit_the_run_is_stopped_and_the_job_requeued():
    job = running()
    job, actions = observe(job, seen(0.0, job, left_s=301.0), LIMITS)
    assert actions == ()
    job, (stop,) = observe(job, seen(1.0, job, left_s=299.6), LIMITS)
    assert stop == StopRun("the job's time is up in 300 s")
    assert observe(job, seen(2.0, job, left_s=298.0), LIMITS)[1] == (), "once"
    assert observe(job, seen(3.0, job, without=NAMES, over=3), LIMITS)[1] == (Requeue(stop.why),)
    assert observe(job, seen(3.0, job, without=NAMES, over=0), LIMITS)[1][0].code == 0, "it has just got to its end"


def test_steps_that_do_not_end_are_cancelled_and_those_of_lost_nodes_not_waited_for():
    job = running()
    job, actions = observe(job, seen(0.0, job, over=0), LIMITS)
    assert actions == ()
    job, actions = observe(job, seen(LIMITS.grace_s, job, without=["n1", "n3"], over=0), LIMITS)
    assert actions == (CancelSteps(("0/n2",)),)
    job, (end,) = observe(job, seen(2 * LIMITS.grace_s, job, without=["n1", "n3"], over=0), LIMITS)
    assert isinstance(end, Finish) and end.code == 0


def test_scripts_that_write_their_final_model_are_waited_for_while_they_report_it():
    job, now = running(), 0.0
    for _ in range(20):
        job, actions = observe(job, seen(now, job, over=0, closing=True), LIMITS)
        assert not actions
        now += 0.9 * LIMITS.grace_s
    assert observe(job, seen(now, job, over=0), LIMITS)[1] == ()
    job, actions = observe(job, seen(now + LIMITS.grace_s, job, over=0), LIMITS)
    assert actions and isinstance(actions[0], CancelSteps)


def test_a_job_without_groups_is_started_again_as_often_as_is_allowed():
    job, now = running(), 0.0
    for attempt in (1, 2):
        actions = ()
        while not actions:
            job, actions = observe(job, seen(now, job, without=NAMES), LIMITS)
            now += 10.0
        assert actions == (StartAll(attempt),)
        job = begun(job, {name: f"{attempt}/{name}" for name in NAMES})
    job, (end,) = observe(job, seen(now, job, without=NAMES, over=WIPED_OUT), LIMITS)
    assert end.code == WIPED_OUT and "started again 2 times within an hour" in end.why
    never = observe(running(), seen(0.0, running(), without=NAMES), Limits())[1]
    assert never[0].code == WIPED_OUT and "no checkpoints" in never[0].why


def test_a_run_that_has_stopped_by_itself_is_not_started_again():
    job = running()
    job, (end,) = observe(job, seen(0.0, job, without=NAMES, over=2), LIMITS)
    assert end == Finish(2, "the run has stopped; its record says why")


def test_a_run_that_could_not_save_its_end_is_neither_a_success_nor_requeued():
    job = running()
    job, _ = observe(job, seen(0.0, job, left_s=1.0), LIMITS)
    (end,) = observe(job, seen(1.0, job, without=NAMES, over=NOT_SAVED), LIMITS)[1]
    assert isinstance(end, Finish) and end.code == NOT_SAVED and "not all of the end is saved" in end.why


# --- agents that find no control store --------------------------------------------------------------------------------


def test_an_agent_without_a_store_is_no_failure_and_is_replaced_when_the_run_goes_on():
    job = running()
    for number in (1, 2, 3, 4):
        now = 1000.0 * number
        step = job.nodes["n2"].step
        gone = seen(now, job, without=["n2"], ended={step: WIPED_OUT}, goes_on=True)
        job, actions = observe(job, gone, LIMITS)
        assert actions == (), "the last step may have been made before that"
        job, actions = observe(job, seen(now + 500.0, job), LIMITS)
        assert actions == ()
        job, actions = observe(job, seen(now + 501.0, job, goes_on=True), LIMITS)
        assert actions == (StartSpare("n2", number),), "each step has a number of its own"
        job = started(job, "n2", f"spare {number}")
    assert job.nodes["n2"].failures == 0


def test_a_run_that_half_of_the_agents_have_given_up_is_over_when_its_record_is_silent():
    job = running()
    job, _ = observe(job, seen(0.0, job, goes_on=True), LIMITS)
    ended = {"0/n2": WIPED_OUT, "0/n3": WIPED_OUT}
    job, actions = observe(job, seen(LIMITS.silent_s, job, without=["n2", "n3"], ended=ended), LIMITS)
    assert actions == ()
    job, actions = observe(job, seen(LIMITS.silent_s + 1.0, job), LIMITS)
    assert actions == (CancelSteps(("0/n1",)),)
    for over in (None, 143):  # the agent that was cut off, not lost, says that it was cancelled
        _, actions = observe(job, seen(LIMITS.silent_s + 1.0 + LIMITS.grace_s, job, over=over), LIMITS)
        assert actions == (StartAll(1, ("n1",)),)


def test_a_longer_step_of_the_groups_that_are_left_does_not_end_the_run():
    job = running()
    for now in (0.0, 200.0):
        job, _ = observe(job, seen(now, job, goes_on=True), LIMITS)
    ended = {"0/n2": WIPED_OUT, "0/n3": WIPED_OUT}
    for now in (260.0, 261.0, 590.0):
        job, actions = observe(job, seen(now, job, without=["n2", "n3"], ended=ended), LIMITS)
        assert actions == ()
    _, actions = observe(job, seen(600.0 + LIMITS.silent_s, job), LIMITS)
    assert actions == (CancelSteps(("0/n1",)),)


HOSTS = tuple(f"n{number}" for number in range(5))
LOOK_S, JOIN_S = 0.5, 10.0


@given(
    st.integers(2, 5),
    st.lists(st.floats(0.0, 40.0), min_size=5, max_size=5),
    st.sampled_from([WIPED_OUT, StoreError.exit_code]),
    st.floats(0.0, 10.0),
)
def test_a_run_without_a_store_is_started_again_in_time_on_all_nodes_that_are_left(count, after_s, code, late_s):
    """The step of the lost node seems to run forever. ``late_s``: when the last line of the record is read."""
    names = HOSTS[:count]
    job = begun(Job(dict.fromkeys(names, Node())), {name: f"0/{name}" for name in names})
    ends = {f"0/{name}": 60.0 + after for name, after in zip(names[1:], after_s, strict=False)}
    now, heard, limit_s = 0.0, False, 100.0 + JOIN_S + 10.0 + LIMITS.silent_s + 2 * 70.0 + 2 * LIMITS.grace_s
    while now < limit_s:
        goes_on, heard = not heard and now >= 60.0 + late_s or now == 0.0, heard or now >= 60.0 + late_s
        steps = frozenset(node.step for node in job.nodes.values() if node.step and ends.get(node.step, now) >= now)
        codes = {step: WIPED_OUT if step.startswith("0/") else code for step in ends}
        up = dict.fromkeys(names[1:], True)
        job, actions = observe(job, Seen(now, steps, up, ended=codes, goes_on=goes_on), LIMITS)
        for action in actions:
            if isinstance(action, StartSpare):
                step = f"join/{action.node}/{action.number}"
                job, ends[step] = started(job, action.node, step), now + JOIN_S
            elif isinstance(action, StartAll):
                assert action == StartAll(1, names[:1])
                assert not any(node.failures for node in job.nodes.values())
                return
            else:
                assert action == CancelSteps(("0/n0",))
        now += LOOK_S
    raise AssertionError(f"idle: {job}")


@given(st.integers(3, 5), st.data())
def test_a_run_that_goes_on_is_not_over_because_some_agents_have_given_it_up(count, data):
    """A minority has: however silent the record. A majority has: views and steps come, each at most 2 times as late."""
    names = HOSTS[:count]
    left = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=count - 1))
    minority = len(left) < count - len(left)
    job, now, gap_s = begun(Job(dict.fromkeys(names, Node())), {name: f"0/{name}" for name in names}), 0.0, 0.0
    codes = {f"0/{name}": WIPED_OUT for name in left}
    started_on: set[str] = set()
    for _ in range(data.draw(st.integers(3, 20))):
        pause_s = data.draw(st.floats(0.5, 5000.0 if minority else max(60.0, 2 * gap_s)))
        for at, goes_on in ((now + 0.9 * pause_s, False), (now + pause_s, True)):
            more = {"up": dict.fromkeys(names, True), "ended": codes, "goes_on": goes_on}
            job, actions = observe(job, seen(at, job, left - started_on if now else (), **more), LIMITS)
            assert all(isinstance(action, StartSpare) for action in actions)
            for action in actions:
                job = started(job, action.node, f"spare/{action.node}")
                started_on.add(action.node)
        now, gap_s = now + pause_s, max(gap_s, pause_s if now else 0.0)
    assert not any(node.failures for node in job.nodes.values())


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 50.0),
            st.sets(st.sampled_from(NAMES)),
            st.booleans(),
            st.sampled_from([None, 0, 3, 7]),
            st.sampled_from([None, 1, WIPED_OUT]),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_whatever_is_seen_a_node_has_one_step_at_most_and_an_end_is_an_end(looks):
    job, now, number = running(), 0.0, 0
    for after_s, without, answers, over, code, goes_on in looks:
        now += after_s
        more = {"over": over, "ended": {node.step: code for node in job.nodes.values()}, "goes_on": goes_on}
        what = seen(now, job, without, **more) if answers else seen(now, job, steps=None, **more)
        job, actions = observe(job, what, LIMITS)
        ends = [action for action in actions if isinstance(action, Finish | Requeue)]
        assert len(ends) <= 1 and (not ends or len(actions) == 1)
        for action in actions:
            if isinstance(action, StartSpare):
                assert not job.nodes[action.node].step and over is None and not job.lost
                assert job.nodes[action.node].failures < LIMITS.per_node
                job, number = started(job, action.node, f"spare {number}"), number + 1
            elif isinstance(action, StartAll):
                job = begun(job, {name: f"{action.attempt}/{name}" for name in NAMES})
        if ends:
            return
