"""Whether the gradient that an engine makes is that of the loss that is reported, or a multiple of it.

Intuition. A move by ``distance * g`` along a gradient g changes the loss by ``distance * |g|^2``, if g is the gradient
of that loss. If it is ``factor`` times the gradient, the change is ``factor`` times smaller. So forward passes alone
tell the factor, whatever library has made the gradient. One move tells that it is about 1. For any other factor, two moves,
ahead and back, tell whether the loss is smooth enough to say anything: noise, a discontinuity or a strong curvature changes
them unequally.

A factor that is no accident is the size of something that a library divides by, or a loss scale. Any other one may be meant:
straight-through estimators and hooks make gradients that are not those of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, log2

MOVES, COARSE_MOVES = (0.001, 0.01), (0.01, 0.1)
"""Changes of the loss that are aimed at, in parts of it; the second one where the first one is lost in noise. A small one
sees less of the curvature; parameters of 16 bits do not hold it (``COARSE_MOVES``)."""
_UNEQUAL = 1.5
"""The largest quotient of the changes ahead and back."""
_LEAST = 1e-5
"""The smallest change that is seen, in parts of the loss."""
_NEAR = 0.1
_FALSE = 1.5
"""A factor below, and above its reciprocal, is taken for 1."""
_SCALE_BITS = 8
"""A power of two from 2 to this one on is taken for a loss scale."""


def is_one(before: float, ahead: float, change: float) -> bool:
    """Return True if one move ahead tells that the gradient is that of the loss. Arguments: see :func:`factor`."""
    return change / _FALSE < ahead - before < change * _FALSE


def factor(before: float, ahead: float, back: float, change: float) -> float | None:
    """Return how many times the gradient is as large as that of the loss; None if the losses do not tell.

    Args:
        before: the loss.
        ahead, back: the loss after a move along the gradient, and against it.
        change: that of the loss for a move along its own gradient, > 0.
    """
    rise, fall = ahead - before, before - back
    if not isfinite(rise) or not isfinite(fall) or min(rise, fall) <= _LEAST * abs(before):
        return None
    return 2 * change / (rise + fall) if max(rise, fall) <= _UNEQUAL * min(rise, fall) else None


def cause(found: float, sizes: Mapping[str, int]) -> str:
    """Return what has made the factor: one of ``sizes`` (name -> number) or a loss scale; empty if it is 1, or nothing
    has."""
    if 1 / _FALSE < found < _FALSE:
        return ""
    for name, size in sizes.items():
        for what, number in ((name, size), (f"1 / {name}", 1 / size)):
            if size > 1 and abs(found / number - 1) < _NEAR:
                return f"{what} = {number:g}"
    bits = round(log2(found))
    return f"a loss scale of {2.0**bits:g}" if bits >= _SCALE_BITS and abs(found / 2.0**bits - 1) < _NEAR else ""
