"""Real runs whose embedded control store is killed or frozen: the run goes on, and the next recovery is exact.

The keeper starts the store again; the groups and the agent restore its contents (hard cases 16 and 17).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.host import store_keeper
from megatron_ft.host.store_keeper import RESTARTS, STOPPED_S
from megatron_ft.record import history
from megatron_ft.record.run_directory import STORE
from megatron_ft.run.injection_points import Breakpoint
from megatron_ft.run.store import ControlStore, patient
from tests import support
from tests.stores import DEADLINE_S, await_, parent_of, store_of

FROZEN_S = 3.0


def restart(run: support.Run, count: int = 1) -> None:
    """Kill the store, and wait until another one is there."""
    killed = store_of(run.directory)
    os.kill(killed, signal.SIGKILL)
    support.wait_for(lambda: restarts(run) == count, run)
    assert store_of(run.directory) != killed


def restarts(run: support.Run) -> int:
    return [line["what"] for line in run.events("store")].count("restarted")


def is_gone(pid: int) -> bool:
    """Return whether the process is gone; a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_store_killed_between_two_faults_costs_nothing_and_the_next_recovery_is_exact(tmp_path, data_dir, reference):
    """The store is killed in a fault-free step, and once more; no group leaves for that. Then a rank dies in the
    middle of a reduction."""
    hold = Breakpoint(2, 6, "reduce", 1)
    run = support.start(tmp_path / "run", data_dir, [hold])
    for count, step in ((1, 1), (2, 3)):
        support.wait_for_step(run, step)
        restart(run, count)
    run.strike_in_step(hold)
    run.check(reference)
    assert [line["what"] for line in run.events("store")] == ["died", "restarted"] * 2
    assert run.events("store")[0]["detail"] == "ended with SIGKILL; started again at once"
    assert [sorted(view["lost"]) for view in run.events("view")] == [[], ["2"]]
    assert [(line["step"], line["patched"]) for line in run.events("recovery")] == [(6, support.PER_GROUP)]


@pytest.mark.long
@pytest.mark.parametrize("first", ["store", pytest.param("rank", marks=pytest.mark.long)])
def test_a_store_killed_together_with_a_rank(tmp_path, data_dir, reference, first):
    hold = Breakpoint(1, 4, "reduce", 1)
    gate = support.Gate(tmp_path, 6)
    run = support.start(tmp_path / "run", data_dir, [hold], script=gate.script)
    support.await_held(run, hold.group)
    kills = [lambda: os.kill(store_of(run.directory), signal.SIGKILL), lambda: run.strike_in_step(hold)]
    for kill in kills if first == "store" else reversed(kills):
        kill()
    support.wait_for(lambda: restarts(run) == 1, run)  # it is there before its keeper says so
    gate.open()
    run.check(reference)
    assert restarts(run) == 1
    assert [(line["step"], line["patched"]) for line in run.events("recovery")] == [(4, support.PER_GROUP)]


@pytest.mark.long
@pytest.mark.parametrize("point", ["recover", "connect"])
def test_a_store_killed_in_the_middle_of_a_recovery(tmp_path, data_dir, reference, point):
    """A survivor is held after it has published its report, or before it builds the new communicator."""
    dies, waits = Breakpoint(1, 4, "reduce", 1), Breakpoint(2, 4, point)
    run = support.start(tmp_path / "run", data_dir, [dies, waits])
    run.strike_in_step(dies)
    held = support.await_held(run, waits.group)
    restart(run)
    os.kill(held, signal.SIGCONT)
    run.check(reference)
    assert [line["group"] for line in run.events("survivor")] == [0, 2, 3]
    assert sum(line["patched"] for line in run.events("recovery")) == support.PER_GROUP


@pytest.mark.long
def test_a_store_killed_under_groups_of_several_ranks(tmp_path, data_dir):
    """Every rank is a process with its own memory of the store; then a rank dies that does not lead its group."""
    alone = support.start(tmp_path / "alone", data_dir, groups=2)
    alone.check()
    hold = Breakpoint(1, 4, "reduce", 1, position=1)
    run = support.start(tmp_path / "run", data_dir, [hold], groups=2, extra=["--ranks-per-group", 2])
    support.wait_for_step(run, 1)
    restart(run)
    run.strike_in_step(hold)
    run.check(alone)
    assert [(line["step"], line["patched"]) for line in run.events("recovery")] == [(4, support.PER_GROUP)]


@pytest.mark.long
def test_a_store_frozen_for_a_while_holds_up_a_recovery_and_nothing_else(tmp_path, data_dir, reference):
    hold = Breakpoint(0, 4, "backward")
    run = support.start(tmp_path / "run", data_dir, [hold])
    support.await_held(run, hold.group)
    os.kill(store_of(run.directory), signal.SIGSTOP)
    run.strike_in_step(hold)
    time.sleep(FROZEN_S)  # this is the fault's length, not a wait for something
    assert not run.events("recovery"), "agreeing needs the store"
    os.kill(store_of(run.directory), signal.SIGCONT)
    run.check(reference)
    assert not run.events("store"), "it is the same store, with its memory"
    (recovery,) = run.events("recovery")
    assert recovery["step"] == 4 and recovery["t"] - run.events("inject")[0]["t"] > FROZEN_S


