"""The NCCL watchdog: against a fake that behaves like NCCL's backend, and on real gloo groups. Every test awaits
events."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_ft.collectives import nccl_watchdog as watchdog_module
from megatron_ft.collectives.nccl_watchdog import (
    Watchdog,
    WatchdogEvent,
    abort,
    environment,
    flight_recorder,
)
from megatron_ft.errors import ConfigError

PATIENCE_S = 60
"""The time until a test gives up on an event that is due at once."""
NEVER_S = 3600.0
ErrorType, WorkResult = (getattr(torch._C._distributed_c10d, name) for name in ("ErrorType", "WorkResult"))


class Nccl:
    """The part of ``ProcessGroupNCCL`` that the watchdog uses; ``asked`` is set by every look at it."""

    supports_shrinking = True

    def __init__(self):
        self.error, self.gone, self.asked = ErrorType.SUCCESS, False, threading.Event()
        self.aborted, self.let_go, self.hangs, self.shrinks = threading.Event(), threading.Event(), False, 0

    def get_error(self):
        self.asked.set()
        if self.gone:
            raise RuntimeError("the process group was destroyed")
        return self.error

    def abort(self):
        if self.hangs:
            assert self.let_go.wait(PATIENCE_S)
        self.aborted.set()

    def shrink(self, excluded, flags, options=None):
        self.shrinks += 1
        if self.hangs:
            assert self.let_go.wait(PATIENCE_S)
        return f"without {excluded}, flags {flags}"

    def awaits_look(self):
        """Return when the watchdog has looked once more, from begin to end of a look."""
        for _ in range(2):
            self.asked.clear()
            assert self.asked.wait(PATIENCE_S)


class NcclWork:
    """A work like NCCL's: the tensors' future is complete at once, ``get_future_result`` says how the work ended."""

    def __init__(self):
        self.result = torch.futures.Future()

    def get_future_result(self):
        return self.result

    def get_future(self):
        raise AssertionError("it is complete when the kernel is queued, and says nothing")


class PointToPointWork:
    """A work like gloo's point-to-point works: no future at all."""

    def __init__(self):
        self.completed = False

    def get_future_result(self):
        raise RuntimeError("Work::getFutureResult not implemented.")

    get_future = get_future_result

    def is_completed(self):
        return self.completed


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Events:
    """A callback that remembers the events that it was given."""

    def __init__(self):
        self.all: list[WatchdogEvent] = []
        self._first = threading.Event()

    def __call__(self, event):
        self.all.append(event)
        self._first.set()

    def the_only(self, watchdog) -> WatchdogEvent:
        """Return the only event, once the watchdog's thread has ended: then there can be no second."""
        assert self._first.wait(PATIENCE_S), "no event"
        watchdog._thread.join(PATIENCE_S)  # the thread ends by itself
        assert watchdog.close(timeout_s=0) and len(self.all) == 1
        return self.all[0]


@pytest.fixture
def events():
    return Events()


def watching(groups, events, timeout_s=NEVER_S, **options) -> Watchdog:
    return Watchdog(7, groups, events, timeout_s, poll_s=0.001, **options)


# --- the environment --------------------------------------------------------------------------------------------------


