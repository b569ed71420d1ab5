"""Any group may die, freeze or fail while the final model is saved: the others save it, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle.final_save_policy import Claim, Waiter, look

LEASE_S = 10.0
TICK_S = 1.0
WRITES_S = 5


@dataclass
class Store:
    """The keys of one save on the control store."""

    saved: str = ""
    claims: list[str] = field(default_factory=list)
    heartbeats: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def newest(self) -> Claim | None:
        number = len(self.claims) - 1
        if number < 0:
            return None
        return Claim(number, self.claims[number], self.heartbeats.get(number, 0), self.failed.get(number, ""))


class Group:
    """One group's loop, a tick at a time. ``fate`` of its attempt: saves, dies, freezes (and never wakes), or fails."""

    def __init__(self, store: Store, own: str, fate: str, begins: int, may_write: bool = True) -> None:
        self.store, self.own, self.fate, self.begins = store, own, fate, begins
        self.waiter = Waiter(own, LEASE_S, begins * TICK_S, may_write)
        self.writing: int | None = None
        self.end = ""

    def tick(self, now: int) -> None:
        if self.end or now < self.begins:
            return
        if self.writing is not None:
            self.write(now)
            return
        self.waiter, action = look(self.waiter, bool(self.store.saved), self.store.newest(), now * TICK_S)
        if action in ("done", "fail"):
            self.end = action
        elif action == "claim":
            self.store.claims.append(self.own)
        elif action == "write":
            self.writing = now

    def write(self, now: int) -> None:
        number = self.store.claims.index(self.own)
        took = now - self.writing
        if self.fate == "dies" and took == WRITES_S - 1:
            self.end = "dead"
        elif self.fate == "fails" and took == WRITES_S - 1:
            self.store.failed[number], self.writing = "disk full", None
        elif took < WRITES_S:
            self.store.heartbeats[number] = self.store.heartbeats.get(number, 0) + 1
        else:
            self.store.saved, self.writing = self.own, None


FATES = st.lists(st.sampled_from(["saves", "dies", "fails"]), min_size=1, max_size=6)


@given(FATES, st.lists(st.integers(0, 30), min_size=6, max_size=6), st.booleans())
def test_the_model_is_saved_if_any_group_can_and_every_wait_ends(fates, begins, follower):
    store = Store()
    groups = [Group(store, str(number), fate, begins[number]) for number, fate in enumerate(fates)]
    groups += [Group(store, "0", "saves", begins[0], may_write=False)] if follower else []
    for now in range(1000):
        for group in groups:
            group.tick(now)
        writing = [group for group in groups if group.writing is not None and not group.end]
        assert len(writing) <= 1
        if all(group.end for group in groups):
            break
    assert all(group.end for group in groups), "a group waits for ever"
    living = [group.end for group in groups if group.end != "dead"]
    # A group that comes when all others have given up has tried, too: then nobody waits for it any more.
    if max(begins[: len(fates)]) - min(begins[: len(fates)]) < LEASE_S:
        assert set(living) <= ({"done"} if "saves" in fates else {"fail"})
    if "saves" in fates:
        assert store.saved


def test_a_writer_that_shows_that_it_works_keeps_its_claim_for_as_long_as_it_takes():
    waiter = Waiter("1", LEASE_S, 0.0)
    for heartbeats in range(100):
        waiter, action = look(waiter, False, Claim(0, "0", heartbeats), heartbeats * 0.9 * LEASE_S)
        assert action == "wait"
    assert look(waiter, False, Claim(0, "0", 99), 101 * LEASE_S)[1] == "claim"


def test_a_rank_that_may_not_write_any_more_leaves_another_one_the_time_to_see_that_the_owner_is_gone():
    """A rank that may write looks at a claim for one lease, and at the latest after another one has claimed."""
    claim = Claim(0, "0.0", failed="its disk is full")
    waiter = Waiter("0.0", LEASE_S, since=0.0, may_write=False, claim=claim)
    actions = {now: look(waiter, False, claim, now)[1] for now in (0.0, LEASE_S, 2 * LEASE_S - TICK_S, 2 * LEASE_S)}
    assert list(actions.values()) == ["wait", "wait", "wait", "fail"]


def test_nobody_waits_for_others_when_all_groups_have_failed():
    one, other = Claim(0, "0.0", failed="there is no such file"), Claim(1, "1.0", failed="there is no such file")
    waiter = Waiter("0.0", LEASE_S, since=0.0, may_write=False, claim=one, groups=2)
    assert [look(waiter, False, claim, 1.0)[1] for claim in (one, other)] == ["wait", "fail"]
    assert look(Waiter("2.0", LEASE_S, since=0.0, groups=2), False, other, 1.0)[1] == "claim", "one that has come back"
