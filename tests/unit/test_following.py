"""A rank follows others of equal position: it ends with their very bits, whatever they hand over in how many shares, and
nothing that is lost, late or changed on its way is taken for the state."""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ft.config import RunConfig
from megatron_ft.engines.torch_native import TorchNativeEngine
from megatron_ft.runtime import comeback, guest, wire
from megatron_ft.runtime.donor import Donor
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.guest import Gone, Guest
from megatron_ft.types import Microbatch, View

RUN = "a run"


def engine(seed: int) -> TorchNativeEngine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    return TorchNativeEngine(model, optimizer, loss, scheduler=scheduler, bucket_mb=0.0002, gradient_clipping=0.5, slots=3)


class Trainer:
    """A group of one rank that trains alone; all of them compute the same."""

    def __init__(self, group: int) -> None:
        self.engine, self.result, self.step = engine(0), None, 0
        config = RunConfig(groups=4)
        env = RankEnvironment(RUN, group, 0, "", "127.0.0.1", Path(), config)
        places: queue.Queue = queue.Queue()
        self.donor = Donor(env, self.engine, lambda: 7, places.put)
        self.place = guest.Donor(group, 0, *places.get()[:2])

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.donor.boundary(self.step, self.result, lambda: {"speeds": self.step})
            self.engine.begin_step()
            values = torch.randn(16, 8, generator=torch.Generator().manual_seed(self.step))
            self.engine.compute(Microbatch(self.step, 0, 0), values, self.step, lambda point: None)
            for bucket in range(self.engine.num_buckets):
                self.engine.keep_local(bucket)
            self.result = self.engine.update(self.step, 1, lambda point: None)
            self.step += 1


@pytest.fixture
def trainers():
    with ExitStack() as stack:

        def make(count: int) -> list[Trainer]:
            made = [Trainer(group) for group in range(count)]
            for trainer in made:
                stack.callback(trainer.donor.close)
                trainer.train(2)
            return made

        yield make


def never() -> bool:
    return False


def follow(trainers: list[Trainer], at: int) -> tuple[TorchNativeEngine, Guest]:
    """Somebody who follows them all, and whom they all know."""
    new = engine(1)
    one = Guest(new, RUN, 0, "a test", [trainer.place for trainer in trainers], at)
    for trainer in trainers:
        while not trainer.donor._followers:
            threading.Event().wait(0.001)
    return new, one


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_follows_has_the_very_bits(trainers, count):
    donors = trainers(count)
    new, follower = follow(donors, at=4)
    for donor in donors:
        donor.train(6)
    assert follower.await_state(never)
    follower.take_state()
    assert follower.stands == 4
    while follower.stands < 7:
        assert follower.await_step(never)
        follower.make_step()
    assert all(donor.step == 8 for donor in donors)
    assert follower.result.step == 6 and follower.carried == {"speeds": 7}
    at_7 = follow_alone(7)
    assert new.fingerprint() == at_7.fingerprint()
    assert str(new.optimizer.state_dict()) == str(at_7.optimizer.state_dict())
    assert new.scheduler.state_dict() == at_7.scheduler.state_dict()
    follower.close()


def follow_alone(steps: int) -> TorchNativeEngine:
    """What it comes to without anybody who follows."""
    trainer = Trainer(9)
    trainer.donor.close()
    trainer.train(steps)
    return trainer.engine


def test_a_boundary_that_has_passed_is_refused(trainers):
    (donor,) = trainers(1)
    follower = Guest(engine(1), RUN, 0, "a test", [donor.place], at=1)
    with pytest.raises(Gone):
        follower.await_state(never)


def test_a_donor_that_goes_ends_the_attempt(trainers):
    donors = trainers(2)
    _, follower = follow(donors, at=3)
    donors[0].train(3)
    donors[1].donor.close()
    with pytest.raises(Gone, match="group 1"):
        follower.await_state(never)


def test_a_donor_that_is_given_up_is_not_waited_for(trainers):
    donors = trainers(2)
    _, follower = follow(donors, at=3)
    donors[0].train(3)
    follower.give_up(1, "it is frozen")
    with pytest.raises(Gone, match="it is frozen"):
        follower.await_state(never)


class Store:
    """What a rank that comes back asks the control store."""

    def __init__(self, donors: list[guest.Donor]) -> None:
        self.views: dict[int, View] = {}
        self._places = {comeback.address_key(one.group, 0): [one.address, one.port, one.incarnation] for one in donors}

    def clone(self) -> Store:
        return self

    def get(self, key: str) -> list | dict | None:
        return self._places.get(key, self._views.get(key))

    @property
    def _views(self) -> dict[str, dict]:
        return {f"view/{epoch}": view.to_wire() for epoch, view in self.views.items()}

    def view(self, epoch: int) -> View | None:
        return self.views.get(epoch)