def test_the_environment_that_lets_the_watchdog_report():
    assert environment({}) == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_PROPAGATE_ERROR": "1",
        "TORCH_FR_BUFFER_SIZE": "512",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        {"NCCL_ASYNC_ERROR_HANDLING": "0"},
        {"TORCH_NCCL_PROPAGATE_ERROR": "False"},
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
        {"TORCH_NCCL_ENABLE_MONITORING": "no"},
        {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "199"},
        {"TORCH_DISTRIBUTED_DEBUG": "INFO"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5", "TORCH_NCCL_DESYNC_DEBUG": "0"},
    ],
)
def test_an_explicit_value_that_fits_is_kept(given):
    added = environment(given)
    assert not added.keys() & given.keys()
    # An older name that the user set is not overruled by the newer one, which would count more.
    older = {"NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & given.keys()
    assert len(added) == len(environment({})) - len(environment({}).keys() & given.keys()) - len(older)
    assert environment({**given, **added}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        ("NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true"),
        ("TORCH_NCCL_ENABLE_MONITORING", ""),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"),
        ("TORCH_FR_BUFFER_SIZE", "many"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "Y"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_an_explicit_value_that_contradicts_is_reported(name, value):
    with pytest.raises(ConfigError, match=f"{name}='{value}' must match .*, because .*; unset it"):
        environment({name: value})


def test_all_contradictions_are_reported_together():
    with pytest.raises(ConfigError, match=r"BLOCKING_WAIT.*DESYNC_DEBUG"):
        environment({"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"})


# --- a backend with a watchdog of its own -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ErrorType.TIMEOUT, "timeout"),
        (ErrorType.COMM_ERROR, "comm_error"),
        (ErrorType.REMOTE_ERROR, "remote_error"),
    ],
)
def test_an_error_of_the_backend_is_one_event(events, error, kind, monkeypatch):
    monkeypatch.setattr(watchdog_module, "flight_recorder", lambda keep: ("outer nccl:all_reduce #1 [[3]] scheduled",))
    backend = Nccl()
    watchdog = watching({"outer": backend}, events)
    backend.awaits_look()
    assert events.all == []
    backend.error = error
    event = events.the_only(watchdog)
    assert (event.kind, event.epoch) == (kind, 7)
    assert event.message == f"outer: the NCCL watchdog reports {error.name}"
    assert event.collectives == ("outer nccl:all_reduce #1 [[3]] scheduled",)


def test_without_a_recorder_the_registered_works_are_listed(events, monkeypatch):
    monkeypatch.setattr(watchdog_module, "flight_recorder", lambda keep: ())
    backend = Nccl()
    watchdog = watching({"outer": backend}, events, keep=2)
    works = [NcclWork() for _ in range(3)]
    for index, work in enumerate(works):
        watchdog.watch(work, f"bucket {index}")
    works[1].result.set_result(WorkResult.SUCCESS.value)
    backend.awaits_look()
    backend.error = ErrorType.REMOTE_ERROR
    assert events.the_only(watchdog).collectives == ("bucket 1: ended", "bucket 2: not ended")


@pytest.mark.parametrize(
    ("result", "kind"),
    [(WorkResult.TIMEOUT, "timeout"), (WorkResult.COMM_ERROR, "comm_error"), (WorkResult.UNKNOWN, "comm_error")],
)
def test_the_result_of_a_work_names_it(events, result, kind):
    watchdog = watching({"outer": Nccl()}, events)
    work = NcclWork()
    watchdog.watch(work, "bucket 4")
    work.result.set_result(result.value)
    event = events.the_only(watchdog)
    assert (event.kind, event.message) == (kind, f"bucket 4: the NCCL watchdog reports {result.name}")


def test_two_groups_of_an_epoch_are_still_one_event(events):
    outer, inner = Nccl(), Nccl()
    watchdog = watching({"outer": outer, "inner": inner}, events)
    inner.error = outer.error = ErrorType.COMM_ERROR
    assert events.the_only(watchdog).kind == "comm_error"


def test_the_second_of_two_groups_is_watched(events):
    outer, inner = Nccl(), Nccl()
    watchdog = watching({"outer": outer, "inner": inner}, events)
    inner.error = ErrorType.TIMEOUT
    assert events.the_only(watchdog).message.startswith("inner: ")


def test_a_group_that_is_destroyed_is_forgotten_and_the_others_watched(events):
    outer, inner = Nccl(), Nccl()
    watchdog = watching({"outer": outer, "inner": inner}, events)
    outer.gone = True
    inner.awaits_look()
    outer.asked.clear()
    inner.awaits_look()
    assert not outer.asked.is_set()
    inner.error = ErrorType.TIMEOUT
    assert events.the_only(watchdog).kind == "timeout"


def test_closing_in_the_middle_of_a_look_swallows_what_it_finds(events):
    class Slow(Nccl):
        def get_error(self):
            self.asked.set()
            assert self.let_go.wait(PATIENCE_S)
            return ErrorType.TIMEOUT

    backend = Slow()
    watchdog = watching({"outer": backend}, events)
    assert backend.asked.wait(PATIENCE_S)
    assert not watchdog.close(timeout_s=0.01)  # the thread is stuck, and no call waits for it
    backend.let_go.set()
    assert watchdog.close(PATIENCE_S)
    assert events.all == []
    watchdog.watch(NcclWork(), "too late")


def test_the_callback_may_close_the_watchdog():
    closed, ready = threading.Event(), threading.Event()

    def on_event(event):
        assert ready.wait(PATIENCE_S)
        assert not watchdog.close()  # the thread that calls is the one that would have to end
        closed.set()

    backend = Nccl()
    backend.error = ErrorType.TIMEOUT
    watchdog = Watchdog(0, {"outer": backend}, on_event, NEVER_S, poll_s=0.001)
    ready.set()
    assert closed.wait(PATIENCE_S) and watchdog.close(PATIENCE_S)


def test_a_bug_ends_the_watchdog_with_a_report_and_not_the_process(events, capfd):
    class Wrong(Nccl):
        def get_error(self):
            self.asked.set()
            raise TypeError("not an error of the group")

    backend = Wrong()
    watchdog = watching({"outer": backend}, events)
    assert backend.asked.wait(PATIENCE_S)
    watchdog._thread.join(PATIENCE_S)
    assert "watchdog of epoch 7 ended: TypeError('not an error of the group')" in capfd.readouterr().err
    assert watchdog.close() and events.all == []


# --- works that only this watchdog times ------------------------------------------------------------------------------


def test_a_work_is_timed_from_when_it_is_watched(events):
    clock, backend, work, ended = Clock(), Nccl(), PointToPointWork(), PointToPointWork()
    watchdog = watching({"inner": backend}, events, timeout_s=10.0, clock=clock)
    watchdog.watch(ended, "send 1")
    clock.now_s = 5.0
    watchdog.watch(work, "send 2")
    ended.completed = True
    backend.awaits_look()
    clock.now_s = 14.9
    backend.awaits_look()
    assert events.all == []
    clock.now_s = 15.5
    event = events.the_only(watchdog)
    assert (event.kind, event.message) == ("timeout", "send 2: not ended after 10.5 s; allowed are 10 s")
    assert event.collectives == ("send 1: ended", "send 2: not ended after 10.5 s")


def test_this_watchdog_backs_up_a_watchdog_of_nccl_that_is_stuck(events):
    clock, backend = Clock(), Nccl()
    watchdog = watching({"outer": backend}, events, timeout_s=10.0, clock=clock)
    watchdog.watch(NcclWork(), "bucket 0")
    clock.now_s = 11.0
    assert events.the_only(watchdog).kind == "timeout"


def test_works_that_have_ended_are_released(events):
    backend, work = Nccl(), PointToPointWork()
    watchdog = watching({"inner": backend}, events)
    watchdog.watch(work, "send")
    work.completed = True
    backend.awaits_look()
    assert watchdog._pending == [] and watchdog._recent[0].work is None
    watchdog.close()


def gloo_pair(timeout_s: float = NEVER_S) -> list:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s)), range(2))
        )


