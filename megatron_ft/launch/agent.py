"""The per-node agent: keeps the control store running, starts the ranks, reports their deaths, never kills the innocent.

It learns of a death from ``waitpid`` and only ever signals processes it started and has not yet waited for, so a reused
pid can never be hit. It decides nothing about training; it tells what it saw. With ``fault_tolerance.rejoin`` it starts the
ranks of a lost group again (``launch.returns``); what is still there of the group is ended first. A host with nothing to do
(``launch.join``) waits for ranks that have lost their host (``launch.spare``).
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ft.config import RunConfig
from megatron_ft.core import detector, spares
from megatron_ft.core.membership import first_view
from megatron_ft.core.saving import Stops
from megatron_ft.errors import GroupLeft, LaunchError
from megatron_ft.launch import copies, forkserver, hosts, join, monitor, ranks, record, resume, returns, voice
from megatron_ft.launch.ask import STORE_KEY
from megatron_ft.launch.console import say
from megatron_ft.launch.ranks import Rank
from megatron_ft.launch.spare import Spare, start_key
from megatron_ft.launch.tracking import Tracking
from megatron_ft.launch.wakeup import Wakeup
from megatron_ft.runtime import history, store
from megatron_ft.runtime import resume as origins
from megatron_ft.runtime.environment import RankEnvironment, seat
from megatron_ft.types import Exit

_GRACE_S = 10.0
"""After SIGTERM, and after the run's end for a rank that is not part of it any more."""
_SAVE_GRACE_S = 25.0
"""After SIGTERM, where there is a last checkpoint to be made; who sent it (Slurm, Kubernetes) ends us after 30 s, mostly."""
_STARTING_S = 5.0
"""A shorter silence of a host does not count before the first step."""
_RECORD_EVERY_S = 5.0
"""A record may be long: it is not read more often than that while the store is away."""
_STORE_TIMEOUT_S = 5.0
_HARMLESS = ("slow", "nan", "bitflip")
"""Injected faults that end no process: a later death has another cause."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What ``megatron-ft launch`` was asked for. ``target``: an address on the hosts' network, if one is known;
    ``newcomer``: this host comes to a run that is there already."""

    config: RunConfig
    run_dir: Path
    script: Path
    arguments: Sequence[str] = ()
    port: int = 0
    hosts: int = 1
    host_rank: int = 0
    store: str | None = None
    address: str | None = None
    job_id: str | None = None
    target: str | None = None
    track: Sequence[str] = ()
    overwrite: bool = False
    resume: str = resume.AUTO
    newcomer: join.Newcomer | None = None


