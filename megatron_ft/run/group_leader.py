"""The training thread of position 0: it runs the loop of its group (``core.protocol.shell``) between the calls of the
script.

The watcher's thread only puts verdicts into a queue and lets the rank abort the communicators they concern. The loop reads
the queue between any two actions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from megatron_ft.config.schema import job_of, placement_of
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.protocol.shell import Shell, carry_out
from megatron_ft.data.prefetch import Dataset
from megatron_ft.errors import GroupLeft
from megatron_ft.record import run_state
from megatron_ft.run import orders
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.collectives.intra_group import Lost
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.evaluation import Sums
from megatron_ft.run.final_save import FinalSave
from megatron_ft.run.group_executor import GroupExecutor
from megatron_ft.run.leader_ranks import LeaderRanks
from megatron_ft.run.leader_store import LeaderStore
from megatron_ft.run.rank_executor import RankExecutor
from megatron_ft.run.rejoin.joiner import RejoinCoordinator
from megatron_ft.run.rejoin.last_save import LastSave
from megatron_ft.run.store import Fenced
from megatron_ft.types import GroupId, View, given


class GroupLeader:
    """One group's part in the run. ``first_view`` is the run's first view; None for a group that comes back."""

    def __init__(self, local: RankExecutor, first_view: View | None) -> None:
        rank = local.rank
        self.group = rank.group
        self._rank, self._local, self._executor = rank, local, GroupExecutor(local)
        self._config, self._agreement, self._history = rank.env.config, rank.agreement, rank.history
        self._placement, self._first_view = placement_of(self._config), first_view
        self._store = LeaderStore(rank)
        self._ranks = LeaderRanks(self._executor, self._placement, self._store, first_view)
        self._shell: Shell | None = None  # from :meth:`enter` on
        if first_view is not None:
            self._agreement.adopted(first_view)

    @property
    def step(self) -> int:
        """The next step that the script has to train; a group that comes back knows it once it has its seat."""
        if self._shell is not None:
            return self._shell.state.step
        return 0 if self._first_view is None else self._first_view.step

    def enter(self, total: int, comes_back: bool, origin: restore.Origin | None = None) -> None:
        """Begin the first step of ``total``, or return to the run as a group that comes back.

        The engine is attached, and has the state of ``origin``, if there is one."""
        begins_at = -1 if comes_back else given(self._first_view).step
        buckets = self._local.reducing.gradients.num_buckets
        job = job_of(self._config, self._placement, buckets=buckets, steps=total, first=begins_at)
        if comes_back:
            self._come_back(job)
            return
        first = given(self._first_view)
        self._begin_with(first, job, origin)
        self._history.record("begin", steps=total, microbatches=self._config.microbatches, buckets=job.buckets)
        self._ranks.record.adopt(first)
        if origin is None:
            # A group that is behind gets another state, unless all that have it die.
            self._executor.carry_out(orders.ShareState())

    def _begin_with(self, view: View, job: machine.Job, origin: restore.Origin | None = None) -> None:
        shell = Shell(machine.start(self.group, job, view), self._ranks, self._store, self._store)
        self._shell = self._ranks.shell = self._store.shell = shell
        self._history.set_writer(self.group == min(view.live))
        self._local.state.carry = self._ranks.carried
        self._local.state.epoch = lambda: shell.state.view.epoch if shell.state.synced else None
        self._ranks.checkpoints.begin(view, origin)

    def _come_back(self, job: machine.Job) -> None:
        """Follow other groups until this group has its seat."""
        self._ranks.warm = time.monotonic()
        self._rank.progress.enter("waiting")
        self._rank.points.reach("warm", 0)
        last_save = self._ranks.last_save = LastSave(self._executor, self._rank.env, job.steps)
        view = RejoinCoordinator(self._local.following, self._executor, self._hear_before, last_save.save).seat()
        self._agreement.adopted(view)
        self._ranks.record.view = view
        self._begin_with(view, job)
        self._ranks.record.adopt(view)
        self._local.prepare(view, view.step)
        self._executor.carry_out(orders.Enter(view.step))

    def _hear_before(self) -> None:
        """Keep verdicts that arrive before this group has its seat until it has one."""
        if self._store.leaving:
            raise GroupLeft(f"group {self.group} has left before it was back: {self._store.leaving}")
        if self._rank.lost_because:
            raise Lost(self._rank.lost_because)

    def train_step(self, dataset: Dataset) -> StepResult:
        """Compute, reduce and commit one step, whatever dies meanwhile. Raises ``RunStopped``, ``StoreError``."""
        with self._until_fenced() as shell:
            started, step, self._ranks.dataset = time.monotonic(), shell.state.step, dataset
            carry_out(shell.train_step())
            return self._ranks.record_step(step, time.monotonic() - started)

    def log(self, values: Mapping[str, float | str]) -> None:
        """Record what the script has logged since the last step."""
        self._ranks.record.log(self.step - 1, values)

    def evaluate(self, lost: Callable[[View], Collection[GroupId]]) -> Sums:
        """Take part in the rank's evaluation. ``lost`` returns the members of a view that are known to be lost."""
        with self._until_fenced() as shell:
            self._rank.progress.enter("waiting")
            carry_out(shell.share_model())
            view = shell.state.view
            # A group that has just got its seat has no state yet. The others had this evaluation before they let it in.
            mine = self._evaluate if shell.state.synced else None
            evaluation = given(self._local.evaluation)
            total = evaluation.share(self._agreement, self.group, view.live, lambda: lost(view), mine)
        self._executor.carry_out(orders.EndEvaluation(total))
        return total

    def _evaluate(self, batches: Sequence[range]) -> Sums:
        return self._executor.carry_out(orders.Evaluate([(one.start, one.stop) for one in batches]))

    def save_together(self, save: FinalSave) -> None:
        """Take part in a save whose writer is a whole group."""
        try:
            save.save(lambda path: self._executor.carry_out(orders.WriteTogether(str(path))))
        finally:
            self._executor.carry_out(orders.EndTogether())

    def end(self, told: Callable[[], bool]) -> None:
        """Let the last step that is committed be the last of the run. ``told``: whether the run was told to stop; other
        groups may hear that first."""
        shell, goes_on = given(self._shell), self._config.fault_tolerance.checkpoint.resumable
        self._ranks.early = partial(run_state.early_end, shell.state.job.steps, told, goes_on)
        shell.end()

    def finish(self) -> None:
        """Stay reachable until every live group is done; the lowest of them completes the run record."""
        with self._until_fenced() as shell:
            self._rank.progress.enter("ended")
            self._agreement.done(self._rank.env.incarnation, self._executor.carry_out(orders.Fingerprint()))
            self._rank.points.reach("finish", shell.state.step)
            # After this time the epoch ends, and groups that are not done are left out.
            carry_out(shell.finish(self._config.fault_tolerance.detector.longest_collective_s))
            self._executor.carry_out(orders.End())
            self._ranks.checkpoints.close()

    @contextmanager
    def _until_fenced(self) -> Iterator[Shell]:
        """Stop the group's other ranks when a claim leaves this group out, which may happen at any time."""
        try:
            yield given(self._shell)
        except Fenced as error:
            self._ranks.stop_all(str(error))

    def leave(self, why: str) -> None:
        """Leave in order after the present step. Callable from any thread and from a signal handler."""
        self._store.leaving = self._store.leaving or why

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Watcher thread: queue a verdict for the training thread."""
        if isinstance(verdict, Saves | Stops):
            self._ranks.checkpoints.on_signal(verdict)
        elif isinstance(verdict, signals.LeaveRequested):
            self.leave(verdict.why)
        else:
            self._store.put(verdict)

    def claims_changed(self) -> None:
        """Make the training thread check now if this group is left out. Callable from any thread."""
        self._store.claims_changed()