def test_gloo_a_collective_whose_peer_never_comes_is_a_timeout(events):
    groups = gloo_pair(timeout_s=PATIENCE_S)
    watchdog = watching({"outer": groups[0]}, events, timeout_s=0.2)
    work, late = groups[0].allreduce([torch.ones(4)]), torch.ones(4)
    watchdog.watch(work, "bucket 0")
    event = events.the_only(watchdog)
    assert event.kind == "timeout" and re.fullmatch(
        r"bucket 0: not ended after \S+ s; allowed are 0.2 s", event.message
    )
    assert event.collectives[0].startswith("bucket 0: not ended after ")
    groups[1].allreduce([late]).wait()  # otherwise the destructor waits for the operation
    work.wait()


def test_gloo_an_error_of_its_own_is_a_comm_error(events):
    groups, options = gloo_pair(timeout_s=PATIENCE_S), dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.2)  # for this group only: to build the groups may take longer
    watchdog = watching({"outer": groups[0]}, events)
    watchdog.watch(groups[0].allreduce([torch.ones(4)], options), "bucket 0")
    event = events.the_only(watchdog)
    assert event.kind == "comm_error" and "Timed out waiting 200ms" in event.message
    assert event.collectives == (event.message,)


def test_gloo_a_success_is_no_event(events):
    groups, backend = gloo_pair(), Nccl()
    watchdog = watching({"outer": groups[0], "inner": backend}, events)
    works = [group.allreduce([torch.ones(4)]) for group in groups]
    for work in works:
        watchdog.watch(work, "bucket 0")
        work.wait()
    backend.awaits_look()
    assert events.all == [] and watchdog._pending == []
    assert watchdog.close(PATIENCE_S)


