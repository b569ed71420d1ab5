"""Whether a rank that its agent looks at is well, stuck, or only busy: samples in, a reason to give it up out.

Intuition. The agent is another process on the same host, so it can tell apart what looks the same from afar. Whether the
process runs at all is in its state (proc(5)), whether its Python does is in the beats of a thread that needs the GIL for
a moment, and whether training gets on is in a counter of finished work. Training is synchronous: who waits for others is
never the culprit, however long it takes; who works is, when one piece of work takes many times longer than any before.

- *stopped* (SIGSTOP, a debugger): nothing in it will go on by itself; given up after a short time.
- *stuck*: works on one thing for far too long. The reason says whether its Python beats, and whether it uses the CPU.
- *busy*: holds the GIL, compiles, reads slowly. That is what the limit learns; nobody is given up for it.

Assumes: samples are taken about every tenth of a second. Time in which the agent itself did not look (its host was
suspended, or too busy) does not count. A pid is the agent's own child, so it is never another program's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["outside", "working", "waiting"]
"""What the training thread does: the user's own code between steps, work of a step, or waiting for other groups."""

LOOK_S = 0.25
"""The most that one look adds to any time: who was not looking has not seen anything."""
_LEARNED = 3
"""So many pieces of work have to be finished before their length says anything: the first ones compile and read."""
_FACTOR, _LEAST_S = 10.0, 60.0
"""Stuck, unless told otherwise: ten times longer than the longest piece of work so far, and at least a minute."""


@dataclass(frozen=True)
class Limits:
    """``hang_s`` None: learned. ``first_s``: until enough is learned, and for the user's own code between two steps."""

    stopped_s: float = 0.5
    hang_s: float | None = None
    first_s: float = 1800.0


@dataclass(frozen=True)
class Sample:
    """One look at a rank. ``state`` is the letter of proc(5); ``cpu_s`` its processor time so far; the others count up."""

    state: str
    cpu_s: float
    beats: int
    progress: int
    phase: Phase


@dataclass(frozen=True)
class Health:
    """What is known of one rank. Times in seconds: how long it is stopped, silent (no beat), still (no progress)."""

    looked: float | None = None
    last: Sample | None = None
    stopped_s: float = 0.0
    silent_s: float = 0.0
    still_s: float = 0.0
    idle_s: float = 0.0
    finished: int = 0
    longest_s: float = 0.0

    def limit_s(self, limits: Limits) -> tuple[float, str]:
        """How long a piece of work may take, and why so long."""
        if self.last is not None and self.last.phase == "outside":
            return limits.first_s, "between two steps"
        if self.finished < _LEARNED:
            return limits.first_s, "it has just started"
        if limits.hang_s is not None:
            return limits.hang_s, "hang_timeout_s"
        learned = _FACTOR * self.longest_s
        if learned < _LEAST_S:
            return _LEAST_S, "the least"
        return learned, f"{_FACTOR:g} times the longest so far, {self.longest_s:.3g} s"


def look(health: Health, sample: Sample, now: float, limits: Limits) -> tuple[Health, str]:
    """Take in a sample. The second is why the rank is given up, empty while it is well; ``now`` is a local clock."""
    health = _add(health, sample, now)
    if health.stopped_s >= limits.stopped_s:
        return health, f"is stopped (process state {sample.state}) for {health.stopped_s:.1f} s"
    limit_s, why = health.limit_s(limits)
    if sample.phase != "waiting" and health.still_s > limit_s:
        return health, f"has finished nothing for {health.still_s:.0f} s ({limit_s:.0f} s allowed: {why}); {_state(health)}"
    return health, ""


def _add(health: Health, sample: Sample, now: float) -> Health:
    last = health.last
    if last is None or health.looked is None:
        return replace(health, looked=now, last=sample)
    passed_s = min(max(now - health.looked, 0.0), LOOK_S)
    advanced = sample.progress != last.progress or sample.phase != last.phase
    # A rank that is stopped does not work: what follows must not be learned as the length of a piece of work.
    stopped = sample.state in "Tt"
    still_s = 0.0 if advanced else health.still_s + (0.0 if stopped else passed_s)
    worked = advanced and last.phase == "working"
    return replace(
        health,
        looked=now,
        last=sample,
        stopped_s=health.stopped_s + passed_s if stopped and last.state in "Tt" else 0.0,
        silent_s=0.0 if sample.beats != last.beats else health.silent_s + passed_s,
        idle_s=0.0 if sample.cpu_s != last.cpu_s else health.idle_s + passed_s,
        still_s=still_s,
        finished=health.finished + (1 if worked else 0),
        longest_s=max(health.longest_s, health.still_s + passed_s) if worked else health.longest_s,
    )


def _state(health: Health) -> str:
    """What a person wants to know before looking at the stack: is it Python, the processor, the kernel?"""
    sample = health.last
    assert sample is not None
    busy = "uses no processor time" if health.idle_s > 1 else "uses the processor"
    if sample.state == "D":
        return "it is inside the kernel (state D: disk, network file system or driver)"
    if health.silent_s > 1:
        return f"its Python does not run (something holds the GIL), it {busy}"
    return f"its Python runs, the training thread does not return, it {busy}"
