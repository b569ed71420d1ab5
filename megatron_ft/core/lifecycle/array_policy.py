"""What the elements of a Slurm array job do, each a job of one node with one agent: decisions only.

Intuition. No element looks after the others, any may be lost and come back, and they start when their turn comes. So each
says now and then that it is there and what its agent does (a *beat*), and what all must do alike is written down under
numbers: begin a run with these hosts, it is over, requeue yourselves. The first decision under a number counts. It is
proposed by the lowest element that is heard; when two take themselves for that one, no harm is done.

Who is not among the hosts of the newest run, or has lost its agent, joins as a spare: the agents bring back what is lost
(``core.spares``), elements only see to it that agents are there. A run that nobody works on any more, and that has not got
to its end, is begun again from its checkpoint: so after all elements were requeued, too.

Assumes: beats may be late, and those of the dead stay; who is silent may be frozen and go on later; an element that was
requeued has a higher count of restarts. Decisions carry the clock of whoever wrote them, seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_ft.core import restarts
from megatron_ft.errors import WIPED_OUT, GroupLeft, LaunchError, StoreError

ElementId = int
_SIGNALLED = 128
_LOST = (WIPED_OUT, StoreError.exit_code)
"""Exit codes with which a run is not over for good."""


@dataclass(frozen=True)
class Beat:
    """What an element says of itself. ``run``: the newest one it has had an agent in, -1: none; ``runs``: the agent is
    there, else ``code`` is what it ended with. ``told``: why it has to give its node back soon."""

    element: ElementId
    restarts: int = 0
    run: int = -1
    runs: bool = False
    code: int | None = None
    told: str = ""


@dataclass(frozen=True)
class Begin:
    """Run ``number`` is begun by these elements, in the order of hosts; the others are spares of it."""

    number: int
    hosts: tuple[ElementId, ...]
    at: float


@dataclass(frozen=True)
class Requeue:
    """All go on later: who has been restarted no more often than this requeues itself."""

    number: int
    restarts: Mapping[ElementId, int]
    why: str


@dataclass(frozen=True)
class Over:
    """Everybody ends with that code."""

    number: int
    code: int
    why: str


Decision = Begin | Requeue | Over


@dataclass(frozen=True)
class Limits:
    """``hosts``: how many elements a run needs. ``per_node``: so many agents may end on a node before its element asks for
    another one. ``whole``: how often the whole run is begun again, None: never (there are no checkpoints)."""

    hosts: int
    per_node: int = 3
    whole: restarts.Limits | None = None
    first_s: float = 1.0
    longest_s: float = 60.0


@dataclass(frozen=True)
class Seen:
    """One look. ``beats``: of the elements that are heard; ``unsure``: of those not heard yet who have not been silent for
    long. ``outcome``: the exit code of the newest run by its record, None when that says nothing."""

    now: float
    beats: Mapping[ElementId, Beat]
    unsure: Mapping[ElementId, Beat] = field(default_factory=dict)
    outcome: int | None = None


def decide(made: Sequence[Decision], seen: Seen, limits: Limits) -> Decision | None:
    """What is to be written down next, for all; None: nothing yet. ``made``: the decisions so far, in order."""
    newest, number = (made[-1] if made else None), len(made)
    match newest:
        case Over():
            return None
        case Begin():
            return _after(newest, made, seen, limits)
    if seen.outcome == 0 and newest is None:
        return Over(number, 0, "the run has got to its end already")
    return _begin(number, _ready(seen, newest), seen, limits)


def _ready(seen: Seen, newest: Decision | None) -> list[ElementId]:
    """Who could have an agent now."""
    before = newest.restarts if isinstance(newest, Requeue) else {}
    return sorted(k for k, beat in seen.beats.items() if not beat.told and beat.restarts > before.get(k, -1))


def _begin(number: int, ready: Sequence[ElementId], seen: Seen, limits: Limits) -> Begin | None:
    return Begin(number, tuple(ready[: limits.hosts]), seen.now) if len(ready) >= limits.hosts else None


def _after(run: Begin, made: Sequence[Decision], seen: Seen, limits: Limits) -> Decision | None:
    number, beats = run.number + 1, {**seen.unsure, **seen.beats}
    if seen.outcome == 0:
        return Over(number, 0, "the run has got to its end")
    to_come = [k for k in run.hosts if k in beats and beats[k].run < run.number and not beats[k].told]
    if to_come or working(run, beats):
        return None
    told = next((beat.told for beat in beats.values() if beat.told), "")
    if told:
        return Requeue(number, {k: beat.restarts for k, beat in seen.beats.items()}, told)
    if seen.outcome is not None and seen.outcome not in _LOST and seen.outcome < _SIGNALLED:
        return Over(number, seen.outcome, "the run has stopped; its record says why")
    refused = all(k in beats and beats[k].code == LaunchError.exit_code for k in run.hosts)
    if refused and seen.outcome is None:
        return Over(number, LaunchError.exit_code, "the run could not be started; the elements' logs say why")
    if limits.whole is None:
        return Over(number, WIPED_OUT, "no group is left, and there are no checkpoints to go on from")
    again = [b.at for a, b in pairwise(made) if isinstance(a, Begin) and isinstance(b, Begin)]
    recent = [at for at in again if at > seen.now - restarts.HOUR_S]
    if len(recent) >= limits.whole.per_hour:
        why = f"it was begun again {len(recent)} times within an hour, and fault_tolerance.rejoin.restarts_per_hour is "
        return Over(number, WIPED_OUT, f"the whole run is lost: {why}{limits.whole.per_hour}")
    pause = min(limits.first_s * 2.0 ** min(len(recent), 30), limits.longest_s)
    return _begin(number, _ready(seen, run), seen, limits) if seen.now - run.at >= pause else None


def working(run: Begin, beats: Mapping[ElementId, Beat]) -> bool:
    """Whether anybody has an agent in that run."""
    return any(beat.runs and beat.run == run.number for beat in beats.values())


# --- what one of them does --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Start an agent as that host of the run."""

    run: int
    rank: int


