"""The process groups of torch inside a group: those of the engine (tensor, pipeline, inner data parallelism) and the script.

torch lists them, so the script does nothing for it. A thread of each rank looks at them ten times a second. It reports the
group as lost when

- NCCL's watchdog has recorded a failure (``run.collectives.nccl_watchdog``), or
- the training thread waits in its engine for too long, and the collectives that the group's ranks have entered say that no
  rank can go on (``core.detection.collective_stalls``). For that it asks all ranks of the group for what torch's flight
  recorder has (``signals.CollectivesRequested``). This works with gloo as well.

When the group is lost, for whatever reason, its healthy ranks abort their NCCL process groups, all at the same time, so that
no rank stays in a collective whose other end is dead. Where an abort hangs, the process ends and is replaced: nothing can
free its device otherwise. (gloo's abort does nothing; ``run.collectives.group_world`` cuts its connections.)

Failures it assumes: the store is away when there is something to report, for any time; a rank that is asked does not answer;
an abort that hangs; process groups that are made or destroyed at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from megatron_ft import codec
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import AUTO
from megatron_ft.core.detection import collective_stalls
from megatron_ft.core.detection.collective_stalls import Finding, Pace, Report, Training
from megatron_ft.core.protocol import signals
from megatron_ft.errors import StartOver, StoreError
from megatron_ft.run.collectives import flight_recorder, nccl_watchdog
from megatron_ft.run.store import ControlStore, patient, watcher
from megatron_ft.utils.vital_thread import VitalThread, described, end_rank

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_ABORT_S = 5.0
_ANSWER_S, _ANSWER_LOOK_S = 10.0, 0.02
"""Seconds that the ranks of a group have to say which collectives they have entered."""
_AGAIN_S = 10.0
"""Seconds until a rank that waits is looked at again, when the last look has found no reason; twice as long each time."""
_LOGGED = 16
"""Number of calls in the rank's log."""


def listed() -> dict[str, Any]:
    """Return the process groups that torch knows in this process, by their names in torch."""
    return {group.group_name: group for group in list(dist.distributed_c10d._world.pg_map)}


