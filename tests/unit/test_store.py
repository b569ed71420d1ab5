"""The control store: compare-and-set, waiting, logs without holes, a host that is gone."""

from __future__ import annotations

import threading

import pytest

from megatron_ft.core import detector
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.runtime import store, watcher
from megatron_ft.types import Exit


@pytest.fixture
def served():
    server, port = store.host("127.0.0.1", 0)
    yield store.ControlStore(("127.0.0.1", port), "run", 30.0)
    del server


def test_the_first_writer_wins(served):
    assert served.create("view/1", {"by": 0}) == {"by": 0}
    assert served.create("view/1", {"by": 1}) == {"by": 0}
    assert served.get("view/1") == {"by": 0}
    assert served.get("view/2") is None


def test_two_runs_do_not_meet(served):
    other = store.ControlStore(served.address, "other", 30.0)
    served.set("key", 1)
    assert other.get("key") is None


def test_waiting_ends_with_the_value_or_the_timeout(served):
    assert served.wait("late", 0.05) is None
    waiting = served.clone()
    threading.Timer(0.05, served.set, ("late", 7)).start()
    assert waiting.wait("late", 30.0) == 7


def test_a_log_has_no_holes_whoever_appends(served):
    """Four writers at once; a reader finds all entries, one after the other."""
    writers = [threading.Thread(target=lambda c, n: [c.append("log", [n, i]) for i in range(5)], args=(served.clone(), n))
               for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    entries = [served.entry("log", index, 1.0) for index in range(20)]
    assert sorted(entries) == [[n, i] for n in range(4) for i in range(5)]
    assert served.entry("log", 20, 0.01) is None


def test_equal_entries_are_both_kept(served):
    assert (served.append("log", "same"), served.append("log", "same")) == (0, 1)


def test_a_port_in_use_is_named(served):
    with pytest.raises(LaunchError, match=f"port {served.address[1]} is in use"):
        store.host("127.0.0.1", served.address[1])


def test_a_host_that_is_gone_is_an_error_at_once():
    server, port = store.host("127.0.0.1", 0)
    client = store.ControlStore(("127.0.0.1", port), "run", 30.0)
    del server
    with pytest.raises(StoreError, match=f"control store 127.0.0.1:{port} is gone"):
        client.get("key")


def test_a_notice_reaches_the_watcher_as_a_verdict(served):
    heard: list[detector.Verdict] = []
    both = threading.Event()
    watcher.Watcher(served.clone(), lambda v: (heard.append(v), len(heard) == 2 and both.set()), lambda e: None).start()
    died = detector.Ended(Exit(2, 0, 4242, "node7", "SIGKILL", None))
    watcher.announce(served, died)
    watcher.announce(served, detector.Reset(3, 1, "connection reset"))
    assert both.wait(30.0)
    assert heard[0].dead == 2 and "rank 0 on node7 (pid 4242) ended with SIGKILL" in heard[0].reason
    assert heard[1].broken == 3 and heard[1].dead is None
