"""The per-node agent: keeps the control store running, starts the ranks, reports their deaths, never kills the innocent.

It learns of a death from ``waitpid`` and only ever signals processes it started and has not yet waited for, so a reused
pid can never be hit. It decides nothing about training; it tells what it saw. With ``fault_tolerance.rejoin`` it starts the
ranks of a lost group again (``launch.returns``); what is still there of the group is ended first.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ft import config as config_module
from megatron_ft.core import detector, health
from megatron_ft.core.membership import first_view
from megatron_ft.core.saving import Stops
from megatron_ft.errors import WIPED_OUT, GroupLeft, LaunchError
from megatron_ft.launch import forkserver, hosts, monitor, ranks, record, resume, returns, voice
from megatron_ft.launch.ask import STORE_KEY
from megatron_ft.launch.ranks import Rank
from megatron_ft.runtime import history, store
from megatron_ft.runtime import resume as origins
from megatron_ft.runtime.environment import RankEnvironment, seat
from megatron_ft.types import Exit

_GRACE_S = 10.0
"""After SIGTERM, and after the run's end for a rank that is not part of it any more."""
_SAVE_GRACE_S = 25.0
"""After SIGTERM, where there is a last checkpoint to be made; who sent it (Slurm, Kubernetes) ends us after 30 s, mostly."""
_RECORD_EVERY_S = 5.0
"""A record may be long: it is not read more often than that while the store is away."""
_TRACKER_RESTARTS = 3
_STORE_TIMEOUT_S = 5.0
_HARMLESS = ("slow", "nan", "bitflip")
"""Injected faults that end no process: a later death has another cause."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What ``megatron-ft launch`` was asked for."""

    config: config_module.RunConfig
    run_dir: Path
    script: Path
    arguments: Sequence[str] = ()
    port: int = 0
    hosts: int = 1
    host_rank: int = 0
    store: str | None = None
    address: str | None = None
    job_id: str | None = None
    track: Sequence[str] = ()
    overwrite: bool = False
    resume: str = resume.AUTO


