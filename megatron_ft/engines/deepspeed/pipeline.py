"""DeepSpeed's ``PipelineEngine`` over an explicit list of microbatches that may grow while the pipeline runs.

A flush is one run of DeepSpeed's own instruction loop; ``_train_schedule`` is replaced by a schedule that decides at
run time (``engines.pipeline_flush``). Forward and backward passes are DeepSpeed's. The exchange between stages is
replaced: in DeepSpeed a stage sends when the schedule says that its neighbour receives, which requires that both know
the whole schedule beforehand. Here sends are never waited for, and the two directions have separate process groups, so
that no order of operations in two stages can block them (with NCCL, operations of one communicator run in one order).

Failures it assumes: a neighbour that vanishes. Its process groups are then aborted
(``collectives.user_process_groups``),
and what waits in them raises ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_ft.data import generators
from megatron_ft.engines.layout import Layout
from megatron_ft.engines.pipeline_flush import Flow
from megatron_ft.engines.port import Control, Work
from megatron_ft.types import Microbatch, given

_META = 64
"""Number of elements that describe sent tensors: their number, then dtype, number of axes and shape of each."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)


class Begin(schedule.BufferOpInstruction):
    """The beginning of a microbatch's forward pass: set the random seed and load the samples where needed."""

    def __init__(self, buffer_id: int, microbatch: Microbatch) -> None:
        super().__init__(buffer_id, microbatch=microbatch)


class AddTo(schedule.PipeInstruction):
    """The next pass adds to this standby part, or to the group's own gradients (``Engine.add_to``)."""

    def __init__(self, part: int) -> None:
        super().__init__(part=part)


class FlushSchedule(schedule.PipeSchedule):
    """A schedule that asks ``flow`` for each pass. DeepSpeed executes each yielded list before it asks for the next."""

    def __init__(self, layout: Layout, flow: Flow, work: Work, complete: Callable[[], None]) -> None:
        super().__init__(micro_batches=1, stages=layout.stages, stage_id=layout.stage)
        self._flow, self._work, self._complete = flow, work, complete

    def num_pipe_buffers(self) -> int:
        """Return the largest number of microbatches in flight (``core.scheduling.pipeline_1f1b``)."""
        return self.stages - self.stage_id

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        while (turn := self._flow.next()) is not None:
            buffer = turn.index % self.num_pipe_buffers()
            if turn.kind == "forward":
                if not self.is_first_stage:
                    yield [schedule.RecvActivation(buffer)]
                with self._work.span("forward", turn.listed):
                    yield [
                        AddTo(turn.listed.part),
                        Begin(buffer, turn.listed.microbatch),
                        schedule.ForwardPass(buffer),
                    ]
                if not self.is_last_stage:
                    yield [schedule.SendActivation(buffer)]
            else:
                if not self.is_last_stage:
                    yield [schedule.RecvGrad(buffer)]
                with self._work.span("backward", turn.listed):
                    yield [AddTo(turn.listed.part), schedule.BackwardPass(buffer)]
                if not self.is_first_stage:
                    yield [schedule.SendGrad(buffer)]
                self._work.computed(turn.listed)
                if turn.last:
                    self._complete()


