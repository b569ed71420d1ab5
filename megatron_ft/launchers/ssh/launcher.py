"""Starts an agent on each host of a hostfile, follows the run until its end, and ends the agents.

The launcher checks all hosts, then starts an agent on each that needs neither the connection nor the launcher
(:mod:`.remote`). From then on it reads files in the run directory: the agents' logs and states, and the run record,
which alone says how the run ends. ``core.lifecycle.supervisor_policy`` decides what to do, as in a Slurm job: an agent
that has ended on a healthy host is replaced by a spare agent, and a run that has lost all groups is started again.

Failures assumed: the launcher, its machine or any connection is lost at any moment; the run continues, but agents are
no longer replaced. Hosts are lost, and return with or without their agent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_ft.agent import job_restore, operator_requests
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle import supervisor_policy
from megatron_ft.errors import FTError, LaunchError
from megatron_ft.launchers import hostfile
from megatron_ft.launchers.hostfile import Host
from megatron_ft.launchers.ssh import connection, remote
from megatron_ft.runlog import history, run_directory
from megatron_ft.types import given
from megatron_ft.utils import atomic_file, net
from megatron_ft.utils.console import say, show
from megatron_ft.utils.signal_wakeup import stop_signals

AGENTS = "agents"
"""Subdirectory of the run directory with the agents' logs and states."""
_POLL_S, _POLL_HOST_S = 0.2, 0.005
"""Poll interval, and its minimum per host, which limits the load on the shared file system."""
_PROBE_S = 10.0
"""A host that is not ready for a new agent is checked again after this time."""
_YOUNG_S = 90.0
"""An agent may have no state for this long after its start was requested."""
_SILENT_S = 12 * remote.BEAT_S
_GRACE_S = 12.0
"""Time for all agents to end after the run; ranks have 10 s."""
_END_S = 15.0
_FAILURES_PER_HOST = 3


@dataclass(frozen=True)
class Options:
    """A launch over ssh.

    Attributes:
        run: configuration of the run.
        hosts: hosts of the hostfile; the last ``spares`` are in reserve.
        spares: number of spare hosts.
        launch: arguments of ``megatron-ft launch`` that are equal on all hosts.
        directory: absolute working directory of the agents.
        run_dir: absolute run directory.
        files: script and config, relative to ``directory``.
        environment: variables for the agents.
        ssh: ssh command with options.
    """

    run: RunConfig
    hosts: Sequence[Host]
    spares: int
    launch: Sequence[str]
    directory: str
    run_dir: Path
    files: Sequence[str]
    environment: Mapping[str, str]
    ssh: str = "ssh"


@dataclass
class _Agent:
    """``state``: its state file. ``request``: the request to start it, until the host has answered."""

    state: Path
    since: float
    request: Future | None = None
    beat: int = -1
    beat_at: float = 0.0


def launch(options: Options, displayed: Callable[[], contextlib.AbstractContextManager]) -> int:
    """Returns the exit code of the run. ``displayed``: context that shows its progress."""
    job = SshLauncher(options)
    try:
        job.check()
        code = job.start()
        if code is None:
            with displayed():
                code = job.follow()
        return code
    finally:
        job.close()


