"""How the ranks of a group share its model, and which settings of DeepSpeed are refused, checked before any process
starts.

DeepSpeed's own keys define the division: ``pipeline.stages``, and ``tensor_parallel.autotp_size`` (the slices of a
stage). ``fault_tolerance.inner_shards`` says among how many ranks the samples of a microbatch are divided (FSDP, ZeRO-2 and
3, experts). ``fault_tolerance.model`` describes the model with the keys of Hugging Face's ``config.json``. Functions here
raise ``ConfigError``, with the value, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from megatron_ft.config.validators import AUTO, whole_number
from megatron_ft.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from megatron_ft.config.schema import RunConfig

WITHOUT_EFFECT = frozenset(
    """steps_per_print wall_clock_breakdown dump_state flops_profiler comms_logger tensorboard wandb csv_monitor
    monitor_config autotuning checkpoint memory_breakdown""".split()
)
"""Settings of DeepSpeed that do not affect the result of training."""
STAGES, SLICES, SHARDS = "pipeline.stages", "tensor_parallel.autotp_size", "fault_tolerance.inner_shards"


def stages(engine: Mapping[str, Any]) -> int:
    """Return the number of pipeline stages of a group; 1 without a pipeline."""
    return _count(engine, STAGES)


def slices(engine: Mapping[str, Any]) -> int:
    """Return the number of tensor-parallel ranks of each stage."""
    return _count(engine, SLICES)


def inner_shards(config: Mapping[str, Any]) -> int:
    """Return the number of ranks among which a group divides the samples of each microbatch."""
    return _count(config, SHARDS)


def zero_stage(engine: Mapping[str, Any]) -> int:
    """Return the stage of DeepSpeed's ZeRO, 0 to 3."""
    zero = engine.get("zero_optimization", {})
    return int(zero.get("stage", 0) if isinstance(zero, Mapping) else zero)


def ranks_per_group(config: Mapping[str, Any], asked: int | None) -> int:
    """Return ``stages x slices x inner_shards``, or ``asked`` where the config does not divide the model: such ranks share
    microbatches. ``config``: the whole file."""
    sizes = {STAGES: stages(config), SLICES: slices(config), SHARDS: inner_shards(config)}
    needed, has = prod(sizes.values()), " x ".join(f"{name} {size}" for name, size in sizes.items())
    if asked is None or asked == needed:
        return needed
    if needed == 1 and zero_stage(config) > 1:
        raise ConfigError(
            f"zero_optimization.stage is {zero_stage(config)}, which divides gradients over the ranks of a group, so they "
            f"compute together; set {SHARDS} to {asked} in place of --ranks-per-group"
        )
    if needed == 1:
        return asked
    if asked % needed:
        raise ConfigError(f"--ranks-per-group is {asked} but {has} are {needed}; leave it out, or correct one of them")
    raise ConfigError(
        f"--ranks-per-group is {asked} but {has} are {needed}: data parallelism would be declared twice, inside a group and "
        f"between groups; leave it out and start {asked // needed} times as many --groups"
    )


def refuse_whole_model(run: RunConfig, kind: str) -> None:
    """Raise ``EngineError`` when the config divides the model, but the engine holds it whole in every rank."""
    if run.stages * run.slices * run.inner_shards > 1:
        raise EngineError(
            f"{STAGES} is {run.stages}, {SLICES} is {run.slices} and {SHARDS} is {run.inner_shards}, but {kind} is not "
            f"divided; divide it (docs/engines.md says how), or leave these settings out"
        )


def refuse_stages(run: RunConfig, kind: str) -> None:
    """Raise ``EngineError`` when the config asks for a pipeline, but the engine has none."""
    if run.stages > 1:
        raise EngineError(
            f"{STAGES} is {run.stages}, but {kind} has no stages; give its stages to session.pipeline, or leave {STAGES} out"
        )


def refuse_unused(engine: Mapping[str, Any], user: str) -> None:
    """Raise ``ConfigError`` for settings that affect the result and that ``user``, which is not DeepSpeed, would ignore."""
    divided = STAGES.partition(".")[0], SLICES.partition(".")[0]
    unused = [key for key in engine if key not in WITHOUT_EFFECT and key not in divided and _asks(engine, key)]
    if unused:
        raise ConfigError(
            f"the config sets {', '.join(sorted(unused))}, which only session.deepspeed uses; {user} would train without. "
            f"Leave it out (for bf16 compute, use torch.autocast in loss_fn; optimizer and scheduler are arguments), or use "
            f"session.deepspeed"
        )


