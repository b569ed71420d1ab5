"""What an agent hears and says over a store that goes away, and comes back empty."""

from __future__ import annotations

import pytest

from megatron_ft.core import detector
from megatron_ft.core.membership import first_view
from megatron_ft.launch import voice
from megatron_ft.runtime import store, watcher
from megatron_ft.types import View
from tests.stores import await_

FIRST = first_view(2)
RESETS = [detector.Reset(epoch, 0, "reset") for epoch in range(2)]


class Place:
    """A port and the store that is there, or is not."""

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
    agent = voice.Voice(client, {"view/0": FIRST.to_json()})
    yield agent
    agent.close()


def test_it_hears_what_anybody_tells_once_and_in_order(place, agent):
    other = place.client()
    watcher.announce(other, RESETS[0])
    agent.tell(RESETS[1])
    assert agent.told and agent.news() == RESETS and agent.news() == []


def test_the_newest_view_is_found_from_any_older_one(place, agent):
    other = place.client()
    for epoch in (1, 2):
        other.set(f"view/{epoch}", View(epoch, (0,), "").to_json())
    newest = agent.newest_view(FIRST)
    assert newest.epoch == 2 and agent.newest_view(newest) == newest


def test_what_was_asked_in_vain_is_asked_again_when_the_store_answers_something_else(place, agent):
    """Else its agent would take the oldest view for the newest: a group that was left out, for one whose run is over."""
    agent.listen()
    place.client().set("view/1", View(1, (0,), "").to_json())
    agent._away_until = float("inf")  # as after a question that nobody has answered
    assert agent.newest_view(FIRST) == FIRST
    agent._away_until = 0.0
    agent.tell(RESETS[0])
    assert not agent.away and agent.newest_view(FIRST).epoch == 1


def test_a_store_that_comes_back_empty_is_heard_from_the_beginning(place, agent):
    """The survivors put back their newest view only; what was said before is said again."""
    agent.tell(RESETS[0])
    assert agent.say("restart/1.1", {}) and agent.news() == [RESETS[0]]
    place.start_empty()
    survivor = place.client()
    survivor.begin()
    survivor.set("view/5", View(5, (0,), "").to_json())
    await_(lambda: not (agent.ended() or agent.away), "it answers again")
    agent.tell()
    assert agent.newest_view(FIRST).epoch == 5
    assert agent.news() == [RESETS[0]] and agent.get("restart/1.1") == {}


def test_while_nothing_happens_nothing_is_asked(place, agent, monkeypatch):
    """Ten times a second it looks; 10,000 others do, too. One notice is enough, and what it says is asked for, only."""
    asked = []
    get = store.ControlStore.get
    monkeypatch.setattr(store.ControlStore, "get", lambda self, key: asked.append(key) or get(self, key))
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
    assert set(asked) == {"notice/0", "notice/1"}
    other.set("view/1", View(1, (0,), "").to_wire())
    watcher.announce(other, detector.Agreed(1))
    await_(lambda: look()[1].epoch == 1, "it knows the view")
    other.set("ended", True)
    watcher.announce(other, detector.Over())
    await_(lambda: look()[2], "it knows that the run has ended")


def test_a_store_that_comes_back_empty_is_noticed_and_reminded_by_itself(place, agent):
    agent.listen()
    agent.tell(RESETS[0])
    await_(lambda: agent.news() == [RESETS[0]], "it hears itself")
    place.start_empty()
    other = place.client()
    await_(lambda: agent.tell() or agent.news() == [RESETS[0]], "it has said it again")
    assert other.get("view/0") == FIRST.to_json()


def test_what_was_not_written_is_said(place, agent):
    place.close()
    assert not agent.say("restart/1.1", {}) and agent.away
    agent.tell(RESETS[0])
    assert not agent.told and agent.news() == [] and agent.newest_view(FIRST) == FIRST and agent.get("view/0") is None
