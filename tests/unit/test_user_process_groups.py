"""The watch over a rank's process groups: against groups like NCCL's, and with a real process whose abort hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ft import codec
from megatron_ft.config.schema import DetectorConfig
from megatron_ft.core.detection.collective_stalls import Call, Report, Training
from megatron_ft.core.protocol import signals
from megatron_ft.run.collectives import flight_recorder, user_process_groups
from megatron_ft.run.collectives.user_process_groups import UserProcessGroups
from megatron_ft.utils import vital_thread
from tests import support
from tests.stores import await_

ErrorType = torch._C._distributed_c10d.ErrorType
WAITS = Call("1", 812, "all_reduce")


class Backend:
    """The part of ``ProcessGroupNCCL`` that is used."""

    def __init__(self):
        self.error, self.timeout_s, self.aborted = ErrorType.SUCCESS, 0.0, threading.Event()

    def get_error(self):
        return self.error

    def _set_default_timeout(self, timeout):
        self.timeout_s = timeout.total_seconds()

    def abort(self):
        self.aborted.set()


class Group:
    """A process group of torch."""

    _device_types = ("cuda",)

    def __init__(self, name: str, label: str):
        self.group_name, self.group_desc, self.backend = name, label, Backend()

    def _get_backend(self, device):
        return self.backend


class Memory:
    """A control store in memory. ``peer``: what the other rank answers, if it does."""

    def __init__(self, peer: Report | None):
        self.keys, self.said, self._peer = {}, [], peer

    def clone(self):
        return self

    def set(self, key, value):
        self.keys[key] = value

    def get(self, key):
        return self.keys.get(key)

    def append(self, log, value, by=None):
        signal = signals.from_json(value)
        if isinstance(signal, signals.CollectivesRequested) and self._peer is not None:
            self.keys[f"calls/3/{signal.asked}/{self._peer.position}"] = codec.encode(self._peer)
        self.said.append(signal)

    @property
    def accused(self) -> list[signals.RankUnresponsive]:
        return [signal for signal in self.said if isinstance(signal, signals.RankUnresponsive)]


@pytest.fixture
def watch(monkeypatch):
    """Return a function that starts a watch over groups by name, as rank 0 of 2 of group 3, which waits in ``WAITS``."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(flight_recorder, "entries", lambda: [])
    monkeypatch.setattr(flight_recorder, "calls", lambda recorded, members: (WAITS,))
    monkeypatch.setattr(user_process_groups, "_LOOK_S", 0.001)
    monkeypatch.setattr(user_process_groups, "_ANSWER_S", 0.2)
    made = []

    def start(groups, store, training=lambda: Training(0, False, 0), limit_s=0.5):
        detector = DetectorConfig(collective_timeout_s=limit_s)
        config = SimpleNamespace(fault_tolerance=SimpleNamespace(detector=detector), ranks_per_group=2)
        env = SimpleNamespace(config=config, group=3, position=0, incarnation=0, seat="3", host_rank=None)
        made.append(UserProcessGroups(env, store, training, lambda: dict(groups)))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        one.abort()


def test_a_failure_that_nccl_has_recorded_takes_the_group_out_and_names_the_rank(watch):
    groups, store = {"1": Group("1", "tp")}, Memory(Report(1, 77, "there"))
    watch(groups, store)
    await_(lambda: groups["1"].backend.timeout_s == 0.5, "the group is found")
    assert not store.said
    groups["1"].backend.error = ErrorType.TIMEOUT
    await_(lambda: store.accused, "the group is reported")
    (said,) = store.accused
    assert (said.group, said.position, said.pid, said.host) == (3, 1, 77, "there")
    assert said.why == (
        "did not enter all_reduce #812 of tp; rank 0 waits in it (a broken process group (timeout): tp: the NCCL watchdog "
        "reports TIMEOUT)"
    )


def test_a_rank_that_nobody_can_blame_reports_itself(watch):
    groups = {"1": Group("1", "tp")}
    store = Memory(None)
    groups["1"].backend.error = ErrorType.COMM_ERROR
    watch(groups, store)
    await_(lambda: store.accused, "the group is reported")
    assert (store.accused[0].position, store.accused[0].pid) == (0, os.getpid())
    assert "(comm_error)" in store.accused[0].why and "rank 1 did not answer" in store.accused[0].why


