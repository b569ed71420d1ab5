"""Starts an agent on each host of a hostfile, follows the run until its end, and ends the agents.

The launcher checks all hosts, then starts an agent on each that needs neither the connection nor the launcher
(:mod:`.remote`). From then on it reads files in the run directory: the agents' logs and states, and the run record,
which alone says how the run ends. The loop is that of a Slurm job (``supervisor_loop``): an agent that has ended on a
healthy host is replaced by a spare agent, and a run that has lost all groups is started again.

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
from typing import Any

from megatron_ft.cluster.launchers import hostfile, supervisor_loop
from megatron_ft.cluster.launchers.hostfile import Host
from megatron_ft.cluster.launchers.notes import Notes
from megatron_ft.cluster.launchers.ssh import connection, remote
from megatron_ft.cluster.launchers.supervisor_loop import Port, SupervisorLoop
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle import supervisor_policy
from megatron_ft.core.lifecycle.supervisor_policy import Seen
from megatron_ft.errors import LaunchError
from megatron_ft.types import given
from megatron_ft.utils import net, shared_file
from megatron_ft.utils.console import say, show
from megatron_ft.utils.new_lines import NewLines
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


@dataclass
class _Agent:
    """``state``: its state file. ``request``: the request to start it, until the host has answered."""

    state: Path
    since: float
    request: Future | None = None
    heartbeat: int = -1
    heartbeat_at: float = 0.0


def launch(
    options: argparse.Namespace, run: RunConfig, displayed: Callable[[], contextlib.AbstractContextManager]
) -> int:
    """Returns the exit code of the run. ``displayed``: context that shows its progress."""
    job = SshLauncher(options, run)
    try:
        job.check()
        code = job.begin_run()
        if code is None:
            with displayed():
                code = job.loop.follow()
        return code
    finally:
        job.disconnect()


class SshLauncher(Port):
    """One run on many hosts, as the options of ``launch`` and its configuration describe it. Call :meth:`check`,
    :meth:`begin_run` and ``loop.follow`` in this order. Raises ``LaunchError``.

    Large because it is all that the loop asks of a cluster, and each answer is made of the files of the hosts.
    """

    stop_hint, off_duty = "; a second signal ends all agents", False

    def __init__(self, options: argparse.Namespace, run: RunConfig) -> None:
        self._hosts = {host.name: host for host in _hosts(options, run)}
        self._spares = options.spare_hosts
        self._working_directory = _working_directory()
        self._files = [str(file) for file in (None if options.module else options.script, options.config) if file]
        self._run_dir = Path(os.path.normpath(os.path.join(self._working_directory, options.run_dir)))
        self._environment = connection.environment(os.environ, options.export)
        self._ssh = connection.Connections(options.ssh_command, self._environment)
        self._addresses: dict[str, str] = {}
        self._directory = self._run_dir / AGENTS
        self._name = f"ssh-{uuid.uuid4().hex[:8]}"
        settings = run.fault_tolerance
        limits = supervisor_loop.limits(settings, per_node=_FAILURES_PER_HOST, grace_s=_GRACE_S)
        launch, notes = _common_arguments(options, settings.store), Notes(self._run_dir, "ssh")
        self.loop = SupervisorLoop(self, list(self._hosts), self._run_dir, launch, limits, notes)
        self._newest: dict[str, str] = {}
        self._agents: dict[str, _Agent] = {}
        self._probes: dict[str, tuple[Future, float]] = {}
        self._signals: list[str] = []
        self._ended = False
        self.look_s = max(_POLL_S, _POLL_HOST_S * len(self._hosts))
        logs = {name: self._log(name) for name in self._hosts}
        self._logs = {name: NewLines(log, log.stat().st_size if log.exists() else 0) for name, log in logs.items()}

    def disconnect(self) -> None:
        """Ends the connections. Agents continue."""
        self._ssh.close()

    # --- before the start ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks all hosts in parallel. Raises ``LaunchError`` with all hosts that are not ready."""
        bad = self._not_ready(list(self._hosts.values()))
        if bad:
            for path in (self._directory, self._run_dir):
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
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            shared_file.make_directory(self._directory)
            shared_file.write(token, "")
        except OSError as error:
            raise LaunchError(f"--run-dir {self._run_dir} is not writable: {error}; choose another one") from None
        try:
            yield token
        finally:
            token.unlink(missing_ok=True)

    def _check_request(self, host: Host, token: Path) -> str:
        return remote.request(
            "check",
            directory=self._working_directory,
            files=self._files,
            run_dir=str(self._run_dir),
            token=str(token),
            name=host.name,
            seen=net.of(host.name),
            address=host.address,
            wanted=remote.versions(),
        )

    def begin_run(self) -> int | None:
        """Starts all agents. Returns None when the run has begun, else the exit code of the failed start."""
        for number in stop_signals():
            signal.signal(number, self._signalled)
        self.loop.start_all()
        # no limit: the run begins, or an agent ends after MEET_TIMEOUT_S
        while True:
            self.loop.read_record()
            if self.loop.notes.begun:
                return None
            self._show_logs()
            ended = {name: code for name in self._hosts if (code := self._exit_code(name)) is not None}
            if ended or self._signals:
                reasons = [f"the agent on {name} has ended with exit code {code}" for name, code in ended.items()]
                say(f"the run has not begun: {(reasons or self._signals)[0]}; all agents are ended")
                self._end_agents(wait=True)
                self._show_logs(last=True)
                return max(ended.values(), default=0) or 130
            time.sleep(self.look_s)

    def _exit_code(self, name: str) -> int | None:
        """Returns the exit code of the host's agent; 1 when the start failed, None while it runs."""
        step = self._newest[name]
        agent = self._agents[step]
        # no limit: it does not block: the request is done
        if agent.request is not None and agent.request.done() and agent.request.result().content is None:
            # no limit: it does not block: the request is done
            say(f"{name} {agent.request.result().reason}")
            return 1
        return self._code(step)

    # --- the run ------------------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        """See :class:`Port`."""
        self._show_logs()
        if len(self._signals) > 1 and not self._ended:
            say("second signal: all agents are ended")
            self._end_agents()
        running = frozenset(step for step, agent in self._agents.items() if self._runs(agent))
        ended = {step: self._code(step) for step in self._newest.values() if step not in running}
        return Seen(time.monotonic(), running, {}, ended=ended, told=self._signals[0] if self._signals else "")

    def close(self) -> None:
        """See :class:`Port`."""
        self._show_logs(last=True)

    def _code(self, step: str) -> int | None:
        """Returns the exit code that the host has written for an agent; None if it has not."""
        state = shared_file.read_json(self._agents[step].state) if step in self._agents else None
        return None if state is None else state["code"]

    def _runs(self, agent: _Agent) -> bool:
        now = time.monotonic()
        if agent.request is not None and agent.request.done():
            # no limit: it does not block: the request is done
            answer = agent.request.result().content
            if answer is None:
                return False
            agent.state, agent.request = Path(answer["state"]), None
        state = shared_file.read_json(agent.state)
        if state is None:
            return now - agent.since < _YOUNG_S
        if state["heartbeat"] != agent.heartbeat:
            agent.heartbeat, agent.heartbeat_at = state["heartbeat"], now
        return state["code"] is None and now - agent.heartbeat_at < _SILENT_S

    def ready(self, node: str) -> bool | None:
        """See :class:`Port`. The host is checked in the background."""
        probe, since = self._probes.get(node, (None, 0.0))
        if probe is not None and not probe.done():
            return None
        # no limit: it does not block: the request is done
        if probe is not None and probe.exception() is None and not probe.result():
            del self._probes[node]
            return True
        if probe is None or time.monotonic() - since > _PROBE_S:
            host = self._hosts[node]
            self._probes[node] = self._ssh.submit(lambda: self._not_ready([host])), time.monotonic()
        return None

    def _signalled(self, number: int, _frame: object) -> None:
        if number != signal.SIGHUP or not self._signals:  # a closed terminal can send SIGHUP several times
            self._signals.append(f"stopped by {signal.Signals(number).name}")

    # --- actions ------------------------------------------------------------------------------------------------------

    def begin(self, attempt: int, nodes: Sequence[str], lost: Sequence[str]) -> tuple[Sequence[str], int, list[str]]:
        """See :class:`Port`. Lost hosts reduce the number of spare hosts first."""
        self._ended = False
        bad = self._not_ready([self._hosts[node] for node in nodes]) if attempt else {}
        for name, reason in bad.items():
            say(f"{name} {reason}")
        nodes = [node for node in nodes if node not in bad]
        spares = max(0, len(nodes) - (len(self._hosts) - self._spares))
        return nodes, spares, ["--job-id", f"{self._name}.{attempt}"]

    def drain(self, node: str, why: str) -> None:
        """See :class:`Port`."""
        say(f"{node} gets no further agent: {why}")
        self.loop.notes.note("given up", node=node, reason=why)

    def end(self, action: supervisor_policy.Requeue | supervisor_policy.Finish) -> int:
        """See :class:`Port`. A run that was told to stop does not go on later: nothing would start it."""
        # The host that writes the record may have ended before it has written the run's end.
        given_up = 130 if self.loop.over is None else self.loop.over
        code = action.code if isinstance(action, supervisor_policy.Finish) else given_up
        say(f"{action.why} (exit code {code})")
        return code

    def on_start(self, line: Mapping[str, Any]) -> None:
        """See :class:`Port`. The agent of host 0 has said where the store is."""

    def cancel(self, steps: Sequence[str]) -> None:
        """See :class:`Port`."""
        self._end_agents()

    def start(self, node: str, attempt: int, number: int, command: Sequence[str]) -> str:
        """See :class:`Port`."""
        rank = list(self._hosts).index(node)
        step = f"{self._name}.{attempt}.{rank}.{number}"
        state = self._directory / f"{step}.json"
        before = [str(other.state) for key, other in self._agents.items() if key.split(".")[2] == str(rank)]
        verb, *rest = command
        request = remote.request(
            "start",
            directory=self._working_directory,
            command=[sys.executable, "-m", "megatron_ft.cli", verb, "--address", self._addresses[node], *rest],
            environment=self._environment,
            log=str(self._log(node)),
            state=str(state),
            before=before,
        )
        host = self._hosts[node]
        self._agents[step] = _Agent(state, time.monotonic(), self._ssh.submit(lambda: self._ssh.ask(host, request)))
        self._newest[node] = step
        return step

    def _end_agents(self, wait: bool = False) -> None:
        """Ends all agents that may run, with SIGTERM and later SIGKILL. Only the first call has an effect."""
        if self._ended:
            return
        self._ended = True
        tasks = [partial(self._end, self._hosts[name], self._agents[step]) for name, step in self._newest.items()]
        ends = list(map(self._ssh.submit, tasks))
        for end in ends if wait else ():
            # no limit: requests over ssh, each with a limit
            end.result()

    def _end(self, host: Host, agent: _Agent) -> None:
        if agent.request is not None:
            # no limit: one request over ssh, which has a limit
            agent.request.result()  # the agent must not start after this request has ended it
        self._ssh.ask(host, remote.request("end", state=str(agent.state), patience_s=_END_S))

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _show_logs(self, last: bool = False) -> None:
        """Prints new lines of the agents' logs, with the name of the host before each."""
        for name, log in self._logs.items():
            for line in log.read(last):
                show(f"{name}: {line}")


