"""The metadata of a checkpoint, and how a rank continues from it.

Every rank reads its own position's files from the directory that all hosts share, so no group depends on another. A
group that cannot read its files is lost, and the others continue.

Failures assumed: files are damaged after the launcher has checked them, so they are checked again while they are read.
A script or a config that would train another model is refused before any training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config import parallelism
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint import reshard
from megatron_ft.run.checkpoint.memory_copies import Locate, nowhere
from megatron_ft.run.collectives.state_transfer import named
from megatron_ft.run.engines.port import PARTITIONS, PARTS, STAGED, Engine, StepResult

KEY = "resume"
"""Key of the control store with the checkpoint that the run continues from. Without it, the run begins."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run continues from: its path, the next step, the id of its run, and its metadata."""

    path: str
    step: int
    of_run: str
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, found: Found) -> Origin:
        return cls(found.path, found.step, found.manifest["run_id"], found.manifest["meta"])


def meta(
    config: RunConfig,
    steps: int,
    result: StepResult,
    speeds: Mapping[str, Any],
    job: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the metadata of a checkpoint, which belongs to the state beside the engine's.

    Args:
        config: Settings of the run.
        steps: Number of steps of the run.
        result: Result of the last step.
        speeds: Measured speeds of the groups.
        job: How long all starts of the job have run.
        identity: Identity of the data (``run.data_identity``).
    """
    return {
        "shards": config.shards,
        "layout": _layout(config),
        "microbatches_per_shard": config.microbatches_per_group,
        "settings": settings(config),
        "steps": steps,
        "result": result.to_json(),
        "speeds": speeds,
        "job": dict(job),
        "identity": dict(identity),
    }


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that affect the result of training, by their names in the config."""
    section = config.fault_tolerance
    engine = {key: value for key, value in sorted(config.engine.items()) if key not in parallelism.WITHOUT_EFFECT}
    if section.loss_reduction != "microbatch":  # older checkpoints do not have it
        engine["fault_tolerance.loss_reduction"] = section.loss_reduction
    if section.reduction != "fast":
        engine |= {"fault_tolerance.reduction": section.reduction, "fault_tolerance.exact_bits": section.exact_bits}
    return {
        "train_micro_batch_size_per_gpu": config.samples_per_microbatch,
        "gradient_accumulation_steps": config.microbatches_per_group,
        "gradient_clipping": config.gradient_clipping,
        "fault_tolerance.seed": section.seed,
        "fault_tolerance.nonfinite": section.nonfinite,
        "fault_tolerance.reduce_dtype": section.reduce_dtype,
        "fault_tolerance.model": dict(section.model),
        **engine,
    }


def check(config: RunConfig, path: str, was: Mapping[str, Any], but: tuple[str, ...] = ()) -> None:
    """Raise ``ConfigError`` for settings that differ from those in the checkpoint's ``meta``, except the names in
    ``but``."""
    # The stages are compared when the state is divided.
    now, before = _without_stages(settings(config)), _without_stages(was["settings"])
    for name in sorted(now.keys() | before.keys()):
        mine, theirs = now.get(name), before.get(name)
        if mine != theirs and name not in but:
            raise ConfigError(
                f"{name} is {_shown(mine)}, but checkpoint {path} was saved with {_shown(theirs)}; settings "
                f"that affect the result must stay the same when a run continues: set it back, or begin anew in another "
                f"checkpoint.directory"
            )


def check_division(config: RunConfig, found: Found) -> None:
    """Raise ``ConfigError`` unless a checkpoint can be loaded by groups that are divided as the config says."""
    ranks = found.manifest["ranks_per_group"]
    layout, mine = found.manifest["meta"].get("layout"), _layout(config)
    if ranks == config.ranks_per_group and layout == mine:
        return
    kinds = checkpoint.keys(found)
    stages = layout[0] if layout else 0
    fits = config.stages > 1 if STAGED in kinds else stages == config.stages == 1
    whole = config.stages * config.inner_shards * config.slices == config.ranks_per_group
    if not (fits and whole and kinds & {PARTS, PARTITIONS}):
        raise ConfigError(
            f"a group has {config.ranks_per_group} ranks (stages, inner_shards, slices: {mine}), but checkpoint "
            f"{found.path} was saved with {ranks} ({layout or 'unknown'}), and its engine cannot divide it anew; start with "
            f"the ranks, stages, slices and inner_shards that it was saved with (the number of groups may differ), or name "
            f"another checkpoint.directory"
        )


def _layout(config: RunConfig) -> list[int]:
    return [config.stages, config.inner_shards, config.slices]


def _without_stages(settings: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in settings.get("pipeline", {}).items() if key != "stages"}
    return {key: value for key, value in settings.items() if key != "pipeline"} | ({"pipeline": rest} if rest else {})


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def load(
    origin: Origin,
    config: RunConfig,
    position: int,
    engine: Engine,
    copies: Locate = nowhere,
    registered: Callable[[Mapping[str, Any]], None] = lambda state: None,
) -> StepResult:
    """Load the state of ``position`` into the engine. Returns the result of the last step. Raises ``FTError``.

    ``registered`` is called with the state of the script's objects (``run.registered_state``), by name.
    """
    check(config, origin.path, origin.meta)
    found = checkpoint.inspect(Path(origin.path))
    if origin.meta["layout"] == _layout(config):
        state = dict(checkpoint.load(found, position, copies))
    else:
        state = _divided_anew(found, engine, copies)
    objects = state.pop("registered", {})
    own, saved = dict(named(engine.state())), dict(named(state))
    for path, tensor in own.items():
        _check_fits(origin, path, tensor, saved.get(path))
    try:
        engine.load_state(state)
        registered(objects)
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint {origin.path} does not fit this model or its optimizer: {why}; start the script that saved it"
        ) from error
    return StepResult.from_json(origin.meta["result"])


def _divided_anew(found: Found, engine: Engine, copies: Locate) -> dict[str, Any]:
    """Return the part of a checkpoint that this rank holds, whose group is divided otherwise than that which saved it."""
    stages, shards, slices = found.manifest["meta"]["layout"]
    width = shards * slices
    saved = [
        [checkpoint.load(found, stage * width + number, copies) for number in range(width)] for stage in range(stages)
    ]
    mine = engine.state()
    if any((key in mine) != (key in saved[0][0]) for key in (PARTS, PARTITIONS, STAGED)):
        raise CheckpointError(
            f"checkpoint {found.path} was saved by groups of {stages * width} ranks, divided otherwise than these; this "
            f"engine cannot divide it anew: start with the stages, slices and inner_shards that it was saved with"
        )
    state = reshard.cut(reshard.whole(saved, found.path), mine, found.path)
    state.pop("grid", None)  # of exact reduction: it belongs to the parts that a rank had
    return state


def _check_fits(origin: Origin, path: str, mine: torch.Tensor, theirs: torch.Tensor | None) -> None:
    """Raise ``CheckpointError`` unless the checkpoint has this tensor with an equal shape.

    Only tensors that the engine has before its first step are checked; the optimizer creates more in that step.
    """
    shape = list(mine.shape)
    if theirs is None or list(theirs.shape) != shape:
        has = "has no such tensor" if theirs is None else f"has one of shape {list(theirs.shape)}"
        raise CheckpointError(
            f"{path} of this model is a tensor of shape {shape}, but checkpoint {origin.path} {has}; start the script with "
            f"the model that was saved, or begin anew in another checkpoint.directory"
        )
