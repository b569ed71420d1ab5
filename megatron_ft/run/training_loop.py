"""The steps of a training script at one rank, from the number of them to the last: what is agreed on and put in place before
the first, and what is between two steps.

Failures it assumes: those of ``run.rank_executor``; a rank of the group that is lost ends this one, too. A group that is
lost between two steps does its part of an evaluation or a save no more; another one does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ft.config.rank_env import Audit
from megatron_ft.data import generators
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.data.order import script_seed
from megatron_ft.data.prefetch import Dataset
from megatron_ft.errors import ConfigError
from megatron_ft.run import data_identity
from megatron_ft.run.checkpoint import peer_copies, restore
from megatron_ft.run.engines.port import Engine, StepResult
from megatron_ft.run.evaluation import Evaluation, Sums
from megatron_ft.run.explicit_loop import ExplicitLoop
from megatron_ft.run.final_save import FinalSave
from megatron_ft.run.verdict_handler import VerdictHandler
from megatron_ft.types import given

_log = logging.getLogger(__name__)


class TrainingLoop:
    """The steps of one rank.

    ``engine``: the one that the script has made last. ``datasets``: the packed ones that it has made. ``total``: the number
    of steps, 0 while it is not known. ``entered``: whether the rank is in the run with its engine. ``own``: the loop over
    the microbatches of a step, of a script that has one."""

    def __init__(self, verdicts: VerdictHandler) -> None:
        self.engine: Engine | None = None
        self.datasets: list[PackedDataset] = []
        self.total, self.entered = 0, False
        self.own = ExplicitLoop()
        self.verdicts, self.access = verdicts, verdicts.access
        self.executor, self.role = verdicts.executor, verdicts.role
        self._config = verdicts.access.env.config
        self._dataset: Dataset | None = None
        self._identified = False
        self._logged: dict[str, float | str] = {}

    @property
    def step(self) -> int:
        makes = self.executor.following.makes
        return self.role.step if makes is None else makes

    @property
    def live(self) -> tuple[int, ...]:
        view = self.executor.rank.link.view or self.access.first
        return () if view is None else view.live

    @property
    def is_writer(self) -> bool:
        return self.access.env.position == 0 and self.live[:1] == (self.access.env.group,)

    @property
    def gets_state(self) -> bool:
        return self.access.comes_back or self.access.origin is not None

    def has_own(self, engine: Engine | None) -> bool:
        """Return whether the script computes the losses of ``engine`` in a loop of its own."""
        return getattr(engine, "loss_fn", None) == self.own.loss_fn

    def refuse_within_step(self, call: str) -> None:
        if self.own.within_step:
            raise ConfigError(f"{call} between session.microbatches and session.commit: call it after session.commit()")

    def log(self, values: Mapping[str, Any]) -> None:
        if self.step < 1:
            raise ConfigError("session.log before the first step: values belong to a step, so call it after train_step")
        self._logged |= {str(name): _plain(name, value) for name, value in values.items()}

    def _write_logged(self) -> None:
        """Record what the script has logged since the last step."""
        if self._logged:
            self.role.log(self._logged)
            self._logged = {}

    def steps(self, total: int, dataset: Dataset | None) -> Iterator[int]:
        if not isinstance(total, int) or isinstance(total, bool) or total < 1:
            raise ConfigError(f"session.steps({total!r}): the number of steps must be a whole number >= 1")
        audit = Audit.from_env()
        self.total = total if audit is None else min(total, audit.last + 1)
        self._dataset = dataset
        # A group that comes back knows its first step only after it has entered; what the script loaded is checked
        # before that.
        if self.gets_state and self.engine is not None:
            with self.verdicts.until_lost():
                self._identify(None)
                self._enter(self.engine)
        step = self.role.step
        while step < self.total:
            self.seed_script("steps")
            yield step
            if self.role.step <= step:
                raise ConfigError(
                    f"step {step} was not trained; call session.train_step, or loop over session.microbatches and call "
                    f"session.commit, once in every step"
                )
            step = self.role.step
        self._write_logged()
        self.executor.close()
        with self.verdicts.until_lost():
            self.role.finish()

    def train_step(self, engine: Engine, dataset: Dataset) -> StepResult:
        if self.has_own(engine) and not self.own.within_step:
            raise ConfigError(
                "session.train_step with an engine without a loss function: give session.wrap one, or loop over "
                "session.microbatches"
            )
        self._write_logged()
        with self.verdicts.until_lost():
            if not self._identified:
                self._identify(dataset)
                self._identified = True
            if not self.entered:
                self._enter(engine)
            if self.verdicts.leaving:
                self.role.leave(self.verdicts.leaving)
            result = self.role.train_step(dataset)
        self.seed_script("train_step")
        self.verdicts.committed(result.step)
        self.executor.rank.progress.enter("outside")
        return result

    def enter_early(self, call: str) -> None:
        """Enter the run before the first step, for a ``call``; the data are compared in the first step."""
        if self.entered:
            return
        if self.engine is None or not self.total:
            raise ConfigError(
                f"{call} before session.steps: make the engine, and call it in the loop over session.steps"
            )
        with self.verdicts.until_lost():
            self.executor.identities.agree("run", data_identity.of_run(self._config, self.total))
            self._enter(self.engine)

    def _identify(self, dataset: Dataset | None) -> None:
        """Check that all ranks train for the same steps with the same data; ``dataset`` is None before the first step."""
        only = self.datasets[0] if len(self.datasets) == 1 else None  # one of several may be for evaluation
        known = only if self._dataset is None else self._dataset
        origin, saved = self.access.origin, None
        if origin is not None:
            restore.check(self._config, origin.path, origin.meta)  # first: its error names the setting
            saved = origin.path, origin.meta.get("identity", {})
        identities = self.executor.identities
        identities.agree("run", data_identity.of_run(self._config, self.total))
        identities.agree("data", data_identity.of_data(dataset, known), saved)

    def _enter(self, engine: Engine) -> None:
        self.entered, env, origin = True, self.access.env, self.access.origin
        self.executor.attach(engine, self._await_commit if self.has_own(engine) else None)
        if origin is not None:
            place = env.position, engine, peer_copies.of(env), self._load_registered
            self.executor.state.result = restore.load(origin, self._config, *place)
        self.role.enter(self.total, self.access.comes_back, origin)
        if self._config.groups > 1 and self.is_writer and _accelerate_is_used():
            _log.warning(
                f"accelerator.is_main_process, is_local_main_process and print hold in each of the "
                f"{self._config.groups} groups, because "
                f"a group is Accelerate's world: use session.is_writer, session.log, session.save and session.save_final"
            )

    def _load_registered(self, state: Mapping[str, Any]) -> None:
        """Give the script's objects their states from a checkpoint. A script may register others than the one before."""
        for name in self.executor.registered.load(state):
            what = "is not registered by this script" if name in state else "is not in the checkpoint, and begins anew"
            _log.warning(f"{name!r} {what}: checkpoint {given(self.access.origin).path}")

    def _await_commit(self) -> None:
        self.seed_script("microbatches")
        self.own.await_commit()

    def seed_script(self, after: str) -> None:
        """Seed the generators for the script's code that follows the call ``after``: in every group it draws the same, also
        in one that has not made the steps before."""
        generators.seed(script_seed(self._config.fault_tolerance.seed, self.step, after))


