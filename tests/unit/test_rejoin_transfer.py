"""A rank follows donors of equal position: it ends with their very bits, whatever they hand over in however many
shares, and no message that is lost, late or changed on its way becomes part of the state."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import RunConfig
from megatron_ft.data.order import BatchSchedule
from megatron_ft.errors import StartOver
from megatron_ft.run.collectives import framing
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.rejoin import joiner, state_receiver, state_sender
from megatron_ft.run.rejoin.state_receiver import Gone, StateReceiver
from megatron_ft.run.rejoin.state_sender import StateSender
from megatron_ft.run.state_checksum import StateCheck
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.types import Microbatch, View
from tests.stores import await_
from tests.support import SECRET

RUN = "a run"
KEY = SECRET.of(RUN)


def engine(seed: int) -> TorchNativeEngine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    return TorchNativeEngine(
        model, optimizer, loss, scheduler=scheduler, bucket_mb=0.0002, gradient_clipping=0.5, slots=3
    )


class Trainer:
    """A group of one rank that trains alone; all of them compute the same."""

    def __init__(self, group: int) -> None:
        self.engine, self.result, self.step = engine(0), None, 0
        self.script: Callable[[Trainer], object] = lambda trainer: None
        """What the training script does before each step."""
        config = RunConfig(groups=4)
        env = RankEnvironment(RUN, group, 0, "", "127.0.0.1", Path(), config)
        places: queue.Queue = queue.Queue()
        self.donor = StateSender(
            env, self.engine, StateCheck(self.engine, 0), Registered(BatchSchedule(1)), lambda: 7, places.put
        )
        self.place = state_receiver.Peer(group, 0, *places.get()[:2])

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.script(self)
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


def follow(trainers: list[Trainer], at: int) -> tuple[TorchNativeEngine, StateReceiver]:
    """A rank that follows all the trainers, and that all of them know."""
    new = engine(1)
    one = StateReceiver(new, KEY, 0, "a test", [trainer.place for trainer in trainers])
    one.ask(at)
    for trainer in trainers:
        while not trainer.donor._followers:
            threading.Event().wait(0.001)
    return new, one


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_rank_that_follows_has_the_very_bits(trainers, count):
    donors = trainers(count)
    new, follower = follow(donors, at=4)
    for donor in donors:
        donor.train(6)
    assert follower.await_state(never)
    follower.take_state()
    assert follower.held.step == 4
    while follower.held.step < 7:
        assert follower.await_step(never)
        follower.make_step()
    assert all(donor.step == 8 for donor in donors)
    assert follower.held.result.step == 6 and follower.held.carried == {"speeds": 7}
    at_7 = follow_alone(7)
    assert new.fingerprint() == at_7.fingerprint()
    assert str(new.optimizer.state_dict()) == str(at_7.optimizer.state_dict())
    assert new.scheduler.state_dict() == at_7.scheduler.state_dict()
    follower.close()


def test_what_is_sent_late_is_the_state_of_its_boundary(trainers, monkeypatch):
    """A donor trains on while nothing of what it has queued has been sent; a single live group adds the next microbatch to
    the very gradients that the last step was made with."""
    monkeypatch.setattr(state_sender, "_PIECE", 256)
    monkeypatch.setattr(framing, "_PIECE", 256)
    sends, send = threading.Event(), framing.send
    monkeypatch.setattr(framing, "send", lambda *sent: sends.wait() and send(*sent))
    (donor,) = trainers(1)
    update = donor.engine.update

    def settled(*arguments):
        donor.donor.settle(state=True)  # as a rank does before each update (``rank_executor``)
        return update(*arguments)

    donor.engine.update = settled
    new, follower = follow([donor], at=4)
    donor.train(5)
    sends.set()
    assert follower.await_state(never)
    follower.take_state()
    while follower.held.step < 6:
        assert follower.await_step(never)
        follower.make_step()
    assert new.fingerprint() == follow_alone(6).fingerprint()
    follower.close()


def test_a_rank_that_follows_makes_each_step_with_the_hyperparameters_of_the_donor(trainers):
    """A script sets the learning rate in its loop, relative to the last one, and momenta in a hook of the optimizer.
    Neither of both runs in the right step in a group that follows: its loop does not run, and its hook may know no
    step."""
    (donor,) = trainers(1)

    def script(trainer: Trainer) -> None:
        trainer.engine.optimizer.param_groups[0]["lr"] *= 1 + trainer.step / 10

    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["betas"] = (0.5 + donor.step / 100, 0.99)

    donor.script = script
    donor.engine.optimizer.register_step_pre_hook(hook)
    new, follower = follow([donor], at=4)
    new.optimizer.register_step_pre_hook(
        lambda optimizer, *_: optimizer.param_groups[0].update(lr=9.0, betas=(0.1, 0.2))
    )
    states = {}
    for step in range(2, 8):
        donor.script = lambda trainer, step=step: (script(trainer), states.update({step: str(whole(trainer.engine))}))
        donor.train()
    assert follower.await_state(never)
    follower.take_state()
    while follower.held.step < 7:
        assert str(whole(new)) == states[follower.held.step], (
            "as the donor has begun the step, with what its script has set"
        )
        assert follower.await_step(never)
        follower.make_step()
    assert str(whole(new)) == states[7]
    follower.close()


def whole(engine: TorchNativeEngine) -> dict:
    return {"optimizer": engine.optimizer.state_dict(), "parameters": engine.fingerprint()}


def follow_alone(steps: int) -> TorchNativeEngine:
    """Return the result without a rank that follows."""
    trainer = Trainer(9)
    trainer.donor.close()
    trainer.train(steps)
    return trainer.engine


def test_a_boundary_that_has_passed_is_refused(trainers):
    (donor,) = trainers(1)
    follower = StateReceiver(engine(1), KEY, 0, "a test", [donor.place])
    follower.ask(at=1)
    with pytest.raises(Gone, match="step 1 was asked for in step 1"):
        follower.await_state(never)
    assert follower.late


def test_a_donor_that_goes_ends_the_attempt(trainers):
    donors = trainers(2)
    _, follower = follow(donors, at=3)
    donors[0].train(3)
    donors[1].donor.close()
    with pytest.raises(Gone, match="group 1"):
        follower.await_state(never)


def test_a_donor_that_has_sent_all_and_then_went_is_not_missed_before_the_next_step(trainers):
    donors = trainers(2)
    _, follower = follow(donors, at=3)
    donors[0].train(3)  # until step 4 is complete; the other donor has not come to step 3
    await_(lambda: 3 in follower._streams[0].steps, "its state and its gradients are there")
    donors[0].donor.close()
    await_(lambda: follower.broken, "it is gone")
    assert not follower.await_state(lambda: True)
    donors[1].train(3)
    assert follower.await_state(never)
    follower.take_state()
    assert follower.await_step(never)
    follower.make_step()
    assert follower.held.step == 4
    with pytest.raises(Gone, match="group 0"):
        follower.await_step(never)
    follower.close()


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_without_memory_for_the_state_the_attempt_ends(trainers, monkeypatch, error):
    """The thread that receives it ends; the training thread must not wait for it."""

    def no_room(skeleton):
        raise error

    monkeypatch.setattr(state_receiver, "_room_for", no_room)
    (donor,) = trainers(1)
    _, follower = follow([donor], at=3)
    donor.train(2)
    deadline = time.monotonic() + 60
    with pytest.raises(Gone, match="allocate memory|MemoryError"):
        follower.await_state(lambda: time.monotonic() > deadline)


def test_a_donor_that_sends_nothing_is_given_up(trainers):
    (donor,) = trainers(1)
    one = StateReceiver(engine(1), KEY, 0, "a test", [donor.place], patience_s=0.2)
    one.ask(at=5)
    deadline = time.monotonic() + 60
    with pytest.raises(Gone, match="timed out"):
        one.await_state(lambda: time.monotonic() > deadline)


class Crowded:
    """A listener of a process that has no descriptor left for the first two calls."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.refused = listener, 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.refused < 2:
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_a_donor_that_had_no_descriptor_left_is_there_for_later_calls(monkeypatch):
    made, listen = [], framing.listen

    def crowded(address: str) -> Crowded:
        made.append(Crowded(listen(address)))
        return made[-1]

    monkeypatch.setattr(framing, "listen", crowded)
    trainer = Trainer(0)
    trainer.train(2)
    new, follower = follow([trainer], at=3)
    trainer.train(3)
    deadline = time.monotonic() + 60
    assert follower.await_state(lambda: time.monotonic() > deadline) and made[0].refused == 2
    follower.close()
    trainer.donor.close()


