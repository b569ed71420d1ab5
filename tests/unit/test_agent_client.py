"""An agent, and a group, read from and write to a store that goes away, and comes back empty."""

from __future__ import annotations

import threading

import pytest

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.host import agent_client
from megatron_ft.run import store
from megatron_ft.run.store import watcher
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import Report, View
from tests.stores import DEADLINE_S, await_

FIRST = first_view(2)
RESETS = [signals.EpochAborted(epoch, "reset", by=0) for epoch in range(2)]


class Place:
    """A port at which a store listens, or none."""

    def __init__(self) -> None:
        self._listener = store.listen("127.0.0.1", 0)
        self._server = store.serve_on(self._listener)
        self.address = ("127.0.0.1", self._listener.getsockname()[1])

    def client(self) -> store.ControlStore:
        return store.ControlStore(self.address, "run", 5.0)

    def start_empty(self) -> None:
        self._server = None
        self._server = store.serve_on(self._listener)

    def close(self) -> None:
        self._server = None
        self._listener.close()


@pytest.fixture
def place():
    made = Place()
    yield made
    made.close()


@pytest.fixture
def agent(place):
    client = place.client()
    client.begin()
    client.set("view/0", FIRST.to_json())
    agent = agent_client.AgentClient(client, {"view/0": FIRST.to_json()})
    yield agent
    agent.close()


def test_an_agent_hears_every_notice_once_and_in_order(place, agent):
    agent.listen()
    other, heard = place.client(), []
    watcher.announce(other, RESETS[0])
    agent.announce(RESETS[1])
    await_(lambda: heard.extend(agent.news()) or len(heard) == 2, "it hears both")
    assert agent.told and heard == RESETS and agent.news() == []


def test_the_newest_view_is_found_from_any_older_one(place, agent):
    other = place.client()
    for epoch in (1, 2):
        other.set(f"view/{epoch}", View(epoch, (0,), "").to_json())
    newest = agent.newest_view(FIRST)
    assert newest.epoch == 2 and agent.newest_view(newest) == newest


def test_a_failed_question_is_repeated_when_the_store_answers_another_one(place, agent):
    """Otherwise the agent would take the oldest view for the newest: a group that was left out, for one whose run is
    over."""
    agent.listen()
    place.client().set("view/1", View(1, (0,), "").to_json())
    agent._away_until = float("inf")  # as after a question that has got no answer
    assert agent.newest_view(FIRST) == FIRST
    agent._away_until = 0.0
    agent.announce(RESETS[0])
    assert not agent.away and agent.newest_view(FIRST).epoch == 1


def test_a_store_that_comes_back_empty_is_heard_from_the_beginning(place, agent):
    """The survivors put back their newest view only; earlier notices are announced again."""
    survivor = CoordinationClient(place.client(), 0, 60.0)
    survivor.adopted(View(5, (0,), ""))
    agent.listen()
    agent.announce(RESETS[0])
    assert agent.put("restart/1.1", {})
    await_(lambda: agent.news() == [RESETS[0]], "it hears itself")
    place.start_empty()
    survivor.restore(place.client())
    await_(lambda: not (agent.ended() or agent.away), "it answers again")
    await_(lambda: agent.announce() or agent.news() == [RESETS[0]], "it has said it again")
    assert agent.newest_view(FIRST).epoch == 5 and agent.get("restart/1.1") == {}


