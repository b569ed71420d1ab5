"""One rank's part in keeping the states of all groups equal (``core.detection.state_divergence`` decides).

At the beginning of a step a rank puts the checksum that is due (``run.state_checksum``) into its group's row of
bucket 0, and in every step those of its optimizers' hyperparameters, with which it begins the step and has made the one
before: a script that sets them otherwise in one group is named in that step, with both values. In a step in which a group
enters, or takes the state of another because it is behind, the state's checksum is that of the whole state. Once that
bucket is reduced every rank compares the checksums of the ranks of equal position, before it updates. The ranks of a
group whose state is not the right one end; their agents start the group again, and it takes the others' state like every
group that comes back. Where it is not known which state is right, the whole run ends.

A state that differs is detected after ``detector.state_check_steps`` steps at most. The group's contributions to the
sums of those steps stay in them: all other groups have taken the same updates, and go on from equal states. A group that
enters with another state contributes nothing (:meth:`StateGuard.compare`). A group whose state differs when all others are
behind hands its state to them, and nobody can know.

Failures it assumes: the control store may be away, and any group may be lost while it reports which tensors differ; the
record does not name them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from megatron_ft.core.detection import state_divergence
from megatron_ft.core.protocol import signals
from megatron_ft.errors import InvariantBroken, StartOver, StoreError
from megatron_ft.run.engines import hyperparameters
from megatron_ft.run.engines.hyperparameters import Hyperparameters, Values
from megatron_ft.run.nonfinite import SUSPECT_AFTER, NonFinite
from megatron_ft.run.rank import Rank
from megatron_ft.run.state_checksum import Details, StateCheck, differing, in_words
from megatron_ft.run.step_timer import STATE, Slots
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import GroupId, View

_NAMING_S = 5.0
"""Seconds that a rank that has found different states waits for the per-tensor checksums of other groups."""
_POLL_S = 0.01
_MOST_NAMED = 20
"""Number of names of differing tensors in one line of the record."""


@dataclass(frozen=True)
class _Subject:
    """What is compared in ``step``: ``said``, what each group has sent; ``names`` in messages, ``when``; ``key``: the end of
    its keys in the store; ``details``: name -> value; ``shown`` returns text of names, two groups and their details, to be
    appended to a message."""

    step: int
    said: Mapping[GroupId, Any]
    names: str
    when: str
    key: str
    details: Mapping[str, Any]
    shown: Callable[[Sequence[str], tuple[GroupId, GroupId], Mapping[str, Any], Mapping[str, Any]], str]


class StateGuard:
    """One rank's comparison of states. ``slots``: the numbers that travel with bucket 0, among them the checksums that
    ``states`` makes; ``nonfinite``: its account of gradients that are not finite. Only the training thread calls its
    methods, except for :meth:`publish`."""

    def __init__(self, rank: Rank, slots: Slots, states: StateCheck, nonfinite: NonFinite) -> None:
        self.slots, self.states, self.nonfinite = slots, states, nonfinite
        self._env, self._agreement, self._history = rank.env, rank.agreement, rank.history
        self._accused: set[tuple[GroupId, int]] = set()
        self._ties: set[tuple[tuple[GroupId, ...], ...]] = set()
        self._halted = False
        self._set: Values = []
        self._made: Values | None = None
        self._checksums: tuple[int, ...] = ()
        self._whole = -1
        """The step in whose local bucket 0 the checksum is that of the whole state."""
        self._equal: int | None = None
        """The newest step at whose beginning all of the state is known to have been that of the other groups."""
        self._equal_chunks: dict[int, int] = {}

    def say(self, step: int, values: Hyperparameters) -> None:
        """Put this rank's checksums into the cleared local bucket 0 of ``step``, for the comparison in all groups."""
        self._whole, self._equal = -1, step if self._equal is None else self._equal
        self._set, self._made = values.read(), values.made
        self._checksums = (self.states.of_step(step), *map(hyperparameters.checksum, (self._set, self._made)))
        self.slots.say_checksums(self._checksums)
        self.slots.say_suspect(self.nonfinite.suspect)

    def say_all(self, step: int) -> None:
        """Put the checksum of the whole state there: a group has taken its state in ``step``."""
        self._whole = step
        checksums = list(self._checksums)
        checksums[STATE] = self.states.whole(step)
        self.slots.say_checksums(checksums)

    def found_equal(self, step: int, chunk: int | None = None) -> None:
        """Note that the state at the beginning of ``step`` is that of the other groups; ``chunk``: only a part of it."""
        if chunk is None:
            self._equal = step
            self._equal_chunks.clear()
        else:
            self._equal_chunks[chunk] = step
            if len(self._equal_chunks) == self.states.chunks:
                self._equal = max(self._equal or 0, min(self._equal_chunks.values()))

    def compare(self, step: int, view: View) -> tuple[GroupId, ...]:
        """Compare the groups' states, once bucket 0 of ``step`` is reduced, and before the update.

        Returns:
            The groups that must not be part of the step, because a group has taken its state in it and their states differ.

        Raises ``StartOver`` where this group's state or hyperparameters, or its gradient in several steps, are not the right
        ones, and ``InvariantBroken`` where it is not known which are right.
        """
        suspects, group = self.slots.suspects(), self._env.group
        if group in state_divergence.nonfinite_minority({member: member in suspects for member in view.live}):
            raise StartOver(
                f"group {group} leaves: its own gradient was not finite in {SUSPECT_AFTER} steps in a row, that of most "
                f"groups was. It takes their state; if it happens again, look at the hardware it runs on"
            )
        state, begun, made = self.slots.checksums()
        doubted = self._doubted(view, step)
        now, before = f"at the beginning of step {step}", f"in step {step - 1}"
        # Other hyperparameters in the step before have made another state, so they come first.
        for said, values, when, key in ((made, self._made, before, "/made"), (begun, self._set, now, "/set")):
            if differs := state_divergence.compare(said, doubted):
                details = hyperparameters.named(values)
                subject = _Subject(step, said, "hyperparameters", when, key, details, _values)
                self._part(subject, differs, doubted)
        chunk, whole = self.states.due(step), self._whole == step
        if chunk is None and not whole:
            return ()
        if differs := state_divergence.compare(state, doubted):
            sums = (self.states.last(step) if whole else self.states.details(step)) or {}
            shown = partial(self._tensors, None if whole else chunk)
            self._part(_Subject(step, state, "states", now, "", sums, shown), differs, doubted)
        self.found_equal(step, None if whole else chunk)
        return differs.minority if whole else ()

    def _doubted(self, view: View, step: int) -> frozenset[GroupId]:
        return state_divergence.doubted(view, step, self.states.pass_steps)

    def _part(self, subject: _Subject, found: state_divergence.Comparison, doubted: Collection[GroupId]) -> None:
        """End this group if its state is not the right one, or the run if that is not known."""
        me = self._env.group
        sets = found.tied or (tuple(group for group in subject.said if group not in found.minority), found.minority)
        shown = self._named(subject, found, sets)
        if found.tied:
            self.halt(subject.step, _tie(subject.when, found, doubted, subject.names, shown))
        if me in found.minority:
            which = "its state" if subject.names == "states" else f"one of its {subject.names}"
            enters = self._whole == subject.step and me in doubted
            raise StartOver(
                f"group {me} {'does not enter' if enters else 'leaves'}: {which} {subject.when} was not that of "
                f"{state_divergence.words(sets[:1])}{shown}; it takes theirs"
            )

    def _named(self, subject: _Subject, found: state_divergence.Comparison, sets: Sequence[tuple[GroupId, ...]]) -> str:
        """Record what differs, and return it as text, in the groups that leave or tie. The lowest group records a tie.

        One group of each set with equal states publishes its details. A group ends as a whole with the first of its ranks
        that leaves, so a rank whose own state is as it should be waits for the differing ones."""
        me, position, mine, said = self._env.group, self._env.position, subject.details, subject.said
        agreement, key = self._agreement.clone(_NAMING_S), f"divergence/{subject.step}"
        deadline = time.monotonic() + _NAMING_S
        by = min(said) if found.tied else me
        with suppress(StoreError):
            if me in map(min, sets):
                agreement.put(f"{key}/{position}{subject.key}/{me}", mine)
            if not found.tied and me not in found.minority:
                return ""
            other = next(min(groups) for groups in sets if by not in groups)
            differ, is_mine = self.slots.differing(said[by], said[other])
            if by == me and is_mine:
                theirs = await_found(agreement, f"{key}/{position}{subject.key}/{other}", deadline)
                names = [] if theirs is None else differing(mine, theirs)
                who = {"tied": found.tied} if found.tied else {"group": me, "incarnation": self._env.incarnation}
                self._record(subject.step, names, position=position, **who)
                shown = subject.shown(names, (me, other), mine, theirs or {})
                agreement.put(f"{key}/{position}{subject.key}/recorded/{by}", shown)
            positions = sorted(differ) if len(said[by]) > 1 else [position]
            keys = [f"{key}/{at}{subject.key}/recorded/{by}" for at in positions]
            texts = [await_found(agreement, each, deadline) for each in keys]
            return next(filter(None, texts), "")
        return ""

    def _tensors(
        self, chunk: int | None, names: Sequence[str], groups: tuple[GroupId, GroupId], one: Details, other: Details
    ) -> str:
        """Return the tensors that differ as text, and since when they can; empty if none is known. ``chunk``: None if the
        whole state was compared."""
        if not names:
            return ""
        since = ""
        if self._equal is not None:
            first = self._equal if chunk is None else max(self._equal, self._equal_chunks.get(chunk, 0))
            since = f"; from step {first} on at the earliest"
        return f" ({in_words(names, one, other)}{since})"

    def _record(self, step: int, what: Sequence[str] = (), **who: Any) -> None:
        """Write the ``divergence`` line of the run record: one group does for a tie, else each group that leaves."""
        self._history.note("divergence", step=step, **who, what=list(what[:_MOST_NAMED]), tensors=len(what))

    def accuse(self, when: str, step: int, view: View, states: Mapping[GroupId, Hashable]) -> tuple[GroupId, ...]:
        """Compare the checksums that several members of ``view`` sent of their whole state, ``when`` they had committed all
        before ``step``.

        If they differ, tell all groups which of them are out; or that the run ends, if it is not known which state is right.
        If not all members have sent one, that is only recorded, once.

        Returns:
            The groups that are out.
        """
        doubted = self._doubted(view, step)
        found = state_divergence.compare(states, doubted)
        everyone = states.keys() == set(view.live)
        if found.tied and not self._halted:
            self._halted = everyone
            named = ""
            if found.tied not in self._ties:
                self._ties.add(found.tied)
                named = self._ask(step, dict(view.members), min(found.tied[0]), min(found.tied[1]), tied=found.tied)
            if everyone:
                self._agreement.announce(signals.RunHalted(step, _tie(when, found, doubted, "states", named)))
        right = tuple(group for group in sorted(states) if group not in found.minority)
        for group in found.minority:
            start = (group, view.incarnations.get(group, 0))
            if start not in self._accused:
                self._accused.add(start)
                named = self._ask(step, dict(view.members), group, min(right), group=group, incarnation=start[1])
                why = f"its state {when} was not that of {state_divergence.words((right,))}{named}"
                self._agreement.announce(signals.GroupFailed(group, why, start[1]))
        return found.minority

    def differs_from(self, step: int, donor: GroupId, incarnation: int) -> str:
        """Return, as text, what differs between the state that this rank has taken for ``step`` and that of a donor."""
        me, start = self._env.group, self._env.incarnation
        return self._ask(step, {me: start, donor: incarnation}, me, donor, group=me, incarnation=start)

    def _ask(self, step: int, starts: Mapping[GroupId, int], one: GroupId, other: GroupId, **who: Any) -> str:
        """Record which tensors differ between two groups, at the first position that has any, and return it as text. Both
        publish their details before one of them is told to end; if that takes too long, none is named."""
        agreement, names, named = self._agreement.clone(_NAMING_S), list[str](), ""
        deadline = time.monotonic() + _NAMING_S
        with suppress(StoreError):
            agreement.announce(signals.ChecksumsRequested(step, (one, other)))
            for position in range(self._env.config.ranks_per_group):
                keys = [_whole_key(step, position, group, starts[group]) for group in (one, other)]
                mine, theirs = (await_found(agreement, key, deadline) for key in keys)
                if mine is None or theirs is None:
                    break
                if names := differing(mine, theirs):
                    who["position"], named = position, self._tensors(None, names, (one, other), mine, theirs)
                    break
        self._record(step, names, **who)
        return named

    def publish(self, step: int) -> None:
        """Publish the details found when :meth:`accuse` was given the checksums of all. Any thread may call it."""
        found = self.states.last(step)
        if found is not None:
            key = _whole_key(step, self._env.position, self._env.group, self._env.incarnation)
            threading.Thread(target=self._publish, args=(key, found), name="megatron_ft-checksums", daemon=True).start()

    def _publish(self, key: str, found: Details) -> None:
        with suppress(StoreError):
            self._agreement.clone(_NAMING_S).put(key, found)

    def awaits_view(self, view: View) -> bool:
        """Return True if ``view`` has a group that was told to be out; states are not compared until it is gone."""
        return any(view.seats(*start) for start in self._accused)

    def halt(self, step: int, why: str) -> NoReturn:
        """End the run in every group; said before this group ends, so that no group takes it for a lost one."""
        with suppress(StoreError):
            self._agreement.announce(signals.RunHalted(step, why))
        raise InvariantBroken(why)


