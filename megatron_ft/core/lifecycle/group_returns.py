"""Lost groups that come back: what an agent knows of them, and which groups it has to start again
(``restart_policy`` decides when). The simulated agent (``proof.simulated_hosts``) goes by the same.

An agent sees the exits of its own ranks and hears the notices of all others, so it knows of every loss of its groups
and whether a live group is left to come back to. The host of position 0 leads the return of a group with ranks on
several hosts: it decides, and the other hosts follow its key on the control store, ``restart/<the new start>``. The
number of a start needs no agreement: it follows the newest start that is known to be dead.

Failures it assumes: the store is away for a while, or comes back empty. No group is started meanwhile, because it is
unknown which groups are lost and which are left. A notice may come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_ft.core.lifecycle import restart_policy, run_ending
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import GroupFailed, LeaveAnnounced
from megatron_ft.errors import RunStopped
from megatron_ft.types import Exit, GroupId, View, seat

_SKIPPED = 2
"""The leading host may be lost after it took a start's number and before it announced it; the spare in its place takes
the next number. So this number of starts is looked for."""


@dataclass(frozen=True)
class Start:
    """A group to be started now. ``attempt``: its number in a row, from 1; ``after_s``: seconds since its loss."""

    group: GroupId
    incarnation: int
    attempt: int
    after_s: float


@dataclass(frozen=True)
class Refusal:
    """A group that is not started again although it was not asked to leave."""

    group: GroupId
    incarnation: int
    reason: str


class Client(Protocol):
    """The agent's client of the control store. Failures it assumes: those of this module."""

    @property
    def away(self) -> bool:
        """Whether the store did not answer when it was asked last."""

    @property
    def told(self) -> bool:
        """Whether all that this agent had to announce is on the store."""

    def newest_view(self, known: View) -> View:
        """Return the newest view that stands; ``known`` while no newer one is found."""

    def put(self, key: str, value: Any) -> bool:
        """Write a key that only this agent writes. False: the store is away."""

    def get(self, key: str) -> Any | None:
        """Return what stands there; None while that is unknown."""


