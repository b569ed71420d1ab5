"""What Megatron's layers record beside the loss: losses of a mixture of experts, and of the prediction of several tokens.

Layers add up values for each layer over the microbatches of a step, in tensors of the process. Each microbatch is one of a
step of all groups, so what it has recorded travels with its gradient, and Megatron finds the sums of the whole step. A
group that comes back finds the names and process groups in its state, because it has recorded nothing in its first step.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from megatron.core import parallel_state

_NAMES = 8
"""The most names of values that travel; what is recorded under further ones stays this group's own."""
_MTP = ("loss_values", "correct_values", "total_values", "values")
_GROUPS = ("reduce_group", "avg_group")
_FLAGS = ("needs_dp_avg", "reduce_group_has_dp")
_KNOWN = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
    "tp_dp": ("get_tensor_and_data_parallel_group", {}),
    "tp_dp_cp": ("get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "pp": ("get_pipeline_model_parallel_group", {}),
}
"""Name -> function that returns a process group of Megatron's, and its options."""


class Trackers:
    """``config``: Megatron's of the model. ``elements``: in which the values travel; 0 for a model that records none."""

    def __init__(self, config: Any) -> None:
        experts, mtp = (getattr(config, name, None) or 0 for name in ("num_moe_experts", "mtp_num_layers"))
        self._layers = config.num_layers + mtp if experts or mtp else 0
        self.elements = _NAMES * self._layers
        self._places: dict[str, slice] = {}

    def take(self, to: torch.Tensor) -> None:
        """Add what the present microbatch has recorded since the last call to ``to``, and clear it."""
        for place, values in self._placed():
            to[place] += values
            values.zero_()

    def put(self, sums: torch.Tensor) -> None:
        """Replace what is recorded by the sums of a step."""
        for place, values in self._placed():
            values.copy_(sums[place])

    def _placed(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for name, values in _recorded().items() if self.elements else ():
            if (place := self._place(name, values)) is not None:
                yield place, values

    def _place(self, name: str, values: torch.Tensor) -> slice | None:
        if name not in self._places and len(self._places) < _NAMES and len(values) <= self._layers:
            begin = len(self._places) * self._layers
            self._places[name] = slice(begin, begin + len(values))
        return self._places.get(name)

    def state(self) -> list[dict[str, Any]]:
        """Return what is recorded, without the values: names in the order of their places, with sizes and process groups."""
        recorded = _entries()
        return [
            {"name": name, "size": place.stop - place.start, **_described(recorded.get(name.removeprefix("moe "), {}))}
            for name, place in self._places.items()
        ]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Inverse of :meth:`state`: layers find what they record to, and :meth:`put` what it replaces."""
        for entry in state:
            values = torch.zeros(entry["size"], device=torch.cuda.current_device())
            self._place(entry["name"], values)
            if entry["name"].startswith("moe "):
                _make(entry["name"].removeprefix("moe "), values, entry)


def _groups() -> dict[str, Any]:
    return {name: getattr(parallel_state, get)(**options) for name, (get, options) in _KNOWN.items()}


def _described(entry: Mapping[str, Any]) -> dict[str, Any]:
    known = {group: name for name, group in reversed(_groups().items())}
    groups = {name: known.get(entry[name]) for name in _GROUPS if entry.get(name) is not None}
    return groups | {name: entry[name] for name in _FLAGS if name in entry}


def _make(name: str, values: torch.Tensor, entry: Mapping[str, Any]) -> None:
    """Make the entry in which layers record under a name, unless it is there."""
    if name in _entries():
        return
    known = _groups()
    made = {kind: known[entry[kind]] for kind in _GROUPS if entry.get(kind)}
    made |= {flag: entry[flag] for flag in _FLAGS if flag in entry}
    module = _moe()
    if hasattr(module, "MetricEntry"):
        module.get_moe_metrics_tracker().metrics[name] = module.MetricEntry(values, **made)
    else:
        module.get_moe_layer_wise_logging_tracker()[name] = {"values": values, **dict.fromkeys(_GROUPS), **made}


def _moe() -> Any:
    try:
        return import_module("megatron.core.transformer.moe.moe_logging")
    except ImportError:  # before 0.19
        return import_module("megatron.core.transformer.moe.moe_utils")


def _entries() -> dict[str, Mapping[str, Any]]:
    """Return what the layers of a mixture of experts record to: name -> fields. Versions have it in different places."""
    module = _moe()
    if hasattr(module, "MetricEntry"):
        return {name: vars(entry) for name, entry in module.get_moe_metrics_tracker().metrics.items()}
    return dict(module.get_moe_layer_wise_logging_tracker())


def _recorded() -> Mapping[str, torch.Tensor]:
    """Return the tensors in which Megatron's layers record, by name."""
    found = {f"moe {name}": entry["values"] for name, entry in _entries().items()}
    mtp = import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper.tracker
    return found | {f"mtp {name}": mtp[name] for name in _MTP if isinstance(mtp.get(name), torch.Tensor)}
