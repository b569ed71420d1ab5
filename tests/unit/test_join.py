"""The users whose command ``megatron-ft join`` runs."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace

import pytest

from megatron_ft.config.schema import resolve
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.host import join, operator_requests
from megatron_ft.host.node_agent import Agent
from megatron_ft.host.operator_requests import host_key
from megatron_ft.record import history
from megatron_ft.run import store
from megatron_ft.run.store import Log
from megatron_ft.utils import wait_notice
from megatron_ft.utils.auth import secret

NOBODY = 65534


@pytest.fixture
def run_dir(tmp_path):
    run = {"run_id": "run", "store_address": "127.0.0.1:1", "job": "only", "hosts": 1, "host": "here", "directory": "/"}
    settings = resolve({}, groups=2).to_json()
    (tmp_path / "config.json").write_text(json.dumps({**run, **settings, "command": ["evil.py", "\x1b[2J"]}))
    (tmp_path / "config.json").chmod(0o644)
    return tmp_path


def test_the_command_of_another_user_is_refused_and_root_is_warned(run_dir, capsys):
    running = join.find(run_dir)
    join.check_owner(running, os.geteuid())
    assert capsys.readouterr().err == ""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(run_dir / "config.json", NOBODY, NOBODY)
    running = join.find(run_dir)
    with pytest.raises(
        LaunchError, match="config.json belongs to user nobody, and its command would run as 4711; join as"
    ):
        join.check_owner(running, 4711)
    join.check_owner(running, NOBODY)
    assert capsys.readouterr().err == ""
    join.check_owner(running, 0)
    assert "its command would run as root: evil.py \\x1b[2J" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o666, "every user may write to .* chmod go-w"),
        (0o646, "every user may write to .* chmod o-w"),
        (0o664, "every user of its group may write to .* chmod g-w"),
    ],
)
def test_a_command_that_other_users_may_change_is_refused(run_dir, mode, said):
    (run_dir / "config.json").chmod(mode)
    with pytest.raises(LaunchError, match=said):
        join.enter(join.find(run_dir), 1, None)


def test_a_run_lets_no_other_user_write_to_its_command_whatever_the_umask(run_dir):
    """Both that write that file: the agent, and what says where the control store has moved to."""
    words, place = SimpleNamespace(command=["train.py"]), SimpleNamespace(job="only", hosts=1)
    hosts = SimpleNamespace(run_id="run", place=place, store_address="127.0.0.1:1", name=lambda: "here")
    run = {"_run_dir": run_dir, "_options": words, "_hosts": hosts, "_config": resolve({}, groups=2)}
    before = os.umask(0o002)
    try:
        for write in (
            lambda: Agent._write_config(SimpleNamespace(**run)),
            lambda: operator_requests.write_store_address(run_dir, "etcd://a:1", print),
        ):
            write()
            join.check_owner(join.find(run_dir), os.geteuid())
            assert (run_dir / "config.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
    assert json.loads((run_dir / "config.json").read_text())["store_address"] == "etcd://a:1"


def test_the_store_of_a_run_is_the_one_of_the_newest_claim(run_dir, monkeypatch):
    """The host that took the store over last may be lost before it has written to config.json."""
    assert join.find(run_dir).store == "127.0.0.1:1"
    log = Log(run_dir, "run", secret.make(run_dir))
    log.create(Claim(0, "run", 0, "127.0.0.1:1"))
    log.create(store_failover.taken_over(log.read()[-1], 1, "127.0.0.2:2", "host 0 is lost"))
    assert join.find(run_dir).store == "127.0.0.2:2"
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    (run_dir / secret.FILE).unlink()
    assert join.find(run_dir).store == "127.0.0.1:1", "as far as is known to another user"


def test_a_host_that_comes_while_the_store_moves_asks_until_another_host_has_it(run_dir, monkeypatch):
    """The new store is claimed, and filled by the others, only after the first attempt has failed."""
    log = Log(run_dir, "run", secret.make(run_dir))
    log.create(Claim(0, "run", 0, "127.0.0.1:1"))
    server, port = store.host("127.0.0.1", 0)
    there = store.ControlStore(("127.0.0.1", port), "run", 30.0, secret=secret.load(run_dir))
    moves = iter(
        [
            lambda: log.create(store_failover.taken_over(log.read()[-1], 1, f"127.0.0.1:{port}", "host 0 is lost")),
            there.begin,
            lambda: there.set(host_key(0), {"address": "127.0.0.1"}),
        ]
    )
    find, before = join.find, join.find(run_dir)
    monkeypatch.setattr(join, "find", lambda *given, **named: (next(moves)(), find(*given, **named))[1])
    newcomer = join.enter(before, 0, "127.0.0.1")
    assert newcomer.place.rank == 1 and newcomer.running.store == f"127.0.0.1:{port}"
    assert next(moves, None) is None, "each of them was needed"
    del server


def test_a_run_that_cannot_be_reached_is_reported_as_such(run_dir, monkeypatch):
    secret.make(run_dir)
    monkeypatch.setattr(join, "_MOVES_S", 0.0)
    with pytest.raises(StoreError, match="cannot be joined since 0 s: control store 127.0.0.1:1 is gone"):
        join.enter(join.find(run_dir), 0, "127.0.0.1")


def test_a_spare_host_that_waits_says_for_which_host(run_dir, monkeypatch):
    """It waits until host 0 has begun the run, and then until all hosts have written their addresses."""
    said = {"host 0 to begin the run": threading.Event(), "host 1 of the run": threading.Event()}
    first, second = said.values()
    answers = iter([{}, None, {}, {}])  # host 0 is there, host 1 is not; both are

    class Store:
        def wait(self, key, timeout_s):
            answer = next(answers)
            return answer if answer is None or key == host_key(0) or second.wait(60) else None

        def check_begun(self):
            pass

        close = check_begun

    def find(directory):
        assert first.wait(60)
        return SimpleNamespace(run_id="run", hosts=2, job="new", store="n0:1", open=lambda timeout_s: Store())

    monkeypatch.setattr(join, "find", find)
    monkeypatch.setattr(wait_notice, "say", lambda line: [event.set() for text, event in said.items() if text in line])
    config = resolve({"fault_tolerance": {"detector": {"stall_notice_s": 0.01}}}, groups=2)
    assert join.await_launch(run_dir, None, "new", config).hosts == 2
    assert next(answers, "none left") == "none left"


@pytest.mark.parametrize("closing", ["stop", "end"])
def test_a_run_that_was_started_again_in_its_directory_is_joined_and_stopped(run_dir, monkeypatch, closing):
    told = []
    monkeypatch.setattr(join, "_numbered", lambda *_: "its number")
    monkeypatch.setattr(operator_requests, "_store", lambda run_dir: "its store")
    monkeypatch.setattr(operator_requests.watcher, "announce", lambda store, signal: told.append(signal))
    history.append(run_dir, "view", epoch=0, live=[0, 1], lost={}, joined=[])
    history.append(run_dir, closing, reason="asked", step=3)
    with pytest.raises(LaunchError, match="is over; no agent of it is left to ask"):
        operator_requests.stop(run_dir, "why")
    with pytest.raises(LaunchError, match="is over; there is nothing to join"):
        join.enter(join.find(run_dir), 1, None)
    history.append(run_dir, "start", run_id="run")
    assert join.enter(join.find(run_dir), 1, "127.0.0.1") == "its number"
    operator_requests.stop(run_dir, "why")
    (asked,) = told
    assert asked.groups == (0, 1)
