"""ZeRO-2 and ZeRO-3 inside a group: gradients stay divided over its ranks, with ZeRO-3 the parameters, too.

The ranks compute every microbatch together, each of its share of the samples. DeepSpeed sums gradients inside the group
within each backward pass, and leaves each rank its *partition*: a flat piece of the gradients, which is the gradient of the
fp32 weights that this rank updates. The partition is then summed over the groups like any gradient. ZeRO-3 adds gradients up
itself: into the buckets, instead of memory of its own. ZeRO-2 leaves the gradients of each microbatch, as ZeRO-3 does with
exact reduction; they are taken from there.

Failures it assumes: any rank of the group may vanish; DeepSpeed's collectives then raise ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from megatron_ft.run.engines.buckets import Bucket
from megatron_ft.run.engines.deepspeed.engine import Adapter
from megatron_ft.run.engines.deepspeed.optimizers import InPlace
from megatron_ft.run.engines.joint import OneByOne
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import PARTITIONS, Ready
from megatron_ft.run.engines.state_tensors import named_state

_ADDED_TO = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""ZeRO-3's name of the memory in which it adds gradients up: id of a parameter -> flat tensor."""


class _Piece(NamedTuple):
    """The part of one parameter that is in this rank's partition of a group of parameters, the ``number``-th there."""

    group: int
    number: int


