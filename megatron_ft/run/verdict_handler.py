"""Where a rank hears what has happened: verdicts, claims, the loss of its control store, SIGTERM.

The watcher's thread passes each verdict to the rank, which unblocks the training thread at once, and to the leader, which
decides.

Failures it assumes: those that the verdicts are about.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import GroupFailed
from megatron_ft.errors import StoreError
from megatron_ft.run import progress_counters
from megatron_ft.run.collectives.intra_group import Lost
from megatron_ft.run.collectives.user_process_groups import UserProcessGroups
from megatron_ft.run.engine_maker import EngineMaker
from megatron_ft.run.group_follower import GroupFollower
from megatron_ft.run.group_leader import GroupLeader
from megatron_ft.run.peer_lost import LivenessTracker, wait_for_return
from megatron_ft.run.rank_executor import RankExecutor
from megatron_ft.run.run_access import RunAccess
from megatron_ft.run.store import Fenced
from megatron_ft.run.store.claim_log import TOLD
from megatron_ft.run.store.watcher import Watcher

_log = logging.getLogger(__name__)


class VerdictHandler:
    """One rank's. ``role``: its part in its group. ``leaving``: why its group leaves after the present step, or "";
    ``is_told_to_stop``: whether the run is; ``liveness``: the groups that may still be alive."""

    def __init__(
        self, access: RunAccess, executor: RankExecutor, role: GroupLeader | GroupFollower, maker: EngineMaker
    ) -> None:
        self.leaving, self.is_told_to_stop = "", False
        self.liveness = LivenessTracker(access.env.config.groups)
        self.access, self.executor, self.role, self._maker = access, executor, role, maker
        self._rank, self._store_away = executor.rank, False
        self._process_groups = UserProcessGroups(access.env, access.store.clone(), self._rank.progress.training)

    def start(self, listens: bool) -> None:
        """Begin to hear of claims, and if it ``listens`` of verdicts and of SIGTERM."""
        access = self.access
        if listens:
            said = self.on_signal, self.store_is, self.store_is, access.agreement.restore
            Watcher(access.store.clone(), *said).start()
        if access.claimant is not None:
            told = Path(os.environ[progress_counters.VARIABLE]).with_name(TOLD)
            access.claimant.log.follow(told, self._claims_changed)
        if listens and threading.current_thread() is threading.main_thread():  # else no group would take the work over
            signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))
        if self._rank.size > 1:
            self._process_groups.start()

    def leave(self, why: str) -> None:
        """Let this group leave after the present step; any thread, and a signal handler. The first reason counts."""
        self.leaving = self.leaving or why
        if isinstance(self.role, GroupLeader):
            self.role.leave(why)

    def _claims_changed(self) -> None:
        """Stop this group if a claim leaves it out; its ranks then need not wait for the other groups."""
        try:
            self.access.agreement.check()
        except Fenced as error:
            _log.info(f"{error}; this group stops")
            self._rank.link.abort()
            if isinstance(self.role, GroupLeader):
                self.role.claims_changed()

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Watcher thread: unblock the training thread at once, and pass the verdict to it."""
        rank = self._rank
        match verdict:
            case signals.LeaveRequested(group=rank.group, why=why) if not self.leaving:
                self.role.on_signal(verdict)
                self.leaving = why
                _log.info(f"group {rank.group} is asked to leave: {why}")
            case signals.LeaveRequested() | signals.HostAssigned() | signals.RestartRefused():
                pass  # of another group, or only for agents
            case Saves() | Stops() | signals.ViewAgreed() | signals.RunFinished():  # steps do not wait for these
                self.is_told_to_stop |= isinstance(verdict, Stops)
                self.role.on_signal(verdict)
            case signals.ChecksumsRequested():
                self.executor.publish_checksums(verdict)
            case signals.CollectivesRequested():
                self._process_groups.answer(verdict)
            case _:
                self.liveness.on_signal(verdict)
                if (
                    isinstance(verdict, GroupFailed)
                    and (verdict.group == rank.group and verdict.incarnation >= rank.env.incarnation)
                    and rank.size > 1
                ):
                    rank.lose(verdict.reason)
                    self._process_groups.abort()
                    self._maker.cut()
                self.role.on_signal(verdict)  # first: a training thread that is unblocked finds the reason there
                self.executor.on_signal(verdict)

    def store_is(self, error: StoreError | None = None) -> None:
        """Watcher thread: the control store is away, or without an ``error`` there again."""
        self._store_away = error is not None
        news = f"{error}; a recovery waits for one" if self._store_away else "the control store answers again"
        _log.info(f"group {self._rank.group}: {news}")

    def committed(self, step: int) -> None:
        """Only a step that is committed after the store went away shows that training goes on without it."""
        if self._store_away:
            self._store_away = False
            _log.info(f"group {self._rank.group}: step {step} was committed without the control store")

    @contextmanager
    def until_lost(self) -> Iterator[None]:
        """Convert :class:`Lost`: when another rank of this group is gone, this rank waits for the group's return."""
        try:
            yield
        except Lost as lost:
            why = str(lost)
        else:
            return
        wait_for_return(self.executor, self.access.store, self.liveness, why, lambda: self.leaving)
