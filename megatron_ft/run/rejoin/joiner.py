"""The return of a group that was started again: it finds donors, follows them, asks for a seat and takes it.

The leader (position 0) decides (:class:`RejoinCoordinator`). All ranks of the group carry out its orders
(:class:`RejoinClient`), each with donors of its own position. Until the group has its seat no other group waits for it.
Then it has a seat but no share of the step, and makes the last step or two that its donors had committed by then, while
the others compute.

The checksums of the donors' whole states have to be equal, and equal to that of the received state. Donors whose states
differ are reported, and the group begins again with others. While several groups live, a single donor is followed only if no
second one answers for a while.

Failures it assumes: donors may be lost or too late at any time, and their states may differ. Before the group has asked
for a seat it begins again with others. After that its process ends, and its agent starts it again under a new number:
an old request must not give a seat to a group that does not have the state that it reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_ft.core.lifecycle import last_state
from megatron_ft.core.lifecycle.restart_policy import Seats
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.errors import RunStopped, StartOver, StoreError, WipedOut
from megatron_ft.run import orders
from megatron_ft.run.rejoin.state_receiver import Gone, Held, Peer, StateReceiver, look_up
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import GroupId, View, given
from megatron_ft.utils.vital_thread import VitalThread

if TYPE_CHECKING:
    from megatron_ft.run.group_executor import GroupExecutor
    from megatron_ft.run.rank_executor import RankExecutor

DONE, INTERRUPTED, ASTRAY, LATE = 2, 1, 0, -1
"""A rank's answers to the order to follow; the worst answer counts. LATE: astray, because a donor had begun the step."""
_NEVER = -(2**62)
"""The answer of a rank that cannot reach its donors, in place of a step."""
_MOST_DONORS = 4
_POLL_S, _AGAIN_S = 0.002, 0.1
_ALONE_S = 10.0
"""Seconds for which a group that finds one donor, although several groups live, looks for a second one."""
_MARGIN = (0, 256)
"""The number of steps between the soonest step that donors can give and the one that is asked for: at first, and at
most after it was too late repeatedly."""


def address_key(group: int, position: int) -> str:
    """Return the key under which a rank publishes how it can be followed: address, port, incarnation."""
    return f"donor/{group}/{position}"