def _asks(engine: Mapping[str, Any], key: str) -> bool:
    section = engine[key]
    if not isinstance(section, Mapping):
        return bool(section)
    if key == "zero_optimization":
        return bool(section.get("stage", 0))
    return bool(section) and section.get("enabled", True) is not False


def check(engine: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse settings that cannot be made fault-tolerant, and a model that cannot be divided so."""
    zero, stage = engine.get("zero_optimization", {}), zero_stage(engine)
    refuse = [
        (
            stage > 1 and stages(engine) > 1,
            f"zero_optimization.stage is {stage} and {STAGES} {stages(engine)}",
            "use 0 or 1",
        ),
        (
            _offloads(zero),
            "zero_optimization offloads",
            "gradients are reduced between groups where they are: leave it out",
        ),
        (on(engine, "amp"), "amp is enabled", "use bf16"),
        (
            on(engine, "elasticity"),
            "elasticity is enabled",
            "it changes the number of ranks, as megatron_ft does: leave it out",
        ),
        (on(engine, "compression_training"), "compression_training is set", "leave it out"),
        *((key in engine, f"{key} is {engine.get(key)!r}", remedy) for key, remedy in _SECOND_DATA_PARALLELISM.items()),
    ]
    for wrong, what, remedy in refuse:
        if wrong:
            raise ConfigError(f"{what}, which megatron_ft does not support; {remedy}")
    _check_model(model, stages(engine), slices(engine))


_TWICE = "data parallelism would be declared twice, the groups are data-parallel: leave it out, and choose --groups"
_SECOND_DATA_PARALLELISM = {
    "data_parallel_size": _TWICE,
    "mesh_param": _TWICE,
    "sequence_parallel_size": "leave it out",
}
REFUSED_KEYS = frozenset(_SECOND_DATA_PARALLELISM)
"""Keys of DeepSpeed that are known and always refused."""


def on(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a section of a DeepSpeed config is enabled."""
    section = config.get(key)
    return bool(section.get("enabled", key == "compression_training") if isinstance(section, Mapping) else section)


def _check_model(model: Mapping[str, Any], stages: int, slices: int) -> None:
    where = "fault_tolerance.model"
    counts = {name: model[name] for name in _COUNTS if model.get(name) is not None}
    for name, value in counts.items():
        _COUNT(f"{where}.{name}", value)
    for number, by, whose in (
        ("num_hidden_layers", stages, STAGES),
        ("num_attention_heads", slices, SLICES),
        ("num_key_value_heads", slices, SLICES),
        ("intermediate_size", slices, SLICES),
    ):
        if number in counts and counts[number] % by:
            raise ConfigError(
                f"{where}.{number} is {counts[number]} and {whose} is {by}, which must divide it; use one of "
                f"{', '.join(str(n) for n in range(1, counts[number] + 1) if counts[number] % n == 0 and n <= 64)}"
            )
    for number, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if number in counts and part in counts and counts[number] % counts[part]:
            raise ConfigError(
                f"{where}.{number} is {counts[number]} and {part} is {counts[part]}, which must divide it"
            )


_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_COUNT = whole_number(1)


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a key, of a section (``pipeline.stages``) or outside; None where it is not given, or is "auto",
    DeepSpeed's word for a value that the script decides."""
    section, _, key = name.rpartition(".")
    settings = config.get(section, {}) if section else config
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{section} is {settings!r}; it must be a JSON object {{...}}")
    value = settings.get(key)
    return None if value == AUTO else value


def _count(engine: Mapping[str, Any], name: str) -> int:
    value = value_of(engine, name)
    return 1 if value is None else _COUNT(name, value)


def _offloads(zero: Any) -> bool:
    if not isinstance(zero, Mapping):
        return False
    devices = [zero.get(key, {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    return any(device != "none" for device in devices) or bool(zero.get("cpu_offload"))