def test_a_donor_that_is_given_up_is_not_waited_for(trainers):
    donors = trainers(2)
    _, follower = follow(donors, at=3)
    donors[0].train(3)
    follower.give_up(1, "it is frozen")
    with pytest.raises(Gone, match="it is frozen"):
        follower.await_state(never)


class Store:
    """The control store that a rank asks when it comes back."""

    def __init__(self, donors: list[state_receiver.Peer]) -> None:
        self.views: dict[int, View] = {}
        self._places = {joiner.address_key(one.group, 0): [one.address, one.port, one.incarnation] for one in donors}

    def clone(self) -> Store:
        return self

    def get(self, key: str) -> list | None:
        return self._places.get(key)

    def view(self, epoch: int) -> View | None:
        return self.views.get(epoch)

    look_at_view = view


def following(store: Store, epoch: int = 0) -> joiner.RejoinClient:
    """A rank of group 3, which knows the view of that epoch."""
    env = RankEnvironment(RUN, 3, 0, "", "127.0.0.1", Path(), RunConfig(groups=4), incarnation=1, epoch=epoch)
    own = engine(1)
    quiet = {"points": MagicMock(), "progress": MagicMock()}
    rank = SimpleNamespace(env=env, agreement=store, inner=None, lost_because="", **quiet)
    guard = StateGuard(MagicMock(env=env), MagicMock(), StateCheck(own, 0), MagicMock())
    executor = SimpleNamespace(rank=rank, engine=own, guard=guard, registered=Registered(BatchSchedule(1)))
    return joiner.RejoinClient(executor)


