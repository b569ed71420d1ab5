"""Pipelines of ``torch.distributed.pipelining``, with any of its schedules; a stage may be divided further by tensor
parallelism or FSDP2.

A flush is one or several runs of the user's schedule, each of as many microbatches as the plan of the step has left for the
group. The passes are those of torch's stages, which this engine surrounds (``run.engines.staged``). A schedule that cannot
run so few microbatches, as after a loss, is replaced for that run by one that can.

Failures it assumes: a stage that vanishes; what waits for it then raises ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleLoopedBFS, ScheduleZBVZeroBubble

from megatron_ft.data import generators
from megatron_ft.errors import EngineError
from megatron_ft.run.engines import rounds
from megatron_ft.run.engines.dtensors import DTensorBucketed
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import STAGED, Control, Listed, Work
from megatron_ft.run.engines.staged import Staged

Split = Callable[[Any], tuple[tuple[torch.Tensor, ...], torch.Tensor]]
"""batch -> (inputs of the first stage, target of the loss function)."""


def split_batch(batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the inputs and the target of a batch: of ``input_ids`` and ``labels``, or of a pair.

    Raises ``EngineError`` for another batch.
    """
    if isinstance(batch, Mapping) and {"input_ids", "labels"} <= batch.keys():
        return (batch["input_ids"],), batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return (batch[0],), batch[1]
    raise EngineError(
        f"a batch is a {type(batch).__name__}, and the pipeline cannot tell inputs from the target; return a pair, or "
        f"input_ids and labels, or pass split=batch -> (inputs, target) to session.pipeline"
    )


class TorchPipeline(DTensorBucketed, Staged):
    """A ``JointEngine``, made by ``Session.pipeline``.

    Args:
        stages: this rank's stages, of ``mesh["pp"]``; their modules' parameters as for
            :class:`~megatron_ft.run.engines.dtensors.DTensorBucketed`.
        optimizer: over the parameters of all of them.
        loss_fn: (output of the last stage, target) -> mean loss of a microbatch, or the pair that ``loss_reduction`` asks
            for.
        schedule: a class of ``torch.distributed.pipelining``.
        scheduler: learning-rate scheduler.
        split: see :data:`Split`.
        layout: the place of this rank.
        mesh: the mesh of the shards.
        settings: see :class:`~megatron_ft.run.engines.joint.JointBucketed`.

    Raises:
        EngineError: the schedule does not fit the stages.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        schedule: type[Any],
        *,
        scheduler: Any = None,
        split: Split = split_batch,
        layout: Layout,
        mesh: DeviceMesh,
        **settings: Any,
    ) -> None:
        self._stages, self._loss_fn, self._split, self._kind = list(stages), loss_fn, split, schedule
        several = issubclass(schedule, PipelineScheduleMulti)
        if not stages or (len(stages) > 1 and not several):
            raise EngineError(
                f"this rank has {len(stages)} stages, and {schedule.__name__} runs one at each rank; pass a schedule for "
                f"several, such as ScheduleInterleaved1F1B, or other stages"
            )
        self._several = several
        model = nn.ModuleDict({str(stage.stage_index): stage.submod for stage in stages})
        super().__init__(
            model,
            optimizer,
            scheduler,
            layout=layout,
            shard_group=mesh["dp"].get_group(),
            apart=list(model.values()),
            **settings,
        )
        self._of_stage = self._by_stage(len(stages), self._module_of.__getitem__)
        self._run: tuple[int, Any] = (0, None)  # the schedule that is at hand, and its number of microbatches
        for number, stage in enumerate(stages):
            self._surround(number, stage)

    @property
    def needs_samples(self) -> bool:
        return any(stage.is_first or stage.is_last for stage in self._stages)

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), STAGED: True}

    def _whole_name(self, name: str) -> str:
        return name.partition(".")[2]

    def flush(self, control: Control, work: Work) -> None:
        self._work = work
        for listed, last in rounds.rounds(self.layout, control, work, most=rounds.ALL):
            while listed:
                count, schedule = self._schedule(len(listed))
                self._begin_run(listed[:count], work.ready() if last and count == len(listed) else None)
                self._compute(schedule)
                listed = listed[count:]
        self._buffers.restore()

    def _schedule(self, count: int) -> tuple[int, Any]:
        """Return a schedule for the first of ``count`` microbatches, and for how many."""
        if self._run[0] == count:
            return self._run
        own = [(self._kind, number) for number in (count, count - 1) if number]
        others = (ScheduleLoopedBFS, ScheduleZBVZeroBubble) if self._several else (ScheduleGPipe,)
        simpler = [(kind, number) for kind in others for number in range(count, 0, -1)]
        for kind, number in own + simpler:
            if (schedule := self._made(kind, number)) is not None:
                self._run = number, schedule
                return self._run
        raise EngineError(
            f"neither {self._kind.__name__} nor a simpler schedule can run {count} microbatches over these stages; choose "
            f"another schedule"
        )

    def _made(self, kind: type[Any], count: int) -> Any:
        stages = self._stages if self._several else self._stages[0]
        try:
            return kind(stages, n_microbatches=count, loss_fn=self._loss, scale_grads=False)
        except ValueError:
            return None

    def _compute(self, schedule: Any) -> None:
        inputs, targets = [], []
        if self.needs_samples:
            batches = list(map(self._batch, self._listed))
            device = self._stages[0].device
            inputs = [torch.cat(column).to(device) for column in zip(*(args for args, _ in batches), strict=True)]
            targets = [target for _, target in batches]
        first, last = (any(getattr(stage, place) for stage in self._stages) for place in ("is_first", "is_last"))
        target = {"target": torch.cat(targets).to(self._stages[0].device)} if last else {}
        schedule.step(*(inputs if first else ()), **target, return_outputs=False)

    def _batch(self, listed: Listed) -> tuple[tuple[Any, ...], Any]:
        batch = self._share(self._work.batch(listed.microbatch))
        generators.seed(self._work.seed(listed.microbatch))
        return self._split(batch)

    # --- around torch's passes ----------------------------------------------------------------------------------------

    def _surround(self, number: int, stage: PipelineStage) -> None:
        """Let this engine take part in each pass of a stage."""
        forward: Callable[..., Any] = stage.forward_one_chunk
        backward: Callable[..., Any] = stage.backward_one_chunk
        weight: Callable[..., Any] = stage.backward_weight_one_chunk

        def forward_one_chunk(chunk: int, *arguments: Any, **options: Any) -> Any:
            with self._forward(chunk, stage.stage_index, stage.is_last):
                return forward(chunk, *arguments, **options)

        def backward_one_chunk(chunk: int, *arguments: Any, full_backward: bool = True, **options: Any) -> None:
            with self._backward(number, chunk, complete=full_backward):
                backward(chunk, *arguments, full_backward=full_backward, **options)
                if full_backward:
                    stage.perform_reduce_grad(1)  # inside the group, with FSDP

        def backward_weight_one_chunk(chunk: int, *arguments: Any, **options: Any) -> None:
            with self._backward(number, chunk):
                weight(chunk, *arguments, **options)
                stage.perform_reduce_grad(1)

        for replacement in (forward_one_chunk, backward_one_chunk, backward_weight_one_chunk):
            setattr(stage, replacement.__name__, replacement)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        """The loss function that the schedule gets."""
        loss, _ = self._count_step_loss(self._loss_fn(output, target))
        # FSDP takes the mean over its shards, of which each has lost a part of the sum.
        return loss * self.layout.shards if self._per_token else loss
