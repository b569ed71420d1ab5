"""Arguments of Megatron-LM's training scripts that say the same as keys of the config.

Megatron counts the samples of a microbatch for each data-parallel rank, the config for a whole group. Megatron's
data-parallel ranks are those of all groups, ``fault_tolerance.inner_shards`` of them in each group.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ft.config import parallelism
from megatron_ft.config.validators import number, whole_number
from megatron_ft.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ft.config.schema import RunConfig

_STAGES, _SLICES, _EXPERTS = (f"--{name}-model-parallel-size" for name in ("pipeline", "tensor", "expert"))
_SAMPLES, _BATCH, _CLIP = "--micro-batch-size", "--global-batch-size", "--clip-grad"
_KEYS = {
    _STAGES: parallelism.STAGES,
    _SLICES: parallelism.SLICES,
    _EXPERTS: parallelism.SHARDS,
    _SAMPLES: "train_micro_batch_size_per_gpu",
    _BATCH: "train_batch_size",
    _CLIP: "gradient_clipping",
}
_CONTEXT, _RAMPUP, _TOKENS = "--context-parallel-size", "--rampup-batch-size", "--calculate-per-token-loss"
_SEED, _SAVE, _LOAD = "--seed", "--save", "--load"
_MICROBATCHES = "gradient_accumulation_steps"


def settings(raw: Mapping[str, Any], words: Sequence[str], shards: int) -> dict[str, Any]:
    """Return the settings of a config together with those that the arguments of a script give.

    Args:
        raw: The content of a config file; may be empty. Keys that it leaves out are filled in.
        words: The arguments of the script. Only those that stand for a key of the config are read.
        shards: Number of shards of a step, which is the number of groups at the start of the run.

    Raises:
        ConfigError: An argument contradicts the config, is no number in its range, or asks for what is not supported.
    """
    given = _given(words)
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    _agree(found, given, _STAGES)
    _agree(found, given, _SLICES)
    experts = given.get(_EXPERTS, 1)
    if experts > 1 and parallelism.value_of(found, parallelism.SHARDS) is None:
        _agree(found, given, _EXPERTS)
    inner = parallelism.inner_shards(found)
    if inner % experts:
        raise ConfigError(
            f"{_EXPERTS} is {experts} and {parallelism.SHARDS} of the config is {inner}, the data-parallel ranks of a group "
            f"over which experts are divided; make {parallelism.SHARDS} a multiple of {experts}"
        )
    _agree(found, given, _SAMPLES, times=inner)
    samples, per_group = found.get(_KEYS[_SAMPLES]), found.get(_MICROBATCHES)
    if _BATCH in given and isinstance(samples, int) and isinstance(per_group, int):
        found.setdefault(_KEYS[_BATCH], samples * per_group * shards)
    _agree(found, given, _BATCH)
    if parallelism.value_of(found, _KEYS[_CLIP]) is None:
        given.setdefault(_CLIP, 1.0)  # Megatron's own default
    _agree(found, given, _CLIP)
    return found


def settings_of_script(raw: Mapping[str, Any], words: Sequence[str], shards: int, ranks: int | None) -> dict[str, Any]:
    """Return :func:`settings` for an unchanged script of Megatron-LM, which also divides sequences (context parallelism),
    changes the batch (ramp-up) and says how a loss is divided. Its ranks read their own samples.

    Args:
        ranks: Number of ranks of a group. Default: stages x slices x context-parallel ranks x data-parallel ranks, of which
            there are as many as ``fault_tolerance.inner_shards`` says, or as experts need.

    Raises:
        ConfigError: As :func:`settings`.
    """
    given = _given(words, script=True)
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    section = found.setdefault("fault_tolerance", {})
    section.setdefault("inner_shards_divide", "script")
    _agree(found, given, _STAGES)
    _agree(found, given, _SLICES)
    context = given.get(_CONTEXT, 1)
    width = parallelism.stages(found) * parallelism.slices(found) * context
    if ranks is not None and ranks % width:
        raise ConfigError(
            f"--ranks-per-group {ranks} is no multiple of {width}, the product of {_STAGES}, {_SLICES} and {_CONTEXT}; "
            f"change one of them"
        )
    if ranks is not None or parallelism.value_of(found, parallelism.SHARDS) is None:
        data = ranks // width if ranks is not None else max(1, given.get(_EXPERTS, 1) // context)
        section.setdefault("inner_shards", data * context)
    inner = parallelism.inner_shards(found)
    if inner % context:
        raise ConfigError(f"{parallelism.SHARDS} is {inner} and {_CONTEXT} is {context}; make it a multiple")
    data = inner // context
    given.setdefault(_SAMPLES, 1)
    given.setdefault(_BATCH, given[_SAMPLES] * data * shards)
    _agree(found, given, _SAMPLES, times=data)
    _agree(found, given, _BATCH)
    if parallelism.value_of(found, _KEYS[_CLIP]) is None:
        given.setdefault(_CLIP, 1.0)
    _agree(found, given, _CLIP)
    if _TOKENS in given:
        section.setdefault("loss_reduction", "token")
    if _SEED in given:
        section.setdefault("seed", given[_SEED])
    if {_SAVE, _LOAD} <= given.keys() and isinstance(checkpoint := section.setdefault("checkpoint", {}), dict):
        checkpoint.setdefault("script_directory", os.path.abspath(given[_LOAD]))
    return found


def check(run: RunConfig, words: Sequence[str]) -> None:
    """Raise ``ConfigError`` where the arguments ``words`` of a script contradict the config of its run."""
    samples = run.samples_per_microbatch
    in_force = {
        "pipeline": {"stages": run.stages},
        "tensor_parallel": {"autotp_size": run.slices},
        "fault_tolerance": {"inner_shards": run.inner_shards},
        _KEYS[_SAMPLES]: samples,
        _MICROBATCHES: run.microbatches_per_group,
        _KEYS[_BATCH]: samples * run.microbatches,
        _KEYS[_CLIP]: run.gradient_clipping,
    }
    settings(in_force, words, run.shards)


def _given(words: Sequence[str], script: bool = False) -> dict[str, Any]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for argument in _KEYS:
        kind = float if argument == _CLIP else int
        parser.add_argument(argument, dest=argument, type=kind, default=argparse.SUPPRESS)
    parser.add_argument(_CONTEXT, dest=_CONTEXT, type=int, default=argparse.SUPPRESS)
    parser.add_argument(_RAMPUP, dest=_RAMPUP, nargs="+", default=argparse.SUPPRESS)
    if script:
        parser.add_argument(_TOKENS, dest=_TOKENS, action="store_true", default=argparse.SUPPRESS)
        parser.add_argument(_SEED, dest=_SEED, type=int, default=argparse.SUPPRESS)
        parser.add_argument(_SAVE, dest=_SAVE, default=argparse.SUPPRESS)
        parser.add_argument(_LOAD, dest=_LOAD, default=argparse.SUPPRESS)
    try:
        given = vars(parser.parse_known_args(list(words))[0])
    except argparse.ArgumentError as error:
        raise ConfigError(f"an argument of the script is refused: {error}") from None
    if not script and (given.pop(_CONTEXT, 1) != 1 or given.pop(_RAMPUP, None) is not None):
        raise ConfigError(
            f"{_CONTEXT} and {_RAMPUP} are not supported: a group has stages x shards x slices ranks, and all steps have "
            f"the same batch; leave them out"
        )
    for argument, value in given.items():
        if argument in (_RAMPUP, _TOKENS, _SEED, _SAVE, _LOAD):
            continue
        (number(0) if argument == _CLIP else whole_number(1))(argument, value)
    return given


def _agree(found: dict[str, Any], given: Mapping[str, Any], argument: str, times: int = 1) -> None:
    """Fill in the key of an argument that is given. Its value is ``times`` the argument's."""
    if argument not in given:
        return
    key, value = _KEYS[argument], given[argument] * times
    has = parallelism.value_of(found, key)
    if has is not None and has != value:
        by = f" x {parallelism.SHARDS} {times}" if times > 1 else ""
        of = f" (shards x {_MICROBATCHES} x {_KEYS[_SAMPLES]})" if argument == _BATCH else ""
        raise ConfigError(
            f"{argument} {given[argument]}{by} makes {key}{of} {value} and the config says {has}; correct one of them, or "
            f"leave one out"
        )
    section, _, name = key.rpartition(".")
    (found.setdefault(section, {}) if section else found)[name] = value
