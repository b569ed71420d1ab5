"""A Lightning strategy whose steps are made by a session.

Lightning's loop runs as it is, with one turn for each step of the session: ``training_step`` of the strategy makes the whole
step, and calls that of the module for each microbatch. Lightning's ``backward`` and ``optimizer.step`` of that turn do
nothing. Groups have the same epoch, ``batch_idx`` and ``global_step``, also one that comes back.

Failures it assumes: those of ``Session.train_step``. What Lightning would do in each group, or only in one, is refused where
the loss of a group would change the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives.device_copies import own_device
from megatron_ft.run.session import Session
from megatron_ft.types import given
from megatron_ft.utils import extras

with extras.needed():
    from lightning.pytorch import LightningModule, callbacks
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import SingleDeviceStrategy

_CALLBACKS = {
    callbacks.EarlyStopping: "a run has a fixed number of steps; remove it, and set max_steps",
    callbacks.Timer: "a run has a fixed number of steps; leave max_time out, and set max_steps",
    callbacks.GradientAccumulationScheduler: "set session.microbatches_per_group in a loop of your own",
    callbacks.StochasticWeightAveraging: "a group that comes back has no average; see session.register in docs/script.md",
    callbacks.WeightAveraging: "a group that comes back has no average; see session.register in docs/script.md",
}
"""What a run cannot have, with the remedy."""
_HOOKS = {
    "configure_gradient_clipping": "give optimizer.register_step_pre_hook another kind of clipping",
    "lr_scheduler_step": "give the optimizer a scheduler with the interval step",
    "optimizer_step": "give the optimizer a scheduler, or use optimizer.register_step_pre_hook",
}
"""Methods of a module that the session's step does not call, or not in a group that comes back; and the remedy."""


