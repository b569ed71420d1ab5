"""The operations that all ranks of a group carry out together: the one list of them.

The leader makes an order, tells the other ranks (``run.group_executor``), and runs it itself; they run it when it
arrives (``run.group_follower``). The fields of an order travel as JSON, except those that only the leader has:
functions that give it work or take results, which have a default for all other ranks.

A new operation is one class here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from megatron_ft import codec, errors
from megatron_ft.core.exactness.verification import Check
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.data.prefetch import Dataset
from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives.base import Broken
from megatron_ft.run.engines.port import Listed, Ready, StepResult
from megatron_ft.run.evaluation import Sums
from megatron_ft.run.recovery_metrics import note_patch
from megatron_ft.types import Bucket, Microbatch, View, given

if TYPE_CHECKING:
    from megatron_ft.run.finishing import Discard
    from megatron_ft.run.rank_executor import RankExecutor

_BUILT, _INTERRUPTED, _BROKEN = 2, 1, 0
"""A rank's answers to the order to connect; the worst answer counts."""

Result = TypeVar("Result")


def leaders(default: Any) -> Any:
    """Return a field that does not travel: the leader gives it, and all other ranks have ``default``."""
    return field(default=default, metadata={codec.STAYS: True}, compare=False)


class Needs(NamedTuple):
    """The microbatches of a group: its own in a step, those of the shards it hosts, and its own in the next step if the
    view stays the same."""

    own: Sequence[Microbatch]
    stack: Sequence[Microbatch]
    following: Sequence[Microbatch]


@dataclass(frozen=True)
class Order(ABC, Generic[Result]):
    """One operation of all ranks of a group. ``span``: what the timeline of a rank that follows calls it;
    ``between_groups``: it may raise ``Broken``."""

    span: ClassVar[str | None] = None
    between_groups: ClassVar[bool] = False

    @abstractmethod
    def run(self, executor: RankExecutor) -> Result:
        """Carry it out at one rank. Raises ``Lost`` when another rank of the group is gone."""


# --- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin(Order[None]):
    """Begin a step. ``needs`` is called only where something is loaded ahead; ``dataset`` is each rank's own."""

    step: int
    needs: Callable[[], Needs]
    dataset: Dataset | None = leaders(None)

    def run(self, executor: RankExecutor) -> None:
        if executor.evaluation is not None:
            raise ConfigError(
                f"rank {executor.rank.position} of this group evaluates; all ranks have to call session.evaluate"
            )
        executor.state.boundary(self.step)
        executor.computing.begin(self.step, given(self.dataset), self.needs)

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "needs": codec.encode(self.needs())}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Begin:
        needs = codec.decode(Needs, raw["needs"])
        return cls(raw["step"], lambda: needs)


@dataclass(frozen=True)
class Compute(Order[tuple[bool, float]]):
    """Compute at most one microbatch at each rank, that of the rank's position. Returns whether its samples were in
    memory, and the seconds it took. Does not wait for the other ranks: the reduction collects their results.

    ``patched``: for each whether it is taken over from a lost group; ``parts``: for each the standby part that it is added
    to, or 0; ``digests``: for each whether its digest is asked for; ``epoch`` is recorded.
    """

    microbatches: Sequence[Microbatch]
    patched: Sequence[bool]
    parts: Sequence[int]
    digests: Sequence[bool]
    epoch: int
    ahead: Ready | None = leaders(None)

    def run(self, executor: RankExecutor) -> tuple[bool, float]:
        rank = executor.rank
        if (at := rank.position) >= len(self.microbatches):
            return False, 0.0
        microbatch, patch = self.microbatches[at], self.patched[at]
        rank.progress.enter("working")
        prefetched, seconds = executor.computing.compute(
            microbatch, patch, self.parts[at], self.digests[at], self.ahead
        )
        if patch and rank.position:  # the leader records its own together with the recovery's times
            who = {"epoch": self.epoch, "group": rank.group, "position": rank.position}
            note_patch(rank.history, {microbatch: prefetched}, step=microbatch.step, **who)
        return prefetched, seconds


@dataclass(frozen=True)
class Flush(Order[None]):
    """Compute microbatches jointly (``run.engines.port.JointEngine``). ``listed`` returns those that are due, ``finished``
    is called with each computed one, and with True if its samples were in memory; ``closes`` says whether some are the last
    of the step."""

    listed: Callable[[], Sequence[Listed]] = leaders(lambda: ())
    finished: Callable[[Listed, bool], None] = leaders(lambda listed, prefetched: None)
    closes: Callable[[Sequence[Listed]], bool] = leaders(lambda listed: False)

    def run(self, executor: RankExecutor) -> None:
        executor.computing.flush(self, executor.reducing.ahead_together)