@dataclass(frozen=True)
class Join:
    """Start an agent in reserve."""

    run: int


@dataclass(frozen=True)
class GiveBack:
    """Requeue this element; ``bad``: its node seems to be the reason."""

    why: str
    bad: bool = False


Action = Launch | Join | GiveBack | Over


@dataclass(frozen=True)
class Own:
    """``failures``: how many agents have ended here by themselves; ``due``: not before that (seconds since 1970) is the next
    one started."""

    beat: Beat
    failures: int = 0
    due: float = 0.0


def ended(own: Own, beat: Beat, now: float, quick: int, limits: Limits) -> Own:
    """The agent has ended, with ``beat.code``. Who was taken down (a signal) or broke (1) counts against the node; other
    codes say something of the run, which is asked again a little later. ``quick``: how often in a row that was."""
    broke = beat.code is not None and (beat.code < 0 or beat.code == 1 or beat.code >= _SIGNALLED)
    pause = min(limits.first_s * 2.0 ** min(quick, 30), limits.longest_s)
    return Own(beat, own.failures + broke, now + pause)


def act(own: Own, made: Sequence[Decision], others: Mapping[ElementId, Beat], now: float, limits: Limits) -> Action | None:
    """What this element, which has no agent now, is to do; None: wait. ``others``: beats of those not known to be lost."""
    newest, me = (made[-1] if made else None), own.beat
    match newest:
        case Over():
            return newest
        case Requeue() if me.restarts <= newest.restarts.get(me.element, -1):
            return GiveBack(newest.why)
    if me.told:
        return None if isinstance(newest, Begin) else GiveBack(me.told)
    if not isinstance(newest, Begin):
        return None
    if me.element in newest.hosts and me.run < newest.number:
        return Launch(newest.number, newest.hosts.index(me.element))
    if own.failures >= limits.per_node:
        return GiveBack(f"{own.failures} agents have ended there within one job", bad=True)
    if me.run == newest.number and me.code == GroupLeft.exit_code:
        return None  # for maintenance
    there = {k: beat for k, beat in others.items() if k != me.element}
    return Join(newest.number) if now >= own.due and working(newest, there) else None
