"""The contract of every communicator (``run.collectives.base``), whichever library is behind it. Subclass it with ``make``.

The members are threads of this process. The cases of membership are those that torch has for its own interface
(``test_c10d_fault_tolerance.py``): shrink, grow, late join, merge and split, after an abort, after a timeout, a reused id.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ft.run.collectives.base import Broken, Communicator, Left, Work

PATIENCE_S = 60.0


class CommunicatorContract:
    """Members are numbered from 0 to 3; ``MEMBERS`` of them are enough for every case."""

    MEMBERS = 4
    LARGE = 500_000
    """Elements of a sum that takes some time."""

    def make(
        self, rendezvous: dist.Store, me: int, members: Sequence[int], epoch: int, timeout_s: float
    ) -> Communicator:
        """Return the connected communicator of one member. Its members call this at the same time."""
        raise NotImplementedError

    def device(self, me: int) -> torch.device:
        """Return the device of a member's tensors."""
        return torch.device("cpu")

    @pytest.fixture(autouse=True)
    def one_run(self):
        self.store = dist.HashStore()
        self.made: list[Communicator] = []
        yield
        for communicator in self.made:
            communicator.close()

    # --- helpers --------------------------------------------------------------------------------------------------

    def build(
        self, members: Sequence[int], epoch: int = 0, timeout_s: float = PATIENCE_S, name: str = ""
    ) -> dict[int, Communicator]:
        """Return the communicator of each member of one view."""

        def one(me: int) -> Communicator:
            rendezvous = dist.PrefixStore(name or f"e{epoch}/{min(members)}", self.store)
            made = self.make(rendezvous, me, members, epoch, timeout_s)
            self.made.append(made)
            return made

        with ThreadPoolExecutor(len(members)) as pool:
            return dict(zip(members, pool.map(one, members), strict=True))

    def full(self, me: int, value: float, size: int = 5) -> torch.Tensor:
        return torch.full((size,), float(value), device=self.device(me))

    def check_sums(self, outers: dict[int, Communicator]) -> None:
        tensors = {me: self.full(me, me + 1) for me in outers}
        for work in [outer.all_reduce(tensors[me]) for me, outer in outers.items()]:
            work.wait()
        assert [tensor.tolist() for tensor in tensors.values()] == [[float(sum(me + 1 for me in outers))] * 5] * len(
            outers
        )

    def fail(self, works: Sequence[Work]) -> None:
        """Return when all of them have failed."""

        def fails(work: Work) -> None:
            with pytest.raises(Broken):
                work.wait()

        with ThreadPoolExecutor(len(works)) as pool:
            for failing in [pool.submit(fails, work) for work in works]:
                failing.result(timeout=PATIENCE_S)

    def close(self, outers: dict[int, Communicator]) -> None:
        for outer in outers.values():
            outer.close()

    # --- operations -----------------------------------------------------------------------------------------------

    def test_a_single_member_needs_no_peer(self):
        (outer,) = self.build([3]).values()
        tensor = self.full(0, 1)
        outer.all_reduce(tensor).wait()
        assert tensor.tolist() == [1.0] * 5

    def test_sums_over_the_members(self):
        self.check_sums(self.build(range(3)))

    def test_bf16_is_added_in_fp32(self):
        """In bf16, 256 + 1 is 256 again."""
        outers = self.build(range(3))
        tensors = {me: self.full(me, value, 1001).bfloat16() for me, value in enumerate((256, 1, 1))}
        for work in [outer.all_reduce(tensors[me]) for me, outer in outers.items()]:
            work.wait()
        assert all(tensor.tolist() == [258.0] * 1001 for tensor in tensors.values())

    def test_a_broadcast_copies_the_sources_tensor(self):
        outers = self.build(range(1, 4))  # a member is not its place
        tensors = {me: self.full(me, me) for me in outers}
        for work in [outer.broadcast(tensors[me], 2) for me, outer in outers.items()]:
            work.wait()
        assert all(tensor.tolist() == [2.0] * 5 for tensor in tensors.values())

    def test_a_receive_waits_for_a_slow_sender(self):
        """The wait is longer than the grace period after an abort: patience with a healthy peer is not limited by that
        period."""
        outers = self.build([1, 3])
        tensor = self.full(3, 0)
        receiving = outers[3].receive(tensor, 1, 5)
        threading.Timer(0.5, lambda: outers[1].send(self.full(1, 1), 3, 5)).start()
        receiving.wait()
        assert tensor.tolist() == [1.0] * 5

    # --- ends -----------------------------------------------------------------------------------------------------

    def test_an_abort_unblocks_every_waiting_member(self):
        """One member never arrives. The others abort, as their watchers make them: all waits end, also those for
        operations that the library forgets."""
        outers = self.build(range(4))
        works = [outers[me].all_reduce(self.full(me, 1, 1000)) for me in range(3)]
        with ThreadPoolExecutor(1) as pool:
            failing = pool.submit(self.fail, works)
            for me in range(3):
                outers[me].abort()
            failing.result()

    def test_a_receive_from_a_silent_peer_ends_with_an_abort(self):
        outers = self.build(range(2))
        receiving = outers[1].receive(self.full(1, 0), 0, 5)
        threading.Timer(0.2, outers[1].abort).start()
        self.fail([receiving])

    def test_nothing_starts_after_an_abort(self):
        outers = self.build(range(2))
        outers[0].abort()
        with pytest.raises(Broken):
            outers[0].all_reduce(self.full(0, 1))
        outers[0].abort()  # repeated aborts are allowed

    def test_a_member_that_leaves_waits_for_no_receive(self):
        outers = self.build(range(2))
        receiving = outers[1].receive(self.full(1, 0), 0, 5)
        outers[1].leave()
        with pytest.raises(Left):
            receiving.wait()

    def test_a_member_that_leaves_cuts_nothing_that_is_on_its_way_while_the_next_view_is_built(self):
        """Members 0 and 1 have all of a step, and begin the next one; member 2 still takes the last part of that step, and
        the next view stands before the old communicators are closed."""
        size = self.LARGE
        outers = self.build(range(3))
        steps = {me: [self.full(me, me + 1, size) for _ in range(3)] for me in outers}
        works = {me: [outer.all_reduce(tensor) for tensor in steps[me]] for me, outer in outers.items()}
        for work in works[0] + works[1]:
            work.wait()
        following = [outers[me].all_reduce(self.full(me, 1, size)) for me in (0, 1)]
        threading.Timer(0.05, outers[1].leave).start()
        outers[0].leave()
        for me, work in enumerate(following):
            with pytest.raises(Left):
                work.wait()
            with pytest.raises(Left):
                outers[me].all_reduce(self.full(me, 1))
        joined = self.build(range(4), epoch=1)
        for work, tensor in zip(works[2], steps[2], strict=True):
            work.wait()
            assert tensor.unique().tolist() == [6.0]
        self.close(outers)
        assert all(work.settles_within(PATIENCE_S) for work in following), "closing ends what was left"
        self.check_sums(joined)

    # --- members come and go --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("gone", [0, 1, 2], ids=["the first", "the one in the middle", "the last"])
    def test_a_view_shrinks_after_a_loss_in_an_operation(self, gone):
        outers = self.build(range(3))
        self.check_sums(outers)
        rest = [me for me in range(3) if me != gone]
        works = [outers[me].all_reduce(self.full(me, 1, 1000)) for me in rest for _ in range(4)]
        for outer in outers.values():  # also that of the lost member: its connections break
            outer.abort()
        self.fail(works)
        self.close(outers)
        self.check_sums(self.build(rest, epoch=1))

    def test_a_view_grows_by_a_member_that_was_never_in_one(self):
        outers = self.build(range(2))
        self.check_sums(outers)
        self.close(outers)
        self.check_sums(self.build(range(4), epoch=1))

    def test_a_member_that_was_lost_comes_back(self):
        for epoch, members in enumerate([range(3), range(2), range(3)]):
            outers = self.build(members, epoch)
            self.check_sums(outers)
            self.close(outers)

    def test_two_views_become_one_and_two_again(self):
        for epoch, views in enumerate([[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 2], [1, 3]]]):
            built = [self.build(members, epoch) for members in views]
            for outers in built:
                self.check_sums(outers)
                self.close(outers)

    def test_a_view_of_the_same_members_follows_one_that_was_aborted(self):
        outers = self.build(range(3))
        for outer in outers.values():
            outer.abort()
        self.close(outers)
        self.check_sums(self.build(range(3), epoch=1))

    def test_members_that_were_alone_come_together(self):
        for me in range(3):
            self.close(self.build([me]))
        self.check_sums(self.build(range(3), epoch=1))

    def test_a_view_follows_one_in_which_an_operation_timed_out(self):
        outers = self.build(range(3), timeout_s=3.0)
        works = [outers[me].all_reduce(self.full(me, 1)) for me in (0, 1)]
        self.fail(works)
        self.close(outers)
        self.check_sums(self.build(range(3), epoch=1))

    def test_a_rendezvous_serves_once(self):
        """All members are refused at once: they would look for the members of the former communicator."""
        self.close(self.build(range(2)))
        refused: list[Any] = []

        def again(me: int) -> None:
            with pytest.raises(RuntimeError, match="already used"):
                self.make(dist.PrefixStore("e0/0", self.store), me, range(2), 0, PATIENCE_S)
            refused.append(me)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(again, range(2)))
        assert sorted(refused) == [0, 1]
        self.check_sums(self.build(range(2), epoch=1))