class SshLauncher:
    """One run on many hosts. Call :meth:`check`, :meth:`start` and :meth:`follow` in this order."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ssh = connection.Connections(options.ssh, options.environment)
        self._hosts = {host.name: host for host in options.hosts}
        self._addresses: dict[str, str] = {}
        self._directory = options.run_dir / AGENTS
        self._name = f"ssh-{uuid.uuid4().hex[:8]}"
        whole = job_restore.whole_job(options.run.fault_tolerance)
        self._limits = supervisor_policy.Limits(
            per_node=_FAILURES_PER_HOST,
            grace_s=_GRACE_S,
            whole=whole,
            patience_s=options.run.fault_tolerance.store_patience_s,
        )
        self._job = supervisor_policy.Job({name: supervisor_policy.Node() for name in self._hosts})
        self._agents: dict[str, _Agent] = {}
        self._probes: dict[str, tuple[Future, float]] = {}
        self._ending: list[Future] = []
        self._signals: list[str] = []
        self._begun = self._ended = self._complained = False
        self._over: int | None = None
        self._closing = self._goes_on = False
        self._tail = history.Tail(options.run_dir)
        self._poll_s = max(_POLL_S, _POLL_HOST_S * len(self._hosts))
        self._logs = _Logs({name: self._log(name) for name in self._hosts})

    def close(self) -> None:
        """Ends the connections. Agents continue."""
        self._ssh.close()

    # --- before the start ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks all hosts in parallel. Raises ``LaunchError`` with all hosts that are not ready."""
        bad = self._not_ready(self._options.hosts)
        if bad:
            for path in (self._directory, self._options.run_dir):
                with contextlib.suppress(OSError):  # the directory is in use
                    path.rmdir()
            reasons = "\n".join(f"  {name} {reason}" for name, reason in bad.items())
            raise LaunchError(
                f"{len(bad)} of {len(self._hosts)} hosts are not ready, and no agent is started:\n{reasons}"
            )

    def _not_ready(self, hosts: Sequence[Host]) -> dict[str, str]:
        """Returns name -> reason for the hosts that are not ready; stores the addresses of the others."""
        with self._token() as token:
            answers = self._ssh.ask_all({host: self._check_request(host, token) for host in hosts})
        bad = {}
        for host, answer in answers.items():
            reason = answer.reason if answer.content is None else answer.content["lacks"]
            if reason:
                bad[host.name] = reason
            else:
                self._addresses[host.name] = given(answer.content)["address"]
        return bad

    @contextlib.contextmanager
    def _token(self) -> Iterator[Path]:
        """Creates a file by which hosts recognise the run directory. Raises ``LaunchError``."""
        token = self._directory / f"seen.{uuid.uuid4().hex}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            raise LaunchError(
                f"--run-dir {self._options.run_dir} is not writable: {error}; choose another one"
            ) from None
        try:
            yield token
        finally:
            token.unlink(missing_ok=True)

    def _check_request(self, host: Host, token: Path) -> str:
        return remote.request(
            "check",
            directory=self._options.directory,
            files=list(self._options.files),
            run_dir=str(self._options.run_dir),
            token=str(token),
            name=host.name,
            seen=net.of(host.name),
            address=host.address,
            wanted=remote.versions(),
        )

    def start(self) -> int | None:
        """Starts all agents. Returns None when the run has begun, else the exit code of the failed start."""
        for number in stop_signals():
            signal.signal(number, self._signalled)
        self._tail.new()  # skips the record of an earlier run
        self._start_all(0, list(self._hosts))
        while True:
            self._read_record()
            if self._begun:
                return None
            self._logs.show()
            ended = {name: code for name in self._hosts if (code := self._exit_code(name)) is not None}
            if ended or self._signals:
                reasons = [f"the agent on {name} has ended with exit code {code}" for name, code in ended.items()]
                say(f"the run has not begun: {(reasons or self._signals)[0]}; all agents are ended")
                self._end_agents(wait=True)
                self._logs.show(last=True)
                return max(ended.values(), default=0) or 130
            time.sleep(self._poll_s)

    def _exit_code(self, name: str) -> int | None:
        """Returns the exit code of the host's agent; 1 when the start failed, None while it runs."""
        step = self._job.nodes[name].step
        agent = self._agents[step]
        if agent.request is not None and agent.request.done() and agent.request.result().content is None:
            say(f"{name} {agent.request.result().reason}")
            return 1
        return self._code(step)

    # --- the run ------------------------------------------------------------------------------------------------------

    def follow(self) -> int:
        """Returns the exit code of the run, when it is over."""
        while True:
            self._logs.show()
            if len(self._signals) > 1 and not self._ended:
                say("second signal: all agents are ended")
                self._end_agents()
            running = frozenset(name for name, agent in self._agents.items() if self._runs(agent))
            self._read_record()  # later: an agent that has ended by then has written its last line
            code = self._act(running)
            if code is not None:
                self._logs.show(last=True)
                return code
            time.sleep(self._poll_s)

    def _act(self, running: frozenset[str]) -> int | None:
        due = [name for name, node in self._job.nodes.items() if node.due is not None and time.monotonic() >= node.due]
        seen = supervisor_policy.Seen(
            now=time.monotonic(),
            steps=running,
            up={name: self._ready(name) for name in due},
            over=self._over,
            told=self._signals[0] if self._signals else "",
            closing=self._closing,
            ended={node.step: self._code(node.step) for node in self._job.nodes.values() if node.step not in running},
            goes_on=self._goes_on,
        )
        self._closing = self._goes_on = False
        self._job, actions = supervisor_policy.observe(self._job, seen, self._limits)
        for action in actions:
            code = self._do(action)
            if code is not None:
                return code
        return None

    def _read_record(self) -> None:
        for line in self._tail.new():
            self._begun |= line["event"] == "start"
            self._over = run_directory.outcome(line, self._over)
            self._closing |= line["event"] == run_directory.CLOSING
            self._goes_on |= line["event"] in run_directory.PROGRESS

    def _code(self, step: str) -> int | None:
        """Returns the exit code that the host has written for an agent; None if it has not."""
        state = atomic_file.read_json(self._agents[step].state) if step in self._agents else None
        return None if state is None else state["code"]

    def _runs(self, agent: _Agent) -> bool:
        now = time.monotonic()
        if agent.request is not None and agent.request.done():
            answer = agent.request.result().content
            if answer is None:
                return False
            agent.state, agent.request = Path(answer["state"]), None
        state = atomic_file.read_json(agent.state)
        if state is None:
            return now - agent.since < _YOUNG_S
        if state["beat"] != agent.beat:
            agent.beat, agent.beat_at = state["beat"], now
        return state["code"] is None and now - agent.beat_at < _SILENT_S

    def _ready(self, name: str) -> bool | None:
        """Returns True when the host can take a new agent; checks it in the background."""
        probe, since = self._probes.get(name, (None, 0.0))
        if probe is not None and not probe.done():
            return None
        if probe is not None and probe.exception() is None and not probe.result():
            del self._probes[name]
            return True
        if probe is None or time.monotonic() - since > _PROBE_S:
            host = self._hosts[name]
            self._probes[name] = self._ssh.submit(lambda: self._not_ready([host])), time.monotonic()
        return None

    def _signalled(self, number: int, _frame: object) -> None:
        if number != signal.SIGHUP or not self._signals:  # a closed terminal can send SIGHUP several times
            self._signals.append(f"stopped by {signal.Signals(number).name}")

    # --- actions ------------------------------------------------------------------------------------------------------

    def _do(self, action: supervisor_policy.Action) -> int | None:
        match action:
            case supervisor_policy.StartSpare(node=name, number=number):
                node = self._job.nodes[name]
                how = f"failure {node.failures}" if node.gave_up is None else "it found no control store or no group"
                say(f"the agent on {name} has ended ({how}); a spare agent is started there")
                own = ["join", str(self._options.run_dir), "--spare", "--address", self._addresses[name]]
                self._job = supervisor_policy.started(self._job, name, self._start_on(name, number, own))
                self._note("spare agent", host=name, failures=node.failures)
            case supervisor_policy.Drain(node=name, why=why):
                say(f"{name} gets no further agent: {why}")
                self._note("given up", host=name, reason=why)
            case supervisor_policy.StopRun(why=why):
                self._stop_run(why)
            case supervisor_policy.CancelSteps():
                self._end_agents()
            case supervisor_policy.StartAll(attempt=attempt):
                say(f"no group is left: the whole job is started again (restart {attempt})")
                names = [name for name, node in self._job.nodes.items() if node.failures < self._limits.per_node]
                bad = self._not_ready([self._hosts[name] for name in names])
                for name, reason in bad.items():
                    say(f"{name} {reason}")
                self._start_all(attempt, [name for name in names if name not in bad])
            case supervisor_policy.Requeue(why=why):
                code = 130 if self._over is None else self._over  # the host that writes the record may have ended first
                say(f"{why} (exit code {code})")
                return code
            case supervisor_policy.Finish(code=code, why=why):
                say(f"{why} (exit code {code})")
                return code
        return None

    def _start_all(self, attempt: int, names: Sequence[str]) -> None:
        """Starts an agent on each host. Lost hosts reduce the number of spare hosts first."""
        self._over, self._ended = None, False
        spares = max(0, len(names) - (len(self._hosts) - self._options.spares))
        common = ["--hosts", str(len(names)), "--spare-hosts", str(spares), "--job-id", f"{self._name}.{attempt}"]
        steps = {}
        for rank, name in enumerate(names):
            where = [*common, "--host-rank", str(rank), "--address", self._addresses[name]]
            steps[name] = self._start_on(name, 0, ["launch", *where, *self._options.launch], attempt)
        self._job = supervisor_policy.begun(self._job, steps)
        if names:
            say(f"{len(names)} hosts, {spares} of them in reserve; {names[0]} is host 0")

    def _start_on(self, name: str, number: int, arguments: Sequence[str], attempt: int | None = None) -> str:
        """Requests an agent on a host. Returns the name of the agent."""
        rank = list(self._hosts).index(name)
        step = f"{self._name}.{self._job.attempt if attempt is None else attempt}.{rank}.{number}"
        state = self._directory / f"{step}.json"
        before = [str(other.state) for key, other in self._agents.items() if key.split(".")[2] == str(rank)]
        request = remote.request(
            "start",
            directory=self._options.directory,
            command=[sys.executable, "-m", "megatron_ft.cli", *arguments],
            environment=dict(self._options.environment),
            log=str(self._log(name)),
            state=str(state),
            before=before,
        )
        host = self._hosts[name]
        self._agents[step] = _Agent(state, time.monotonic(), self._ssh.submit(lambda: self._ssh.ask(host, request)))
        return step

    def _end_agents(self, wait: bool = False) -> None:
        """Ends all agents that may run, with SIGTERM and later SIGKILL. Only the first call has an effect."""
        if self._ended:
            return
        self._ended = True
        for name, node in self._job.nodes.items():
            if node.step in self._agents:
                host, agent = self._hosts[name], self._agents[node.step]
                self._ending.append(self._ssh.submit(partial(self._end, host, agent)))
        for end in self._ending if wait else ():
            end.result()

    def _end(self, host: Host, agent: _Agent) -> None:
        if agent.request is not None:
            agent.request.result()  # the agent must not start after this request has ended it
        self._ssh.ask(host, remote.request("end", state=str(agent.state), patience_s=_END_S))

    def _stop_run(self, why: str) -> None:
        say(f"{why}: the run is told to save and to stop; a second signal ends all agents")
        try:
            operator_requests.stop(self._options.run_dir, why)
        except FTError as error:
            say(f"the run cannot be told to stop ({error}); all agents are ended")
            self._end_agents()

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _note(self, what: str, **fields: object) -> None:
        try:
            history.append(self._options.run_dir, "ssh", what=what, **fields)
        except OSError as error:
            if not self._complained:
                say(f"run record not written: {error}")
            self._complained = True


