"""The health of a rank from its agent's samples: the rank is well, stuck, or only busy.

Intuition. The agent is another process on the same host, so it can tell apart conditions that look the same from afar.
The state in proc(5) tells whether the process runs at all, the heartbeats of a thread that needs the GIL for a moment tell
whether its Python runs, and a counter of finished work tells whether training gets on. Training is synchronous: a rank
that waits for others is never the culprit, however long it takes; a rank that works is, when one piece of work takes
many times longer than any before.

- *stopped* (SIGSTOP, a debugger): the rank will not go on by itself, and is given up after a short time, longer than
  the 0.15 s that a debugger or profiler may need for a look at its stack.
- *stuck*: one piece of work takes far too long. The reason tells whether Python runs, and whether the rank uses the CPU.
- *busy*: the rank holds the GIL, compiles, or reads slowly. The limit is learned from that; no rank is given up for it.
- *in storage*: inside a call of the dataset, or in state D. When the ranks of other groups are there at the same time
  (:func:`is_outage`), the file system is away for all of them: no rank is given up before ``storage_s``, because to give up
  all groups ends the run, and a file system comes back. One group that is there alone is given up like any stuck rank.
  When that is over, a rank has as much time for its piece of work as if it had just begun it: the samples are there and are
  not computed yet, and storage comes back for one host some time after another.

Assumes: samples are taken every tenth of a second or more often. Time in which the agent itself did not look (its host was
suspended, or too busy) does not count. A pid is the agent's own child, so it is never another program's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_ft.types import GroupId

Phase = Literal["outside", "working", "waiting", "ended"]
"""The activity of the training thread: the user's own code between steps, work of a step, waiting for other groups in a
step or an evaluation, or, after the last step, waiting for the end of the run."""

LOOK_S = 0.15
"""The most seconds that one look adds to any time, because an agent that did not look has not seen anything."""
LEARNED = 3
"""The number of finished pieces of work after which their length is used: the first ones compile and read."""
FACTOR, LEAST_S = 10.0, 60.0
"""Default limit for a piece of work: ten times the longest so far, and at least a minute."""
_EVIDENCE_S, _EVIDENCE_SHARE = 5.0, 4.0
"""A rank counts as stuck in storage after this time, or after this part of the limit for its piece of work if that is
shorter."""


@dataclass(frozen=True)
class Limits:
    """Times in seconds after which a rank is given up.

    Attributes:
        stopped_s: for a rank that is stopped.
        hang_s: for a piece of work; None: learned from earlier ones.
        first_s: for a piece of work, until enough is learned.
        outside_s: for the user's own code between two steps.
        storage_s: for a rank in storage while the ranks of other groups are there as well.
    """

    stopped_s: float = 0.25
    hang_s: float | None = None
    first_s: float = 1800.0
    outside_s: float = 1800.0
    storage_s: float = 1800.0


@dataclass(frozen=True)
class Sample:
    """One look at a rank.

    Attributes:
        state: the letter of proc(5).
        cpu_s: processor time used so far, in seconds.
        heartbeats: number of heartbeats of its Python so far.
        progress: number of finished pieces of work so far.
        phase: activity of its training thread.
        dataset: number of beginnings and ends of calls of the dataset in any thread; odd during a call.
    """

    state: str
    cpu_s: float
    heartbeats: int
    progress: int
    phase: Phase
    dataset: int = 0

    @property
    def waits(self) -> bool:
        """Whether the training thread waits for other groups."""
        return self.phase in ("waiting", "ended")


def learned_limit(longest_s: float) -> tuple[float, str]:
    """Return the limit that follows from the longest piece of work so far, in seconds, and the reason for it."""
    learned = FACTOR * longest_s
    if learned < LEAST_S:
        return LEAST_S, "the least"
    return learned, f"{FACTOR:g} times the longest so far, {longest_s:.3g} s"


@dataclass(frozen=True)
class Health:
    """The knowledge about one rank; times are in seconds.

    Attributes:
        looked: local time of the last look; None before the first.
        last: the last sample; None before the first.
        stopped_s: time for which it has been stopped.
        silent_s: time without a heartbeat.
        still_s: time without progress.
        excused_s: the part of ``still_s`` that does not count, because storage was away for other groups, too.
        idle_s: time without use of the processor.
        storage_s: time inside one call of the dataset, or in state D without a break.
        finished: number of finished pieces of work.
        longest_s: the longest piece of work.
    """

    looked: float | None = None
    last: Sample | None = None
    stopped_s: float = 0.0
    silent_s: float = 0.0
    still_s: float = 0.0
    excused_s: float = 0.0
    idle_s: float = 0.0
    storage_s: float = 0.0
    finished: int = 0
    longest_s: float = 0.0

    def limit_s(self, limits: Limits) -> tuple[float, str]:
        """Return the seconds a piece of work may take, and the reason for this limit."""
        if self.last is not None and self.last.phase == "outside":
            return limits.outside_s, "between two steps"
        if self.finished < LEARNED:
            return limits.first_s, "it has just started"
        if limits.hang_s is not None:
            return limits.hang_s, "hang_timeout_s"
        return learned_limit(self.longest_s)

    def is_overdue(self, limits: Limits) -> bool:
        """Return whether the rank has worked on one piece of work for longer than the limit."""
        return self.last is not None and not self.last.waits and self.still_s > self.limit_s(limits)[0]

    def in_storage(self, limits: Limits) -> bool:
        """Return whether the rank has been in storage for long enough to conclude that storage does not answer.

        That is possible while its training thread waits for other groups, because its next samples are read ahead.
        """
        least_s = min(_EVIDENCE_S, self.limit_s(limits)[0] / _EVIDENCE_SHARE)
        return self.storage_s > least_s


def classify(health: Health, limits: Limits, outage: bool) -> tuple[Health, str]:
    """Return the health with excused time noted, and the reason to give the rank up, empty while it is well.

    ``outage``: other groups are in storage, too (:func:`is_outage`).
    """
    if health.last is None:
        return health, ""
    if health.stopped_s >= limits.stopped_s:
        return health, f"is stopped (process state {health.last.state}) for {health.stopped_s:.1f} s"
    if not health.is_overdue(limits):
        return health, ""
    limit_s, why = health.limit_s(limits)
    if outage and health.in_storage(limits) and limits.storage_s > limit_s:
        limit_s, why = limits.storage_s, "storage_timeout_s, because other groups are in storage as well"
        if health.still_s <= limit_s:
            return replace(health, excused_s=health.still_s), ""
    elif health.still_s - health.excused_s <= limit_s:
        return health, ""
    elif health.excused_s:
        why += ", after storage was away for other groups as well"
    return health, f"has finished nothing for {health.still_s:.0f} s ({limit_s:.0f} s allowed: {why}); {_state(health)}"


def is_outage(stuck: Collection[tuple[int, GroupId]], hosts: int, members: Collection[GroupId]) -> bool:
    """Return whether storage is away for more than one group, or for all members.

    Args:
        stuck: host and group of each rank that is stuck in storage now.
        hosts: number of hosts of the run.
        members: the groups of the newest view.
    """
    groups = {group for _, group in stuck}
    if members and groups >= set(members):
        return True  # without them no group would be left
    # Several groups of one host may have lost that host's disk; a run on one host has no other to compare with.
    return len({host for host, _ in stuck}) > 1 or (hosts == 1 and len(groups) > 1)


def add(health: Health, sample: Sample, now: float, limits: Limits) -> Health:
    """Take in a sample; ``now`` is a local monotonic clock, in seconds."""
    last = health.last
    if last is None or health.looked is None:
        return replace(health, looked=now, last=sample)
    passed_s = min(max(now - health.looked, 0.0), LOOK_S)
    advanced = sample.progress != last.progress or sample.phase != last.phase
    # A stopped rank does not work, so the time must not be learned as the length of a piece of work.
    stopped = sample.state in "Tt"
    # Two short stops, between which the rank has run, are not one long one.
    ran = sample.heartbeats != last.heartbeats or sample.cpu_s != last.cpu_s
    still_s = 0.0 if advanced else health.still_s + (0.0 if stopped else passed_s)
    worked = advanced and last.phase == "working"
    # A piece of work that took longer than its limit was held by an outage, and must not be learned either.
    learned = worked and health.still_s <= health.limit_s(limits)[0]
    in_call = sample.dataset % 2 == 1 and sample.dataset == last.dataset
    in_storage = in_call or (sample.state == "D" and last.state == "D")
    return replace(
        health,
        looked=now,
        last=sample,
        stopped_s=health.stopped_s + passed_s if stopped and last.state in "Tt" and not ran else 0.0,
        silent_s=0.0 if sample.heartbeats != last.heartbeats else health.silent_s + passed_s,
        idle_s=0.0 if sample.cpu_s != last.cpu_s else health.idle_s + passed_s,
        storage_s=health.storage_s + passed_s if in_storage else 0.0,
        still_s=still_s,
        excused_s=0.0 if advanced else health.excused_s,
        finished=health.finished + (1 if worked else 0),
        longest_s=max(health.longest_s, health.still_s + passed_s) if learned else health.longest_s,
    )


@dataclass
class Watched:
    """One watched rank. ``given_up`` is the reason, once there is one."""

    health: Health = field(default_factory=Health, kw_only=True)
    given_up: str = field(default="", kw_only=True)


def look(
    looked: Collection[tuple[Watched, Sample]], now: float, limits: Limits, is_outage: Callable[[], bool]
) -> float:
    """Take in a sample of each rank that is not given up, and give up those that are stopped or stuck. Return the seconds
    until the next one that is stopped now is to be given up, ``inf`` if none is.

    ``is_outage``: returns whether other groups are stuck in storage, too; called at most once, and only before a rank in
    storage would be given up.
    """
    for rank, sample in looked:
        rank.health = add(rank.health, sample, now, limits)
    outage = (
        any(rank.health.is_overdue(limits) and rank.health.in_storage(limits) for rank, _ in looked) and is_outage()
    )
    due_s = float("inf")
    for rank, sample in looked:
        rank.health, rank.given_up = classify(rank.health, limits, outage)
        if not rank.given_up and sample.state in "Tt":
            due_s = min(due_s, limits.stopped_s - rank.health.stopped_s)
    return due_s


def _state(health: Health) -> str:
    """Describe the rank for people before they look at the stack: its Python, the processor, or the kernel."""
    sample = health.last
    assert sample is not None
    busy = "uses no processor time" if health.idle_s > 1 else "uses the processor"
    if sample.state == "D":
        return "it is inside the kernel (state D: disk, network file system or driver)"
    if sample.dataset % 2 == 1:
        return f"it is inside the dataset for {health.storage_s:.0f} s"
    if health.silent_s > 1:
        return f"its Python does not run (something holds the GIL), it {busy}"
    return f"its Python runs, the training thread does not return, it {busy}"