def _tie(
    when: str, found: state_divergence.Comparison, doubted: Collection[GroupId], what: str = "states", shown: str = ""
) -> str:
    """Return the reason why the run ends when it is not known which state is right."""
    returned = tuple(sorted(group for groups in found.tied for group in groups if group in doubted))
    why = "and none of them is held by most groups"
    if returned:
        has = f"{state_divergence.words((returned,))} {'have' if len(returned) > 1 else 'has'}"
        why = f"and none of them is held by most of the groups that have not just come back ({has})"
    return (
        f"{when} the {what} of {state_divergence.words(found.tied)} differ{shown}, {why}, so the run stops: start it again "
        f"from a checkpoint"
    )


def _values(
    names: Sequence[str], groups: tuple[GroupId, GroupId], one: Mapping[str, Any], other: Mapping[str, Any]
) -> str:
    """Return `` (lr of parameter group 0 is 0.1 in group 0 and 0.2 in group 1)`` for the values that differ."""
    sides = sorted(zip(groups, (one, other), strict=True), key=lambda side: side[0])
    each = (
        f"{name} is " + " and ".join(f"{values.get(name)} in group {group}" for group, values in sides)
        for name in names[:_MOST_NAMED]
    )
    return f" ({'; '.join(each)})" if names else ""


def _whole_key(step: int, position: int, group: GroupId, incarnation: int) -> str:
    """Return the key under which a rank publishes the details of its whole state."""
    return f"divergence/{step}/whole/{position}/{group}.{incarnation}"


def await_found(agreement: CoordinationClient, key: str, deadline: float) -> Any | None:
    """Return the value of a key as soon as there is one; None when that takes too long."""
    while (found := agreement.get(key)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found
