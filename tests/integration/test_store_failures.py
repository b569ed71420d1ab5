"""A real store server is killed, frozen and restarted empty under its clients (hard cases 16 and 17).

No call hangs, nothing is decided twice, and the survivors restore the contents.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

from megatron_ft.core.protocol import signals
from megatron_ft.errors import StoreError
from megatron_ft.run.store import (
    ControlStore,
    StoreConflict,
    StoreGone,
    StoreLostMemory,
    StoreSilent,
    patient,
    tcp_store,
    watcher,
)
from megatron_ft.run.store.tcp_store import TcpStore
from tests.stores import DEADLINE_S, TcpServer, await_, store_threads

SILENCE_S = 0.5
"""The bound on calls on a frozen store."""
PATIENCE_S = 20.0
"""The bound on all other calls: a slow name server can hold up connecting for seconds."""
VIEW = {"epoch": 4, "live": [0, 2, 3]}


@pytest.fixture
def server():
    started = TcpServer()
    yield started
    started.kill()


def client_of(server: TcpServer, timeout_s: float = PATIENCE_S) -> ControlStore:
    """Return a connected client with its own knowledge of the store's memory, as another process would have."""
    return patient(lambda: ControlStore(server.address, "run", timeout_s), patience_s=DEADLINE_S)


def call(store: ControlStore, operation) -> object:
    return patient(lambda: operation(store), patience_s=DEADLINE_S)


CALLS = {
    "set": lambda store: store.set("key", 1),
    "get": lambda store: store.get("key"),
    "create": lambda store: store.create("view/1", 1),
    "wait": lambda store: store.wait("never", 0.1),
    "append": lambda store: store.append("log", 1),
    "entry": lambda store: store.entry("log", 7, 0.1),
    "rendezvous": lambda store: store.rendezvous("outer/1/0"),
    "clone": lambda store: store.clone().get("key"),
    "restore": lambda store: store.restore(4, VIEW),
    "new": lambda store: ControlStore(store.address, "run", 0.5),
}


REFUSED = ("get", "create", "set", "append", "wait", "clone")
"""Not the rendezvous, which waits for the store by itself."""


def test_no_call_outlasts_a_frozen_store_and_all_work_when_it_wakes(server):
    """Every call has a connection of its own, and all are made at once; the connections come back by themselves."""
    clients = {name: client_of(server, SILENCE_S) for name in CALLS}
    before = len(store_threads())
    server.freeze()
    met: dict[str, Exception] = {}

    def make(name: str) -> None:
        try:
            CALLS[name](clients[name])
        except StoreError as error:
            met[name] = error

    callers = [threading.Thread(target=make, args=(name,), daemon=True) for name in CALLS]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert not any(caller.is_alive() for caller in callers)
    assert {name: type(error) for name, error in met.items()} == dict.fromkeys(CALLS, StoreSilent)
    assert f"has been silent for {SILENCE_S:g} s" in str(met["get"])
    await_(lambda: len(store_threads()) <= before, "the threads of the calls that were given up end, frozen as it is")
    server.thaw()
    for name in CALLS:
        call(clients[name], CALLS[name])


def test_a_call_that_torch_ends_at_the_bound_met_a_silent_store(monkeypatch):
    """torch's time limit and the guard's end together, and either may be first."""

    def ends(self, operation, bound_s: float):
        end = time.monotonic() + bound_s
        while time.monotonic() < end:
            pass
        raise RuntimeError("client socket has timed out")

    monkeypatch.setattr(tcp_store.Guard, "call", ends)
    store = TcpStore(("127.0.0.1", 1), 0.01)
    for attempt in (lambda: store.get("key"), lambda: store.rendezvous("outer/1/0")):
        with pytest.raises(StoreSilent, match="silent for 0.01 s"):
            attempt()


def test_every_call_on_a_killed_store_says_that_it_is_gone(server):
    clients = {name: client_of(server) for name in (*REFUSED, "restore", "new")}
    server.kill()
    for name in clients:
        with pytest.raises(StoreGone, match="is gone"):
            CALLS[name](clients[name])


def test_a_store_that_dies_while_a_client_connects_to_it_is_gone_and_not_silent(monkeypatch):
    """The store answers the plain socket; then torch is refused, and would try again for longer than the call may
    take. The call ends with the first refusal that a plain socket meets, and does not wait for torch."""
    asked, ended, gone = [], threading.Event(), threading.Event()
    connect, make = socket.create_connection, tcp_store.dist.TCPStore

    def ask(*address, **options) -> socket.socket:
        gone.wait(DEADLINE_S if asked else 0.0)
        asked.append("refused")
        end = connect(*address, **options)
        asked[-1] = "answered"
        return end

    def try_on(*where, **options):
        gone.wait(DEADLINE_S)
        try:
            return make(*where, **options)
        finally:
            ended.set()

    monkeypatch.setattr(tcp_store.socket, "create_connection", ask)
    monkeypatch.setattr(tcp_store.dist, "TCPStore", try_on)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]

        def dies() -> None:
            listener.accept()[0].close()
            listener.close()
            gone.set()

        threading.Thread(target=dies, daemon=True).start()
        with pytest.raises(StoreGone, match="is gone"):
            TcpStore(address, PATIENCE_S).get("key")
        assert not ended.is_set(), "it has waited for torch, which goes on trying"
    assert asked == ["answered", "refused"]


