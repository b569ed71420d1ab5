"""What the supervisor of a job on many nodes does: decisions only.

Intuition. Agents and spare hosts bring lost groups back by themselves; training needs no supervisor. Around it somebody has
to start an agent on every node, put one in reserve where one has failed and the node is well, take nodes that fail again and
again out of use, stop the run in time before the job's time is up, and say truly what became of it. Who does so looks now
and then; what it remembers between two looks can be found out again, so a second supervisor may go on at any time.

Assumes: the answer to a look may be missing (None) for minutes; a node that is lost may look well until Slurm has noticed;
a step may seem to run for ever because only its ``slurmstepd`` has died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ft.core import restarts
from megatron_ft.errors import WIPED_OUT


@dataclass(frozen=True)
class Limits:
    """``per_node``: after so many failures a node gets no further step and is to be drained. ``stop_before_s``: so long
    before the job's time is up the run is stopped. ``grace_s``: how long steps may go on when the run is over. ``whole``:
    how often the whole job is started again, when all groups are lost and there are checkpoints; None: never."""

    per_node: int = 3
    stop_before_s: float = 300.0
    grace_s: float = 15.0
    whole: restarts.Limits | None = None
    first_s: float = 1.0
    longest_s: float = 60.0


@dataclass(frozen=True)
class Node:
    """``step``: the name of ours that runs there, or "". ``failures``: how many of ours have ended there while the run went
    on. ``due``: when the next is to be started; None: not at all."""

    step: str = ""
    failures: int = 0
    due: float | None = None


@dataclass(frozen=True)
class Job:
    """``nodes`` by name. ``attempt``: which start of the whole job it is. ``stopping``: why the run was told to stop before
    its end, and ``requeue`` whether it is to go on later. ``over_since``: when it was seen to be over."""

    nodes: Mapping[str, Node]
    attempt: int = 0
    stopping: str = ""
    requeue: bool = False
    over_since: float | None = None
    whole: restarts.Group = restarts.Group()


@dataclass(frozen=True)
class Seen:
    """One look. ``steps``: names of those that run, None while Slurm does not say. ``up``: whether a node answers, as far
    as is known. ``over``: the run's exit code, None while it goes on. ``left_s``: until the job's time is up, where that is
    known. ``told``: that somebody wants the job to stop and go on later."""

    now: float
    steps: frozenset[str] | None
    up: Mapping[str, bool | None]
    over: int | None = None
    left_s: float | None = None
    told: str = ""


@dataclass(frozen=True)
class StartSpare:
    """Start an agent in reserve on ``node``; ``number``: how many of ours have ended there."""

    node: str
    number: int


@dataclass(frozen=True)
class Drain:
    """Take ``node`` out of use, if that is allowed."""

    node: str
    why: str


@dataclass(frozen=True)
class StopRun:
    """Tell the run to save and to end."""

    why: str


@dataclass(frozen=True)
class CancelSteps:
    """The run is over, and these do not end."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class StartAll:
    """Start the whole job again, from its last checkpoint."""

    attempt: int


@dataclass(frozen=True)
class Requeue:
    """Hand the nodes back; the job goes on later."""

    why: str


@dataclass(frozen=True)
class Finish:
    """It is over."""

    code: int
    why: str


Action = StartSpare | Drain | StopRun | CancelSteps | StartAll | Requeue | Finish


def look(job: Job, seen: Seen, limits: Limits) -> tuple[Job, tuple[Action, ...]]:
    """What there is to do now, and what to remember. After ``StartAll`` the caller says with :func:`begun` what runs."""
    actions: list[Action] = []
    near = seen.left_s is not None and seen.left_s < limits.stop_before_s
    why = seen.told or (f"the job's time is up in {seen.left_s:.0f} s" if near else "")
    if why and not job.stopping and seen.over is None:
        job = replace(job, stopping=why, requeue=True)
        actions.append(StopRun(why))
    if seen.steps is None:
        return job, tuple(actions)
    running = tuple(sorted(node.step for node in job.nodes.values() if node.step in seen.steps))
    if seen.over is not None or not running:
        job, more = _over(job, seen, running, limits)
        return job, (*actions, *more)
    for name, node in job.nodes.items():
        job, more = _node(job, name, node, seen, limits)
        actions += more
    return job, tuple(actions)


def _node(job: Job, name: str, node: Node, seen: Seen, limits: Limits) -> tuple[Job, list[Action]]:
    """One node while the run goes on."""
    actions: list[Action] = []
    if node.step and node.step not in seen.steps:
        failures = node.failures + 1
        pause = min(limits.first_s * 2.0 ** min(failures - 1, 30), limits.longest_s)
        node = Node("", failures, seen.now + pause)
        if failures >= limits.per_node:
            actions.append(Drain(name, f"megatron_ft: {failures} agents have ended there within one job"))
            node = replace(node, due=None)
    if node.due is not None and seen.now >= node.due and seen.up.get(name) and not job.stopping:
        actions.append(StartSpare(name, node.failures))
        node = replace(node, due=None)
    return replace(job, nodes={**job.nodes, name: node}), actions


def started(job: Job, node: str, step: str) -> Job:
    """That step runs there now; "": it could not be started, which counts as one that has ended."""
    return replace(job, nodes={**job.nodes, node: replace(job.nodes[node], step=step or "could not be started", due=None)})


def begun(job: Job, steps: Mapping[str, str]) -> Job:
    """The whole job has been started (again): node -> step. Those that fail too often have none."""
    nodes = {name: replace(node, step=steps.get(name, ""), due=None) for name, node in job.nodes.items()}
    return replace(job, nodes=nodes, over_since=None)


def _over(job: Job, seen: Seen, running: tuple[str, ...], limits: Limits) -> tuple[Job, list[Action]]:
    """The run is over, or nobody is left who could go on with it."""
    since = seen.now if job.over_since is None else job.over_since
    job = replace(job, over_since=since)
    if running and seen.now - since < 2 * limits.grace_s:  # later they are those of a node that is lost
        return job, [CancelSteps(running)] if seen.now - since >= limits.grace_s else []
    # Who says how a run has ended may have been lost with everybody else.
    code = WIPED_OUT if seen.over is None else seen.over
    if code == 0:
        return job, [Finish(0, "the run has got to its end")]
    if job.requeue:
        return job, [Requeue(job.stopping)]
    if code != WIPED_OUT:
        return job, [Finish(code, "the run has stopped; its record says why")]
    if limits.whole is None:
        return job, [Finish(code, "no group is left, and there are no checkpoints to go on from")]
    return _start_over(job, seen, limits.whole)


def _start_over(job: Job, seen: Seen, limits: restarts.Limits) -> tuple[Job, list[Action]]:
    whole = restarts.lost(job.whole, restarts.Loss(job.whole.incarnation, "died", "no group is left"), seen.now, limits)
    if whole.never:
        return replace(job, whole=whole), [Finish(WIPED_OUT, f"the whole job is not started again: {whole.never}")]
    if not restarts.is_due(whole, seen.now):
        return replace(job, whole=whole), []
    attempt = job.attempt + 1
    return replace(job, whole=restarts.started(whole, seen.now), attempt=attempt), [StartAll(attempt)]
