"""What Megatron's loss functions report for the log: names and values, summed over all microbatches of a step.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_ft.errors import EngineError

_NAMES = 32
VOTE = "megatron_ft: ends"
"""The first name, known to all ranks: whether the run is to end after this step."""
MOST = 2 * _NAMES
"""The number of elements in which a report travels: a sum and a count for each name."""


class Reports:
    """The names, in the order in which loss functions have reported them: the same in all groups, whose functions are."""

    def __init__(self) -> None:
        self.names = {VOTE: 0}
        """Name -> its place among the names; part of the state, as a group that comes back has not seen a report."""

    def add(self, report: Mapping[str, Any], to: torch.Tensor) -> None:
        """Add the report of a microbatch to the step's ``MOST`` numbers: for each name one number, of which the log has the
        mean over the microbatches, or a sum and the count that it is to be divided by.

        Raises ``EngineError`` for another value, or too many names.
        """
        for name, value in report.items():
            numbers = _numbers(name, value, to)
            place = 2 * self.names.setdefault(name, len(self.names))
            if place >= MOST:
                raise EngineError(
                    f"the loss function reports more than {_NAMES} names, the last of them {name!r}; report fewer"
                )
            to[place] += numbers[0]
            to[place + 1] += numbers[1] if len(numbers) == 2 else 1

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Return name -> value for the ``reports`` of a step; empty in a group that has computed no microbatch yet."""
        if not sums:
            return {}
        pairs = {name: sums[2 * place : 2 * place + 2] for name, place in self.names.items()}
        return {name: total / count for name, (total, count) in pairs.items() if count}


def _numbers(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, tuple | list):
        value = torch.stack([torch.as_tensor(one, device=like.device).reshape(()) for one in value])
    numbers = torch.as_tensor(value, device=like.device).detach().reshape(-1).to(like.dtype)
    if len(numbers) not in (1, 2):
        raise EngineError(
            f"the loss function reports {name!r} with {len(numbers)} numbers; a report is one number, or a sum and a count"
        )
    return numbers