class Neighbours:
    """Tensor exchange with the stages before and after this one, in the same slice. Sends are not waited for."""

    def __init__(self, grid: Any, device: torch.device) -> None:
        self._device = device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._shapes: dict[str, list[tuple[torch.dtype, list[int]]]] = {}
        self._described: set[str] = set()
        self._next, self._before = (
            grid.stage_to_global(stage) if 0 <= stage < grid.pipe_parallel_size else None
            for stage in (grid.stage_id + 1, grid.stage_id - 1)
        )
        self.groups = self._make_groups(grid)

    def _make_groups(self, grid: Any) -> dict[str, dist.ProcessGroup]:
        """Make one process group per pair of stages and direction, in the same order at all ranks of the world."""
        mine: dict[str, dist.ProcessGroup] = {}
        for column in grid.pipe_groups:
            for before, after in zip(column, column[1:], strict=False):
                for kind in ("activations", "gradients"):
                    group = dist.new_group([before, after])
                    if grid.global_rank == before:
                        mine[f"{kind}/next"] = group
                    elif grid.global_rank == after:
                        mine[f"{kind}/before"] = group
        return mine

    def send_activations(self, tensors: Sequence[torch.Tensor], describe: bool) -> None:
        self._send("activations/next", given(self._next), tensors, describe)

    def send_gradients(self, tensors: Sequence[torch.Tensor], describe: bool) -> None:
        self._send("gradients/before", given(self._before), tensors, describe)

    def receive_activations(self, described: bool) -> list[torch.Tensor]:
        return self._receive("activations/before", given(self._before), described)

    def receive_gradients(self, described: bool) -> list[torch.Tensor]:
        return self._receive("gradients/next", given(self._next), described)

    def settle(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._sent:
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            work.wait()
        self._sent.clear()

    def _send(self, way: str, to: int, tensors: Sequence[torch.Tensor], describe: bool) -> None:
        group = self.groups[way]
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        if describe or way not in self._described:
            self._described.add(way)
            tensors = [_describe(tensors).to(self._device), *tensors]
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # NCCL has no booleans
            self._sent.append((given(dist.isend(tensor, to, group=group)), tensor))

    def _receive(self, way: str, source: int, described: bool) -> list[torch.Tensor]:
        group = self.groups[way]
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
    adapter (``engines.deepspeed.engine``) does all else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layout = Layout(
            self.stage_id,
            self.num_stages,
            self.grid.get_slice_parallel_rank(),
            self.grid.get_slice_parallel_world_size(),
        )
        self.neighbours = Neighbours(self.grid, self.device)
        self._work: Work | None = None
        self.adds_to: Callable[[int], None] = lambda part: None
        """Called before each pass with the standby part that it adds to."""
        self.begins: Callable[[], None] = lambda: None
        """Called before each forward pass."""
        self.passed: Callable[[], None] = lambda: None
        """Called after each forward pass."""
        self.complete: Callable[[], None] = lambda: None
        """Called after the last backward pass of this stage, if the step has no others (``Work.ready``)."""

    def flush(self, control: Control, work: Work) -> None:
        """Compute the listed microbatches. After each forward pass, ``total_loss`` of the last stage is its loss."""
        self._work = work
        self.module.train()
        self.total_loss, self._compute_loss = None, True
        self._exec_schedule(FlushSchedule(self.layout, Flow(self.layout, control, work), work, self.complete))
        self.neighbours.settle()

    # --- replaced instructions of DeepSpeed; the map holds functions, so overriding a method would not be enough
    # ----------

    def _exec_add_to(self, part: int) -> None:
        self.adds_to(part)

    def _exec_begin(self, buffer_id: int, microbatch: Microbatch) -> None:
        work, needs_samples = given(self._work), self.is_first_stage() or self.is_last_stage()
        batch = work.batch(microbatch) if needs_samples else None
        # The same seed in all slices of a stage (they drop from the same activations), another one in each stage.
        generators.seed((work.seed(microbatch) + self.stage_id) % 2**63)
        self.begins()
        if not needs_samples:
            return
        if isinstance(batch, Mapping):
            batch = batch["input_ids"], batch["labels"]
        self._next_batch = lambda: batch
        try:
            self._exec_load_micro_batch(buffer_id)
        finally:
            del self._next_batch

    def _exec_forward(self, buffer_id: int) -> None:
        self._exec_forward_pass(buffer_id)
        self.passed()

    def _exec_send_activations_on(self, buffer_id: int) -> None:
        self.neighbours.send_activations(_listed(self.pipe_buffers["outputs"][buffer_id]), self.dynamic_shape)

    def _exec_receive_activations(self, buffer_id: int) -> None:
        received = self.neighbours.receive_activations(self.dynamic_shape)
        for tensor in received:
            tensor.requires_grad = tensor.is_floating_point()
        self.pipe_buffers["inputs"][buffer_id] = received[0] if len(received) == 1 else tuple(received)

    def _exec_send_gradients_back(self, buffer_id: int) -> None:
        inputs, self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id], None
        floating = [tensor for tensor in _listed(inputs) if tensor.is_floating_point()]
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in floating]
        self.neighbours.send_gradients(gradients, self.dynamic_shape)

    def _exec_receive_gradients(self, buffer_id: int) -> None:
        received = self.neighbours.receive_gradients(self.dynamic_shape)
        self.grad_layer = received[0] if torch.is_tensor(self.pipe_buffers["outputs"][buffer_id]) else received

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        AddTo: _exec_add_to,
        Begin: _exec_begin,
        schedule.ForwardPass: _exec_forward,
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
