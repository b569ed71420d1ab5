"""The end of a step at one rank: whether its sums may be used, and then the update. All groups, and all ranks of a group,
decide alike.

Failures it assumes: those of ``run.rank``. Another group may have computed wrongly, or have another state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_ft.core.detection import state_divergence
from megatron_ft.core.exactness import verification
from megatron_ft.core.exactness.verification import Check
from megatron_ft.errors import EngineError, InvariantBroken, StartOver
from megatron_ft.run.computing import Computing
from megatron_ft.run.engines.port import Miscount, StepResult
from megatron_ft.run.orders import Update
from megatron_ft.run.rank_state import RankState
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.types import given


class Discard(NamedTuple):
    """Why the sums of a step must not be used: a gradient was too large for the ``grid``, ``digests`` differ, there was a
    ``corruption``, or a group that has come back contributed with another ``state`` or another ``batch``.
    ``guilty``: group -> the microbatch that it computed wrongly, None if only another rank of this group knows it, or all;
    ``doubtful``: microbatches whose digests differ."""

    why: str
    guilty: Mapping[int, str | None]
    doubtful: tuple[str, ...]


class Finishing:
    """The job to commit steps. ``verified``: microbatch -> group -> digest, of the last step.
    ``await_commit``: returns when a script with a loop of its own has committed the step."""

    def __init__(
        self, computing: Computing, state: RankState, guard: StateGuard, await_commit: Callable[[], None] | None
    ) -> None:
        self.verified: dict[str, dict[str, int]] = {}
        self._rank, self._engine = computing.rank, computing.engine
        self._computing, self._state, self._guard, self._await_commit = computing, state, guard, await_commit

    def update(self, order: Update) -> StepResult | Discard:
        """Commit the step here; it must contain exactly the order's microbatches. Its sums may have to be discarded, in all
        groups alike; the step is then begun again. Raises ``StartOver`` where this group's state, batch or gradient was
        wrong, ``InvariantBroken`` where it is unknown whose was."""
        rank, step, microbatches = self._rank, order.step, order.microbatches
        view = given(rank.link.view)
        self._state.settle(state=True)
        if order.batches and (wrong := self._union(self._computing.batches.compare(step, view))):
            if rank.group in wrong:
                raise StartOver(f"group {rank.group} leaves: the batch of one of its other ranks is not the right one")
            return self._discard("batch", wrong)
        wrong = set(self._guard.compare(step, view)) & set(order.contributors)
        if order.contributors and (wrong := self._union(wrong)):
            return self._discard("state", wrong)
        if rank.env.config.exact_bits and (discard := self._judge(step, microbatches, order.checks)):
            return discard
        if self._await_commit is not None:
            self._commit_by_script(self._await_commit)
        with rank.timeline.span("update"):
            try:
                result = rank.inside(
                    lambda: self._engine.update(step, microbatches, lambda point: rank.points.reach(point, step))
                )
            except Miscount as error:  # no group may go on with such a sum
                self._guard.halt(step, str(error))
        self._state.commit(result)
        self._computing.note_digests()
        rank.progress.advance()
        return result

    def _discard(self, why: str, wrong: set[int]) -> Discard:
        self._computing.clear()
        return Discard(why, dict.fromkeys(sorted(wrong)), ())

    def _union(self, groups: set[int]) -> set[int]:
        """Return the groups that any rank of this group names."""
        inner = self._rank.inner
        return groups if inner is None else set().union(*inner.gather(sorted(groups)))

    def _commit_by_script(self, await_commit: Callable[[], None]) -> None:
        """Wait for the script's commit. Raises ``EngineError`` if it has changed gradients before, which are summed
        already."""
        changes = self._versions()
        self._rank.progress.enter("outside")
        await_commit()
        self._rank.progress.enter("working")
        if changes != self._versions():
            raise EngineError(
                "the script has changed gradients between its last session.backward and session.commit (clip_grad_norm_, "
                "zero_grad?): they are summed already, so it has no effect. gradient_clipping in the config clips the "
                "norm; any other "
                "change belongs into optimizer.register_step_pre_hook, where .grad has the gradients of the step"
            )

    def _versions(self) -> list[int]:
        return [self._engine.local(bucket)._version for bucket in range(self._engine.num_buckets)]

    def _judge(self, step: int, microbatches: int, checks: Sequence[Check]) -> Discard | None:
        """Return why the sums must not be used; None: they can be used. All ranks of the group decide the same."""
        group, config, inner = self._rank.group, self._rank.env.config, self._rank.inner
        try:
            too_large = self._engine.must_discard(microbatches)
        except InvariantBroken as error:
            self._guard.halt(step, f"step {step}: {error}")
        digests = self._guard.slots.digests() if checks else ({}, {})
        found = verification.verdict(checks, *digests)
        self.verified = verification.by_microbatch(checks, digests[0])
        said = torch.zeros(3 + config.max_groups, dtype=torch.int64)
        said[0], said[1], said[2] = too_large, bool(found.doubtful), found.tied is not None
        said[[3 + group for group in found.guilty]] = 1
        if inner is not None:
            inner.sum(said)
        large, doubtful, tied, *guilty = said.tolist()
        accused = [group for group, flag in enumerate(guilty) if flag]
        if tied:
            which = "" if found.tied is None else f" {found.tied[0]} on {state_divergence.words(found.tied[1])}"
            self._guard.halt(
                step,
                f"the gradients of microbatch{which} differ in step {step}, and most groups agree with none: do all hosts "
                f"have the same hardware and libraries, and is the model deterministic (docs/exactness.md)?",
            )
        if group in accused:
            microbatch = found.guilty.get(group)
            which = "a microbatch" if microbatch is None else f"microbatch {microbatch}"
            raise StartOver(
                f"group {group} leaves: its gradient of {which} in step {step} is not that of the other groups. It "
                f"takes their state; if this happens again, take the host out (docs/exactness.md)"
            )
        if not (large or doubtful or accused):
            return None
        self._guard.nonfinite.name(step, self._engine)  # the next attempt may not show it any more
        again = bool(doubtful or accused)
        if not again:
            self._engine.discard(microbatches)
        self._computing.clear(earlier=self._computing.digests if again else {})
        why = "corruption" if accused else "digests" if doubtful else "grid"
        blamed = {group: None if group not in found.guilty else str(found.guilty[group]) for group in accused}
        return Discard(why, blamed, tuple(map(str, found.doubtful)))

    def end_step(self, epoch: int) -> None:
        """End a step that is committed and recorded. Raises ``RunStopped`` when the run must not go on after it."""
        result = given(self._state.result)
        self._rank.end_step(result.step, epoch)
        self._guard.nonfinite.check(result, self._engine)
