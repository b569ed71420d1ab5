"""A group that was started again comes back into the run: it finds donors, follows them, asks for a seat and takes it.

The leader (position 0) decides (:class:`Return`); what it orders, all ranks of the group do (:class:`Following`), each with
donors of its own position. Until the group has its seat nobody else waits for it. Then it has a seat but no share of the
step, and makes the last step or two that its donors had committed by then, while the others compute.

Failures it assumes: donors may be lost or too late at any time. Before the group has asked for a seat it begins again with
others. After that its process ends, and its agent starts it again under a new number: an old request must not give a seat to
a group that has not what it said it had.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.core import detector
from megatron_ft.core.protocol import Died
from megatron_ft.engines.base import StepResult
from megatron_ft.errors import RunStopped, StartOver, StoreError
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.guest import Donor, Gone, Guest, look_up
from megatron_ft.types import View

if TYPE_CHECKING:
    from megatron_ft.runtime.crew import Crew
    from megatron_ft.runtime.rank import Rank

DONE, INTERRUPTED, ASTRAY = 2, 1, 0
"""What a rank answers when it was asked to follow; the worst counts."""
_MOST_DONORS = 4
_POLL_S, _AGAIN_S = 0.002, 0.1
_MARGIN = (1, 256)
"""So many boundaries ahead the state is asked for; twice as many after each time that was too late."""


def address_key(group: int, position: int) -> str:
    """Where a rank says how it can be followed: address, port, incarnation."""
    return f"donor/{group}/{position}"


class Following:
    """One rank's part. ``astray`` says why the last attempt is over; ``view`` is the newest since it began: a thread looks
    for it, because the training thread may be at a step, and the others wait for this rank's connections. ``donors``: the
    incarnation of each."""

    def __init__(self, rank: Rank, env: RankEnvironment, agreement: Agreement) -> None:
        self.env, self.agreement, self._rank = env, agreement, rank
        self._guest: Guest | None = None
        self.donors: Mapping[int, int] = {}
        self.astray = ""
        self.bytes = 0
        self.view: View | None = None

    @property
    def stands(self) -> int:
        """The step whose state the engine has; -1: of none."""
        return -1 if self._guest is None else self._guest.stands

    @property
    def ready(self) -> bool:
        """Whether the next step has come."""
        return self._guest is not None and self._guest.ready()

    @property
    def broken(self) -> str:
        """Why nothing more comes of a donor; empty while all are well."""
        return self._guest.broken

    @property
    def carried(self) -> Mapping[str, Any]:
        return self._guest.carried

    @property
    def result(self) -> StepResult | None:
        """Of the last step, where one was made."""
        return self._guest.result

    def begin(self, donors: Sequence[Sequence[int]], at: int, epoch: int) -> int:
        """Call donors, (group, incarnation), in that epoch, and ask for the state of step ``at``."""
        self.end()
        self.astray, self.view = "", None
        self.donors = dict(donors)
        env = self.env
        try:
            found = [self._find(group, incarnation) for group, incarnation in donors]
            who = f"rank {env.position} of group {env.group}, start {env.incarnation},"
            guest = self._guest = Guest(self._rank.engine, env.run_id, env.position, who, found, at)
            arguments = (guest, epoch, self.agreement.clone())
            threading.Thread(target=self._look_for_seat, args=arguments, name="megatron_ft-seat", daemon=True).start()
            self._rank.points.reach("follow", at)
        except Gone as gone:
            self.astray = str(gone)
        return self._together(ASTRAY if self.astray else DONE)

    def has_seat(self, view: View) -> bool:
        env = self.env
        return env.group in view.joined and view.incarnations[env.group] == env.incarnation

    def _look_for_seat(self, guest: Guest, epoch: int, agreement: Agreement) -> None:
        """Thread: until there is one, or another attempt."""
        try:
            while guest is self._guest:
                view = agreement.view(epoch + 1)
                if view is None:
                    time.sleep(_POLL_S)
                    continue
                if guest is not self._guest:
                    return
                epoch = view.epoch
                self.see(view)
                if self.has_seat(view):
                    self._rank.take_seat(view, agreement)
                    self.view = view
                    return
                self.view = view
        except StoreError:
            return  # the training thread finds out

    def _find(self, group: int, incarnation: int) -> Donor:
        said = self.agreement.get(address_key(group, self.env.position))
        if said is None or said[2] != incarnation:
            raise Gone(f"group {group} is not there")
        return Donor(group, incarnation, said[0], said[1])

    def take_state(self, interrupted: Callable[[], bool] = lambda: False) -> int:
        """Wait for the state; all ranks of the group put it in place, or none."""
        return self._wait_then(Guest.await_state, Guest.take_state, interrupted)

    def make_step(self, interrupted: Callable[[], bool] = lambda: False) -> int:
        """Wait for the next step; all ranks make it, or none."""
        return self._wait_then(Guest.await_step, Guest.make_step, interrupted)

    def _wait_then(
        self, wait: Callable[..., bool], act: Callable[[Guest], None], interrupted: Callable[[], bool]
    ) -> int:
        try:
            there = wait(self._guest, lambda: interrupted() or bool(self._rank.lost_because))
            answer = DONE if there else INTERRUPTED
        except Gone as gone:
            self.astray, answer = str(gone), ASTRAY
        answer = self._together(answer)
        if answer == DONE:
            self._rank.pulse.enter("working")
            act(self._guest)
            self._rank.pulse.advance()
            self._rank.pulse.enter("waiting")
        return answer

    def _together(self, answer: int) -> int:
        return answer if self._rank.inner is None else self._rank.inner.least(answer)

    def hear(self, verdict: detector.Verdict) -> None:
        """Any thread: a donor that is frozen says nothing more, and its connection stands."""
        guest = self._guest
        if guest is None or not isinstance(verdict, Died):
            return
        if verdict.incarnation >= self.donors.get(verdict.group, float("inf")):
            guest.give_up(verdict.group, verdict.reason)

    def see(self, view: View) -> None:
        """Any thread: a donor that this view has gone on without may be on a host that is cut off, and says nothing more."""
        guest = self._guest
        for group, incarnation in self.donors.items() if guest is not None else ():
            if not view.seats(group, incarnation):
                guest.give_up(group, f"group {group}: view {view.epoch} has gone on without it")

    def end(self) -> None:
        """This rank needs its donors no more."""
        guest, self._guest = self._guest, None
        if guest is not None:
            self.bytes += guest.received
            guest.close()


class Return:
    """The leader's part, from the first word to the seat. ``hear`` is called now and then, and raises what ends it."""

    def __init__(self, following: Following, crew: Crew, hear: Callable[[], None]) -> None:
        self._following, self._crew, self._hear = following, crew, hear
        self._env, self._agreement = following.env, following.agreement
        self._margin = _MARGIN[0]
        self._epoch = self._env.epoch
        self._view: View | None = None

    def seat(self) -> View:
        """The view in which this group has its seat. Raises ``RunStopped`` when there is none to be had."""
        while True:
            self._hear()
            donors = self._find_donors()
            view = self._follow(donors) if donors else None
            if view is not None:
                return view
            self._look_for_end()
            time.sleep(_AGAIN_S)

    def _find_donors(self) -> list[Donor]:
        """A few live groups, those after this one first, that stand at the same step, or nearly."""
        # Only looked at: who has no seat yet does not put a view back when the store has forgotten.
        while (raw := self._agreement.get(f"view/{self._epoch}")) is not None:
            self._view, self._epoch = View.from_json(raw), self._epoch + 1
        me, groups = self._env.group, self._env.config.room
        found: list[Donor] = []
        for group in ((me + number) % groups for number in range(1, groups)):
            said = self._agreement.get(address_key(group, 0))
            if said is None or (self._view is not None and not self._view.seats(group, said[2])):
                continue  # a host that is gone would let it wait for an answer
            answer = look_up(Donor(group, said[2], said[0], said[1]), self._env.run_id, 0, "")
            if answer is not None:
                answer[1].close()
                if answer[0].epoch is not None and answer[0].step >= 0:
                    found.append(answer[0])
            if len(found) == _MOST_DONORS:
                break
        newest = max((donor.epoch for donor in found), default=0)
        return [donor for donor in found if donor.epoch == newest]  # others have been left out, or are about to know more

    def _follow(self, donors: list[Donor]) -> View | None:
        """Get a state, follow, and ask for a seat; None when another attempt has to be made."""
        at = max(donor.step for donor in donors) + self._margin
        names = [(donor.group, donor.incarnation) for donor in donors]
        if self._crew.follow(names, at, donors[0].epoch) != DONE or self._crew.take_state() != DONE:
            self._margin = min(2 * self._margin, _MARGIN[1])
            return None
        asked = False
        while True:
            self._hear()
            view = self._following.view
            if view is not None and self._following.has_seat(view):
                return view
            if view is not None and not all(view.seats(*name) for name in names):
                return self._over(asked, f"view {view.epoch} has gone on without a group that it follows")
            if self._following.ready:
                if self._crew.make_step() != DONE:
                    return self._over(asked, self._following.astray)
            elif not asked:
                asked = True
                stands = self._following.stands
                self._agreement.announce(detector.Asking(self._env.group, self._env.incarnation, tuple(names), stands))
            elif self._following.broken:
                return self._over(asked, self._following.broken)
            else:
                self._look_for_end()
                time.sleep(_POLL_S)

    def _over(self, asked: bool, why: str) -> None:
        if asked:
            raise StartOver(f"group {self._env.group} has asked for a seat and cannot take it: {why}; it starts over")

    def _look_for_end(self) -> None:
        if self._agreement.get("ended") is not None:
            raise RunStopped(f"the run has ended before group {self._env.group} was back in it")
