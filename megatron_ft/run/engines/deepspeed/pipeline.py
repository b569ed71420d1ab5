"""DeepSpeed's ``PipelineEngine`` over an explicit list of microbatches that may grow while the pipeline runs.

A flush is one run of DeepSpeed's own instruction loop; ``_train_schedule`` is replaced by a schedule that is decided at
run time (``run.engines.pipeline_flush``, ``DeepSpeedPipeline``). Forward and backward passes are DeepSpeed's. The exchange
between stages is replaced: in DeepSpeed a stage sends when the schedule says that its neighbour receives, which requires
that both know the whole schedule beforehand. Here sends are never waited for, and the two directions have separate process
groups, so that no order of operations in two stages can block them (with NCCL, operations of one communicator run in one
order).

Failures it assumes: a neighbour that vanishes. Its process groups are then aborted
(``run.collectives.user_process_groups``), and what waits in them raises ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_ft.data import generators
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Work
from megatron_ft.types import Microbatch, given

_META = 64
"""Number of elements that describe sent tensors: their number, then dtype, number of axes and shape of each."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)


class FlushSchedule(schedule.PipeSchedule):
    """A schedule that is decided while it runs: DeepSpeed executes each list of ``passes`` before it asks for the next."""

    def __init__(self, engine: FlushingEngine, passes: Iterator[list[schedule.PipeInstruction]]) -> None:
        super().__init__(micro_batches=1, stages=engine.num_stages, stage_id=engine.stage_id)
        self._passes, self._in_flight = passes, engine.in_flight

    def num_pipe_buffers(self) -> int:
        return self._in_flight

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        return self._passes


class Neighbours:
    """Tensor exchange with the stages before and after this one, in the same slice. Sends are not waited for."""

    def __init__(self, grid: Any, device: torch.device) -> None:
        self._device = device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._shapes: dict[str, list[tuple[torch.dtype, list[int]]]] = {}
        self._described: set[str] = set()
        self.ways = self._make_groups(grid)

    def _make_groups(self, grid: Any) -> dict[str, tuple[dist.ProcessGroup, int]]:
        """Make one process group per pair of stages and direction, in the same order at all ranks of the world. Return those
        of this rank, each with its neighbour."""
        mine: dict[str, tuple[dist.ProcessGroup, int]] = {}
        for column in grid.pipe_groups:
            for before, after in zip(column, column[1:], strict=False):
                for kind in ("activations", "gradients"):
                    group = dist.new_group([before, after])
                    if grid.global_rank == before:
                        mine[f"{kind}/next"] = group, after
                    elif grid.global_rank == after:
                        mine[f"{kind}/before"] = group, before
        return mine

    def settle(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._sent:
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            work.wait()
        self._sent.clear()

    def send(self, way: str, tensors: Sequence[torch.Tensor], describe: bool) -> None:
        """Send ``"activations/next"`` or ``"gradients/before"``; ``describe``: their shapes may have changed."""
        group, to = self.ways[way]
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        if describe or way not in self._described:
            self._described.add(way)
            tensors = [_describe(tensors).to(self._device), *tensors]
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # NCCL has no booleans
            self._sent.append((given(dist.isend(tensor, to, group=group)), tensor))

    def receive(self, way: str, described: bool) -> list[torch.Tensor]:
        """Inverse of :meth:`send`: ``"activations/before"`` or ``"gradients/next"``."""
        group, source = self.ways[way]
        if described or way not in self._shapes:
            meta = torch.zeros(_META, dtype=torch.int64, device=self._device)
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            given(dist.irecv(meta, source, group=group)).wait()
            self._shapes[way] = _described(meta.tolist())
        received = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in self._shapes[way]]
        # Posted together: they come in this order.
        raw = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in received]
        for work in [dist.irecv(tensor, source, group=group) for tensor in raw]:
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            given(work).wait()
        return received


class FlushingEngine(PipelineEngine):
    """A group's ``PipelineEngine``. It never reduces or updates by itself: :meth:`flush` adds to the gradients, and the
    adapter (``run.engines.deepspeed.engine``) does all else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layout = Layout(
            self.stage_id,
            self.num_stages,
            self.grid.get_slice_parallel_rank(),
            self.grid.get_slice_parallel_world_size(),
        )
        self.in_flight = self.num_stages - self.stage_id
        """The largest number of microbatches in flight (``core.scheduling.pipeline_1f1b``)."""
        self.neighbours = Neighbours(self.grid, self.device)

    def run(self, passes: Iterator[list[schedule.PipeInstruction]]) -> None:
        """Execute the passes of a flush. After each forward pass, ``total_loss`` of the last stage is its loss."""
        self.module.train()
        self.total_loss, self._compute_loss = None, True
        self._exec_schedule(FlushSchedule(self, passes))
        self.neighbours.settle()

    def begin(self, buffer_id: int, microbatch: Microbatch, work: Work) -> None:
        """Before a forward pass: set the random seed, and load the samples where they are needed."""
        needs_samples = self.is_first_stage() or self.is_last_stage()
        batch = work.batch(microbatch) if needs_samples else None
        # The same seed in all slices of a stage (they drop from the same activations), another one in each stage.
        generators.seed((work.seed(microbatch) + self.stage_id) % 2**63)
        if not needs_samples:
            return
        if isinstance(batch, Mapping):
            batch = batch["input_ids"], batch["labels"]
        self._next_batch = lambda: batch
        try:
            self._exec_load_micro_batch(buffer_id)
        finally:
            del self._next_batch

    # --- replaced instructions of DeepSpeed: the map holds functions, so overriding a method would not be enough ------

    def _exec_send_activations_on(self, buffer_id: int) -> None:
        self.neighbours.send("activations/next", _listed(self.pipe_buffers["outputs"][buffer_id]), self.dynamic_shape)

    def _exec_receive_activations(self, buffer_id: int) -> None:
        received = self.neighbours.receive("activations/before", self.dynamic_shape)
        for tensor in received:
            tensor.requires_grad = tensor.is_floating_point()
        self.pipe_buffers["inputs"][buffer_id] = received[0] if len(received) == 1 else tuple(received)

    def _exec_send_gradients_back(self, buffer_id: int) -> None:
        inputs, self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id], None
        floating = [tensor for tensor in _listed(inputs) if tensor.is_floating_point()]
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in floating]
        self.neighbours.send("gradients/before", gradients, self.dynamic_shape)

    def _exec_receive_gradients(self, buffer_id: int) -> None:
        received = self.neighbours.receive("gradients/next", self.dynamic_shape)
        self.grad_layer = received[0] if torch.is_tensor(self.pipe_buffers["outputs"][buffer_id]) else received

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.SendActivation: _exec_send_activations_on,
        schedule.RecvActivation: _exec_receive_activations,
        schedule.SendGrad: _exec_send_gradients_back,
        schedule.RecvGrad: _exec_receive_gradients,
    }


def _listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def _describe(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    assert len(numbers) <= _META, f"{len(tensors)} tensors between two stages are too many to describe"
    return torch.tensor(numbers + [0] * (_META - len(numbers)), dtype=torch.int64)


def _described(numbers: Sequence[int]) -> list[tuple[torch.dtype, list[int]]]:
    count, *rest = numbers
    found = []
    for _ in range(count):
        dtype, axes = rest[:2]
        found.append((_DTYPES[dtype], list(rest[2 : 2 + axes])))
        rest = rest[2 + axes :]
    return found