class BetweenSteps:
    """What the groups do together between two steps of ``loop``: they evaluate a dataset, and save a file once."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop, self._executor, self._agreement = loop, loop.executor, loop.access.agreement
        # Of step ``_ended_at``; the store has keys of them.
        self._ended: list[tuple[str, Evaluation | FinalSave]] = []
        self._ended_at = -1

    def evaluate(self, name: str, batch_size: int | None, make: Callable[[int, str], Evaluation]) -> Sums:
        """Take part in the evaluation that ``make`` returns for a size of a batch and a prefix of keys in the store."""
        loop, executor, config = self._loop, self._executor, self._loop.access.env.config
        loop.refuse_within_step("session.evaluate")
        loop.enter_early("session.evaluate")
        batch = config.samples_per_microbatch if batch_size is None else batch_size
        if not isinstance(batch, int) or batch < 1:
            raise ConfigError(f"session.evaluate: batch_size is {batch!r}; it must be a whole number >= 1")
        what = f"evaluate {name}"
        key = f"evaluate/{loop.step}/{name}.{self._number(what)}"
        evaluation = executor.evaluation = make(batch, key)
        self._ended.append((what, evaluation))
        try:
            with loop.verdicts.until_lost():
                total = loop.role.evaluate(loop.verdicts.liveness.lost)
            return total
        finally:
            loop.seed_script(what)
            executor.evaluation = None
            executor.rank.progress.enter("outside")

    def save(self, path: Path, write: Callable[[Path], object]) -> Path:
        with self._loop.verdicts.until_lost():
            self._executor.complete()
        self._begin_save(path.absolute()).save(write)
        return path

    def save_together(self, path: Path, write: Callable[[Path], object]) -> Path:
        self._executor.together = write
        place = path.absolute()
        try:
            with self._loop.verdicts.until_lost():
                self._loop.role.save_together(self._begin_save(place))
        finally:
            self._executor.together = None
        return place

    def _begin_save(self, place: Path) -> FinalSave:
        what, env = f"save {place}", self._loop.access.env
        number = self._loop.step, self._number(what)
        save = FinalSave(self._agreement, place, env.seat, env.position == 0, number, len(self._loop.live))
        self._ended.append((what, save))
        return save

    def _number(self, what: str) -> int:
        """Return how often ``what`` was done since the last step. The store forgets what was done before that step: all
        groups have made it."""
        if self._ended_at != self._loop.step:
            if self._loop.is_writer:
                self._agreement.delete([key for _, ended in self._ended for key in ended.left()])
            self._ended, self._ended_at = [], self._loop.step
        return [done for done, _ in self._ended].count(what)


def _accelerate_is_used() -> bool:
    """Return whether the script has made an ``Accelerator``, and not by way of the Trainer, whose processes know the
    writer."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None)) and "megatron_ft.integrations.hf_trainer" not in sys.modules


def _plain(name: object, value: Any) -> float | str:
    """Return a value of :meth:`Session.log` as a number or text. Raises ``ConfigError`` for another type."""
    if isinstance(value, str | bool | int):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise ConfigError(
            f"session.log: {name!r} is of type {kind}; values are numbers, texts or tensors of one element"
        ) from None