@dataclass(frozen=True)
class Connect(Order[bool]):
    """Build the communicators of ``view``. Returns True if all ranks have, False if a rank was ``interrupted``."""

    span, between_groups = "recover", True
    view: View
    step: int
    interrupted: Callable[[], bool] | None = leaders(None)

    def run(self, executor: RankExecutor) -> bool:
        rank, view, interrupted = executor.rank, self.view, self.interrupted
        if interrupted is None:
            rank.agreement.adopted(view)
            # News of the view stay true for any number of attempts: the leader does not know them yet, but will.
            interrupted = lambda: rank.link.concerned(view) or bool(rank.lost_because)  # noqa: E731
        if rank.inner is None:
            return executor.connect(view, self.step, interrupted)
        try:
            answer = _BUILT if executor.connect(view, self.step, interrupted) else _INTERRUPTED
        except Broken as error:
            rank.link.tell_broken(view.epoch, f"rank {rank.position}: {error}", detail=error.detail)
            answer = _BROKEN
        worst = rank.inner.all_reduce_min(answer)
        if worst == _BROKEN:
            raise Broken(f"a rank of group {rank.group} could not build its communicator of epoch {view.epoch}")
        return worst == _BUILT


class Transfer(Order[None]):
    """Make the transfers of the present view."""

    span, between_groups = "recover", True

    def run(self, executor: RankExecutor) -> None:
        executor.reducing.transfer()


@dataclass(frozen=True)
class Reduce(Order[None]):
    """Reduce buckets, with the standby ``parts`` that the group contributes; ``digests``: the microbatches whose digests it
    sends, in order; ``batches``: those whose batches are compared, if any; ``done`` is called with each final bucket, in
    order."""

    between_groups = True
    step: int
    buckets: Sequence[Bucket]
    parts: Sequence[int] = ()
    digests: Sequence[Microbatch] = ()
    batches: Sequence[Microbatch] = ()
    done: Callable[[Bucket], None] = leaders(lambda bucket: None)

    def run(self, executor: RankExecutor) -> None:
        executor.reducing.reduce(self)


@dataclass(frozen=True)
class Update(Order["StepResult | Discard"]):
    """Update, only after every bucket is final at all ranks: no peer may need the old parameters any more. Returns why the
    sums were discarded instead, if they were. ``checks``: microbatches whose digests are compared, with their groups;
    ``contributors``: groups that have computed a part of the step in which they enter, which may be discarded if they enter
    with another state; ``batches``: whether some ranks have sent digests of batches."""

    step: int
    microbatches: int
    checks: Sequence[Check] = ()
    contributors: tuple[int, ...] = ()
    batches: bool = False

    def run(self, executor: RankExecutor) -> StepResult | Discard:
        executor.rank.progress.enter("working")
        return executor.finishing.update(self)


class CloseEpoch(Order[None]):
    """Close the communicators of the epoch that is over."""

    def run(self, executor: RankExecutor) -> None:
        executor.close_epoch()


@dataclass(frozen=True)
class EndStep(Order[None]):
    """End the step: all ranks return to the user's script, which goes on with step ``following``."""

    epoch: int
    following: int

    def run(self, executor: RankExecutor) -> None:
        executor.finishing.end_step(self.epoch)


# --- the return of a group -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Follow(Order[int]):
    """Ask donors, (group, incarnation), for the state of one step, ``margin`` steps later than is expected to be soon
    enough. Returns the worst answer, as the next two (``run.rejoin.joiner``)."""

    donors: Sequence[tuple[int, int]]
    margin: int
    epoch: int

    def run(self, executor: RankExecutor) -> int:
        return executor.following.begin(self.donors, self.margin, self.epoch)


class TakeState(Order[int]):
    """Wait for the state, and put it in place."""

    def run(self, executor: RankExecutor) -> int:
        return executor.following.take_state()


@dataclass(frozen=True)
class MakeStep(Order[int]):
    """Wait for the donors' next step, and make it."""

    interrupted: Callable[[], bool] = leaders(lambda: False)

    def run(self, executor: RankExecutor) -> int:
        return executor.following.make_step(self.interrupted)


@dataclass(frozen=True)
class Enter(Order[None]):
    """Enter the run with the group's seat: its scripts go on with ``step``."""

    step: int

    def run(self, executor: RankExecutor) -> None:
        pass


class Arrive(Order[None]):
    """Note that the group has reached the step of the others."""

    def run(self, executor: RankExecutor) -> None:
        executor.computing.arrive(given(executor.following.receiver).held.hyperparameters)
        executor.following.end()


