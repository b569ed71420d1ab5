"""The part that is the same in all engines whose parameters may be DTensors: of each the rank has its local part.

Buckets, states and checksums hold local parts. The optimizer sees DTensors: it gets the step's mean as one.

Failures it assumes: those of ``run.engines.joint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megatron_ft.errors import EngineError
from megatron_ft.run.engines import tensor_checksum
from megatron_ft.run.engines.buckets import Bucket
from megatron_ft.run.engines.joint import JointBucketed
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import PARTS
from megatron_ft.run.engines.state_tensors import named_state, plain_name


class DTensorBucketed(JointBucketed):
    """The common part.

    Args:
        model: its trainable parameters are fp32 DTensors, or plain tensors that all slices of tensor parallelism hold
            alike.
        optimizer: any torch optimizer over them.
        scheduler: learning-rate scheduler, or None.
        layout: the place of this rank.
        apart: modules whose parameters are in different buckets; none: they may share buckets.
        settings: see :class:`~megatron_ft.run.engines.joint.JointBucketed`.

    Raises:
        EngineError: a parameter that the engine cannot keep equal in all groups.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        layout: Layout,
        apart: Sequence[nn.Module] = (),
        **settings: Any,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._begun = False
        self._whole = _parts(model, layout)
        _check_equal(model, layout)
        module_of = {parameter: number for number, module in enumerate(apart) for parameter in module.parameters()}
        self._module_of = {part: module_of.get(whole, 0) for part, whole in self._whole.items()}
        super().__init__(model, list(self._whole), layout=layout, apart=self._module_of, **settings)
        self._counted = {part for part, whole in self._whole.items() if _counts_here(whole, layout)}
        # Autograd adds to a plain gradient in place, to a DTensor it may not.
        divided = any(isinstance(whole, DTensor) for whole in self._whole.values())
        self.takes_gradients = divided or self._rounding is not None

    def begin_step(self, microbatches: int = 1) -> None:
        super().begin_step(microbatches)
        if not self._begun:  # a script may set factors after it has made the engine
            self._begun = True
            _check_divisors(self.model, self.layout.shards)

    def _aim(self, part: int) -> None:
        super()._aim(part)
        if not self.takes_gradients:
            for bucket in self._buckets:
                for piece, view in zip(bucket.parameters, bucket.adds_to.views, strict=True):
                    self._whole[piece].grad = view

    def _on_moved(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what it has gathered of them is old

    def _gradients_of(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        return [_local_gradient(self._whole[part]) for part in bucket.parameters]

    def _forget(self, bucket: Bucket) -> None:
        for part in bucket.parameters:
            self._whole[part].grad = None

    def _optimize(self) -> None:
        for bucket in self._buckets:
            bucket.give()
            for part in bucket.parameters:
                self._whole[part].grad = _like(self._whole[part], part.grad)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._forget_gradients()

    def _torch_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return (self.optimizer,)

    def state(self) -> Mapping[str, Any]:
        state: dict[str, Any] = {
            "model": _local(_saved(self.model)),
            "optimizer": _local(self.optimizer.state_dict()),
        }
        extra = {name: part.get_extra_state() for name, part in _with_extra_state(self.model)}
        return state | ({"extra": extra} if extra else {}) | {PARTS: self._boxes()} | self._rest(self.scheduler)

    def _boxes(self) -> dict[str, Any]:
        """Return which part of which tensor this rank holds (``run.checkpoint.reshard``)."""
        model = {name: _box(one) for name, one in _saved(self.model).items() if isinstance(one, DTensor)}
        updated = [one for group in self.optimizer.param_groups for one in group["params"]]
        boxes = {number: _box(one) for number, one in enumerate(updated) if isinstance(one, DTensor)}
        names = {one: self._whole_name(plain_name(name)) for name, one in self.model.named_parameters()}
        return {"model": model, "optimizer": boxes, "names": [names.get(one, "") for one in updated]}

    def _whole_name(self, name: str) -> str:
        """Return the name in the whole model of a parameter of this rank's model."""
        return name

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = _saved(self.model)
        saved = {plain_name(name): value for name, value in state["model"].items()}
        if other := sorted(own.keys() ^ saved.keys()):
            has, lacks = ("model", "state") if other[0] in own else ("state", "model")
            raise EngineError(
                f"the {has} has {other[0]}, and the {lacks} has not ({len(other)} names differ); "
                f"build the model as the script did that saved it"
            )
        with torch.no_grad():
            for name, value in saved.items():
                _local(own[name]).copy_(value)
        for name, part in _with_extra_state(self.model):
            part.set_extra_state(state["extra"][name])
        self.optimizer.load_state_dict(self._optimizer_state(state["optimizer"]))
        self._load_rest(state, self.scheduler)

    def _optimizer_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with a DTensor for each tensor that is shaped like its parameter."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = {
            number: {
                key: _like(whole, value)
                if isinstance(value, torch.Tensor) and value.shape == _local(whole).shape
                else value
                for key, value in saved["state"][number].items()
            }
            for number, whole in enumerate(parameters)
            if number in saved["state"]
        }
        return {**saved, "state": states}

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_state(self.model, self.optimizer, self._buffers.unsaved()):
            yield name, _local(tensor)


def _parts(model: nn.Module, layout: Layout) -> dict[nn.Parameter, nn.Parameter]:
    """Return the part of each trainable parameter that this rank holds, as a view -> the parameter."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for name, whole in model.named_parameters():
        if not whole.requires_grad:
            continue
        if whole.dtype != torch.float32:
            raise EngineError(
                f"parameter {name} is {whole.dtype}; parameters must be torch.float32 (for bf16 compute, pass "
                f"MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) to fully_shard)"
            )
        if not isinstance(whole, DTensor) and layout.shards > 1:
            raise EngineError(
                f"parameter {name} is not sharded, so that the shards of the group would come to hold different values; "
                f"call fully_shard(model, mesh=session.mesh()['dp']) on the whole model"
            )
        elif layout.shards > 1 and "shard" not in _split(whole, layout):
            raise EngineError(
                f"parameter {name} is not divided among the inner_shards ({layout.shards}) of the group: its placements are "
                f"{getattr(whole, 'placements', 'none')}; call fully_shard(model, mesh=session.mesh()['dp'])"
            )
        part = _local(whole.detach())
        if isinstance(whole, DTensor) and part.device.type != whole.device_mesh.device_type:
            raise EngineError(
                f"parameter {name} is on {part.device}, and its mesh is of {whole.device_mesh.device_type}; leave "
                f"CPUOffloadPolicy out, whose gradients arrive after backward has ended, and give a model that was built on "
                f"the meta device its values"
            )
        if part.numel():
            found[nn.Parameter(part)] = whole
    if not found:
        raise EngineError(
            f"rank {layout.position} of the group holds no part of any trainable parameter; use fewer inner_shards, or a "
            f"larger model"
        )
    return found


def _check_divisors(model: nn.Module, shards: int) -> None:
    """Raise ``EngineError`` if a module of FSDP2 divides the sum over the shards by another number than that of the
    shards."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for divisor in (getattr(group, "gradient_divide_factor", None) for group in groups if group is not None):
            if divisor not in (None, shards):
                raise EngineError(
                    f"the FSDP module {name or type(module).__name__!r} divides the sum of the gradients over the shards "
                    f"by {divisor:g}, and not by inner_shards {shards}: its gradients are {shards / divisor:g} times as "
                    f"large as those of the mean loss. Leave set_gradient_divide_factor out (in torchtitan: "
                    f'disable_fsdp_gradient_division), and return the mean loss, or with loss_reduction "token" the sum '
                    f"and the number of tokens"
                )


def _saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and persistent buffers by name, without copies and gradients.

    ``state_dict()`` would run the hooks of modules. One that divides a fused weight (torchtitan's) returns copies, into
    which nothing can be loaded, and gathers the weight, for which all ranks have to call it at the same time."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, FSDPModule):
            part.reshard()  # an evaluation can leave the root's parameters gathered
        for name, one in (*part._parameters.items(), *part._buffers.items()):
            if one is not None and name not in part._non_persistent_buffers_set:
                found[plain_name(f"{prefix}.{name}" if prefix else name)] = one.detach()
    return found


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with a state beside their tensors (``nn.Module.get_extra_state``), with its name."""
    return [
        (plain_name(f"{name}._extra_state"), part)
        for name, part in model.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]


def _check_equal(model: nn.Module, layout: Layout) -> None:
    """Raise ``EngineError`` unless the slices of a stage and shard hold the same values of plain tensors. All ranks of the
    group call it."""
    if layout.slices == 1:
        return
    plain = {name: one for name, one in _saved(model).items() if not isinstance(one, DTensor)}
    said: list[dict[str, int]] = [{}] * layout.size
    dist.all_gather_object(said, {name: tensor_checksum.checksum([("", one)]) for name, one in plain.items()})
    first = said[layout.position - layout.slice]
    for name in plain:
        if said[layout.position][name] != first.get(name):
            raise EngineError(
                f"{name} has other values at rank {layout.position} of the group than at rank "
                f"{layout.position - layout.slice}, though tensor parallelism does not divide it; call torch.manual_seed "
                f"with the same number at all slices of a stage before the model is built"
            )


def _split(whole: torch.Tensor, layout: Layout) -> set[str]:
    """Return the axes of the layout along which a parameter is divided, each into as many parts as the axis has ranks."""
    found: set[str] = set()
    if not isinstance(whole, DTensor):
        return found
    for axis, placement in enumerate(whole.placements):
        ranks = dist.get_process_group_ranks(whole.device_mesh.get_group(axis))
        places = [Layout.of(rank, stages=layout.stages, slices=layout.slices, shards=layout.shards) for rank in ranks]
        for name, size in (("shard", layout.shards), ("slice", layout.slices)):
            if not placement.is_replicate() and len({getattr(place, name) for place in places}) == size == len(ranks):
                found.add(name)
    return found


def _counts_here(whole: torch.Tensor, layout: Layout) -> bool:
    """Return whether this rank counts its part in norms. One of the ranks that hold the same part counts it."""
    split = _split(whole, layout)
    return ("shard" in split or layout.shard == 0) and ("slice" in split or layout.slice == 0)


def _box(whole: DTensor) -> list[list[int]]:
    """Return the shape of a DTensor, and the offset and the shape of this rank's part, which is a box."""
    place = list(whole.device_mesh.get_coordinate() or ())
    size, offset = list(whole.shape), [0] * whole.dim()
    axes = [(one, at, count) for one, at, count in zip(whole.placements, place, whole.device_mesh.shape, strict=True)]
    # FSDP divides what tensor parallelism has divided before it, though its axis is the first: such a shard is strided.
    plain = [axis for axis in axes if isinstance(axis[0], Shard)]
    strided = [axis for axis in reversed(axes) if not isinstance(axis[0], Shard) and not axis[0].is_replicate()]
    for placement, at, count in plain + strided:
        dim: int = getattr(placement, "dim")  # noqa: B009  # of a strided shard, which is no public class
        chunk = -(-size[dim] // count)
        begin = min(at * chunk, size[dim])
        offset[dim] += begin
        size[dim] = min(chunk, size[dim] - begin)
    assert size == list(_local(whole).shape), f"a part of {whole.placements} is no box"
    return [list(whole.shape), offset, size]


def _local(value: Any) -> Any:
    """Return a state with the local part of each DTensor, as a view."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    if isinstance(value, Mapping):
        return {key: _local(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_local(item) for item in value)
    return value


def _local_gradient(whole: torch.Tensor) -> torch.Tensor | None:
    gradient = whole.grad
    if not isinstance(gradient, DTensor) or not isinstance(whole, DTensor):
        return gradient
    if gradient.placements != whole.placements:  # a sum over the slices that is still to be made
        gradient = gradient.redistribute(placements=whole.placements)
    return gradient.to_local()


def _like(whole: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor with this local part, placed like a parameter."""
    if part is None or not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
