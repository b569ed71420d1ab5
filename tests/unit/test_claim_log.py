"""The claim log in the run directory, and clients that follow it from one store to the next."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megatron_ft.config.rank_env import CLAIMS
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.errors import StoreError
from megatron_ft.run.store import (
    ControlStore,
    Fenced,
    Locator,
    Log,
    LogAway,
    StoreLostMemory,
    claim_log,
    patient,
)
from megatron_ft.run.store.client import Claimant, CoordinationClient
from megatron_ft.run.store.tcp_store import TcpStore
from megatron_ft.types import View
from megatron_ft.utils import shared_file
from tests.stores import TcpServer, await_
from tests.support import SECRET

OLD, NEW = "127.0.0.1:1", "127.0.0.2:2"
FIRST = Claim(0, "run", 0, OLD, reason="the run begins")


@pytest.fixture
def servers():
    made = [TcpServer(), TcpServer()]
    yield made
    for server in made:
        server.kill()


def log_of(directory, run_id: str = "run") -> Log:
    return Log(directory, run_id, SECRET)


def test_a_claim_is_made_once_and_read_by_all(tmp_path):
    one, other = log_of(tmp_path), log_of(tmp_path)
    assert one.read() == () and one.create(FIRST)
    assert not other.create(Claim(0, "run", 5, NEW)) and other.read() == (FIRST,)
    second = store_failover.taken_over(FIRST, 1, NEW, "host 0 is lost")
    assert [log.create(second) for log in (one, other)] == [True, False]
    third = store_failover.fence(second, [(0, 0), (3, 2)], 1, "silent")
    assert other.create(third) and one.read() == other.read() == (FIRST, second, third)


def test_claims_of_another_run_and_forged_ones_are_never_followed(tmp_path):
    """The directory may have been restored from a backup, or be written by another process."""
    log_of(tmp_path, "earlier").create(Claim(0, "earlier", 7, NEW))
    log = log_of(tmp_path)
    assert log.read() == () and log.create(FIRST) and log.read() == (FIRST,)
    forger = Log(tmp_path / "elsewhere", "run", type(SECRET)("another secret" * 4))
    (tmp_path / "elsewhere").mkdir()
    forged = store_failover.taken_over(FIRST, 9, NEW, "")
    assert forger.create(FIRST) and forger.create(forged)
    name = "claim-run-000001.json"
    (tmp_path / CLAIMS / name).write_bytes((tmp_path / "elsewhere" / CLAIMS / name).read_bytes())
    with pytest.raises(LogAway, match="claim-run-000001.json is damaged or forged"):
        log.read()
    (tmp_path / CLAIMS / "claim-run-000001.json").unlink()
    moved = json.loads((tmp_path / CLAIMS / "claim-run-000000.json").read_text())
    (tmp_path / CLAIMS / "claim-run-000001.json").write_text(json.dumps(moved))
    with pytest.raises(LogAway, match="damaged or forged"):
        log.read()  # a valid claim under another number


def test_a_process_of_an_earlier_run_that_wakes_up_makes_no_claim_in_the_directory_of_the_next_one(tmp_path):
    """The next run has put the claims aside."""
    frozen = log_of(tmp_path)
    frozen.create(FIRST)
    frozen.read()
    (tmp_path / CLAIMS).rename(tmp_path / "aside")
    for call in (frozen.read, lambda: frozen.create(store_failover.taken_over(FIRST, 1, NEW, "host 0 is silent"))):
        with pytest.raises(LogAway, match="given to another run or restored from a backup"):
            call()
    assert not (tmp_path / CLAIMS).exists()


def test_claims_that_were_made_after_a_backup_was_restored_do_not_mix_with_those_before_it(tmp_path):
    before, after = log_of(tmp_path), log_of(tmp_path)
    before.create(FIRST)
    after.read()
    second = store_failover.taken_over(FIRST, 1, NEW, "host 0 is silent")
    before.create(second)
    before.read()
    (tmp_path / CLAIMS / "claim-run-000001.json").unlink()
    with pytest.raises(LogAway, match="restored from a backup"):
        before.create(store_failover.fence(second, [(0, 0)], 1, "silent"))
    other = store_failover.taken_over(FIRST, 2, "127.0.0.3:3", "host 0 is silent")
    assert after.create(other) and after.create(store_failover.fence(other, [(1, 0)], 2, "silent"))
    with pytest.raises(LogAway, match="follows another claim than the one that was read here"):
        before.read()


def test_a_file_system_that_hangs_or_refuses_ends_every_call(tmp_path, monkeypatch):
    """A creation that was given up takes effect later, and is found."""
    log = Log(tmp_path, "run", SECRET, timeout_s=0.05)
    back, create = threading.Event(), shared_file.create
    monkeypatch.setattr(shared_file, "create", lambda *arguments: back.wait(60) and create(*arguments))
    with pytest.raises(LogAway, match="has not answered for 0.05 s"):
        log.create(FIRST)
    with pytest.raises(LogAway, match="has not answered since it was asked last"):
        log.read()
    back.set()
    await_(
        lambda: (tmp_path / CLAIMS).is_dir() and os.listdir(tmp_path / CLAIMS) == ["claim-run-000000.json"],
        "it is made",
    )
    log._stuck.join(60)
    assert log_of(tmp_path).read() == (FIRST,)
    (tmp_path / "file").write_text("")
    with pytest.raises(LogAway, match="cannot be used"):
        log_of(tmp_path / "file").read()


def test_a_seat_that_is_fenced_makes_no_claim(tmp_path):
    locators = [Locator(log_of(tmp_path), OLD) for _ in range(3)]
    locators[0].create(FIRST)
    made = Claim(1, "run", 0, OLD, frozenset({(2, 0)}), 0, "silent")
    assert locators[0].fence([(2, 0)], (0, 0), 0, "silent", since=1) == ()
    assert locators[1].fence([(2, 0)], (1, 0), 1, "silent too", since=1) == (made,), "it decides anew, with that claim"
    assert locators[1].fence([(2, 0)], (1, 0), 1, "silent too", since=2) == (), "these seats are fenced already"
    with pytest.raises(Fenced, match="group 2 is left out of the run by claim 1 of host 0: silent"):
        locators[2].fence([(0, 0), (1, 0)], (2, 0), 2, "they are", since=1)
    assert log_of(tmp_path).read() == (FIRST, made)


def test_a_claim_that_came_first_is_followed_by_the_process_own_claim(tmp_path):
    """Another process makes a claim between this one's look and its own claim."""
    first, second = (Locator(log_of(tmp_path), OLD) for _ in range(2))
    first.create(FIRST)
    second.poll()
    first.create(store_failover.taken_over(FIRST, 1, NEW, "host 0 is lost"))
    assert not second.create(store_failover.taken_over(FIRST, 2, "127.0.0.3:3", "host 0 is lost"))
    assert (second.newest, second.text, second.address) == (1, NEW, ("127.0.0.2", 2))
    assert second.fence([(0, 0)], (2, 0), 2, "silent", since=0) == ()
    assert first.poll() and first.claims[-1].address == NEW and first.claims[-1].fenced == {(0, 0)}


