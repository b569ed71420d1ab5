"""The training thread of a rank that is not its group's leader: it carries out orders in the order of their arrival.

It does not know the protocol. Its own decisions are to stop waiting for other groups when it is told that the present
epoch is over, and to report the end of the epoch if it is the first to see it.

Failures it assumes: those of ``worker.rank_executor``. ``Lost`` ends its part: the group is gone with its leader, or
any other rank.
"""

from __future__ import annotations

from typing import cast

from megatron_ft import errors
from megatron_ft.checkpoint import restore
from megatron_ft.collectives.communicator import Broken
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.core.protocol import signals
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.port import StepResult
from megatron_ft.errors import ConfigError
from megatron_ft.types import Microbatch, View, given
from megatron_ft.worker.group_executor import connect_together
from megatron_ft.worker.rank_executor import Needs, RankExecutor
from megatron_ft.worker.recovery_metrics import note_patch


class GroupFollower:
    """One following rank. ``step`` is the next one the script has to train."""

    def __init__(self, rank: RankExecutor, step: int) -> None:
        self.step = step
        self._rank = rank
        self._dataset: Dataset | None = None
        self._total = 0
        self._said_leaving = False

    def enter(self, total: int, comes_back: bool, origin: restore.Origin | None = None) -> None:
        """Wait for the first step, or in a group that comes back for its seat."""
        self._total = total
        while comes_back and self._obey(refuse="fingerprint") != "enter":
            continue

    def train_step(self, dataset: Dataset) -> StepResult:
        """Carry out orders until the step is committed. Raises ``RunStopped``."""
        self._dataset = dataset
        while self._obey(refuse="fingerprint") != "end_step":
            continue
        return given(self._rank.result)

    def finish(self) -> None:
        """Carry out orders until the run has ended everywhere. Raises ``RunStopped``."""
        while self._obey(refuse="begin") != "end":
            continue

    def leave(self, why: str) -> None:
        """Note that this rank was told that its group leaves; the leader says after which step."""
        if not self._said_leaving:
            self._said_leaving = True
            self._rank.agreement.announce(signals.LeaveRequested(self._rank.group, why))

    def hear(self, verdict: signals.Verdict) -> None:
        """Watcher thread: note a request to leave; the rank handles all other verdicts."""
        if isinstance(verdict, signals.LeaveRequested):
            self._said_leaving = True

    def _obey(self, refuse: str) -> str:
        """Carry out the next order, and return its name. ``refuse``: an order that the leader cannot give now."""
        rank = self._rank
        rank.pulse.enter("waiting")
        name, fields = given(rank.inner).next_order()
        if name == refuse:
            does = "goes on at" if name == "begin" else "is done before"
            raise ConfigError(
                f"rank 0 of this group {does} step {self.step}, rank {rank.position} was told that the run has "
                f"{self._total} steps; all ranks must pass the same number to session.steps"
            )
        match name:
            case "begin":
                own, stack, following = ([Microbatch(*raw) for raw in share] for share in fields["needs"])
                needs = Needs(own=own, stack=stack, following=following)
                rank.begin(fields["step"], given(self._dataset), lambda: needs)
            case "compute":
                if rank.position < len(fields["microbatches"]):
                    rank.pulse.enter("working")
                    self._compute(**fields)
            case "flush":
                rank.flush(lambda: (), lambda microbatch, prefetched: None)
            case "connect":
                self._connect(View.from_json(fields["view"]), fields["step"])
            case "reduce":
                self._unless_broken(lambda: rank.reduce(fields["step"], fields["buckets"], lambda bucket: None))
            case "transfer":
                with rank.timeline.span("recover"):
                    self._unless_broken(rank.transfer)
            case "update":
                rank.pulse.enter("working")
                rank.update(fields["step"], fields["microbatches"])
            case "close":
                rank.close_epoch()
            case "end_step":
                self.step = fields["following"]
                rank.end_step(fields["epoch"])
            case "save":
                rank.saving.take(cast(Saves, signals.from_json(fields["order"])), rank.engine, rank.states)
            case "share_state":
                rank.share_state()
            case "follow":
                rank.following.begin(**fields)
            case "take_state":
                rank.following.take_state()
            case "make_step":
                rank.following.make_step()
            case "enter":
                self.step = fields["step"]
            case "arrive":
                rank.arrive()
            case "fingerprint":
                rank.fingerprint()
            case "stop":
                if fields["nonfinite"] is not None:
                    rank.nonfinite.name(fields["nonfinite"], rank.engine)
                raise getattr(errors, fields["kind"])(fields["reason"])
        return name

    def _compute(self, microbatches: list[list[int]], patched: list[bool], epoch: int) -> None:
        microbatch, patch = Microbatch(*microbatches[self._rank.position]), patched[self._rank.position]
        prefetched, _ = self._rank.compute(microbatch, patch)
        if patch:
            where = {
                "step": microbatch.step,
                "epoch": epoch,
                "group": self._rank.group,
                "position": self._rank.position,
            }
            note_patch(self._rank.history, {microbatch: prefetched}, **where)

    def _connect(self, view: View, step: int) -> None:
        rank = self._rank
        rank.agreement.adopted(view)
        # News of the view stay true for any number of attempts: the leader does not know them yet, but will.
        with rank.timeline.span("recover"):
            connect_together(rank, view, step, lambda: rank.concerned(view) or bool(rank.lost_because))

    @staticmethod
    def _unless_broken(operation) -> None:
        """Ignore ``Broken``: the answer of all ranks tells the leader of the failure, and other groups were told."""
        try:
            operation()
        except Broken:
            return
