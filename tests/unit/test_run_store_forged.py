"""The control store is open to any process that reaches its port: values that the run has not written change no
decision."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.run import store
from megatron_ft.run.store import NOTICES, ControlStore, StoreConflict, StoreLostMemory, watcher
from megatron_ft.run.store.client import CoordinationClient, digest
from megatron_ft.types import Exit
from megatron_ft.utils.auth.secret import Secret
from tests.stores import await_
from tests.support import SECRET

DIED = signals.RankExited(Exit(2, 0, 4242, "node7", "SIGKILL", None))
GARBAGE = (b"", b"\0", b" ", b"\xff\xfe\x00", b'{"value": 1}', b"0" * 32 + b' {"value": 1}', b"[" * 5000)


class Place:
    """A store, a member of the run, and a stranger that knows the run's id and writes what it likes."""

    def __init__(self) -> None:
        self.server, port = store.host("127.0.0.1", 0)
        self.address = ("127.0.0.1", port)
        self.own = self.member()
        self.stranger = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))

    def member(self, secret: Secret = SECRET) -> ControlStore:
        return ControlStore(self.address, "run", 30.0, secret=secret)

    def forge(self, key: str, value: bytes) -> None:
        self.stranger.set(f"run/{key}", value)


@pytest.fixture
def place():
    return Place()


@pytest.mark.parametrize("value", GARBAGE)
def test_a_forged_value_counts_as_missing_and_is_reported_once(place, value):
    told = []
    place.own.when_forged(told.append)
    place.forge("ended", value)
    assert place.own.get("ended") is None and place.own.clone().get("ended") is None
    assert place.own.wait("ended", 0.1) is None
    assert told == ["ended"]


def test_values_of_another_secret_key_or_run_are_forged(place):
    other = place.member(Secret("z" * 64))
    other.set("a", 1)
    place.own.set("b", 2)
    genuine = place.stranger.get("run/b")
    place.forge("c", genuine)
    place.stranger.set("another/b", genuine)
    assert place.own.get("a") is None and place.own.get("c") is None and place.own.get("b") == 2
    assert ControlStore(place.address, "another", 30.0, secret=SECRET).get("b") is None


def test_a_wait_goes_on_until_a_member_has_written(place):
    from concurrent.futures import ThreadPoolExecutor

    place.forge("late", b"now")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(place.own.clone().wait, "late", 60.0)
        await_(lambda: "late" in place.own._memory.forged, "the forged value is met")
        place.own.set("late", 7)
        assert waiting.result() == 7


@pytest.mark.parametrize("value", GARBAGE)
def test_a_forged_view_is_not_adopted_and_makes_room_for_the_first_proposal(place, value):
    place.forge("view/1", value)
    others = [place.member() for _ in range(3)]
    stand = [client.claim("view/1", {"epoch": 1, "by": number}, f"{number}") for number, client in enumerate(others)]
    assert stand == [({"epoch": 1, "by": 0}, True), ({"epoch": 1, "by": 0}, False), ({"epoch": 1, "by": 0}, False)]


def test_groups_that_were_given_two_views_of_one_epoch_never_go_on_together(place):
    """A stranger can delete a view, and a late group then agrees on another one: it is found out at the next view."""
    groups = [CoordinationClient(place.member(), group, 60.0) for group in range(2)]
    for group in groups:
        group.adopted(first_view(3))
    first, own = groups[0].propose(replace(first_view(3), epoch=1, live=(0, 1), reason="group 2 is lost"))
    assert own and groups[1].view(1) == first
    groups[1].adopted(first_view(3))
    place.stranger.delete_key("run/view/1")
    second, own = groups[1].propose(replace(first_view(3), epoch=1, live=(1,), reason="groups 0 2 are lost"))
    assert own and digest(second) != digest(first)
    third, own = groups[0].propose(replace(first, epoch=2))
    assert own and groups[0].view(2) == third
    with pytest.raises(StoreConflict, match="view 2 in the control store follows another view 1"):
        groups[1].view(2)


def test_a_member_of_a_collection_keeps_its_last_genuine_value(place):
    place.own.add("report/3", "1", "mine")
    for line in ("1\t\n", '1\t{"value": "theirs"}\n', "no value\n", "\n", "2\tforged\n", "\udcff\t\udcfe\n"):
        place.stranger.append("run/report/3", line.encode(errors="surrogateescape"))
    assert place.own.members("report/3") == {"1": "mine"}
    place.own.add("report/3", "1", "newer")
    assert place.own.members("report/3", {"1"}) == {"1": "newer"}


@pytest.mark.parametrize(
    "value", [json.dumps({"value": {"kind": "stops", "groups": [0, 1], "why": "x"}}).encode(), b"\xff"]
)
def test_a_forged_notice_is_ignored_and_those_after_it_are_heard(place, value):
    """The forged notice stays: a reader may have passed it, and would never see another value in its place."""
    watcher.announce(place.own, signals.RunFinished())
    for index in (1, 2):
        place.forge(f"{NOTICES}/{index}", value)
    heard: list[signals.Verdict] = []
    listening = watcher.Watcher(place.own.clone(), heard.append, lambda error: None)
    listening.start()
    watcher.announce(place.own, DIED, by="once")
    await_(lambda: len(heard) == 2, "both genuine notices are heard")
    listening.stop()
    assert isinstance(heard[0], signals.RunFinished) and heard[1].group == 2
    assert place.own.entry(NOTICES, 3, 0.1) == signals.to_json(DIED)
    assert place.own.entry(NOTICES, 4, 0.1) is None


def test_a_forged_marker_costs_no_memory(place):
    """With another memory all logs would begin again."""
    place.own.begin()
    memory = place.own.memory
    place.own.set("a", 1)
    place.own.claim("view/1", {"epoch": 1, "after": "another"})
    place.stranger.set("run/run", b"forged")
    late = place.own.clone()
    with pytest.raises(StoreLostMemory):
        late.get("a")
    late.restore(1, {"epoch": 1})
    assert late.memory == memory and late.get("a") == 1
    place.member().check_begun()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(["k", "view/1", "notice/0", "c"]), value=st.binary(max_size=200))
def test_no_bytes_at_any_key_raise_anything(place, key, value):
    place.forge(key, value)
    place.own.get(key)
    place.own.members(key)
    place.own.claim(key, 1)
    assert len(place.own._memory.forged) < 1000
