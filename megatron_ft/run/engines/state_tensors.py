"""All tensors of a model's and its optimizer's state with their names, without copies.

Failures it assumes: none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

_OF_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")
"""Parts of names that activation checkpointing and torch.compile add."""


def plain_name(name: str) -> str:
    """Return the name of a tensor or module as it is without wrappers, so that a state fits a model with others."""
    return _OF_WRAPPERS.sub("", name)


def named_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    unsaved: Mapping[str, torch.Tensor],
    masters: Iterable[torch.Tensor] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor for all of a model's and its optimizer's state that other groups receive, without copies.

    Of the buffers that are not persistent only ``unsaved`` are included, which are transferred by name. Other buffers
    are not part of a state dict, and may be caches of any size. Hyperparameters are compared by themselves
    (``run.engines.hyperparameters``).
    """
    names = {}
    for name, parameter in module.named_parameters():
        names[parameter] = name
        yield f"parameter {name}", parameter
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"buffer {prefix}.{name}".replace(" .", " "), buffer
    for name, buffer in unsaved.items():
        yield f"buffer {name}", buffer
    for number, master in enumerate(masters):
        yield f"fp32 weights {number}", master
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            of = names.get(parameter, f"{number}.{index}")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer {key} of {of}", value
