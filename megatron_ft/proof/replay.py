"""Feed a run's record through ``core`` again: it must make the recorded decisions (``tools/replay.py`` prints them).

A view line holds the decision and the reports it was made from. In between, a group does only what core asks of it, so
the loop of each group (``core.protocol.shell``) can be advanced, by ports that have every result at once, from every view
to the state of its next report. There it receives the events that ended the epoch according to the record, and must report
and propose exactly what is recorded. Inputs (which groups died, asked for a seat, why, and the speeds of the groups) are
taken from the record; everything else is decided again.

A lost group leaves no report. It is unknown whether it still wrote a line before it died, so such a line is compared
with the line that the group would have written there, and may be absent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn

from megatron_ft.core.detection import stragglers
from megatron_ft.core.protocol import machine as recovery
from megatron_ft.core.protocol import membership, messages
from megatron_ft.core.protocol.machine import GroupState
from megatron_ft.core.protocol.ports import Clock, Ranks, Store
from megatron_ft.core.protocol.shell import Shell, carry_out, resumes
from megatron_ft.core.protocol.takeovers import TakenOver
from megatron_ft.record.protocol_trace import Line, Record
from megatron_ft.types import GroupId, Report, View, listed

_SILENT = "no report within"
"""The reason of a group that was given up, for which core needs no verdict but time."""


@dataclass(frozen=True)
class Difference:
    """One value that the run recorded and core decides otherwise."""

    name: str
    recorded: Any
    decided: Any


@dataclass(frozen=True)
class Decision:
    """A decision that was made again; ``line`` of the history has the run's decision."""

    kind: str
    line: int
    what: str
    differences: tuple[Difference, ...] = ()


@dataclass
class Replay:
    """The result of a replay. ``stopped`` is the reason why the decisions after some view could not be made again."""

    decisions: list[Decision] = field(default_factory=list)
    stopped: str = ""

    @property
    def different(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.differences]

    def count(self, kind: str) -> int:
        return sum(decision.kind == kind for decision in self.decisions)


def replay(record: Record) -> Replay:
    """Make all decisions of a run again, up to the first view that differs: another run would follow from that one."""
    run = _Run(record)
    run.replay()
    run.result.decisions.sort(key=lambda decision: decision.line)
    return run.result


class _Differs(Exception):
    """The machine cannot reach the state that the record gives."""

    def __init__(self, name: str, recorded: Any, decided: Any) -> None:
        self.difference = Difference(name, recorded, decided)


class _Past:
    """The speeds of the groups in the steps the run committed, and the sizes of its batches: inputs of every group, and the
    same for all."""

    def __init__(self, record: Record) -> None:
        self.measured, self._sizes = record.measured, record.sizes
        self.discards = record.discards
        self._job = record.job
        self._known = [stragglers.Speeds()]

    def speeds(self, step: int) -> stragglers.Speeds:
        """Return the speeds that belong to the state from which ``step`` starts."""
        for done in range(len(self._known) - 1, step):
            seconds, job = self.measured.get(done, {}), self._job
            self._known.append(
                stragglers.observe(self._known[done], seconds, job.straggler_factor, job.straggler_steps)
            )
        return self._known[step]

    def per_shard(self, step: int, otherwise: int) -> int:
        """Return the size that the script has set before ``step``, if it has set one."""
        place = bisect_right(self._sizes, step, key=lambda change: change[0]) - 1
        return self._sizes[place][1] if place >= 0 else otherwise


# --- one group --------------------------------------------------------------------------------------------------------


