"""Injects the faults of a schedule into a live run: waits for the time of each, records it, injects it, and undoes it.

A fault is written to the run record, with its key, before it is injected, and a recorded fault is never injected again.
An injector that is killed and restarted may therefore inject fewer faults than requested, but none twice. Faults inside
a process are recorded by the rank that carries out the order.

Failures assumed: the run ends, and any process dies, at any moment; a fault without a living target is reported as not
reached. When the injector is killed, frozen processes, cut links and filled disks stay until the same schedule is
injected again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Literal

from megatron_ft.cluster.faults import host_faults, process_lookup
from megatron_ft.cluster.faults.process_lookup import Process, Rank
from megatron_ft.cluster.faults.schedule import IN_PROCESS, Fault, Schedule
from megatron_ft.config.store_address import is_etcd
from megatron_ft.errors import LaunchError
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import FaultCommand
from megatron_ft.types import given
from megatron_ft.utils import shared_file

_POLL_S = 0.002
_FREEZES_WITHIN_S = 0.5
"""A rank freezes within microseconds after it has named the order, unless its host is very busy."""

State = Literal["waiting", "armed", "injected", "before", "refused", "missed"]
DONE = {"injected": "injected", "before": "injected before", "refused": "refused", "missed": "not reached"}
"""The states in which a fault is over, and the words for them."""


@dataclass
class Case:
    """One fault and its state. ``before``: injected by an earlier injector; ``missed``: its time never came. ``struck``: the
    processes that go on at ``undo_at``, when it is undone."""

    number: int
    fault: Fault
    key: str
    seed: int
    state: State = "waiting"
    note: str = ""
    ended_at: float | None = None
    armed: dict[tuple[int, int], Rank] = field(default_factory=dict)
    struck: Sequence[Process] = ()
    undo_at: float | None = None

    def __str__(self) -> str:
        return f"{self.number} {self.fault.kind} {self.fault.whom()} ({self.fault.when()})"


class _Record(run_state.Watched):
    """The state of the live run, with the lines of the faults that were ordered."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._ordered: dict[str, list[dict[str, Any]]] = {}

    def of(self, key: str) -> list[dict[str, Any]]:
        """Return the lines of one fault."""
        return self._ordered.get(key, [])

    def take(self, line: dict[str, Any]) -> None:
        super().take(line)
        if line["event"] == "inject" and "fault" in line:
            self._ordered.setdefault(line["fault"], []).append(line)


