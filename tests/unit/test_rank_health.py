"""A rank that is stopped or stuck is given up, one that is only busy never is; real processes for the agent's look."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.schema import DetectorConfig
from megatron_ft.core.detection.rank_health import LOOK_S, Health, Limits, Sample, add, classify, is_outage
from megatron_ft.host.rank_monitor import LOOK_EVERY_S, Monitor, Watched, limits
from megatron_ft.run import progress_counters

LOOK = 0.1


def observe(health, sample, now, limits, outage=False):
    """Take in a sample as the monitor does, and judge the rank."""
    return classify(add(health, sample, now, limits), limits, outage)


def run(samples, limits=None, step_s=LOOK):
    """Feed (sample, number of looks); return the first verdict with its time, or the health at the end."""
    limits, health, now = limits or Limits(), Health(), 0.0
    for sample, looks in samples:
        for _ in range(looks):
            health, why = observe(health, sample, now, limits)
            if why:
                return now, why
            now += step_s
    return health


def working(progress, state="R", heartbeats=0, cpu_s=0.0, phase="working"):
    return Sample(state, cpu_s, heartbeats, progress, phase)


def warm(pieces=4, looks=2):
    """Return the health after pieces of work, each of which took its number of looks."""
    return [(working(progress), looks) for progress in range(pieces)]


def test_a_stopped_rank_is_given_up_after_a_quarter_of_a_second():
    now, why = run([*warm(), (working(4, state="T"), 100)])
    assert why.startswith("is stopped (process state T) for 0.3 s") and now == pytest.approx(0.8 + 0.3)


def test_a_short_stop_is_none():
    """A debugger or a profiler looks in; work that goes on afterwards is not a finished long piece of work."""
    health = run([*warm(), (working(4, state="T"), 2), (working(4), 1), (working(5), 1)])
    assert health.stopped_s == 0 and health.longest_s <= 0.3 + LOOK


@pytest.mark.parametrize(
    "sample, words",
    [
        (working(4, heartbeats=7), "its Python does not run (something holds the GIL)"),
        (working(4, state="D"), "inside the kernel (state D"),
    ],
)
def test_a_stuck_rank_is_given_up_with_the_place_of_its_hang(sample, words):
    now, why = run([*warm(), (sample, 10_000)])
    assert words in why and "60 s allowed: the least" in why and now > 60


def test_python_that_runs_is_told_apart():
    samples = [(working(4, heartbeats=heartbeat, cpu_s=heartbeat / 10), 1) for heartbeat in range(2000)]
    _, why = run([*warm(), *samples])
    assert "its Python runs, the training thread does not return, it uses the processor" in why


def test_the_limit_is_learned():
    """Pieces of work of 30 s: one of 4 minutes is busy, one of 6 is stuck."""
    warm_up = warm(pieces=5, looks=300)
    assert isinstance(run([*warm_up, (working(5), 2400)]), Health)
    now, why = run([*warm_up, (working(5), 5000)])
    assert "10 times the longest so far, 30" in why


def test_the_first_pieces_and_the_users_own_code_may_take_long():
    assert isinstance(run([(working(0), 10_000)]), Health)
    assert isinstance(run([*warm(), (working(4, phase="outside"), 10_000)]), Health)
    _, why = run([*warm(), (working(4, phase="outside"), 20_000)])
    assert "1800 s allowed: between two steps" in why


def test_a_setting_beats_the_learned_limit():
    now, why = run([*warm(pieces=5, looks=100), (working(5), 100)], Limits(hang_s=3.0))
    assert "3 s allowed: hang_timeout_s" in why


@given(
    st.lists(
        st.tuples(
            st.builds(Sample, st.sampled_from("RSD"), st.floats(0, 9), *[st.integers(0, 3)] * 2, st.just("waiting")),
            st.integers(1, 50),
        ),
        max_size=20,
    )
)
def test_a_rank_that_waits_for_others_is_never_given_up(samples):
    assert isinstance(run(samples, Limits(hang_s=0.2)), Health)


def in_storage(outage, limits, looks=4000, state="S", dataset=1):
    """Let a rank learn a limit, then hang; return the verdict when it is given up, or its health at the end."""
    health, now = Health(), 0.0
    for progress in range(4):
        health, _ = observe(health, working(progress), now, limits)
        now += LOOK
    for _ in range(looks):
        health, why = observe(health, Sample(state, 0.0, 0, 3, "working", dataset), now, limits, outage)
        if why:
            return now, why
        now += LOOK
    return health


@pytest.mark.parametrize(
    "state, dataset, words", [("S", 1, "inside the dataset"), ("D", 0, "inside the kernel (state D")]
)
def test_a_rank_in_storage_has_a_limit_of_its_own_while_other_groups_are_there_too(state, dataset, words):
    limits = Limits(hang_s=2.0, storage_s=100.0)
    now, why = in_storage(False, limits, state=state, dataset=dataset)
    assert now < 3.0 and words in why and "hang_timeout_s" in why, "alone, it is given up like any rank that hangs"
    now, why = in_storage(True, limits, state=state, dataset=dataset)
    assert now > 100.0 and words in why and "storage_timeout_s" in why


@pytest.mark.parametrize("rest", ["computes", "storage"])
def test_work_that_follows_an_outage_has_the_limit_of_a_new_piece_of_work(rest):
    """The samples have come and are computed, or this host's storage comes back after another one's."""
    limits = Limits(hang_s=2.0, storage_s=1000.0)
    health, now = in_storage(True, limits, looks=200), 100.0
    for number in range(17):
        sample = Sample("S", 0.0, 0, 3, "working", 2 if rest == "computes" else 1)
        health, why = observe(health, sample, now + number * LOOK, limits, outage=False)
        assert not why
    while not why:
        number += 1
        health, why = observe(health, sample, now + number * LOOK, limits, outage=False)
    assert number < 30 and "2 s allowed: hang_timeout_s, after storage was away for other groups as well" in why
    health, why = observe(health, Sample("S", 0.0, 0, 4, "working", 2), now + number * LOOK, limits)
    assert not health.excused_s


def test_the_limits_follow_the_settings():
    known = limits(DetectorConfig(collective_timeout_s=900.0))
    assert (known.hang_s, known.first_s, known.outside_s, known.storage_s) == (None, 900.0, 900.0, 900.0)
    known = limits(DetectorConfig(hang_timeout_s=5.0, outside_timeout_s=70.0, storage_timeout_s=80.0))
    assert (known.hang_s, known.first_s, known.outside_s, known.storage_s) == (5.0, 1800.0, 70.0, 80.0)
    _, why = run([*warm(), (working(4, phase="outside"), 1000)], known)
    assert "70 s allowed: between two steps" in why


def test_an_outage_excuses_no_rank_that_hangs_elsewhere_and_is_not_learned():
    limits = Limits(hang_s=2.0, storage_s=100.0)
    now, why = in_storage(True, limits, dataset=2)  # its last call of the dataset has ended
    assert now < 3.0 and "hang_timeout_s" in why
    limits = Limits(storage_s=1000.0)
    health = in_storage(True, limits)
    after, why = observe(health, working(4), 0.0, limits)
    assert not why and after.longest_s == health.longest_s < 1, (
        "a hang of 400 s must not be taken for a long piece of work"
    )


@given(
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5))), st.sets(st.integers(0, 5), min_size=1), st.integers(1, 4)
)
def test_storage_is_away_when_several_hosts_miss_it_or_no_group_would_be_left(stuck, members, hosts):
    hosts = max([hosts, *(host + 1 for host, _ in stuck)])
    groups = {group for _, group in stuck}
    outage = is_outage(stuck, hosts, members)
    if len({host for host, _ in stuck}) > 1 or members <= groups:
        assert outage
    elif hosts > 1 or len(groups) < 2:
        assert not outage, "one host of several has lost its own disk, or one group hangs alone"
    for more in ((0, 0), (1, 4)):
        assert is_outage(stuck | {more}, max(hosts, 2 if more[0] else 1), members) or not outage or hosts == 1


@pytest.mark.parametrize("signs", [{"heartbeats": 1}, {"cpu_s": 0.01}])
def test_two_short_stops_are_not_one_long_one(signs):
    """The agent itself was late, and has not seen the rank run in between."""
    health = run([*warm(), (working(4, state="T"), 2), (working(4, state="T", **signs), 2)])
    assert health.stopped_s == pytest.approx(LOOK)


@given(st.floats(1, 1e6))
def test_time_without_a_look_of_the_agent_does_not_count(gap_s):
    """The agent's host was suspended: both processes stood still, and one look afterwards must not end the rank."""
    health, _ = observe(Health(), working(0), 0.0, Limits())
    health, why = observe(health, working(0, state="T"), gap_s, Limits())
    assert not why and health.stopped_s <= LOOK_S
    health, why = observe(health, working(0, state="T"), 2 * gap_s, Limits(hang_s=0.1))
    assert not why and health.still_s <= LOOK_S


