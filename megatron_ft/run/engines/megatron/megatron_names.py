"""Names of megatron-core that it does not document and this package replaces or reads. They are looked up before a script's
first step: those of its modules when the engine is imported, those of its objects when it is made.

Failures it assumes: none.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from megatron_ft.errors import EngineError
from megatron_ft.utils import extras, torch_private

TESTED = "0.16.1 to 0.19.0"
_IN_MODULES = (
    "dist_checkpointing.mapping.ShardedObject",
    "dist_checkpointing.mapping.ShardedTensorFactory",
    "distributed.DistributedDataParallel.finish_grad_sync",
    "distributed.DistributedDataParallel.start_grad_sync",
    "distributed.DistributedDataParallel.zero_grad_buffer",
    "distributed.finalize_model_grads",
    "distributed.finalize_model_grads._update_router_expert_bias",
    "distributed.param_and_grad_buffer._ParamAndGradBucketGroup.reset",
    "distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_param_sync",
    "distributed.param_and_grad_buffer._ParamAndGradBuffer.offload_to_cpu",
    "optimizer.MegatronOptimizer.get_loss_scale",
    "optimizer.MegatronOptimizer.prepare_grads",
    "optimizer.MegatronOptimizer.scale_loss",
    "optimizer.MegatronOptimizer.step_with_ready_grads",
    "optimizer.MegatronOptimizer.zero_grad",
    "optimizer.grad_scaler.MegatronGradScaler.scale",
    "optimizer.grad_scaler.MegatronGradScaler.update",
    "parallel_state",
    "pipeline_parallel.get_forward_backward_func",
    "pipeline_parallel.schedules.backward_step",
    "pipeline_parallel.schedules.forward_step",
    "rerun_state_machine.RerunMode.DISABLED",
    "rerun_state_machine.RerunStateMachine.get_mode",
    "rerun_state_machine.RerunStateMachine.set_mode",
    "rerun_state_machine.get_rerun_state_machine",
    "tensor_parallel.model_parallel_cuda_manual_seed",
    "tensor_parallel.param_is_not_tensor_parallel_duplicate",
    "transformer.module.param_is_not_shared",
    "transformer.moe.moe_utils",
)
_SETTINGS = {
    "distributed.DistributedDataParallelConfig": (
        *("average_in_collective", "grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"),
        "use_distributed_optimizer",
    ),
    "optimizer.OptimizerConfig": ("clip_grad",),
    "transformer.TransformerConfig": (
        *("batch_p2p_comm", "calculate_per_token_loss", "delay_wgrad_compute", "finalize_model_grads_func"),
        *("grad_sync_func", "param_sync_func"),
        *("microbatch_group_size_per_vp_stage", "moe_router_enable_expert_bias", "moe_router_load_balancing_type"),
        "overlap_moe_expert_parallel_comm",
    ),
}
NAMES = tuple(
    f"megatron.core.{name}"
    for name in (*_IN_MODULES, *(f"{config}.{name}" for config, names in _SETTINGS.items() for name in names))
)
"""What the engine needs of megatron-core's modules."""
_LISTS = ("buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups", "params_with_grad")
_GROUP = ("param_gather_dispatched", "param_gather_handle")
_BUFFER = ("params", "gradient_scaling_factor", "data_parallel_group", "data_parallel_world_size")


def check(names: tuple[str, ...] = NAMES, tested: str = TESTED) -> None:
    """Import megatron-core. Raises ``EngineError`` if that fails, or if it lacks one of ``names``, which the versions
    ``tested`` have."""
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        # Some versions need libraries that they do not name, such as triton, which only torch's builds for GPUs bring.
        remedy = f"pip install {missing}" if missing not in ("", "megatron") else extras.install("megatron")
        raise EngineError(f"megatron-core cannot be imported ({error}); run: {remedy}") from None
    refuse(torch_private.lacking(names), tested)


def check_chunks(chunks: Sequence[Any]) -> None:
    """Raise ``EngineError`` if megatron-core's ``DistributedDataParallel`` lacks an attribute that its objects get."""
    kind = "DistributedDataParallel"
    # Each torch module has a method `buffers`, which Megatron's list hides.
    refuse(
        [f"{kind}.{name}" for chunk in chunks for name in _LISTS if not isinstance(getattr(chunk, name, None), list)]
    )
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    groups = [group for chunk in chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]
    refuse([f"{kind}.bucket_groups[].{name}" for group in groups for name in _GROUP if not hasattr(group, name)])
    refuse([f"{kind}.buffers[].{name}" for buffer in buffers for name in _BUFFER if not hasattr(buffer, name)])


def refuse(lacking: Sequence[str], tested: str = TESTED) -> None:
    """Raise ``EngineError`` that names what this megatron-core lacks, if anything, and the versions ``tested``."""
    if lacking:
        import megatron.core

        raise EngineError(
            f"megatron-core {megatron.core.__version__} has no {', '.join(dict.fromkeys(lacking))}, which megatron_ft "
            f"replaces or reads; install a megatron-core with which it was tested: {tested}"
        )