class RestartManager:
    """The returns of lost groups of one host.

    Args:
        client: of this agent.
        here: this host's groups, each with whether this host has its position 0. Groups are added by :meth:`adopt` and
            removed by :meth:`forget`.
        shared: those of them with ranks on other hosts, too.
        first: the view at the start.
        min_groups: with fewer live groups the run stops.
        per_hour: starts of a group that are allowed in any hour, the very first not counted; None: none comes back.
        patience_s: seconds to wait for a store that is away when none of this host's ranks lives.
        begun: (group, incarnation) -> whether that start has had a part in a committed step.
        clock: monotonic, in seconds.
        fenced: (group, incarnation) -> whether a claim leaves that start out, so that others go on without it.
    """

    def __init__(
        self,
        client: Client,
        here: Mapping[GroupId, bool],
        shared: Collection[GroupId],
        first: View,
        min_groups: int,
        per_hour: int | None,
        patience_s: float,
        begun: Callable[[GroupId, int], bool],
        clock: Callable[[], float],
        fenced: Callable[[GroupId, int], bool] = lambda group, incarnation: False,
    ) -> None:
        self._client, self._leads, self._shared = client, dict(here), frozenset(shared)
        self._per_hour, self._returns = per_hour or 0, per_hour is not None
        self._begun, self._fenced, self._clock, self._patience_s = begun, fenced, clock, patience_s
        never = "" if self._returns else "fault_tolerance.rejoin.enabled is false"
        self._groups = {group: restart_policy.Group(since=clock(), never=never) for group in here}
        self._seats = restart_policy.Seats(first, min_groups)
        self._losses: tuple[run_ending.Loss, ...] = ()
        self._unjudged: list[signals.Signal] = []
        self._to_say: dict[str, dict[str, str]] = {}
        self._refusals: list[Refusal] = []
        self._refused: set[GroupId] = set()
        self._away_since: float | None = None
        self._known = False

    def incarnation(self, group: GroupId) -> int:
        """Return the last start of the group on this host; 0 for a group that another host has by now."""
        known = self._groups.get(group)
        return 0 if known is None else known.incarnation

    def on_signal(self, signal: signals.Signal) -> None:
        """Take in what this agent has seen itself, without waiting for the store."""
        if isinstance(signal, signals.RankExited) and signal.exit.code == RunStopped.exit_code:
            self._unjudged.append(signal)  # the newest view decides whether all stop, or go on without this group
        else:
            self._take(signal)

    def check(self, heard: Collection[signals.Signal]) -> None:
        """Take in what has happened, as far as the store tells. ``heard``: the news that were read just now."""
        # Read after the news: a group that was dead by then has written no view since.
        self._seats = self._seats.after(self._client.newest_view(self._seats.view))
        self._known = not self._client.away
        self._away_since = None if self._known else self._away_since or self._clock()
        if not self._known:
            self._unjudged += heard
            return
        unjudged, self._unjudged = self._unjudged, []
        for signal in (*unjudged, *heard):
            self._take(signal)
        for number, known in self._groups.items():
            if self.seated(number, known.incarnation):
                self._groups[number] = restart_policy.member(known, self._clock())
        for group in self._shared & self._leads.keys():
            if not self._leads[group]:
                self._follow(group)
        self._to_say = {key: value for key, value in self._to_say.items() if not self._client.put(key, value)}
        if not self._seats.enough:  # no group could hand over the model, so none comes back, and none is reported
            self._refusals = []
            self._groups = {g: restart_policy.never(group, "no group is left") for g, group in self._groups.items()}

    def due(self, unheard: Collection[GroupId]) -> list[Start]:
        """Return the starts that are due. ``unheard``: groups on hosts that are silent now; a new start that cannot
        reach members would be left out again."""
        if not self._known or not self._client.told:
            return []
        now, found = self._clock(), []
        for number, group in self._groups.items():
            if restart_policy.is_due(group, now) and not (self._seats.taken | {number}) & set(unheard):
                found.append(Start(number, group.incarnation + 1, group.quick, now - group.lost_at))
        return found

    def started(self, start: Start) -> None:
        """Note that all ranks of this start on this host are started."""
        self._groups[start.group] = restart_policy.started(self._groups[start.group], self._clock())
        self._decide(start.group, start.incarnation, {})

    def adopt(self, group: GroupId, leads: bool, shared: bool, incarnation: int) -> None:
        """Adopt ranks of ``group``: that incarnation is over, and the next one is to be started on this host."""
        self._leads[group] = leads
        self._shared = self._shared | {group} if shared else self._shared - {group}
        now = self._clock()
        due = now if leads or not shared else None
        self._groups[group] = restart_policy.Group(incarnation, down=True, due=due, since=now, lost_at=now)

    def forget(self, group: GroupId) -> None:
        """Forget a group that another host has now."""
        self._groups.pop(group, None)
        self._leads.pop(group, None)

    def newest(self, group: GroupId) -> int:
        """Return the last start of any group that is known to be dead or has been a member; 0 where there is none."""
        return max(self._seats.view.incarnations.get(group, 0), self._seats.graves.get(group, 0))

    def with_starts(self, silent: signals.HostSilent) -> signals.HostSilent:
        """Return the notice with the newest known starts of groups that were started again."""
        newest = {group: self.newest(group) for group in sorted({*silent.groups_by, *silent.groups_about})}
        return replace(silent, until=tuple((group, start) for group, start in newest.items() if start))

    @property
    def seats(self) -> restart_policy.Seats:
        """The newest known view and the known deaths."""
        return self._seats

    def refusals(self) -> list[Refusal]:
        """Return the refusals since the last call."""
        found, self._refusals = self._refusals, []
        return found

    def pending(self) -> bool:
        """Return whether a group of this host may come back, so that its agent has to stay although no rank lives."""
        if self.in_vain:
            return False
        return any(group.pending or (self._unjudged and not group.never) for group in self._groups.values())

    @property
    def in_vain(self) -> bool:
        """Return whether the store has been away for longer than ``patience_s``."""
        return self._away_since is not None and self._clock() - self._away_since >= self._patience_s

    @property
    def hopeless(self) -> bool:
        """Return whether certainly no group has the model any more: a rank that waits for a seat waits in vain."""
        return self._known and not self._seats.enough

    @property
    def wiped_out(self) -> bool:
        """Return whether every member of the newest view is known to be dead, or given up."""
        return self._known and not self._seats.taken

    def seated(self, group: GroupId, incarnation: int) -> bool:
        """Return whether that start of a group is, or was, a member."""
        return incarnation <= self._seats.view.incarnations.get(group, 0)

    # --- what is heard ------------------------------------------------------------------------------------------------

    def _take(self, signal: signals.Signal) -> None:
        verdict = signals.classify(signal)
        if isinstance(verdict, signals.RestartRefused):
            self._refused.add(verdict.group)
        if isinstance(verdict, LeaveAnnounced):
            known = self._groups.get(verdict.group)
            if known is not None and known.incarnation == verdict.incarnation:
                self._groups[verdict.group] = restart_policy.never(known, verdict.reason)
        if not isinstance(verdict, GroupFailed):
            return
        known, start = self._groups.get(verdict.group), verdict.incarnation
        if known is not None and (start > known.incarnation or (start == known.incarnation and not known.down)):
            self._lost(verdict.group, self._loss(signal, verdict))
        self._losses = self._after(signal)
        self._seats = self._seats.without(verdict.group, start)

    def _after(self, signal: signals.Signal) -> tuple[run_ending.Loss, ...]:
        """Return the losses after what ``signal`` says of a rank, of this host or another one."""
        match signal:
            case signals.RankExited(exit=exit_, incarnation=incarnation):
                loss = run_ending.Loss(
                    group=exit_.group,
                    incarnation=incarnation,
                    position=exit_.position,
                    kind=self._kind(exit_, incarnation),
                    code=exit_.code,
                    words=str(exit_),
                    detail=exit_.detail,
                )
            case signals.RankUnresponsive(group=group, position=position, incarnation=incarnation):
                verdict = signals.classify(signal)
                assert isinstance(verdict, GroupFailed)
                loss = run_ending.Loss(group, incarnation, position, "died", None, verdict.reason, given_up=True)
            case _:
                return self._losses
        return run_ending.noted(self._losses, replace(loss, state=self._has_state(loss.group, loss.incarnation)))

    def _has_state(self, group: GroupId, incarnation: int) -> bool:
        """Return whether that start had the complete state: the first one begins with it, a later one has it once it has
        had a part in a committed step."""
        return not incarnation or self._begun(group, incarnation)

    def ending(self, last_step: int | None, idle: bool) -> run_ending.Ending:
        """Return how the run has ended that has not made its last step (``run_ending.conclude``)."""
        for signal in self._unjudged:
            self._losses = self._after(signal)
        # The record may have come later than the notice of the loss.
        losses = [replace(loss, state=self._has_state(loss.group, loss.incarnation)) for loss in self._losses]
        return run_ending.conclude(
            losses,
            last_step=last_step,
            members=self._seats.view.members,
            refused=self._refused,
            returns=self._returns,
            idle=idle,
        )

    def _loss(self, signal: signals.Signal, verdict: GroupFailed) -> restart_policy.Loss:
        if not isinstance(signal, signals.RankExited):
            return restart_policy.Loss(verdict.incarnation, "died", verdict.reason)
        exit_, kind = signal.exit, self._kind(signal.exit, verdict.incarnation)
        if kind != "failed":
            return restart_policy.Loss(verdict.incarnation, kind, verdict.reason)
        begun = self._begun(verdict.group, verdict.incarnation)
        # Only the detail, without the process id, so that equal exceptions of two starts compare equal.
        return restart_policy.Loss(verdict.incarnation, kind, exit_.detail or f"exit code {exit_.code}", begun)

    def _kind(self, exit_: Exit, incarnation: int) -> restart_policy.Kind:
        if exit_.code == RunStopped.exit_code and self._fenced(exit_.group, incarnation):
            return "died"  # the view without this group may not have arrived yet
        return restart_policy.kind_of(exit_, incarnation, self._seats)

    def _lost(self, number: GroupId, loss: restart_policy.Loss) -> None:
        before = self._groups[number]
        if loss.incarnation > before.incarnation:  # the leading host was faster than the news
            before = replace(before, incarnation=loss.incarnation, down=False)
        after = restart_policy.lost(before, loss, self._clock(), self._per_hour)
        if not self._leads[number] and after.down and not before.down:
            after = replace(after, due=None, never=before.never)  # the leading host decides that
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
            decision = self._client.get(f"restart/{seat(number, incarnation)}")
            if decision is not None and "never" in decision:
                self._groups[number] = restart_policy.never(group, decision["never"])
            elif decision is not None:
                self._groups[number] = replace(group, incarnation=incarnation - 1, due=self._clock())
