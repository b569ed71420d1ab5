"""``megatron-ft supervise --array``: one element of a Slurm array job, which has one node.

The element starts the node's agent as its child, for the run that the elements begin together or as a spare of it, and
starts it again when it ends before the run. Elements exchange their state through the run directory
(:mod:`.array_board`), and ``core.lifecycle.array_policy`` decides. Slurm is only asked to requeue this element.

Failures assumed: any element, its node or its agent is killed, frozen or requeued at any moment; the run directory does
not respond for a while. The agent ends with its element, which the batch script starts again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ft.cluster.launchers.slurm import commands
from megatron_ft.cluster.launchers.slurm.array_board import ArrayState
from megatron_ft.cluster.launchers.slurm.supervisor import REQUEUED
from megatron_ft.config.schema import FaultToleranceConfig
from megatron_ft.core.lifecycle import array_policy, restart_policy
from megatron_ft.core.lifecycle.supervisor_policy import Finish
from megatron_ft.errors import FTError, LaunchError
from megatron_ft.host import job_restore, join, operator_requests, run_lock
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.types import given
from megatron_ft.utils import lifeline
from megatron_ft.utils.console import say
from megatron_ft.utils.signal_wakeup import stop_signals

DIRECTORY = "array"
"""Subdirectory of the run directory with the state of each array."""
_LOOK_S = 0.25
_HEARTBEAT_S = 2.0
_ALL_S = 10.0
"""Interval at which the deciding element reads all heartbeats while the run continues."""
_GRACE_S = 15.0


@dataclass(frozen=True)
class Place:
    """The place of this element in its array."""

    array: str
    element: int
    first: int
    last: int
    count: int
    restarts: int
    node: str


def place(environ: Mapping[str, str]) -> Place:
    """Reads the environment. Raises ``LaunchError`` outside of an array job, or in an element of several nodes."""
    if "SLURM_ARRAY_JOB_ID" not in environ:
        raise LaunchError(
            "this is not an element of a Slurm array job; submit slurm/array.sbatch, or leave --array out"
        )
    if environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        raise LaunchError(
            f"this element has {environ['SLURM_JOB_NUM_NODES']} nodes and must have one; give sbatch --nodes=1"
        )
    numbers = {name: int(environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "MAX", "COUNT")}
    return Place(
        array=environ["SLURM_ARRAY_JOB_ID"],
        element=numbers["ID"],
        first=numbers["MIN"],
        last=numbers["MAX"],
        count=numbers["COUNT"],
        restarts=int(environ.get("SLURM_RESTART_COUNT", 0)),
        node=environ.get("SLURMD_NODENAME", ""),
    )


class ArrayTask:
    """One element. ``launch``: arguments of ``megatron-ft launch``, without those for hosts; ``spares``: number of hosts."""

    def __init__(
        self, launch: Sequence[str], run_dir: Path, spares: int, limits: array_policy.Limits, where: Place
    ) -> None:
        self._launch, self._run_dir, self._spares, self._limits, self._where = launch, run_dir, spares, limits, where
        self._board = ArrayState(run_dir / DIRECTORY / where.array)
        self._all = range(where.first, where.last + 1)
        before = self._board.last(where.element)
        self._own = array_policy.Own(
            array_policy.Heartbeat(where.element, where.restarts, -1 if before is None else before.run)
        )
        self._agent: subprocess.Popen | None = None
        self._entered, self._killed = -1, False
        self._quick, self._since = 0, 0.0
        self._looked_at = self._all_at = -float("inf")
        self._heard: tuple[Mapping[int, array_policy.Heartbeat], Mapping[int, array_policy.Heartbeat]] = ({}, {})
        self._tail, self._closing = history.Tail(run_dir), False
        self._said: int | None = None
        self._over_since: float | None = None
        self._asked, self._ending = False, 0
        self._complained = ""

    def run(self) -> int:
        """Returns the exit code when the run is over, or when this element was requeued."""
        run_lock.check_free(self._run_dir, f"{self._where.array}.")
        for number in stop_signals():
            if number != signal.SIGINT:
                signal.signal(number, self._told if number in lifeline.SAVE_SIGNALS else self._terminated)
        known = f"the run has {self._limits.hosts} working elements and {self._spares} in reserve"
        say(f"element {self._where.element} of array {self._where.array}, restart {self._where.restarts}; {known}")
        # no limit: the command itself, until what it watches is over; a signal ends it
        while True:
            try:
                code = self._poll()
                self._complained = ""
            except OSError as error:
                code = None
                if str(error) != self._complained:
                    say(f"{self._run_dir} cannot be used, the agent continues: {error}")
                self._complained = str(error)
            if code is not None:
                return code
            time.sleep(_LOOK_S)

    def _poll(self) -> int | None:
        self._see_entry()
        if self._agent is not None and self._agent.poll() is not None:
            self._buried(self._agent.returncode)
        if self._ending:  # Slurm sends SIGTERM to the agent, too; SIGHUP is passed on
            if self._agent is not None:
                return None
            self._board.heartbeat(self._own.heartbeat)
            return 128 + self._ending
        if time.monotonic() - self._looked_at < _HEARTBEAT_S:
            return None
        self._looked_at = time.monotonic()
        self._board.heartbeat(self._own.heartbeat)
        self._decide()
        return self._act()

    # --- for all elements ---------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        made, now = self._board.read(), time.monotonic()
        leads = self._board.first(element for element in self._all if element < self._where.element) is None
        idle = self._agent is None or self._own.heartbeat.asks
        if (idle or leads) and now - self._all_at >= (_HEARTBEAT_S if idle and leads else _ALL_S):
            self._all_at, self._heard = now, self._board.read_heartbeats(self._all)
        if leads:
            self._pass_on(made)
        outcome = self._outcome(made) if idle else None
        if idle and (leads or outcome == 0):
            heartbeats, unsure = self._heard
            seen = array_policy.Seen(now=time.time(), heartbeats=heartbeats, unsure=unsure, outcome=outcome)
            decision = array_policy.decide(made, seen, self._limits)
            if decision is not None:
                self._board.write(decision)
                self._board.read()

    def _read_record(self) -> None:
        for line in self._tail.new():
            self._said = run_state.outcome(line, self._said)
            self._closing |= line["event"] == run_directory.CLOSING

    def _outcome(self, made: Sequence[array_policy.Decision]) -> int | None:
        """Returns the exit code in the record of the newest run."""
        self._read_record()
        if not made:
            return self._said
        try:
            job = join.find(self._run_dir).job
        except LaunchError:
            return None
        return self._said if job == self._job(len(made) - 1) else None

    def _pass_on(self, made: Sequence[array_policy.Decision]) -> None:
        """Stops the run when an element has to release its node."""
        heartbeats = {**self._heard[0], **self._heard[1], self._where.element: self._own.heartbeat}
        told = next((heartbeat.told for heartbeat in heartbeats.values() if heartbeat.told), "")
        newest = made[-1] if made else None
        if not told or self._asked or not isinstance(newest, array_policy.Begin):
            return
        if not array_policy.working(len(made) - 1, heartbeats):
            return
        try:
            operator_requests.stop(self._run_dir, told)
            self._asked = True
            say(f"{told}; the run is told to save and to stop")
        except FTError as error:
            say(f"the run cannot be told to stop yet: {error}")

    # --- on this node -------------------------------------------------------------------------------------------------

    def _act(self) -> int | None:
        made = self._board.decisions
        if self._agent is not None:
            if array_policy.overtaken(self._own.heartbeat, made):
                self._killed = True
                self._agent.kill()
            self._end_late(made)
            return None
        others = {**self._heard[0], **self._heard[1]}
        match array_policy.act(self._own, made, others, time.time(), self._limits):
            case array_policy.Launch(run=run, rank=rank):
                hosts = ["--hosts", str(self._limits.hosts + self._spares), "--host-rank", str(rank)]
                self._begin(run, ["launch", *hosts, "--job-id", self._job(run), *self._address(), *self._launch])
            case array_policy.Join(run=run):
                self._join(run)
            case array_policy.GiveBack(why=why, bad=bad):
                return self._give_back(why, bad)
            case Finish(code=code, why=why):
                say(f"{why} (exit code {code})")
                return code
        return None

    def _job(self, run: int) -> str:
        return f"{self._where.array}.{run}"

    def _address(self) -> list[str]:
        try:
            return ["--address", commands.numeric_address(self._where.node)] if self._where.node else []
        except LaunchError as error:
            say(f"the agent detects its address itself: {error}")
            return []

    def _join(self, run: int) -> None:
        self._entered, told = os.pipe()
        os.set_blocking(self._entered, False)
        command = ["join", str(self._run_dir), "--spare", "--entered-fd", str(told), *self._address()]
        try:
            self._begin(run, command, told)
        finally:
            os.close(told)

    def _see_entry(self) -> None:
        """Notes that the agent has been let into the run, which it says by a byte."""
        if self._entered < 0:
            return
        try:
            said = os.read(self._entered, 1)
        except BlockingIOError:
            return
        os.close(self._entered)
        self._entered = -1
        if said:
            self._own = replace(self._own, heartbeat=replace(self._own.heartbeat, asks=False))
            self._looked_at = -float("inf")

    def _begin(self, run: int, command: Sequence[str], told: int | None = None) -> None:
        """Starts the agent. ``told``: the file descriptor to which one that has to ask for entry reports it."""
        me = os.getpid()
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.cli", *command],
            stdin=subprocess.DEVNULL,
            pass_fds=() if told is None else (told,),
            preexec_fn=lambda: lifeline.end_with(me),
        )
        self._since, self._asked = time.monotonic(), False
        self._own = replace(
            self._own, heartbeat=replace(self._own.heartbeat, run=run, runs=True, asks=told is not None, code=None)
        )
        self._board.heartbeat(self._own.heartbeat)

    def _buried(self, code: int) -> None:
        self._agent = None
        self._quick = 0 if time.monotonic() - self._since > restart_policy.LONGEST_S else self._quick + 1
        heartbeat = replace(self._own.heartbeat, runs=False, asks=False, code=None if self._killed else code)
        self._killed = False
        self._own = array_policy.ended(self._own, heartbeat, time.time(), self._quick)
        self._looked_at = -float("inf")

    def _end_late(self, made: Sequence[array_policy.Decision]) -> None:
        """Kills the agent when it does not end after the run."""
        if not made or not isinstance(made[-1], Finish):
            return
        self._read_record()
        if self._closing:
            self._over_since, self._closing = None, False
        self._over_since = self._over_since or time.monotonic()
        if time.monotonic() - self._over_since > _GRACE_S:
            given(self._agent).kill()

    def _give_back(self, why: str, bad: bool) -> int:
        if bad:
            refused = commands.drain(self._where.node, f"megatron_ft: {why}")
            say(f"node {self._where.node}: {why}; " + (f"not drained: {refused}" if refused else "drained"))
        # Not by the job's own number: one of the elements has the number of the whole array.
        refused = commands.requeue(f"{self._where.array}_{self._where.element}")
        told = f"not requeued ({refused}): submit it again" if refused else "requeued"
        say(f"{why}: element {self._where.element} is {told}")
        return REQUEUED

    def _told(self, number: int, _frame: object) -> None:
        told = f"{signal.Signals(number).name}: the job is to end soon"
        self._own = replace(self._own, heartbeat=replace(self._own.heartbeat, told=told))

    def _terminated(self, number: int, _frame: object) -> None:
        self._ending = number
        # A closed terminal signals its foreground processes only.
        if number == signal.SIGHUP and self._agent is not None:
            self._agent.send_signal(signal.SIGHUP)


def limits(settings: FaultToleranceConfig, where: Place, spares: int, per_node: int) -> array_policy.Limits:
    """Returns the limits of an array. Raises ``LaunchError`` when all elements would be spare."""
    if spares >= where.count:
        raise LaunchError(
            f"--spare-hosts is {spares} and the array has {where.count} elements; at least one must not be spare"
        )
    return array_policy.Limits(hosts=where.count - spares, per_node=per_node, whole=job_restore.whole_job(settings))