class _Group(Ranks, Store, Clock):
    """One group: its loop, the ports of it, and the possible states of its account of interruptions
    (``run.recovery_metrics``).

    ``counted`` is what the recovery lines of this step have counted. It is a set of possibilities, because a report does not
    tell whether a group was just about to reduce. ``recoveries`` are the lines it would write for the present view (none
    when it has only just joined). ``resumed``: whether it went on; None when the record does not tell.

    Large because the loop has three ports, and one account of the record answers all of them.
    """

    def __init__(self, state: GroupState, past: _Past, committed: Callable[[GroupState, int], None]) -> None:
        self._past, self._committed = past, committed
        self.counted = {TakenOver()}
        self.recoveries: list[dict[str, Any]] = []
        self.resumed: bool | None = False
        self._published: list[Report] = []
        self._proposed: list[View] = []
        self._have: Collection[int] | None = None  # the buckets of the report beyond which it must not go
        self._now = 0.0
        self._start(state)
        carry_out(self._shell.resize())

    def _start(self, state: GroupState) -> None:
        self._shell = Shell(state, self, self, self)

    @property
    def state(self) -> GroupState:
        return self._shell.state

    # --- the ports ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def per_shard(self, step: int) -> int:
        return self._past.per_shard(step, self.state.job.per_shard)

    async def compute(self) -> list[messages.Computed]:
        microbatch = self.state.todo[0]
        return [messages.Computed(microbatch, microbatch in self.state.digest_only)]

    async def connect(self, view: View) -> messages.Connected:
        return messages.Connected(view.epoch)

    async def transfer(self, view: View) -> messages.Transferred:
        return messages.Transferred(view.epoch, self._past.speeds(view.step))

    async def follow(self, step: int) -> messages.CaughtUp:
        return messages.CaughtUp(self._past.speeds(step))

    async def reduce(self, step: int, buckets: Sequence[int]) -> messages.Reduced | None:
        wanted = [bucket for bucket in buckets if self._have is None or bucket in self._have]
        return messages.Reduced(wanted[0]) if wanted else None

    async def update(self, step: int) -> messages.Updated | messages.Discarded | None:
        if self._have is not None:
            return None
        if (step, self.state.attempt) in self._past.discards:
            return messages.Discarded(step)
        return messages.Updated(step, self._past.measured.get(step, {}))

    async def stop(self, action: messages.Stop) -> NoReturn:
        raise AssertionError("no turn is taken then")

    async def publish(self, report: Report) -> None:
        self._published.append(report)

    async def propose(self, view: View) -> None:
        self._proposed.append(view)

    # --- the walk from view to view -----------------------------------------------------------------------------------

    def enter(self, view: View) -> None:
        """Adopt the view, and derive its recovery line from the state in which the group goes on."""
        # The proposer of a view may not have heard of a death that another group knew: forget it again.
        self._start(replace(self.state, graves={}))
        self._feed(messages.ViewSeen(view))
        self.recoveries, self.resumed, self._have = [], False, None
        ahead = self._ahead(lambda state: True)
        if ahead is None:
            return  # the group has to stop
        counted = self.counted if ahead.step == self.state.step else {TakenOver()}
        self.recoveries = [before.line(ahead) for before in counted]

    def _ahead(self, stays: Callable[[GroupState], bool]) -> GroupState | None:
        """Return the state in which the group goes on from here, as long as it ``stays``; None if it does not come to that.
        The group itself does not advance."""
        shell, here = self._shell, self.state
        self._start(here)
        while stays(self.state) and not resumes(self.state, self._shell.next) and self._turn():
            continue
        found = self.state if stays(self.state) and resumes(self.state, self._shell.next) else None
        self._shell = shell
        return found

    def _turn(self) -> bool:
        """Let the loop take a turn; False if nothing comes of it."""
        before = self.state
        if isinstance(self._shell.next, messages.Stop | messages.Finish | messages.AwaitView):
            return False
        carry_out(self._shell.turn())
        if self.state.step != before.step:
            carry_out(self._shell.resize())
        return self.state is not before

    def advance(self, arrived: Callable[[GroupState], bool], have: Callable[[GroupState], Collection | None]) -> bool:
        """Carry out core's orders until the group has arrived; return False if it does not arrive."""
        while not arrived(self.state):
            before, goes_on = self.state, resumes(self.state, self._shell.next)
            self._have = have(before)
            if not self._turn():
                return False
            if not self.resumed and goes_on:
                self.resumed = True
                self.counted = {counted.after(before) for counted in self.counted}
            if self.state.step != before.step:
                self._committed(before, before.step)
                self.counted = {TakenOver()}
        return True

    def stand(self, report: Report) -> None:
        """Advance to the state in which the group published the report."""
        # Where the batch shrinks, a report names no buckets, but a group that had all of them says so.
        job = self.state.job
        buckets = tuple(range(job.buckets)) if job.policy.shrinks and report.complete else report.reduced_buckets

        def stands(state: GroupState) -> bool:
            here = (state.step, state.attempt, tuple(sorted(state.reduced_buckets)), state.synced)
            return here == (report.step, report.attempt, buckets, report.synced)

        def have(state: GroupState) -> Collection | None:
            return buckets if (state.step, state.attempt) >= (report.step, report.attempt) else None

        if not self.advance(stands, have):
            reached = f"step {self.state.step} with buckets {sorted(self.state.reduced_buckets)}, where core asks for"
            raise _Differs(f"where group {report.group} stood", report, f"{reached} {self._shell.next}")
        self._have = buckets
        if not self.resumed and self._ahead(stands):  # the report does not tell its progress
            self.resumed = None

    def settle(self, wrote: bool | None) -> None:
        """Decide whether the group went on: the writer's line shows it, for other groups it stays open."""
        if self.resumed is None and wrote is not False:
            went_on = {before.after(self.state) for before in self.counted}
            self.counted = went_on if wrote else self.counted | went_on

    def reports(self, reason: messages.Event) -> list[Report]:
        """Return what it reports when the epoch ends for this reason."""
        self._published = []
        self._feed(reason)
        return self._published

    def propose_after(self, events: Iterable[messages.Event], silent: bool) -> list[View]:
        """Return its proposals after these events and another look, and after long enough if a group stays silent."""
        for event in events:
            self._feed(event)
        patience_s, self._now = self.state.patience_s, 0.0
        self._look_again()
        while silent and self.state.waited_s < patience_s and not self.state.stopped:
            self._now += patience_s
            self._look_again()
        return self._proposed

    def _look_again(self) -> None:
        self._proposed = []
        self._feed(messages.Tick())

    def _feed(self, event: messages.Event) -> None:
        carry_out(self._shell.feed(event))