def test_the_state_of_the_first_step_is_asked_for_that_no_donor_has_begun(trainers):
    donors = trainers(2)
    donors[1].train()
    follower = following(Store([trainer.place for trainer in donors]))
    for margin in (0, 4):
        assert follower.begin([(0, 0), (1, 0)], margin, epoch=7) == joiner.DONE
        assert follower.receiver.at == 3 + margin
    follower.end()
    donors[1].donor.close()
    assert follower.begin([(0, 0), (1, 0)], 0, epoch=7) == joiner.ASTRAY and follower.astray


@pytest.mark.parametrize("seat", [False, True])
def test_a_donor_that_the_others_have_gone_on_without_is_not_waited_for(trainers, seat):
    """Its host is cut off: no connection ends, and no process there can report that it is dead. The rank finds this
    out while it looks for its seat, or when it gets a view after that."""
    donors = trainers(2)
    store = Store([trainer.place for trainer in donors])
    follower = following(store)
    assert follower.begin([(0, 0), (1, 0)], margin=1, epoch=7) == joiner.DONE
    donors[0].train(3)
    without = View(8, (0, 2), "group 1 is cut off")
    if seat:
        follower.see(without)
    else:
        store.views[8] = without
    assert follower.take_state() == joiner.ASTRAY
    assert follower.astray == "group 1: view 8 has gone on without it"
    follower.end()


def test_only_a_step_that_was_asked_for_too_late_makes_the_next_attempt_ask_for_a_later_one(trainers):
    """And it begins without a pause: steps may be short. Steps may also be long, and donors be lost in several attempts."""
    donors = trainers(1)
    follower = following(Store([trainer.place for trainer in donors]))
    answers = {joiner.orders.Follow: joiner.DONE}
    executor = SimpleNamespace(carry_out=lambda order: answers[type(order)])
    way_back = joiner.RejoinCoordinator(follower, executor, never, str)
    tried = []
    for answer in (joiner.ASTRAY, joiner.LATE, joiner.ASTRAY, joiner.LATE):
        answers[joiner.orders.TakeState] = answer
        assert way_back._follow([donors[0].place._replace(epoch=7)]) is None
        tried.append((way_back._margin, way_back._late))
    assert tried == [(0, False), (1, True), (1, False), (2, True)]


def follow_in_view(donors: list[Trainer], live: tuple[int, ...]) -> joiner.RejoinClient:
    """Group 3 follows all donors from step 3 on, in epoch 7 with these groups; the donors have begun that step."""
    store = Store([trainer.place for trainer in donors])
    store.views[7] = View(7, live, "")
    follower = following(store)
    names = [(number, 0) for number in range(len(donors))]
    assert follower.begin(names, margin=1, epoch=7) == joiner.DONE
    for donor in donors:
        while not donor.donor._followers:
            threading.Event().wait(0.001)
        donor.train(2)
    return follower


def flip_a_bit(of: TorchNativeEngine) -> None:
    next(of.model.parameters()).data.view(-1).numpy().view("int32")[5] ^= 1 << 22


