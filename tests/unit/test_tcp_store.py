"""The embedded control store: the contract, and a lost host of the store, played in this process."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.key_lifetimes import Floor
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.host import agent_client
from megatron_ft.run import store
from megatron_ft.run.store import NOTICES, ControlStore, watcher
from megatron_ft.run.store.call_guard import Overdue
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.run.store.tcp_store import TcpStore
from megatron_ft.types import Exit, View
from tests.growth import FIRST, Changes
from tests.store_contract import StoreContract
from tests.stores import DEADLINE_S, await_


@pytest.fixture
def served():
    server, port = store.host("127.0.0.1", 0)
    yield store.ControlStore(("127.0.0.1", port), "run", 30.0)
    del server


class TestEmbedded(StoreContract):
    """The contract over a TCPStore."""


def test_a_port_in_use_is_named(served):
    with pytest.raises(LaunchError, match=f"port {served.address[1]} is in use"):
        store.host("127.0.0.1", served.address[1])


def test_an_address_may_be_text(served):
    served.set("key", 1)
    assert store.ControlStore(f"127.0.0.1:{served.address[1]}", "run", 30.0).get("key") == 1


def test_a_host_that_is_gone_is_an_error_at_once():
    server, port = store.host("127.0.0.1", 0)
    client = store.ControlStore(("127.0.0.1", port), "run", 30.0)
    del server
    for _ in range(3):
        with pytest.raises(store.StoreGone, match=f"control store 127.0.0.1:{port} is gone"):
            client.get("key")


def test_a_store_that_moves_while_the_old_one_uses_up_a_calls_time_is_gone(monkeypatch):
    """The caller asks again, and finds the new store."""
    client = TcpStore(("127.0.0.1", 1), 0.01)

    def call(operation, bound_s):
        assert bound_s > 0
        time.sleep(0.02)  # the length of the silence
        client._moves += 1
        raise Overdue

    monkeypatch.setattr(client._guard, "call", call)
    with pytest.raises(store.StoreGone, match="is gone"):
        client.get("key")


def test_a_client_that_waits_is_told_that_the_host_is_gone():
    server, port = store.host("127.0.0.1", 0)
    client = store.ControlStore(("127.0.0.1", port), "run", 10.0)
    assert client.wait("never", 0.01) is None
    del server
    with pytest.raises(StoreError, match="is gone"):
        client.wait("never", 3600.0)


def test_a_store_that_never_was_is_waited_for_and_then_named():
    server, port = store.host("127.0.0.1", 0)
    del server
    with pytest.raises(store.StoreGone, match=f"control store 127.0.0.1:{port} is gone"):
        store.ControlStore(("127.0.0.1", port), "run", 0.2)


def test_patience_ends_when_it_is_interrupted_or_used_up(served):
    attempts = []

    def away() -> None:
        attempts.append(1)
        raise store.StoreGone("away")

    with pytest.raises(store.StoreGone, match="away"):
        store.patient(away, interrupted=lambda: len(attempts) == 2)
    assert len(attempts) == 2
    with pytest.raises(store.StoreGone, match="away"):
        store.patient(away, patience_s=0.0)
    assert store.patient(lambda: served.create("k", 1)) == 1


def test_a_process_that_ends_a_watcher_leaves_no_thread_in_torch(served):
    """A thread that is there when the interpreter ends, and whose store ends just then, would abort the process."""
    served.begin()
    before, heard = set(threading.enumerate()), threading.Event()
    ear = watcher.Watcher(served.clone(), lambda verdict: heard.set(), print)
    ear.start()
    served.append(store.NOTICES, signals.to_json(signals.RunFinished()))
    assert heard.wait(DEADLINE_S)  # the watcher waits for the next one now, or is about to
    ear.stop()
    await_(lambda: not set(threading.enumerate()) - before, "its threads have ended")


@pytest.mark.slow
def test_the_store_is_as_small_after_2000_view_changes_as_after_20(served):
    """Late readers go on, all the same: the floor shows them which keys were deleted meanwhile."""
    changes = Changes(served)
    late = served.clone()
    late_watcher, late_group = [], CoordinationClient(late, 1, 60.0)
    changes.make(20)
    (keys, size), forgetful = changes.size(), len(changes.group._added) + len(changes.group._mine)
    changes.make(1980)
    keys_then, size_then = changes.size()
    assert keys_then <= 1.1 * keys and size_then <= 1.1 * size, (keys, size, keys_then, size_then)
    assert len(changes.group._added) + len(changes.group._mine) <= forgetful

    newest = View.from_json(served.get("view/2000"))
    epoch = 1
    while (view := late_group.look_at_view(epoch)) is not None:
        epoch = view.epoch + 1
    assert epoch == 2001
    agent, said = agent_client.AgentClient(served.clone(), {}), []
    assert agent.newest_view(FIRST) == newest
    agent.listen()
    await_(lambda: said.extend(agent.news()) or signals.ViewAgreed(2000) in said, "the newest view is heard of")
    assert {signal.exit.group for signal in said if isinstance(signal, signals.RankExited)} == {1}
    listening = watcher.Watcher(served.clone(), late_watcher.append, lambda error: None)
    listening.start()
    stale = ControlStore(served.address, served.run_id, 30.0)
    stale.append(NOTICES, signals.to_json(signals.RunFinished()))
    await_(lambda: signals.RunFinished() in late_watcher, "what a process says that begins now is heard")
    listening.stop()
    assert GroupFailed(1, str(Exit(1, 0, 4242, "node7", "SIGKILL", None)), 999, ended=True) in late_watcher
    await_(lambda: agent.news() == [signals.RunFinished()], "the agent hears it, too")
    agent.close()


def test_a_reader_that_was_stopped_over_many_views_hears_all_that_matters(served):
    """The reader's own place in the log has been deleted when it looks again."""
    changes, heard = Changes(served), []
    changes.make(4)
    listening = watcher.Watcher(served.clone(), heard.append, lambda error: None)
    listening._index = 1
    changes.make(40)
    listening.start()
    await_(lambda: signals.ViewAgreed(44) in heard, "the newest view is heard of")
    listening.stop()
    assert [verdict.incarnation for verdict in heard if isinstance(verdict, GroupFailed)][-1] == 21


def test_a_run_leaves_nothing_behind_that_is_forgotten(served):
    Changes(served).make(10)
    other = ControlStore(served.address, "run2", 30.0)
    other.set("key", 1)
    served.forget()
    assert served.listed() == [] and served._client.get("run/run") is None and other.get("key") == 1


def test_the_floor_is_never_lowered(served):
    assert served.raise_floor(Floor(5, 10)) == Floor(5, 10)
    assert served.raise_floor(Floor(4, 9)) == Floor(5, 10) == served.floor()
    assert served.raise_floor(Floor(4, 12)) == Floor(5, 12) == served.floor()
