"""Lost groups that come back: what an agent knows of them, and which it has to start again (``core.restarts`` decides).

An agent hears what its own ranks do, and what anybody else tells, so it knows of every loss of its groups and whether
somebody is left to come back to. A group with ranks on several hosts is led back by the host of its position 0: that one
decides, the others do what its key on the control store says, ``restart/<the new start>``. The number of a start needs no
agreement: it is the one after the newest that is known to be dead.

Failures it assumes: the store is away for a while, or comes back empty. Nothing is started meanwhile: who is lost, and who
is left, is not known then. News may come twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from megatron_ft.config import FaultToleranceConfig
from megatron_ft.core import detector, restarts
from megatron_ft.core.protocol import Died, Leaves
from megatron_ft.errors import RunStopped
from megatron_ft.launch.voice import Voice
from megatron_ft.runtime.environment import seat
from megatron_ft.types import GroupId, View

_SKIPPED = 2
"""Who leads may be lost between taking a number for a start and saying so: the spare host in its place takes the next."""


@dataclass(frozen=True)
class Start:
    """A group to be started now. ``attempt``: which in a row, from 1; ``after_s``: since it was lost."""

    group: GroupId
    incarnation: int
    attempt: int
    after_s: float


@dataclass(frozen=True)
class Refusal:
    """A group that is not started again although nobody wanted it gone."""

    group: GroupId
    incarnation: int
    reason: str


class Returns:
    """Those of one host.

    Args:
        here: its groups; whether they have their position 0 here. Groups may come (:meth:`adopt`) and go (:meth:`forget`).
        shared: those of them with ranks on other hosts, too.
        patience_s: how long a store that is away is waited for when none of this host's ranks lives.
        begun: (group, incarnation) -> whether it has had a part in a committed step.
    """

    def __init__(
        self,
        voice: Voice,
        settings: FaultToleranceConfig,
        here: Mapping[GroupId, bool],
        shared: Collection[GroupId],
        first: View,
        patience_s: float,
        begun: Callable[[GroupId, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._voice, self._leads, self._shared = voice, dict(here), frozenset(shared)
        self._limits = restarts.Limits(per_hour=settings.rejoin.restarts_per_hour)
        self._begun, self._clock, self._patience_s = begun, clock, patience_s
        self._groups = {group: restarts.Group(since=clock()) for group in here}
        self._seats = restarts.Seats(first, settings.min_groups)
        self._unjudged: list[detector.Signal] = []
        self._to_say: dict[str, dict[str, str]] = {}
        self._refusals: list[Refusal] = []
        self._away_since: float | None = None
        self._known, self._off = False, not settings.rejoin.enabled

    def incarnation(self, group: GroupId) -> int:
        """The one that was started here last; 0 of a group that is somebody else's by now."""
        known = self._groups.get(group)
        return 0 if known is None else known.incarnation

    def hear(self, signal: detector.Signal) -> None:
        """What this agent has seen itself; it need not wait for the store to tell."""
        if self._off:
            return
        stopped = isinstance(signal, detector.Ended) and signal.exit.code == RunStopped.exit_code
        if stopped:  # whether all stop, or go on without it, the newest view tells
            self._unjudged.append(signal)
        else:
            self._take(signal)

    def look(self, heard: Collection[detector.Signal]) -> None:
        """Take in what has happened, as far as the store tells. ``heard``: the news that have just been asked for."""
        if self._off:
            return
        # After the news: whoever has died by then has written no view since.
        self._seats = self._seats.after(self._voice.newest_view(self._seats.view))
        self._known = not self._voice.away
        if not self._known:
            self._unjudged += heard
            self._away_since = self._away_since or self._clock()
            return
        self._away_since = None
        unjudged, self._unjudged = self._unjudged, []
        for signal in (*unjudged, *heard):
            self._take(signal)
        for number, group in self._groups.items():
            if self.seated(number, group.incarnation):
                self._groups[number] = restarts.member(group, self._clock())
        for group in self._shared & self._leads.keys():
            if not self._leads[group]:
                self._follow(group)
        self._to_say = {key: value for key, value in self._to_say.items() if not self._voice.say(key, value)}
        if not self._seats.enough:  # nobody could hand over the model: no group comes back, and it need not be said
            self._refusals = []
            self._groups = {g: restarts.never(group, "no group is left") for g, group in self._groups.items()}

    def due(self, unheard: Collection[GroupId]) -> list[Start]:
        """What has to be started now. ``unheard``: groups on hosts that are silent just now; who cannot reach members would
        be left out again."""
        if self._off or not self._known or not self._voice.told:
            return []
        now, found = self._clock(), []
        for number, group in self._groups.items():
            if restarts.is_due(group, now) and not (self._seats.taken | {number}) & set(unheard):
                found.append(Start(number, group.incarnation + 1, group.attempt, now - group.lost_at))
        return found

    def started(self, start: Start) -> None:
        """All its ranks of this host are."""
        self._groups[start.group] = restarts.started(self._groups[start.group], self._clock())
        self._decide(start.group, start.incarnation, {})

    def adopt(self, group: GroupId, leads: bool, shared: bool, incarnation: int) -> None:
        """This host has ranks of ``group`` from now on; that incarnation is over, and the next is to be started."""
        self._leads[group] = leads
        self._shared = self._shared | {group} if shared else self._shared - {group}
        now = self._clock()
        due = now if leads or not shared else None
        self._groups[group] = restarts.Group(incarnation, down=True, due=due, since=now, lost_at=now)

    def forget(self, group: GroupId) -> None:
        """Another host has them."""
        self._groups.pop(group, None)
        self._leads.pop(group, None)

    def newest(self, group: GroupId) -> int:
        """The last start of any group that is known to be dead, or has been a member; 0 where none is."""
        return max(self._seats.view.incarnations.get(group, 0), self._seats.graves.get(group, 0))

    @property
    def seats(self) -> restarts.Seats:
        """Who has the model, as far as is known."""
        return self._seats

    def refusals(self) -> list[Refusal]:
        """Those since the last call."""
        found, self._refusals = self._refusals, []
        return found

    def pending(self) -> bool:
        """Whether a group of this host may come back, so that its agent has to stay although no rank lives."""
        if self._off or self.in_vain:
            return False
        return bool(self._unjudged) or any(group.pending for group in self._groups.values())

    @property
    def in_vain(self) -> bool:
        """Whether the store has been away for so long that nothing is expected of it any more."""
        return self._away_since is not None and self._clock() - self._away_since >= self._patience_s

    @property
    def hopeless(self) -> bool:
        """Whether it is certain that no group has the model any more: who waits for a seat waits in vain."""
        return not self._off and self._known and not self._seats.enough

    def seated(self, group: GroupId, incarnation: int) -> bool:
        """Whether that start of a group is, or was, a member."""
        return incarnation <= self._seats.view.incarnations.get(group, 0)

    # --- what is heard ------------------------------------------------------------------------------------------------

    def _take(self, signal: detector.Signal) -> None:
        verdict = detector.judge(signal)
        if isinstance(verdict, Leaves):
            self._leaves(verdict)
        if not isinstance(verdict, Died):
            return
        known = self._groups.get(verdict.group)
        if known is not None and _concerns(verdict, known):
            self._lost(verdict.group, self._loss(signal, verdict))
        self._seats = self._seats.without(verdict.group, verdict.incarnation)

    def _leaves(self, verdict: Leaves) -> None:
        known = self._groups.get(verdict.group)
        if known is not None and known.incarnation == verdict.incarnation:
            self._groups[verdict.group] = restarts.never(known, verdict.reason)

    def _loss(self, signal: detector.Signal, verdict: Died) -> restarts.Loss:
        if not isinstance(signal, detector.Ended):
            return restarts.Loss(verdict.incarnation, "died", verdict.reason)
        exit_ = signal.exit
        kind = restarts.kind_of(exit_, verdict.incarnation, self._seats)
        if kind != "failed":
            return restarts.Loss(verdict.incarnation, kind, verdict.reason)
        begun = self._begun(verdict.group, verdict.incarnation)
        # Not the whole reason: the process id would make any two exceptions different ones.
        return restarts.Loss(verdict.incarnation, kind, exit_.detail or f"exit code {exit_.code}", begun)

    def _lost(self, number: GroupId, loss: restarts.Loss) -> None:
        before = self._groups[number]
        if loss.incarnation > before.incarnation:  # its leading host was faster than the news
            before = replace(before, incarnation=loss.incarnation, down=False)
        after = restarts.lost(before, loss, self._clock(), self._limits)
        if not self._leads[number] and after.down and not before.down:
            after = replace(after, due=None, never=before.never)  # that is for the leading host to say
        self._groups[number] = after
        if after.never and not before.never:
            if loss.kind not in ("left", "over"):
                self._refusals.append(Refusal(number, after.incarnation, after.never))
            self._decide(number, after.incarnation + 1, {"never": after.never})

    # --- groups with ranks on several hosts ---------------------------------------------------------------------------

    def _decide(self, group: GroupId, incarnation: int, decision: dict[str, str]) -> None:
        if self._leads[group] and group in self._shared:
            self._to_say[f"restart/{seat(group, incarnation)}"] = decision

    def _follow(self, number: GroupId) -> None:
        group = self._groups[number]
        if not group.pending or group.due is not None:
            return
        for incarnation in range(group.incarnation + 1, group.incarnation + 1 + _SKIPPED):
            decision = self._voice.get(f"restart/{seat(number, incarnation)}")
            if decision is not None and "never" in decision:
                self._groups[number] = restarts.never(group, decision["never"])
            elif decision is not None:
                self._groups[number] = replace(group, incarnation=incarnation - 1, due=self._clock())


def _concerns(verdict: Died, known: restarts.Group) -> bool:
    return verdict.incarnation > known.incarnation or (verdict.incarnation == known.incarnation and not known.down)
