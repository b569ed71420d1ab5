"""An agent takes the embedded store over when it is its turn, and follows a host that was faster."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megatron_ft.core.detection.heartbeats import Said
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.core.lifecycle.store_succession import Succession
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.shell import carry_out
from megatron_ft.host import agent_record
from megatron_ft.host.peers import Hosts
from megatron_ft.host.store_takeover import StoreTakeover
from megatron_ft.record import history
from megatron_ft.run.store import Locator, Log, LogAway, StoreGone
from megatron_ft.run.verdict_handler import VerdictHandler
from tests.stores import await_
from tests.support import SECRET

OLD, OWN, OTHER = "127.0.0.1:1", "127.0.0.2:2", "127.0.0.3:3"


class Keeper:
    serves, address = False, OWN

    def serve(self) -> None:
        self.serves = True

    def stand_by(self) -> None:
        self.serves = False


class Agent:
    """Host 1 of three, on which group 1 is; host 0 has the store, and is lost."""

    def __init__(self, directory) -> None:
        self.log, self.keeper = Log(directory, "run", SECRET), Keeper()
        self.log.create(Claim(0, "run", 0, OLD))
        self.locator = Locator(Log(directory, "run", SECRET), OLD)
        self.locator.poll()
        self.said = {2: Said(0, False)}
        self.heartbeats = SimpleNamespace(said=lambda: self.said, says=Said(), silences=lambda: [])
        hosts = SimpleNamespace(
            heartbeats=self.heartbeats,
            place=SimpleNamespace(rank=1),
            keeper=self.keeper,
            housing=lambda live: frozenset(live),
            said=lambda rank: f"host {rank}",
            locator=self.locator,
        )
        self.told, self.moved, note = directory / "told", MagicMock(), MagicMock()
        self.seats, self.view = frozenset({(1, 0)}), first_view(3)
        starter = SimpleNamespace(told=self.told)
        ranks = SimpleNamespace(seats=lambda: self.seats, entered=lambda: self.seated, starter=starter)
        restarts = MagicMock()
        type(restarts.seats).view = property(lambda _: self.view)
        self.agent = StoreTakeover(hosts, directory, ranks, restarts, self.moved, note)
        self.agent._probe = MagicMock()
        self.agent._probe.get.side_effect = StoreGone("its host is lost")

    seated: frozenset = frozenset()

    @property
    def succession(self) -> Succession:
        return self.agent._succession

    def look(self) -> None:
        carry_out(self.succession.look())

    def claims(self) -> list[tuple[int, str]]:
        return [(claim.host, claim.address) for claim in self.log.read()]


@pytest.fixture
def agent(tmp_path):
    return Agent(tmp_path)


def test_the_next_host_takes_the_store_over_and_tells_its_ranks_and_the_other_hosts(agent):
    agent.look()
    assert agent.claims() == [(0, OLD), (1, OWN)] and agent.keeper.serves
    assert agent.told.read_text() == "1" and agent.moved.called and agent.locator.text == OWN
    agent.look()
    assert agent.heartbeats.says == Said(1, True)


def test_a_store_that_does_not_answer_is_asked_once_before_a_host_that_hears_half_of_the_hosts_takes_it_over(agent):
    """Each question to a host without power takes as long as it may; the wait for this host's turn goes on meanwhile."""
    agent.said, agent.succession._looked = {}, time.monotonic()
    agent.view = first_view(2)
    while not agent.keeper.serves:
        agent.look()
    assert agent.agent._probe.get.call_count == 1


@pytest.mark.parametrize("member", [False, True])
def test_a_host_whose_group_has_joined_takes_over_although_it_has_not_read_that_view(agent, member):
    """The store ended right after the group had entered."""
    agent.said, agent.view = {}, first_view(1)
    agent.seated = agent.seats if member else frozenset()
    for _ in range(4):
        agent.succession._looked = agent.succession._waited_s = 0.0
        agent.look()
    assert agent.keeper.serves == member


def test_nothing_is_taken_over_while_another_host_reaches_the_stores_host(agent):
    agent.said = {2: Said(0, True)}
    agent.look()
    assert agent.claims() == [(0, OLD)] and agent.heartbeats.says == Said(0, False)


def test_a_host_that_was_faster_is_followed_and_not_the_one_before_it(agent):
    """The observations at the beginning of a look belong to the older store."""
    agent.log.create(store_failover.taken_over(agent.log.read()[-1], 2, OTHER, "host 0 is silent"))
    agent.said = {2: Said(1, True)}
    for _ in range(3):
        agent.look()
    assert agent.claims() == [(0, OLD), (2, OTHER)] and agent.locator.text == OTHER and not agent.keeper.serves


