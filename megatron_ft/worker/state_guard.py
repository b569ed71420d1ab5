"""One rank's part in keeping the states of all groups equal (``core.detection.state_divergence`` decides).

At the beginning of a step a rank puts the checksum that is due (``worker.state_checksum``) into its group's row of
bucket 0. Once that bucket is reduced every rank compares the checksums of the ranks of equal position, before it
updates. The ranks of a group whose state is not the one that most groups hold end; their agents start the group again,
and it takes the others' state like every group that comes back. Where no state is held by most groups, the whole run
ends.

A state that differs is detected after ``detector.state_check_steps`` steps at most. The group's contributions to the
sums of those steps stay in them: all other groups have taken the same updates, and go on from equal states.

Failures it assumes: the control store may be away, and any group may be lost while it reports which tensors differ; the
record does not name them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.coordination.client import CoordinationClient
from megatron_ft.core.detection import state_divergence
from megatron_ft.core.protocol import signals
from megatron_ft.errors import InvariantBroken, StartOver, StoreError
from megatron_ft.runlog.history import History
from megatron_ft.types import GroupId, View
from megatron_ft.worker.nonfinite import SUSPECT_AFTER, NonFinite
from megatron_ft.worker.state_checksum import StateCheck, differing
from megatron_ft.worker.step_timer import Slots

_NAMING_S = 5.0
"""Seconds that a rank that has found different states waits for the per-tensor checksums of other groups."""
_POLL_S = 0.01
_MOST_NAMED = 20
"""Number of names of differing tensors in one line of the record."""

T = TypeVar("T")


class StateGuard:
    """One rank's comparison of states. Only the training thread calls its methods, except for :meth:`publish`."""

    def __init__(
        self,
        env: RankEnvironment,
        slots: Slots,
        states: StateCheck,
        nonfinite: NonFinite,
        agreement: CoordinationClient,
        history: History,
    ) -> None:
        self._env, self._slots, self._states = env, slots, states
        self._nonfinite, self._agreement, self._history = nonfinite, agreement, history
        self._accused: set[tuple[GroupId, int]] = set()
        self._ties: set[tuple[tuple[GroupId, ...], ...]] = set()
        self._halted = False

    def say(self, step: int) -> None:
        """Put this rank's checksum into the cleared local bucket 0 of ``step``, for the comparison in all groups."""
        self._slots.say_state(self._states.of_step(step))
        self._slots.say_suspect(self._nonfinite.suspect)

    def compare(self, step: int, live: Collection[GroupId]) -> None:
        """Compare the groups' states, once bucket 0 of ``step`` is reduced, and before the update.

        Raises ``StartOver`` where this group's state, or its gradient in several steps, is not what most groups have, and
        ``InvariantBroken`` where no state is held by most groups.
        """
        suspects, group = self._slots.suspects(), self._env.group
        if group in state_divergence.nonfinite_minority({member: member in suspects for member in live}):
            raise StartOver(
                f"group {group} leaves: its own gradient was not finite in {SUSPECT_AFTER} steps in a row, that of most "
                f"groups was. It takes their state; if it happens again, look at the hardware it runs on"
            )
        if self._states.due(step) is None:
            return
        said = self._slots.states()
        found = state_divergence.compare(said)
        if found.minority or found.tied:
            self._part(step, said, found)

    def _part(self, step: int, said: Mapping[GroupId, Any], found: state_divergence.Comparison) -> None:
        """One group of each set with equal states publishes a checksum of each tensor, so that the record can name the
        differing ones. A group ends as a whole with the first of its ranks that leaves, so a rank whose own state is as
        it should be waits until the differing ones have recorded it."""
        me = self._env.group
        sets = found.tied or (tuple(group for group in said if group not in found.minority), found.minority)
        other = next(min(groups) for groups in sets if me not in groups)
        agreement, key = self._agreement.clone(_NAMING_S), f"divergence/{step}/{self._env.position}"
        mine = self._states.details(step)
        with suppress(StoreError):
            if me in map(min, sets):
                agreement.put(f"{key}/{me}", mine)
            if me == min(said) if found.tied else me in found.minority:
                deadline = time.monotonic() + _NAMING_S
                differ, is_mine = self._slots.differing(said[me], said[other])
                if is_mine:
                    theirs = _await(lambda: agreement.get(f"{key}/{other}"), deadline)
                    who = {"tied": found.tied} if found.tied else {"group": me, "incarnation": self._env.incarnation}
                    what = [] if theirs is None else differing(mine, theirs)
                    self._record(step, what, position=self._env.position, **who)
                    agreement.put(f"{key}/recorded/{me}", True)
                for position in differ - {self._env.position} if len(said[me]) > 1 else ():
                    recorded = f"divergence/{step}/{position}/recorded/{me}"
                    _await(partial(agreement.get, recorded), deadline)
        if found.tied:
            self.halt(step, _tie(f"at the beginning of step {step}", found))
        if me in found.minority:
            others = state_divergence.words(sets[:1])
            raise StartOver(
                f"group {me} leaves: its state at the beginning of step {step} was not that of {others}; it takes theirs"
            )

    def _record(self, step: int, what: Sequence[str] = (), **who: Any) -> None:
        """Write the ``divergence`` line of the run record: one group does for a tie, else each group that leaves."""
        self._history.note("divergence", step=step, **who, what=list(what[:_MOST_NAMED]), tensors=len(what))

    def accuse(
        self,
        when: str,
        step: int,
        incarnations: Mapping[GroupId, int],
        states: Mapping[GroupId, Hashable],
        everyone: bool = True,
    ) -> tuple[GroupId, ...]:
        """Compare the checksums that several groups sent of their whole state, ``when`` they had committed all before
        ``step``.

        If they differ, tell all groups which of them are out, or that the run ends, if no state is held by most.

        Args:
            incarnations: the incarnation of each group; 0 where it is missing.
            everyone: True if all living groups have sent one. If not, a tie is recorded (once), and does not end the run.

        Returns:
            The groups that are out.
        """
        found = state_divergence.compare(states)
        if found.tied and not self._halted:
            self._halted = everyone
            if found.tied not in self._ties:
                self._ties.add(found.tied)
                one, other = min(found.tied[0]), min(found.tied[1])
                self._record(step, **self._what(step, states, incarnations, one, other), tied=found.tied)
            if everyone:
                self._agreement.announce(signals.RunHalted(step, _tie(when, found)))
        others = state_divergence.words((tuple(group for group in sorted(states) if group not in found.minority),))
        for group in found.minority:
            start = (group, incarnations.get(group, 0))
            if start not in self._accused:
                self._accused.add(start)
                right = min(other for other in states if other not in found.minority)
                named = self._what(step, states, incarnations, group, right)
                self._record(step, **named, group=group, incarnation=start[1])
                self._agreement.announce(
                    signals.StateDiverged(group, f"its state {when} was not that of {others}", start[1])
                )
        return found.minority

    def _what(
        self,
        step: int,
        states: Mapping[GroupId, Hashable],
        incarnations: Mapping[GroupId, int],
        one: GroupId,
        other: GroupId,
    ) -> dict[str, Any]:
        """Return the tensors that differ between two groups, at the first position that has any: both publish their
        checksums before one of them is told to end. Empty when that takes too long."""
        agreement = self._agreement.clone(_NAMING_S)
        deadline = time.monotonic() + _NAMING_S
        with suppress(StoreError):
            agreement.announce(signals.ChecksumsRequested(step, (one, other)))
            for position in range(self._env.config.ranks_per_group):
                keys = [_whole_key(step, position, group, incarnations.get(group, 0)) for group in (one, other)]
                mine, theirs = (_await(partial(agreement.get, key), deadline) for key in keys)
                if mine is None or theirs is None:
                    break
                if what := differing(mine, theirs):
                    return {"what": what, "position": position}
        return {}

    def publish(self, step: int) -> None:
        """Publish the per-tensor checksums found when :meth:`accuse` was given those of all. Any thread may call it."""
        sums = self._states.last(step)
        if sums is not None:
            key = _whole_key(step, self._env.position, self._env.group, self._env.incarnation)
            threading.Thread(target=self._publish, args=(key, sums), name="megatron_ft-checksums", daemon=True).start()

    def _publish(self, key: str, sums: Mapping[str, int]) -> None:
        with suppress(StoreError):
            self._agreement.clone(_NAMING_S).put(key, sums)

    def awaits_view(self, view: View) -> bool:
        """Return True if ``view`` has a group that was told to be out; states are not compared until it is gone."""
        return any(view.seats(*start) for start in self._accused)

    def halt(self, step: int, why: str) -> NoReturn:
        """End the run in every group; said before this group ends, so that no group takes it for a lost one."""
        with suppress(StoreError):
            self._agreement.announce(signals.RunHalted(step, why))
        raise InvariantBroken(why)


def _tie(when: str, found: state_divergence.Comparison) -> str:
    """Return the reason why the run ends when no state is held by most groups."""
    return (
        f"{when} the states of {state_divergence.words(found.tied)} differ, "
        f"and none of them is held by most groups, so the run "
        f"stops: start it again from a checkpoint"
    )


def _whole_key(step: int, position: int, group: GroupId, incarnation: int) -> str:
    """Return the key under which a rank publishes a checksum of each tensor of its whole state."""
    return f"divergence/{step}/whole/{position}/{group}.{incarnation}"


def _await(look: Callable[[], T | None], deadline: float | None = None) -> T | None:
    """Return the first result of ``look``; None when that takes too long."""
    deadline = time.monotonic() + _NAMING_S if deadline is None else deadline
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found