def test_a_log_that_is_asked_for_is_read_and_one_that_hangs_does_not_answer(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claim_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    locator = Locator(log_of(tmp_path), OLD)

    def answers_after(seconds: float) -> bool:
        clock.now += seconds
        return locator.answers()

    assert not locator._is_read_due(), "nobody asks"
    assert answers_after(0.0) and answers_after(1.9) and locator._is_read_due()
    assert not answers_after(0.2)
    locator.poll()
    assert not locator._is_read_due() and answers_after(1.9) and not answers_after(0.2)
    assert answers_after(60.0), "what was asked before says nothing"
    locator.follow(tmp_path / "told")
    log_of(tmp_path).create(FIRST)
    await_(lambda: locator.newest == 0, "it is read although nobody has told of it")


def test_a_group_waits_no_longer_than_its_patience_for_a_log_that_does_not_answer():
    log = MagicMock()
    agreement = CoordinationClient(MagicMock(), 0, 0.0, claimant=Claimant(log, (0, 0), 0))
    log.answers.return_value = False
    assert not agreement.log_answers()
    log.answers.return_value = True
    assert agreement.log_answers()
    log.answers.return_value = False
    assert not agreement.log_answers()
    with pytest.raises(StoreError, match="no group can be left out of the run since 0 s"):
        agreement.log_answers()


def test_a_client_that_waits_at_the_old_store_moves_although_that_store_answers(tmp_path, servers):
    old, new = (f"127.0.0.1:{server.port}" for server in servers)
    leading, locator = (Locator(log_of(tmp_path), old) for _ in range(2))
    leading.create(Claim(0, "run", 0, old))
    store = ControlStore(locator, "run", 30.0, secret=SECRET)
    store.begin()
    told, heard, met = tmp_path / "told", threading.Event(), []
    locator.follow(told, heard.set)

    def wait() -> None:
        try:
            store.clone().wait("key", 600.0)
        except StoreLostMemory as error:
            met.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    await_(
        lambda: any(client._guard.connected for client in locator._clients if client is not store._client), "it waits"
    )
    leading.create(store_failover.taken_over(leading.claims[-1], 1, new, "host 0 is lost"))
    shared_file.write(told, "1")
    assert heard.wait(60)
    thread.join(60)
    assert met and new in str(met[0]), "the store of the newest claim is empty"
    store.restore(own={"key": 1})
    assert store.get("key") == 1 and ControlStore(servers[1].address, "run", 30.0, secret=SECRET).get("key") == 1
    assert ControlStore(servers[0].address, "run", 30.0, secret=SECRET).get("key") is None


def test_a_group_takes_in_new_claims_once_and_does_nothing_after_one_that_leaves_it_out(tmp_path):
    log, store = Locator(log_of(tmp_path), OLD), MagicMock()
    log.create(FIRST)
    claimants = [Claimant(Locator(log_of(tmp_path), OLD), (group, 0), 0) for group in (0, 1)]
    groups = [CoordinationClient(store, group, 0.0, claimant=claimant) for group, claimant in enumerate(claimants)]
    assert groups[0].fence([(2, 0)], "silent") == ()
    assert [claim.number for claim in groups[1].fence([(2, 0)], "silent")] == [0, 1]
    assert groups[1].fence([(2, 0), (0, 0)], "both are silent") == ()
    store.reset_mock()
    with pytest.raises(Fenced, match="group 0 is left out of the run by claim 2"):
        groups[0].fence([(1, 0)], "silent")
    with pytest.raises(Fenced):
        groups[0].get("key")
    with pytest.raises(Fenced):
        groups[0].clone().get("key")
    assert not store.get.called
    assert CoordinationClient(store, 3, 0.0).fence([(1, 0)], "silent") == (), "a run without a log"


def test_a_view_is_not_written_to_a_store_that_has_forgotten_the_basis_of_the_decision(servers):
    """A view that was adopted meanwhile is put back before anything else."""
    store = ControlStore(servers[0].address, "run", 30.0, secret=SECRET)
    store.begin()
    group, first = CoordinationClient(store, 0, 60.0), first_view(3)
    group.adopted(first)
    decided_in, following = group.memory, replace(first, epoch=1, live=(0, 1), reason="group 2 is lost")
    servers[0].kill()
    servers[0].start()
    other = store.clone()
    patient(lambda: group.restore(other), patience_s=60.0)
    assert group.memory != decided_in and group.propose(following, decided_in) is None
    assert (
        patient(lambda: store.get("view/1"), patience_s=60.0) is None and View.from_json(store.get("view/0")) == first
    )
    store.close()
    with store.only_in(decided_in), pytest.raises(StoreLostMemory):
        store.get("view/0")  # over a new connection
    assert group._stands(following.to_wire(), decided_in) == following
    assert View.from_json(store.get("view/1")) == following, "its answer came from the store that is lost"


def test_a_client_that_connects_to_a_store_that_is_taken_over_meanwhile_gives_up_the_attempt(tmp_path, servers):
    """The port of a standby host is open: a client that connects there is neither refused nor answered."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        locator = Locator(log_of(tmp_path), f"127.0.0.1:{silent.getsockname()[1]}")
        client, asked = TcpStore(locator, 600.0), []
        thread = threading.Thread(target=lambda: asked.append(patient(lambda: client.get("key"))))
        thread.start()
        await_(lambda: silent.accept() and silent.accept(), "it has probed, and connects")
        locator.create(Claim(0, "run", 0, "{}:{}".format(*servers[1].address)))
        thread.join(60)
        assert asked == [None], "the store of the claim has answered"
