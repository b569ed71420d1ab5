"""The per-node agent: keeps the control store running, starts the ranks, reports their deaths, never kills a healthy rank.

The agent learns of a death from ``waitpid`` and signals only processes that it started and has not yet waited for, so it
can never hit a reused pid. It decides nothing about training; it reports what it observes. With ``fault_tolerance.rejoin``
it starts the ranks of a lost group again (``core.lifecycle.group_returns``), after it has ended what remains of the
group. A host without ranks (``host.join``) waits for ranks that have lost their host (``host.spare_host``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ft import codec
from megatron_ft.config import megatron_lm_arguments, rank_command
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.detection import rank_health
from megatron_ft.core.detection.link_detector import AGREED
from megatron_ft.core.lifecycle import group_returns, spare_policy
from megatron_ft.core.lifecycle.checkpoint_protocol import Stops
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.errors import GroupLeft, LaunchError
from megatron_ft.host import (
    agent_client,
    checkpoint_cache,
    forkserver,
    job_restore,
    join,
    peers,
    rank_monitor,
    rank_process,
    run_lock,
    stall_watch,
    store_takeover,
)
from megatron_ft.host.agent_record import AgentRecord
from megatron_ft.host.local_ranks import LocalRanks
from megatron_ft.host.operator_requests import STORE_KEY, host_key
from megatron_ft.host.rank_process import Rank
from megatron_ft.host.run_outcome import RunOutcome
from megatron_ft.host.spare_host import Spare, start_key
from megatron_ft.host.tracker_process import Tracking
from megatron_ft.record import history, run_directory
from megatron_ft.run import progress_counters, store
from megatron_ft.run.checkpoint import restore as origins
from megatron_ft.run.store import garbage_collection
from megatron_ft.types import Exit, given, host_name, seat
from megatron_ft.utils import gpu_faults, lifeline, out_of_memory, steady_clock
from megatron_ft.utils.auth import secret
from megatron_ft.utils.console import say
from megatron_ft.utils.signal_wakeup import Wakeup, stop_signals

_GRACE_S = 10.0
"""Seconds that ranks have to end after SIGTERM; also for a rank outside of the run's last view after the run's end."""
_SAVE_GRACE_S = 25.0
"""Seconds after SIGTERM where a last checkpoint has to be saved; Slurm and Kubernetes usually send SIGKILL after 30 s."""
_LAST_STATE_S = 600.0
"""Seconds in which ranks on their way back save the last complete state. No other process waits for anything then, and a
file system that hangs must not keep the job from starting again."""
_STARTING_S = 5.0
"""Before the first step, a shorter silence of a host does not count."""
_STORE_TIMEOUT_S = 5.0
_CLOSING_EVERY_S = 3.0


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of ``megatron-ft launch`` on one host.

    Attributes:
        config: the run's settings.
        run_dir: the run directory.
        command: what each rank runs (``config.rank_command``).
        port: port of the embedded control store; 0 takes a free one.
        hosts: number of hosts that begin the run; ``host_rank`` is this host's number, from 0.
        store: address of the control store, ``HOST:PORT``; None where the agents find it by themselves.
        address: the address by which other hosts reach this one; None: detected.
        job_id: name of the launch, the same on all hosts, or None.
        target: an address on the hosts' network, if one is known.
        track: names of trackers.
        overwrite: delete an earlier run in the run directory.
        private: other users may not read the run directory.
        resume: whether to go on from a checkpoint, as ``--resume``.
        newcomer: set when this host joins a run that exists already.
    """

    config: RunConfig
    run_dir: Path
    command: Sequence[str]
    port: int = 0
    hosts: int = 1
    host_rank: int = 0
    store: str | None = None
    address: str | None = None
    job_id: str | None = None
    target: str | None = None
    track: Sequence[str] = ()
    overwrite: bool = False
    private: bool = False
    resume: str = job_restore.AUTO
    newcomer: join.Newcomer | None = None