class FaultTolerantStrategy(SingleDeviceStrategy):
    """A strategy for one rank of a run.

        strategy = FaultTolerantStrategy(session)
        trainer = L.Trainer(strategy=strategy, max_epochs=3, enable_checkpointing=False)
        trainer.fit(module, strategy.prepare(dataloader))

    The module's ``training_step`` returns the mean loss of a microbatch, or a dict with it as ``"loss"``; with
    ``loss_reduction`` ``"token"`` a dict of the sum ``"loss"`` and the number ``"tokens"``. The number of microbatches,
    clipping and checkpoints come from the run's config. Each group validates all samples by itself, and all get the same
    values.
    The hooks ``on_before_optimizer_step``, ``on_before_backward`` and ``on_after_backward`` are not called.

    Args:
        session: what ``megatron_ft.init()`` returned.
        device: of the model. Default: this rank's GPU, or the CPU where there is none.
        options: as for ``SingleDeviceStrategy``.
    """

    strategy_name = "megatron_ft"
    lr_scheduler_configs: list[Any]

    def __init__(self, session: Session, device: str | torch.device | None = None, **options: Any) -> None:
        if device is None or str(device) == "cuda":
            device = own_device() if torch.cuda.is_available() else "cpu"
        super().__init__(device, **options)
        self._session = session
        self._per_token = session.config.fault_tolerance.loss_reduction == "token"
        self._turns: _Turns | None = None
        self._batch_idx = 0

    def prepare(self, dataloader: Any) -> Any:
        """Return what ``Trainer.fit`` gets in place of ``dataloader``; see ``Session.prepare``."""
        self._loader = self._session.prepare(dataloader)
        self._turns = _Turns(len(self._loader), self._begin_epoch, self._next_step)
        return self._turns

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        total = self._check(trainer)
        (optimizer,) = self.optimizers
        scheduler = self.lr_scheduler_configs[0].scheduler if self.lr_scheduler_configs else None
        self.lr_scheduler_configs = []  # the session steps it
        self._engine = self._session.wrap(given(self.lightning_module), optimizer, self._loss, scheduler)
        self._total, steps = total, self._session.steps(total, self._loader)
        first = next(steps, total)  # a checkpoint, or the return of this group, skips steps
        self._steps = itertools.chain([first] if first < total else [], steps)
        loop = trainer.fit_loop
        _set(loop.epoch_progress.current, first // len(self._loader))
        _set(loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total, first)
        loop.epoch_loop._batches_that_stepped = first  # the step in loggers
        self._progress = loop.epoch_loop.batch_progress

    def _begin_epoch(self) -> int:
        """Return the number of this epoch's turns that are over."""
        over = self._session.step % len(self._loader)
        if over:
            _set(self._progress.current, over)
        return over

    def _next_step(self) -> None:
        next(self._steps)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Make one step of the run and return its loss."""
        self._batch_idx = batch_idx
        result = self._session.train_step(self._engine, self._loader)
        return torch.tensor(result.loss, device=self.root_device)

    def _loss(self, _: Any, batch: Any) -> Any:
        made = super().training_step(self.batch_to_device(batch, self.root_device), self._batch_idx)
        if not self._per_token:
            if isinstance(made, Mapping) and "loss" not in made:
                raise ConfigError(
                    f"training_step of {type(self.lightning_module).__name__} has returned {', '.join(made) or 'nothing'}; "
                    f'it must return the loss, or a dict with it as "loss"'
                )
            return made["loss"] if isinstance(made, Mapping) else made
        if not isinstance(made, Mapping) or not {"loss", "tokens"} <= made.keys():
            raise ConfigError(
                f'fault_tolerance.loss_reduction "token": training_step of {type(self.lightning_module).__name__} must '
                f'return {{"loss": sum of the tokens\' losses, "tokens": their number}}; or set it to "microbatch"'
            )
        return made["loss"], made["tokens"]

    def backward(self, closure_loss: Any, *_: Any, **__: Any) -> Any:
        """Do nothing: the step is committed."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Make the turn, whose ``training_step`` is the whole step."""
        return closure()

    def on_train_end(self) -> None:
        """Wait until all groups are at the end. Raises ``ConfigError`` if a callback has stopped the training."""
        if self._session.step < self._total:
            raise ConfigError(
                f"a callback has stopped the training after step {self._session.step} of {self._total}; a run has a fixed "
                f"number of steps: remove the callback, or set max_steps"
            )
        next(self._steps, None)

    @property
    def is_global_zero(self) -> bool:
        """Return whether this rank is the run's writer at present (``Session.is_writer``)."""
        return self._session.is_writer

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Raise ``ConfigError``."""
        raise ConfigError(
            "trainer.save_checkpoint: checkpoint.directory in the config saves the run; for the final model call "
            "session.save_final(path, lambda path: torch.save(module.state_dict(), path))"
        )

    def _check(self, trainer: Any) -> int:
        """Return the number of steps. Raises ``ConfigError`` for what a fault-tolerant run cannot have."""
        if self._turns is None or trainer.train_dataloader is not None and trainer.train_dataloader is not self._turns:
            raise ConfigError("trainer.fit(module, strategy.prepare(dataloader)): prepare has not made the dataloader")
        clipping, config = trainer.gradient_clip_val or 0.0, self._session.config.gradient_clipping
        schedulers = self.lr_scheduler_configs
        wrong = {
            "accumulate_grad_batches": (
                trainer.accumulate_grad_batches != 1,
                "leave it out; the number of microbatches is gradient_accumulation_steps in the config",
            ),
            "gradient_clip_val": (
                clipping != config or trainer.gradient_clip_algorithm == "value",
                f"the session clips the norm to gradient_clipping in the config, which is {config}; give both one value",
            ),
            "ckpt_path": (
                bool(trainer.ckpt_path),
                "leave it out in fit; with checkpoint.directory in the config, the same command goes on",
            ),
            "limit_train_batches": (trainer.limit_train_batches != 1.0, "leave it out, and set max_steps"),
            "precision": (
                trainer.precision == "16-mixed",
                "its loss scale cannot be kept equal in all groups; use bf16-mixed",
            ),
            "checkpoint_callbacks": (
                bool(trainer.checkpoint_callbacks),
                "set enable_checkpointing=False; checkpoint.directory in the config saves the run",
            ),
        }
        for name, (is_wrong, remedy) in wrong.items():
            if is_wrong:
                raise ConfigError(f"Lightning's Trainer has {name}={getattr(trainer, name)!r}: {remedy}")
        for callback in trainer.callbacks:
            remedies = [remedy for kind, remedy in _CALLBACKS.items() if isinstance(callback, kind)]
            if remedies:
                raise ConfigError(f"Lightning's Trainer has the callback {type(callback).__name__}: {remedies[0]}")
        module = given(self.lightning_module)
        for name, remedy in _HOOKS.items():
            if getattr(type(module), name) is not getattr(LightningModule, name):
                raise ConfigError(f"{type(module).__name__} has a method {name}: the session makes the step; {remedy}")
        if len(self.optimizers) != 1 or not module.automatic_optimization:
            raise ConfigError("a module with several optimizers, or that optimizes by itself: use a loop of your own")
        if len(schedulers) > 1 or any(
            each.interval != "step" or each.reduce_on_plateau or each.frequency != 1 for each in schedulers
        ):
            raise ConfigError(
                'configure_optimizers: the session steps one scheduler, once in each step; return {"optimizer": ..., '
                '"lr_scheduler": {"scheduler": ..., "interval": "step"}}'
            )
        epochs = trainer.max_epochs * len(self._loader) if (trainer.max_epochs or -1) > 0 else None
        limits = [each for each in (trainer.max_steps, epochs) if each is not None and each >= 0]
        if not limits:
            raise ConfigError("Lightning's Trainer has no last step: set max_steps or max_epochs")
        return min(limits)


class SessionLogger(Logger):
    """A Lightning logger that writes what ``self.log`` collects to the run's record and trackers, with ``Session.log``."""

    name, version = "megatron_ft", None

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._session.step:
            self._session.log(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: the record has the run's settings."""


class _Turns:
    """Stands for a dataloader: one turn for each step of an epoch. Its length keeps Lightning from fetching ahead."""

    def __init__(self, length: int, begin: Callable[[], int], following: Callable[[], None]) -> None:
        self._length, self._begin, self._following = length, begin, following

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._begin(), self._length):
            self._following()
            yield {}


def _set(tracker: Any, number: int) -> None:
    """Let one of Lightning's counters say that ``number`` of its things are done."""
    vars(tracker).update(dict.fromkeys(vars(tracker), number))
