"""``megatron-ft launch --ssh``: one command, on any machine, starts an agent on each host of a hostfile and follows the run.

All hosts are asked first (``core.ready``), then each gets an agent that needs neither the connection nor this process
(``launch.far``). From then on this process only looks, at files in the run directory: the agents' logs and states, and the
record, which alone says how the run ends. An agent that has ended on a host that is well is started again there, as a spare
(``core.supervision``, as in Slurm).

Failures it assumes: this process, its host or any connection is lost at any moment: the run goes on, nobody starts agents
again then. Hosts are lost, and come back with the agent that they had, or without.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config import EMBEDDED, RunConfig
from megatron_ft.core import ready, supervision
from megatron_ft.errors import FTError, LaunchError
from megatron_ft.launch import addresses, ask, far, hostfile, record, resume, ssh
from megatron_ft.launch.console import say, show
from megatron_ft.launch.hostfile import Host
from megatron_ft.runtime import history

AGENTS = "agents"
"""Of the run directory: logs by host, states by start."""
_LOOK_S, _LOOK_AT_ONE_S = 0.2, 0.005
"""Between two looks, and for each host: a shared file system is not asked for thousands of files a second."""
_PROBE_S = 10.0
"""A host that does not answer is asked again after that time."""
_YOUNG_S = 90.0
"""An agent that has just been asked for may have no state yet."""
_SILENT_S = 12 * far.BEAT_S
_GRACE_S = 12.0
"""For all agents together, when the run is over; ranks have 10 s."""
_END_S = 15.0


@dataclass(frozen=True)
class Options:
    """``launch``: arguments of ``megatron-ft launch`` that are the same on all hosts, the last of them from the script on;
    ``spares`` of ``hosts`` are in reserve. ``run_dir`` is absolute, as all hosts see it, and so is ``directory``."""

    run: RunConfig
    hosts: Sequence[Host]
    spares: int
    launch: Sequence[str]
    directory: str
    run_dir: Path
    script: Path
    config: Path
    environment: Mapping[str, str]
    ssh: str = "ssh"
    per_host: int = 3


@dataclass
class _Step:
    """One agent. ``state``: its file; ``asked``: the answer of its host, once there is one."""

    state: Path
    since: float
    asked: Future | None = None
    beat: int = -1
    beat_at: float = 0.0


def launch(options: Options, displayed: Callable[[], contextlib.AbstractContextManager]) -> int:
    """The exit code of the run. ``displayed``: while it goes on."""
    job = Everywhere(options)
    try:
        job.check()
        code = job.start()
        if code is None:
            with displayed():
                code = job.follow()
        return code
    finally:
        job.close()


class Everywhere:
    """One run on many hosts: :meth:`check`, :meth:`start`, :meth:`follow`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ssh = ssh.Connections(options.ssh, options.environment)
        self._hosts = {host.name: host for host in options.hosts}
        self._addresses: dict[str, str] = {}
        self._agents = options.run_dir / AGENTS
        self._name = f"ssh-{uuid.uuid4().hex[:8]}"
        whole = resume.whole_job(options.run.fault_tolerance)
        self._limits = supervision.Limits(per_node=options.per_host, grace_s=_GRACE_S, whole=whole)
        self._job = supervision.Job({name: supervision.Node() for name in self._hosts})
        self._steps: dict[str, _Step] = {}
        self._probes: dict[str, tuple[Future, float]] = {}
        self._ending: list[Future] = []
        self._told: list[str] = []
        self._begun = self._ended = self._complained = False
        self._over: int | None = None
        self._tail = history.Tail(options.run_dir)
        self._look_s = max(_LOOK_S, _LOOK_AT_ONE_S * len(self._hosts))
        self._logs = _Logs({name: self._log(name) for name in self._hosts})

    def close(self) -> None:
        """Nothing of it is on this machine any more; what was started elsewhere goes on."""
        self._ssh.close()

    # --- before the start ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Ask all hosts, at once, whether they are ready. Raises ``LaunchError`` naming all that are not."""
        bad = self._not_ready(self._options.hosts)
        if bad:
            for path in (self._agents, self._options.run_dir):
                with contextlib.suppress(OSError):  # it holds something else
                    path.rmdir()
            which = "\n".join(f"  {name} {why}" for name, why in bad.items())
            raise LaunchError(f"nothing is started, {len(bad)} of {len(self._hosts)} hosts are not ready:\n{which}")

    def _not_ready(self, hosts: Iterable[Host]) -> dict[str, str]:
        """Name -> why, of those that are not. What the others are reached by is known then."""
        with self._token() as token:
            answers = self._ssh.ask_all({host: self._look_at(host, token) for host in hosts})
        return {host.name: why for host, answer in answers.items() if (why := self._judged(host, answer))}

    def _is_ready(self, host: Host) -> bool:
        with self._token() as token:
            return not self._judged(host, self._ssh.ask(host, self._look_at(host, token)))

    @contextlib.contextmanager
    def _token(self) -> Iterator[Path]:
        """A file that whoever shares the run directory sees. Raises ``LaunchError``."""
        token = self._agents / f"seen.{uuid.uuid4().hex}"
        try:
            self._agents.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            raise LaunchError(f"--run-dir {self._options.run_dir} cannot be written: {error}; choose another one") from None
        try:
            yield token
        finally:
            token.unlink(missing_ok=True)

    def _look_at(self, host: Host, token: Path) -> str:
        files = [str(self._options.script), str(self._options.config)]
        where = {"name": host.name, "seen": addresses.of(host.name), "address": host.address}
        return far.request("look", directory=self._options.directory, files=files, token=str(token), **where)

    def _judged(self, host: Host, answer: ssh.Answer) -> str:
        if answer.said is None:
            return answer.why
        asked = self._options
        where = (asked.directory, str(asked.run_dir), str(asked.script), str(asked.config))
        why = ready.lacks(ready.Wanted(far.versions(), *where), answer.said, host.name)
        if not why:
            self._addresses[host.name] = answer.said["address"]
        return why

    def start(self) -> int | None:
        """Agents on all hosts; returns when the run has begun, else its exit code when it does not."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        self._tail.new()  # what an earlier run has left
        self._start_all(0, list(self._hosts))
        while True:
            self._read_record()
            if self._begun:
                return None
            self._logs.show()
            ended = {name: code for name in self._hosts if (code := self._code(name)) is not None}
            if ended or self._told:
                why = [f"the agent on {name} has ended with exit code {code}" for name, code in ended.items()]
                say(f"the run has not begun: {(why or self._told)[0]}; all agents are ended")
                self._end_agents(wait=True)
                self._logs.show(last=True)
                return max(ended.values(), default=0) or 130
            time.sleep(self._look_s)

    def _code(self, name: str) -> int | None:
        """With what the agent of that host has ended, or 1 if it could not even be started."""
        step = self._steps[self._job.nodes[name].step]
        if step.asked is not None and step.asked.done() and step.asked.result().said is None:
            say(f"{name} {step.asked.result().why}")
            return 1
        said = far.read(step.state)
        return None if said is None else said["code"]

    # --- the run ------------------------------------------------------------------------------------------------------

    def follow(self) -> int:
        """Until the run is over; its exit code."""
        while True:
            self._logs.show()
            if len(self._told) > 1 and not self._ended:
                say("told again: all agents are ended")
                self._end_agents()
            running = self._running()
            self._read_record()  # after that: whoever has ended by then has written its last line
            code = self._act(running)
            if code is not None:
                self._logs.show(last=True)
                return code
            time.sleep(self._look_s)

    def _act(self, running: frozenset[str]) -> int | None:
        due = [name for name, node in self._job.nodes.items() if node.due is not None and time.monotonic() >= node.due]
        seen = supervision.Seen(
            now=time.monotonic(),
            steps=running,
            up={name: self._up(name) for name in due},
            over=self._over,
            told=self._told[0] if self._told else "",
        )
        self._job, actions = supervision.look(self._job, seen, self._limits)
        for action in actions:
            code = self._do(action)
            if code is not None:
                return code
        return None

    def _read_record(self) -> None:
        for line in self._tail.new():
            self._begun |= line["event"] == "start"
            self._over = record.outcome(line, self._over)

    def _running(self) -> frozenset[str]:
        return frozenset(name for name, step in self._steps.items() if self._runs(step))

    def _runs(self, step: _Step) -> bool:
        now = time.monotonic()
        if step.asked is not None and step.asked.done():
            said = step.asked.result().said
            if said is None:
                return False
            step.state, step.asked = Path(said["runs"]), None
        said = far.read(step.state)
        if said is None:
            return now - step.since < _YOUNG_S
        if said["beat"] != step.beat:
            step.beat, step.beat_at = said["beat"], now
        return said["code"] is None and now - step.beat_at < _SILENT_S

    def _up(self, name: str) -> bool | None:
        """Whether a host is ready for an agent; asked in the background."""
        probe, since = self._probes.get(name, (None, 0.0))
        if probe is not None and not probe.done():
            return None
        if probe is not None and probe.exception() is None and probe.result():
            del self._probes[name]
            return True
        if probe is None or time.monotonic() - since > _PROBE_S:
            host = self._hosts[name]
            self._probes[name] = self._ssh.later(lambda: self._is_ready(host)), time.monotonic()
        return None

    def _signalled(self, number: int, _frame: object) -> None:
        self._told.append(f"stopped by {signal.Signals(number).name}")

    # --- doing --------------------------------------------------------------------------------------------------------

    def _do(self, action: supervision.Action) -> int | None:
        match action:
            case supervision.StartSpare(node=name, number=number):
                say(f"the agent on {name} has ended, for the {number}. time; {name} gets another one, as a spare")
                own = ["join", str(self._options.run_dir), "--spare", "--address", self._addresses[name]]
                self._job = supervision.started(self._job, name, self._start_on(name, number, own))
                self._note("spare agent", host=name, failures=number)
            case supervision.Drain(node=name, why=why):
                say(f"{name} gets no further agent: {why}")
                self._note("given up", host=name, reason=why)
            case supervision.StopRun(why=why):
                self._stop_run(why)
            case supervision.CancelSteps():
                self._end_agents()
            case supervision.StartAll(attempt=attempt):
                say(f"no group is left: the whole job is started again, for the {attempt}. time")
                well = [name for name, node in self._job.nodes.items() if node.failures < self._limits.per_node]
                bad = self._not_ready([self._hosts[name] for name in well])
                for name, why in bad.items():
                    say(f"{name} {why}")
                self._start_all(attempt, [name for name in well if name not in bad])
            case supervision.Requeue(why=why):
                code = 130 if self._over is None else self._over  # who writes it may have been ended first
                say(f"{why} (exit code {code})")
                return code
            case supervision.Finish(code=code, why=why):
                say(f"{why} (exit code {code})")
                return code
        return None

    def _start_all(self, attempt: int, names: Sequence[str]) -> None:
        """An agent on each of these; so many begin as at the first time, as far as there are any."""
        self._over, self._ended = None, False
        spares = max(0, len(names) - (len(self._hosts) - self._options.spares))
        common = ["--hosts", str(len(names)), "--spare-hosts", str(spares), "--job-id", f"{self._name}.{attempt}"]
        steps = {}
        for rank, name in enumerate(names):
            where = [*common, "--host-rank", str(rank), "--address", self._addresses[name]]
            steps[name] = self._start_on(name, 0, ["launch", *where, *self._options.launch], attempt)
        self._job = supervision.begun(self._job, steps)
        if names:
            say(f"{len(names)} hosts, {spares} of them in reserve; {names[0]} has the control store unless that is etcd")

    def _start_on(self, name: str, number: int, arguments: Sequence[str], attempt: int | None = None) -> str:
        """Ask a host for an agent; its name, by which it is known from now on."""
        rank = list(self._hosts).index(name)
        step = f"{self._name}.{self._job.attempt if attempt is None else attempt}.{rank}.{number}"
        state = self._agents / f"{step}.json"
        before = [str(other.state) for key, other in self._steps.items() if key.split(".")[2] == str(rank)]
        request = far.request(
            "start",
            directory=self._options.directory,
            command=[sys.executable, "-m", "megatron_ft.cli", *arguments],
            environment=dict(self._options.environment),
            log=str(self._log(name)),
            state=str(state),
            before=before,
        )
        host = self._hosts[name]
        self._steps[step] = _Step(state, time.monotonic(), self._ssh.later(lambda: self._ssh.ask(host, request)))
        return step

    def _end_agents(self, wait: bool = False) -> None:
        """All that may run, wherever: in order first, then at once. They are asked for it once."""
        if self._ended:
            return
        self._ended = True
        for name, node in self._job.nodes.items():
            if node.step in self._steps:
                host, step = self._hosts[name], self._steps[node.step]
                self._ending.append(self._ssh.later(lambda host=host, step=step: self._end(host, step)))
        for end in self._ending if wait else ():
            end.result()

    def _end(self, host: Host, step: _Step) -> None:
        if step.asked is not None:
            step.asked.result()  # it might come to live after it was ended
        self._ssh.ask(host, far.request("end", state=str(step.state), patience_s=_END_S))

    def _stop_run(self, why: str) -> None:
        say(f"{why}: the run is told to save and to stop; told again, all agents are ended")
        try:
            ask.stop(self._options.run_dir, why)
        except FTError as error:
            say(f"the run cannot be told to stop ({error}); all agents are ended")
            self._end_agents()

    def _log(self, name: str) -> Path:
        return self._agents / f"{name}.log"

    def _note(self, what: str, **fields: object) -> None:
        try:
            history.append(self._options.run_dir, "ssh", what=what, **fields)
        except OSError as error:
            if not self._complained:
                say(f"run record not written: {error}")
            self._complained = True


class _Logs:
    """What agents say from now on, with the host's name before each line."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._at = {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}
        self._rest = dict.fromkeys(paths, b"")

    def show(self, last: bool = False) -> None:
        """Whole lines; the ``last`` time also one that has no end."""
        for name, path in self._paths.items():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._at[name])
                data = file.read()
                self._at[name] += len(data)
                *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
                for line in [*lines, *([self._rest[name]] if last and self._rest[name] else [])]:
                    show(f"{name}: {line.decode(errors='replace')}")


