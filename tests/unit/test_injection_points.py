"""Orders for a rank: carried out once, recorded before, and never after a withdrawal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_ft.errors import ConfigError
from megatron_ft.record import history
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint, FaultCommand, InjectedError, InjectionPoints


class FakeEngine:
    """An engine with two buckets, each with a loss, as views of the reduced tensors."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.buckets = [torch.ones(5, dtype=dtype), torch.ones(9, dtype=dtype)]

    def local_gradients(self) -> list[torch.Tensor]:
        return [bucket[:-2] for bucket in self.buckets]

    def local_losses(self) -> list[torch.Tensor]:
        return [bucket[-2:-1] for bucket in self.buckets]


def me() -> tuple[int, int]:
    return os.getpid(), injection_points.start_of(os.getpid())


def post(run_dir: Path, *orders: FaultCommand, process: tuple[int, int] | None = None) -> None:
    injection_points.post(run_dir, 0, 0, process or me(), orders)


def injected(run_dir: Path) -> list[str]:
    return [line["fault"] for line in history.read(run_dir) if line["event"] == "inject"]


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(injection_points, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def rank(tmp_path) -> InjectionPoints:
    return InjectionPoints(0, [], run_dir=tmp_path)


RAISE = FaultCommand(fault="k/1", action="exception", point="backward", step=2)


def test_two_orders_at_one_point_are_both_carried_out(tmp_path, rank):
    post(tmp_path, FaultCommand(fault="k/1", action="slow", point="backward", step=2, factor=2.0), RAISE)
    rank.reach("begin", 2)
    with pytest.raises(InjectedError):
        rank.reach("backward", 2)
    assert len(injected(tmp_path)) == 2


def test_an_order_is_read_when_a_step_begins_and_carried_out_once(tmp_path, rank):
    post(tmp_path, RAISE)
    rank.reach("backward", 2)
    rank.reach("begin", 2)
    rank.reach("forward", 2)
    assert injected(tmp_path) == []
    with pytest.raises(InjectedError, match="k/1 at backward, step 2"):
        rank.reach("backward", 2)
    rank.reach("backward", 2)
    post(tmp_path, RAISE)
    rank.reach("begin", 2)
    rank.reach("backward", 2)
    (line,) = history.read(tmp_path)
    assert (line["pid"], line["kind"], line["point"], line["signal"]) == (
        os.getpid(),
        "exception",
        "backward, step 2",
        None,
    )


def test_an_order_without_a_step_is_for_the_next_one(tmp_path, rank):
    post(tmp_path, FaultCommand(fault="k/1", action="oom", point="gate"))
    rank.reach("begin", 7)
    with pytest.raises(torch.OutOfMemoryError):
        rank.reach("gate", 7)


def test_an_order_that_is_withdrawn_within_the_step_is_not_carried_out(tmp_path, rank):
    post(tmp_path, RAISE)
    rank.reach("begin", 2)
    post(tmp_path)
    rank.reach("backward", 2)
    assert injected(tmp_path) == []


def test_an_order_for_another_process_of_the_same_rank_is_not_carried_out(tmp_path, rank):
    post(tmp_path, RAISE, process=(os.getpid(), injection_points.start_of(os.getpid()) - 1))
    rank.reach("begin", 2)
    rank.reach("backward", 2)
    assert injected(tmp_path) == []


def test_an_order_that_cannot_be_recorded_is_not_carried_out(tmp_path, rank):
    post(tmp_path, RAISE)
    (tmp_path / history.FILE).mkdir()
    rank.reach("begin", 2)
    rank.reach("backward", 2)


@pytest.mark.parametrize("text", ["", "[]", '{"process": 3}', '{"process": [%d, %d], "orders": [{"x": 1}]}'])
def test_a_damaged_mailbox_counts_as_empty(tmp_path, rank, text, capsys):
    post(tmp_path)
    injection_points.mailbox(tmp_path, 0, 0).write_text(text % me() if "%" in text else text)
    rank.reach("begin", 0)
    rank.reach("begin", 1)
    assert capsys.readouterr().err.count("ignored") == 1


def test_only_the_ordered_bucket_counts(tmp_path, rank):
    post(tmp_path, FaultCommand(fault="k/1", action="exception", point="reduce", step=0, bucket=1))
    rank.reach("begin", 0)
    rank.reach("reduce", 0, 0)
    with pytest.raises(InjectedError, match="reduce 1"):
        rank.reach("reduce", 0, 1)


def test_a_hold_can_skip_earlier_passes_of_its_point(tmp_path):
    """Two backward passes of step 2 are skipped; those of other steps do not count."""
    rank = InjectionPoints(0, [], run_dir=tmp_path)
    post(tmp_path, FaultCommand(fault="k/1", action="exception", point="backward", step=2, after=2))
    rank.reach("begin", 1)
    for step in (1, 1, 1, 2, 2):
        rank.reach("backward", step)
    with pytest.raises(InjectedError):
        rank.reach("backward", 2)
    rank.reach("backward", 2)


def test_points_without_orders_read_the_mailbox_once_per_step(tmp_path, rank, monkeypatch):
    looks: list[object] = []
    stat = os.stat
    monkeypatch.setattr(injection_points.os, "stat", lambda path: looks.append(path) or stat(path))
    for step in range(3):
        for point in injection_points.POINTS[:-1]:
            rank.reach(point, step)
        rank.corrupt(step, None)
    assert len(looks) == 3


def test_orders_of_the_environment_and_of_the_mailbox_coexist(tmp_path, monkeypatch):
    monkeypatch.setenv(
        injection_points.VARIABLE,
        injection_points.to_env([Breakpoint(0, 1, "gate"), Breakpoint(1, 1, "gate")])[injection_points.VARIABLE],
    )
    stops: list[int] = []
    monkeypatch.setattr(injection_points.os, "kill", lambda pid, number: stops.append(number))
    rank = InjectionPoints.from_env(0, 0, 0, tmp_path)
    post(tmp_path, RAISE)
    rank.reach("begin", 1)
    rank.reach("gate", 1)
    rank.reach("gate", 1)
    assert len(stops) == 1
    rank.reach("begin", 2)
    with pytest.raises(InjectedError):
        rank.reach("backward", 2)


def test_an_unknown_point_is_refused():
    with pytest.raises(ConfigError, match="'nowhere' is not known; choose from begin"):
        Breakpoint(0, 0, "nowhere")


# --- freezing, in a process of its own --------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from megatron_ft.run.injection_points import InjectionPoints
rank = InjectionPoints(0, [], run_dir=Path(sys.argv[1]))
for line in sys.stdin:
    rank.reach("begin", int(line))
    rank.reach("gate", int(line))
    print("on", flush=True)
"""


def test_a_held_rank_names_its_order_and_freezes(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process = child.pid, injection_points.start_of(child.pid)
    post(tmp_path, FaultCommand(fault="k/1", action="hold", point="gate", step=3), process=process)
    child.stdin.write("3\n")
    child.stdin.flush()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    value = json.loads(injection_points.reached_file(tmp_path, 0, 0).read_text())
    assert value == {"fault": "k/1", "process": list(process), "at": "gate, step 3"}
    os.kill(child.pid, 18)  # SIGCONT
    assert child.stdout.readline() == "on\n"
    output, _ = child.communicate("3\n")
    assert output == "on\n", "it would have frozen again"


# --- holding the GIL --------------------------------------------------------------------------------------------------


def test_no_other_thread_runs_while_the_gil_is_held():
    """The other thread releases the GIL in every iteration, and requests it for a minute before a forced switch."""
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=tick)
    try:
        thread.start()
        while not ticks[0]:
            time.sleep(0)
        stood = ticks[0]
        injection_points.hold_gil(0.05)
        assert ticks[0] == stood
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def test_gil_is_recorded_like_other_orders(tmp_path, rank, monkeypatch):
    held: list[float] = []
    monkeypatch.setattr(injection_points, "hold_gil", held.append)
    post(tmp_path, FaultCommand(fault="k/1", action="gil", point="backward", duration_s=3.5))
    rank.reach("begin", 0)
    rank.reach("backward", 0)
    rank.reach("backward", 0)
    assert held == [3.5]


# --- slow -------------------------------------------------------------------------------------------------------------


def test_a_slow_rank_sleeps_after_every_part_of_its_computing(tmp_path, rank, monkeypatch):
    """The clock advances by 1 s between two points; only computing becomes longer."""
    now, slept = [0.0], []
    monkeypatch.setattr(injection_points.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(injection_points.time, "sleep", slept.append)
    post(tmp_path, FaultCommand(fault="k/1", action="slow", factor=3.0, steps=2))
    for step in range(4):
        for point in ("begin", "forward", "backward", "reduce", "gate", "update"):
            rank.reach(point, step)
            if point == "backward":
                now[0] += 1
                rank.corrupt(step, None)
            now[0] += 1
    assert slept == [2.0] * 4
    assert injected(tmp_path) == ["k/1"]


# --- corruption -------------------------------------------------------------------------------------------------------


def corrupted(run_dir: Path, rank: InjectionPoints, engine: FakeEngine, **order) -> FakeEngine:
    post(run_dir, FaultCommand(fault="k/1", **order))
    rank.reach("begin", 4)
    assert rank.corrupts(4) and not rank.corrupts(3), "buckets of that step must not be sent before"
    rank.corrupt(3, None)
    rank.corrupt(4, engine)
    assert not rank.corrupts(4)
    after = [bucket.clone() for bucket in engine.buckets]
    rank.corrupt(4, engine)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(after, engine.buckets, strict=True))
    return engine


def changes(engine: FakeEngine) -> list[int]:
    return [int((bucket != 1).sum()) for bucket in engine.buckets]


def test_a_gradient_gets_one_nan_in_the_ordered_bucket(tmp_path, rank):
    engine = corrupted(tmp_path, rank, FakeEngine(), action="nan", step=4, bucket=1, seed=5)
    assert changes(engine) == [0, 1]
    assert torch.isnan(engine.local_gradients()[1]).sum() == 1
    assert history.read(tmp_path)[0]["point"].endswith("of bucket 1, step 4")


def test_a_loss_of_nan_changes_all_gradients_but_not_the_number_of_microbatches(tmp_path, rank):
    engine = corrupted(tmp_path, rank, FakeEngine(), action="nan", step=4, what="loss")
    assert changes(engine) == [4, 8]
    assert [float(bucket[-1]) for bucket in engine.buckets] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bit", [0, 7, 15, 31, 63])
def test_a_second_flip_of_a_bit_restores_the_value(tmp_path, dtype, bit):
    engine = FakeEngine(dtype)
    order = {"action": "bitflip", "step": 4, "bit": bit, "seed": 9}
    for _ in range(2):
        assert sum(changes(engine)) in (0, 1)
        corrupted(tmp_path, InjectionPoints(0, [], run_dir=tmp_path), engine, **order)
    assert changes(engine) == [0, 0]


def test_torch_counts_no_write_for_a_bit_that_is_flipped_in_the_state(tmp_path, rank):
    engine = FakeEngine()
    engine.state_tensors = lambda: [("buffer kept", kept)]
    kept = torch.zeros(3)
    corrupted(tmp_path, rank, engine, action="bitflip", step=4, what="buffer")
    assert kept.any() and kept._version == 0


def test_the_seed_draws_the_open_fields_of_an_order(tmp_path):
    def flipped(seed: int) -> list[torch.Tensor]:
        rank = InjectionPoints(0, [], run_dir=tmp_path)
        return corrupted(tmp_path, rank, FakeEngine(), action="bitflip", step=4, seed=seed).buckets

    assert all(torch.equal(a, b) for a, b in zip(flipped(1), flipped(1), strict=True))
    assert len({tuple(torch.cat(flipped(seed)).tolist()) for seed in range(20)}) > 10


def test_a_hold_applies_to_one_start_of_a_group(tmp_path, monkeypatch):
    for name, value in injection_points.to_env(
        [injection_points.Breakpoint(1, 2, "gate"), injection_points.Breakpoint(1, 3, "gate", incarnation=1)]
    ).items():
        monkeypatch.setenv(name, value)
    armed = {}
    for incarnation in range(3):
        rank = InjectionPoints.from_env(1, 0, incarnation, tmp_path)
        armed[incarnation] = [order.step for order in rank._orders]
    assert armed == {0: [2], 1: [3], 2: []}


def test_a_flip_with_a_probability_comes_again_and_in_other_bits(tmp_path):
    """The order stays; each flip is recorded."""

    class Engine:
        def __init__(self):
            self.gradients = [torch.zeros(50), torch.zeros(70)]

        def local_gradients(self):
            return self.gradients

        def local_losses(self):
            return []

    points = InjectionPoints(0, [], run_dir=tmp_path)
    order = FaultCommand(fault="f/1", action="bitflip", probability=0.5, bit=3)
    points._orders, engine = [order], Engine()
    for step in range(40):
        points.corrupt(step, engine)
    struck = sum(int((one != 0).sum()) for one in engine.gradients)
    lines = history.read(tmp_path)
    assert 10 < len(lines) < 30 and struck > 8 and {line["kind"] for line in lines} == {"bitflip"}