class UserProcessGroups:
    """One rank's process groups.

    Args:
        env: of this rank.
        store: its own from here on.
        training: returns the state of the training thread.
        groups: returns the process groups, by name.
    """

    def __init__(
        self,
        env: RankEnvironment,
        store: ControlStore,
        training: Callable[[], Training],
        groups: Callable[[], Mapping[str, Any]] = listed,
    ) -> None:
        self._env, self._store, self._training, self._groups = env, store, training, groups
        detector = env.config.fault_tolerance.detector
        given = detector.collective_timeout_s
        self._given_s = None if given == AUTO else float(given)
        self._longest_s = detector.longest_collective_s
        self._backends: dict[str, Any] = {}  # of NCCL's kind, by a name for people
        self._labels: dict[str, str] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._known: frozenset[int] = frozenset()
        self._pace = Pace()
        self._due_s = 0.0
        self._asked = itertools.count()
        self._lost = threading.Event()
        self._finding = threading.Lock()

    def start(self) -> None:
        """Watch until the group is lost or the process ends."""
        VitalThread(self._run, "megatron_ft-groups", failed=self._failed).start()

    def abort(self) -> None:
        """Release the threads that wait in one of the process groups: the group is lost. Returns at once; any thread."""
        self._lost.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._lost.wait(_LOOK_S):
            if self._look():
                # no limit: a thread of its own; whoever has started it tells it to stop
                self._lost.wait()
        aborted: set[int] = set()
        # no limit: a thread of its own; whoever has started it tells it to stop
        while True:  # the training thread may be about to make another one
            self._find_groups()
            rest = {name: backend for name, backend in self._backends.items() if id(backend) not in aborted}
            if rest:
                self._release(rest)
                aborted |= set(map(id, rest.values()))
            time.sleep(_LOOK_S)

    def _look(self) -> bool:
        """Return whether the group has been reported as lost."""
        self._find_groups()
        for name, backend in self._backends.items():
            if (failed := nccl_watchdog.failure(backend)) is not None:
                kind, text = failed
                self._tell(f"a broken process group ({kind}): {name}: {text}", *self._ask_all())
                return True
        return self._look_at_training()

    def _look_at_training(self) -> bool:
        self._pace = collective_stalls.look(self._pace, self._training(), time.monotonic(), self._given_s)
        limit_s, why = self._pace.limit_s(self._given_s)
        waited_s = self._pace.still_s
        if waited_s <= limit_s:
            self._due_s = 0.0
            return False
        if waited_s < self._due_s:
            return False
        finding, reports = self._ask_all()
        said = f"a wait inside its group of {waited_s:.0f} s; {limit_s:.0f} s are allowed: {why}"
        if finding is None or finding.excuse:
            self._due_s = waited_s + max(_AGAIN_S, waited_s - limit_s)
            because = "no rank of it is in a collective" if finding is None else f"{finding.why}; {finding.excuse}"
            _log.info(f"group {self._env.group}: rank {self._env.position}: {said}; {because}")
            return False
        self._tell(said, finding, reports)
        return True

    def _find_groups(self) -> None:
        """Take in process groups that are new, and forget those that are gone."""
        groups = self._groups()
        known = frozenset(map(id, groups.values()))
        with self._finding:
            if known == self._known:
                return
            before = set(map(id, self._backends.values()))
            backends: dict[str, Any] = {}
            labels: dict[str, str] = {}
            members: dict[str, tuple[int, ...]] = {}
            for name, group in groups.items():
                try:
                    ranks, own = tuple(dist.get_process_group_ranks(group)), nccl_watchdog.reporting(group)
                except (KeyError, RuntimeError, ValueError):  # it is being made or destroyed
                    known -= {id(group)}
                    continue
                label = _label(name, group)
                labels[name] = label if label not in labels.values() else f"{label} ({name})"
                members[name] = ranks
                backends |= {f"{labels[name]}{'/' * number}": backend for number, backend in enumerate(own)}
            for backend in backends.values():
                if id(backend) not in before:  # whatever torch or the script has chosen: there is one limit
                    nccl_watchdog.set_timeout(backend, self._longest_s)
            self._backends, self._labels, self._members, self._known = backends, labels, members, known

    def _release(self, backends: Mapping[str, Any]) -> None:
        errors, left = nccl_watchdog.abort_all(backends, _ABORT_S)
        for name, error in errors.items():
            _log.info(f"group {self._env.group}: the abort of process group {name}: {error}")
        if left:
            end_rank(
                StartOver(
                    f"rank {self._env.position} of group {self._env.group} ends: the abort of process group "
                    f"{', '.join(left)} has not returned within {_ABORT_S:g} s, and only a new process can use the device"
                )
            )

    # --- which rank ---------------------------------------------------------------------------------------------------

    def answer(self, request: signals.CollectivesRequested) -> None:
        """Publish which collectives this rank has entered, in a thread. Any thread may call it."""
        mine = request.asked.startswith(f"{self._env.position}.")
        if not mine and (request.group, request.incarnation) == (self._env.group, self._env.incarnation):
            VitalThread(self._publish, "megatron_ft-collectives", (request.asked,), failed=self._failed).start()

    def _publish(self, asked: str) -> None:
        report = self._report()
        with contextlib.suppress(StoreError):
            self._store.clone().set(self._key(asked, self._env.position), codec.encode(report))

    def _key(self, asked: str, position: int) -> str:
        return f"calls/{self._env.seat}/{asked}/{position}"

    def _report(self) -> Report:
        self._find_groups()
        found = flight_recorder.calls(flight_recorder.entries(), self._members)
        said = flight_recorder.lines(found, self._labels, _LOGGED)
        _log.info("\n  ".join([f"group {self._env.group}: rank {self._env.position}: the last collectives:", *said]))
        return Report(
            position=self._env.position,
            pid=os.getpid(),
            host=socket.gethostname(),
            host_rank=self._env.host_rank,
            calls=flight_recorder.around(found),
            entered=flight_recorder.entered(found),
            members=self._members,
            labels=self._labels,
            excuse=self._training().excuse,
        )

    def _ask_all(self) -> tuple[Finding | None, Mapping[int, Report]]:
        """Ask all ranks of the group. Return what they wait for, as far as that is known in time, and their reports."""
        size, me = self._env.config.ranks_per_group, self._env.position
        asked = f"{me}.{next(self._asked)}"
        reports = {me: self._report()}
        with contextlib.suppress(StoreError):
            request = signals.CollectivesRequested(self._env.group, self._env.incarnation, asked)
            watcher.announce(self._store, request, by=f"calls {self._env.seat} {asked}")
            until = time.monotonic() + _ANSWER_S
            while len(reports) < size and time.monotonic() < until and not self._lost.wait(_ANSWER_LOOK_S):
                for position in set(range(size)) - reports.keys():
                    if (raw := self._store.get(self._key(asked, position))) is not None:
                        reports[position] = codec.decode(Report, raw)
        return collective_stalls.find(reports, size), reports

    def _tell(self, seen: str, finding: Finding | None, reports: Mapping[int, Report]) -> None:
        """Report the group as lost. The culprit is accused by name, if there is one that has answered.

        ``seen``: what this rank has seen, a noun phrase or a sentence.
        """
        if self._lost.is_set():  # another rank was faster, and this one may not have heard all answers because of it
            return
        env = self._env
        accused, why = reports[env.position], f"reports {seen}" + ("" if finding is None else f"; {finding.why}")
        if finding is not None and len(finding.guilty) == 1 and finding.guilty[0] in reports:
            accused, why = reports[finding.guilty[0]], f"{finding.predicate} ({seen})"
        _log.info(f"group {env.group}: rank {accused.position} {why}")
        said = signals.RankUnresponsive(
            group=env.group,
            position=accused.position,
            pid=accused.pid,
            host=accused.host,
            why=why,
            incarnation=env.incarnation,
            host_rank=accused.host_rank,
        )
        with contextlib.suppress(StoreError):
            announce = lambda: watcher.announce(self._store, said)  # noqa: E731
            patient(announce, patience_s=self._longest_s, interrupted=self._lost.is_set)

    def _failed(self, error: BaseException) -> None:
        """A bug here must not end a rank that trains."""
        _log.warning(f"group {self._env.group}: the watch over process groups has ended: {described(error)}")


def _label(name: str, group: Any) -> str:
    """Return the name of a process group for people."""
    label = group.group_desc
    return {"default_pg": "the world"}.get(label, name if label in ("", "undefined") else label)