@pytest.mark.parametrize("live, said", [((0, 1, 2), ["GroupFailed"]), ((0, 1), ["RunHalted"]), ((0, 1, 3), [])])
def test_donors_whose_states_differ_are_reported_and_no_state_is_taken(trainers, live, said):
    """One of three is out, two of two end the run, and two of three groups are no reason to end it."""
    donors = trainers(min(3, sum(group < 3 for group in live)))
    flip_a_bit(donors[1].engine)
    follower = follow_in_view(donors, live)
    before = follower._executor.engine.fingerprint()
    assert follower.take_state() == joiner.ASTRAY
    assert "differ at the beginning of step 3" in follower.astray and follower.stands == -1
    assert follower._executor.engine.fingerprint() == before
    guard = follower._executor.guard
    assert [type(call.args[0]).__name__ for call in guard._agreement.announce.call_args_list] == said
    ((event,), line) = guard._history.note.call_args
    assert event == "divergence" and line["step"] == 3 and ("tied" in line) == (said != ["GroupFailed"])
    found = joiner.RejoinCoordinator(follower, None, never, str)._find_donors()
    assert (1 in [donor.group for donor in found]) == (said != ["GroupFailed"])
    follower.end()


def test_donors_of_different_epochs_are_not_accused(trainers):
    """One of them may be out, and the others may have made the step again, with the sums in another order."""
    donors = trainers(3)
    flip_a_bit(donors[1].engine)
    donors[1].donor._epoch = lambda: 6
    follower = follow_in_view(donors, (0, 1, 2))
    assert follower.take_state() == joiner.ASTRAY and "differ" in follower.astray
    assert not follower._executor.guard._history.note.called and not follower.distrusted
    follower.end()


def test_a_state_that_was_put_in_place_has_to_equal_that_of_the_donors(trainers):
    follower = follow_in_view(trainers(2), live=(0, 1))
    own = follower._executor.engine
    load = own.load_state
    own.load_state = lambda state: (load(state), flip_a_bit(own))
    with pytest.raises(StartOver, match="is not that of its donors"):
        follower.take_state()
    follower.end()