def _here() -> str:
    """The working directory by the name that the user knows it by: behind links it may be another one on other hosts."""
    said = os.environ.get("PWD", "")
    return said if os.path.isabs(said) and os.path.isdir(said) and os.path.samefile(said, os.curdir) else os.getcwd()


def asked(options: argparse.Namespace, run: RunConfig) -> Options:
    """What ``launch --ssh`` starts where. Raises ``LaunchError``."""
    if options.hostfile is None:
        raise LaunchError("--hostfile is missing; --ssh starts an agent on each host of it")
    given = {name: getattr(options, name) for name in ("hosts", "host_rank", "store", "job_id", "address")}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise LaunchError(f"--{wrong[0].replace('_', '-')} is found with --ssh; leave it out (address=ADDR in the hostfile)")
    found = hostfile.read(options.hostfile)
    hostfile.check(options.hostfile, found, run, options.spare_hosts)
    directory = _here()
    return Options(
        run=run,
        hosts=found,
        spares=options.spare_hosts,
        launch=_same_for_all(options, run.fault_tolerance.store),
        directory=directory,
        run_dir=Path(os.path.normpath(os.path.join(directory, options.run_dir))),
        script=options.script,
        config=options.config,
        environment=ssh.environment(os.environ, options.export),
        ssh=options.ssh_command,
    )


def _same_for_all(options: argparse.Namespace, store: str) -> list[str]:
    """Those of the options of ``launch`` that are for every host alike, as words."""
    said = [f"--groups={options.groups}", f"--config={options.config}", f"--run-dir={options.run_dir}"]
    said += [f"--port={options.port}", f"--resume={options.resume}"]
    if store != EMBEDDED:
        said.append(f"--store={store}")
    if options.ranks_per_group is not None:
        said.append(f"--ranks-per-group={options.ranks_per_group}")
    for name in ("failure_domains", "track", "preload"):
        if getattr(options, name):
            said.append(f"--{name.replace('_', '-')}={','.join(getattr(options, name))}")
    said += [f"--{name.replace('_', '-')}" for name in ("overwrite", "no_preload") if getattr(options, name)]
    return [*said, "--", str(options.script), *options.arguments]