def following(store: Store, epoch: int = 0) -> comeback.Following:
    """Of group 3, which knows the view of that epoch."""
    rank = SimpleNamespace(engine=engine(1), inner=None, lost_because="", points=SimpleNamespace(reach=lambda *_: None))
    env = RankEnvironment(RUN, 3, 0, "", "127.0.0.1", Path(), RunConfig(groups=4), incarnation=1, epoch=epoch)
    return comeback.Following(rank, env, store)


@pytest.mark.parametrize("seat", [False, True])
def test_a_donor_that_the_others_have_gone_on_without_is_not_waited_for(trainers, seat):
    """Its host is cut off: no connection ends, and nobody there can say that it is dead. Found while this rank looks for its
    seat, or told with a view after that."""
    donors = trainers(2)
    store = Store([trainer.place for trainer in donors])
    follower = following(store)
    assert follower.begin([(0, 0), (1, 0)], at=3, epoch=7) == comeback.DONE
    donors[0].train(3)
    without = View(8, (0, 2), "group 1 is cut off")
    if seat:
        follower.see(without)
    else:
        store.views[8] = without
    assert follower.take_state() == comeback.ASTRAY
    assert follower.astray == "group 1: view 8 has gone on without it"
    follower.end()


def test_only_members_of_the_newest_view_are_asked_to_be_donors(trainers):
    """The host of any other may be gone, and would let who comes back wait for an answer."""
    donors = trainers(2)
    gone = wire.listen("127.0.0.1")  # nobody answers there
    gone.settimeout(0.0)
    lost = guest.Donor(2, 0, "127.0.0.1", gone.getsockname()[1])
    store = Store([donors[0].place, donors[1].place, lost])
    store.views = {4: View(4, (0, 1, 2), ""), 5: View(5, (0, 1, 2), "", incarnations={2: 1}), 6: View(6, (0, 1), "")}
    for last in (6, 5):
        store.views = {epoch: view for epoch, view in store.views.items() if epoch <= last}
        found = comeback.Return(following(store, epoch=4), None, never)._find_donors()
        assert [donor.group for donor in found] == [0, 1]
    with pytest.raises(BlockingIOError):
        gone.accept()
    gone.close()


def test_what_the_donor_has_not_made_itself_cannot_be_followed(trainers):
    """It was a step behind, and took the state of another group: nobody has the gradients of that step from it."""
    (donor,) = trainers(1)
    _, follower = follow([donor], at=3)
    donor.train(2)
    assert follower.await_state(never)
    follower.take_state()
    donor.result = None
    donor.train()
    with pytest.raises(Gone):
        follower.await_step(never)


def test_one_that_takes_nothing_is_dropped(trainers):
    (donor,) = trainers(1)
    end = wire.call(*donor.place[2:4], RUN, {"position": 0, "who": "a lazy one"})
    with end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.hear(end)
        wire.say(end, {"at": 3, "part": 0, "parts": 1})
        while not donor.donor._followers:
            threading.Event().wait(0.001)
        (one,) = donor.donor._followers
        longest = 0
        while not one.gone:  # the sockets' buffers hold some steps
            donor.train()
            longest = max(longest, one.queue.qsize())
        assert longest <= 8 + 2


@pytest.mark.parametrize("position, run", [(1, RUN), (0, "another run")])
def test_who_is_of_another_position_or_run_is_sent_away(trainers, position, run):
    (donor,) = trainers(1)
    assert guest.look_up(donor.place, run, position, "a stranger") is None


def test_an_older_start_is_not_followed(trainers):
    (donor,) = trainers(1)
    assert guest.look_up(donor.place._replace(incarnation=1), RUN, 0, "a test") is None


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 5))
def test_shares_cover_everything_once(sizes, parts):
    taken = [[0] * size for size in sizes]
    for part in range(parts):
        for which, first, last in wire.share(sizes, part, parts):
            assert first < last
            for index in range(first, last):
                taken[which][index] += 1
    assert all(count == 1 for each in taken for count in each)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_bit_that_turns_on_the_way_is_found(where, bit):
    values = torch.arange(1000, dtype=torch.float32)
    ours, theirs = socket.socketpair()
    between, end = socket.socketpair()
    with ours, theirs, between, end:
        wire.say(ours, {"words": 1})
        wire.send(ours, [wire.as_bytes(values)], lambda count: None)
        ours.shutdown(socket.SHUT_WR)
        data = bytearray()
        while piece := theirs.recv(65536):
            data += piece
        data[where % len(data)] ^= 1 << bit
        between.sendall(data)
        between.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, ValueError)):
            wire.hear(end)
            wire.receive(end, [torch.empty(4000, dtype=torch.uint8)])
