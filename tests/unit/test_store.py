"""The embedded control store: the contract, and a host in this process that is gone."""

from __future__ import annotations

import threading

import pytest

from megatron_ft.core import detector
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.runtime import store, watcher
from tests.store_contract import StoreContract
from tests.stores import DEADLINE_S, await_


@pytest.fixture
def served():
    server, port = store.host("127.0.0.1", 0)
    yield store.ControlStore(("127.0.0.1", port), "run", 30.0)
    del server


class TestEmbedded(StoreContract):
    """Over a TCPStore."""


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


def test_who_waits_is_told_that_the_host_is_gone():
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

    assert store.patient(away, interrupted=lambda: len(attempts) == 2) is None
    with pytest.raises(store.StoreGone, match="away"):
        store.patient(away, patience_s=0.0)
    assert store.patient(lambda: served.create("k", 1)) == 1


def test_who_ends_a_watcher_leaves_no_thread_in_torch(served):
    """One that is there when the interpreter ends, and whose store ends just then, would abort the process."""
    served.begin()
    before, heard = set(threading.enumerate()), threading.Event()
    ear = watcher.Watcher(served.clone(), lambda verdict: heard.set(), print)
    ear.start()
    served.append(store.NOTICES, detector.to_json(detector.Over()))
    assert heard.wait(DEADLINE_S)  # it waits for the next one now, or is about to
    ear.stop()
    await_(lambda: not set(threading.enumerate()) - before, "its threads have ended")