@pytest.mark.long
def test_a_store_that_stays_frozen_is_replaced(tmp_path, data_dir, reference):
    hold = Breakpoint(3, 4, "gate")
    run = support.start(tmp_path / "run", data_dir, [hold])
    support.await_held(run, hold.group)
    os.kill(store_of(run.directory), signal.SIGSTOP)
    run.strike(hold)
    run.check(reference)
    died, restarted = run.events("store")
    assert died["detail"].startswith(f"was stopped for {STOPPED_S:g} s and is ended")
    # The restart is recorded concurrently with its clients' work, the death before it.
    assert restarted["t"] > died["t"] and run.events("recovery")[0]["t"] > died["t"]


@pytest.mark.long
def test_a_keeper_that_is_killed_takes_its_store_along_and_another_one_is_started(tmp_path, data_dir, reference):
    hold = Breakpoint(2, 5, "reduce", 1)
    run = support.start(tmp_path / "run", data_dir, [hold])
    support.await_held(run, hold.group)
    store = store_of(run.directory)
    os.kill(parent_of(store), signal.SIGKILL)
    support.wait_for(lambda: store_of(run.directory) != store, run)
    await_(lambda: is_gone(store), "it is taken along")
    run.strike(hold)
    run.check(reference)


def test_ctrl_c_does_not_reach_the_store_and_the_agents_death_does(tmp_path, data_dir):
    run = support.start(tmp_path / "run", data_dir, steps=1000)
    support.wait_for_step(run, 1)
    store = store_of(run.directory)
    kept_by = parent_of(store)
    assert len({os.getsid(pid) for pid in (store, kept_by)} - {os.getsid(run.process.pid)}) == 1
    assert parent_of(kept_by) == run.process.pid
    os.kill(store, signal.SIGSTOP)  # even when the store is stopped
    run.process.kill()
    run.finish()
    await_(lambda: is_gone(store) and is_gone(kept_by), "store and keeper end with their agent")


@pytest.mark.long
def test_a_store_that_forgets_the_end_before_every_process_has_heard_of_it(tmp_path, data_dir, reference):
    """The writer has left with the store's answer; a group and the agent were frozen meanwhile. No group is lost for
    that."""
    hold = Breakpoint(1, support.STEPS, "finish")
    run = support.start(tmp_path / "run", data_dir, [hold])
    support.wait_for_step(run, 1)
    os.kill(run.process.pid, signal.SIGSTOP)
    held = support.await_held(run, hold.group)
    writer = inject.pid_of(run.directory, 0)
    support.wait_for(lambda: run.events("end") and is_gone(writer), run)
    restart(run)
    for pid in (held, run.process.pid):
        os.kill(pid, signal.SIGCONT)
    run.check(reference)
    assert len(run.events("view")) == 1 and not run.events("fault")


# --- the keeper alone -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["forked", "executed"])
def keep(request, tmp_path):
    """Start a keeper: a forked one, or a new interpreter where the process has other threads."""
    stop, started = threading.Event(), []
    other = threading.Thread(target=stop.wait)
    if request.param == "executed":
        other.start()

    def start(**options) -> store_keeper.StoreSupervisor:
        started.append(store_keeper.StoreSupervisor("127.0.0.1", 0, tmp_path, **options))
        return started[-1]

    yield start
    started[-1].close()
    stop.set()


@pytest.mark.long
def test_a_keeper_on_standby_has_a_store_from_the_order_on_and_for_its_own_lifetime(keep, tmp_path):
    kept = keep(serves=False)
    for times in range(3):
        assert not (tmp_path / STORE).exists()
        kept.poll()
        kept.serve()
        await_((tmp_path / STORE).exists, "there is a store")
        asked = ControlStore(kept.address, "run", DEADLINE_S)
        asked.set("key", times)
        asked.close()
        store = store_of(tmp_path)
        kept.stand_by()
        await_(lambda store=store: is_gone(store), "the store has ended")
        assert (tmp_path / STORE).exists(), "it may be that of another host by now"
        (tmp_path / STORE).unlink()
    kept.close()
    kept = keep(serves=False)
    if kept.pid is not None:
        os.kill(kept.pid, signal.SIGKILL)
    kept.serve()
    await_(lambda: kept.poll() or (tmp_path / STORE).exists(), "one that was killed is replaced")


@pytest.mark.long
def test_a_store_that_dies_often_is_started_again_later_and_its_port_stays_the_runs(keep, tmp_path):
    kept, killed = keep(), 0
    await_((tmp_path / STORE).exists, "there is a store")
    address = kept.address.rpartition(":")
    for count in range(1, RESTARTS + 1):
        asked = ControlStore(kept.address, "run", DEADLINE_S)
        patient(lambda asked=asked: asked.set("key", 1), patience_s=DEADLINE_S)
        killed = store_of(tmp_path)
        os.kill(killed, signal.SIGKILL)
        await_(lambda count=count: len(history.read(tmp_path)) == 2 * count, "it is started again")
        await_(lambda killed=killed: store_of(tmp_path) != killed, "and says so")
        assert patient(lambda asked=asked: asked.get("key"), patience_s=DEADLINE_S) is None
    os.kill(store_of(tmp_path), signal.SIGKILL)
    await_(lambda: len(history.read(tmp_path)) == 2 * RESTARTS + 1, "its last death is told")
    details = [line["detail"] for line in history.read(tmp_path) if line["what"] == "died"]
    assert details[0] == "ended with SIGKILL; started again at once"
    assert re.fullmatch(r"ended with SIGKILL; started again in \d+ s, it ended 6 times within 60 s", details[-1])
    with pytest.raises(OSError, match="in use"):
        socket.create_server((address[0], int(address[2])))
    assert history.read(tmp_path)[-1]["what"] == "died"
    kept.close()
    socket.create_server((address[0], int(address[2]))).close()
    assert not (tmp_path / STORE).exists()
