"""The elements of a Slurm array job, each a job of one node with one agent: decisions only.

Intuition. No element controls the others, any may be lost and come back, and Slurm starts them at different times. So
each element writes now and then that it is alive and the state of its agent (a *heartbeat*), and the decisions for all
elements are written under numbers: begin a run with these hosts, the run is over, requeue. The first decision under a
number counts, and the number of the decision to begin a run is also that of the run. The lowest element that is heard
proposes it; if two elements take themselves for that one, no harm is done.

An element that is not among the hosts of the newest run, or has lost its agent, joins as a spare: the agents bring back
lost groups (``core.lifecycle.spare_policy``), and the elements only start agents. A run that no agent belongs to, and
that has not reached its end, is begun again from its checkpoint; the same holds after all elements were requeued.

Assumes: heartbeats may be late, and those of dead elements stay; a silent element may be frozen and go on later; an element
that was requeued has a higher count of restarts. Decisions carry the clock of their writer, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_ft.core.lifecycle import restart_policy, supervisor_policy
from megatron_ft.core.lifecycle.supervisor_policy import Finish
from megatron_ft.errors import WIPED_OUT, GroupLeft, LaunchError
from megatron_ft.types import given

ElementId = int
_SIGNALLED = 128


@dataclass(frozen=True)
class Heartbeat:
    """An element's report of itself.

    Attributes:
        element: its index in the array.
        restarts: number of times that Slurm has restarted it.
        run: the newest run it has had an agent in; -1: none.
        runs: True if the agent runs.
        asks: True while the agent that runs only asks to be let into the run. The run may be gone, so such an agent
            keeps no run alive: elements that all ask would otherwise wait for each other.
        code: exit code of the agent that has ended, else None.
        told: why the element has to give its node back soon; empty if it has not.
    """

    element: ElementId
    restarts: int = 0
    run: int = -1
    runs: bool = False
    asks: bool = False
    code: int | None = None
    told: str = ""


@dataclass(frozen=True)
class Begin:
    """The decision to begin a run.

    Attributes:
        hosts: the elements that begin the run, in the order of its hosts; the others are spares.
        at: time of the decision, in seconds since 1970.
    """

    hosts: tuple[ElementId, ...]
    at: float


@dataclass(frozen=True)
class Requeue:
    """The decision to go on later.

    Attributes:
        restarts: an element requeues itself if its count of restarts is no higher than the one given here.
        why: the reason, for people.
    """

    restarts: Mapping[ElementId, int]
    why: str


Decision = Begin | Requeue | Finish


@dataclass(frozen=True)
class Limits(supervisor_policy.Limits):
    """The limits of a supervisor, and ``hosts``: the number of elements that a run needs."""

    hosts: int = 1


@dataclass(frozen=True)
class Seen:
    """One look at the job.

    Attributes:
        now: time of the look, in seconds since 1970.
        heartbeats: of the elements that are heard.
        unsure: of elements that are not heard yet, but have not been silent for long.
        outcome: exit code of the newest run by its record; None if the record has none.
    """

    now: float
    heartbeats: Mapping[ElementId, Heartbeat]
    unsure: Mapping[ElementId, Heartbeat] = field(default_factory=dict)
    outcome: int | None = None


def decide(made: Sequence[Decision], seen: Seen, limits: Limits) -> Decision | None:
    """Return the next decision for all elements, or None if none is due. ``made``: the decisions so far, in order."""
    newest = made[-1] if made else None
    match newest:
        case Finish():
            return None
        case Begin():
            return _after(newest, made, seen, limits)
    if seen.outcome == 0 and newest is None:
        return Finish(0, "the run has got to its end already")
    return _begin(_ready(seen, newest), seen, limits)


def _ready(seen: Seen, newest: Decision | None) -> list[ElementId]:
    """Return the elements that could start an agent now."""
    before = newest.restarts if isinstance(newest, Requeue) else {}
    return sorted(
        k for k, heartbeat in seen.heartbeats.items() if not heartbeat.told and heartbeat.restarts > before.get(k, -1)
    )


def _begin(ready: Sequence[ElementId], seen: Seen, limits: Limits) -> Begin | None:
    return Begin(tuple(ready[: limits.hosts]), seen.now) if len(ready) >= limits.hosts else None


def _after(run: Begin, made: Sequence[Decision], seen: Seen, limits: Limits) -> Decision | None:
    number, heartbeats = len(made) - 1, {**seen.unsure, **seen.heartbeats}
    if seen.outcome == 0:
        return Finish(0, "the run has got to its end")
    to_come = [k for k in run.hosts if k in heartbeats and heartbeats[k].run < number and not heartbeats[k].told]
    if to_come or working(number, heartbeats):
        return None
    told = next((heartbeat.told for heartbeat in heartbeats.values() if heartbeat.told), "")
    cancelled = seen.outcome is not None and seen.outcome >= _SIGNALLED  # one element, and not the run
    code = None if cancelled else seen.outcome
    refused = all(k in heartbeats and heartbeats[k].code == LaunchError.exit_code for k in run.hosts)
    if refused and seen.outcome is None and not told:
        return Finish(LaunchError.exit_code, "the run could not be started; the elements' logs say why")
    match supervisor_policy.verdict(code, told, limits.whole):
        case supervisor_policy.Requeue(why=why):
            return Requeue({k: heartbeat.restarts for k, heartbeat in seen.heartbeats.items()}, why)
        case Finish() as finish:
            return finish
    again = [b.at for a, b in pairwise(made) if isinstance(a, Begin) and isinstance(b, Begin)]
    recent = [at for at in again if at > seen.now - restart_policy.HOUR_S]
    if len(recent) >= given(limits.whole):
        why = f"it was begun again {len(recent)} times within an hour, and fault_tolerance.rejoin.restarts_per_hour is "
        return Finish(WIPED_OUT, f"the whole run is lost: {why}{limits.whole}")
    due = run.at + restart_policy.pause_s(len(recent) + 1)
    return _begin(_ready(seen, run), seen, limits) if seen.now >= due else None


def working(run: int, heartbeats: Mapping[ElementId, Heartbeat]) -> bool:
    """Return whether any element has an agent that belongs to that run."""
    return any(heartbeat.runs and not heartbeat.asks and heartbeat.run == run for heartbeat in heartbeats.values())


def overtaken(heartbeat: Heartbeat, made: Sequence[Decision]) -> bool:
    """Return whether the element's agent asks to be let into a run after which something else was decided."""
    return heartbeat.asks and heartbeat.run < len(made) - 1


