"""``megatron-ft supervise``: starts an agent on each node of a Slurm job, in its own step, and follows the run.

The loop is :class:`.SupervisorLoop`. The node of the batch shell is the last host: the control store is on another node,
and the batch node is a spare one if there are any. The run therefore survives the loss of the batch node and the first
supervisor: a second supervisor waits in a step on another node until the first one, which writes signs of life into the
run directory, has been silent for a while. It learns from Slurm and the run record what runs.

Failures assumed: slurmctld does not respond for minutes; the supervisor is killed (the batch script starts it again),
stopped or cut off for a while (another one has taken over, and this one waits for the end); the run directory does not
respond (the supervisors wait for it).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.cluster.launchers.notes import Notes
from megatron_ft.cluster.launchers.slurm import commands
from megatron_ft.cluster.launchers.supervisor_loop import Port, SupervisorLoop
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle import supervisor_policy
from megatron_ft.core.lifecycle.supervisor_policy import Seen
from megatron_ft.errors import LaunchError, RunStopped
from megatron_ft.host import run_lock
from megatron_ft.host.peers import ranks_of
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.utils import shared_file
from megatron_ft.utils.console import say
from megatron_ft.utils.signal_wakeup import stop_signals

REQUEUED = 75
"""Exit code of a supervisor whose job continues later (EX_TEMPFAIL)."""
_ASK_SLURM_S = 10.0
"""Interval of queries to Slurm while nothing happens."""
_YOUNG_S = 60.0
"""Slurm may not list a new step for this long."""
DIRECTORY = "supervisors"
"""Subdirectory of the run directory with the signs of life of the supervisors of each job."""
_HEARTBEAT_S, _SILENT_LOOKS = 3.0, 5
_SILENT_S = _HEARTBEAT_S * _SILENT_LOOKS


@dataclass
class _Step:
    """A step that this supervisor has started, until its srun ends."""

    srun: subprocess.Popen
    since: float = field(default_factory=time.monotonic)


class Supervisor(Port):
    """One supervisor. ``launch``: arguments of ``megatron-ft launch``, which contain ``run``, ``run_dir`` and ``spares``.
    ``waits``: it is the second supervisor, which waits until the first is lost. ``srun``: further options of srun, for the
    agents' steps. Raises ``LaunchError`` outside of a Slurm job, or with too few nodes.

    Large because it is all that the loop asks of a cluster, and each answer is made of what Slurm said last.
    """

    look_s, stop_hint, off_duty = 0.5, "", False

    def __init__(
        self,
        launch: Sequence[str],
        run: RunConfig,
        run_dir: Path,
        spares: int,
        limits: supervisor_policy.Limits,
        waits: bool = False,
        srun: Sequence[str] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._launch, self._run, self._run_dir = launch, run, run_dir
        self._spares, self._limits, self._waits, self._srun = spares, limits, waits, srun
        self._slurm = commands.job(environ)
        here, nodes = self._slurm.here, self._slurm.nodes
        self._nodes = [*(node for node in nodes if node != here), here]
        if spares >= len(self._nodes):
            raise LaunchError(
                f"--spare-hosts is {spares} and the job has {len(self._nodes)} nodes; at least one must not be spare"
            )
        notes = Notes(run_dir, "slurm", job=self._slurm.id)
        self._loop = SupervisorLoop(self, self._nodes, run_dir, launch, limits, notes)
        self._steps: dict[str, _Step] = {}
        self._codes: dict[str, int] = {}
        self._listed: Mapping[str, str] | None = {}
        self._cancelled: set[str] = set()
        self._ends_at: float | None = None
        self._asked_at = self._heartbeat_at = -float("inf")
        self._second, self._seconds = "", 0
        self._told = ""
        self._duty = _Duty(run_dir, f"{self._slurm.id}.{self._slurm.restarts}", waits)

    def run(self) -> int:
        """Returns the exit code when the job is over."""
        for number in stop_signals():
            if number != signal.SIGINT:
                signal.signal(number, self._signalled)
        code = None
        for line in history.lines(self._run_dir):
            self._loop.notes.on_line(line)
            code = run_state.outcome(line, code)
        self._ask_slurm()
        if code == 0:
            say("the run is complete already")
            return 0
        running = self._found()
        if running:
            self._adopt(running)
        elif self._waits:
            return 0  # no step is left to supervise
        else:
            run_lock.check_free(self._run_dir, self._launches)
            self._loop.start_all()
        return self._loop.follow()

    # --- observing ----------------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        """See :class:`Port`."""
        ended = [name for name, step in self._steps.items() if step.srun.poll() is not None]
        if ended:  # ask Slurm soon: the srun may have ended without its step
            self._asked_at = min(self._asked_at, time.monotonic() - _ASK_SLURM_S + 1.0)
        for name in ended:
            self._codes[name] = self._steps.pop(name).srun.returncode
        if time.monotonic() - self._asked_at >= _ASK_SLURM_S:
            self._ask_slurm()
        now = time.monotonic()
        self.off_duty = not self._on_duty()
        if self.off_duty:
            return Seen(now, None if self._listed is None else frozenset(self._found().values()), {})
        self._look_after_second()
        left_s = None if self._ends_at is None else self._ends_at - time.time()
        return Seen(now, self._running(), {}, ended=self._codes, told=self._told, left_s=left_s)

    def ready(self, node: str) -> bool | None:
        """See :class:`Port`."""
        return commands.node_up(node)

    def on_start(self, line: Mapping[str, Any]) -> None:
        """See :class:`Port`."""
        if "store" in line:
            say(line["store"])

    def _look_after_second(self) -> None:
        """Starts a second supervisor on another node, when there is none."""
        running = self._running()
        if not self._loop.notes.begun or self._loop.over is not None or running is None or self._second in running:
            return
        others = [
            node for node, its in self._loop.job.nodes.items() if node != self._slurm.here and its.step in running
        ]
        if others:
            own = ["--stop-before-s", str(self._limits.stop_before_s)]
            own += ["--failures-per-node", str(self._limits.per_node), "--second"]
            own += [f"--srun-option={option}" for option in self._srun]
            self._seconds += 1
            self._second = f"mft-second/{os.getpid()}/{self._seconds}"
            self._start_step(others[-1], self._second, ["supervise", *own, "launch", *self._launch])

    def _ask_slurm(self) -> None:
        self._asked_at = time.monotonic()
        self._listed = commands.steps(self._slurm.id)
        self._ends_at = commands.ends_at(self._slurm.id) or self._ends_at

    def _running(self) -> frozenset[str] | None:
        if self._listed is None:
            return None
        now = time.monotonic()
        young = {name for name, s in self._steps.items() if s.srun.poll() is None and now - s.since < _YOUNG_S}
        return frozenset({*self._listed, *young})

    def _found(self) -> dict[str, str]:
        """Returns node -> name of the step of the newest attempt, as Slurm lists them."""
        names = [name.split("/") for name in self._listed or () if name.startswith("mft/")]
        newest = max((int(attempt) for _, attempt, _, _ in names), default=0)
        return {node: _name(newest, node, int(n)) for _, attempt, node, n in names if int(attempt) == newest}

    def _signalled(self, number: int, _frame: object) -> None:
        self._told = f"{signal.Signals(number).name}: the job is to end soon"

    def _on_duty(self) -> bool:
        """Returns whether this supervisor acts; the others wait until it is silent."""
        if time.monotonic() - self._heartbeat_at >= _HEARTBEAT_S:
            self._heartbeat_at = time.monotonic()
            before = self._duty.held
            with contextlib.suppress(OSError):
                self._duty.poll()
            if self._duty.held and not before and self._duty.number > 1:
                say(f"the supervisor is lost; the one on {self._slurm.here} takes over")
                self._loop.notes.note("takes over", node=self._slurm.here)
        return self._duty.held

    # --- actions ------------------------------------------------------------------------------------------------------

    def begin(self, attempt: int, nodes: Sequence[str], lost: Sequence[str]) -> tuple[Sequence[str], int, list[str]]:
        """See :class:`Port`."""
        self._note_job()
        self._asked_at = time.monotonic() - _ASK_SLURM_S + 1.0
        if attempt:
            well = [node for node in nodes if node not in lost and commands.node_up(node) is not False]
            nodes = well or nodes  # Slurm takes all nodes for lost: it may be wrong
        domains = self._domains(nodes[: len(nodes) - self._spares])
        return nodes, self._spares, ["--job-id", f"{self._launches}{attempt}.{os.getpid()}", *domains]

    def start(self, node: str, attempt: int, number: int, command: Sequence[str]) -> str:
        """See :class:`Port`."""
        name, (verb, *rest) = _name(attempt, node, number), command
        # A spare agent detects its address itself: the supervisor must not end when Slurm does not know it.
        address = ["--address", commands.numeric_address(node)] if verb == "launch" else []
        return self._start_step(node, name, [verb, *address, *rest])

    def cancel(self, steps: Sequence[str]) -> None:
        """See :class:`Port`."""
        for name in steps:
            if step := (self._listed or {}).get(name):
                commands.cancel(step)
                if name not in self._cancelled:
                    self._cancelled.add(name)
                    self._loop.notes.note("cancelled step", name=name, id=step)
        self._asked_at = -float("inf")

    def drain(self, node: str, why: str) -> None:
        """See :class:`Port`."""
        refused = commands.drain(node, why)
        say(f"{node} gets no further agent: {why}; " + (f"not drained: {refused}" if refused else "drained"))
        self._loop.notes.note("drained" if not refused else "not drained", node=node, reason=refused or why)

    def end(self, action: supervisor_policy.Requeue | supervisor_policy.Finish) -> int:
        """See :class:`Port`."""
        if isinstance(action, supervisor_policy.Requeue):
            return self._requeue(action.why)
        code, why = action.code, action.why
        say(f"{why} (exit code {code})")
        if not self._waits:
            self._loop.notes.note("ends", exit_code=code, reason=why)
        commands.comment(self._slurm.id, f"megatron_ft: {why} (exit code {code})")
        if self._waits:
            time.sleep(_SILENT_S)  # a living batch shell ends the job, and this process with it
            self._loop.notes.note("cancels the job", node=self._slurm.here, reason=why, exit_code=code)
            commands.cancel(self._slurm.id)
        return code

    def _note_job(self) -> None:
        job = self._slurm
        self._loop.notes.note("job", batch=job.here, nodes=list(job.nodes), restarts=job.restarts)

    @property
    def _launches(self) -> str:
        """Returns the prefix of the names of all launches of this job."""
        return f"{self._slurm.id}.{self._slurm.restarts}."

    def _domains(self, nodes: Sequence[str]) -> list[str]:
        """Returns the option with the switch of each group, if Slurm has several switches."""
        run, switch = self._run, commands.switches(nodes)
        home: dict[int, str] = {}
        for rank, node in enumerate(nodes if switch else ()):
            for group, _ in ranks_of(rank, len(nodes), run.groups, run.ranks_per_group):
                home.setdefault(group, switch[node])
        return ["--failure-domains", ",".join(home[group] for group in sorted(home))] if home else []

    def _start_step(self, node: str, name: str, command: Sequence[str]) -> str:
        """Starts a step on a node. Returns its name, or "" when srun cannot be run."""
        log = self._run_dir.parent / f"{self._run_dir.name}.agents.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            srun = commands.start_step(
                self._slurm, node, name, [sys.executable, "-m", "megatron_ft.cli", *command], log, self._srun
            )
        except OSError as error:
            say(f"no agent on {node}: {error}")
            return ""
        self._steps[name] = _Step(srun)
        return name

    def _adopt(self, running: Mapping[str, str]) -> None:
        """Takes over the steps that another supervisor has started."""
        attempt = max(int(name.split("/")[1]) for name in running.values())
        # Some of these ends may be excused: a node is not given up for ends that this supervisor has not seen.
        ends = {node: int(name.split("/")[3]) for node, name in running.items()}
        nodes = {}
        for node in self._nodes:
            number = ends.get(node, 0)
            failures = min(number, self._limits.per_node - 1)
            nodes[node] = supervisor_policy.Node(running.get(node, ""), failures, excused=number - failures)
        self._loop.job = supervisor_policy.Job(nodes, attempt)
        if not run_directory.launch_of(self._run_dir).startswith(self._launches):
            self._loop.notes.begin()
            self._note_job()

    def _requeue(self, why: str) -> int:
        if commands.ending(self._slurm.id):  # a cancelled job must not come back
            say(f"{why}: the job is cancelled, and not requeued; submit it again to go on")
            self._loop.notes.note("not requeued", reason="the job is cancelled")
            return RunStopped.exit_code
        refused = commands.requeue(self._slurm.id)
        say(f"{why}: the job is " + (f"not requeued ({refused}); submit it again" if refused else "requeued"))
        self._loop.notes.note("requeued" if not refused else "not requeued", reason=refused or why)
        return REQUEUED

    def close(self) -> None:
        """See :class:`Port`."""
        for step in self._steps.values():
            if step.srun.poll() is None:
                step.srun.kill()
            # no limit: the process was killed before; it ends, unless it is inside the kernel (state D)
            step.srun.wait()


class _Duty:
    """Whose turn it is among the supervisors of job ``job``. A turn has a number, and a file of that number: who makes the
    file first has the turn, and writes it again and again. The next turn is taken when the file of the newest one stays
    the same.

    ``waits``: a second supervisor, which never takes turn 1. The first one has that as long as no other is to be seen.
    """

    def __init__(self, run_dir: Path, job: str, waits: bool) -> None:
        self._directory = run_dir / DIRECTORY / job
        self.number, self.held = 0, not waits
        self._said, self._same, self._heartbeats = "", 0, 0

    def poll(self) -> None:
        """Looks at the newest file, and writes one in this supervisor's turn. Raises ``OSError``."""
        first = self.held and self.number == 0
        if first:
            self._directory.parent.parent.mkdir(parents=True, exist_ok=True)
            for place in (self._directory.parent, self._directory):
                shared_file.make_directory(place)
        newest = max((int(name[:-5]) for name in os.listdir(self._directory) if name[0].isdigit()), default=0)
        if newest > self.number:
            self.number, self.held, self._said, self._same = newest, False, "", 0
        elif first or (self.number and not self.held and self._is_silent()):
            self.held = shared_file.create(self._file(self.number + 1), "")
            self.number += 1
        if self.held:
            self._heartbeats += 1
            said = {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": self._heartbeats}
            shared_file.write_json(self._file(self.number), said)

    def _is_silent(self) -> bool:
        """Returns whether the newest file has not changed at some looks. A look that hangs with the file system is one."""
        before, self._said = self._said, shared_file.read_record(self._file(self.number)).decode()
        self._same = self._same + 1 if self._said == before else 0
        return self._same >= _SILENT_LOOKS

    def _file(self, number: int) -> Path:
        return self._directory / f"{number}.json"


def _name(attempt: int, node: str, number: int) -> str:
    """Returns the name of a step, from which a second supervisor learns attempt, node and the steps that have ended
    there."""
    return f"mft/{attempt}/{node}/{number}"
