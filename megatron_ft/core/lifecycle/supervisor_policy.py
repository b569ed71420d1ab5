"""The supervisor of a job on many nodes: decisions only.

Intuition. Agents and spare hosts bring lost groups back by themselves; training needs no supervisor. The supervisor
starts an agent on every node, starts one in reserve where one has failed and the node is well, takes nodes that fail
repeatedly out of use, stops the run before the job's time is up, and reports how it ended. It looks at the job now and
then; its memory between two looks can be found out again, so a second supervisor may go on at any time.

A step that has found no control store, or no group, says nothing about its node: it is no failure. Its node gets an
agent again when the record shows that the run goes on. If instead the record stays silent and at least as many steps
have ended so as still seem to run, the run is lost, and the steps that still seem to run are those of lost nodes.

A *step* in this module is a Slurm job step that runs one agent on one node.

Assumes: the answer to a look may be missing (None) for minutes; a node that is lost may look well until Slurm has noticed;
a step may seem to run forever because only its ``slurmstepd`` has died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_ft.core.lifecycle import restart_policy, run_ending
from megatron_ft.errors import NOT_SAVED, WIPED_OUT, StoreError
from megatron_ft.types import given

_NO_RUN = (WIPED_OUT, StoreError.exit_code)
"""Exit codes of steps that have found no control store, or no group: of ``launch``, and of ``join``."""


@dataclass(frozen=True)
class Limits:
    """The limits of the supervisor.

    Attributes:
        per_node: number of failures after which a node gets no further step and is to be drained.
        stop_before_s: seconds before the end of the job's time at which the run is stopped.
        grace_s: seconds for which steps may go on when the run is over.
        whole: starts of the whole job that are allowed in any hour, the very first not counted, when all groups are lost and
            there are checkpoints; None: it is never started again.
        patience_s: seconds for which an agent waits for a control store.
    """

    per_node: int = 3
    stop_before_s: float = 300.0
    grace_s: float = 15.0
    whole: int | None = None
    patience_s: float = 60.0

    @property
    def silent_s(self) -> float:
        """Seconds without a new view or step, beyond twice the longest time between two of them, after which a run that
        half of the agents have given up is lost."""
        return self.patience_s + self.grace_s


@dataclass(frozen=True)
class Node:
    """A node of the job.

    Attributes:
        step: name of the supervisor's step that runs there; empty if none does.
        failures: number of its steps that have ended there while the run went on.
        due: time at which the next step is started; None: never, or not before the run is seen to go on.
        excused: number of its steps that have ended because they found no control store or no group, in this attempt.
        gave_up: time at which the newest step has ended so; None if it has not.
    """

    step: str = ""
    failures: int = 0
    due: float | None = None
    excused: int = 0
    gave_up: float | None = None


@dataclass(frozen=True)
class Job:
    """The supervisor's memory of the job.

    Attributes:
        nodes: the nodes by name.
        attempt: number of the start of the whole job, from 0.
        stopping: why the run was told to stop before its end, to go on later; empty if it was not.
        over_since: time at which the run was first seen to be over; None before.
        whole: restarts of the whole job.
        heard_at: time at which the newest view or step of this attempt was read; None: none yet.
        gap_s: longest time between two of them, in seconds.
        lost: True if the run is over because nearly all agents have given it up.
    """

    nodes: Mapping[str, Node]
    attempt: int = 0
    stopping: str = ""
    over_since: float | None = None
    whole: restart_policy.Group = restart_policy.Group()
    heard_at: float | None = None
    gap_s: float = 0.0
    lost: bool = False


@dataclass(frozen=True)
class Seen:
    """One look at the job.

    Attributes:
        now: time of the look, in seconds.
        steps: names of the steps that run; None while Slurm does not answer.
        up: node -> whether it answers; None if not known.
        over: exit code of the run; None while it goes on.
        left_s: seconds until the job's time is up; None if not known.
        told: reason for which the job was told to stop and go on later; empty if it was not.
        closing: True if an agent has said since the last look that scripts still work after the last training step, for
            example on their final model.
        ended: step -> its exit code, for steps that do not run; None if not known.
        goes_on: True if a view or a step was read in the run's record since the last look.
    """

    now: float
    steps: frozenset[str] | None
    up: Mapping[str, bool | None]
    over: int | None = None
    left_s: float | None = None
    told: str = ""
    closing: bool = False
    ended: Mapping[str, int | None] = field(default_factory=dict)
    goes_on: bool = False


@dataclass(frozen=True)
class StartSpare:
    """Start an agent in reserve on ``node``; ``number``: the supervisor's steps that have ended there."""

    node: str
    number: int