class Agent:
    """One run on one node. The checks are in the constructor, which raises ``FTError``; :meth:`run` starts processes, and
    returns 0 only if the job got to its end.

    Ranks are forked from ``forks``; without it, each is an interpreter of its own.
    """

    def __init__(self, options: LaunchOptions, forks: forkserver.ForkServer | None = None) -> None:
        self._options, self._config = options, options.config
        if not options.script.is_file():
            raise LaunchError(f"script {options.script} does not exist; give the path of a Python file")
        newcomer = self._newcomer = options.newcomer
        where = newcomer.place if newcomer is not None else hosts.place(
            options.hosts,
            options.host_rank,
            options.address,
            options.store,
            options.port,
            options.job_id,
            self._config,
            options.run_dir,
            options.target,
        )
        self._leads = where.rank == 0
        run_id = uuid.uuid4().hex[:12] if newcomer is None else newcomer.running.run_id
        self._saved = resume.Directory(self._config, run_id, options.resume) if self._leads else None
        try:
            self._run_dir = self._prepare_record()
            least_s = max(_STARTING_S, self._config.fault_tolerance.detector.heartbeat_timeout_s)
            self._hosts = hosts.Hosts(where, self._config, least_s, self._run_dir, run_id)
        except BaseException:
            self._release()
            raise
        self._run_id = self._hosts.run_id
        self._copies = copies.prepare(self._config, self._hosts)
        self._store = store.ControlStore(self._hosts.store_address, self._run_id, timeout_s=_STORE_TIMEOUT_S)
        self._first = self._first_keys() if self._leads else {} if newcomer is None else dict(newcomer.claims)
        self._voice = voice.Voice(self._store, self._first)
        self._returns = self._prepare_returns()
        self._spare = Spare(self._hosts, self._voice, self._returns)
        self._idles = newcomer is not None and not newcomer.groups
        self._ranks: list[Rank] = []
        command = [str(options.script), *options.arguments]
        self._starter = ranks.Starter(command, self._hosts.ranks, self._run_dir, forks)
        self._monitor = monitor.Monitor(monitor.limits(self._config.fault_tolerance.detector))
        self._exits: list[tuple[Rank, Exit]] = []
        self._signalled: signal.Signals | None = None
        self._tracking = Tracking(options.track, self._run_dir)
        self._complained = self._speaks = False
        self._tail, self._look_again = history.Tail(self._run_dir), 0.0

    def _prepare_record(self) -> Path:
        if not self._leads:
            return self._options.run_dir.resolve()
        aside = record.NOTHING if not self._saved.on else record.ANY if self._saved.origin else record.UNFINISHED
        return record.prepare(self._options.run_dir, self._options.overwrite, aside)

    def _first_keys(self) -> dict[str, Any]:
        """What stands on the control store before any rank is started."""
        origin = self._saved.origin
        view = first_view(self._config.groups, origin.step if origin else 0)
        return {"view/0": view.to_wire(), **({origins.KEY: origin.to_json()} if origin else {})}

    def _release(self) -> None:
        if self._saved is not None:
            self._saved.release()

    def run(self) -> int:
        if self._leads:
            self._write_config()
            self._store.begin()
            for key, value in self._first.items():
                self._store.set(key, value)
        if self._newcomer is None:
            self._hosts.meet()
        else:
            self._hosts.greet(self._newcomer.cards)
        self._store.check_begun()
        self._voice.listen()
        self._voice.say(f"host/{self._hosts.place.rank}", self._hosts.card)
        fields = {"groups": self._config.groups, "ranks_per_group": self._config.ranks_per_group}
        if self._leads:
            self._note("start", run_id=self._run_id, host=self._hosts.name(), **fields)
            if (origin := self._saved.origin) is not None:
                self._note("resume", step=origin.step, checkpoint=origin.path, of_run=origin.of_run)
        wakeup = Wakeup((signal.SIGTERM, signal.SIGINT))
        try:
            for group, position in self._hosts.ranks:
                self._ranks.append(self._start_rank(group, position, 0))
            if self._newcomer is not None:
                self._come()
            if not self._config.fault_tolerance.rejoin.enabled:
                self._starter.end_forks()  # nobody needs it any more
            self._write_ranks()
            self._tracking.start()
            self._supervise(wakeup)
            self._stay_for_others(wakeup)
            self._speaks = self._hosts.speaks and not self._voice.away  # now: the others may take the store along
        finally:
            self._starter.end_forks()
            self._end_all()
            code = self._conclude()
            self._tracking.end()
            self._voice.close()
            self._hosts.leave()
            if self._copies is not None:
                self._copies.close(over=code == 0)
            self._release()
            wakeup.close()
        return code

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _start_rank(self, group: int, position: int, incarnation: int) -> Rank:
        where = (self._hosts.store_address, self._hosts.place.address)
        own = (self._run_dir, self._config, incarnation, self._hosts.copies, self._returns.seats.view.epoch)
        env = RankEnvironment(self._run_id, group, position, *where, *own)
        return self._starter.start(env)

    def _reap_strays(self) -> None:
        # Not those that have ended: a run of weeks may see their pids again.
        known = {rank.process.pid for rank in self._living()} | self._hosts.pids()
        forkserver.reap_strays(known | self._tracking.pids())

    def _supervise(self, wakeup: Wakeup) -> None:
        """Until no rank is left: report deaths, forward signals, give up on those that are outside of the ended run."""
        deadline: float | None = None
        while self._living() or (deadline is None and (self._returns.pending() or self._waits())):
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
            self._tracking.look()
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
        """Pass on which hosts are silent, or are heard again. While ranks start, hosts are busy as never again."""
        if self._hosts.beats.least_s == _STARTING_S and any(line["event"] == "step" for line in self._tail.new()):
            self._hosts.beats.least_s = self._config.fault_tolerance.detector.heartbeat_timeout_s
        changes = self._hosts.beats.changes()
        if changes or self._hosts.beats.silent():
            self._voice.stir()  # a notice may be on its way for long, or lost, where links are cut
        for change in changes:
            parts = [self._returns.incarnation(group) for group in self._hosts.shared()]
            silent = self._hosts.signal(change, *parts)  # of one group at most
            if not self._ended():
                say(detector.judge(silent).reason)
                self._tell(silent)
                self._note("silence", **vars(silent))

    def _buried(self, rank: Rank) -> None:
        """A rank has ended: tell the survivors first, then the record. They know already of one that was dropped."""
        noticed = time.time()
        rank.ended = noticed
        self._voice.stir()  # whether the run has ended decides what that means
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
        if first and begun and self._living() and self._config.fault_tolerance.checkpoint.directory:
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

    def _stay_for_others(self, wakeup: Wakeup) -> None:
        """The control store ends with its hosts' agents: they stay until the others have left, or none of them is heard."""
        if not self._hosts.serves or not self._hosts.beats.begun:
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
            settings.detector.collective_timeout_s if self._hosts.place.hosts > 1 or self._hosts.place.late else 0.0,
            lambda group, incarnation: record.has_committed(self._run_dir, group, incarnation),
        )

    def _bring_back(self) -> None:
        """Start again what is due; end newcomers that nobody is left for."""
        heard = self._voice.news()
        for signal_ in heard:
            self._hear(signal_)
        self._returns.look(heard)
        for part, last in self._spare.look() if self._idles else ():
            self._take_over([(part.group, position) for position in part.positions], last)
            self._note("host", host=self._hosts.name(), what="took over", groups=[part.group])
        for start in self._returns.due(self._hosts.unheard()):
            older = [rank for rank in self._living() if rank.group == start.group]
            for rank in older:
                rank.drop()  # stopped, stuck, or waiting for its group: its place is needed
            if not older and self._may_start(start):
                self._start_again(start)
        for refusal in self._returns.refusals():
            self._note("given_up", **vars(refusal))
            self._tell(detector.Refused(self._hosts.place.rank, refusal.group, refusal.incarnation))
        if self._returns.hopeless:
            for rank in self._living():
                if not self._returns.seated(rank.group, rank.incarnation):
                    rank.drop()

    def _may_start(self, start: returns.Start) -> bool:
        """Whether that start is for this host to make; False while that is unknown."""
        first = min(position for group, position in self._hosts.ranks if group == start.group)
        owner = self._voice.claim(start_key(start.group, start.incarnation, first), self._hosts.place.rank)
        if owner not in (None, self._hosts.place.rank):
            self._returns.forget(start.group)
            self._idles = True  # it was taken for lost; the news that it has been replaced is on its way, and it stays
        return owner == self._hosts.place.rank

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

    # --- hosts that come, and go --------------------------------------------------------------------------------------

    def _come(self) -> None:
        """Say who this host is, and that it runs the groups it adds."""
        groups = self._newcomer.groups
        added = [(group, position) for group in groups for position in range(self._config.ranks_per_group)]
        self._hosts.room = len(added) or self._hosts.room
        self._take_over(added, join.FIRST - 1)
        self._note("host", host=self._hosts.name(), what="added" if groups else "spare", groups=list(groups))

    def _take_over(self, new: Sequence[tuple[int, int]], last: int) -> None:
        """Ranks that this host runs from now on; ``last``: the start of their group that is over."""
        me = self._hosts.place.rank
        self._hosts.take(me, new, last + 1)
        self._starter.house(self._hosts.ranks)
        self._tell(detector.Housed(me, **self._hosts.card, ranks=tuple(new), incarnation=last + 1))
        shared = self._hosts.shared()
        for part in spares.parts_of(me, new):
            self._returns.adopt(part.group, part.positions[0] == 0, part.group in shared, last)

    def _hear(self, signal_: detector.Signal) -> None:
        self._spare.hear(signal_)
        if isinstance(signal_, Stops) and not self._config.fault_tolerance.checkpoint.directory:
            signal.raise_signal(signal.SIGTERM)  # there is nothing to be saved: as if each agent had been told itself
        if not isinstance(signal_, detector.Housed) or signal_.host == self._hosts.place.rank:
            return
        before = self._hosts.ranks
        for correction in self._hosts.hear(signal_):
            self._tell(correction)
        if moved := set(before) - set(self._hosts.ranks):
            self._give_up_to(self._hosts.name(signal_.host), moved)

    def _give_up_to(self, other: str, moved: Collection[tuple[int, int]]) -> None:
        """Another host runs these now: this one was taken for lost, or had failed with them too often."""
        groups = sorted({group for group, _ in moved})
        say(f"groups {' '.join(map(str, groups))} are on host {other} now")
        for rank in self._living():
            if (rank.group, rank.position) in moved:
                rank.drop()
        for group in groups:
            self._returns.forget(group)
        self._starter.house(self._hosts.ranks)
        self._idles = True

    def _waits(self) -> bool:
        """Whether this host stays although it runs nothing: something may come, and leaving early would look like a loss."""
        over = self._ended() or self._returns.hopeless or self._returns.in_vain or self._ended_elsewhere()
        return self._idles and not over

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
        self._voice.stir()
        # All groups may have left with the store's answer, and the store have died since: then the record knows.
        if self._ended() or self._recorded_end():
            return 0
        lines = history.read(self._run_dir)
        steps = [line["step"] for line in lines if line["event"] == "step"]
        ended = [(rank.log, death) for rank, death in self._exits]
        code, reason = record.why(steps[-1] if steps else None, self._signalled, ended, self._idles)
        reason += record.what_is_saved(lines) if self._config.fault_tolerance.checkpoint.directory else ""
        told = any(line["event"] == "stop" for line in lines)
        if self._leads or self._speaks and not told:
            self._note("stop", reason=reason, exit_code=code)
        say(reason)
        return code

    # --- record ------------------------------------------------------------------------------------------------------

    def _note(self, event: str, **fields: Any) -> None:
        """A record that cannot be written (disk full) is reported once; it is no reason to stop a run."""
        try:
            history.append(self._run_dir, event, **fields)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            say(f"run record not written, training goes on: {error}")
        self._complained = True

    def _write_config(self) -> None:
        command = [str(self._options.script), *self._options.arguments]
        place, directory = self._hosts.place, os.getcwd()
        where = {"run_id": self._run_id, STORE_KEY: self._hosts.store_address, "job": place.job, "hosts": place.hosts}
        how = {"host": self._hosts.name(), "directory": directory, "command": command}
        record.replace(self._run_dir / "config.json", {**where, **self._config.to_json(), **how})

    def _write_ranks(self) -> None:
        living = [rank.listed(self._hosts.name()) for rank in self._living()]
        try:
            record.write_ranks(self._run_dir, living, self._hosts.place.rank)
        except OSError as error:
            self._complain(error)
