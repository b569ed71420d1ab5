"""The computations of one rank: forward and backward passes, which its engine adds to the local gradients.

Failures it assumes: those of ``run.rank``; the script's code may raise anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from megatron_ft.config.rank_env import Audit
from megatron_ft.data.order import microbatch_seed
from megatron_ft.data.prefetch import Dataset, Prefetcher
from megatron_ft.run.batch_check import BatchCheck
from megatron_ft.run.engines.hyperparameters import Values
from megatron_ft.run.engines.port import OWN, Engine, JointEngine, Listed, Ready
from megatron_ft.run.injection_points import Corruptible
from megatron_ft.run.joint_compute import FirstMicrobatch, JointWork
from megatron_ft.run.orders import Flush, Needs
from megatron_ft.run.rank import Rank
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.types import Microbatch, given


class Computing:
    """The job to compute microbatches.

    ``joint``: the engine, if the group's ranks compute together. ``step``: the present one. ``digests``: those of the
    gradients of its present attempt; ``earlier``: of the attempt before, if that was computed wrongly. ``unchecked``:
    whether the gradient of a microbatch is still to be compared with the slope of its loss.
    """

    def __init__(
        self, rank: Rank, engine: Engine, prefetcher: Prefetcher, registered: Registered, guard: StateGuard
    ) -> None:
        self.engine = engine
        self.joint = cast(JointEngine, engine) if hasattr(engine, "flush") else None
        self.step = -1
        self.digests: dict[Microbatch, int] = {}
        self.earlier: Mapping[Microbatch, int] = {}
        self.unchecked = True
        self.rank, self._prefetcher, self._registered, self._guard = rank, prefetcher, registered, guard
        load = self.load if getattr(engine, "needs_samples", True) else None
        self.batches = BatchCheck(rank, guard, load)
        self._contributed: set[int] = set()  # standby parts of the present attempt
        audit = Audit.from_env()
        self._audited = -1 if audit is None else audit.digests  # the step of which all digests are recorded

    def begin(self, step: int, dataset: Dataset, needs: Callable[[], Needs]) -> None:
        """Begin a step."""
        self.batches.begin()
        short, self.step = self.rank.begin_step(step), step
        self.clear()
        if short:
            self._prefetcher.rest(dataset, step)
        else:
            self._prefetcher.begin(dataset, *map(self._part, needs()))
        self.rank.points.reach("begin", step)

    def arrive(self, hyperparameters: Values | None) -> None:
        """Enter the step that has begun, after following other groups: clear the gradients again, and begin with the
        hyperparameters with which the donors have begun it. The script has set its own before the last steps were
        followed."""
        self.engine.hyperparameters.write(hyperparameters)
        self.unchecked = False  # its donors have checked theirs, and would wait
        self._prefetcher.drop()  # the state may have brought another size of the batch
        self.clear()

    def clear(self, earlier: Mapping[Microbatch, int] = {}) -> None:
        """Clear all that was computed in the present step. ``earlier``: its digests, if they are to be sent again."""
        self.engine.begin_step(self.rank.env.config.shards * self._registered.sizes.at(self.step))
        self._contributed.clear()
        self.digests, self.earlier = {}, earlier
        self._guard.say(self.step, self.engine.hyperparameters)

    def _part(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return those of ``microbatches`` that this rank loads."""
        if self.joint is not None:
            return microbatches if self.joint.needs_samples else ()
        return microbatches[self.rank.position :: self.rank.size]

    def flush(self, flush: Flush, ready: Callable[[], Ready | None]) -> None:
        """Compute the listed microbatches jointly with the group's other ranks. ``ready`` returns the function to call with
        each bucket that is complete before the last one is computed."""
        if self.unchecked and self._checks_by_flushes:
            self._check_by_flushes(flush.listed)
        engine, work = given(self.joint), JointWork(self, flush, ready)
        self.rank.inside(lambda: engine.flush(given(self.rank.lines), work))

    @property
    def _checks_by_flushes(self) -> bool:
        return self.joint is not None and self.joint.checks_by_flushes

    def _check_by_flushes(self, listed: Callable[[], Sequence[Listed]]) -> None:
        """Compare the gradient of the first microbatch with the slope of its loss."""
        engine, work = given(self.joint), FirstMicrobatch(self, listed)
        flush = partial(engine.flush, given(self.rank.lines), work)
        self.unchecked = not self.rank.inside(lambda: engine.check_by_flushes(flush, self._sizes()))
        for microbatch, batch in work.batches.items():
            self._prefetcher.put_back(microbatch, batch)
        self.clear()

    def samples(self, microbatch: Microbatch) -> tuple[Any, bool]:
        """Return the samples of a microbatch, and True if they were in memory."""
        found = self._prefetcher.get(microbatch)
        self.batches.loaded(microbatch, found[0], self.rank.link.view)
        return found

    def seed(self, microbatch: Microbatch) -> int:
        """Return the seed of all random choices for ``microbatch``."""
        return microbatch_seed(self.rank.env.config.fault_tolerance.seed, microbatch)

    def load(self, microbatch: Microbatch) -> Any:
        """Return the samples of a microbatch that is not computed for the step, for a comparison."""
        with self.rank.blame(microbatch):
            return self._prefetcher.get(microbatch)[0]

    def compute(
        self, microbatch: Microbatch, patch: bool, part: int = OWN, digest: bool = False, ahead: Ready | None = None
    ) -> tuple[bool, float]:
        """Run forward and backward of one. Return True if its samples were in memory, and the seconds it took.

        ``part``: the standby part that it is added to; ``digest``: the digest of its gradient is asked for."""
        rank, config, step = self.rank, self.rank.env.config, microbatch.step
        if patch:
            rank.points.reach("patch", step)
        started = time.monotonic()
        kind = "patch" if patch else "standby" if part else "compute"
        with rank.timeline.span(kind), rank.blame(microbatch):
            batch, prefetched = self.samples(microbatch)
            seed = self.seed(microbatch)
            self.engine.add_to(part)
            rank.points.corrupt_activation(step, cast(Corruptible, self.engine))
            digest = digest or step == self._audited
            keep = digest or (part == OWN and rank.points.corrupts(step))
            self.engine.compute(microbatch, batch, seed, lambda point: rank.points.reach(point, step), ahead, keep)
            if part == OWN:  # what is corrupted is contributed
                rank.points.corrupt(step, cast(Corruptible, self.engine))
            self.collect(microbatch, digest)
            groups = config.groups if rank.link.view is None else len(rank.link.view.live)
            self._guard.nonfinite.computed(microbatch, self.engine, groups > config.fault_tolerance.min_groups)
        rank.progress.advance()
        return prefetched, time.monotonic() - started

    def collect(self, microbatch: Microbatch, digest: bool) -> None:
        """Take the gradient of a microbatch after its backward pass, and keep its digest if that is asked for."""
        digest = digest or microbatch.step == self._audited
        found = self.engine.collect(digest)
        if digest:
            self.digests[microbatch] = found
        if self.unchecked and not self._checks_by_flushes:
            self.unchecked = False
            self.engine.check_gradient(self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Return the numbers by which a library might divide gradients."""
        config = self.rank.env.config
        each = self._registered.sizes.at(self.step)
        return {
            "inner_shards": config.inner_shards,
            "ranks of a group": self.rank.size,
            "gradient_accumulation_steps": each,
            "groups": config.shards,
            "microbatches of a step": config.shards * each,
        }

    def contribute(self, parts: Iterable[int]) -> None:
        """Add standby parts to the local gradients, each once in an attempt."""
        for part in (part for part in parts if part not in self._contributed):
            self.engine.contribute(part)
            self._contributed.add(part)

    def note_digests(self) -> None:
        """Record the digests of the step, if it is the audited one."""
        if self.step == self._audited:
            said = {str(microbatch): digest for microbatch, digest in self.digests.items()}
            self.rank.history.note("digests", step=self.step, position=self.rank.position, digests=said)