# --- the beginning and the end ---------------------------------------------------------------------------------------


class ShareState(Order[None]):
    """Before the first step: start all ranks from the leader's model."""

    def run(self, executor: RankExecutor) -> None:
        if executor.rank.inner is not None:
            executor.state.share()


@dataclass(frozen=True)
class Save(Order[None]):
    """Copy each rank's share of the state, and write it during the next steps."""

    order: Saves

    def run(self, executor: RankExecutor) -> None:
        executor.complete()
        executor.saving.take(self.order, executor.engine, executor.guard.states)


class AwaitRest(Order[None]):
    """Wait for what lost donors have sent."""

    def run(self, executor: RankExecutor) -> None:
        executor.following.await_rest()


@dataclass(frozen=True)
class SaveAlone(Order[list[dict[str, Any]]]):
    """Save the state that step ``at`` starts from, which this group holds as one that follows, without any other group.
    Returns what each rank says of its part, by position, once all have written theirs."""

    at: int
    attempt: str

    def run(self, executor: RankExecutor) -> list[dict[str, Any]]:
        rank, held = executor.rank, executor.following.held
        if held is None or held.step != self.at:
            said: dict[str, Any] = {"step": held and held.step, "error": "it holds no complete state"}
        else:
            # The script may have set its own meanwhile, for a later step.
            executor.engine.hyperparameters.write(held.hyperparameters)
            executor.registered.load(held.registered)
            executor.complete()
            rank.progress.enter("outside")  # as long as a disk takes
            said = executor.saving.write_alone(self.at, self.attempt, executor.engine)
            rank.progress.advance()
            rank.progress.enter("waiting")
        return [said] if rank.inner is None else rank.inner.gather(said)


@dataclass(frozen=True)
class Evaluate(Order[Sums]):
    """Evaluate batches, each given by the numbers of its first sample and of the one after its last. All ranks compute
    them, because a model may be spread over all ranks; the result is the leader's."""

    batches: Sequence[tuple[int, int]]

    def run(self, executor: RankExecutor) -> Sums:
        rank = executor.rank
        if (evaluation := executor.evaluation) is None:
            raise ConfigError("rank 0 of this group evaluates; all ranks have to call session.evaluate")
        rank.progress.enter("outside")  # the script's own code: only outside_timeout_s ends it
        sums = rank.inside(lambda: evaluation.compute([range(first, end) for first, end in self.batches]))
        rank.progress.advance()
        rank.progress.enter("waiting")
        return sums


@dataclass(frozen=True)
class EndEvaluation(Order[None]):
    """Return the sums over all samples to the scripts."""

    total: Sums

    def run(self, executor: RankExecutor) -> None:
        executor.evaluation = None


@dataclass(frozen=True)
class WriteTogether(Order[None]):
    """Let all ranks write what the script saves together, to the same temporary path."""

    path: str

    def run(self, executor: RankExecutor) -> None:
        rank = executor.rank
        if (write := executor.together) is None:
            raise ConfigError("rank 0 of this group saves; all ranks have to call session.save_together")
        rank.progress.enter("outside")  # the script's own code: only outside_timeout_s ends it
        rank.inside(lambda: write(Path(self.path)))
        rank.progress.advance()
        rank.progress.enter("waiting")


class EndTogether(Order[None]):
    """Return to the scripts: what they save together is saved."""

    def run(self, executor: RankExecutor) -> None:
        pass


class Fingerprint(Order[dict[str, Any]]):
    """Compare and describe the group's parameters after the last step."""

    def run(self, executor: RankExecutor) -> dict[str, Any]:
        executor.complete()
        return executor.state.fingerprint()


class End(Order[None]):
    """Return from the run, which has ended everywhere."""

    def run(self, executor: RankExecutor) -> None:
        pass


@dataclass(frozen=True)
class Stop(Order[None]):
    """Stop the group: all ranks but the leader, which has the reason, raise the error of that name (``errors``).

    ``nonfinite``: the step whose gradient may have been this group's, if that is the reason.
    """

    reason: str
    kind: str = errors.RunStopped.__name__
    nonfinite: int | None = None

    def run(self, executor: RankExecutor) -> None:
        if self.nonfinite is not None:
            executor.guard.nonfinite.name(self.nonfinite, executor.engine)
        if executor.rank.position:
            raise getattr(errors, self.kind)(self.reason)


_ORDERS: dict[str, type[Order[Any]]] = {kind.__name__: kind for kind in Order.__subclasses__()}


def named(name: str, raw: dict[str, Any]) -> Order[Any]:
    """Return the order with this name and these fields."""
    return codec.decode(_ORDERS[name], raw)
