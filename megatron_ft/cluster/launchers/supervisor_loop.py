"""The loop of a supervisor: it follows one run and keeps an agent on each node, whatever starts the agents.

In each turn the loop looks at the agents and at the run record, and ``core.lifecycle.supervisor_policy`` decides. A
:class:`Port` does what differs between clusters: it starts, observes and ends agents (``slurm.supervisor``,
``ssh.launcher``). As in the policy, a *step* is one agent on one node, and the name of it.

Failures assumed: the run directory or the control store does not respond for a while. Each port names its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megatron_ft.cluster.launchers.notes import Notes
from megatron_ft.config.schema import FaultToleranceConfig
from megatron_ft.core.lifecycle import supervisor_policy
from megatron_ft.core.lifecycle.supervisor_policy import Limits, Seen
from megatron_ft.errors import FTError
from megatron_ft.host import job_restore, operator_requests
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.utils.console import say


class Port(Protocol):
    """The part of a supervisor that differs between clusters.

    Attributes:
        look_s: Seconds between two looks.
        stop_hint: What a user can do while the run stops, for people.
        off_duty: True after a look if another supervisor acts. This one waits until no agent is left.
    """

    look_s: float
    stop_hint: str
    off_duty: bool

    def look(self) -> Seen:
        """Returns which agents run, without what the loop itself knows."""

    def ready(self, node: str) -> bool | None:
        """Returns whether the node can take an agent; None: not known yet."""

    def begin(self, attempt: int, nodes: Sequence[str], lost: Sequence[str]) -> tuple[Sequence[str], int, list[str]]:
        """Prepares a start of the whole job. Returns those of the nodes that can take part, the number of spare ones
        among them, and options of ``launch``. ``lost``: nodes that may look well although they are lost."""

    def start(self, node: str, attempt: int, number: int, command: Sequence[str]) -> str:
        """Starts an agent: ``command`` of ``megatron-ft``. Returns its step; "": it could not be started."""

    def cancel(self, steps: Sequence[str]) -> None:
        """Ends agents that go on after the run."""

    def drain(self, node: str, why: str) -> None:
        """Takes a node out of use."""

    def end(self, action: supervisor_policy.Requeue | supervisor_policy.Finish) -> int:
        """Ends the job, or hands its nodes back. Returns the exit code of the supervisor."""

    def on_start(self, line: Mapping[str, Any]) -> None:
        """Takes the ``start`` line of the run's record."""

    def close(self) -> None:
        """Called when the supervisor has its exit code."""


class SupervisorLoop:
    """One supervisor's loop.

    Attributes:
        job: The memory of the policy.
        over: Exit code of the run; None while it goes on.
        closing: True if scripts were seen at work after the last step since the last turn.
    """

    def __init__(
        self, port: Port, nodes: Sequence[str], run_dir: Path, launch: Sequence[str], limits: Limits, notes: Notes
    ) -> None:
        self._port, self._run_dir, self._launch, self._limits = port, run_dir, launch, limits
        self.notes = notes
        self.job = supervisor_policy.Job({node: supervisor_policy.Node() for node in nodes})
        self.over: int | None = None
        self.closing = self._goes_on = False
        self._tail = history.Tail(run_dir)
        self._untold = ""

    def follow(self) -> int:
        """Returns the exit code when the job is over."""
        # no limit: the command itself, until what it watches is over; a signal ends it
        while True:
            code = self._turn()
            if code is not None:
                self._port.close()
                return code
            time.sleep(self._port.look_s)

    def _turn(self) -> int | None:
        seen = self._port.look()
        self.read_record()  # later: an agent that has ended by then has written its last line
        if self._port.off_duty:
            return None if seen.steps is None or seen.steps else self.over
        due = [name for name, node in self.job.nodes.items() if node.due is not None and seen.now >= node.due]
        up = {node: self._port.ready(node) for node in due}
        seen = replace(seen, up=up, over=self.over, closing=self.closing, goes_on=self._goes_on)
        self.closing = self._goes_on = False
        self.job, actions = supervisor_policy.observe(self.job, seen, self._limits)
        for action in actions:
            code = self._do(action)
            if code is not None:
                return code
        if self._untold and self.over is None:  # the run had not begun, or its store did not respond
            self._stop_run(self._untold)
        return None

    def read_record(self) -> None:
        """Reads the new lines of the run's record."""
        for line in self._tail.new():
            self.notes.on_line(line)
            if self.notes.begun:  # earlier lines are of an earlier start, which agents move away
                if line["event"] == "start":
                    self._port.on_start(line)
                self.over = run_state.outcome(line, self.over)
                self.closing |= line["event"] == run_directory.CLOSING
                self._goes_on |= line["event"] in run_directory.PROGRESS

    def start_all(self, attempt: int = 0, lost: Sequence[str] = ()) -> None:
        """Starts an agent on each node that has not failed too often; the last ones are in reserve."""
        self.over = None
        self.notes.begin()
        left = [name for name, node in self.job.nodes.items() if node.failures < self._limits.per_node]
        nodes, spares, options = self._port.begin(attempt, left, lost)
        common = ["--hosts", str(len(nodes)), "--spare-hosts", str(spares), *options]
        steps = {}
        for rank, node in enumerate(nodes):
            command = ["launch", *common, "--host-rank", str(rank), *self._launch]
            steps[node] = self._port.start(node, attempt, 0, command)
        self.job = supervisor_policy.begun(self.job, steps)
        if nodes:
            say(f"{len(nodes)} hosts, {spares} of them in reserve; {nodes[0]} is host 0")

    def _do(self, action: supervisor_policy.Action) -> int | None:
        match action:
            case supervisor_policy.StartSpare(node=name, number=number):
                node = self.job.nodes[name]
                how = f"failure {node.failures}" if node.gave_up is None else "it found no control store or no group"
                say(f"the agent on {name} has ended ({how}); a spare agent is started there")
                step = self._port.start(name, self.job.attempt, number, ["join", "--spare", str(self._run_dir)])
                self.job = supervisor_policy.started(self.job, name, step)
                self.notes.note("spare agent", node=name, failures=node.failures)
            case supervisor_policy.Drain(node=name, why=why):
                self._port.drain(name, why)
            case supervisor_policy.StopRun(why=why):
                self._stop_run(why)
            case supervisor_policy.CancelSteps(names=names):
                self._port.cancel(names)
            case supervisor_policy.StartAll(attempt=attempt, lost=lost):
                say(f"no group is left: the whole job is started again (restart {attempt})")
                self.start_all(attempt, lost)
            case supervisor_policy.Requeue() | supervisor_policy.Finish():
                return self._port.end(action)
        return None

    def _stop_run(self, why: str) -> None:
        first, self._untold = not self._untold, ""
        if first:
            say(f"{why}: the run is told to save and to stop{self._port.stop_hint}")
        try:
            operator_requests.stop(self._run_dir, why)
        except FTError as error:
            self._untold = why
            if first:
                say(f"the run cannot be told to stop yet: {error}")


def limits(settings: FaultToleranceConfig, **own: Any) -> Limits:
    """Returns the limits of a run with these settings; ``own``: those of the launcher."""
    return Limits(whole=job_restore.whole_job(settings), patience_s=settings.store_patience_s, **own)