def test_a_client_that_waits_for_a_key_hears_of_the_death(server):
    store = client_of(server, timeout_s=DEADLINE_S)
    met: list[Exception] = []
    entered = threading.Event()

    def wait() -> None:
        store.get("key")
        entered.set()
        try:
            store.wait("never", 3600.0)
        except StoreGone as error:
            met.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert entered.wait(DEADLINE_S)
    server.kill()
    waiting.join(DEADLINE_S)
    assert len(met) == 1


def test_a_call_that_took_effect_after_it_was_given_up_is_recognised(server):
    store, other = client_of(server, SILENCE_S), client_of(server)
    call(store, lambda store: store.append("log", "first", by="first"))
    server.freeze()
    with pytest.raises(StoreSilent):
        store.claim("view/1", "mine", by="a")
    server.thaw()
    assert call(other, lambda store: store.wait("view/1", DEADLINE_S)) == "mine", "the frozen store had read it"
    assert call(store, lambda store: store.claim("view/1", "mine", by="a")) == ("mine", True)
    assert other.claim("view/1", "theirs") == ("mine", False)
    server.freeze()
    with pytest.raises(StoreSilent):
        store.append("log", "second", by="b")
    server.thaw()
    assert call(store, lambda store: store.append("log", "second", by="b")) == 1
    assert call(other, lambda store: store.append("log", "third")) == 2


def test_a_store_that_came_back_empty_is_recognised_and_rebuilt_by_its_first_client(server):
    agent = client_of(server)
    agent.begin()
    first, second = client_of(server), client_of(server)
    agent.set("view/0", {"epoch": 0})
    for survivor in (first, second):
        survivor.set("view/4", VIEW)
    old = first.memory
    server.kill()
    server.start()
    for name in REFUSED:
        with pytest.raises(StoreLostMemory, match="knows no run run"):
            patient_but_lost(lambda name=name: CALLS[name](first))
    first.restore(4, VIEW, {"report/4/0": "mine"})
    assert first.memory != old
    assert first.get("view/1") is None, "no call that was refused reached the empty store"
    with pytest.raises(StoreLostMemory, match="is being rebuilt"):
        patient_but_lost(lambda: second.get("view/4"))
    second.restore(4, VIEW, {"report/4/2": "too"})
    agent.restore()
    assert first.memory == second.memory == agent.memory != old
    assert (agent.get("view/4"), agent.get("report/4/0"), agent.get("report/4/2")) == (VIEW, "mine", "too")
    assert second.create("view/4", {"epoch": 4, "live": [1]}) == VIEW
    assert agent.append("log", "again") == 0


def test_a_rendezvous_waits_until_the_store_is_rebuilt(server):
    """In a recovery the training thread asks for the rendezvous, when another thread of the process rebuilds the
    store."""
    store = client_of(server)
    store.begin()
    server.kill()
    server.start()
    met: list[object] = []
    meeting = threading.Thread(target=lambda: met.append(store.rendezvous("outer/4/0")), daemon=True)
    meeting.start()
    await_(lambda: refused(store.clone()), "the store has forgotten the run")
    assert not met
    call(store, lambda store: store.restore(4, VIEW))
    meeting.join(DEADLINE_S)
    met[0].set("key", "value")
    assert met[0].get("key") == b"value"


def refused(store: ControlStore) -> bool:
    try:
        store.get("key")
    except StoreLostMemory:
        return True
    except StoreError:
        return False
    return False


def patient_but_lost(operation) -> None:
    """Wait until the store is back; its loss of memory is what the test wants to see."""

    def attempt() -> None:
        try:
            operation()
        except StoreLostMemory as error:
            found.append(error)

    found: list[StoreLostMemory] = []
    patient(attempt, patience_s=DEADLINE_S)
    if found:
        raise found[0]


def test_a_client_that_missed_a_view_and_was_faster_is_found_out(server):
    behind, ahead = client_of(server), client_of(server)
    ahead.begin()
    behind.check_begun()
    server.kill()
    server.start()
    call(behind, lambda store: store.restore(3, {"epoch": 3}))
    assert behind.create("view/4", {"epoch": 4, "live": [1]}) == {"epoch": 4, "live": [1]}
    with pytest.raises(StoreConflict, match="rebuilt with another view of epoch 4 than this group follows"):
        call(ahead, lambda store: store.restore(4, VIEW))


