"""The training thread of a rank that is not its group's leader: it carries out orders, in the order they come.

It knows nothing of the protocol. What it decides by itself is to stop waiting for other groups when it hears that the
present epoch is over, and to say so when it is the first to see it.

Failures it assumes: those of ``runtime.rank``. ``Lost`` ends its part: the group is gone with its leader, or any other rank.
"""

from __future__ import annotations

from megatron_ft.core import detector
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.base import StepResult
from megatron_ft.errors import ConfigError, GroupLeft, RunStopped
from megatron_ft.runtime import resume
from megatron_ft.runtime.communicator import Broken
from megatron_ft.runtime.crew import connect_together
from megatron_ft.runtime.interruption import note_patch
from megatron_ft.runtime.rank import Needs, Rank
from megatron_ft.types import Microbatch, View


class Follower:
    """``step`` is the next one the script has to train."""

    def __init__(self, rank: Rank, step: int) -> None:
        self.step = step
        self._rank = rank
        self._dataset: Dataset | None = None
        self._total = 0
        self._said_leaving = False

    def enter(self, total: int, comes_back: bool, origin: resume.Origin | None = None) -> None:
        """The first step is about to begin; of a group that comes back, when it has its seat."""
        self._total = total
        while comes_back and self._obey(refuse="fingerprint") != "enter":
            continue

    def train_step(self, dataset: Dataset) -> StepResult:
        """Raises ``RunStopped``."""
        self._dataset = dataset
        while self._obey(refuse="fingerprint") != "end_step":
            continue
        return self._rank.result

    def finish(self) -> None:
        """Until the run has ended everywhere. Raises ``RunStopped``."""
        while self._obey(refuse="begin") != "end":
            continue

    def leave(self, why: str) -> None:
        """This rank was told that its group leaves; the leader says after which step."""
        if not self._said_leaving:
            self._said_leaving = True
            self._rank.agreement.announce(detector.Dismissed(self._rank.group, why))

    def hear(self, verdict: detector.Verdict) -> None:
        """Watcher thread. Little but what the rank does with it."""
        if isinstance(verdict, detector.Dismissed):
            self._said_leaving = True

    def _obey(self, refuse: str) -> str:
        """Carry out the next order, and return its name. ``refuse``: what the leader cannot want now."""
        rank = self._rank
        rank.pulse.enter("waiting")
        name, fields = rank.inner.next_order()
        if name == refuse:
            does = "goes on at" if name == "begin" else "is done before"
            raise ConfigError(
                f"rank 0 of this group {does} step {self.step}, rank {rank.position} was told that the run has "
                f"{self._total} steps; all ranks must pass the same number to session.steps"
            )
        match name:
            case "begin":
                needs = Needs(*([Microbatch(*raw) for raw in share] for share in fields["needs"]))
                rank.begin(fields["step"], self._dataset, lambda: needs)
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
                rank.saving.take(detector.from_json(fields["order"]), rank.engine)
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
                raise (GroupLeft if fields["left"] else RunStopped)(fields["reason"])
        return name

    def _compute(self, microbatches: list[list[int]], patched: list[bool], epoch: int) -> None:
        microbatch, patch = Microbatch(*microbatches[self._rank.position]), patched[self._rank.position]
        prefetched, _ = self._rank.compute(microbatch, patch)
        if patch:
            where = {"step": microbatch.step, "epoch": epoch, "group": self._rank.group, "position": self._rank.position}
            note_patch(self._rank.history, {microbatch: prefetched}, **where)

    def _connect(self, view: View, step: int) -> None:
        rank = self._rank
        rank.agreement.adopted(view)
        # What was heard of the view stays true however often the leader asks: it has not heard it yet, but it will.
        with rank.timeline.span("recover"):
            connect_together(rank, view, step, lambda: rank.concerned(view) or bool(rank.lost_because))

    @staticmethod
    def _unless_broken(operation) -> None:
        """The leader hears with the answer of all ranks that it did not work, and other groups were told."""
        try:
            operation()
        except Broken:
            return