def _hosts(options: argparse.Namespace, run: RunConfig) -> list[Host]:
    """Returns the hosts of the hostfile. Raises ``LaunchError``, also for options that contradict it."""
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
    return hosts


def _working_directory() -> str:
    """Returns $PWD: behind symbolic links the real path may be another one on other hosts."""
    directory = os.environ.get("PWD", "")
    right = os.path.isabs(directory) and os.path.isdir(directory) and os.path.samefile(directory, os.curdir)
    return directory if right else os.getcwd()


def _common_arguments(options: argparse.Namespace, store: str) -> list[str]:
    """Returns the arguments of ``launch`` that are equal on all hosts."""
    words = [f"--groups={options.groups}", f"--run-dir={options.run_dir}"]
    words += [f"--config={options.config}"] if options.config else []
    words += [f"--port={options.port}", f"--resume={options.resume}", f"--store={store}"]
    words += [] if options.tee is None else [f"--tee={options.tee}"]
    if options.ranks_per_group is not None:
        words.append(f"--ranks-per-group={options.ranks_per_group}")
    for name in ("failure_domains", "track", "preload"):
        if getattr(options, name):
            words.append(f"--{name.replace('_', '-')}={','.join(getattr(options, name))}")
    words += [
        f"--{name.replace('_', '-')}"
        for name in ("megatron", "megatron_lm", "module", "overwrite", "private", "no_preload")
        if getattr(options, name)
    ]
    return [*words, "--", str(options.script), *options.arguments]
