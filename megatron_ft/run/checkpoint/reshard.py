"""States of a group whose ranks hold parts of each tensor, put together and divided anew: a checkpoint of 2 shards on 4.

An engine that can be divided anew says in its state what each rank holds: boxes of tensors (``run.engines.port.PARTS``),
also with stages of a pipeline, or with ZeRO-2 and 3 pieces of flattened parameters (``run.engines.port.PARTITIONS``).

Failures it assumes: none; the files have been checked when they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from megatron_ft.errors import CheckpointError
from megatron_ft.run.engines.port import PARTITIONS, PARTS, STAGED

_WEIGHT = "weight"
"""Key of the fp32 weight of a parameter beside its moments."""


def whole(stages: Sequence[Sequence[Mapping[str, Any]]], path: str) -> dict[str, Any]:
    """Return the state of a group as one rank alone would hold it.

    Args:
        stages: the states of the ranks of each stage.
        path: of the checkpoint.

    Raises:
        CheckpointError: the states say nothing of their parts, or two stages have different tensors of one name.
    """
    first = stages[0][0]
    if PARTITIONS in first:
        return _whole_of_partitions(stages[0])
    found = [_whole_stage(states, path) for states in stages]
    if STAGED not in first:
        return found[0]
    model: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    for state in found:
        names = state[PARTS].get("names")
        if names is None:
            raise _cannot_be_divided(path)
        _add_stage(model, _of_whole_model(state["model"]), path)
        _add_stage(buffers, _of_whole_model(state.get("buffers", {})), path)
        moments |= {names[number]: values for number, values in state["optimizer"]["state"].items()}
    state = {**found[0], "model": model, "optimizer": {**found[0]["optimizer"], "state": moments}}
    return state | ({"buffers": buffers} if buffers else {})


def cut(state: Mapping[str, Any], own: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the part of a whole state that a rank holds.

    Args:
        state: of :func:`whole`.
        own: the state that the rank has, which says what it holds.
        path: of the checkpoint.

    Raises:
        CheckpointError: the optimizer has other groups of parameters.
    """
    groups, own_groups = (_torch_state(one)["param_groups"] for one in (state, own))
    if len(groups) != len(own_groups):
        raise CheckpointError(
            f"checkpoint {path} has {len(groups)} groups of parameters in its optimizer, and here are {len(own_groups)}; "
            f"start the script that saved it (with stages, each of them needs all groups)"
        )
    settings = [{**saved, "params": mine["params"]} for saved, mine in zip(groups, own_groups, strict=True)]
    if PARTITIONS in own:
        return _cut_into_partitions(state, own, settings)
    parts, moments = own[PARTS], state["optimizer"]["state"]
    staged = STAGED in own
    if staged:
        names = parts["names"]
        moments = {number: moments[name] for number, name in enumerate(names) if name in moments}
    pieces = {
        number: {key: _piece(value, parts["optimizer"].get(number)) for key, value in values.items()}
        for number, values in moments.items()
    }
    found = {**state, "optimizer": {**state["optimizer"], "state": pieces, "param_groups": settings}}
    for kind in ("model", "buffers"):
        if kind in state:
            has = (
                {name: name.partition(".")[2] for name in own.get(kind, {})}
                if staged
                else {one: one for one in state[kind]}
            )
            boxes = parts["model"] if kind == "model" else {}
            found[kind] = {
                name: _piece(state[kind][of], boxes.get(name)) for name, of in has.items() if of in state[kind]
            }
    return found


def whole_parameters(states: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the fp32 weights that the ranks of a ZeRO engine update, by the names of the parameters."""
    what = states[0][PARTITIONS]
    joined = _whole_of_partitions(states)["optimizer"]["torch"]["state"]
    found = {name: values[_WEIGHT].view(what["shapes"][name]) for name, values in joined.items()}
    return found | {name: found[of] for name, of in what["tied"].items() if of in found}


def _torch_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the torch optimizer, which DeepSpeed wraps."""
    optimizer: Mapping[str, Any] = state["optimizer"]
    return optimizer["torch"] if PARTITIONS in state else optimizer


def _cannot_be_divided(path: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} was saved by an engine whose state cannot be divided anew; start with as many ranks in a "
        f"group, divided in the same way, as it was saved with"
    )


