"""The replacement of a lost member of the run's own etcd: against a model of etcd, with hosts lost at any moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle import etcd_membership
from megatron_ft.core.lifecycle.etcd_membership import Add, Member, Promote, Remove

THREE = [Member("a"), Member("b"), Member("c")]


ABLE, UNABLE, APART = (
    etcd_membership.Able("", "/run"),
    etcd_membership.Able("no etcd on PATH", "/run"),
    etcd_membership.Able("", ""),
)


@pytest.mark.parametrize(
    ("hosts", "founders", "why"),
    [
        ([ABLE] * 3, (0, 1, 2), "3 of 3 hosts can start an etcd"),
        ([UNABLE, ABLE, ABLE, UNABLE, ABLE], (1, 2, 4), "3 of 5 hosts can start an etcd"),
        ([ABLE] * 2, (), "an etcd of the run's own needs 3 hosts"),
        ([ABLE, UNABLE, ABLE], (), "2 of 3 hosts that are needed can start an etcd; host 1: no etcd on PATH"),
        (
            [ABLE] * 3 + [APART],
            (),
            "an etcd of the run's own needs a run directory that all hosts see at the same path",
        ),
        (
            [ABLE] * 3 + [etcd_membership.Able("", "/mnt/run")],
            (),
            "needs a run directory that all hosts see at the same path",
        ),
    ],
)
def test_an_etcd_is_founded_where_three_hosts_can_have_it(hosts, founders, why):
    found, reason = etcd_membership.founders(dict(enumerate(hosts)))
    assert found == founders and why in reason


@given(
    st.lists(
        st.builds(etcd_membership.Able, st.sampled_from(["", "no etcd"]), st.sampled_from(["/run", "/run", ""])),
        max_size=7,
    )
)
def test_all_hosts_found_the_same_etcd_on_hosts_that_can_have_it(hosts):
    said = dict(enumerate(hosts))
    found, why = etcd_membership.founders(said)
    assert (found, why) == etcd_membership.founders(dict(reversed(said.items()))), (
        "in whatever order the hosts have come"
    )
    assert why and len(found) in (0, etcd_membership.SIZE)
    shared = all(host.directory for host in hosts)
    able = [rank for rank, host in said.items() if not host.lacks]
    assert list(found) == (able[: etcd_membership.SIZE] if shared and len(able) >= etcd_membership.SIZE else [])


def test_without_a_loss_nothing_changes():
    assert etcd_membership.change(THREE, None, (), synced=False) is None
    assert etcd_membership.change(THREE, "a", (), synced=False) is None


def test_a_newcomer_learns_then_the_lost_one_goes_then_it_votes():
    assert etcd_membership.change(THREE, None, {"a"}, synced=False) == Add()
    learning = [*THREE, Member("d", learner=True)]
    assert etcd_membership.change(learning, "d", {"a"}, synced=False) is None
    assert etcd_membership.change(learning, "d", {"a"}, synced=True) == Remove("a")
    assert etcd_membership.change(learning[1:], "d", (), synced=True) == Promote("d")
    assert etcd_membership.change([*THREE[1:], Member("d")], "d", (), synced=True) is None


def test_one_learner_at_a_time_and_a_lost_one_makes_room():
    learning = [*THREE, Member("d", learner=True)]
    assert etcd_membership.change(learning, None, {"a"}, synced=False) is None
    assert etcd_membership.change(learning, None, {"a", "d"}, synced=False) == Remove("d")


def test_a_needless_newcomer_goes_again_when_the_lost_one_is_back():
    assert etcd_membership.change([*THREE, Member("d", learner=True)], "d", (), synced=True) == Remove("d")


def test_a_member_with_a_vote_changes_nothing():
    assert etcd_membership.change(THREE, "b", {"a"}, synced=True) is None


@pytest.mark.parametrize(("me", "hosts", "turn"), [(3, {3, 4}, 0), (4, {3, 4}, 1), (6, {3, 4, 6}, 2)])
def test_hosts_take_turns(me, hosts, turn):
    first = etcd_membership.patience_s(3, {3})
    assert first == etcd_membership.PATIENCE_S
    assert (etcd_membership.patience_s(me, hosts) > first) == bool(turn)


@dataclass
class Etcd:
    """The part of etcd's own rules that matters: no change without a majority of votes that live, one learner at
    most."""

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

    def poll(self, host: int, synced: bool) -> None:
        """One turn of a host: its decision, carried out if etcd allows it."""
        if not self.decides:
            return
        lost = {id_ for id_ in self.members if self.home[id_] not in self.living}
        match etcd_membership.change(list(self.members.values()), self.own(host), lost, synced):
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
        assert len(self.voters()) in (etcd_membership.SIZE, etcd_membership.SIZE - 1)


TURNS = st.lists(
    st.tuples(st.sampled_from(["look", "look", "look", "lose"]), st.integers(0, 7), st.booleans()), max_size=60
)


@given(TURNS)
def test_as_long_as_a_majority_lives_three_members_stand_again_whichever_are_lost_meanwhile(turns):
    names = ("a", "b", "c")
    etcd = Etcd({name: Member(name) for name in names}, dict(zip(names, range(3), strict=True)), set(range(8)))
    etcd.running |= set(names)
    for what, host, synced in turns:
        if what == "look" and host in etcd.living:
            etcd.poll(host, synced)
        elif what == "lose" and len(etcd.living) > etcd_membership.SIZE:
            before = set(etcd.living)
            etcd.living.discard(host)
            if not etcd.decides:
                etcd.living = before  # no etcd survives that loss
    for _ in range(8):
        for host in sorted(etcd.living):
            etcd.poll(host, synced=True)
    assert all(etcd.home[id_] in etcd.living for id_ in etcd.members), etcd
    assert len(etcd.voters()) == etcd_membership.SIZE == len(etcd.members)