class _Logs:
    """Prints new lines of the agents' logs, with the name of the host before each."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._at = {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}
        self._rest = dict.fromkeys(paths, b"")

    def show(self, last: bool = False) -> None:
        """Prints complete lines; with ``last`` also an incomplete one."""
        for name, path in self._paths.items():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._at[name])
                data = file.read()
                self._at[name] += len(data)
                *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
                for line in [*lines, *([self._rest[name]] if last and self._rest[name] else [])]:
                    show(f"{name}: {line.decode(errors='replace')}")


def options_of(options: argparse.Namespace, run: RunConfig) -> Options:
    """Returns the launch that the command's options describe. Raises ``LaunchError``."""
    if options.hostfile is None:
        raise LaunchError("--hostfile is missing; --ssh starts an agent on each of its hosts")
    given = {name: getattr(options, name) for name in ("hosts", "host_rank", "store", "job_id", "address")}
    if wrong := [name for name, value in given.items() if value is not None]:
        option = wrong[0].replace("_", "-")
        raise LaunchError(
            f"--{option} cannot be combined with --ssh; leave it out (the hostfile may have address=ADDR)"
        )
    hosts = hostfile.read(options.hostfile)
    hostfile.check(options.hostfile, hosts, run, options.spare_hosts)
    # $PWD: behind symbolic links the real path may be another one on other hosts.
    directory = os.environ.get("PWD", "")
    if not (os.path.isabs(directory) and os.path.isdir(directory) and os.path.samefile(directory, os.curdir)):
        directory = os.getcwd()
    return Options(
        run=run,
        hosts=hosts,
        spares=options.spare_hosts,
        launch=_common_arguments(options, run.fault_tolerance.store),
        directory=directory,
        run_dir=Path(os.path.normpath(os.path.join(directory, options.run_dir))),
        files=tuple(map(str, filter(None, (options.script, options.config)))),
        environment=connection.environment(os.environ, options.export),
        ssh=options.ssh_command,
    )


def _common_arguments(options: argparse.Namespace, store: str) -> list[str]:
    """Returns the arguments of ``launch`` that are equal on all hosts."""
    words = [f"--groups={options.groups}", f"--run-dir={options.run_dir}"]
    words += [f"--config={options.config}"] if options.config else []
    words += [f"--port={options.port}", f"--resume={options.resume}", f"--store={store}", f"--tee={options.tee}"]
    if options.ranks_per_group is not None:
        words.append(f"--ranks-per-group={options.ranks_per_group}")
    for name in ("failure_domains", "track", "preload"):
        if getattr(options, name):
            words.append(f"--{name.replace('_', '-')}={','.join(getattr(options, name))}")
    words += [
        f"--{name.replace('_', '-')}"
        for name in ("megatron", "overwrite", "private", "no_preload")
        if getattr(options, name)
    ]
    return [*words, "--", str(options.script), *options.arguments]