def _add_stage(whole: dict[str, Any], stage: Mapping[str, torch.Tensor], path: str) -> None:
    """Add the tensors of a stage. A copy of equal values, such as a table of positions, is one tensor of the model."""
    for name, tensor in stage.items():
        if name in whole and not torch.equal(whole[name], tensor):
            raise CheckpointError(
                f"checkpoint {path} has different values of {name} in two stages, so it cannot be divided anew; start with "
                f"the stages that it was saved with (or give stages the parameter names of the whole model from the start)"
            )
        whole[name] = tensor


def _of_whole_model(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def _whole_stage(states: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    if not all(PARTS in state for state in states):
        raise _cannot_be_divided(path)
    first = states[0]
    model = {name: _joined([(state["model"][name], state[PARTS]["model"].get(name)) for state in states])
             for name in first["model"]}  # fmt: skip
    moments = {
        number: {key: _joined([_moment(state, number, key) for state in states]) for key in values}
        for number, values in first["optimizer"]["state"].items()
    }
    return {**first, "model": model, "optimizer": {**first["optimizer"], "state": moments}}


def _whole_of_partitions(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state with the moments and the fp32 weight of each whole parameter, by its name."""
    shapes = states[0][PARTITIONS]["shapes"]
    found: dict[str, dict[str, Any]] = {}
    for state in states:
        optimizer = state["optimizer"]
        for number, pieces in enumerate(state[PARTITIONS]["pieces"]):
            master = optimizer["masters"][number]
            for key, value in {_WEIGHT: master, **optimizer["torch"]["state"].get(number, {})}.items():
                for name, at, begin, count in pieces:
                    values = found.setdefault(name, {})
                    if not isinstance(value, torch.Tensor) or value.shape != master.shape:
                        values[key] = value
                        continue
                    whole = values.setdefault(key, value.new_zeros(prod(shapes[name])))
                    whole[begin : begin + count] = value[at : at + count]
    first = states[0]
    return {**first, "optimizer": {**first["optimizer"], "torch": {**first["optimizer"]["torch"], "state": found}}}


def _cut_into_partitions(
    state: Mapping[str, Any], own: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    saved: Mapping[str, Mapping[str, Any]] = state["optimizer"]["torch"]["state"]
    masters, moments = [], {}
    for number, pieces in enumerate(own[PARTITIONS]["pieces"]):
        size = own["optimizer"]["masters"][number].shape
        # A partition that only fills up has the keys of any parameter.
        values = {
            key: value.new_zeros(size) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in saved[pieces[0][0] if pieces else next(iter(saved))].items()
        }
        for name, at, begin, count in pieces:
            for key, value in saved[name].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    values[key][at : at + count] = value[begin : begin + count]
        masters.append(values.pop(_WEIGHT))
        if values:
            moments[number] = values
    inner = {**state["optimizer"]["torch"], "state": moments, "param_groups": list(settings)}
    return {**state, "optimizer": {**state["optimizer"], "torch": inner, "masters": masters}}


def _moment(state: Mapping[str, Any], number: int, key: str) -> tuple[Any, Any]:
    value, box = state["optimizer"]["state"][number][key], state[PARTS]["optimizer"].get(number)
    part = isinstance(value, torch.Tensor) and box is not None and list(value.shape) == box[2]
    return value, box if part else None


def _joined(parts: Iterable[tuple[Any, Sequence[Any] | None]]) -> Any:
    found: torch.Tensor | None = None
    for value, box in parts:
        if box is None:
            return value
        if found is None:
            found = value.new_zeros(box[0])
        found[_slices(box[1], list(value.shape))] = value
    return found


def _piece(value: Any, box: Sequence[Any] | None) -> Any:
    if box is None or not isinstance(value, torch.Tensor) or list(value.shape) != list(box[0]):
        return value
    return value[_slices(box[1], box[2])].clone()


def _slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))
