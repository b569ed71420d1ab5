"""What a checkpoint says about the run it is of, and how a rank goes on from it.

Every rank reads its own position's files from the directory that all hosts share: no group needs another one to be there,
and one that cannot read them is lost like any other while the rest goes on.

Failures it assumes: the files were whole when the launcher looked, and are checked once more while they are read. A script
or a config that would learn something else than before is refused; nothing is trained then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config import RunConfig
from megatron_ft.core.checkpoints import Found
from megatron_ft.engines.base import Engine, StepResult
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.runtime import checkpoint
from megatron_ft.runtime.checkpoint.memory import Locate, nowhere

KEY = "resume"
"""Of the control store: what the run goes on from. Nothing there: it begins."""
_SILENT = frozenset(
    """steps_per_print wall_clock_breakdown dump_state flops_profiler comms_logger tensorboard wandb csv_monitor
    monitor_config autotuning checkpoint memory_breakdown""".split()
)
"""Settings of DeepSpeed that change nothing of what is learned."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint at ``path`` that a run goes on from: the state that ``step`` starts from, of run ``of_run``."""

    path: str
    step: int
    of_run: str
    meta: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: Found) -> Origin:
        return cls(found.path, found.step, found.manifest["run_id"], found.manifest["meta"])


def meta(
    config: RunConfig, steps: int, result: StepResult, speeds: Mapping[str, Any], job: Mapping[str, Any]
) -> dict[str, Any]:
    """What belongs to a state beside the engine's; ``job``: how long all starts of it have run."""
    return {
        "shards": config.shards,
        "microbatches_per_shard": config.microbatches_per_group,
        "settings": settings(config),
        "steps": steps,
        "result": result.to_json(),
        "speeds": speeds,
        "job": dict(job),
    }


def settings(config: RunConfig) -> dict[str, Any]:
    """Those that change what is learned, by the names that a user gives them."""
    section = config.fault_tolerance
    engine = {key: value for key, value in sorted(config.engine.items()) if key not in _SILENT}
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
    """Refuse to go on with other settings than those in the checkpoint's ``meta``; ``but``: not known here yet."""
    now, before = settings(config), was["settings"]
    for name in sorted(now.keys() | before.keys()):
        mine, theirs = now.get(name), before.get(name)
        if mine != theirs and name not in but:
            raise ConfigError(
                f"{name} is {_shown(mine)}, but checkpoint {path} was saved with {_shown(theirs)}; a run goes on with the "
                f"settings that decide what it learns as they were: set it back, or begin anew in another "
                f"checkpoint.directory"
            )


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def load(origin: Origin, config: RunConfig, position: int, engine: Engine, copies: Locate = nowhere) -> StepResult:
    """Put the state of ``position`` in place; the result of the step before it. Raises ``FTError``."""
    check(config, origin.path, origin.meta)
    state = checkpoint.load(checkpoint.look(Path(origin.path)), position, copies)
    own = dict(_tensors(engine.state(), ""))
    saved = dict(_tensors(state, ""))
    for path, tensor in own.items():
        _check_fits(origin, path, tensor, saved.get(path))
    try:
        engine.load_state(state)
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint {origin.path} does not fit this model or its optimizer: {why}; start the script it was saved by"
        ) from error
    return StepResult(*origin.meta["result"])


def _check_fits(origin: Origin, path: str, mine: torch.Tensor, theirs: torch.Tensor | None) -> None:
    """What the engine has before its first step must be there, and be as large; the optimizer gets more with that step."""
    shape = list(mine.shape)
    if theirs is None or list(theirs.shape) != shape:
        has = "has no such tensor" if theirs is None else f"has one of shape {list(theirs.shape)}"
        raise CheckpointError(
            f"{path} of this model is a tensor of shape {shape}, but checkpoint {origin.path} {has}; start the script with "
            f"the model it was saved with, or begin anew in another checkpoint.directory"
        )


def _tensors(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _tensors(value, f"{path}[{number}]")