def test_a_store_that_was_just_claimed_is_asked_at_once_and_waited_for_as_long_as_the_one_before(agent):
    """This host hears no other one, and has waited long enough for the store before."""
    agent.said = {}
    agent.look()
    agent.log.create(store_failover.taken_over(agent.log.read()[-1], 2, OTHER, "host 0 is silent"))
    agent.succession._waited_s, agent.succession._read_at = 100.0, 0.0
    for _ in range(2):
        agent.look()
    assert agent.claims() == [(0, OLD), (2, OTHER)] and agent.locator.text == OTHER
    assert agent.agent._probe.get.call_count == 2


def test_the_store_ends_at_a_host_that_finds_it_at_another_host(agent):
    agent.look()
    agent.log.create(store_failover.taken_over(agent.log.read()[-1], 2, OTHER, "host 1 is silent"))
    agent.said = {2: Said(2, True)}
    agent.look()
    assert not agent.keeper.serves and agent.locator.text == OTHER and agent.told.read_text() == "2"


def test_a_host_whose_groups_are_all_left_out_takes_nothing_over(agent):
    agent.log.create(store_failover.fence(agent.log.read()[-1], [(1, 0)], 2, "host 1 is silent"))
    for _ in range(3):
        agent.look()
    assert agent.claims() == [(0, OLD), (0, OLD)]


def test_a_group_that_was_started_again_takes_nothing_over_while_it_has_no_seat(agent):
    """Its host is cut off from those that go on, and reaches the directory: it would take the store from them."""
    agent.log.create(store_failover.fence(agent.log.read()[-1], [(0, 0), (1, 0)], 2, "hosts 0 1 are silent"))
    agent.log.create(store_failover.taken_over(agent.log.read()[-1], 2, OTHER, "host 0 is silent"))
    agent.seats, agent.said = frozenset({(1, 1)}), {}
    agent.look()
    agent.succession._waited_s = 100.0
    agent.look()
    assert agent.claims() == [(0, OLD), (0, OLD), (2, OTHER)]


def test_a_host_that_was_replaced_does_not_report_the_end_of_the_run(agent):
    """The agent may end before it has followed the claim: it was frozen. An agent that cannot read the claims does not
    report the end either."""
    place, locator = SimpleNamespace(rank=0), agent.locator
    host = SimpleNamespace(succeeds=True, locator=locator, place=place)
    assert not Hosts.replaced(host)
    agent.log.create(store_failover.taken_over(agent.log.read()[-1], 1, OWN, "host 0 is silent"))
    assert locator.newest == 0 and Hosts.replaced(host)
    place.rank = 1
    assert not Hosts.replaced(host)
    locator.poll = MagicMock(side_effect=LogAway("the file system hangs"))
    assert Hosts.replaced(host)
    host.succeeds = False
    assert not Hosts.replaced(host)


def test_training_without_a_store_is_reported_once_and_only_after_a_step_was_committed_since(
    monkeypatch, capsys, tmp_path
):
    """The step that was going on then may have been committed before."""
    said, now = [], [100.0]
    monkeypatch.setattr(agent_record, "say", said.append)
    monkeypatch.setattr(agent_record, "time", SimpleNamespace(monotonic=lambda: now[0]))
    record = agent_record.AgentRecord(tmp_path, lambda: False)

    def committed(step: int) -> None:
        history.append(tmp_path, "step", step=step, epoch=0)
        now[0] += agent_record._LOOK_S
        assert not record.has_end(away=True)

    for step in (6, 6, 7):
        committed(step)
    assert said == []
    for step in (8, 9):
        committed(step)
    assert said == ["step 8 was committed since: training goes on without the control store"]

    verdicts = VerdictHandler(MagicMock(), MagicMock(rank=MagicMock(group=1)), MagicMock(), MagicMock())
    verdicts.committed(3)
    verdicts.store_is(StoreGone("the control store is gone"))
    assert capsys.readouterr().out == "megatron_ft: group 1: the control store is gone; a recovery waits for one\n"
    verdicts.committed(4)
    verdicts.committed(5)
    assert capsys.readouterr().out == "megatron_ft: group 1: step 4 was committed without the control store\n"


def test_a_bug_in_one_look_does_not_end_the_succession(agent, monkeypatch, caplog):
    looks = []

    def look() -> None:
        looks.append(1)
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(agent.succession, "look", look)
    with caplog.at_level("INFO"):
        agent.agent.start()
        await_(lambda: len(looks) > 1, "it looks again")
        agent.agent.stop()
    (said,) = caplog.messages
    assert said.startswith("the look at the control store raised ZeroDivisionError: of a test (test_store_takeover.py")