class Agent:
    """One run on one node. The checks are in the constructor, which raises ``FTError``; :meth:`run` starts processes, and
    returns 0 only if the job got to its end.

    Ranks are forked from ``forks``; without it, each is an interpreter of its own.
    """

    def __init__(self, options: LaunchOptions, forks: forkserver.ForkServer | None = None) -> None:
        self._options, self._config = options, options.config
        if not options.script.is_file():
            raise LaunchError(f"script {options.script} does not exist; give the path of a Python file")
        where = hosts.place(
            options.hosts,
            options.host_rank,
            options.address,
            options.store,
            options.port,
            options.job_id,
            self._config,
        )
        self._leads = where.rank == 0
        run_id = uuid.uuid4().hex[:12]
        self._saved = resume.Directory(self._config, run_id, options.resume) if self._leads else None
        try:
            self._run_dir = self._prepare_record()
            least_s = self._config.fault_tolerance.detector.heartbeat_timeout_s
            self._hosts = hosts.Hosts(where, self._config, least_s, self._run_dir, run_id)
        except BaseException:
            self._release()
            raise
        self._run_id = self._hosts.run_id
        self._store = store.ControlStore(self._hosts.store_address, self._run_id, timeout_s=_STORE_TIMEOUT_S)
        self._first = self._first_keys() if self._leads else {}
        self._voice = voice.Voice(self._store, self._first)
        self._returns = self._prepare_returns()
        self._ranks: list[Rank] = []
        command = [str(options.script), *options.arguments]
        self._starter = ranks.Starter(command, self._hosts.ranks, self._run_dir, forks)
        self._monitor = monitor.Monitor(_limits(self._config.fault_tolerance.detector))
        self._exits: list[tuple[Rank, Exit]] = []
        self._signalled: signal.Signals | None = None
        self._tracker: subprocess.Popen | None = None
        self._tracker_starts = 0
        self._complained = False
        self._look_again = 0.0

    def _prepare_record(self) -> Path:
        if not self._leads:
            return self._options.run_dir.resolve()
        aside = record.NOTHING if not self._saved.on else record.ANY if self._saved.origin else record.UNFINISHED
        return record.prepare(self._options.run_dir, self._options.overwrite, aside)

    def _first_keys(self) -> dict[str, Any]:
        """What stands on the control store before any rank is started."""
        origin = self._saved.origin
        view = first_view(self._config.groups, origin.step if origin else 0)
        return {"view/0": view.to_json(), **({origins.KEY: origin.to_json()} if origin else {})}

    def _release(self) -> None:
        if self._saved is not None:
            self._saved.release()

    def run(self) -> int:
        if self._leads:
            self._write_config()
            self._store.begin()
            for key, value in self._first.items():
                self._store.set(key, value)
        self._hosts.meet()
        self._store.check_begun()
        fields = {"groups": self._config.groups, "ranks_per_group": self._config.ranks_per_group}
        if self._leads:
            self._note("start", run_id=self._run_id, host=self._hosts.name(), **fields)
            if (origin := self._saved.origin) is not None:
                self._note("resume", step=origin.step, checkpoint=origin.path, of_run=origin.of_run)
        wakeup = _Wakeup((signal.SIGTERM, signal.SIGINT))
        try:
            for group, position in self._hosts.ranks:
                self._ranks.append(self._start_rank(group, position, 0))
            if not self._config.fault_tolerance.rejoin.enabled:
                self._starter.end_forks()  # nobody needs it any more
            self._write_ranks()
            self._start_tracker()
            self._supervise(wakeup)
            self._stay_for_others(wakeup)
        finally:
            self._starter.end_forks()
            self._end_all()
            code = self._conclude()
            self._end_tracker()
            self._hosts.leave()
            self._release()
            wakeup.close()
        return code

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _start_rank(self, group: int, position: int, incarnation: int) -> Rank:
        where = (self._hosts.store_address, self._hosts.place.address)
        env = RankEnvironment(self._run_id, group, position, *where, self._run_dir, self._config, incarnation)
        return self._starter.start(env)

    def _reap_strays(self) -> None:
        # Not those that have ended: a run of weeks may see their pids again.
        known = {rank.process.pid for rank in self._living()} | self._hosts.pids()
        forkserver.reap_strays(known | ({self._tracker.pid} if self._tracker is not None else set()))

    def _supervise(self, wakeup: _Wakeup) -> None:
        """Until no rank is left: report deaths, forward signals, give up on those that are outside of the ended run."""
        deadline: float | None = None
        while self._living() or (deadline is None and self._returns.pending()):
            for number in wakeup.wait(monitor.LOOK_EVERY_S):
                if number != signal.SIGCHLD:
                    grace_s = self._told_to_stop(signal.Signals(number))
                    deadline = deadline or time.monotonic() + grace_s
            for rank in self._living():
                if rank.process.poll() is not None:
                    self._buried(rank)
            self._reap_strays()
            self._hosts.look_after_store()
            self._look()
            self._listen()
            self._voice.tell()
            if self._tracker is not None and self._tracker.poll():  # ended by itself with 0, it is done
                self._start_tracker()
            if deadline is None and (self._ended() or self._ended_elsewhere()):
                deadline = time.monotonic() + _GRACE_S
            if deadline is None:
                self._bring_back()
            elif time.monotonic() > deadline:
                self._kill_leftover()

    def _living(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.ended is None]

    def _tell(self, said: detector.Signal) -> None:
        self._voice.tell(said)
        self._returns.hear(said)

    def _look(self) -> None:
        """Give up ranks that live but will not go on by themselves."""
        living = {rank.watched.pid: rank for rank in self._living()}
        for watched in self._monitor.look([rank.watched for rank in living.values()]):
            rank, host = living[watched.pid], self._hosts.name()
            said = (rank.group, rank.position, watched.pid, host, watched.given_up, rank.incarnation)
            self._tell(detector.GivenUp(*said))
            fields = {"group": rank.group, "position": rank.position, "pid": watched.pid, "host": host}
            detail = {"signal": None, "code": None, "detail": watched.given_up, "incarnation": rank.incarnation}
            self._record_fault({**fields, **detail}, time.time(), "agent's look at the process")

    def _listen(self) -> None:
        """Pass on which hosts are silent, or are heard again."""
        for change in self._hosts.beats.changes():
            parts = [self._returns.incarnation(group) for group in self._hosts.shared()]
            silent = self._hosts.signal(change, *parts)  # of one group at most
            if not self._ended():
                print(f"megatron_ft: {detector.judge(silent).reason}", file=sys.stderr, flush=True)
                self._tell(silent)
                self._note("silence", **vars(silent))

    def _buried(self, rank: Rank) -> None:
        """A rank has ended: tell the survivors first, then the record. They know already of one that was dropped."""
        noticed = time.time()
        rank.ended = noticed
        code = rank.process.returncode
        death = Exit(
            group=rank.group,
            position=rank.position,
            pid=rank.process.pid,
            host=self._hosts.name(),
            signal=signal.Signals(-code).name if code < 0 else None,
            code=code if code >= 0 else None,
            **rank.last_words(),
        )
        if code == 0 and not self._ended() and self._recorded_end():
            self._voice.say_ended()  # it has left with the store's answer, and the store has died since
        if not rank.dropped and not self._ended():
            self._tell(detector.Ended(death, rank.incarnation))
            if not self._exits or self._returns.seated(rank.group, rank.incarnation):
                self._exits.append((rank, death))  # a newcomer that never had a seat is not why the run ends
            if self._signalled is None and not rank.watched.given_up and code != GroupLeft.exit_code:
                self._record_fault({**asdict(death), "incarnation": rank.incarnation}, noticed, "agent's waitpid")
        self._write_ranks()

    def _record_fault(self, fields: dict[str, Any], noticed: float, how: str) -> None:
        """``detected_s`` counts from the injection where the fault was injected; else nobody knows when it began."""
        injected = [
            line["t"]
            for line in history.read(self._run_dir)
            if line["event"] == "inject" and line.get("pid") == fields["pid"] and line.get("kind") not in _HARMLESS
        ]
        self._note(
            "fault",
            **fields,
            how=how,
            detected_s=round(noticed - injected[-1], 6) if injected else None,
        )

    def _told_to_stop(self, number: signal.Signals) -> float:
        """How long the ranks may take to end. They save once more if they can; told again, they end at once."""
        first, self._signalled = self._signalled is None, self._signalled or number
        begun = any(line["event"] == "begin" for line in history.read(self._run_dir))
        if first and begun and self._config.fault_tolerance.checkpoint.directory:
            self._tell(Stops(tuple(sorted({group for group, _ in self._hosts.ranks})), f"stopped by {number.name}"))
            return _SAVE_GRACE_S
        for rank in self._living():
            rank.process.send_signal(signal.SIGINT)  # SIGTERM would tell a group to leave in order
        return _GRACE_S

    def _kill_leftover(self) -> None:
        """After the grace period: everything when we were told to stop, else only ranks that are outside of the run."""
        for rank in self._living():
            if self._signalled is not None or not self._voice.done(seat(rank.group, rank.incarnation)):
                rank.process.kill()

    def _stay_for_others(self, wakeup: _Wakeup) -> None:
        """The control store ends with host 0's agent: it stays until the others have left, or none of them is heard."""
        if not self._leads or self._hosts.place.hosts == 1:
            return
        while not self._hosts.all_left() and self._hosts.beats.anybody_heard():
            if any(number != signal.SIGCHLD for number in wakeup.wait(monitor.LOOK_EVERY_S)):
                return
            self._hosts.look_after_store()
            self._listen()
            self._voice.tell()

    def _end_all(self) -> None:
        """Whatever happened to the agent, no process of the run stays behind."""
        for rank in self._living():
            rank.process.kill()
            rank.process.wait()
            rank.ended = time.time()
        self._write_ranks()
        self._starter.close()

    # --- lost groups that come back -----------------------------------------------------------------------------------

    def _prepare_returns(self) -> returns.Returns:
        settings = self._config.fault_tolerance
        here = {group: (group, 0) in self._hosts.ranks for group, _ in self._hosts.ranks}
        return returns.Returns(
            self._voice,
            settings,
            here,
            self._hosts.shared(),
            first_view(self._config.groups),
            # Where all groups are here and none of them lives, a store that is away has nothing to tell.
            settings.detector.collective_timeout_s if self._hosts.place.hosts > 1 else 0.0,
            lambda group, incarnation: record.has_committed(self._run_dir, group, incarnation),
        )

    def _bring_back(self) -> None:
        """Start again what is due; end newcomers that nobody is left for."""
        self._returns.look()
        for start in self._returns.due(self._hosts.unheard()):
            older = [rank for rank in self._living() if rank.group == start.group]
            for rank in older:
                rank.drop()  # stopped, stuck, or waiting for its group: its place is needed
            if not older:
                self._start_again(start)
        for refusal in self._returns.refusals():
            self._note("given_up", **vars(refusal))
        if self._returns.hopeless:
            for rank in self._living():
                if not self._returns.seated(rank.group, rank.incarnation):
                    rank.drop()

    def _start_again(self, start: returns.Start) -> None:
        self._returns.started(start)
        new, host = [], self._hosts.name()
        for position in (position for group, position in self._hosts.ranks if group == start.group):
            try:
                new.append(self._start_rank(start.group, position, start.incarnation))
            except OSError as error:  # no process, memory or file to be had: that start is lost, as if it had died
                why = f"could not be started: {error}"
                self._tell(detector.GivenUp(start.group, position, 0, host, why, start.incarnation))
                break
        self._ranks += new
        self._write_ranks()
        fields = {**vars(start), "after_s": round(start.after_s, 6)}
        self._note("restart", **fields, pids=[rank.process.pid for rank in new], host=host)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return self._voice.ended()

    def _ended_elsewhere(self) -> bool:
        """A host that is cut off cannot hear that the run has ended, with its store; it may see the record."""
        if not self._voice.away or time.monotonic() < self._look_again:
            return False
        self._look_again = time.monotonic() + _RECORD_EVERY_S
        return self._recorded_end()

    def _recorded_end(self) -> bool:
        return any(line["event"] == "end" for line in history.read(self._run_dir))

    def _conclude(self) -> int:
        """The exit code, and the one line that explains it."""
        # All groups may have left with the store's answer, and the store have died since: then the record knows.
        if self._ended() or self._recorded_end():
            return 0
        lines = history.read(self._run_dir)
        steps = [line["step"] for line in lines if line["event"] == "step"]
        code, reason = self._why(steps[-1] if steps else None)
        reason += self._what_is_saved(lines)
        if self._leads:
            self._note("stop", reason=reason, exit_code=code)
        print(f"megatron_ft: {reason}", file=sys.stderr, flush=True)
        return code

    def _why(self, last_step: int | None) -> tuple[int, str]:
        where = "before the first step" if last_step is None else f"after step {last_step}"
        if self._signalled is not None:
            return 128 + self._signalled, f"stopped by {self._signalled.name} {where}"
        if not self._exits:
            return 1, f"the agent failed {where}"
        rank, death = self._exits[-1]
        same = {other.detail for _, other in self._exits}
        code = WIPED_OUT if death.signal else death.code or 1
        if len(same) == 1 and death.detail:
            return code, f"{death.detail} [all groups, {where}; output in {rank.log}]"
        if death.code == 0:
            return 1, f"the script ended by itself {where}, before its session.steps() did; output in {rank.log}"
        return code, f"no group is left {where}; the last was group {death.group}: {death}; output in {rank.log}"

    def _what_is_saved(self, lines: Sequence[dict[str, Any]]) -> str:
        """From where a later start goes on; empty where nobody asked for checkpoints."""
        if not self._config.fault_tolerance.checkpoint.directory:
            return ""
        saved = [line["step"] for line in lines if line["event"] in ("checkpoint", "resume")]
        if not saved:
            return "; no checkpoint is complete, a later start begins anew"
        return f"; the checkpoint of step {saved[-1]} is complete: start again to go on from there"

    # --- record and tracker -------------------------------------------------------------------------------------------

    def _note(self, event: str, **fields: Any) -> None:
        """A record that cannot be written (disk full) is reported once; it is no reason to stop a run."""
        try:
            history.append(self._run_dir, event, **fields)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            print(f"megatron_ft: run record not written, training goes on: {error}", file=sys.stderr, flush=True)
        self._complained = True

    def _write_config(self) -> None:
        command = [str(self._options.script), *self._options.arguments]
        where = {"run_id": self._run_id, STORE_KEY: self._hosts.store_address}
        record.replace(self._run_dir / "config.json", {**where, **self._config.to_json(), "command": command})

    def _write_ranks(self) -> None:
        living = [rank.listed(self._hosts.name()) for rank in self._living()]
        try:
            record.write_ranks(self._run_dir, living, self._hosts.place.hosts, self._hosts.place.rank)
        except OSError as error:
            self._complain(error)

    def _start_tracker(self) -> None:
        """Start the tracker's own process, again if it died; it reads the record and cannot touch training."""
        self._tracker = None
        if not self._options.track or self._tracker_starts > _TRACKER_RESTARTS:
            return
        self._tracker_starts += 1
        command = [sys.executable, "-m", "megatron_ft.report.tracker", "--run-dir", str(self._run_dir)]
        with (self._run_dir / "logs" / "tracker.log").open("ab") as output:
            self._tracker = subprocess.Popen(
                [*command, "--track", ",".join(self._options.track)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _end_tracker(self) -> None:
        """It ends by itself after the last line of the history; one that hangs is not waited for long."""
        if self._tracker is None:
            return
        try:
            self._tracker.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._tracker.kill()
            self._tracker.wait()


def _limits(settings: config_module.DetectorConfig) -> health.Limits:
    hang_s = None if settings.hang_timeout_s == config_module.AUTO else float(settings.hang_timeout_s)
    return health.Limits(settings.stopped_timeout_s, hang_s, settings.collective_timeout_s)


class _Wakeup:
    """SIGCHLD and the given signals as bytes on a pipe, so that one ``select`` waits for all of them."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        self._write = write
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, *signals)}
        self._fd_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that came, in order; empty after ``timeout_s``."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        return list(os.read(self._read, 4096)) if ready else []

    def close(self) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