def test_clones_share_the_knowledge_of_their_process(server):
    store = client_of(server)
    store.begin()
    clone = store.clone()
    clone.get("key")
    server.kill()
    server.start()
    call(clone, lambda store: store.restore(4, VIEW))
    assert call(store, lambda store: store.get("view/4")) == VIEW


class Told:
    """The verdicts of a watcher, in order."""

    def __init__(self, store: ControlStore, restore: bool = True, wait_s: float = 60.0) -> None:
        self.lines: list[object] = []
        self._restore, back = restore, lambda: self.lines.append("back")
        watcher.Watcher(store, self._heard, self._lost, back, self._empty, wait_s).start()

    def _heard(self, verdict: signals.Verdict) -> None:
        self.lines.append(verdict.epoch)

    def _lost(self, error: StoreError) -> None:
        """Accept gone or silent: a client that connects again in the very moment in which a store dies meets a silent
        one."""
        self.lines.append("away" if isinstance(error, StoreGone | StoreSilent) else type(error))

    def _empty(self, store: ControlStore) -> None:
        self.lines.append("empty")
        if self._restore:
            store.restore(4, VIEW)

    def await_(self, *lines: object) -> None:
        await_(lambda: len(self.lines) >= len(lines), f"{lines}")
        assert self.lines == list(lines)


def test_the_watcher_outlives_the_store_and_hears_the_new_log_from_its_beginning(server):
    agent, told = client_of(server), None
    agent.begin()
    told = Told(client_of(server))
    for epoch in (1, 2):
        watcher.announce(agent, signals.EpochAborted(epoch, "broken", by=0))
    told.await_(1, 2)
    server.kill()
    told.await_(1, 2, "away")
    server.start()
    told.await_(1, 2, "away", "empty", "back")
    call(agent, lambda store: store.restore())
    watcher.announce(agent, signals.EpochAborted(4, "broken", by=0))
    told.await_(1, 2, "away", "empty", "back", 4)


def test_the_watcher_hears_what_was_announced_before_it_found_the_new_store(server):
    """Another survivor has rebuilt the store; the watcher, which was away, does not go on in the middle of the new
    log."""
    agent = client_of(server)
    agent.begin()
    told = Told(client_of(server))
    for epoch in (1, 2):
        watcher.announce(agent, signals.EpochAborted(epoch, "broken", by=0))
    told.await_(1, 2)
    server.kill()
    told.await_(1, 2, "away")
    server.start()
    call(agent, lambda store: store.restore(4, VIEW))
    for epoch in (4, 5, 6):
        watcher.announce(agent, signals.EpochAborted(epoch, "broken", by=0))
    told.await_(1, 2, "away", "empty", "back", 4, 5, 6)


def test_the_watcher_goes_on_in_a_store_that_was_only_frozen(server):
    agent = client_of(server)
    agent.begin()
    told = Told(client_of(server, SILENCE_S), wait_s=0.1)
    watcher.announce(agent, signals.EpochAborted(1, "broken", by=0))
    # On a busy machine the store can be silent longer than the limit more than once: each time both are told.
    await_(lambda: 1 in told.lines, "the first notice is heard")
    server.freeze()
    await_(lambda: told.lines[-1] == "away", "it is silent")
    server.thaw()
    await_(lambda: told.lines[-1] == "back", "it answers again")
    call(agent, lambda store: watcher.announce(store, signals.EpochAborted(2, "broken", by=0), by="once"))
    await_(lambda: 2 in told.lines, "the second notice is heard")
    assert [line for line in told.lines if line not in ("away", "back")] == [1, 2], told.lines


def test_a_watcher_that_may_not_rebuild_waits_for_another_client_of_its_process(server):
    store = client_of(server)
    store.begin()
    told = Told(store.clone(), restore=False)
    watcher.announce(store, signals.EpochAborted(1, "broken", by=0))
    told.await_(1)
    server.kill()
    told.await_(1, "away")  # a client that still connects when the store starts again would meet the empty one first
    server.start()
    await_(lambda: "empty" in told.lines, "the loss is seen")
    call(store, lambda store: store.restore(4, VIEW))
    await_(lambda: told.lines[-1] == "back", "the watcher is back")
    watcher.announce(store, signals.EpochAborted(4, "broken", by=0))
    await_(lambda: told.lines[-1] == 4, "the new log is heard")
    assert told.lines[:2] == [1, "away"] and set(told.lines[2:-2]) == {"empty"}


def test_without_a_marker_a_restart_is_only_a_new_connection(server):
    store = client_of(server)
    store.set("key", 1)
    server.kill()
    server.start()
    assert call(store, lambda store: store.get("key")) is None