def test_a_single_donor_is_followed_only_if_no_other_group_that_lives_answers_for_a_while(trainers, monkeypatch):
    """Its state could be compared with no other; a group that followed a diverged donor would make it the majority."""
    donors, now = trainers(2), [0.0]
    monkeypatch.setattr(joiner, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    store = Store([trainer.place for trainer in donors])
    store.views[0] = View(0, (0, 1, 3), "")  # with the former start of group 3
    way_back = joiner.RejoinCoordinator(following(store), None, never, str)
    found = lambda: [donor.group for donor in way_back._find_donors()]  # noqa: E731
    donors[1].donor._epoch = lambda: None  # as while it has no state
    assert found() == []
    donors[1].donor._epoch = lambda: 7
    assert found() == [0, 1]
    donors[1].donor._epoch = lambda: 6  # a moment later in its new epoch than group 0
    assert found() == []
    now[0] += joiner._ALONE_S
    assert found() == [0]
    donors[1].donor._epoch = lambda: 7
    assert found() == [0, 1]
    donors[1].donor._epoch = lambda: None
    assert found() == []
    store.views[1] = View(1, (0,), "group 1 is lost")
    assert found() == [0]


def test_a_group_does_not_wait_for_a_second_donor_that_it_distrusts(trainers):
    (donor,) = trainers(1)
    store = Store([donor.place])
    store.views[0] = View(0, (0, 1), "")
    follower = following(store)
    way_back = joiner.RejoinCoordinator(follower, None, never, str)
    assert way_back._find_donors() == []
    follower.distrusted.add((1, 0))
    assert [one.group for one in way_back._find_donors()] == [0]
    unknown = joiner.RejoinCoordinator(following(Store([donor.place])), None, never, str)
    assert [one.group for one in unknown._find_donors()] == [0], "it knows no view"


def test_only_members_of_the_newest_view_are_asked_to_be_donors(trainers):
    """The host of any other rank may be gone, and would let the returning rank wait for an answer."""
    donors = trainers(2)
    gone = framing.listen("127.0.0.1")  # no process answers there
    gone.settimeout(0.0)
    lost = state_receiver.Peer(2, 0, "127.0.0.1", gone.getsockname()[1])
    store = Store([donors[0].place, donors[1].place, lost])
    store.views = {4: View(4, (0, 1, 2), ""), 5: View(5, (0, 1, 2), "", incarnations={2: 1}), 6: View(6, (0, 1), "")}
    for last in (6, 5):
        store.views = {epoch: view for epoch, view in store.views.items() if epoch <= last}
        found = joiner.RejoinCoordinator(following(store, epoch=4), None, never, str)._find_donors()
        assert [donor.group for donor in found] == [0, 1]
    with pytest.raises(BlockingIOError):
        gone.accept()
    gone.close()


def test_a_step_that_the_donor_has_not_made_itself_cannot_be_followed(trainers):
    """The donor was a step behind, and took the state of another group: it has no gradients of that step to pass on."""
    (donor,) = trainers(1)
    _, follower = follow([donor], at=3)
    donor.train(2)
    assert follower.await_state(never)
    follower.take_state()
    donor.result = None
    donor.train()
    with pytest.raises(Gone):
        follower.await_step(never)


@pytest.mark.slow
def test_a_follower_that_takes_nothing_is_dropped(trainers):
    (donor,) = trainers(1)
    end = framing.call(*donor.place[2:4], KEY.of(state_receiver.DONOR), {"position": 0, "who": "a lazy one"})
    with end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        framing.receive_message(end)
        framing.send_message(end, {"at": 3, "part": 0, "parts": 1})
        while not donor.donor._followers:
            threading.Event().wait(0.001)
        (one,) = donor.donor._followers
        one.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        longest = 0
        while not one.gone:  # the sockets' buffers hold some steps
            donor.train()
            longest = max(longest, one.queue.qsize())
        assert longest <= 8 + 2


@pytest.mark.parametrize("position, run", [(1, RUN), (0, "another run")])
def test_a_rank_of_another_position_or_run_is_sent_away(trainers, position, run):
    (donor,) = trainers(1)
    assert state_receiver.look_up(donor.place, SECRET.of(run), position, "a stranger") is None


def test_an_older_start_is_not_followed(trainers):
    (donor,) = trainers(1)
    assert state_receiver.look_up(donor.place._replace(incarnation=1), KEY, 0, "a test") is None


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 5))
def test_shares_cover_everything_once(sizes, parts):
    taken = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for part in range(parts):
        for share in framing.shares_of(taken, part, parts):
            assert len(share)
            share += 1
    assert all(bool((each == 1).all()) for each in taken)


TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(TYPES)), max_size=8), st.integers(1, 5))
def test_no_element_of_a_state_comes_from_two_donors(state, parts):
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in state]
    for part in range(parts):
        for share in framing.shares_of(tensors, part, parts):
            share += part + 1
    for tensor in tensors:
        elements = framing.as_bytes(tensor).view(-1, tensor.element_size())
        assert all(len(set(element)) == 1 and element[0] > 0 for element in elements.tolist())


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_bit_that_flips_on_the_way_is_found(where, bit):
    values = torch.arange(1000, dtype=torch.float32)
    ours, theirs = socket.socketpair()
    between, end = socket.socketpair()
    with ours, theirs, between, end:
        framing.send_message(ours, {"words": 1})
        framing.send(ours, [framing.as_bytes(values)], lambda count: None)
        ours.shutdown(socket.SHUT_WR)
        data = bytearray()
        while piece := theirs.recv(65536):
            data += piece
        data[where % len(data)] ^= 1 << bit
        between.sendall(data)
        between.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, ValueError)):
            framing.receive_message(end)
            framing.receive(end, [torch.empty(4000, dtype=torch.uint8)])


def test_a_step_that_donors_have_committed_in_different_epochs_is_not_held(trainers):
    """One of them may be out, and the others may have made the step again: the state would be of two versions."""
    donors = trainers(2)
    follower = follow_in_view(donors, (0, 1))
    follower._rank.history = MagicMock()
    assert follower.take_state() == joiner.DONE and follower.held.step == 3
    for epoch in (7, 8):  # the same in both, and then not
        for donor, said in zip(donors, (7, epoch), strict=True):
            boundary = donor.donor.boundary
            carried = {"speeds": {}, "line": {"epoch": said}}
            donor.donor.boundary = lambda step, result, _, boundary=boundary, carried=carried: boundary(
                step, result, lambda: carried
            )
            donor.train(1)
            donor.donor.boundary = boundary
        assert follower.make_step() == joiner.DONE
        assert (follower.held is None) == (epoch == 8)
    follower.end()
