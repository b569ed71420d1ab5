"""Which settings of Megatron's can be made fault-tolerant. Imported after megatron-core was found.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_ft.errors import EngineError
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.megatron import megatron_names


def checked(chunks: Sequence[nn.Module], optimizer: Any, layout: Layout, settings: Mapping[str, Any]) -> Any:
    """Return Megatron's config of the model. Raises ``EngineError`` for one that cannot be made fault-tolerant."""
    if not chunks or not all(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        raise EngineError(
            "session.megatron takes a list of model chunks, each in megatron.core's DistributedDataParallel; wrap them"
        )
    megatron_names.check_chunks(chunks)
    config: Any = chunks[0].config
    ddp: Any = chunks[0].ddp_config
    sizes = {
        "pipeline_model_parallel_size": (parallel_state.get_pipeline_model_parallel_world_size(), layout.stages),
        "tensor_model_parallel_size": (parallel_state.get_tensor_model_parallel_world_size(), layout.slices),
        "data_parallel_size": (parallel_state.get_data_parallel_world_size(with_context_parallel=True), layout.shards),
    }
    names = {
        "pipeline_model_parallel_size": "pipeline.stages",
        "tensor_model_parallel_size": "tensor_parallel.autotp_size",
    }
    for name, (has, said) in sizes.items():
        if has != said:
            raise EngineError(
                f"Megatron's {name} is {has} and {names.get(name, 'fault_tolerance.inner_shards')} of the config is {said}; "
                f"make them equal"
            )
    clipping, per_token = settings["gradient_clipping"], settings.get("loss_reduction") == "token"
    refused = [
        (
            ddp.overlap_grad_reduce and not ddp.overlap_param_gather,
            "overlap_grad_reduce",
            "leave it out: gradients are reduced when a step is committed",
        ),
        (
            ddp.overlap_param_gather and not ddp.use_distributed_optimizer,
            "overlap_param_gather without use_distributed_optimizer",
            "leave it out: the memory of gradients, with which parameters would be gathered, is freed",
        ),
        (ddp.average_in_collective, "average_in_collective", "leave it out"),
        (config.delay_wgrad_compute, "delay_wgrad_compute", "leave it out"),
        (
            config.overlap_moe_expert_parallel_comm,
            "overlap_moe_expert_parallel_comm",
            "leave it out: its schedule makes passes of two microbatches at once",
        ),
        (
            "quantile_balancing" in config.moe_router_load_balancing_type,
            "moe_router_load_balancing_type quantile_balancing",
            "use another one: every group would route its tokens by quantiles of its own",
        ),
        (
            "global_aux_loss" in config.moe_router_load_balancing_type,
            "moe_router_load_balancing_type global_aux_loss",
            "use aux_loss or seq_aux_loss: every group would balance only the microbatches that it has computed",
        ),
        (
            len(chunks) > 1 and layout.stages == 2 and config.batch_p2p_comm,
            "virtual stages on 2 ranks with batch_p2p_comm",
            "set batch_p2p_comm to false and overlap_p2p_comm to true: Megatron would mix up what the two ranks send",
        ),
    ]
    for wrong, what, remedy in refused:
        if wrong:
            raise EngineError(f"Megatron is configured with {what}, which megatron_ft does not support; {remedy}")
    if optimizer.config.clip_grad != clipping:
        raise EngineError(
            f"OptimizerConfig.clip_grad is {optimizer.config.clip_grad} and gradient_clipping of the config is {clipping}; "
            f"make them equal"
        )
    if bool(config.calculate_per_token_loss) != per_token:
        raise EngineError(
            f"Megatron's calculate_per_token_loss is {config.calculate_per_token_loss}, which needs "
            f'fault_tolerance.loss_reduction "{"token" if config.calculate_per_token_loss else "microbatch"}"; set it'
        )
    return config
