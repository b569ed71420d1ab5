"""The model in a checkpoint as one process would hold it: stages, slices, shards and experts are put together.

The ranks of a group hold the stages of a pipeline and the slices of tensor parallelism. Stages have different parameters. A
parameter that is split over the slices says how: with Megatron's attributes ``partition_dim`` and ``partition_stride``,
which the DeepSpeed engine saves (``KEY``). FSDP2 and torch's pipelines say which part each rank holds
(``run.engines.port.PARTS``), and so do models of Megatron-core (``run.engines.port.MEGATRON``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ft.config import parallelism
from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError
from megatron_ft.run.checkpoint import reshard
from megatron_ft.run.checkpoint.reader import load
from megatron_ft.run.engines.port import MEGATRON, MODEL_CONFIG, PARTITIONS, PARTS

KEY = "sharding"
"""In a saved state: parameter -> [axis along which it is cut, number of matrices below each other that are each cut]."""

Tensors = dict[str, torch.Tensor]


@dataclass
class Model:
    """A whole model, on the CPU.

    Attributes:
        step: Step that starts from it.
        tensors: Parameters and buffers by name.
        config: Content of Hugging Face's ``config.json``; empty if the model is not known to have one.
        settings: Settings of Megatron-core's model; empty for others.
        keyed: The same tensors by their names in Megatron's checkpoints; empty for other models.
        objects: Names of what is no tensor in Megatron's checkpoints.
        content: Metadata of these names, which Megatron's checkpoints have.
    """

    step: int
    tensors: Tensors = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    keyed: Tensors = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)


def of(found: Found) -> Model:
    """Return the model in a checkpoint.

    Raises ``CheckpointError`` for a damaged checkpoint, or slices of which nothing says how they are put together.
    """
    meta = found.manifest["meta"]
    stages, slices = parallelism.stages(meta["settings"]), parallelism.slices(meta["settings"])
    _, shards, _ = meta.get("layout", [stages, 1, slices])
    width = shards * slices
    model = Model(found.step, config=meta["settings"].get("fault_tolerance.model", {}))
    whole = _Megatron(found, model)
    for stage in range(stages):
        states = [load(found, stage * width + number) for number in range(width)]
        model.config = states[0].get(MODEL_CONFIG, model.config)
        if "masters" in states[0] and "optimizers" in states[0]:
            for state in states:
                whole.add(state)
            continue
        for name, tensor in _stage(found, states).items():
            if name in model.tensors and not torch.equal(model.tensors[name], tensor):
                raise CheckpointError(
                    f"{found.path} has different values of {name} in two stages; it cannot be exported"
                )
            model.tensors[name] = tensor
    if model.keyed:
        model.tensors = dict(whole.named())
    return model


def _stage(found: Found, states: Sequence[Mapping[str, Any]]) -> Tensors:
    """Return the tensors of one stage, from the states of its ranks."""
    first = states[0]
    if PARTS in first:
        return dict(reshard.whole([states], found.path)["model"])
    if PARTITIONS in first:  # the module lacks its parameters with ZeRO-3
        tensors = {**reshard.whole_parameters(states), **first["module"]}
        if lacks := [name for name in first[PARTITIONS]["shapes"] if name not in tensors]:
            raise CheckpointError(
                f"{found.path} does not have {lacks[0]}, because ZeRO-3 keeps only what is trained; it cannot be exported"
            )
        return tensors
    models = [state["module"] if "module" in state else state["model"] for state in states]
    how = first.get(KEY, {})
    return {name: _joined(found, name, [model[name] for model in models], how.get(name)) for name in models[0]}


def _joined(found: Found, name: str, parts: Sequence[torch.Tensor], how: Sequence[int] | None) -> torch.Tensor:
    if how is None:
        if all(torch.equal(parts[0], part) for part in parts[1:]):
            return parts[0]
        raise CheckpointError(
            f"{found.path}: {name} differs between the slices, and nothing says how it is cut; give the parameter the "
            f"attributes tensor_model_parallel, partition_dim (the axis) and partition_stride (the number of matrices below "
            f"each other, default 1), and save again"
        )
    axis, matrices = how
    cut = [part.chunk(matrices, 0) for part in parts]
    return torch.cat([torch.cat([each[number] for each in cut], axis) for number in range(matrices)], 0).contiguous()


class _Megatron:
    """A model of Megatron-core that is put together rank by rank."""

    def __init__(self, found: Found, model: Model) -> None:
        self._path, self._model = found.path, model
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}
        self._filled: set[tuple[str, tuple[int, ...]]] = set()

    def add(self, state: Mapping[str, Any]) -> None:
        """Add the tensors of one rank. Raises ``CheckpointError`` for one of which nothing says where it belongs."""
        if MEGATRON not in state:
            raise CheckpointError(
                f"{self._path} was saved by an older megatron_ft, which did not say how a Megatron model is put together; "
                f"go on with the run, and export a later checkpoint"
            )
        self._model.settings, self._model.content = state[MEGATRON]["settings"], state[MEGATRON]["content"]
        self._model.objects |= dict.fromkeys(state[MEGATRON]["objects"])
        known = state[MEGATRON]["tensors"]
        for name, tensor in state["model"].items():
            if name not in known:
                raise CheckpointError(
                    f"{self._path}: Megatron's sharded_state_dict does not say how the parts of {name} are put together, so "
                    f"the model cannot be exported"
                )
            self._put(known[name], tensor)

    def _put(self, what: Mapping[str, Any], tensor: torch.Tensor) -> None:
        key, boxes = what["key"], what["boxes"]
        whole = self._model.keyed.setdefault(key, tensor.new_zeros(what["shape"]))
        # A copy at a later stage, such as a shared embedding, does not exist in a model that is not divided.
        self._names.setdefault((key, tuple(boxes[0][0][: what["stacked"]])), what["name"])
        rows = tensor.split([size[what["stacked"]] for _, size in boxes]) if len(boxes) > 1 else [tensor]
        for (offset, size), piece in zip(boxes, rows, strict=True):
            place = tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))
            piece, at = piece.reshape(size), (key, tuple(offset))
            if at in self._filled and not torch.equal(whole[place], piece):
                raise CheckpointError(
                    f"{self._path} has different values of {key} in two ranks that hold the same part of it, so the model "
                    f"cannot be exported; layers that are divided must be Megatron modules, which say so"
                )
            self._filled.add(at)
            whole[place] = piece

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their names in a model that is not divided."""
        for (key, at), name in self._names.items():
            yield name, self._model.keyed[key][at] if at else self._model.keyed[key]
