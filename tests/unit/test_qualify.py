"""The parts of ``megatron-ft qualify`` that need no process: outcomes, devices, faults, refusals."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_ft import cli
from megatron_ft.cluster.doctor import host_orders, meeting
from megatron_ft.cluster.faults import process_lookup
from megatron_ft.cluster.qualify import device_facts, device_seats, host_part, qualification, training_checks
from megatron_ft.cluster.qualify.device_seats import MULTI_RANK, Seat
from megatron_ft.cluster.qualify.host_part import HostPart
from megatron_ft.cluster.qualify.outcomes import (
    CHECKS,
    FAILED,
    NOT_HERE,
    PROVEN,
    CheckFailed,
    Measured,
    NotHere,
    Qualification,
)
from megatron_ft.errors import LaunchError
from megatron_ft.record import history
from megatron_ft.types import given
from megatron_ft.utils.auth.secret import Secret
from megatron_ft.utils.process_status import start_of
from tests.stores import await_


def host(gpus: int = 0, nccl=(2, 29, 7), mig=()) -> dict:
    return {"gpus": [{"name": "a GPU"}] * gpus, "nccl": list(nccl) if gpus else [], "mig": list(mig)}


def failing():
    raise CheckFailed("wrong sums")


def missing():
    raise NotHere("no GPU")


def made(**checks) -> Qualification:
    found = Qualification()
    for name, check in checks.items():
        found.make(name.replace("__", "."), check)
    return found


def test_the_exit_code_is_1_only_when_a_check_failed():
    fine = made(gloo__init=lambda: ("3 processes", []), nccl__init=missing)
    assert fine.exit_code == 0 and fine.verdict() == "2 checks: 1 proven, 0 failed, 1 not possible here"
    bad = made(gloo__init=failing)
    assert bad.exit_code == 1 and bad.verdict().endswith("failed: gloo.init")


def test_every_check_of_a_part_is_listed_when_the_part_cannot_be_checked():
    found = made(nccl__init=lambda: ("2 processes", [Measured("first", 1.0, "s")]))
    for part in ("environment", "gloo", "nccl", "training"):
        found.skip(part, "no GPU")
    assert [check.name for check in found.in_order()] == list(CHECKS)
    document = found.to_json({"groups": 2})
    assert {row["outcome"] for row in document["checks"]} == {PROVEN, NOT_HERE}
    assert all(row["reason"] and row["what"] for row in document["checks"])
    (first,) = [row for row in document["checks"] if row["name"] == "nccl.init"]
    assert first["measured"] == [{"what": "first", "value": 1.0, "unit": "s"}]


def test_the_table_has_one_row_for_checks_that_cannot_be_made_for_one_reason():
    found = made(gloo__init=failing)
    found.skip("nccl", "no GPU")
    output = io.StringIO()
    found.table("qualify").show(Console(file=output, width=400))
    assert output.getvalue().count("no GPU") == 1 and "nccl.init, all_reduce" in output.getvalue()
    assert "wrong sums" in output.getvalue() and FAILED in output.getvalue()


@pytest.mark.parametrize(
    "gpus, groups",
    [([0], 3), ([1], 3), ([2], 2), ([8, 8], 16), ([1, 1], 2), ([0, 0, 0, 0], 4), ([8, 0], 3)],
)
def test_without_an_option_there_is_one_group_for_each_gpu(gpus, groups):
    assert device_seats.usual_groups(gpus) == groups


SEATS = {
    "no GPU": (3, [host()], [Seat(0)] * 3, "no GPU"),
    "a GPU for each": (2, [host(2)], [Seat(0, "cuda:0"), Seat(0, "cuda:1")], ""),
    "two hosts": (2, [host(1), host(1)], [Seat(0, "cuda:0"), Seat(1, "cuda:0")], ""),
    "one GPU, NCCL 2.30": (2, [host(1, (2, 30, 7))], [Seat(0, "cuda:0", MULTI_RANK)] * 2, ""),
    "MIG slices": (
        2,
        [host(1, mig=["MIG-a", "MIG-b"])],
        [Seat(0, "cuda:0", {"CUDA_VISIBLE_DEVICES": name}) for name in ("MIG-a", "MIG-b")],
        "",
    ),
    "one GPU": (
        2,
        [host(1)],
        [Seat(0, "cuda:0")] * 2,
        "2 groups share 1 GPU, which NCCL 2.29.7 refuses: it takes NCCL 2.30 (NCCL_MULTI_RANK_GPU_ENABLE), 2 MIG slices "
        "(here: 0) or more GPUs",
    ),
    "no NCCL": (1, [host(1, ())], [Seat(0, "cuda:0")], "this torch was built without NCCL"),
}


@pytest.mark.parametrize("groups, hosts, seats, reason", SEATS.values(), ids=SEATS)
def test_groups_get_devices_and_nccl_a_reason_why_not(groups, hosts, seats, reason):
    assert device_seats.seats(groups, hosts) == (seats, reason)


def test_mig_slices_are_read_from_what_nvidia_smi_lists():
    listed = """GPU 0: NVIDIA H200 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.18gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.18gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
