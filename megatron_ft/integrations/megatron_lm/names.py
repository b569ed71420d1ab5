"""The names of ``megatron.training`` that are replaced or read. A version that lacks one is refused before its script runs.

Failures it assumes: none.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_ft.engines.megatron import megatron_names
from megatron_ft.errors import EngineError

LOOP = "megatron.training.training"
REPLACED = (
    "build_pretraining_data_loader",
    "build_train_valid_test_data_iterators",
    "build_train_valid_test_datasets",
    "checkpoint_and_decide_exit",
    "dummy_train_step",
    "evaluate",
    "load_checkpoint",
    "save_checkpoint_and_time",
    "train",
    "train_step",
    "training_log",
)
"""Functions of the loop's module that call each other through it."""
_READ = (
    *("_TRAIN_START_TIME", "build_train_valid_test_data_loaders", "get_args", "get_forward_backward_func"),
    *("get_num_microbatches", "print_datetime", "pretrain"),
)
WRITERS = "megatron.training.global_vars"
REPLACED_WRITERS = ("_set_tensorboard_writer", "_set_wandb_writer")


def loop() -> Any:
    """Return the module of Megatron-LM's loop. Raises ``EngineError`` if it is missing, or lacks a name."""
    megatron_names.check()
    try:
        module = importlib.import_module(LOOP)
    except ImportError as error:
        raise EngineError(
            f"{LOOP} cannot be imported ({error}); it is in megatron-core 0.18 and later, and in a checkout of Megatron-LM, "
            f"whose directory belongs into PYTHONPATH"
        ) from None
    names = (f"{LOOP}.{name}" for name in (*REPLACED, *_READ))
    megatron_names.check((*names, *(f"{WRITERS}.{name}" for name in REPLACED_WRITERS)))
    return module
