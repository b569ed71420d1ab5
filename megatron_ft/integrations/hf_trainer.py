"""Hugging Face's ``Trainer`` whose steps are made by a session.

The Trainer's loop runs as it is, with one turn for each step of the session: ``training_step`` makes the whole step with
all its microbatches, and what the loop calls afterwards (clipping, ``optimizer.step``, ``lr_scheduler.step``) has been done
already. Groups have the same ``global_step``, also one that comes back.

Failures it assumes: those of ``Session.train_step``. What the Trainer would do in each group, or only in one, is refused
where the loss of a group would change the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ft.errors import ConfigError
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.session import Session
from megatron_ft.types import given
from megatron_ft.utils import extras

with extras.needed():
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_pt_utils import find_batch_size
    from transformers.trainer_utils import EvalLoopOutput

_RECORDED = {"loss", "grad_norm", "learning_rate", "epoch"}
"""What the session records without being told, and the epoch."""


class FaultTolerantTrainer(Trainer):
    """A ``Trainer`` for one rank of a run; subclasses may override ``compute_loss``.

    Call ``session.init_distributed()`` before the ``TrainingArguments`` are made: Accelerate then finds a world, that of the
    group, and makes none. These settings come from the run's config instead: the number of microbatches
    (``gradient_accumulation_steps``), clipping, checkpoints.

    The loss of a microbatch is the model's mean, or with ``loss_reduction`` ``"token"`` the sum and the number of labels,
    as the Trainer counts them (``num_items_in_batch``): then a step has the loss that the Trainer alone computes.

    Evaluation during training is shared by all groups when there is only a loss (``Session.evaluate``); with
    ``compute_metrics`` each group evaluates all samples. ``log`` also calls ``Session.log``. ``state.log_history`` of a
    group that came back begins with its return.

    Args:
        session: what ``megatron_ft.init()`` returned.
        options: as for ``Trainer``.

    Raises:
        ConfigError: a training argument asks for something that the session does, or that cannot be made fault-tolerant.
            ``train`` raises it for callbacks of that kind.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, session: Session, model: Any = None, args: TrainingArguments | None = None, **options: Any
    ) -> None:
        if args is None:
            raise ConfigError("FaultTolerantTrainer needs TrainingArguments: args=TrainingArguments(...)")
        _check(args, session.config.gradient_clipping)
        self.session = session
        self._per_token = session.config.fault_tolerance.loss_reduction == "token"
        self._result: StepResult | None = None
        self._losses = _Losses()
        session.register("trainer.losses", self._losses)
        args.average_tokens_across_devices = False  # the session sums over all microbatches of the step
        super().__init__(model, args, **options)
        self.add_callback(_Epochs(self))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)  # no DDP around it
        accelerator.prepare_optimizer = lambda optimizer, **_: optimizer
        accelerator.clip_grad_norm_ = lambda *_, **__: given(self._result).gradient_norm

    def is_world_process_zero(self) -> bool:
        """Return whether this rank is the run's writer at present (``Session.is_writer``)."""
        return self.session.is_writer

    def get_train_dataloader(self) -> Iterator[dict[str, Any]]:
        """Return one turn of the loop for each step. Raises ``ConfigError`` for a dataset that has no length, without
        ``max_steps``."""
        prepare = self.accelerator.prepare
        self.accelerator.prepare = lambda dataloader: dataloader
        try:
            self.loader = self.session.prepare(super().get_train_dataloader())
        finally:
            self.accelerator.prepare = prepare
        if self.args.max_steps <= 0:
            try:
                self.args.max_steps = math.ceil(self.args.num_train_epochs * len(self.loader))
            except TypeError:
                raise ConfigError("the dataset has no length, so it has no epochs; set max_steps") from None
        self._steps = self._each_step()
        return self._steps

    def _each_step(self) -> Iterator[dict[str, Any]]:
        """Begins when the Trainer has made optimizer and scheduler."""
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        self._engine = self.session.wrap(self.model, optimizer, self._loss, scheduler)
        self.optimizer, self.lr_scheduler = _Done(optimizer), _Done(scheduler)
        for step in self.session.steps(self.args.max_steps, self.loader):
            self.state.global_step = step  # a checkpoint, or the return of this group, skips steps
            self.state.is_world_process_zero = self.is_world_process_zero()
            yield {}

    def _loss(self, _: Any, batch: Any) -> Any:
        inputs = self._prepare_inputs(batch)
        items = self._get_num_items_in_batch([inputs], self.args.device) if self._per_token else None
        if self._per_token and items is None:
            raise ConfigError(
                f'fault_tolerance.loss_reduction "token": the loss of {type(self.model).__name__} does not depend on a '
                f'number of labels (num_items_in_batch); set it to "microbatch"'
            )
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model_wrapped, inputs, num_items_in_batch=None if items is None else 1)
        return loss if items is None else (loss, items)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make one step of the run and return its loss."""
        model.train()
        self._result = self.session.train_step(self._engine, self.loader)
        self._losses.add(self._result.loss)
        return torch.tensor(self._result.loss, device=self.args.device)

    def _get_learning_rate(self) -> float:
        """Return that of the last step, as the Trainer's own loop, which steps the scheduler later."""
        return super()._get_learning_rate() if self._result is None else self._result.learning_rate

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the loop does not see the microbatches."""
        return 0

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train, from the run's newest checkpoint if there is one. Raises ``ConfigError`` if a checkpoint is given, or if a
        callback has stopped the training."""
        if resume_from_checkpoint:
            raise ConfigError(
                "train(resume_from_checkpoint=...): leave it out. With checkpoint.directory in the config, the same command "
                "goes on from the newest checkpoint"
            )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                raise ConfigError(
                    f"the Trainer has the callback {type(callback).__name__}: a run has a fixed number of steps; remove it"
                )
        if self._per_token and getattr(self, "loss_is_scaled_for_ga", None) is False:
            raise ConfigError(
                f'fault_tolerance.loss_reduction "token": {type(self).__name__}.loss_is_scaled_for_ga is False, so its '
                f'compute_loss returns the mean of a microbatch; set loss_reduction to "microbatch"'
            )
        output = super().train(**options)
        if self.session.step < self.args.max_steps:
            raise ConfigError(
                f"a callback has stopped the training after step {self.session.step} of {self.args.max_steps}; a run has a "
                f"fixed number of steps: remove the callback, or set max_steps"
            )
        next(self._steps, None)  # waits until all groups are here
        return output._replace(training_loss=self._losses.total())

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate the loss in all groups together during training; otherwise all of it here."""
        if not (self.is_in_train and prediction_loss_only):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )

        def losses(batch: Any) -> Mapping[str, Any]:
            loss, _, _ = self.prediction_step(self.model_wrapped, batch, True, ignore_keys)
            return {"loss": float(loss) * find_batch_size(batch)}

        self.model_wrapped.eval()
        size, collate = self.args.eval_batch_size, dataloader.collate_fn
        sums = self.session.evaluate(
            losses, dataloader.dataset, name=metric_key_prefix, batch_size=size, collate_fn=collate
        )
        metrics = {f"{metric_key_prefix}_loss": sums["loss"] / sums["samples"]}
        return EvalLoopOutput(None, None, metrics, int(sums["samples"]))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, and to the run's record and trackers."""
        if "loss" in logs:
            logs["loss"] = self._losses.take()
        if "train_loss" in logs:
            logs["train_loss"] = self._losses.total()
        super().log(logs, start_time)
        if self.session.step:
            self.session.log({name: value for name, value in logs.items() if name not in _RECORDED})

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Raise ``ConfigError``: a callback has set ``control.should_save``."""
        raise ConfigError(
            "a callback has set control.should_save: checkpoint.directory in the config saves the run, and save_model() the "
            "final model; remove the callback"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model after the training, with ``Session.save_final``. The directory gets its name when it is complete,
        and replaces one of that name. Default: ``model`` in ``args.output_dir``."""
        path = Path(output_dir or Path(self.args.output_dir, "model"))
        self.session.save_final(path, lambda directory: super(FaultTolerantTrainer, self).save_model(str(directory)))