class Partitioned(InPlace):
    """The partitions of DeepSpeed's optimizer, of stage 2 or 3."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, ())  # the buckets follow
        self.adds_to_buckets = self.divides_parameters
        self.pieces: dict[nn.Parameter, _Piece] = {}
        self._adds_itself = False
        for group, master in enumerate(self.masters()):
            parts = master.detach().split(self._sizes(group))
            self.pieces |= {nn.Parameter(part): _Piece(group, index) for index, part in enumerate(parts)}

    def _sizes(self, group: int) -> list[int]:
        """Return the numbers of elements of the parts of a partition."""
        zero = self.optimizer
        if self.divides_parameters:
            return [parameter.partition_numel() for parameter in zero.fp16_groups[group]]
        weights = zero.params_in_partition[group]
        # They stand for gradients, which are divided alike.
        zero.all_grad_tensors[group] = [weight.detach() for weight in weights]
        parts = zero.get_flat_partition(
            weights,
            zero.first_offset[group],
            zero.partition_size[group],
            dtype=torch.float32,
            device=zero.device,
            param_group_idx=group,
            return_tensor_list=True,
        )
        zero.all_grad_tensors[group] = None
        return [part.numel() for part in parts]

    @property
    def divides_parameters(self) -> bool:
        """True with ZeRO-3."""
        return hasattr(self.optimizer, "fp32_partitioned_groups_flat")

    def masters(self) -> list[torch.Tensor]:
        if self.divides_parameters:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    @contextmanager
    def whole(self) -> Iterator[torch.optim.Optimizer]:
        """Give the torch optimizer all its parameters for a moment: with ZeRO-3 it has them in its step only."""
        groups = self.inner.param_groups
        before = [group["params"] for group in groups]
        if self.divides_parameters:
            for group in groups:
                group["params"] = []
            for number, master in enumerate(self.masters()):
                groups[self.optimizer.sub_group_to_group_id[number]]["params"].append(master)
        try:
            yield self.inner
        finally:
            for group, parameters in zip(self.inner.param_groups, before, strict=True):
                group["params"] = parameters if self.divides_parameters else group["params"]

    def state(self) -> Mapping[str, Any]:
        with self.whole():
            return super().state()

    def take_over_partitions(self) -> None:
        """Let ZeRO-3 add to the buckets only."""
        self._adds_itself = True
        self.optimizer.grad_partitions_flat_buffer = torch.empty(0)

    def held(self, names: Mapping[nn.Parameter, str], layout: Layout) -> list[list[list[Any]]]:
        """Return which elements the partitions of this rank hold (``run.engines.port.PARTITIONS``). ``names``: of the
        parameters."""
        found = []
        for number, master in enumerate(self.masters()):
            pieces, begin = list[list[Any]](), 0
            if self.divides_parameters:  # each parameter by itself
                for parameter in self.optimizer.fp16_groups[number]:
                    size = parameter.partition_numel()
                    first = layout.shard * size
                    count = min(size, parameter.ds_numel - first)
                    pieces.append([names[parameter], begin, first, count])
                    begin += size
            else:  # all parameters of a group one after the other
                ours = layout.shard * master.numel()
                starts = self.optimizer.round_robin_bit16_offsets[number]
                for parameter, start in zip(self.optimizer.round_robin_bit16_groups[number], starts, strict=True):
                    first, end = max(start, ours), min(start + parameter.numel(), ours + master.numel())
                    pieces.append([names[parameter], first - ours, first - start, end - first])
            found.append([piece for piece in pieces if piece[-1] > 0])
        return found

    def aim(self) -> None:
        if not self._adds_itself:
            return
        zero = self.optimizer
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.adds_to.views, strict=True):
                group, number = self.pieces[parameter]
                getattr(zero, _ADDED_TO)[zero.fp16_groups[group][number].ds_id] = view
        zero.micro_step_id = 1  # with 0 it would overwrite

    def gradients(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        found = []
        for parameter in bucket.parameters:
            group, number = self.pieces[parameter]
            parts = self.optimizer.averaged_gradients.get(group)
            found.append(None if parts is None else parts[number].reshape(-1))
        return found

    def forget(self) -> None:
        zero = self.optimizer
        for group, parts in zero.averaged_gradients.items():
            if self.divides_parameters:  # they are views of a buffer, to which the next backward pass may add
                torch._foreach_zero_(parts or ())
            else:
                zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None

    def give(self) -> None:
        given: dict[int, dict[int, torch.Tensor]] = {}
        for bucket in self.buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.fp32_sum(), strict=True):
                group, number = self.pieces[parameter]
                given.setdefault(group, {})[number] = gradient
        for group, parts in given.items():
            self.optimizer.averaged_gradients[group] = [parts[number] for number in range(len(parts))]

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self.whole():
            super().load_state(state)
        if self.divides_parameters:
            self.show()

    def show(self) -> None:
        """Give the model the values of the fp32 weights."""
        optimizer = self.optimizer
        if not self.divides_parameters:
            optimizer.update_lp_params()
            return
        for group in range(len(self.masters())):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:  # those that stay whole at every rank
            for parameter in optimizer.persistent_parameters:
                parameter.partition(has_been_updated=False)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


class DeepSpeedZero(Adapter, OneByOne):
    """A ``JointEngine``, made by ``Session.deepspeed``. ``loss_fn``: as for ``DeepSpeedData``; its batch is this rank's
    share of the samples."""

    _optimizer: Partitioned

    def __init__(
        self, engine: DeepSpeedEngine, loss_fn: Callable[[Any, Any], torch.Tensor], layout: Layout, **settings: Any
    ) -> None:
        optimizer = Partitioned(engine.optimizer)
        super().__init__(
            engine, list(optimizer.pieces), optimizer, layout=layout, shard_group=dist.group.WORLD, **settings
        )
        optimizer.buckets = self._buckets
        if not self.takes_gradients:
            optimizer.take_over_partitions()
        self.loss_fn = loss_fn

    @property
    def checks_by_flushes(self) -> bool:
        # ZeRO-3 expects that a backward pass follows a forward pass.
        return self._optimizer.divides_parameters

    def _on_moved(self) -> None:
        self._optimizer.show()

    def _lose(self, batch: Any) -> Any:
        return self.loss_fn(self.engine, batch)

    def _go_back(self, loss: torch.Tensor, ready: Ready | None) -> None:
        self.engine.backward(loss)

    def _taken_with(self, ready: Ready | None) -> None:
        self._all_complete(ready)

    def _module_state(self) -> Mapping[str, Any]:
        state = super()._module_state()
        if self._optimizer.divides_parameters:
            divided = dict(self.engine.module.named_parameters(remove_duplicate=False))
            state = {name: tensor for name, tensor in state.items() if name not in divided}
        return state

    def state(self) -> Mapping[str, Any]:
        named = {parameter: name for name, parameter in self.engine.module.named_parameters()}
        shapes = {name: list(getattr(parameter, "ds_shape", parameter.shape)) for parameter, name in named.items()}
        every = self.engine.module.named_parameters(remove_duplicate=False)
        what = {
            "shapes": shapes,
            "tied": {name: named[parameter] for name, parameter in every if name not in shapes},
            "pieces": self._optimizer.held(named, self.layout),
        }
        return {**super().state(), PARTITIONS: what}

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        optimizer, module = self._optimizer, self.engine.module
        known = nn.Module() if optimizer.divides_parameters else module
        with optimizer.whole() as inner:
            found = list(named_state(known, inner, self._buffers.unsaved(), optimizer.masters()))
        if optimizer.divides_parameters:
            found += [(f"buffer {name}", tensor) for name, tensor in self._module_state().items()]
            found += [(f"part of parameter {name}", one.ds_tensor) for name, one in module.named_parameters()]
        yield from found