def test_a_rank_that_asks_while_another_reports_the_group_adds_nothing(watch):
    """It has not heard the answers, and would hide the better reason of the other rank."""
    groups, store = {"1": Group("1", "tp")}, Memory(None)
    groups["1"].backend.error = ErrorType.TIMEOUT
    ask, own = store.append, []

    def append(log, value, by=None):
        ask(log, value, by)
        own[0].abort()  # the news of the loss

    store.append = append
    own.append(watch({}, store))
    own[0]._groups = lambda: dict(groups)
    await_(groups["1"].backend.aborted.is_set, "the rank is released")
    assert [type(signal) for signal in store.said] == [signals.CollectivesRequested]


def test_a_group_that_is_made_later_is_watched_and_one_that_is_gone_is_not(watch):
    groups, store = {"1": Group("1", "tp")}, Memory(Report(1))
    watch(groups, store)
    gone, new = groups["1"].backend, Group("2", "dp")
    await_(lambda: gone.timeout_s, "the first group is found")
    del groups["1"]
    groups["2"] = new
    await_(lambda: new.backend.timeout_s, "the second group is found")
    gone.error = ErrorType.TIMEOUT
    new.backend.error = ErrorType.REMOTE_ERROR
    await_(lambda: store.accused, "the group is reported")
    assert "(remote_error): dp" in store.accused[0].why


def test_a_wait_in_the_engine_that_is_too_long_takes_the_group_out(watch):
    store = Memory(Report(1, 77, "there"))
    watch({"1": Group("1", "tp")}, store, lambda: Training(0, True, 9))
    await_(lambda: store.accused, "the group is reported")
    assert store.accused[0].position == 1
    assert "0 s are allowed: collective_timeout_s" in store.accused[0].why


def test_a_rank_that_its_agent_judges_is_not_accused(watch):
    store = Memory(Report(1, 77, "there", excuse="inside the dataset"))
    watch({"1": Group("1", "tp")}, store, lambda: Training(0, True, 9), limit_s=0.01)
    await_(lambda: len(store.said) > 0, "the ranks are asked")
    threading.Event().wait(0.5)
    assert not store.accused


def test_all_groups_of_a_lost_group_are_aborted_also_new_ones(watch):
    groups = {"1": Group("1", "tp"), "2": Group("2", "tp")}
    watched = watch(groups, Memory(None))
    watched.abort()
    for group in list(groups.values()):
        assert group.backend.aborted.wait(support.TIMEOUT_S)
    groups["3"] = Group("3", "dp")
    assert groups["3"].backend.aborted.wait(support.TIMEOUT_S)


HANGS = """
import threading
from types import SimpleNamespace
import torch, torch.distributed as dist
from megatron_ft.run.collectives import user_process_groups
from megatron_ft.config.schema import DetectorConfig
from megatron_ft.core.detection.collective_stalls import Training

class Hangs(dist.ProcessGroup):  # a back end of torch, registered as NCCL is
    _device_types = ("cpu",)
    def __init__(self, store, rank, size, timeout): super().__init__(rank, size)
    def getBackendName(self): return "hangs"
    def _get_backend(self, device): return self
    def get_error(self): return torch._C._distributed_c10d.ErrorType.SUCCESS
    def _set_default_timeout(self, timeout): print("watched", flush=True)
    def abort(self): threading.Event().wait()
    @property
    def group_name(self): return "9"
    @property
    def group_desc(self): return "tp"

dist.Backend.register_backend("hangs", Hangs, devices=["cpu"])
dist.init_process_group("hangs", store=dist.HashStore(), rank=0, world_size=1)
user_process_groups._ABORT_S = 0.2
config = SimpleNamespace(fault_tolerance=SimpleNamespace(detector=DetectorConfig()), ranks_per_group=2)
env = SimpleNamespace(config=config, group=3, position=0, incarnation=0, seat="3", host_rank=None)
watch = user_process_groups.UserProcessGroups(env, None, lambda: Training(0, False, 0))
watch.start()
input()
watch.abort()
threading.Event().wait()
"""


def test_a_process_whose_abort_hangs_ends_with_the_reason(tmp_path):
    """torch lists the group, and nothing but its end gets the process out of the abort."""
    env = {**os.environ, vital_thread.ERROR_VARIABLE: str(tmp_path / "error"), "PYTHONPATH": str(support.ROOT)}
    env["TORCH_FR_BUFFER_SIZE"] = "0"  # torch 2.15 cannot record the operations of a back end in Python
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HANGS], env=env, text=True, **pipes)
    try:
        assert "watched\n" in iter(process.stdout.readline, ""), process.stderr.read()
        _, errors = process.communicate("\n", timeout=support.TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 6, errors
    said = json.loads((tmp_path / "error").read_text())["message"]
    assert said.startswith("rank 0 of group 3 ends: the abort of process group tp has not returned within 0.2 s")
