"""``megatron-ft supervise``: an agent on each node of a Slurm job, in a step of its own (``core.supervision`` decides).

The batch shell's node comes last: the control store is on another one, and if nodes are spare it is one of those.
So the run goes on when the batch node dies, and with it the first supervisor: a second one waits in a step on another node
until the first, who says on the control store that it lives, has been silent for a while. It finds out what runs from Slurm
and the run record.

Failures it assumes: slurmctld is away for minutes; the supervisor is killed (the batch script starts it again), stopped or
cut off for a while (another one has taken over then, and this one only waits for the end); the store is away (nobody takes
over meanwhile).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.config import OWN_ETCD, FaultToleranceConfig, RunConfig
from megatron_ft.core import quorum, supervision
from megatron_ft.errors import FTError, LaunchError, RunStopped, StoreError
from megatron_ft.launch import ask, etcd_binary, join, record, resume, slurm
from megatron_ft.launch.console import say
from megatron_ft.launch.hosts import ranks_of
from megatron_ft.launch.slurm_notes import Notes
from megatron_ft.runtime import history
from megatron_ft.runtime.store import ControlStore

REQUEUED = 75
"""What the supervisor ends with when the job is to go on later (EX_TEMPFAIL)."""
_LOOK_S = 0.5
_ASK_SLURM_S = 10.0
"""Slurm is asked that often while nothing has happened."""
_YOUNG_S = 60.0
"""A step that has just been asked for may not be listed yet."""
_LEASE_S, _BEAT_S = 15.0, 3.0
_STORE_TIMEOUT_S = 5.0
_DUTY = "supervisor"


@dataclass(frozen=True)
class Options:
    """``launch``: arguments of ``megatron-ft launch``, with ``run``, ``run_dir`` and ``spares`` of them; ``waits``: as a
    second supervisor, until the first is lost."""

    launch: Sequence[str]
    run: RunConfig
    run_dir: Path
    spares: int
    limits: supervision.Limits
    waits: bool = False


@dataclass
class _Step:
    """One that this supervisor has asked for, until its srun ends."""

    srun: subprocess.Popen
    since: float = field(default_factory=time.monotonic)


class Supervisor:
    """One of a job's. Raises ``LaunchError`` outside of a Slurm job, or with fewer nodes than asked for."""

    def __init__(self, options: Options, environ: Mapping[str, str] = os.environ) -> None:
        self._options = options
        self._slurm = slurm.job(environ)
        here, nodes = self._slurm.here, self._slurm.nodes
        self._nodes = [*(node for node in nodes if node != here), here]
        if options.spares >= len(self._nodes):
            raise LaunchError(
                f"--spare-hosts is {options.spares} and the job has {len(self._nodes)} nodes; at least one must not be spare"
            )
        if options.run.fault_tolerance.store == OWN_ETCD:
            etcd_binary.check(len(self._nodes) - options.spares, None)
        self._job = supervision.Job({node: supervision.Node() for node in self._nodes})
        self._steps: dict[str, _Step] = {}
        self._listed: Mapping[str, str] | None = {}
        self._untold = ""
        self._ends_at: float | None = None
        self._asked_at = self._beat_at = -float("inf")
        self._second, self._seconds = "", 0
        self._told = ""
        self._over: int | None = None
        self._over_since: float | None = None
        self._tail = history.Tail(options.run_dir)
        self._lease: _Lease | None = None
        self._notes = Notes(options.run_dir, self._slurm, say)

    def run(self) -> int:
        """Until the job is over; returns its exit code."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._signalled)
        before = history.read(self._options.run_dir)
        for line in before:
            self._notes.hear(line)
        self._ask_slurm()
        if any(line["event"] == "end" for line in before):
            say("the run has got to its end already")
            return 0
        running = self._found()
        if running:
            self._adopt(running)
        elif self._options.waits:
            return 0  # nothing is left to be looked after
        else:
            self._start_all(0)
        while True:
            code = self._look()
            if code is not None:
                self._end_steps()
                if self._acts:
                    self._notes.last()
                return code
            time.sleep(_LOOK_S)

    # --- looking ------------------------------------------------------------------------------------------------------

    def _look(self) -> int | None:
        self._read_record()
        ended = [name for name, step in self._steps.items() if step.srun.poll() is not None]
        if ended:  # each is asked about once, when Slurm lists it no more: it may also be the srun only that has ended
            self._asked_at = min(self._asked_at, time.monotonic() - _ASK_SLURM_S + 1.0)
        for name in ended:
            self._notes.srun_ended(name, self._steps.pop(name).srun.returncode)
        if time.monotonic() - self._asked_at >= _ASK_SLURM_S:
            self._ask_slurm()
        if not self._on_duty() and not self._left_alone():
            return self._over if self._over is not None and not self._found() else None
        left_s = None if self._ends_at is None else self._ends_at - time.time()
        due = [name for name, node in self._job.nodes.items() if node.due is not None]
        seen = supervision.Seen(
            now=time.monotonic(),
            steps=self._running(),
            up={node: slurm.node_up(node) for node in due},
            over=self._over,
            left_s=left_s,
            told=self._told,
        )
        self._job, actions = supervision.look(self._job, seen, self._options.limits)
        for action in actions:
            code = self._do(action)
            if code is not None:
                return code
        if self._untold and self._over is None:  # it has not begun yet, or its store is away
            self._stop_run(self._untold)
        self._look_after_second()
        return None

    def _look_after_second(self) -> None:
        """Somebody on another node is ready to go on in this one's place, while the run goes on."""
        running = self._running()
        if self._lease is None or not self._lease.held or self._over is not None or running is None:
            return
        if self._second in running:
            return
        others = [node for node, its in self._job.nodes.items() if node != self._slurm.here and its.step in running]
        if others:
            own = ["--stop-before-s", str(self._options.limits.stop_before_s)]
            own += ["--failures-per-node", str(self._options.limits.per_node), "--second"]
            self._seconds += 1
            self._second = f"mft-second/{os.getpid()}/{self._seconds}"
            self._ask_for(others[-1], self._second, ["supervise", *own, "launch", *self._options.launch], role="second")

    def _read_record(self) -> None:
        for line in self._tail.new():
            self._notes.hear(line)
            if self._notes.begun:  # else it is of an earlier start, which agents put aside when they have come up
                self._over = record.outcome(line, self._over)

    def _ask_slurm(self) -> None:
        self._asked_at = time.monotonic()
        said = slurm.steps(self._slurm.id)
        self._listed = None if said is None else {step.name: step.id for step in said}
        if self._acts:
            self._notes.look(said, None if said is None else slurm.node_states(self._nodes))
        self._ends_at = slurm.ends_at(self._slurm.id) or self._ends_at

    def _running(self) -> frozenset[str] | None:
        if self._listed is None:
            return None
        now = time.monotonic()
        young = {name for name, s in self._steps.items() if s.srun.poll() is None and now - s.since < _YOUNG_S}
        return frozenset({*self._listed, *young})

    def _found(self) -> dict[str, str]:
        """Node -> name of our step there, of the newest attempt, as Slurm lists them."""
        names = [name.split("/") for name in self._listed or () if name.startswith("mft/")]
        newest = max((int(attempt) for _, attempt, _, _ in names), default=0)
        return {node: _name(newest, node, int(n)) for _, attempt, node, n in names if int(attempt) == newest}

    def _signalled(self, number: int, _frame: object) -> None:
        self._told = f"{signal.Signals(number).name}: the job is to end soon"

    @property
    def _acts(self) -> bool:
        """Whether it is on duty, as far as it knows."""
        return not self._options.waits if self._lease is None else self._lease.held

    # --- who does it --------------------------------------------------------------------------------------------------

    def _on_duty(self) -> bool:
        """Whether this is the supervisor that acts; the others wait for it to fall silent."""
        if time.monotonic() - self._beat_at < _BEAT_S:
            return self._lease is None or self._lease.held
        self._beat_at = time.monotonic()
        try:
            if self._lease is None:
                running = join.find(self._options.run_dir)
                store = ControlStore(running.store, running.run_id, _STORE_TIMEOUT_S)
                self._lease = _Lease(store, f"{socket.gethostname()} {os.getpid()}", self._options.waits)
            before = self._lease.held
            self._lease.look()
            if self._lease.held and not before and self._lease.number > 1:
                say(f"the supervisor is lost; this one, on {self._slurm.here}, goes on in its place")
                self._notes.note("takes over", node=self._slurm.here)
        except (LaunchError, StoreError):
            return self._acts
        return self._lease.held

    def _left_alone(self) -> bool:
        """Whether the run has been over for so long that a first supervisor would have ended the job, and this one with it.

        The store, which could tell, may have ended with the run.
        """
        if self._over is None:
            self._over_since = None
            return False
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since > self._options.limits.grace_s + _LEASE_S

    # --- doing --------------------------------------------------------------------------------------------------------

    def _do(self, action: supervision.Action) -> int | None:
        match action:
            case supervision.StartSpare(node=node, number=number):
                name = _name(self._job.attempt, node, number)
                asked = self._ask_for(node, name, ["join", str(self._options.run_dir), "--spare"], role="reserve")
                self._job = supervision.started(self._job, node, asked)
                self._notes.note("spare step", node=node, failures=number)
            case supervision.Drain(node=node, why=why):
                refused = slurm.drain(node, why)
                say(f"node {node} gets no further agent: {why}" + (f"; not drained: {refused}" if refused else "; drained"))
                self._notes.note("drained" if not refused else "not drained", node=node, reason=refused or why)
            case supervision.StopRun(why=why):
                self._stop_run(why)
            case supervision.CancelSteps(names=names):
                for name in names:
                    if (self._listed or {}).get(name):
                        slurm.cancel_step(self._listed[name])
                        self._notes.cancelled(name, self._listed[name])
                self._asked_at = -float("inf")
            case supervision.StartAll(attempt=attempt):
                say(f"no group is left: the whole job is started again, for the {attempt}. time")
                self._start_all(attempt)
            case supervision.Requeue(why=why):
                return self._requeue(why)
            case supervision.Finish(code=code, why=why):
                say(f"{why} (exit code {code})")
                if not self._options.waits:
                    self._notes.note("ends", exit_code=code, reason=why)
                slurm.comment(self._slurm.id, f"megatron_ft: {why} (exit code {code})")
                if self._options.waits:
                    time.sleep(_LEASE_S)  # if the batch shell lives it ends the job, and this process with it
                    self._notes.last()
                    self._notes.note("cancels the job", node=self._slurm.here, reason=why, exit_code=code)
                    slurm.cancel_job(self._slurm.id)
                return code
        return None

    def _start_all(self, attempt: int) -> None:
        """An agent on every node; the last of them in reserve."""
        self._over, self._lease = None, None
        self._notes.begin()
        self._notes.job()
        well = [node for node in self._nodes if self._job.nodes[node].failures < self._options.limits.per_node]
        nodes = [node for node in well if not attempt or slurm.node_up(node) is not False]
        job = f"{self._launches}{attempt}.{os.getpid()}"
        common = ["--hosts", str(len(nodes)), "--job-id", job, *self._domains(nodes[: len(nodes) - self._options.spares])]
        steps = {}
        for rank, node in enumerate(nodes):
            where = [*common, "--host-rank", str(rank), "--address", slurm.numeric_address(node)]
            role = {"role": "agent" if rank < len(nodes) - self._options.spares else "reserve", "host": rank}
            steps[node] = self._ask_for(node, _name(attempt, node, 0), ["launch", *where, *self._options.launch], **role)
        self._job = supervision.begun(self._job, steps)
        own = self._options.run.fault_tolerance.store == OWN_ETCD
        names = f"{' '.join(nodes[: quorum.SIZE])} have" if own else f"{nodes[0]} has"
        spare = f"{self._options.spares} of them in reserve"
        say(f"job {self._slurm.id}: {len(nodes)} nodes, {spare}; {names} the control store")
        self._asked_at = time.monotonic() - _ASK_SLURM_S + 1.0

    @property
    def _launches(self) -> str:
        """With what the names of all launches of this job begin."""
        return f"{self._slurm.id}.{self._slurm.restarts}."

    def _domains(self, nodes: Sequence[str]) -> list[str]:
        """The switch of each group, for the placement, where Slurm knows of several."""
        run, switch = self._options.run, slurm.switches(nodes)
        home: dict[int, str] = {}
        for rank, node in enumerate(nodes if switch else ()):
            for group, _ in ranks_of(rank, len(nodes), run.groups, run.ranks_per_group):
                home.setdefault(group, switch[node])
        return ["--failure-domains", ",".join(home[group] for group in sorted(home))] if home else []

    def _ask_for(self, node: str, name: str, command: Sequence[str], **role: object) -> str:
        """A step there; its name, or "" if there is no srun. ``role``: for the record."""
        log = self._options.run_dir.parent / f"{self._options.run_dir.name}.agents.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            srun = slurm.start_step(self._slurm, node, name, [sys.executable, "-m", "megatron_ft.cli", *command], log)
        except OSError as error:
            say(f"no agent on {node}: {error}")
            return ""
        self._steps[name] = _Step(srun)
        self._notes.asked(name, node=node, **role)
        return name

    def _adopt(self, running: Mapping[str, str]) -> None:
        """What another supervisor has started."""
        attempt = max(int(name.split("/")[1]) for name in running.values())
        failures = {node: int(name.split("/")[3]) for node, name in running.items()}
        nodes = {node: supervision.Node(running.get(node, ""), failures.get(node, 0)) for node in self._nodes}
        self._job = supervision.Job(nodes, attempt)
        if not record.launch_of(self._options.run_dir).startswith(self._launches):
            self._notes.begin()

    def _stop_run(self, why: str) -> None:
        again, self._untold = bool(self._untold), ""
        if not again:
            say(f"{why}; the run is told to save and to stop")
        try:
            ask.stop(self._options.run_dir, why)
        except FTError as error:
            self._untold = why
            if not again:
                say(f"the run cannot be told to stop yet: {error}")

    def _requeue(self, why: str) -> int:
        if slurm.ending(self._slurm.id):  # a requeued job would come back, although somebody has cancelled it
            say(f"{why}: the job is cancelled, and not requeued; submit it again to go on")
            self._notes.note("not requeued", reason="the job is cancelled")
            return RunStopped.exit_code
        refused = slurm.requeue(self._slurm.id)
        say(f"{why}: the job is " + (f"to be submitted again, it cannot be requeued: {refused}" if refused else "requeued"))
        self._notes.note("requeued" if not refused else "not requeued", reason=refused or why)
        return REQUEUED

    def _end_steps(self) -> None:
        for name, step in self._steps.items():
            if step.srun.poll() is None:
                step.srun.kill()
            self._notes.srun_ended(name, step.srun.wait())


class _Lease:
    """Who is on duty says so on the store; another one takes over, under the next number, when that has fallen silent."""

    def __init__(self, store: ControlStore, me: str, waits: bool) -> None:
        self._store, self._me, self._waits = store, me, waits
        self.number = 0
        self.held = False

    def look(self) -> None:
        while self._store.get(self._key(self.number + 1)) is not None:
            self.number, self.held = self.number + 1, False
        if self._store.get(self._key(self.number)) == self._me:
            self.held = True
        elif self.number == 0 and not self._waits or self.number and not self._store.beating(self._key(self.number)):
            self.number += 1
            self.held = self._store.create(self._key(self.number), self._me) == self._me
        if self.held:
            self._store.beat(self._key(self.number), _LEASE_S)

    @staticmethod
    def _key(number: int) -> str:
        return f"{_DUTY}/{number}"


def _name(attempt: int, node: str, number: int) -> str:
    """Of a step; what a second supervisor knows of it."""
    return f"mft/{attempt}/{node}/{number}"


def limits(settings: FaultToleranceConfig, per_node: int, stop_before_s: float) -> supervision.Limits:
    """From the options of a job."""
    return supervision.Limits(per_node=per_node, stop_before_s=stop_before_s, whole=resume.whole_job(settings))