class Injector:
    """Injects one schedule into one run on this host. Call :meth:`run` once.

    Args: run_dir: run directory. schedule: the faults; or a function that draws them for a live run from its age in
    seconds and its living groups. groups: number of groups of the run. ranks_per_group: number of ranks of a group.
    min_survivors: a fault that leaves fewer groups is refused. start_timeout_s: time to wait for a run that has not
    started. say: called with a line for each event.
    """

    def __init__(
        self,
        run_dir: Path,
        schedule: Schedule | Callable[[float, Collection[int]], Schedule],
        groups: int,
        ranks_per_group: int,
        *,
        min_survivors: int = 1,
        start_timeout_s: float = 60.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._run_dir, self._groups, self._ranks_per_group = run_dir, groups, ranks_per_group
        self._min_survivors, self._start_timeout_s, self._say = min_survivors, start_timeout_s, say
        self._draw = None if isinstance(schedule, Schedule) else schedule
        self.cases = _cases(schedule) if isinstance(schedule, Schedule) else []
        self._record = _Record(run_dir)
        self._agent: Process | None = None
        self._struck: set[int] = set()
        self._posted: dict[tuple[int, int], tuple[Rank, tuple[FaultCommand, ...]]] = {}

    def run(self) -> list[Case]:
        """Returns when every fault is injected and undone, or the run is over.

        Raises ``LaunchError`` when there is no live run, or another injector works on it.
        """
        with self._alone():
            self._await_start()
            if self._draw is not None:
                self.cases = _cases(self._draw(time.time() - given(self._record.known.started), self._there()))
            self._find_injected()
            try:
                # no limit: the command itself, until what it watches is over; a signal ends it
                while not self._over() and any(c.state not in DONE or c.undo_at is not None for c in self.cases):
                    self._turn()
                    time.sleep(_POLL_S)
            finally:
                self._tidy_up()
        return self.cases

    @property
    def _committed(self) -> int:
        """The highest committed step, -1 before the first."""
        last = self._record.known.last_step
        return -1 if last is None else last

    # --- the run ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        directory = self._run_dir / injection_points.DIRECTORY
        shared_file.make_directory(directory)
        with open(shared_file.open_to_lock(directory / "lock"), "rb") as file:
            if shared_file.lock(file.fileno()) is False:
                holders = shared_file.lock_holders(file.fileno()) or "its process is not on this host"
                raise LaunchError(f"another injector works on {self._run_dir} ({holders}); wait for it, or end it")
            yield

    def _await_start(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            self._record.poll()
            if self._record.known.over:
                raise LaunchError(f"the run in {self._run_dir} is over, and no fault was injected; choose a live run")
            self._agent = process_lookup.agent(self._run_dir)
            if self._record.known.started is not None and self._agent is not None:
                break
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no live run in {self._run_dir} within {self._start_timeout_s:g} s; start it with "
                    f"`megatron-ft launch --run-dir {shlex.quote(str(self._run_dir))}` on this host"
                )
            time.sleep(_POLL_S)

    def _there(self) -> Collection[int]:
        """Returns the living groups on this host; all groups while the run starts."""
        if not self._record.known.begun:
            return range(self._groups)
        living = self._living_groups() or {rank.group for rank in process_lookup.ranks(self._run_dir)}
        return living or range(self._groups)

    def _find_injected(self) -> None:
        """Marks the faults of this schedule that an earlier injector has injected."""
        for case in self.cases:
            lines = self._record.of(case.key)
            if lines:
                self._end(case, "before", lines[0].get("point") or "")
                struck = [
                    Process(line["pid"], line["start"]) for line in lines if line.get("pid") and line.get("start")
                ]
                self._plan_undo(case, struck, lines[-1]["t"])

    def _over(self) -> bool:
        """Returns True at the end of the record, or when the agent is gone, with which the ranks end."""
        self._record.poll()
        return self._record.known.over or (self._agent is not None and not self._agent.lives)

    # --- one turn -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.time()
        for case in self.cases:
            if case.undo_at is not None and case.undo_at <= now:
                self._undo(case)
        for case in self.cases:
            if case.state not in DONE and self._is_due(case, now):
                if case.fault.is_order:
                    self._pursue(case)
                elif not self._nobody_left(case):
                    self._strike(case)
        self._post()

    def _is_due(self, case: Case, now: float) -> bool:
        fault = case.fault
        if case.state == "armed":
            return True
        if fault.after_s is not None:
            return now >= given(self._record.known.started) + fault.after_s
        if fault.wait_s is not None:
            previous = self.cases[case.number - 2].ended_at if case.number > 1 else self._record.known.started
            return previous is not None and now >= previous + fault.wait_s
        return fault.is_order or self._committed >= given(fault.step)

    def _nobody_left(self, case: Case) -> bool:
        """Returns True when the fault has no living target, now or for good; a group that is lost for good is a miss."""
        if case.fault.kind == "store":
            return self._no_store(case)
        targets = case.fault.targets(self._ranks_per_group)
        if not targets or any(process_lookup.find(self._run_dir, *target) for target in targets):
            return False
        if self._record.known.begun:
            self._end(case, "missed", "none of its ranks was alive at its time")
        return True

    def _no_store(self, case: Case) -> bool:
        """A store that has just died returns in a moment; etcd cannot be killed from here."""
        if process_lookup.store(self._run_dir, given(self._agent)) is not None:
            return False
        if is_etcd(run_directory.config(self._run_dir).get("fault_tolerance", {}).get("store", "")):
            self._end(case, "refused", "the store of the run is etcd; kill a member of it on its host")
        return True

    # --- orders -------------------------------------------------------------------------------------------------------

    def _pursue(self, case: Case) -> None:
        """Arms the ranks, and checks whether they have reached their point or its time has passed."""
        lines = self._record.of(case.key)
        if lines:
            if case.fault.takes(self._groups):
                self._struck.add(lines[0]["pid"])
            self._end(case, "injected", f"{lines[0]['point']}, by the rank itself (pid {lines[0]['pid']})")
            return
        if case.state == "armed" and case.fault.kind not in IN_PROCESS and self._strike_if_held(case):
            return
        # The others can commit the step of a rank that has not reached its point, but not the next step.
        if case.fault.step is not None and self._committed > case.fault.step:
            self._end(
                case,
                "missed",
                f"step {self._committed} is committed, and the rank did not reach its point before",
            )
            self._post()
            for rank in case.armed.values():  # some ranks of a rack may wait there for one that never comes
                self._release(rank, case)
            return
        case.armed = {target: rank for target, rank in case.armed.items() if rank.lives}
        if not case.armed and self._arm(case):
            self._say(f"armed: {case}")

    def _arm(self, case: Case) -> bool:
        case.state = "waiting"
        if case.fault.kind in IN_PROCESS:
            if self._too_few(case):
                return False
            # An order cannot be refused once it is given, and the faults before it may take groups, too.
            left = self._left_after(case, [other for other in self.cases[: case.number - 1] if other.state not in DONE])
            if left is not None and left < self._min_survivors:
                return False
        targets = case.fault.targets(self._ranks_per_group)
        living = {target: process_lookup.find(self._run_dir, *target) for target in targets}
        case.armed = {target: rank for target, rank in living.items() if rank is not None}
        if case.armed:
            case.state = "armed"
        return bool(case.armed)

    def _post(self) -> None:
        """Writes the mailboxes that have changed."""
        wanted: dict[tuple[int, int], tuple[Rank, list[FaultCommand]]] = {
            target: (rank, []) for target, (rank, orders) in self._posted.items() if orders
        }
        for case in self.cases:
            for target, rank in case.armed.items() if case.state == "armed" else ():
                if target not in wanted or wanted[target][0] != rank:
                    wanted[target] = (rank, [])
                wanted[target][1].append(_order(case))
        for target, (rank, orders) in wanted.items():
            before = self._posted.get(target)
            if before != (rank, tuple(orders)):
                self._posted[target] = rank, tuple(orders)  # stored first: Ctrl-C in between must not lose an order
                try:
                    injection_points.post(self._run_dir, *target, (rank.pid, rank.start), orders)
                except OSError:  # e.g. a full disk, perhaps by an injected fault: the next turn tries again
                    self._posted[target] = before or (rank, ())

    def _strike_if_held(self, case: Case) -> bool:
        living = [rank for rank in case.armed.values() if rank.lives]
        if not living or not all(rank.is_stopped and self._holds(rank, case) for rank in living):
            return False
        self._strike(case, living, self._reached(living[0])["at"])
        if case.state != "injected":
            for rank in living:
                rank.send(Signals.SIGCONT)
        return True

    def _holds(self, rank: Rank, case: Case) -> bool:
        found = self._reached(rank)
        return found.get("fault") == case.key and found.get("process") == [rank.pid, rank.start]

    def _reached(self, rank: Rank) -> dict[str, Any]:
        return shared_file.read_json(injection_points.reached_file(self._run_dir, rank.group, rank.position)) or {}

    # --- injecting ----------------------------------------------------------------------------------------------------

    def _strike(self, case: Case, ranks: Sequence[Rank] | None = None, where: str = "") -> None:
        """Records the fault, then injects it. All processes of a fault are signalled in immediate succession."""
        if self._too_few(case):
            return
        fault = case.fault
        struck = list(ranks or self._processes_of(fault))
        if not struck and fault.kind == "store":
            return  # the store has just died and returns in a moment
        where = where or self._moment(fault)
        try:
            for process in struck:
                self._note(case, process, where)
            if not struck:
                self._note(case, None, where)
        except OSError as error:
            self._end(case, "refused", f"it could not be recorded: {error}")
            return
        now = time.time()
        if fault.signal is None:
            try:
                host_faults.strike(fault, case.key)
            except OSError as error:
                case.undo_at = now
                self._end(case, "refused", str(error))
                return
        else:
            self._send(fault.signal, struck)
        self._end(case, "injected", f"{where}, pid {' '.join(str(process.pid) for process in struck) or '-'}")
        self._plan_undo(case, struck, now)

    def _processes_of(self, fault: Fault) -> list[Process]:
        """Returns the living targets; none for a link or a disk."""
        if fault.kind == "agent":
            return [given(self._agent)]
        if fault.kind == "store":
            found: list[Any] = [process_lookup.store(self._run_dir, given(self._agent))]
        else:
            found = [process_lookup.find(self._run_dir, *target) for target in fault.targets(self._ranks_per_group)]
        return [process for process in found if process is not None]

    def _send(self, number: Signals, struck: Sequence[Process]) -> None:
        for process in struck:
            process.send(number)
            self._struck.add(process.pid)
        if number not in (Signals.SIGKILL, Signals.SIGSTOP):
            for process in struck:  # a frozen rank receives the signal when it continues
                process.send(Signals.SIGCONT)

    def _moment(self, fault: Fault) -> str:
        if fault.step is not None:
            return f"after step {self._committed}"
        return f"{time.time() - given(self._record.known.started):.3f} s after the start"

    def _note(self, case: Case, process: Process | None, where: str) -> None:
        rank = process if isinstance(process, Rank) else None
        with_it: dict[str, Any] = {}
        if case.fault.kind == "agent":  # its ranks end with it
            with_it = {"groups": sorted({own.group for own in process_lookup.ranks(self._run_dir)})}
        history.append(
            self._run_dir,
            "inject",
            group=rank.group if rank else case.fault.group,
            position=rank.position if rank else None,
            pid=process.pid if process else None,
            signal=case.fault.signal.name if case.fault.signal else None,
            point=where,
            kind=case.fault.kind,
            fault=case.key,
            start=process.start if process else None,
            **with_it,
        )

    def _too_few(self, case: Case) -> bool:
        """Refuses a fault that would leave fewer groups than ``min_survivors``, including groups with an order to die."""
        dying = [other for other in self.cases if other.state == "armed" and other.fault.kind in IN_PROCESS]
        left = self._left_after(case, dying)
        if left is None or left >= self._min_survivors:
            return False
        self._end(case, "refused", f"it would leave {left} groups, --min-survivors is {self._min_survivors}")
        return True

    def _left_after(self, case: Case, others: Sequence[Case]) -> int | None:
        """Returns the number of living groups after ``others`` and this fault; None: it takes no group."""
        takes = case.fault.takes(self._groups)
        if not takes:
            return None
        gone = {group for other in others if other is not case for group in other.fault.takes(self._groups)}
        return len(self._living_groups() - gone - takes)

    def _living_groups(self) -> set[int]:
        living: dict[int, int] = {}
        for rank in process_lookup.ranks(self._run_dir):
            if rank.pid not in self._struck:  # signalled ranks are frozen, or die in a moment
                living[rank.group] = living.get(rank.group, 0) + 1
        return {group for group, count in living.items() if count == self._ranks_per_group}

    def _end(self, case: Case, state: State, note: str) -> None:
        case.state, case.note, case.ended_at = state, note, time.time()
        self._say(f"{DONE[state]}: {case}: {note}")

    # --- undoing ------------------------------------------------------------------------------------------------------

    def _plan_undo(self, case: Case, struck: Sequence[Process], since: float) -> None:
        if case.fault.kind not in IN_PROCESS and case.fault.duration_s is not None:
            case.struck, case.undo_at = struck, since + case.fault.duration_s

    def _undo(self, case: Case) -> None:
        case.undo_at = None
        try:
            if case.fault.signal is None:
                host_faults.undo(case.fault, case.key)
            for process in case.struck:
                process.send(Signals.SIGCONT)
                self._struck.discard(process.pid)
        except OSError as error:
            self._say(f"not undone: {case}: {error}")
        else:
            self._say(f"undone: {case}")

    def _tidy_up(self) -> None:
        """Ends everything that only this process can end: orders, frozen ranks, cut links, filled disks."""
        open_cases = [case for case in self.cases if case.state not in DONE]
        for case in self.cases:
            if (
                case.undo_at is not None and case.fault.kind == "disk_full"
            ):  # first: withdrawing orders needs free space
                self._undo(case)
        for target, (rank, _) in self._posted.items():
            with suppress(OSError):
                injection_points.post(self._run_dir, *target, (rank.pid, rank.start), [])
        for case in open_cases:
            for rank in case.armed.values():
                self._release(rank, case)
        self._record.poll()
        for case in open_cases:
            lines = self._record.of(case.key)  # the order may have been carried out in the last moment
            if lines:
                self._end(case, "injected", lines[0]["point"])
            else:
                self._end(case, "missed", self._why_missed(case))
        for case in self.cases:
            if case.undo_at is not None:
                self._undo(case)

    def _release(self, rank: Rank, case: Case) -> None:
        deadline = time.monotonic() + _FREEZES_WITHIN_S
        while rank.lives and self._holds(rank, case):
            if rank.is_stopped:
                rank.send(Signals.SIGCONT)
                return
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _why_missed(self, case: Case) -> str:
        if not self._over():
            return "the injector was ended"
        return "the run was over" + (
            "" if case.armed else ", and its ranks were not alive" if case.fault.is_order else ""
        )


def _cases(schedule: Schedule) -> list[Case]:
    return [Case(i + 1, fault, schedule.key(i), schedule.seed_of(i)) for i, fault in enumerate(schedule.faults)]


def _order(case: Case) -> FaultCommand:
    fault = case.fault
    optional = {
        name: getattr(fault, name)
        for name in ("step", "bucket", "duration_s", "factor", "steps", "what", "bit", "probability")
    }
    return FaultCommand(
        fault=case.key,
        action=fault.kind if fault.kind in IN_PROCESS else "hold",
        point=fault.order_point,
        seed=case.seed,
        **{name: value for name, value in optional.items() if value is not None},
    )
