"""Compare the gradient of one microbatch with the slope of its loss (``core.detection.gradient_factor``).

The parameters move a little along the gradient that is in the buckets, and the microbatch's loss is computed again,
without a backward pass. They get their bits back: meanwhile the buckets that will hold the sums keep them, so it takes
no memory.

Failures it assumes: those of the forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from megatron_ft.core.detection import gradient_factor
from megatron_ft.engines.buckets import Bucket
from megatron_ft.errors import EngineError

_EVEN, _ODD = slice(0, None, 2), slice(1, None, 2)


class GradientCheck:
    """The check at one rank.

    Args:
        buckets: their local gradients are those of one microbatch; their parameters are the model's.
        counted: those that this rank counts in norms.
        forward: computes this rank's part of the microbatch's loss again, with the present parameters.
        total: numbers of this rank -> their sums over the group.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        counted: Collection[nn.Parameter],
        forward: Callable[[], float],
        total: Callable[[Sequence[float]], Sequence[float]],
    ) -> None:
        self._buckets, self._counted, self._forward, self._total = buckets, counted, forward, total

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
        halves = [self._factor(loss, scale, half) for half in (_EVEN, _ODD)]
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
        if not square or not before:
            return None
        coarse = any(parameter.dtype.itemsize < 4 for parameter, _, _ in moved)
        for part in gradient_factor.COARSE_MOVES if coarse else gradient_factor.MOVES:
            change = part * abs(before)
            ahead, back = self._losses(moved, change / square / scale)
            found = gradient_factor.factor(before, ahead, back, change)
            if found is not None:
                return found
        return None

    @torch.no_grad()
    def _losses(
        self, moved: Sequence[tuple[nn.Parameter, torch.Tensor, torch.Tensor]], distance: float
    ) -> tuple[float, float]:
        """Return the losses after a move along the gradient, and against it."""
        losses = []
        for parameter, _, kept in moved:
            kept.copy_(parameter)
        try:
            for way in (distance, -distance):
                for parameter, view, kept in moved:
                    parameter.copy_(kept.add(view, alpha=way))
                losses.append(self._forward())
        finally:
            for parameter, _, kept in moved:
                parameter.copy_(kept)
        ahead, back = (self._total((loss,))[0] for loss in losses)
        return ahead, back