"""
    assert device_facts.slices_in(listed) == [
        "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
        "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
    ]


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_the_faults_of_a_seed_are_those_of_different_groups_and_both_kinds(groups):
    faults = training_checks.draw(groups, 7)
    assert faults == training_checks.draw(groups, 7) != training_checks.draw(groups, 8)
    assert {fault["kind"] for fault in faults} == {"kill", "stop"}
    victims = [fault["group"] for fault in faults]
    assert len(set(victims)) == len(victims) and max(victims) < groups
    assert max(fault["step"] for fault in faults) < training_checks.STEPS - 80, "there is time to come back"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--groups", 1], "--groups is 1 and must be 2 or more"),
        (["--gpus", -1], "--gpus is -1 and must be 0 (only the CPU) or more"),
        (["--json", "/nowhere/out.json"], "there is no directory /nowhere"),
        (["--directory", "/nowhere"], "--directory /nowhere is not a directory on this host"),
        (["--hosts", 2, "--host-rank", 0, "--store", "127.0.0.1:1"], "--directory is missing; several hosts need one"),
    ],
)
def test_impossible_options_are_refused_before_any_process_starts(capsys, options, words):
    assert cli.main(["qualify", *map(str, options)]) == 2
    assert words in capsys.readouterr().err


def test_hosts_take_orders_from_nobody_who_only_listens_at_the_address_of_host_0(tmp_path, monkeypatch, capsys):
    """Without MEGATRON_FT_SECRET and with --store, the secret is in the shared directory."""
    monkeypatch.delenv("MEGATRON_FT_SECRET", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()[:2]
    where = meeting.Meeting(2, 0, store=(host, port), directory=tmp_path)
    stranger = host_orders.Hub(listener, where, given(meeting.with_secret(where).secret))
    own = ["qualify", "--hosts", "2", "--host-rank", "1", "--store", f"{host}:{port}", "--directory", str(tmp_path)]
    try:
        assert cli.main([*own, "--patience-s", "0"]) == 2
        assert "No such file" in capsys.readouterr().err, "host 0 has not begun"
        with meeting.announced(replace(where, secret=Secret.new(), secret_by_file=True), listener):
            assert cli.main([*own, "--patience-s", "0"]) == 2
        assert "closed the connection" in capsys.readouterr().err and not stranger.host_records
    finally:
        stranger.close()


def test_hosts_meet_at_a_given_address_with_a_secret_from_the_shared_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRON_FT_SECRET", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()[:2]
    where = meeting.Meeting(2, 0, store=address, directory=tmp_path, secret_by_file=True)
    ends = []
    other = threading.Thread(target=lambda: ends.append(host_orders.attend(replace(where, rank=1), HostPart())))
    other.start()
    with qualification._hub(where) as (hub, _):
        assert sorted(hub.host_records) == [0, 1]
        hub.end(0, "fine")
    other.join()
    assert ends == [(0, "fine")] and list(tmp_path.iterdir()) == []


class Echo(host_orders.Part):
    failures = (OSError,)

    def repeat(self, word: str) -> dict:
        if word == "nothing":
            raise OSError("there is nothing")
        return {"word": word}

    def _own(self) -> dict:
        raise AssertionError("it is no order")


def test_a_process_carries_out_the_orders_of_its_part_and_nothing_else():
    def served(*orders: dict) -> tuple:
        own, its = map(meeting.Channel, socket.socketpair())
        for order in orders:
            own.send(order)
        try:
            return host_orders.serve(its, Echo()), [own.receive(5.0) for _ in orders[:-1]]
        finally:
            own.close()

    said = [
        {"do": "repeat", "word": "a"},
        {"do": "repeat", "word": "nothing"},
        {"do": "end", "code": 3, "line": "over"},
    ]
    assert served(*said) == ((3, "over"), [{"word": "a"}, {"failed": "OSError: there is nothing"}])
    for none in ("_own", "__class__", "leave", "listens", "silent_s", "clock"):
        with pytest.raises(LaunchError, match=f"an order that is none: '{none}'"):
            served({"do": none})


def test_a_member_that_is_silent_and_one_that_has_ended_are_told_apart(monkeypatch):
    program = "import os, socket, sys; end = socket.socket(fileno=int(sys.argv[2])); line = end.recv(99); "
    program += "line or os._exit(1); b'wait' in line and end.recv(99); print('why', flush=True); os._exit(7)"
    monkeypatch.setattr(host_part, "MEMBER", [sys.executable, "-c", program])
    member = host_part._Member({})
    try:
        member.tell({"do": "wait"})
        assert member.answer(time.monotonic() + 0.1) == {"failed": "no answer in time", "lost": True}
    finally:
        member.kill()
    member = host_part._Member({})
    member.tell({"do": "end"})
    answer = member.answer(time.monotonic() + 60.0)
    assert answer["failed"].startswith("its process ended with exit code 7") and answer["lost"]
    member.kill()


def test_a_rank_that_has_stopped_itself_is_killed_or_goes_on_after_a_while(tmp_path, monkeypatch):
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); print('on', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", stops], stdout=subprocess.PIPE, text=True) as process:
        rank = process_lookup.Rank(process.pid, start_of(process.pid), group=1, position=0)
        monkeypatch.setattr(process_lookup, "find", lambda run_dir, group, position=0: rank if group == 1 else None)
        monkeypatch.setattr(host_part, "_STOP_S", 0.0)
        await_(lambda: rank.is_stopped, "it has stopped itself")
        fault, me = {"kind": "stop", "group": 1, "step": 3, "point": "gate"}, os.getpid()
        assert not host_part._struck(tmp_path, {**fault, "group": 0}, me)
        assert not host_part._struck(tmp_path, fault, me + 1), "another agent's rank"
        assert host_part._struck(tmp_path, fault, me)
        assert process.stdout.readline() == "on\n"
        kill = {**fault, "kind": "kill", "step": 9}
        assert not host_part._struck(tmp_path, kill, me), "it has not got there"
        process.send_signal(signal.SIGSTOP)
        await_(lambda: rank.is_stopped, "it has stopped again")
        monkeypatch.setattr(host_part, "_STOP_S", 3600.0)
        assert host_part._struck(tmp_path, fault, me) and rank.is_stopped, "the next fault may come meanwhile"
        assert host_part._struck(tmp_path, kill, me) and process.wait(60) == -signal.SIGKILL
    said = [(line["group"], line["signal"], line["point"]) for line in history.read(tmp_path)]
    assert said == [*[(1, "SIGSTOP", "gate, step 3")] * 2, (1, "SIGKILL", "gate, step 9")]