# --- real processes ---------------------------------------------------------------------------------------------------


def test_an_agent_that_was_killed_leaves_no_pulses_behind_for_long(tmp_path):
    code = "import sys; from pathlib import Path; from megatron_ft.run import progress_counters as pulse; "
    code += (
        "place = pulse.directory(Path(sys.argv[1])); pulse.create(place / 'g0.p0'); print(place, flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], **pipes) as agent:
        its = Path(agent.stdout.readline().strip())
        mine = progress_counters.directory(tmp_path)
        assert (its / "g0.p0").exists() and mine.is_dir()
        agent.kill()
        agent.wait()
    other = progress_counters.directory(tmp_path)
    assert not its.exists() and mine.is_dir() and other.is_dir()


def test_an_agent_reads_all_that_a_rank_writes_into_its_pulse(tmp_path):
    path = tmp_path / "pulse"
    progress_counters.create(path)
    rank = progress_counters.ProgressCounters(path)
    has = lambda: (progress_counters.has_seat(path), progress_counters.has_state(path))  # noqa: E731
    assert progress_counters.read(path) == (0, 0, "outside", 0) and has() == (False, False)
    for write in (*[rank.heartbeat] * 3, *[rank.advance] * 2, rank.dataset, rank.take_state):
        write()
    rank.enter("waiting")
    assert progress_counters.read(path) == (3, 2, "waiting", 1) and has() == (False, True)
    rank.take_seat()
    assert has() == (True, True)


CHILD = """
import ctypes, select, sys, time
from pathlib import Path
from megatron_ft.run.progress_counters import ProgressCounters
pulse = ProgressCounters(Path(sys.argv[1]))
pulse.start()
while not select.select([sys.stdin], [], [], 0.15)[0]:
    pulse.enter("working"); pulse.advance()
if sys.argv[2] == "gil":
    ctypes.PyDLL(None).usleep(600_000_000)  # PyDLL keeps the GIL
time.sleep(600)
"""
"""A rank that works until it is told to hang."""


@pytest.fixture
def child(tmp_path):
    started = []

    def start(what: str) -> Watched:
        path = tmp_path / "pulse"
        progress_counters.create(path)
        process = subprocess.Popen([sys.executable, "-c", CHILD, path, what], stdin=subprocess.PIPE, text=True)
        started.append(process)
        return Watched(process.pid, path), process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def watch(monitor, watched, until, limit_s=60.0, between=lambda: None):
    """Look as the agent does, until the condition is true."""
    deadline = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < deadline, watched
        between()
        monitor.poll_ranks([watched])
        select.select([], [], [], 0.02)


def await_beat(watched):
    """Wait until the Python of the rank has run since the last look; on a busy machine it may stand still for a
    second."""
    last, deadline = watched.health.last, time.monotonic() + 60
    while last is not None and progress_counters.read(watched.pulse)[0] == last.heartbeats:
        assert time.monotonic() < deadline, watched
        select.select([], [], [], 0.02)


@pytest.mark.parametrize("what, words", [("gil", "something holds the GIL"), ("sleep", "its Python runs")])
def test_a_hang_is_found_and_named(child, what, words):
    watched, process = child(what)
    watch(Monitor(Limits()), watched, lambda: watched.health.finished >= 3)
    process.stdin.write("hang\n")
    process.stdin.flush()
    between = (lambda: await_beat(watched)) if what == "sleep" else lambda: None
    watch(Monitor(Limits(hang_s=2.0)), watched, lambda: bool(watched.given_up), between=between)
    assert words in watched.given_up and process.poll() is None, "it is given up, not killed"


def test_a_stopped_process_is_found_and_a_dead_one_is_left_to_waitpid(child):
    watched, process = child("sleep")
    monitor = Monitor(Limits())
    watch(monitor, watched, lambda: watched.health.finished >= 3)
    os.kill(process.pid, signal.SIGSTOP)
    watch(monitor, watched, lambda: bool(watched.given_up))
    assert "is stopped (process state T)" in watched.given_up
    other = Watched(process.pid, watched.pulse)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Monitor(Limits(stopped_s=1e-9)).poll_ranks([other]) == [] and other.health == Health()


def test_a_stopped_process_is_looked_at_when_it_stops_and_when_its_time_is_over(child):
    """With a look every tenth of a second only, both would come up to that much later."""
    watched, process = child("sleep")
    now = 0.0
    monitor = Monitor(Limits(stopped_s=0.25), lambda: now)
    assert monitor.poll_ranks([watched]) == [] and monitor.pause_s == pytest.approx(LOOK_EVERY_S)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    now = 0.03
    monitor.stir()
    assert monitor.pause_s == 0.0 and monitor.poll_ranks([watched]) == []
    looks = [now := now + monitor.pause_s for _ in range(3) if monitor.poll_ranks([watched]) == []]
    assert looks == pytest.approx([0.13, 0.23, 0.28])
    assert monitor.poll_ranks([watched]) == [watched] and "is stopped (process state T) for 0.2 s" in watched.given_up
