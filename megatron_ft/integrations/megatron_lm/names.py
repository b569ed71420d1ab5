"""The names of ``megatron.training`` that are replaced or read. A version that lacks one, or uses one in another way, is
refused before its script runs.

Failures it assumes: none.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

from megatron_ft.errors import EngineError
from megatron_ft.run.engines.megatron import megatron_names

LOOP = "megatron.training.training"
TESTED = "0.18.0 to 0.19.2, or Megatron-LM of 2026-08-22"
REPLACED = {
    "build_pretraining_data_loader": ("dataset", "consumed_samples"),
    "build_train_valid_test_data_iterators": ("build_train_valid_test_datasets_provider",),
    "build_train_valid_test_datasets": (),
    "checkpoint_and_decide_exit": (
        *("model", "optimizer", "opt_param_scheduler", "iteration", "num_floating_point_operations_so_far"),
        *("checkpointing_context", "train_data_iterator"),
    ),
    "dummy_train_step": ("data_iterator",),
    "evaluate": (
        *("forward_step_func", "data_iterator", "model", "process_non_loss_data_func", "config", "verbose"),
        *("non_loss_data_func", "eval_iters"),
    ),
    "get_optimizer_param_scheduler": ("optimizer",),
    "load_checkpoint": (),
    "maybe_finalize_async_save": (),
    "save_checkpoint_and_time": ("iteration",),
    "train": ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator"),
    "train_step": ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
    "training_log": ("loss_dict", "total_loss_dict"),
}
"""Functions of the loop's module that call each other through it, and the parameters that they begin with."""
STEP = (
    *("loss_dict", "skipped_iter", "should_checkpoint", "should_exit", "exit_code", "grad_norm", "num_zeros_in_grad"),
    "max_attention_logit",
)
"""What ``train`` calls the values of ``train_step``."""
READ = (
    *("_TRAIN_START_TIME", "build_train_valid_test_data_loaders", "get_args", "get_forward_backward_func"),
    *(
        "get_num_microbatches",
        "get_timers",
        "update_num_microbatches",
        "mpu.get_data_parallel_rank",
        "mpu.get_data_parallel_world_size",
    ),
    *("mpu.get_tensor_model_parallel_rank", "mpu.is_pipeline_last_stage", "pretrain", "print_datetime"),
)
WRITERS = "megatron.training.global_vars"
REPLACED_WRITERS = ("_set_tensorboard_writer", "_set_wandb_writer")
LOGGING = ("training_log", "evaluate_and_print_results")
"""Functions of the loop's module that give the writers values."""
ARTIFACTS = "megatron.training.wandb_utils"
REPLACED_ARTIFACTS = ("on_save_checkpoint_success", "on_load_checkpoint_success")


def loop() -> tuple[Any, tuple[str, ...]]:
    """Return the module of Megatron-LM's loop, and which values of :data:`STEP` it expects of ``train_step``.

    Raises ``EngineError`` if the module is missing, lacks a name, or has a function that takes or returns something unknown.
    """
    megatron_names.check()
    try:
        module = importlib.import_module(LOOP)
    except ImportError as error:
        raise EngineError(
            f"{LOOP} cannot be imported ({error}); it is in megatron-core 0.18 and later, and in a checkout of Megatron-LM, "
            f"whose directory belongs into PYTHONPATH"
        ) from None
    names = (f"{LOOP}.{name}" for name in (*REPLACED, *LOGGING, *READ))
    artifacts = (f"{ARTIFACTS}.{name}" for name in REPLACED_ARTIFACTS)
    megatron_names.check((*names, *(f"{WRITERS}.{name}" for name in REPLACED_WRITERS), *artifacts), TESTED)
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    called = {_called(node) for node in nodes}
    lacking = [f"call of {LOOP}.{name}" for name in REPLACED if name not in called]
    for name, begin in REPLACED.items():
        if tuple(inspect.signature(getattr(module, name)).parameters)[: len(begin)] != begin:
            lacking.append(f"{LOOP}.{name}({', '.join(begin)}, ...)")
    targets = (
        node.targets[0] for node in nodes if isinstance(node, ast.Assign) and _called(node.value) == "train_step"
    )
    values = next((tuple(map(ast.unparse, one.elts)) for one in targets if isinstance(one, ast.Tuple)), ())
    if not values or not set(values) <= set(STEP):
        lacking.append(f"{', '.join(STEP)} = train_step(...)")
    megatron_names.refuse(lacking, TESTED)
    return module, values


def _called(node: ast.AST) -> str | None:
    """Return the name of the function that an expression calls."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
