"""What Megatron's layers record beside the loss: losses of a mixture of experts, and of the prediction of several tokens.

Layers add up values for each layer over the microbatches of a step, in tensors of the process. Each microbatch is one of a
step of all groups, so what it has recorded travels with its gradient, and Megatron finds the sums of the whole step.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

_NAMES = 8
"""The most names of values that travel; what is recorded under further ones stays this group's own."""
_MTP = ("loss_values", "correct_values", "total_values", "values")


class Trackers:
    """``config``: Megatron's of the model. ``elements``: in which the values travel; 0 for a model that records none."""

    def __init__(self, config: Any) -> None:
        experts, mtp = (getattr(config, name, None) or 0 for name in ("num_moe_experts", "mtp_num_layers"))
        self._layers = config.num_layers + mtp if experts or mtp else 0
        self.elements = _NAMES * self._layers
        self._places: dict[str, slice] = {}

    def take(self, to: torch.Tensor) -> None:
        """Add what the present microbatch has recorded since the last call to ``to``, and clear it."""
        if not self.elements:
            return
        for name, values in _recorded().items():
            place = self._place(name, values)
            if place is not None:
                to[place] += values
                values.zero_()

    def put(self, sums: torch.Tensor) -> None:
        """Replace what is recorded by the sums of a step."""
        if not self.elements:
            return
        for name, values in _recorded().items():
            place = self._place(name, values)
            if place is not None:
                values.copy_(sums[place])

    def _place(self, name: str, values: torch.Tensor) -> slice | None:
        if name not in self._places and len(self._places) < _NAMES and len(values) <= self._layers:
            begin = len(self._places) * self._layers
            self._places[name] = slice(begin, begin + len(values))
        return self._places.get(name)


def _recorded() -> Mapping[str, torch.Tensor]:
    """Return the tensors in which Megatron's layers record, by name. Versions have them in different places."""
    found: dict[str, torch.Tensor] = {}
    try:
        tracker = import_module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker()
        found |= {f"moe {name}": entry.values for name, entry in tracker.metrics.items()}
    except ImportError:  # before 0.18
        tracker = import_module("megatron.core.transformer.moe.moe_utils").get_moe_layer_wise_logging_tracker()
        found |= {f"moe {name}": entry["values"] for name, entry in tracker.items()}
    mtp = import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper.tracker
    return found | {f"mtp {name}": mtp[name] for name in _MTP if isinstance(mtp.get(name), torch.Tensor)}
