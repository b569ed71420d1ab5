"""The calls that torch's flight recorder has recorded: gloo's real ones, and entries in the form of NCCL's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_ft.core.detection.collective_stalls import Call
from megatron_ft.run.collectives import flight_recorder
from megatron_ft.utils import deadline
from tests import support

STUCK = """
import json, os, sys, torch, torch.distributed as dist
from megatron_ft.run.collectives import flight_recorder
from tests.stores import await_

rank, directory = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
tp = dist.new_group([0, 1], group_desc="tp")
for _ in range(3):
    dist.all_reduce(torch.ones(4), group=tp)
if rank == 0:
    work = dist.all_reduce(torch.ones(7), group=tp, async_op=True)  # the other rank never gets there
    members = {tp.group_name: (0, 1)}
    for flight_recorder._ask in (flight_recorder._ask, lambda handler: None):  # the latter: torch 2.11 with CUDA
        found = lambda: flight_recorder.calls(flight_recorder.entries(60), members)
        await_(lambda: [call.ended for call in found()] == [True, True, True, False], "the first three end")
        calls = found()
        print(json.dumps({
            "calls": [[call.name, call.number, call.sizes] for call in calls],
            "same_group": all(call.group == tp.group_name for call in calls),
            "entered": list(flight_recorder.entered(calls).values()),
            "lines": flight_recorder.lines(calls, {tp.group_name: "tp"}, 2),
        }), flush=True)
open(f"{directory}/{rank}", "w").close()
await_(lambda: os.path.exists(f"{directory}/{1 - rank}"), "the other rank")
os._exit(0)
"""


@pytest.mark.skipif(
    "fr_trace_json" not in flight_recorder._c10d()._get_handler_names(), reason="this torch records NCCL only"
)
def test_a_rank_that_waits_is_seen_to_wait_by_its_handler_and_by_its_function(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STUCK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=support.ROOT
        )
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=support.TIMEOUT_S)[0] for rank in ranks]
    handler, function = (json.loads(line) for line in output[0].splitlines() if line.startswith("{"))
    for said in (handler, function):
        calls = [["all_reduce", number, "[[4]]"] for number in (1, 2, 3)]
        assert said["calls"] == [*calls, ["all_reduce", 4, "[[7]]"]]
        assert said["same_group"] and said["entered"] == [4]
        assert said["lines"] == ["tp all_reduce #3 [[4]] ended", "tp all_reduce #4 [[7]] not ended"]


def entry(name: str, state: str = "scheduled", retired: bool = False, p2p: bool = False) -> dict:
    return {
        "process_group": ["5", "pp"],
        "profiling_name": name,
        "is_p2p": p2p,
        "collective_seq_id": 7,
        "p2p_seq_id": 3,
        "state": state,
        "retired": retired,
        "input_sizes": [[2]],
        "time_created_ns": 1,
    }


def call_of(raw: dict) -> Call:
    (found,) = flight_recorder.calls([raw], {"5": (4, 6)})
    return found


def test_the_forms_of_nccl():
    assert call_of(entry("nccl:all_reduce", "started")) == Call("5", 7, "all_reduce", "[[2]]")
    assert call_of(entry("nccl:all_reduce", "completed", retired=True)).ended
    assert not call_of(entry("nccl:all_reduce", "started", retired=True)).ended  # it has timed out
    assert call_of(entry("nccl:recv 0<-1", p2p=True)) == Call("5", 3, "recv", "[[2]]", p2p=True, peer=6)
    assert call_of(entry("nccl:send 1->0", p2p=True)).peer == 4


def test_the_calls_around_the_oldest_that_waits_are_kept():
    calls = [Call("1", number, "all_reduce", ended=number < 60) for number in range(100)]
    kept = flight_recorder.around(calls)
    assert kept[0].number < 60 <= kept[-1].number and len(kept) < 40
    assert flight_recorder.around(calls[:60])[-1].number == 59


def test_a_recorder_that_fails_or_hangs_lists_nothing(monkeypatch):
    class Hangs:
        def __init__(self, *_):
            pass

        def within(self, timeout_s):
            return deadline.Outcome(abandoned=True)

    monkeypatch.setattr(flight_recorder, "_entries", lambda: 1 // 0)
    assert flight_recorder.entries() == []
    monkeypatch.setattr(deadline, "Call", Hangs)
    assert flight_recorder.entries() == []
