"""Groups that wait for other groups: the lines about them and their number, and the knowledge that agents of several
hosts share."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.schema import DetectorConfig
from megatron_ft.core.detection.group_stalls import Line, Spot, observe, together
from megatron_ft.core.detection.rank_health import Health, Sample
from megatron_ft.host import stall_watch
from megatron_ft.types import View

NOTICE_S = 10.0


def spots(*named):
    return {group: Spot(group, 0, place, float(seconds), *more) for group, place, seconds, *more in named}


def test_a_line_names_groups_place_and_seconds():
    _, (line,) = observe({}, spots((0, "waiting", 25), (1, "outside", 30), (2, "waiting", 29)), NOTICE_S)
    assert str(line) == "groups 0 2 wait for group 1, between two steps, 30 s"
    _, (line,) = observe({}, spots((0, "waiting", 25), (1, "starting", 30), (2, "starting", 29)), NOTICE_S)
    assert str(line) == "group 0 waits for groups 1 2, before its first step, 30 s"


def test_a_group_that_no_other_waits_for_is_not_named():
    """All groups may evaluate at the same time; a group may be at work for as long as it usually is."""
    assert observe({}, spots((0, "outside", 500), (1, "outside", 600)), NOTICE_S) == ({}, [])
    assert observe({}, spots((0, "waiting", 500), (1, "busy", 600)), NOTICE_S) == ({}, [])


def test_storage_that_is_away_for_all_is_reported():
    _, (line,) = observe({}, spots((0, "dataset", 31, True), (1, "dataset", 30, True)), NOTICE_S)
    assert str(line) == "groups 0 1 are inside the dataset for 31 s: storage does not answer"


def test_each_wait_at_the_end_of_a_run_has_its_line():
    """A group that evaluates waits for groups that have made their last step; then all wait for the lowest, which saves."""
    _, (line,) = observe({}, spots((0, "ended", 30), (1, "waiting", 31), (2, "ended", 29)), NOTICE_S)
    assert (
        str(line)
        == "groups 0 2 wait for group 1, in a call of the session, such as evaluate, that needs all groups, 31 s"
    )
    _, (line,) = observe({}, spots((0, "ended", 30), (1, "outside", 31)), NOTICE_S)
    assert str(line) == "group 0 waits for group 1, between two steps, 31 s"
    _, (line,) = observe({}, spots((1, "ended", 30), (2, "ended", 20)), NOTICE_S)
    saves = "after its last step, where it saves the last checkpoint and completes the record"
    assert str(line) == f"group 2 waits for group 1, {saves}, 30 s"
    _, (line,) = observe({}, spots((1, "ended", 30)), NOTICE_S)
    assert str(line) == f"group 1 is {saves} for 30 s"
    assert observe({}, spots((0, "ended", 30), (1, "busy", 0)), NOTICE_S) == ({}, [])  # it still makes its last step
    assert together([Spot(1, 0, "ended", 50), Spot(1, 0, "waiting", 20)])[1].place == "ended"  # as its leader


@given(st.integers(11, 4000), st.integers(1, 7))
def test_there_is_one_line_for_each_doubling_of_the_time_and_one_at_the_end(seconds, every):
    told, said = {}, []
    for now in range(0, seconds, every):
        told, lines = observe(told, spots((0, "waiting", now), (1, "outside", now)), NOTICE_S)
        said += lines
    times = [line.seconds for line in said]
    assert all(after >= 2 * before for before, after in zip(times, times[1:], strict=False))
    assert (times != []) == (now >= NOTICE_S) and (not times or now < 2 * times[-1] + every)
    told, lines = observe(told, spots((0, "busy", 0), (1, "busy", 0)), NOTICE_S)
    assert lines == ([Line((1,), (), "outside", now, over=True)] if times else []) and not told


def test_another_stall_of_the_same_group_is_reported_anew():
    told, _ = observe({}, spots((0, "waiting", 40), (1, "outside", 40)), NOTICE_S)
    told, lines = observe(told, spots((0, "waiting", 11), (1, "outside", 11)), NOTICE_S)
    assert [str(line) for line in lines] == [
        "group 1 goes on after 40 s between two steps",
        "group 0 waits for group 1, between two steps, 11 s",
    ]


def test_the_place_of_a_group_is_that_of_its_last_rank():
    """The other ranks wait for that one, as all other groups do."""
    waits, late, busy = Spot(1, 0, "waiting", 50), Spot(1, 0, "outside", 20), Spot(1, 0, "busy", 0)
    for first, second, place in ((waits, late, "outside"), (busy, waits, "busy"), (late, busy, "outside")):
        assert together([first, second])[1].place == together([second, first])[1].place == place
    assert together([waits, Spot(1, 0, "waiting", 20, storage=True)])[1] == Spot(1, 0, "waiting", 20, storage=True)


# --- several hosts ----------------------------------------------------------------------------------------------------


class Agent:
    """One of two or more hosts, each with the group of its number; ``keys`` is what they share."""

    def __init__(self, host, keys, hosts=2, silent=(), away=False):
        used, heartbeats = set(range(hosts)), SimpleNamespace(silent=lambda: set(silent))
        seats = SimpleNamespace(view=View(0, tuple(range(hosts)), ""))
        voice = SimpleNamespace(put=lambda key, value: keys.update({key: value}) or True, get=keys.get, away=away)
        place = SimpleNamespace(place=SimpleNamespace(rank=host), used=used, heartbeats=heartbeats)
        self.noted, self.host = [], host
        note = lambda event, **fields: self.noted.append((event, fields))  # noqa: E731
        settings = DetectorConfig(hang_timeout_s=60.0)
        self.stalls = stall_watch.Stalls(voice, place, SimpleNamespace(seats=seats), settings, note)
        self.stalls._looked = self.stalls._asked = float("-inf")

    def sees(self, phase, seconds, dataset=0):
        health = Health(
            last=Sample("S", 0.0, 0, 9, phase, dataset),
            still_s=seconds,
            storage_s=seconds if dataset else 0.0,
            finished=9,
        )
        watched = SimpleNamespace(health=health, given_up="")
        rank = SimpleNamespace(group=self.host, incarnation=0, watched=watched, dropped=False)
        self.stalls.poll_ranks([rank])
        return self.noted


@pytest.mark.parametrize("other, outage", [(("waiting", 55.0, 1), True), (("waiting", 55.0, 0), False)])
def test_an_agent_knows_whether_storage_is_away_for_other_hosts_too(other, outage):
    """The other group waits; it counts that its read-ahead thread is inside the dataset."""
    keys = {}
    Agent(1, keys).sees(*other)
    here = Agent(0, keys)
    here.sees("working", 60.0, 1)
    assert here.stalls.is_outage() == outage


def test_reports_of_a_lost_host_do_not_count_and_no_rank_is_given_up_while_the_store_is_away():
    keys = {}
    Agent(1, keys, hosts=3).sees("working", 55.0, 1)
    lost = Agent(0, keys, hosts=3, silent=(1,))
    lost.sees("working", 60.0, 1)
    assert not lost.stalls.is_outage()
    unknown = Agent(0, {}, hosts=3, away=True)
    unknown.sees("working", 60.0, 1)
    assert unknown.stalls.is_outage()


def test_the_first_host_reports_which_groups_wait_and_the_others_only_record_it(monkeypatch):
    keys, said = {}, []
    monkeypatch.setattr(stall_watch, "say", said.append)
    other = Agent(1, keys)
    assert not other.sees("outside", 30.0)
    here = Agent(0, keys)
    ((event, fields),) = here.sees("waiting", 29.0)
    assert (event, fields["late"], fields["waiting"]) == ("stall", [1], [0])
    assert said == ["group 0 waits for group 1, between two steps, 30 s"]
    other.sees("working", 0.0)
    here.stalls._looked = float("-inf")
    here.sees("working", 0.0)
    assert here.noted[-1][1]["over"] and keys["stall/1"] == [] and "goes on after 30 s" in said[-1]


def test_in_normal_steps_nothing_is_written():
    keys = {}
    for phase in ("working", "waiting", "outside"):
        Agent(1, keys).sees(phase, 4.0)
    assert not keys