class RejoinClient:
    """One rank's part.

    ``receiver``: of the present attempt, None without one. ``astray`` is the reason why the last attempt is over. ``view``
    is the newest view since it began: a thread looks for it, because the training thread may be in a step, and the others
    wait for this rank's connections. ``donors``: the incarnation of each. ``received``: when the model state was put in
    place (monotonic clock). ``distrusted``: donors, (group, incarnation), whose state was not that of most. ``makes``: the
    step that is being made now as the donors have made it; else None. ``held``: the state that the engine has, also after
    the attempt in which it came; None before the first, and once it may be of two versions of a step. ``failed``: group ->
    its newest start that is known to be lost."""

    def __init__(self, executor: RankExecutor) -> None:
        self.env, self.agreement = executor.rank.env, executor.rank.agreement
        self._executor, self._rank = executor, executor.rank
        self.receiver: StateReceiver | None = None
        self.donors: Mapping[int, int] = {}
        self.distrusted: set[tuple[int, int]] = set()
        self.astray = ""
        self.bytes = 0
        self.received = 0.0
        self.view: View | None = None
        self.makes: int | None = None
        self.held: Held | None = None
        self.failed: dict[GroupId, int] = {}

    @property
    def stands(self) -> int:
        """The step whose state the engine has; -1: none."""
        return -1 if self.receiver is None else self.receiver.held.step

    def begin(self, donors: Sequence[tuple[int, int]], margin: int, epoch: int) -> int:
        """Connect to donors, (group, incarnation), in that epoch, and ask for the state of the soonest step that no donor
        of any rank has begun, or of one that is ``margin`` steps later.

        The step is chosen once the connections are there: steps may be shorter than a connection takes.
        """
        self.end()
        self.astray, self.view = "", None
        self.donors = dict(donors)
        env = self.env
        try:
            found = [self._find(group, incarnation) for group, incarnation in donors]
            who = f"rank {env.position} of group {env.group}, start {env.incarnation},"
            patience_s = env.config.fault_tolerance.detector.longest_collective_s
            guest = self.receiver = StateReceiver(self._executor.engine, env.key, env.position, who, found, patience_s)
        except Gone as gone:
            guest, self.astray = None, str(gone)
        at = -self._together(_NEVER if guest is None else -guest.soonest) + margin
        if guest is None or at >= -_NEVER:
            return ASTRAY
        guest.ask(at)
        VitalThread(self._look_for_seat, "megatron_ft-seat", (guest, epoch, self.agreement.clone())).start()
        self._rank.points.reach("follow", at)
        return DONE

    def has_seat(self, view: View) -> bool:
        env = self.env
        return env.group in view.joined and view.incarnations[env.group] == env.incarnation

    def _look_for_seat(self, guest: StateReceiver, epoch: int, agreement: CoordinationClient) -> None:
        """Thread: look until there is a seat, or another attempt."""
        try:
            # no limit: a thread beside one attempt to come back, and ends with that
            while guest is self.receiver:
                view = agreement.view(epoch + 1)
                if view is None:
                    time.sleep(_POLL_S)
                    continue
                if guest is not self.receiver:
                    return
                epoch = view.epoch
                self.see(view)
                if self.has_seat(view):
                    self._rank.link.connector.begin(view, agreement)  # at once: other groups wait for it
                    self.view = view
                    return
                self.view = view
        except StoreError:
            return  # the training thread finds the reason

    def _find(self, group: int, incarnation: int) -> Peer:
        said = self.agreement.get(address_key(group, self.env.position))
        if said is None or said[2] != incarnation:
            raise Gone(f"group {group} is not there")
        return Peer(group, incarnation, said[0], said[1])

    def take_state(self) -> int:
        """Wait for the state; all ranks of the group put it in place, or none. Raises ``StartOver`` if the state that
        this rank then holds differs from that of its donors."""
        answer = self._wait_then(self._await_one_state, StateReceiver.take_state, lambda: False)
        self.received = time.monotonic()
        if answer == DONE:
            self._check_state(self.stands)
            self._hold()
        return answer

    def _check_state(self, step: int) -> None:
        guard = self._executor.guard
        if {guard.states.whole(step)} != set(given(self.receiver).checksums.values()):
            donor, incarnation = min(self.donors.items())
            named = guard.differs_from(step, donor, incarnation)
            raise StartOver(
                f"group {self.env.group} starts over: the state it has put in place for step {step} is not that of its "
                f"donors{named}"
            )
        guard.found_equal(step)

    def _await_one_state(self, guest: StateReceiver, interrupted: Callable[[], bool]) -> bool:
        """As :meth:`StateReceiver.await_state`; also reports donors whose states differ, and raises ``Gone``."""
        if not guest.await_state(interrupted):
            return False
        states = guest.checksums
        if len(set(states.values())) == 1:
            return True
        groups, when = " ".join(map(str, sorted(states))), f"at the beginning of step {guest.at}"
        epoch, *others = guest.epochs
        if epoch is not None and not others:  # else one may be out already, and the others have redone a step
            view = self.agreement.look_at_view(epoch)
            if view is not None and view.epoch == epoch:
                accused = self._executor.guard.accuse(when, guest.at, view, states)
                self.distrusted.update((group, self.donors[group]) for group in accused)
        raise Gone(f"the states of groups {groups} differ {when}")

    def donors_live(self) -> bool:
        """Return whether all donors answer: then the end of a connection does not mean that a donor is lost. A donor that
        had to take a state itself cannot hand on the step."""
        for donor in self.donors.items():
            try:
                found = look_up(self._find(*donor), self.env.key, self.env.position, "")
            except Gone:
                return False
            if found is None:
                return False
            found[1].close()
        return True

    def await_rest(self) -> None:
        """Wait for what lost donors have sent and has not been read yet."""
        if self.receiver is not None:
            self.receiver.await_rest(self.env.config.fault_tolerance.detector.heartbeat_timeout_s)

    def make_step(self, interrupted: Callable[[], bool] = lambda: False) -> int:
        """Wait for the next step; all ranks make it, or none."""
        answer = self._wait_then(StateReceiver.await_step, self._make, interrupted)
        if answer == DONE:
            self._hold()
        return answer

    def _hold(self) -> None:
        """Note that the engine has a complete state now, and that the run may have none but this."""
        guest = given(self.receiver)
        if not guest.one_version:
            self.held = None
            return
        self.held = guest.held
        self._rank.progress.take_state()
        if self.env.position == 0 and (line := guest.held.carried.get("line")):
            self._rank.history.record("step", later=True, **line)  # written only if this group becomes the writer

    def _make(self, guest: StateReceiver) -> None:
        self.makes = guest.held.step  # hooks of the script may ask for it
        try:
            guest.make_step()
        finally:
            self.makes = None

    def _wait_then(
        self, wait: Callable[..., bool], act: Callable[[StateReceiver], None], interrupted: Callable[[], bool]
    ) -> int:
        try:
            there = wait(self.receiver, lambda: interrupted() or bool(self._rank.lost_because))
            answer = DONE if there else INTERRUPTED
        except Gone as gone:
            self.astray, answer = str(gone), LATE if given(self.receiver).late else ASTRAY
        answer = self._together(answer)
        if answer == DONE:
            self._rank.progress.enter("working")
            act(given(self.receiver))
            self._executor.registered.load(given(self.receiver).held.registered)
            self._rank.progress.advance()
            self._rank.progress.enter("waiting")
        return answer

    def _together(self, answer: int) -> int:
        return answer if self._rank.inner is None else self._rank.inner.all_reduce_min(answer)

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Give up a donor that is frozen: it sends nothing more, and its connection stays. Callable from any thread."""
        if not isinstance(verdict, GroupFailed):
            return
        self.failed[verdict.group] = max(verdict.incarnation, self.failed.get(verdict.group, -1))
        guest = self.receiver
        if guest is None:
            return
        if verdict.incarnation >= self.donors.get(verdict.group, float("inf")):
            guest.give_up(verdict.group, verdict.reason)

    def see(self, view: View) -> None:
        """Give up a donor that is not in ``view``: it may be on a host that is cut off. Callable from any thread."""
        guest = self.receiver
        for group, incarnation in self.donors.items():
            if guest is not None and not view.seats(group, incarnation):
                guest.give_up(group, f"group {group}: view {view.epoch} has gone on without it")

    def end(self) -> None:
        """Disconnect: this rank does not need its donors any more."""
        guest, self.receiver = self.receiver, None
        if guest is not None:
            self.bytes += guest.received
            guest.close()


class RejoinCoordinator:
    """The leader's part, from the search for donors to the seat. ``poll`` is called regularly, and raises to end it.
    ``save`` saves the state that the group holds, and returns what became of it (``last_save``)."""

    def __init__(
        self, following: RejoinClient, executor: GroupExecutor, poll: Callable[[], None], save: Callable[[], str]
    ) -> None:
        self._following, self._executor, self._poll, self._save = following, executor, poll, save
        self._env, self._agreement = following.env, following.agreement
        self._margin, self._tries, self._late = _MARGIN[0], 0, False
        self._epoch = self._env.epoch
        self._view: View | None = None
        self._patience_s = self._env.config.fault_tolerance.detector.heartbeat_timeout_s
        self._alone_since: float | None = None

    def seat(self) -> View:
        """Return the view in which this group has its seat. Raises ``RunStopped`` when there is none to be had, and
        ``WipedOut`` when no member is left and this group holds a complete state, which it has saved."""
        # no limit: a group without a seat ends with the run, or its agent ends it when no group is left
        while True:
            self._poll()
            self._late = False
            donors = self._find_donors()
            if not donors and self._fate() == "lost":
                self._end_with_state()
            view = self._follow(donors) if donors else None
            if view is not None:
                return view
            self._look_for_end()
            if not self._late:
                time.sleep(_AGAIN_S)

    def _find_donors(self) -> list[Peer]:
        """Return a few live groups at the same step, or nearly; each try begins with other groups."""
        self._look_at_views()
        me, groups = self._env.group, self._env.config.max_groups
        found: list[Peer] = []
        for number in range(groups - 1):
            group = (me + 1 + (self._tries + number) % (groups - 1)) % groups
            said = self._agreement.get(address_key(group, 0))
            if said is None or (group, said[2]) in self._following.distrusted:
                continue
            if self._view is not None and not self._view.seats(group, said[2]):
                continue  # a call to a host that is gone would wait for an answer
            answer = look_up(Peer(group, said[2], said[0], said[1]), self._env.key, 0, "")
            if answer is not None:
                answer[1].close()
                if answer[0].epoch is not None and answer[0].step >= 0:
                    found.append(answer[0])
            if len(found) == _MOST_DONORS:
                break
        newest = max((given(donor.epoch) for donor in found), default=0)
        # The other donors have been left out, or are about to be ahead.
        donors = [donor for donor in found if donor.epoch == newest]
        return [] if self._waits_for_second(donors) else donors

    def _look_at_views(self) -> None:
        """Take in the newest view. A group without a seat does not put a view back when the store has forgotten it."""
        while (view := self._agreement.look_at_view(self._epoch)) is not None:
            self._view, self._epoch = view, view.epoch + 1

    def _waits_for_second(self, donors: Sequence[Peer]) -> bool:
        """Return True while a second donor may come: the state of a single one can be compared with no other."""
        members = [] if self._view is None else self._view.members
        others = {(group, start) for group, start in members if group != self._env.group}
        if len(donors) != 1 or len(others - self._following.distrusted) < 2:
            self._alone_since = None
            return False
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        return now - self._alone_since < _ALONE_S

    def _follow(self, donors: list[Peer]) -> View | None:
        """Get a state, follow, and ask for a seat; None if another attempt has to be made."""
        names = [(donor.group, donor.incarnation) for donor in donors]
        answer = self._executor.carry_out(orders.Follow(names, self._margin, given(donors[0].epoch)))
        if answer == DONE:
            answer = self._executor.carry_out(orders.TakeState())
        if answer != DONE:
            self._tries, self._late = self._tries + 1, answer == LATE
            if self._late:
                self._margin = min(max(1, 2 * self._margin), _MARGIN[1])
            return None
        asked, guest = False, given(self._following.receiver)
        # no limit: a donor that is lost or sends nothing for detector.collective_timeout_s ends the attempt
        while True:
            self._poll()
            view = self._following.view
            if view is not None and self._following.has_seat(view):
                return view
            if view is not None and view.seats(self._env.group, self._env.incarnation):
                return self._over(asked, f"view {view.epoch} stands, and the one with its seat was missed")
            if view is not None and not all(view.seats(*name) for name in names):
                return self._over(asked, f"view {view.epoch} has gone on without a group that it follows")
            if guest.ready():
                if self._executor.carry_out(orders.MakeStep()) != DONE:
                    return self._over(asked, self._following.astray)
            elif not asked:
                asked = True
                self._agreement.announce(
                    signals.JoinRequested(self._env.group, self._env.incarnation, tuple(names), guest.held.step)
                )
            elif guest.broken:
                return self._over(asked, guest.broken)
            else:
                self._look_for_end()
                time.sleep(_POLL_S)

    def _over(self, asked: bool, why: str) -> View | None:
        """End this attempt. After it has asked for a seat the group ends; or goes on as a member, if it has the seat by now:
        what members do when donors are lost belongs to the protocol."""
        if not asked:
            return None
        following, env, deadline = self._following, self._env, time.monotonic() + self._patience_s
        # The end of a donor's connection is seen before the notice of its loss, and that of others may come later still.
        while True:
            self._poll()
            view = following.view
            if view is not None and view.seats(env.group, env.incarnation):
                if following.has_seat(view):
                    return view
                break
            if (fate := self._fate()) == "lost":
                self._end_with_state()
            if fate != "unknown" or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        raise StartOver(f"group {self._env.group} has asked for a seat and cannot take it: {why}; it starts over")

    def _fate(self) -> last_state.Fate:
        """Return what is known of the members of the newest view."""
        self._look_at_views()
        if self._view is None:
            return "unknown"
        members = Seats(self._view, graves=dict(self._following.failed))
        return last_state.fate(members, self._env.group, list(self._following.donors.items()))

    def _end_with_state(self) -> None:
        """Save the state and end. Returns if there is none: the agent ends groups that wait for members in vain."""
        if self._following.held is not None:
            reason = f"no member of the run is left, and group {self._env.group} was on its way back{self._save()}"
            self._executor.carry_out(orders.Stop(reason, WipedOut.__name__))
            raise WipedOut(reason)

    def _look_for_end(self) -> None:
        if self._agreement.get("ended") is not None:
            raise RunStopped(f"the run has ended before group {self._env.group} was back in it")