def test_while_nothing_happens_no_question_is_asked(place, agent, monkeypatch):
    """Each of 10,000 agents looks ten times a second. Its listening thread reads the notices, and no other question is
    asked for one that changes neither the view nor the end."""
    asked, get, here = [], store.ControlStore.get, threading.get_ident()

    def asks(self, key):  # the listening thread, and those that earlier tests have left in this process, ask as well
        if threading.get_ident() == here:
            asked.append(key)
        return get(self, key)

    monkeypatch.setattr(store.ControlStore, "get", asks)
    agent.listen()
    look = lambda: (agent.news(), agent.newest_view(FIRST), agent.ended())  # noqa: E731
    look()
    asked.clear()
    for _ in range(100):
        assert look() == ([], FIRST, False)
    assert asked == []

    other = place.client()
    watcher.announce(other, RESETS[0])
    await_(lambda: look()[0] == [RESETS[0]], "it hears that")
    assert asked == []
    other.set("view/1", View(1, (0,), "").to_wire())
    watcher.announce(other, signals.ViewAgreed(1))
    await_(lambda: look()[1].epoch == 1, "it knows the view")
    other.set("ended", True)
    watcher.announce(other, signals.RunFinished())
    await_(lambda: look()[2], "it knows that the run has ended")


def test_a_store_that_comes_back_empty_is_noticed_and_its_contents_are_restored_unasked(place, agent):
    agent.listen()
    agent.announce(RESETS[0])
    await_(lambda: agent.news() == [RESETS[0]], "it hears itself")
    place.start_empty()
    other = place.client()
    look = lambda: (agent.announce(), agent.newest_view(FIRST), agent.news())  # noqa: E731
    await_(lambda: look()[2] == [RESETS[0]], "it has said it again")
    assert other.get("view/0") == FIRST.to_json()


def test_all_that_a_group_has_said_is_put_back_although_the_store_is_lost_again_meanwhile(place, agent, monkeypatch):
    group, heard, back = CoordinationClient(place.client(), 0, 60.0), threading.Event(), threading.Event()
    group.adopted(FIRST)
    group.publish(Report(0, 0, 1))
    group.announce(RESETS[0])
    ear = watcher.Watcher(place.client(), lambda verdict: heard.set(), lambda error: None, back.set, group.restore)
    ear.start()
    assert heard.wait(DEADLINE_S)
    append, lost = store.ControlStore.append, []

    def is_lost_once(self, *said) -> int:
        if not lost:
            lost.append(said)
            raise store.StoreSilent("of a test")
        return append(self, *said)

    monkeypatch.setattr(store.ControlStore, "append", is_lost_once)
    place.start_empty()
    assert back.wait(DEADLINE_S)
    ear.stop()
    other = place.client()
    assert lost and other.get(f"{store.NOTICES}/0") == signals.to_json(RESETS[0])
    assert other.members("report/0").keys() == {"0"}


def test_a_failed_write_is_reported(place, agent):
    place.close()
    assert not agent.put("restart/1.1", {}) and agent.away
    agent.announce(RESETS[0])
    assert not agent.told and agent.news() == [] and agent.newest_view(FIRST) == FIRST and agent.get("view/0") is None


def test_an_agent_whose_listening_thread_ends_by_a_bug_says_so_and_listens_anew(place, agent, capfd, caplog):
    def hears(verdict: signals.Verdict) -> None:
        if not caplog.text:
            raise ZeroDivisionError("of a test")
        passed_on.append(verdict)

    passed_on: list[signals.Verdict] = []
    other = place.client()
    agent.listen(hears)
    with caplog.at_level("INFO"):
        watcher.announce(other, RESETS[0])
        await_(lambda: passed_on, "another thread hears it")
    assert "raised ZeroDivisionError: of a test (test_agent_client.py, line" in caplog.text
    assert "Traceback" in capfd.readouterr().err
    assert agent.news() == [RESETS[0], RESETS[0]], "a notice may come twice"
    watcher.announce(other, RESETS[1])
    await_(lambda: agent.news() == [RESETS[1]], "it hears what is new")
    assert passed_on == [signals.classify(reset) for reset in RESETS]


def test_an_agent_does_not_go_on_when_its_listening_thread_ends_by_a_second_bug(place, agent):
    def hears(verdict: signals.Verdict) -> None:
        raise ZeroDivisionError("of a test")

    agent.listen(hears)
    agent.announce(RESETS[0])
    with pytest.raises(ZeroDivisionError, match="of a test"):
        await_(lambda: agent.news() == "never", "the second thread has ended")