# --- the actions of one element ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Start an agent as host ``rank`` of run ``run``."""

    run: int
    rank: int


@dataclass(frozen=True)
class Join:
    """Start an agent in reserve, as a spare of run ``run``."""

    run: int


@dataclass(frozen=True)
class GiveBack:
    """Requeue this element.

    Attributes:
        why: the reason, for people.
        bad: True if its node seems to be the cause.
    """

    why: str
    bad: bool = False


Action = Launch | Join | GiveBack | Finish


@dataclass(frozen=True)
class Own:
    """The state of this element.

    Attributes:
        heartbeat: its newest heartbeat.
        failures: number of agents that were taken down or broke here.
        due: time in seconds since 1970 before which no further agent is started.
    """

    heartbeat: Heartbeat
    failures: int = 0
    due: float = 0.0


def ended(own: Own, heartbeat: Heartbeat, now: float, quick: int) -> Own:
    """Return the element's state after its agent has ended with ``heartbeat.code``.

    An agent that was taken down (a signal) or broke (code 1) counts against the node; other codes concern the run,
    whose state is looked at again after a pause. ``quick``: number of such ends in a row.
    """
    broke = heartbeat.code is not None and (heartbeat.code < 0 or heartbeat.code == 1 or heartbeat.code >= _SIGNALLED)
    return Own(heartbeat, own.failures + broke, now + restart_policy.pause_s(quick + 1))


def act(
    own: Own, made: Sequence[Decision], others: Mapping[ElementId, Heartbeat], now: float, limits: Limits
) -> Action | None:
    """Return the action of this element, which has no agent now; None: wait. ``others``: heartbeats of elements not known to
    be lost."""
    newest, run, me = (made[-1] if made else None), len(made) - 1, own.heartbeat
    match newest:
        case Finish():
            return newest
        case Requeue() if me.restarts <= newest.restarts.get(me.element, -1):
            return GiveBack(newest.why)
    if me.told:
        return None if isinstance(newest, Begin) else GiveBack(me.told)
    if not isinstance(newest, Begin):
        return None
    if me.element in newest.hosts and me.run < run:
        return Launch(run, newest.hosts.index(me.element))
    if own.failures >= limits.per_node:
        return GiveBack(f"{own.failures} agents have ended there within one job", bad=True)
    if me.run == run and me.code == GroupLeft.exit_code:
        return None  # the group left in order, for maintenance of the node
    there = {k: heartbeat for k, heartbeat in others.items() if k != me.element}
    return Join(run) if now >= own.due and working(run, there) else None