@dataclass(frozen=True)
class Drain:
    """Take ``node`` out of use, if that is allowed; ``why``: the reason, for people."""

    node: str
    why: str


@dataclass(frozen=True)
class StopRun:
    """Tell the run to save and to end; ``why``: the reason, for people."""

    why: str


@dataclass(frozen=True)
class CancelSteps:
    """Cancel the steps ``names``, which do not end although the run is over."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class StartAll:
    """Start the whole job again, from its last checkpoint; ``attempt``: number of this start; ``lost``: nodes whose
    steps still seem to run, although they were cancelled."""

    attempt: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Requeue:
    """Hand the nodes back; the job goes on later. ``why``: the reason, for people."""

    why: str


@dataclass(frozen=True)
class Finish:
    """End the supervisor with exit code ``code``; ``why``: the reason, for people."""

    code: int
    why: str


Action = StartSpare | Drain | StopRun | CancelSteps | StartAll | Requeue | Finish


def observe(job: Job, seen: Seen, limits: Limits) -> tuple[Job, tuple[Action, ...]]:
    """Return the new memory and the actions to do now. After ``StartAll`` the caller tells with :func:`begun` which
    steps run."""
    actions: list[Action] = []
    if seen.goes_on:
        gap_s = 0.0 if job.heard_at is None else seen.now - job.heard_at
        job = replace(job, heard_at=seen.now, gap_s=max(job.gap_s, gap_s))
    near = seen.left_s is not None and seen.left_s < limits.stop_before_s
    why = seen.told or (f"the job's time is up in {seen.left_s:.0f} s" if near else "")
    if why and not job.stopping and seen.over is None:
        job = replace(job, stopping=why)
        actions.append(StopRun(why))
    if seen.steps is None:
        return job, tuple(actions)
    running = tuple(sorted(node.step for node in job.nodes.values() if node.step in seen.steps))
    if not job.lost and seen.over is None and _is_lost(job, seen.now, len(running), limits):
        job = replace(job, lost=True, over_since=seen.now - limits.grace_s)
    if seen.over is not None or not running or job.lost:
        job, more = _over(job, seen, running, limits)
        return job, (*actions, *more)
    for name, node in job.nodes.items():
        job, more = _node(job, name, node, seen, limits)
        actions += more
    return job, tuple(actions)


def _is_lost(job: Job, now: float, running: int, limits: Limits) -> bool:
    """Return whether the run is over although ``running`` steps seem to run."""
    gave_up = [node.gave_up for node in job.nodes.values() if node.gave_up is not None]
    if not gave_up or len(gave_up) < running:
        return False
    since = min(gave_up) if job.heard_at is None else job.heard_at
    # The groups that are left may need longer for a step, in which they do the others' work as well.
    return now - since >= limits.silent_s + 2 * job.gap_s


def _node(job: Job, name: str, node: Node, seen: Seen, limits: Limits) -> tuple[Job, list[Action]]:
    """Return the memory and the actions for one node while the run goes on."""
    assert seen.steps is not None, "the steps are known, or :func:`look` has returned"
    actions: list[Action] = []
    if node.step and node.step not in seen.steps:
        if seen.ended.get(node.step) in _NO_RUN:
            node = replace(node, step="", due=None, excused=node.excused + 1, gave_up=seen.now)
        else:
            failures = node.failures + 1
            node = replace(node, step="", failures=failures, due=seen.now + restart_policy.pause_s(failures))
            if failures >= limits.per_node:
                actions.append(Drain(name, f"megatron_ft: {failures} agents have ended there within one job"))
                node = replace(node, due=None)
    if node.gave_up is not None and node.due is None and job.heard_at is not None and job.heard_at > node.gave_up:
        node = replace(node, due=node.gave_up + restart_policy.pause_s(node.excused))
    if node.due is not None and seen.now >= node.due and seen.up.get(name) and not job.stopping:
        actions.append(StartSpare(name, node.failures + node.excused))
        node = replace(node, due=None)
    return replace(job, nodes={**job.nodes, name: node}), actions


def started(job: Job, node: str, step: str) -> Job:
    """Return the memory after ``step`` was started on ``node``; "": it could not be started, which counts as an end."""
    new = replace(job.nodes[node], step=step or "could not be started", due=None, gave_up=None)
    return replace(job, nodes={**job.nodes, node: new})


def begun(job: Job, steps: Mapping[str, str]) -> Job:
    """Return the memory after a start of the whole job. ``steps``: node -> step; nodes that fail too often have none."""
    nodes = {name: Node(steps.get(name, ""), node.failures) for name, node in job.nodes.items()}
    return replace(job, nodes=nodes, over_since=None, heard_at=None, gap_s=0.0, lost=False)


def _over(job: Job, seen: Seen, running: tuple[str, ...], limits: Limits) -> tuple[Job, list[Action]]:
    """Return the memory and the actions when the run is over, or no step is left that could go on with it."""
    since = seen.now if job.over_since is None or seen.closing else job.over_since
    job = replace(job, over_since=since)
    if running and seen.now - since < 2 * limits.grace_s:  # steps that still run later are those of a lost node
        return job, [CancelSteps(running)] if seen.now - since >= limits.grace_s else []
    code = seen.over
    if job.lost and code not in (0, NOT_SAVED):  # an agent that was cut off may say that it was cancelled
        code = None
    ending = verdict(code, job.stopping, limits.whole)
    return (job, [ending]) if ending is not None else _start_over(job, seen, given(limits.whole))


def verdict(code: int | None, stopping: str, whole: int | None) -> Requeue | Finish | None:
    """Return how a job ends whose run is over; None: the whole job is to be started again.

    Args:
        code: exit code of the run by its record; None if the record has none.
        stopping: reason for which the run was stopped, to go on later; empty if it was not.
        whole: as in :class:`Limits`.
    """
    if code == 0:
        return Finish(0, "the run has got to its end")
    if code == NOT_SAVED:
        return Finish(code, "all steps are done, but not all of the end is saved; the run's record says what")
    if stopping:
        return Requeue(stopping)
    if code is not None and not run_ending.starts_again(code):
        return Finish(code, "the run has stopped; its record says why")
    if whole is None:
        return Finish(WIPED_OUT, "no group is left, and there are no checkpoints to go on from")
    return None


def _start_over(job: Job, seen: Seen, per_hour: int) -> tuple[Job, list[Action]]:
    loss = restart_policy.Loss(job.whole.incarnation, "died", "no group is left")
    whole = restart_policy.lost(job.whole, loss, seen.now, per_hour)
    if whole.never:
        return replace(job, whole=whole), [Finish(WIPED_OUT, f"the whole job is not started again: {whole.never}")]
    if not restart_policy.is_due(whole, seen.now):
        return replace(job, whole=whole), []
    attempt = job.attempt + 1
    lost = tuple(name for name, node in job.nodes.items() if node.step in given(seen.steps))
    return replace(job, whole=restart_policy.started(whole, seen.now), attempt=attempt), [StartAll(attempt, lost)]
