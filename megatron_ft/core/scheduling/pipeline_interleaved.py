"""The order of microbatches in an interleaved pipeline, growing while it runs (Narayanan et al., arXiv 2104.04473, 2.2).

Intuition: each rank holds several *chunks* of the model, rank r the chunks r, P + r, 2P + r, ... of P ranks, so a microbatch
passes every rank several times and the pipeline fills in a fraction of the time. Microbatches go in rounds of up to P:
all of a round through the first chunk, then all through the second, and so on; backwards in the reverse order of chunks.

The rounds that have begun stand, because later ranks know them. The list may grow at any moment: what is new begins in
rounds of its own, and what has not begun may change its order (``pipeline_order``). As in ``pipeline_1f1b`` the rule
depends on the rank's progress only. A round has P *slots*. A short one leaves slots empty, and their passes are left out:
what remains of an order without deadlock has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_ft.core.scheduling.pipeline_1f1b import Progress


class ChunkInstruction(NamedTuple):
    """The forward or the backward of the microbatch at ``index`` of the list, through one chunk of the rank's. ``after`` is
    the rank's progress when it has done it."""

    kind: Literal["forward", "backward"]
    index: int  # type: ignore[assignment]  # in place of tuple.index, which is not used
    chunk: int
    after: Progress


def rounds_of(count: int, ranks: int, begun: Sequence[int] = ()) -> list[int]:
    """Return the sizes of the rounds for ``count`` microbatches. ``begun``: the sizes of the rounds that have begun."""
    rest = count - sum(begun)
    if rest < 0:
        raise ValueError(f"rounds of {list(begun)} have begun, more than the {count} microbatches of the list")
    return [*begun, *[ranks] * (rest // ranks), *([rest % ranks] if rest % ranks else [])]


def begun_rounds(ranks: int, chunks: int, done: Progress, rounds: Sequence[int]) -> Sequence[int]:
    """Return the rounds that have begun at a rank; at the first one, all that have begun anywhere."""
    return rounds[: -(-done.forwards // (ranks * chunks))]


def next_chunk_instruction(
    rank: int, ranks: int, chunks: int, done: Progress, rounds: Sequence[int]
) -> ChunkInstruction | None:
    """Return the next instruction of ``rank`` (of ``ranks``, 0 first), which has ``chunks`` chunks; None when it has done
    all of ``rounds``. ``done`` counts the passes of slots, ``Progress()`` or the last instruction's ``after``.

    The rank keeps as many forward passes in flight as it takes until the first backward pass can arrive: those of its
    chunks but the last, and twice the ranks behind it. Raises ``ValueError`` for a rank that does not exist, for rounds of
    more than ``ranks`` microbatches, or for impossible progress.
    """
    if not 0 <= rank < ranks or chunks < 1:
        raise ValueError(f"rank {rank} of {ranks} with {chunks} chunks does not exist")
    if any(not 1 <= size <= ranks for size in rounds):
        raise ValueError(f"rounds have 1 to {ranks} microbatches, got {list(rounds)}")
    passes, most = len(rounds) * ranks * chunks, (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1
    forwards, backwards = done
    if not 0 <= backwards <= forwards <= passes:
        raise ValueError(f"progress {done} cannot be with {passes} passes")
    while backwards < passes:
        if forwards < passes and forwards - backwards < most:
            number, chunk, slot = _place(forwards, ranks, chunks)
            forwards += 1
            if slot < rounds[number]:
                return ChunkInstruction("forward", sum(rounds[:number]) + slot, chunk, Progress(forwards, backwards))
        else:
            number, chunk, slot = _place(backwards, ranks, chunks)
            backwards += 1
            if slot < rounds[number]:
                index = sum(rounds[:number]) + slot
                return ChunkInstruction("backward", index, chunks - 1 - chunk, Progress(forwards, backwards))
    return None


def _place(number: int, ranks: int, chunks: int) -> tuple[int, int, int]:
    """Return round, chunk and slot of the pass with this number, in the order of forward passes."""
    of_round, rest = divmod(number, ranks * chunks)
    return of_round, *divmod(rest, ranks)
