"""Build a group's DeepSpeed engine from a run's config and a user's model, or refuse what cannot be made
fault-tolerant.

The config that DeepSpeed gets switches off its work between replicas: a group does not know of other replicas, its
gradient accumulation is one (the list of microbatches differs from step to step), and clipping needs the whole batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_ft.config import parallelism
from megatron_ft.config.schema import RunConfig
from megatron_ft.errors import EngineError
from megatron_ft.utils import extras

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
try:
    import deepspeed
    import deepspeed.ops
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
except ImportError as error:
    raise EngineError(f"DeepSpeed cannot be imported ({error}); install it: {extras.install('deepspeed')}") from None

# With gloo DeepSpeed compiles an all-reduce through shared memory at its first use, which takes most of a minute, and
# waits in it without a timeout. A group that loses a rank would block in it forever.
deepspeed.ops.__compatible_ops__ = {}

from megatron_ft.run.engines.deepspeed.engine import DeepSpeedData, DeepSpeedPipeline  # noqa: E402
from megatron_ft.run.engines.deepspeed.pipeline import FlushingEngine  # noqa: E402
from megatron_ft.run.engines.deepspeed.zero import DeepSpeedZero  # noqa: E402
from megatron_ft.run.engines.layout import Layout  # noqa: E402

_OURS = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "fault_tolerance", "tensor_parallel")
"""Settings removed from DeepSpeed's config: it would split the model itself, which its pipeline does not support."""


def build(
    model: nn.Module,
    run: RunConfig,
    *,
    settings: Callable[[bool], dict[str, Any]],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
) -> DeepSpeedPipeline | DeepSpeedData | DeepSpeedZero:
    """Build the engine; see ``Session.deepspeed``.

    ``settings``: (True if the ranks of a group sum their gradients) -> settings of ``run.engines.buckets.Bucketed``."""
    given = {
        "args": None,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters or [p for p in model.parameters() if p.requires_grad],
        "lr_scheduler": lr_scheduler,
        "dist_init_required": False,
    }
    if isinstance(model, PipelineModule):
        if loss_fn is not None:
            raise EngineError("a PipelineModule has its loss_fn already; leave it out in session.deepspeed")
        _check_topology(model, run)
        model.seed_layers = (
            False  # in training it would make dropout depend on the number of microbatches that a rank has computed
        )
        config = group_config(run, pipelined=True)
        given |= {"mpu": model.mpu(), "config": config, "config_class": DeepSpeedConfig(config, model.mpu())}
        return DeepSpeedPipeline(FlushingEngine(**given), **settings(False))
    divided = parallelism.zero_stage(run.engine) >= 2
    if not divided or run.stages * run.slices > 1:
        parallelism.refuse_whole_model(run, "the model")
    if loss_fn is None:
        raise EngineError(
            "session.deepspeed needs loss_fn=(engine, batch) -> loss for a model that is no PipelineModule"
        )
    config = group_config(run, pipelined=False)
    engine = DeepSpeedEngine(**given, config=config, config_class=DeepSpeedConfig(config, None))
    engine.set_gradient_accumulation_boundary(divided)
    if divided:
        layout = Layout.of(torch.distributed.get_rank(), shards=run.inner_shards)
        return DeepSpeedZero(engine, loss_fn, layout, **settings(False))
    engine.enable_backward_allreduce = False  # gradients are summed in the group, and between groups, by megatron_ft
    return DeepSpeedData(engine, loss_fn, **settings(True))


def init_communication() -> None:
    """Let DeepSpeed use the process groups of ``torch.distributed``, which is already initialised."""
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)


def group_config(run: RunConfig, *, pipelined: bool) -> dict[str, Any]:
    """Return DeepSpeed's config: the user's config, for one group.

    Raises ``EngineError``; ``megatron_ft.config.parallelism`` has refused all other unsupported settings before the
    start."""
    given = run.engine
    zero, stage = given.get("zero_optimization", {}), parallelism.zero_stage(given)
    if pipelined and stage > 1:  # the config need not name the pipeline (``megatron_ft.config.parallelism``)
        raise EngineError(f"zero_optimization.stage is {stage}, which a pipeline cannot have; use 0 or 1")
    config = {key: value for key, value in given.items() if key not in _OURS}
    config |= {"train_micro_batch_size_per_gpu": run.samples_per_microbatch, "gradient_accumulation_steps": 1}
    config["gradient_clipping"] = 0.0  # DeepSpeed's default is 1
    config.setdefault("steps_per_print", 2**31)
    # Each slice sends whole activations to the same slice of the next stage: DeepSpeed's way to send parts of them needs
    # collectives inside the stage, at moments that its own schedule fixes.
    config["pipeline"] = {**given.get("pipeline", {}), "pipe_partitioned": False, "grad_partitioned": False}
    if "optimizer" in given:
        config["optimizer"] = _not_compiled(given["optimizer"])
    if stage < 2 and (parallelism.on(given, "bf16") or parallelism.on(given, "fp16")):
        # 16 bits with fp32 master weights is DeepSpeed's stage 1, in a world of one rank, too.
        config["zero_optimization"] = {**(zero if isinstance(zero, Mapping) else {}), "stage": 1}
    if parallelism.on(given, "bf16") or stage >= 2:
        config["data_types"] = {"grad_accum_dtype": "fp32", **given.get("data_types", {})}
    return config


def _not_compiled(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``optimizer`` section with torch's fused Adam in place of DeepSpeed's, which is compiled at the first
    start. The setting ``"torch_adam": false`` asks for DeepSpeed's."""
    params = {"torch_adam": True, **section.get("params", {})}
    if str(section.get("type", "")).lower() not in ("adam", "adamw") or not params["torch_adam"]:
        return section
    return {**section, "params": params if "foreach" in params else {"fused": True, **params}}


def _check_topology(model: PipelineModule, run: RunConfig) -> None:
    topology = model.topology()
    axes = {axis: topology.get_dim(axis) for axis in topology.get_axis_names()}
    for axis, name, said in (("pipe", parallelism.STAGES, run.stages), ("model", parallelism.SLICES, run.slices)):
        if said not in (1, axes.get(axis, 1)):
            has = axes.get(axis, 1)
            raise EngineError(
                f"the model's topology has {has} on the axis {axis!r}, {name} is {said}; change one of them"
            )
    if axes.get("data", 1) > 1:
        raise EngineError(
            f"the model's topology has data parallelism {axes['data']} inside a group of {run.ranks_per_group} ranks; the "
            f"groups are the data parallelism: make stages x slices {run.ranks_per_group}, or start with --ranks-per-group "
            f"{run.ranks_per_group // axes['data']}"
        )
