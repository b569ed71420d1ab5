"""Compare the gradient of one microbatch with the slope of its loss (``core.detection.gradient_factor``).

The parameters move a little along the gradient that is in the buckets, and the microbatch's loss is computed again. They
get their bits back: meanwhile the buckets that will hold the sums keep them, so it takes no memory.

Failures it assumes: those of the passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from megatron_ft.core.detection import gradient_factor
from megatron_ft.errors import EngineError
from megatron_ft.run.engines.buckets import Bucket

_EVEN, _ODD = slice(0, None, 2), slice(1, None, 2)


def kept(batch: Any) -> Any:
    """Return a batch to compute the loss of again: a loss function may take entries out of the one that it gets."""
    return copy.copy(batch) if isinstance(batch, Mapping | list) else batch


class GradientCheck:
    """The check at one rank.

    Args:
        buckets: their local gradients are those of one microbatch; their parameters are the model's.
        counted: those that this rank counts in norms.
        lose: computes this rank's part of the microbatch's loss again, with the present parameters.
        total: numbers of this rank -> their sums over the group.
        coarse: True if the model has parameters of 16 bits.
        moved: called after each change of the parameters.
        renew: computes the local gradients again, if ``lose`` overwrites them.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        counted: Collection[nn.Parameter],
        lose: Callable[[], float],
        total: Callable[[Sequence[float]], Sequence[float]],
        coarse: bool,
        moved: Callable[[], None] = lambda: None,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._buckets, self._counted, self._lose, self._total = buckets, counted, lose, total
        self._moves = gradient_factor.COARSE_MOVES if coarse else gradient_factor.MOVES
        self._moved, self._renew = moved, renew

    def check(self, loss: float, scale: float, sizes: Mapping[str, int]) -> float | None:
        """Return the factor, None if it cannot be told. Raises ``EngineError`` for one that has a cause.

        Args:
            loss: of the microbatch, this rank's part.
            scale: by which all gradients are too large on purpose.
            sizes: what could be divided by: name -> number.
        """
        found = self._factor(loss, scale, slice(None))
        cause = "" if found is None else gradient_factor.cause(found, sizes)
        if found is None or not cause:
            return found
        # It is one number for all parameters, or it is an accident.
        halves = []
        for half in (_EVEN, _ODD):
            self._renew()
            halves.append(self._factor(loss, scale, half))
        if any(half is None or gradient_factor.cause(half, sizes) != cause for half in halves):
            return found
        raise EngineError(
            f"the gradient of the first microbatch is {found:.3g} times as large as that of the loss that the loss function "
            f"returns ({cause}); 1 is expected. The session divides by the number of microbatches, and a library or a hook "
            f"multiplies or divides as well: let gradients be the mean over the ranks of a group, and leave out loss scales "
            f"and divisions by numbers of accumulated microbatches (docs/semantics.md)"
        )

    def _factor(self, loss: float, scale: float, which: slice) -> float | None:
        moved = [
            (parameter, view, kept)
            for bucket in self._buckets
            for parameter, view, kept in zip(bucket.parameters, bucket.local_views, bucket.reduced_views, strict=True)
        ][which]
        own = sum((float(view.double().square().sum()) for one, view, _ in moved if one in self._counted), 0.0)
        square, before = self._total((own, loss))
        square /= scale * scale
        if not 0 < square < inf or not before:  # a scaled loss may overflow
            return None
        for number, part in enumerate(self._moves):
            if number:
                self._renew()
            change = part * abs(before)
            distance = change / square / scale
            ahead = self._loss_after(moved, distance)
            if gradient_factor.is_one(before, ahead, change):
                return change / (ahead - before)
            self._renew()
            found = gradient_factor.factor(before, ahead, self._loss_after(moved, -distance), change)
            if found is not None:
                return found
        return None

    def _loss_after(self, moved: Sequence[tuple[nn.Parameter, torch.Tensor, torch.Tensor]], distance: float) -> float:
        """Return the loss after a move along the gradient."""
        with torch.no_grad():
            for parameter, view, kept in moved:
                kept.copy_(parameter)
                parameter.copy_(kept.add(view, alpha=distance))
        self._moved()
        try:
            (loss,) = self._total((self._lose(),))
        finally:
            with torch.no_grad():
                for parameter, _, kept in moved:
                    parameter.copy_(kept)
            self._moved()
        return loss