class Agent:
    """One run on one node. The constructor makes the checks and raises ``FTError``; :meth:`run` starts processes, and
    returns 0 only if the job reached its end.

    Ranks are forked from ``forks``; without it, each rank is an interpreter of its own.
    """

    def __init__(self, options: LaunchOptions, forks: forkserver.ForkServer | None = None) -> None:
        self._options, self._config = options, options.config
        checkpoints = options.config.fault_tolerance.checkpoint
        self._saves, self._resumable = bool(checkpoints.directory), checkpoints.resumable
        rank_command.check(options.command)
        newcomer = options.newcomer
        where = peers.place(options) if newcomer is None else newcomer.place
        self._leads = where.rank == 0
        run_id = uuid.uuid4().hex[:12] if newcomer is None else newcomer.running.run_id
        self._claims = run_lock.Claims(options.run_dir, self._config, run_id, where.others)
        self._origin: origins.Origin | None = None
        with contextlib.ExitStack() as held:
            held.callback(self._claims.release)
            if self._leads:
                self._claims.take()
                self._origin = job_restore.choose(self._config, options.resume)
            self._run_dir = self._prepare_record()
            own = secret.make(self._run_dir) if self._leads else peers.await_secret(where, self._config, self._run_dir)
            history.write_as(where.rank)  # before any process is started: processes inherit it
            steady_clock.begin()
            least_s = max(_STARTING_S, self._config.fault_tolerance.detector.heartbeat_timeout_s)
            # This forks the store's keeper.
            self._hosts = peers.Hosts(where, self._config, least_s, self._run_dir, run_id, own)
            self._claims.run_id = self._hosts.run_id
            self._claims.begin()
            self._held = held.pop_all()
        self._record = AgentRecord(self._run_dir, lambda: self._claims.usurped)
        self._copies = checkpoint_cache.prepare(self._config, self._hosts)
        self._store = store.ControlStore(self._hosts.store, self._hosts.run_id, _STORE_TIMEOUT_S, secret=own)
        self._store.when_forged(lambda key: self._record.note("forged", key=key, **self._hosts.who))
        self._client = agent_client.AgentClient(self._store, {} if newcomer is None else newcomer.claims)
        self._restarts = self._prepare_returns()
        self._garbage_collector = garbage_collection.GarbageCollector(
            self._store.clone(), lambda group: (group, 0) in self._hosts.ranks, self._restarts.seats.view
        )
        self._spare = Spare(self._hosts, self._client, self._restarts)
        watched = self._config.fault_tolerance.detector
        self._stalls = stall_watch.Stalls(self._client, self._hosts, self._restarts, watched, self._record.note)
        patience_s = self._config.fault_tolerance.store_patience_s
        self._standstill = stall_watch.Standstill(patience_s, _STORE_TIMEOUT_S + rank_health.LOOK_S)
        self._idles = newcomer is not None and not newcomer.groups
        starter = rank_process.Starter(options.command, self._hosts.ranks, self._run_dir, forks)
        self._ranks = LocalRanks(self._hosts, self._run_dir, self._config, starter, self._record)
        self._outcome = RunOutcome(self._record, self._run_dir, self._saves)
        self._signalled: signal.Signals | None = None
        self._memory = out_of_memory.Watch()
        self._gpus = gpu_faults.Watch()
        self._tracking = Tracking(options.track, self._run_dir)
        self._closing_due: float | None = None
        self._hopeless_since: float | None = None
        self._succession: store_takeover.StoreTakeover | None = None

    def _prepare_record(self) -> Path:
        if not self._leads:
            return self._options.run_dir.resolve()
        aside = run_directory.NOTHING
        if self._resumable:
            own = megatron_lm_arguments.newest(self._config.fault_tolerance.checkpoint.script_directory)
            saved = self._origin is not None or bool(own)
            aside = run_directory.ANY if saved else run_directory.UNFINISHED
        return run_directory.prepare(self._options.run_dir, self._options.overwrite, aside, self._options.private)

    def run(self) -> int:
        with self._held:
            self._enter()
            return self._run()

    def _run(self) -> int:
        wakeup, speaks = Wakeup(stop_signals()), False
        self._hosts.heartbeats.changed = wakeup.wake
        try:
            for group, position in self._hosts.ranks:
                self._ranks.start(group, position, 0, self._restarts.seats.view.epoch)
            if self._options.newcomer is not None:
                self._come(self._options.newcomer.groups)
            if not self._config.fault_tolerance.rejoin.enabled:
                self._ranks.starter.end_forks()  # no further rank will be forked
            self._ranks.write()
            self._tracking.start()
            self._supervise(wakeup)
            self._stay_for_others(wakeup)
            speaks = self._hosts.speaks and not self._client.away  # before hosts leave with the store
        finally:
            self._ranks.starter.end_forks()
            self._ranks.end_all()
            code = self._conclude(speaks)
            self._tracking.end()
            if self._succession is not None:
                self._succession.stop()
            self._client.close()
            self._garbage_collector.stop()
            self._hosts.leave(self._store)
            if self._copies is not None:
                self._copies.close(over=code == 0)
            wakeup.close()
        return code

    def _enter(self) -> None:
        """Begin the run, or join it, and wait for the other hosts."""
        if self._leads:
            self._write_config()
            self._store.begin()
            origin = self._origin
            first = {"view/0": first_view(self._config.groups, origin.step if origin else 0).to_wire()}
            for key, value in (first | ({origins.KEY: codec.encode(origin)} if origin else {})).items():
                self._store.set(key, value)
                self._client.knows(key, value)
        if self._options.newcomer is None:
            self._hosts.meet()
        else:
            self._hosts.greet(self._options.newcomer.host_records)
        self._store.check_begun()
        self._begin_succession()
        self._client.listen(self._garbage_collector.on_signal)
        self._garbage_collector.start()
        self._client.put(host_key(self._hosts.place.rank), self._hosts.host_record)
        if self._leads:
            if self._hosts.place.hosts > 1:
                say(self._hosts.store_said)
            self._note_start()

    def _note_start(self) -> None:
        fields: dict[str, Any] = {"groups": self._config.groups, "ranks_per_group": self._config.ranks_per_group}
        if self._hosts.place.hosts > 1:
            fields["store"] = self._hosts.store_said
        self._record.note("start", run_id=self._hosts.run_id, **self._hosts.who, **fields)
        if (origin := self._origin) is not None:
            self._record.note("resume", step=origin.step, checkpoint=origin.path, of_run=origin.of_run)

    def _fill_directory_again(self) -> None:
        """Make what is in the run directory again, which was removed: commands find the run, and lost groups can start."""
        say(
            f"run directory {self._run_dir} was removed while this run uses it, and is made again. Its record begins with "
            f"the newest steps; what the living ranks print from now on is lost"
        )
        try:
            run_directory.make(self._run_dir, self._options.private)
            self._write_config()
            secret.make(self._run_dir, {secret.VARIABLE: self._hosts.secret.text})
        except (OSError, LaunchError) as error:
            say(str(error))
        self._note_start()
        self._ranks.write()

    def _begin_succession(self) -> None:
        """From here on let another host take over the embedded store of a lost host, if all share the run directory."""
        if not self._hosts.succeeds:
            return
        for key in ("view/0", origins.KEY):  # only host 0's agent would put these back
            if (value := self._store.get(key)) is not None:
                self._client.knows(key, value)
        for (
            rank,
            host_record,
        ) in self._hosts.partners.items():  # a lost host cannot put its host record back, and later hosts need it
            self._client.knows(host_key(rank), host_record)
        self._succession = store_takeover.StoreTakeover(
            self._hosts,
            self._run_dir,
            self._ranks,
            self._restarts,
            self._client.hurry,
            lambda what, detail: self._record.note("store", what=what, **self._hosts.who, detail=detail),
        )
        self._succession.start()

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _supervise(self, wakeup: Wakeup) -> None:
        """Until no rank is left, report deaths, forward signals, and give up ranks that are outside of the ended run."""
        deadline: float | None = None
        # no limit: the command itself, until what it watches is over; a signal ends it
        while self._ranks.living() or (deadline is None and (self._restarts.pending() or self._waits())):
            for number in wakeup.wait(self._ranks.monitor.pause_s):
                if number == signal.SIGCHLD:
                    self._ranks.monitor.stir()
                elif self._obeys(signal.Signals(number)):
                    grace_s = self._told_to_stop(signal.Signals(number))
                    deadline = deadline or time.monotonic() + grace_s
            for rank in self._ranks.ended():
                self._buried(rank)
            self._ranks.reap_strays(self._hosts.pids() | self._tracking.pids())
            self._hosts.look_after_store()
            if self._claims.check(self._hosts.foremost):
                self._fill_directory_again()
            self._poll()
            self._listen()
            self._client.announce()
            self._tracking.poll()
            if deadline is None and (self._ended() or self._ended_elsewhere()):
                deadline = time.monotonic() + _GRACE_S
            self._say_closing()
            if deadline is None:
                self._bring_back()
                if self._end_given_up():
                    deadline = time.monotonic() + _GRACE_S
            elif time.monotonic() > deadline:
                for rank in self._ranks.living():  # all after a stop signal, else only those outside of the run
                    if self._signalled is not None or not self._client.done(seat(rank.group, rank.incarnation)):
                        rank.kill()
                if self._given_up() and time.monotonic() > deadline + _GRACE_S:
                    return  # a rank that was killed and does not end is inside the kernel (state D)

    def _given_up(self) -> list[Rank]:
        """Return the given-up ranks of this host, of their group's last start, when all groups are lost."""
        return self._ranks.stuck() if self._restarts.wiped_out and not self._ended() else []

    def _end_given_up(self) -> bool:
        """End given-up ranks, which may hang for ever, when all groups are lost. Return whether there were any."""
        living = [rank for rank in self._given_up() if rank.ended is None]
        for rank in living:
            rank.drop()
        return bool(living)

    def _announce(self, said: signals.Signal) -> None:
        self._client.announce(said)
        self._restarts.on_signal(said)

    def _poll(self) -> None:
        """Give up ranks that live but cannot continue by themselves."""
        for rank in self._ranks.given_up(self._stalls.is_outage):
            fields = {"group": rank.group, "position": rank.position, "pid": rank.process.pid, **self._hosts.who}
            hints = self._gpus.hints(rank.process.pid)
            why = rank.watched.given_up + (f"; {hints}" if hints else "")
            self._announce(signals.RankUnresponsive(**fields, why=why, incarnation=rank.incarnation))
            detail = {"signal": None, "code": None, "detail": why, "incarnation": rank.incarnation}
            self._record.note_fault({**fields, **detail}, steady_clock.now(), "agent's look at the process")
        self._stalls.poll_ranks(self._ranks.living())
        if self._standstill.poll_ranks(self._ranks.living(), bool(self._hosts.unheard()), self._client.away):
            self._end_standstill()

    def _end_standstill(self) -> None:
        """End the ranks of this host, which can neither go on nor find out why: the run can be started again."""
        patience_s = self._config.fault_tolerance.store_patience_s
        silent = [host for host in sorted(self._hosts.heartbeats.silent()) if self._hosts.groups(host)]
        lost = " ".join(map(self._hosts.said, silent))
        why = (
            f"no control store has answered for {patience_s:g} s, and without one the step cannot go on without {lost}"
        )
        say(f"{why}; the ranks of this host are ended")
        for rank in self._ranks.living():
            rank.end(why)

    def _listen(self) -> None:
        """Report which hosts have become silent or are heard again. Hosts are busiest while ranks start."""
        if self._hosts.heartbeats.least_s == _STARTING_S and self._record.summary().last_step is not None:
            self._hosts.heartbeats.least_s = self._config.fault_tolerance.detector.heartbeat_timeout_s
            self._hosts.heartbeats.agreed_s = AGREED * self._hosts.heartbeats.least_s
        changes = self._hosts.heartbeats.changes()
        if changes or self._hosts.heartbeats.silent():
            self._client.stir()  # where links are cut, a notice may be late or lost
        for change in changes:
            parts = [self._restarts.incarnation(group) for group in self._hosts.shared()]
            silent = self._restarts.with_starts(self._hosts.signal(change, *parts))  # a host shares at most one group
            if not self._ended():
                verdict = signals.classify(silent)
                assert isinstance(verdict, GroupFailed | signals.HostSilent)
                say(verdict.reason)
                self._announce(silent)
                self._record.note("silence", **vars(silent))

    def _buried(self, rank: Rank) -> None:
        """Report that a rank has ended, first to the survivors, then in the record. A dropped rank was reported before."""
        self._client.stir()  # the meaning depends on whether the run has ended
        code = given(rank.process.returncode)
        short = self._memory.reason() if code == -signal.SIGKILL and not rank.killed else None
        death = Exit(
            group=rank.group,
            position=rank.position,
            pid=rank.process.pid,
            **self._hosts.who,
            signal=signal.Signals(-code).name if code < 0 else None,
            code=code if code >= 0 else None,
            **{**({"detail": short} if short else {}), **rank.last_words()},
        )
        if code and not rank.killed and (hints := self._gpus.hints(rank.process.pid)):
            death = replace(death, detail=f"{death.detail}; {hints}" if death.detail else hints)
        if code == 0 and not self._ended() and (end := self._record.summary().end):
            self._client.say_ended(end)  # the rank had the store's answer, and the store has died since
        if code and self._is_failure_after(rank):
            self._outcome.failed_after(rank, death, self._signalled)
        if not rank.dropped and not self._ended():
            self._announce(signals.RankExited(death, rank.incarnation))
            if self._signalled is None and not rank.watched.given_up and code != GroupLeft.exit_code:
                fields = {**asdict(death), "incarnation": rank.incarnation}
                self._record.note_fault(fields, given(rank.ended), "agent's waitpid")
        self._ranks.write()

    def _is_failure_after(self, rank: Rank) -> bool:
        """Return whether a rank that did not end with code 0 failed, or was stopped by a signal to this agent, after the
        last step, where scripts write their final model."""
        left_out = rank.dropped or (rank.killed and self._signalled is None)
        if left_out or not self._ended():
            return False
        view = self._client.newest_view(self._restarts.seats.view)  # a start that was left out need not write a model
        member = rank.group in view.live and view.incarnations.get(rank.group, 0) == rank.incarnation
        return member and self._client.done(seat(rank.group, rank.incarnation))

    def _obeys(self, number: signal.Signals) -> bool:
        """Return whether a signal stops the run."""
        asks_to_save = number in lifeline.SAVE_SIGNALS
        if asks_to_save and not self._resumable:
            say(f"{number.name}: nothing can be saved without fault_tolerance.checkpoint.directory, so the run goes on")
            return False
        # A closed terminal can send SIGHUP several times: from the kernel, and from the shell. The others are repeated, too.
        return self._signalled is None or not (asks_to_save or number == signal.SIGHUP)

    def _told_to_stop(self, number: signal.Signals) -> float:
        """Stop the ranks; at the first signal they save a checkpoint before, if they can. Return their time in seconds."""
        first, self._signalled = self._signalled is None, self._signalled or number
        if first and self._record.summary().begun and self._ranks.living() and self._resumable:
            self._announce(Stops(tuple(sorted({group for group, _ in self._hosts.ranks})), f"stopped by {number.name}"))
            return _SAVE_GRACE_S
        for rank in self._ranks.living():
            if rank.poll() is None:
                rank.process.send_signal(signal.SIGINT)  # SIGTERM would ask a group to leave in order
        return _GRACE_S

    def _say_closing(self) -> None:
        """Record that scripts still run after the last step, e.g. to write their final model: supervisors have to wait."""
        if self._signalled is not None or not self._ended():
            return
        now = time.monotonic()
        due, self._closing_due = self._closing_due, self._closing_due or now + _CLOSING_EVERY_S
        if due is None or now < due:
            return
        self._closing_due = now + _CLOSING_EVERY_S
        done = {rank.group for rank in self._ranks.living() if self._client.done(seat(rank.group, rank.incarnation))}
        if done:
            self._record.note(run_directory.CLOSING, **self._hosts.who, groups=sorted(done))

    def _stay_for_others(self, wakeup: Wakeup) -> None:
        """Stay until the other hosts have left or none is heard: the control store ends with the agents of its hosts."""
        heartbeats = self._hosts.heartbeats
        if not self._hosts.serves:
            return
        # no limit: the other agents leave or are not heard any more (heartbeat_timeout_s); a signal ends it
        while heartbeats.known() > heartbeats.silent() and not self._hosts.all_left():
            if any(number != signal.SIGCHLD for number in wakeup.wait(rank_monitor.LOOK_EVERY_S)):
                return
            self._hosts.look_after_store()
            self._listen()
            self._client.announce()

    # --- lost groups that come back -----------------------------------------------------------------------------------

    def _prepare_returns(self) -> group_returns.RestartManager:
        settings = self._config.fault_tolerance
        return group_returns.RestartManager(
            self._client,
            {group: (group, 0) in self._hosts.ranks for group, _ in self._hosts.ranks},
            self._hosts.shared(),
            first_view(self._config.groups),
            settings.min_groups,
            settings.rejoin.restarts_per_hour if settings.rejoin.enabled else None,
            # Where this host has all groups and none of them lives, a store that is away has no news for it.
            settings.store_patience_s if self._hosts.place.others else 0.0,
            lambda group, incarnation: self._record.summary().has_committed(group, incarnation),
            time.monotonic,
            fenced=self._hosts.is_fenced,
        )

    def _bring_back(self) -> None:
        """Start groups that are due, and end ranks that wait for a seat when no group has the model any more."""
        heard = self._client.news()
        for signal_ in heard:
            self._on_signal(signal_)
        self._restarts.check(heard)
        for part, last in self._spare.poll() if self._idles else ():
            self._take_over([(part.group, position) for position in part.positions], last)
            self._record.note("host", **self._hosts.who, what="took over", groups=[part.group])
        for start in self._restarts.due(self._hosts.unheard()):
            older = [rank for rank in self._ranks.living() if rank.group == start.group]
            for rank in older:
                rank.drop()  # it is stopped, stuck, or waits for its group; the new start needs its place
            if not older and self._may_start(start):
                self._start_again(start)
        for refusal in self._restarts.refusals():
            self._record.note("given_up", **vars(refusal))
            self._announce(signals.RestartRefused(self._hosts.place.rank, refusal.group, refusal.incarnation))
        if self._restarts.hopeless:
            self._end_waiting()

    def _end_waiting(self) -> None:
        """End ranks that wait for a seat, which they cannot get any more. Where no member is left, those that hold a
        complete state have time to save it, and end by themselves."""
        now = time.monotonic()
        self._hopeless_since = self._hopeless_since or now
        saves = self._saves and self._restarts.wiped_out and now - self._hopeless_since < _LAST_STATE_S
        for rank in self._ranks.living():
            waits = not self._restarts.seated(rank.group, rank.incarnation)
            if waits and not (saves and progress_counters.has_state(rank.watched.pulse)):
                rank.drop()

    def _may_start(self, start: group_returns.Start) -> bool:
        """Return whether this host is to make that start; False while that is unknown."""
        first = min(position for group, position in self._hosts.ranks if group == start.group)
        owner = self._client.claim(start_key(start.group, start.incarnation, first), self._hosts.place.rank)
        if owner not in (None, self._hosts.place.rank):
            self._restarts.forget(start.group)
            self._idles = True  # this host was taken for lost; news of its replacement is on the way
        return owner == self._hosts.place.rank

    def _start_again(self, start: group_returns.Start) -> None:
        self._restarts.started(start)
        where = self._hosts.who
        for position in (position for group, position in self._hosts.ranks if group == start.group):
            try:
                self._ranks.start(start.group, position, start.incarnation, self._restarts.seats.view.epoch)
            except OSError as error:  # no process, memory or file available: that start counts as died
                why = f"could not be started: {error}"
                gone = {"group": start.group, "position": position, "pid": 0, **where}
                self._announce(signals.RankUnresponsive(**gone, why=why, incarnation=start.incarnation))
                break
        self._ranks.write()
        fields = {**vars(start), "after_s": round(start.after_s, 6)}
        self._record.note("restart", **fields, pids=self._ranks.pids(start.group), **where)

    # --- hosts that come, and go --------------------------------------------------------------------------------------

    def _come(self, groups: Sequence[int]) -> None:
        """Announce this host, and that it runs the groups it adds."""
        added = [(group, position) for group in groups for position in range(self._config.ranks_per_group)]
        self._hosts.max_ranks = len(added) or self._hosts.max_ranks
        self._take_over(added, join.FIRST - 1)
        self._record.note("host", **self._hosts.who, what="added" if groups else "spare", groups=list(groups))
        say(self._hosts.store_said)

    def _take_over(self, new: Sequence[tuple[int, int]], last: int) -> None:
        """Run these ranks on this host from now on. ``last``: the last start of their group that is over."""
        me = self._hosts.place.rank
        corrections = self._hosts.move(me, new, last + 1)
        self._ranks.starter.house(self._hosts.ranks)
        self._announce(signals.HostAssigned(me, **self._hosts.host_record, ranks=tuple(new), incarnation=last + 1))
        for correction in corrections:
            self._announce(self._restarts.with_starts(correction))
        shared = self._hosts.shared()
        for part in spare_policy.parts_of(me, new):
            self._restarts.adopt(part.group, part.positions[0] == 0, part.group in shared, last)

    def _on_signal(self, signal_: signals.Signal) -> None:
        self._spare.on_signal(signal_)
        if isinstance(signal_, Stops) and not self._resumable:
            signal.raise_signal(signal.SIGTERM)  # without checkpoints, act as if each agent had been signalled itself
        if not isinstance(signal_, signals.HostAssigned) or signal_.host == self._hosts.place.rank:
            return
        before = self._hosts.ranks
        for correction in self._hosts.on_signal(signal_):
            self._announce(self._restarts.with_starts(correction))
        if signal_.host in self._hosts.heartbeats.known():
            # Otherwise its number is given away again after the host and the store are lost.
            self._client.knows(join.number_key(signal_.host), signal_.name)
        if moved := set(before) - set(self._hosts.ranks):
            self._give_up_to(host_name(signal_.name, signal_.host), moved)

    def _give_up_to(self, other: str, moved: Collection[tuple[int, int]]) -> None:
        """Give up ranks that another host runs now: this host was taken for lost, or had failed with them too often."""
        groups = sorted({group for group, _ in moved})
        say(f"groups {' '.join(map(str, groups))} are on {other} now")
        for rank in self._ranks.living():
            if (rank.group, rank.position) in moved:
                rank.drop()
        for group in groups:
            self._restarts.forget(group)
        self._ranks.starter.house(self._hosts.ranks)
        self._idles = True

    def _waits(self) -> bool:
        """Return whether this host stays without ranks: it may get some, leaving early would look like a loss, and its exit
        code is to be that of the run, which goes on elsewhere."""
        nowhere = self._restarts.hopeless or self._restarts.wiped_out or self._restarts.in_vain
        return not (nowhere or self._ended() or self._ended_elsewhere())

    # --- the end ------------------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return self._client.ended()

    def _ended_elsewhere(self) -> bool:
        return self._record.has_end(self._client.away)

    def _conclude(self, speaks: bool) -> int:
        """Return the exit code, and print the line that explains it. ``speaks``: also where host 0 is lost (``Hosts``)."""
        self._client.stir()
        # All groups may have left with the store's answer and the store have died since: then the record has the end.
        recorded = self._record.summary()
        if self._ended() or recorded.end:
            return self._outcome.of_complete(self._client.end or recorded.end or {}, self._leads or speaks)
        tells = (self._leads or speaks and not recorded.over) and not self._hosts.replaced()
        ending = self._restarts.ending(recorded.last_step, self._idles)
        return self._outcome.of_stopped(recorded, self._signalled, ending, tells)

    # --- record ------------------------------------------------------------------------------------------------------

    def _write_config(self) -> None:
        place, directory = self._hosts.place, os.getcwd()
        where = {
            "run_id": self._hosts.run_id,
            STORE_KEY: self._hosts.store_address,
            "job": place.job,
            "hosts": place.hosts,
        }
        how = {"host": self._hosts.name(), "directory": directory, "command": [*self._options.command]}
        run_directory.write_config(self._run_dir, {**where, **self._config.to_json(), **how})
