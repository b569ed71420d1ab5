"""Checkpoints out of ``megatron_ft``: the whole model in the files that other programs load."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.run.checkpoint import llama, tensor_files, undivided
from megatron_ft.run.checkpoint.undivided import Model, Tensors
from megatron_ft.utils import durable_file, shared_file

_EMBEDDING = "model.embed_tokens.weight"
"""Hugging Face's name of the weight from whose rows the size of the vocabulary is read."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The formats of a distributed checkpoint of Megatron-core, in which its readers look them up."""


def renamed(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
    """Return the tensors under other names.

    Args:
        names: old beginning -> new one, of whole parts between dots; ``""`` takes the old one away.
            ``"1-4": "model.layers.*"`` stands for the four beginnings 1 to 4, which become ``model.layers.0`` to
            ``model.layers.3``.

    Raises:
        ConfigError: a tensor has none of the beginnings, or two tensors with different values get one name.
    """
    ranges = list(_ranges(names))

    def new_beginning(old: str) -> str | None:
        if old in names:
            return names[old]
        found = (new.replace("*", str(int(old) - one.start)) for one, new in ranges if int(old) in one)
        return next(found, None) if old.isdecimal() else None

    found: Tensors = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        old, begins = next(((old, new) for old in beginnings if (new := new_beginning(old)) is not None), (None, ""))
        if old is None:
            raise ConfigError(f"--names has no entry for {name}; known are: {', '.join(names)}")
        new = (begins + name[len(old) :]).removeprefix(".")
        if new in found and not torch.equal(found[new], tensor):
            raise ConfigError(f"--names gives {name} and another tensor with other values the name {new}")
        found[new] = tensor
    return found


def _ranges(names: Mapping[str, str]) -> Iterator[tuple[range, str]]:
    for old, new in names.items():
        first, dash, last = old.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal()):
            continue
        if "*" not in new or int(first) > int(last):
            raise ConfigError(
                f"--names: {old!r} stands for {first} to {last}, so {new!r} needs a * for the number from 0"
            )
        yield range(int(first), int(last) + 1), new


def _write_torch(model: Model, place: Path) -> None:
    torch.save(model.tensors, place)


def _write_hf(model: Model, place: Path) -> None:
    place.mkdir()
    pieces = tensor_files.encode({name: tensor.contiguous() for name, tensor in model.tensors.items()})
    durable_file.write(place / "model.safetensors", pieces)
    vocabulary = {"vocab_size": len(model.tensors[_EMBEDDING])} if _EMBEDDING in model.tensors else {}
    if model.config:
        shared_file.write_json(place / "config.json", {**model.config, **vocabulary}, mode=0o644)


def _write_deepspeed(model: Model, place: Path) -> None:
    tag = f"global_step{model.step}"
    place.mkdir()
    (place / tag).mkdir()
    layers = _layers(model.tensors)
    for number, layer in layers.items():
        torch.save(layer, place / tag / f"layer_{number:02d}-model_states.pt")
    counts = {"global_steps": model.step, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    torch.save({"module": None if layers else model.tensors, **counts}, place / tag / "mp_rank_00_model_states.pt")
    (place / "latest").write_text(tag, encoding="utf-8")


def _layers(tensors: Tensors) -> dict[int, Tensors]:
    """Return the tensors of each layer of a ``PipelineModule``, which DeepSpeed reads one by one; none of other models."""
    found: dict[int, Tensors] = {}
    for name, tensor in tensors.items():
        number, _, rest = name.partition(".")
        if not number.isdecimal():
            return {}
        found.setdefault(int(number), {})[rest] = tensor
    # Layers without tensors have files, too.
    return {number: found.get(number, {}) for number in range(max(found, default=-1) + 1)}


def _write_megatron(model: Model, place: Path) -> None:
    place.mkdir()
    iteration = place / f"iter_{model.step:07d}"
    # What is no tensor is a list of each rank's object.
    content = {**model.keyed, **{name: [None] for name in model.objects}}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a single process, which is meant
        dcp.save(content, checkpoint_id=iteration, no_dist=True)
    torch.save({"content_metadata": model.content, "iteration": model.step}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(json.dumps(_BACKENDS), encoding="utf-8")
    (place / "latest_checkpointed_iteration.txt").write_text(str(model.step), encoding="utf-8")


FORMATS: dict[str, Callable[[Model, Path], None]] = {
    "hf": _write_hf,
    "torch": _write_torch,
    "deepspeed": _write_deepspeed,
    "megatron": _write_megatron,
}


def export(found: Found, kind: str, out: Path, names: Mapping[str, str], beside: Sequence[Path] = ()) -> Model:
    """Write the model of a checkpoint, and return it.

    Args:
        kind: ``torch``: a file for ``torch.load``, name -> tensor; ``hf``: a directory with ``model.safetensors`` and, where
            the model's config is known, ``config.json``; ``deepspeed``: a directory for ``load_checkpoint`` with
            ``load_module_only``; ``megatron``: one for ``megatron.core.dist_checkpointing``.
        out: the file or directory, which must not exist; it appears when it is complete.
        names: as for :func:`renamed`; empty: the names stay.
        beside: files that are copied into the directory, such as those of a tokenizer.

    Raises:
        CheckpointError, ConfigError: as above, or ``out`` exists or cannot be written, or the model has no such format.
    """
    if out.exists():
        raise ConfigError(f"--out {out} exists; name another place")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is not a directory; make it, or name another place")
    model = undivided.of(found)
    if kind == "megatron":
        _check_megatron(found, model, names)
    elif kind == "hf" and model.keyed and not names:
        model.tensors, model.config = llama.converted(model.keyed, model.settings)
    elif kind == "hf" and not names and _layers(model.tensors):
        raise ConfigError(
            f"--format hf: the names in {found.path} begin with the numbers of a pipeline's layers, which transformers does "
            f"not know; give its names with --names FILE"
        )
    elif names:
        model.tensors = renamed(model.tensors, names)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with durable_file.explained("writing", out):
        try:
            FORMATS[kind](model, temporary)
            for file in beside:
                shutil.copyfile(file, temporary / file.name)
            os.rename(temporary, out)
        except (RuntimeError, CheckpointException) as error:  # torch's, of a full disk
            failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            why = str(next(iter(failures))[0]).splitlines()[0]
            raise CheckpointError(f"{out} cannot be written: {why}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
    return model


def _check_megatron(found: Found, model: Model, names: Mapping[str, str]) -> None:
    if not model.keyed:
        raise ConfigError(f"--format megatron: {found.path} is no checkpoint of session.megatron; use torch or hf")
    if names:
        raise ConfigError("--names has no effect with --format megatron, which keeps Megatron's names; leave it out")
