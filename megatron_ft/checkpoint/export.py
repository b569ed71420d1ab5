"""A checkpoint as a whole model for other programs: a PyTorch state dict, or the files that Hugging Face's loaders read.

The ranks of a group hold the stages of a pipeline and the slices of tensor parallelism. Stages have different parameters. A
parameter that is split over the slices says how: with Megatron's attributes ``partition_dim`` and ``partition_stride``,
which the DeepSpeed engine saves (``KEY``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ft.checkpoint import files, reshard, tensor_files
from megatron_ft.checkpoint.reader import load
from megatron_ft.config import parallelism
from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.engines.port import PARTS, STAGED
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.utils import atomic_file

KEY = "sharding"
"""In a saved state: parameter -> [axis along which it is cut, number of matrices below each other that are each cut]."""
_EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face's name of the weight from whose rows the size of the vocabulary is read."""

Tensors = dict[str, torch.Tensor]


def whole_model(found: Found) -> Tensors:
    """Return all parameters and buffers of the model in a checkpoint, by name, on the CPU.

    Raises ``CheckpointError`` for a damaged checkpoint, or slices of which nothing says how they are put together.
    """
    settings = found.manifest["meta"]["settings"]
    stages, slices = parallelism.stages(settings), parallelism.slices(settings)
    _, shards, _ = found.manifest["meta"].get("layout", [stages, 1, slices])
    whole: Tensors = {}
    for stage in range(stages):
        width = shards * slices
        for name, tensor in _stage(found, [load(found, stage * width + number) for number in range(width)]).items():
            if name in whole and not torch.equal(whole[name], tensor):
                raise CheckpointError(
                    f"{found.path} has different values of {name} in two stages; it cannot be exported"
                )
            whole[name] = tensor
    return whole


def _stage(found: Found, states: Sequence[Mapping[str, Any]]) -> Tensors:
    """Return the tensors of one stage, from the states of its ranks."""
    first = states[0]
    if PARTS in first:
        model = reshard.whole(states, found.path)["model"]
        return {name.partition(".")[2] if first.get(STAGED) else name: one for name, one in model.items()}
    if "masters" in first and "optimizers" in first:
        raise CheckpointError(f"{found.path} is of megatron-core, whose models cannot be exported yet")
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


def renamed(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
    """Return the tensors under other names.

    Args:
        names: old beginning -> new one, of whole parts between dots. ``"1-4": "model.layers.*"`` stands for the four
            beginnings 1 to 4, which become ``model.layers.0`` to ``model.layers.3``.

    Raises:
        ConfigError: a tensor has none of the beginnings, or two tensors with different values get one name.
    """
    beginnings = dict(_each(names))
    found: Tensors = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        old = next((one for end in range(len(parts), 0, -1) if (one := ".".join(parts[:end])) in beginnings), None)
        if old is None:
            raise ConfigError(f"--names has no entry for {name}; known are: {', '.join(beginnings)}")
        new = beginnings[old] + name[len(old) :]
        if new in found and not torch.equal(found[new], tensor):
            raise ConfigError(f"--names gives {name} and another tensor with other values the name {new}")
        found[new] = tensor
    return found


def _each(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for old, new in names.items():
        first, dash, last = old.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal()):
            yield old, new
            continue
        if "*" not in new or int(first) > int(last):
            raise ConfigError(
                f"--names: {old!r} stands for {first} to {last}, so {new!r} needs a * for the number from 0"
            )
        for number in range(int(first), int(last) + 1):
            yield str(number), new.replace("*", str(number - int(first)))


def _write_torch(tensors: Tensors, place: Path, model: Mapping[str, Any]) -> None:
    torch.save(tensors, place)


def _write_hf(tensors: Tensors, place: Path, model: Mapping[str, Any]) -> None:
    place.mkdir()
    files.write(place / "model.safetensors", tensor_files.encode({n: t.contiguous() for n, t in tensors.items()}))
    vocabulary = {"vocab_size": len(tensors[_EMBEDDING])} if _EMBEDDING in tensors else {}
    if model:
        atomic_file.write_json(place / "config.json", {**model, **vocabulary}, mode=0o644)


FORMATS: dict[str, Callable[[Tensors, Path, Mapping[str, Any]], None]] = {"torch": _write_torch, "hf": _write_hf}


def export(found: Found, kind: str, out: Path, names: Mapping[str, str]) -> Tensors:
    """Write the model of a checkpoint, and return its tensors.

    Args:
        kind: ``torch``: a file for ``torch.load``, name -> tensor; ``hf``: a directory with ``model.safetensors`` and, if
            the config had ``fault_tolerance.model``, ``config.json``.
        out: the file or directory, which must not exist; it appears when it is complete.
        names: as for :func:`renamed`; empty: the names stay.

    Raises:
        CheckpointError, ConfigError: as above, or ``out`` exists or cannot be written.
    """
    if out.exists():
        raise ConfigError(f"--out {out} exists; name another place")
    tensors = whole_model(found)
    tensors = renamed(tensors, names) if names else tensors
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with files.explained("writing", out):
        try:
            FORMATS[kind](tensors, temporary, found.manifest["meta"]["settings"].get("fault_tolerance.model", {}))
            os.rename(temporary, out)
        except RuntimeError as error:  # torch.save's, of a full disk
            raise CheckpointError(f"{out} cannot be written: {str(error).splitlines()[0]}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
    return tensors