# --- all groups -------------------------------------------------------------------------------------------------------


class _Run:
    def __init__(self, record: Record) -> None:
        self.record, self.result = record, Replay()
        self.past = _Past(record)
        self.machines: dict[GroupId, _Group] = {}
        self.commits: dict[int, dict[GroupId, int]] = {}  # step -> group -> epoch
        self.planned: dict[int, int] = {}  # step -> microbatches of its plan
        self.unseen: dict[int, set[int]] = {}  # step -> epochs whose lost writer may have committed it
        self.epochs = 0  # number of epochs that have been decided again to their end

    def replay(self) -> None:
        views = [line.view for line in self.record.views]
        self._first(self.record.views[0].number, views[0])
        for old, new in pairwise(views):
            if not self.result.stopped:
                self._end(old, new)
        if not self.result.stopped:
            self._last(views[-1])
        self._check_steps()

    def _first(self, line: int, view: View) -> None:
        decided = membership.first_view(self.record.groups, self.record.first)
        self._decide_view(line, view, _compare(view.to_json(), decided.to_json()))
        for group in decided.live:
            self._seat(group, decided)

    def _seat(self, group: GroupId, view: View) -> None:
        def committed(state: GroupState, step: int) -> None:
            self.commits.setdefault(step, {})[group] = state.view.epoch
            if step not in self.planned:
                self.planned[step] = sum(map(len, state.plan.assignment.values()))

        self.machines[group] = _Group(recovery.start(group, self.record.job, view), self.past, committed)

    # --- views --------------------------------------------------------------------------------------------------------

    def _end(self, old: View, new: View) -> None:
        """Decide how the epoch of ``old`` ends, and enter ``new``."""
        line = self.record.views[new.epoch].number
        if not new.live:
            self.result.stopped = f"view {new.epoch} has no live group; it holds no reports to decide it from"
            return
        try:
            differences = self._redecide(old, new)
            if not differences:
                self._enter(old, new)
        except _Differs as error:
            differences = (error.difference,)
        except (AssertionError, ValueError) as error:
            differences = (Difference("what core says of it", "a decision", f"refused: {error}"),)
        self._decide_view(line, new, differences)

    def _enter(self, old: View, new: View) -> None:
        """Close the account of the epoch that ended, and enter the next."""
        reports = [report.step for report in new.reports if report.synced]
        if _writer(old) in new.lost and reports:
            for step in range(self.machines[_writer(old)].state.step, min(reports) + 1):
                self.unseen.setdefault(step, set()).add(old.epoch)
        self._check_recovery(old, new)
        self.epochs = new.epoch
        for group in new.lost:
            del self.machines[group]
        for machine in self.machines.values():
            machine.enter(new)
        for group in new.joined:
            self._seat(group, new)

    def _redecide(self, old: View, new: View) -> tuple[Difference, ...]:
        """Advance all groups to their reports, pass them the events that ended the epoch, compare their proposals."""
        first, *then = _heard(old, new)
        told = [report for report in new.reports if report.group in self.machines]
        proposed: list[View] = []
        for report in told:
            machine = self.machines[report.group]
            machine.stand(report)
            published = machine.reports(first)
            if published != [report]:
                return (Difference(f"the report of group {report.group}", report, published),)
            others = tuple(other for other in told if other is not report)
            silent = any(_SILENT in why for why in new.lost.values())
            proposed += machine.propose_after([*then, messages.ReportsSeen(others)], silent)
        for view in proposed:
            if differences := _compare(new.to_json(), view.to_json()):
                return differences
        return () if proposed else (Difference("who proposes it", "a group", "no group, a report is still awaited"),)

    def _decide_view(self, line: int, view: View, differences: tuple[Difference, ...]) -> None:
        parts = [f"view {view.epoch}: live {listed(view.live)}"]
        parts += [f"{word} {listed(some)}" for word, some in (("lost", view.lost), ("joined", view.joined)) if some]
        self.result.decisions.append(Decision("view", line, ", ".join(parts), differences))
        if differences:
            self.result.stopped = f"view {view.epoch} differs"

    # --- recoveries ---------------------------------------------------------------------------------------------------

    def _last(self, view: View) -> None:
        """Replay the last epoch of the record as far as its step lines go."""
        steps = [line.fields["step"] for line in self.record.steps if line.fields["epoch"] == view.epoch]
        last = max(steps, default=-1)
        for machine in self.machines.values():
            machine.advance(lambda state: state.step > last, lambda state: None)
            machine.resumed = machine.resumed or self.record.ended or None
        self._check_recovery(view, None)
        self.epochs = view.epoch + 1
        for line in self.record.recoveries:
            if line.fields["epoch"] > view.epoch:
                self._decide_recovery(line, [])

    def _check_recovery(self, old: View, new: View | None) -> None:
        """The recovery line of this epoch is that of its writer, or of a later writer that finds none."""
        lines = [line for line in self.record.recoveries if line.fields["epoch"] == old.epoch]
        gone = new.lost if new is not None else {}
        later = [_writer(line.view) for line in self.record.views[old.epoch :] if line.view.live]
        if not self.record.ended:
            later += sorted(self.record.views[-1].view.live)  # any of them may have been the next one
        writers = [group for group in dict.fromkeys(later) if group in old.live]
        for group, machine in self.machines.items():
            only = group == writers[0] and (not lines or writers == [group])  # then the writer is known
            machine.settle(bool(lines) if only else None)
        possible = [
            account
            for group in writers
            if group in gone or self.machines[group].resumed is not False
            for account in self.machines[group].recoveries
        ]
        for line in lines:
            self._decide_recovery(line, possible if line is lines[0] else [])
        first = next((self.machines[group] for group in writers[:2] if group not in gone), None)
        if not lines and first is not None and first.resumed and first.recoveries:
            what = f"recovery in epoch {old.epoch}: none recorded"
            missing = Difference("line", None, first.recoveries[0])
            at = self.record.views[old.epoch].number
            self.result.decisions.append(Decision("recovery", at, what, (missing,)))

    def _decide_recovery(self, line: Line, possible: list[dict[str, Any]]) -> None:
        fields = line.fields
        what = (
            f"recovery in epoch {fields['epoch']}: step {fields['step']}, {fields['patched']} microbatches taken over, "
            f"buckets {fields['buckets_kept']} kept {fields['buckets_redone']} redone, state from {fields['state_from']}"
        )
        # Records of older versions have fewer fields.
        told = [{name: value for name, value in account.items() if name in fields} for account in possible]
        found = [_compare(fields, account) for account in told]
        nothing = (Difference("line", f"a line for epoch {fields['epoch']}", "no (second) line for this epoch"),)
        self.result.decisions.append(Decision("recovery", line.number, what, min(found, key=len, default=nothing)))

    # --- steps --------------------------------------------------------------------------------------------------------

    def _check_steps(self) -> None:
        """Every step line is the commit of the lowest group that has one, or of a writer that died right after it."""
        lines = {line.fields["step"]: line for line in reversed(self.record.steps)}
        for line in self.record.steps:
            if line.fields["epoch"] < self.epochs or not self.result.stopped:
                self._decide_step(line, line is not lines[line.fields["step"]])
        last = self.record.job.steps if self.record.ended else max(lines, default=-1)
        for step, commits in self.commits.items():
            first = min(commits.values())
            if step < last and first < self.epochs and step not in lines:
                missing = Difference("line", None, {"step": step, "epoch": commits[min(commits)]})
                at = self.record.views[first].number
                self.result.decisions.append(Decision("step", at, f"step {step}: none recorded", (missing,)))

    def _decide_step(self, line: Line, again: bool) -> None:
        fields, step = line.fields, line.fields["step"]
        commits = self.commits.get(step, {})
        epochs = ([commits[min(commits)]] if commits else []) + sorted(self.unseen.get(step, ()))
        names = ("epoch", "live", "microbatches")
        recorded = {name: fields[name] for name in names}
        planned = self.planned.get(step, self.record.job.microbatches)
        decided = [dict(zip(names, (e, list(self.record.views[e].view.live), planned), strict=True)) for e in epochs]
        found = [_compare(recorded, one) for one in decided]
        nothing = (Difference("line", recorded, "a second line" if again else "no commit of this step"),)
        differences = nothing if again else min(found, key=len, default=nothing)
        self.result.decisions.append(Decision("step", line.number, f"step {step}", differences))


def _heard(old: View, new: View) -> list[messages.Event]:
    """Return the event that ended the epoch, then all others that the proposer of the view must have received."""
    seats = old.incarnations
    died = [messages.GroupFailed(g, why, seats.get(g, 0)) for g, why in new.lost.items() if _SILENT not in why]
    # A view does not name the donors of the groups that enter: they are members of it, or the groups had not entered.
    donors = tuple((group, seats.get(group, 0)) for group in new.live if group not in new.joined)
    asked = [
        messages.JoinRequested(group, new.incarnations.get(group, 0), donors, new.step - 1) for group in new.joined
    ]
    if died and not new.noticed:
        return [*died, *asked]
    return [messages.EpochAborted(old.epoch, new.noticed or new.reason), *died, *asked]


def _writer(view: View) -> GroupId:
    return min(view.live)


def _compare(recorded: Mapping[str, Any], decided: dict[str, Any]) -> tuple[Difference, ...]:
    return tuple(Difference(name, recorded[name], decided[name]) for name in decided if recorded[name] != decided[name])
