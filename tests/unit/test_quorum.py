"""Who replaces a lost member of the run's own etcd: against a model of etcd, with hosts lost at any moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core import quorum
from megatron_ft.core.quorum import Add, Member, Promote, Remove

THREE = [Member("a"), Member("b"), Member("c")]


def test_while_nobody_is_lost_nothing_changes():
    assert quorum.change(THREE, None, (), synced=False) is None
    assert quorum.change(THREE, "a", (), synced=False) is None


def test_a_newcomer_learns_then_the_lost_one_goes_then_it_votes():
    assert quorum.change(THREE, None, {"a"}, synced=False) == Add()
    learning = [*THREE, Member("d", learner=True)]
    assert quorum.change(learning, "d", {"a"}, synced=False) is None
    assert quorum.change(learning, "d", {"a"}, synced=True) == Remove("a")
    assert quorum.change(learning[1:], "d", (), synced=True) == Promote("d")
    assert quorum.change([*THREE[1:], Member("d")], "d", (), synced=True) is None


def test_one_learner_at_a_time_and_a_lost_one_makes_room():
    learning = [*THREE, Member("d", learner=True)]
    assert quorum.change(learning, None, {"a"}, synced=False) is None
    assert quorum.change(learning, None, {"a", "d"}, synced=False) == Remove("d")


def test_whose_turn_it_was_not_goes_again_when_the_lost_one_is_back():
    assert quorum.change([*THREE, Member("d", learner=True)], "d", (), synced=True) == Remove("d")


def test_a_member_with_a_vote_changes_nothing():
    assert quorum.change(THREE, "b", {"a"}, synced=True) is None


@pytest.mark.parametrize(("me", "hosts", "turn"), [(3, {3, 4}, 0), (4, {3, 4}, 1), (6, {3, 4, 6}, 2)])
def test_hosts_have_their_turns(me, hosts, turn):
    first = quorum.patience_s(3, {3})
    assert first == quorum.PATIENCE_S
    assert (quorum.patience_s(me, hosts) > first) == bool(turn)


@dataclass
class Etcd:
    """What etcd keeps of its own rules: no change without a majority of votes that live, one learner at most."""

    members: dict[str, Member]
    home: dict[str, int]
    living: set[int]
    number: int = 0
    running: set[str] = field(default_factory=set)

    def voters(self) -> list[str]:
        return [member.id for member in self.members.values() if not member.learner]

    @property
    def decides(self) -> bool:
        voters = self.voters()
        return sum(self.home[id_] in self.living for id_ in voters) > len(voters) // 2

    def own(self, host: int) -> str | None:
        return next((id_ for id_ in self.members if self.home[id_] == host and id_ in self.running), None)

    def look(self, host: int, synced: bool) -> None:
        """One turn of a host: what it decides, done if etcd does it."""
        if not self.decides:
            return
        lost = {id_ for id_ in self.members if self.home[id_] not in self.living}
        match quorum.change(list(self.members.values()), self.own(host), lost, synced):
            case Add():
                assert self.own(host) is None
                if not any(member.learner for member in self.members.values()):
                    self.number += 1
                    new = f"m{self.number}"
                    self.members[new], self.home[new] = Member(new, learner=True), host
                    self.running.add(new)
            case Remove(id=id_):
                assert id_ in lost or id_ == self.own(host) and self.members[id_].learner, "nobody who lives is removed"
                del self.members[id_]
            case Promote(id=id_):
                assert id_ == self.own(host) and synced, "who does not know all has no vote"
                self.members[id_] = Member(id_)
        assert len(self.voters()) in (quorum.SIZE, quorum.SIZE - 1)


TURNS = st.lists(st.tuples(st.sampled_from(["look", "look", "look", "lose"]), st.integers(0, 7), st.booleans()), max_size=60)


@given(TURNS)
def test_as_long_as_a_majority_lives_three_members_stand_again_whoever_is_lost_meanwhile(turns):
    names = ("a", "b", "c")
    etcd = Etcd({name: Member(name) for name in names}, dict(zip(names, range(3), strict=True)), set(range(8)))
    etcd.running |= set(names)
    for what, host, synced in turns:
        if what == "look" and host in etcd.living:
            etcd.look(host, synced)
        elif what == "lose" and len(etcd.living) > quorum.SIZE:
            before = set(etcd.living)
            etcd.living.discard(host)
            if not etcd.decides:
                etcd.living = before  # that loss nobody survives
    for _ in range(8):
        for host in sorted(etcd.living):
            etcd.look(host, synced=True)
    assert all(etcd.home[id_] in etcd.living for id_ in etcd.members), etcd
    assert len(etcd.voters()) == quorum.SIZE == len(etcd.members)