PEER = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))
group.allreduce([torch.ones(4)]).wait()
print("joined", flush=True)
sys.stdin.read()
"""


def test_gloo_a_killed_peer_is_a_comm_error(events):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", PEER, str(store.port)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=PATIENCE_S))
        group.allreduce([torch.ones(4)]).wait()
        assert "joined\n" in iter(peer.stdout.readline, "")  # torch 2.9 writes a line of its own
        watchdog = watching({"outer": group}, events)
        watchdog.watch(group.allreduce([torch.ones(4)]), "bucket 0")
        os.kill(peer.pid, signal.SIGKILL)
        event = events.the_only(watchdog)
    finally:
        peer.kill()
        peer.communicate()
    assert event.kind == "comm_error" and event.message.startswith("bucket 0: ")


# --- the Flight Recorder ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    "fr_trace_json" not in torch._C._distributed_c10d._get_handler_names(), reason="this torch records NCCL only"
)
def test_the_recorder_lists_the_last_collectives_of_this_process(monkeypatch):
    """torch 2.13 records gloo's too, so its real format is seen without a GPU."""
    monkeypatch.setattr(watchdog_module, "_HANDLERS", ("fr_trace_json",))
    groups = gloo_pair()
    for length in (1, 2, 3):
        for work in [group.allreduce([torch.ones(length)]) for group in groups]:
            work.wait()
    last = flight_recorder(4, deadline_s=PATIENCE_S)
    # Both ranks belong to this process. The state is not kept up for gloo.
    assert [words.rsplit(" ", 1)[0] for words in last] == ["gloo:all_reduce #2 [[2]]"] * 2 + [
        "gloo:all_reduce #3 [[3]]"
    ] * 2


def test_a_recorder_that_fails_or_hangs_lists_nothing(monkeypatch):
    monkeypatch.setattr(watchdog_module, "_recorded", lambda keep: 1 // 0)
    assert flight_recorder(2) == ()
    let_go = threading.Event()
    monkeypatch.setattr(watchdog_module, "_recorded", lambda keep: let_go.wait(PATIENCE_S))
    assert flight_recorder(2, deadline_s=0.01) == ()
    let_go.set()


# --- the effects of an event ------------------------------------------------------------------------------------------


def test_an_abort_that_hangs_is_left_behind():
    backend = Nccl()
    backend.hangs = True
    assert abort(backend, deadline_s=0.05) == "the abort took longer than 0.05 s and was left behind"
    assert not backend.aborted.is_set()
    backend.let_go.set()
    assert backend.aborted.wait(PATIENCE_S)


def test_an_abort_that_fails_returns_its_error():
    class Fails(Nccl):
        def abort(self):
            raise RuntimeError("ncclCommAbort failed")

    assert abort(Nccl(), deadline_s=PATIENCE_S) == ""
    assert abort(Fails(), deadline_s=PATIENCE_S) == "RuntimeError: ncclCommAbort failed"


# --- the names that the watchdog depends on ---------------------------------------------------------------------------


def test_the_installed_torch_has_the_names():
    c10d = torch._C._distributed_c10d
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"} <= set(ErrorType.__members__)
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR", "UNKNOWN"} <= set(WorkResult.__members__)
    assert torch.__version__ < (2, 13) or "fr_trace_json" in c10d._get_handler_names()
    assert hasattr(dist.Work, "get_future_result") and hasattr(dist.ProcessGroup, "abort")
    if torch.version.cuda:
        assert hasattr(dist.ProcessGroupNCCL, "get_error")