class _Done:
    """An optimizer or scheduler whose steps the session makes."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing: the step is committed."""


class _Losses:
    """The losses of the run: part of its state, as a group that comes back has not seen them all."""

    def __init__(self) -> None:
        self._sum, self._steps, self._all, self._all_steps = 0.0, 0, 0.0, 0

    def add(self, loss: float) -> None:
        self._sum, self._steps = self._sum + loss, self._steps + 1
        self._all, self._all_steps = self._all + loss, self._all_steps + 1

    def take(self) -> float:
        """Return the mean since this was called last."""
        mean = self._sum / max(self._steps, 1)
        self._sum, self._steps = 0.0, 0
        return mean

    def total(self) -> float:
        """Return the mean over all steps."""
        return self._all / max(self._all_steps, 1)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class _Epochs(TrainerCallback):
    """Counts epochs of steps: to the Trainer, the run is one epoch."""

    def __init__(self, trainer: FaultTolerantTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        try:
            state.epoch = state.global_step / len(self._trainer.loader)
        except TypeError:  # a stream has no epochs
            state.epoch = 0.0


def _check(args: TrainingArguments, gradient_clipping: float) -> None:
    """Raise ``ConfigError`` for an argument that a fault-tolerant run cannot have."""
    epochs = [name for name in ("eval_strategy", "logging_strategy") if getattr(args, name) == "epoch"]
    wrong = {
        "gradient_accumulation_steps": (
            args.gradient_accumulation_steps != 1,
            "leave it out; the number of microbatches is gradient_accumulation_steps in the config",
        ),
        "max_grad_norm": (
            args.max_grad_norm != gradient_clipping,
            f"the session clips to gradient_clipping in the config, which is {gradient_clipping}; give both the same value",
        ),
        "save_strategy": (
            args.save_strategy != "no",
            'set it to "no"; checkpoint.directory in the config saves the run, and save_model() the final model',
        ),
        "eval_on_start": (args.eval_on_start, "the groups get the same model in the first step; leave it out"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen != "no",
            "the Trainer's loop does not see the microbatches; leave it out, the run's record has the number of tokens",
        ),
        **dict.fromkeys(epochs, (True, 'set it to "steps", with a number of steps')),
        "fp16": (args.fp16, "its loss scale cannot be kept equal in all groups; use bf16"),
        "lr_scheduler_type": (
            args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
            "the session steps the scheduler without a metric; use another one",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "all groups have microbatches of train_micro_batch_size_per_gpu in the config",
        ),
        "deepspeed": (args.deepspeed, "use session.deepspeed in a loop of your own"),
        "fsdp": (args.fsdp, "use fully_shard and session.wrap in a loop of your own"),
    }
    for name, (is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise ConfigError(f"TrainingArguments({name}={getattr(args, name)!r}): {remedy}")
