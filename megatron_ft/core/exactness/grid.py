"""The grid of exact reduction: a power of two for each *unit* (a parameter, the loss, the changes of buffers).

Intuition. Numbers that are multiples of one power of two, and whose sums stay below 2^53 times it, are summed by fp64
without rounding, so the sum does not depend on the order or on the grouping. Each microbatch's value is rounded once to
a multiple of ``2^lowest``; everything after that is exact. All groups have the same grid, because it is a function of
the sums of the step before: with the values travel, for each unit, the numbers of microbatches whose largest magnitude
reached each of several thresholds.

The unit's *exponent* e says that magnitudes must be below 2^e. A microbatch that reaches 2^e makes the step's sums
useless; their counts show it to every group, and the step is computed again on a coarser grid. Whether that happens
depends on the microbatches only. docs/exactness.md has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_BITS = 51
"""Largest number of bits of a sum. fp64 has 53; two are left for the checksum (``run.engines.exact_rounding``)."""
OFFSETS = (-40, -24, -12, -8, -4, -2, 0, 12, 24, 48)
"""The thresholds of a unit are 2^(e + offset); its first count is of values that are not 0."""
COUNTS = 1 + len(OFFSETS)
_UPPER = (*OFFSETS, OFFSETS[-1] + 40)
_BEYOND = 1 + OFFSETS.index(0)
_HEADROOM, _LITTLE, _MANY_BITS = 8, 4, 40
"""Bits between the measured magnitude and the exponent of the next step, at least; the second number with fewer than
``_MANY_BITS`` bits. A model whose gradients were noise jumped by 4 bits in 17 of 1,000 steps."""
_LEAST, _MOST = -140, 140
"""Beyond these exponents fp32 has no values."""
GUESS = 20
"""Exponent before anything was measured. It is never used for an update: the first attempt of such a step measures."""


def lowest(exponent: int, microbatches: int, bits: int = MOST_BITS) -> int:
    """Return the exponent of the grid: values below ``2^exponent`` are rounded to multiples of ``2^lowest``.

    Args:
        exponent: of the unit.
        microbatches: largest number of microbatches in the step, >= 1.
        bits: number of bits of the sum, 2 to ``MOST_BITS``: its magnitude stays at or below ``2^(lowest + bits)``.
    """
    return exponent + (microbatches - 1).bit_length() - bits


def beyond(counts: Sequence[float]) -> bool:
    """Return whether a microbatch had a value of 2^e or more, so that the sum of this unit must not be used."""
    return counts[_BEYOND] > 0


def following(exponent: int, counts: Sequence[float], bits: int = MOST_BITS) -> int:
    """Return the exponent of the next step, or of the next attempt, from the counts of a unit (see ``OFFSETS``).

    A unit without a value other than 0 keeps its exponent: nothing was learned.
    """
    reached = sum(count > 0 for count in counts)
    if not reached:
        return exponent
    headroom = _HEADROOM if bits >= _MANY_BITS else _LITTLE
    return min(max(exponent + _UPPER[reached - 1] + headroom, _LEAST), _MOST)
