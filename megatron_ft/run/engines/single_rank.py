"""The part that is the same in engines whose ranks each compute whole microbatches, with a model in one piece.

Failures it assumes: none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megatron_ft.data import generators
from megatron_ft.run.engines.arrivals import Arrivals
from megatron_ft.run.engines.buckets import Bucketed
from megatron_ft.run.engines.gradient_check import GradientCheck, kept
from megatron_ft.run.engines.port import Progress, Ready
from megatron_ft.types import Microbatch, given


class SingleRank(Bucketed):
    """The common part. A subclass sets ``_arrivals``, which watches the parameters whose gradients tell of complete
    buckets."""

    _arrivals: Arrivals
    _again: Callable[[], float] | None = None
    """Computes the loss of the first microbatch again."""

    def compute(
        self,
        microbatch: Microbatch,
        batch: Any,
        seed: int,
        progress: Progress,
        ready: Ready | None = None,
        keep: bool = False,
    ) -> None:
        self._again = self._again or partial(self._compute_loss, kept(batch), seed)
        generators.seed(seed)
        progress("forward")
        loss, tokens = self._split_loss(self._lose(batch))
        self._buckets.count(loss)  # before backward: it may send a bucket
        self._count_tokens(tokens)
        self._take_changes()
        progress("backward")
        early = self._rounding is not None and not keep
        with self._arrivals.watch(partial(self._complete, ready) if early else ready):
            self._go_back(loss)
        self._on_backward()
        self._buffers.restore()  # after backward: autograd may have kept them

    def _compute_loss(self, batch: Any, seed: int) -> float:
        generators.seed(seed)
        # With a graph, as in the step: compiled models have one for it, and some losses are made of derivatives.
        loss, _ = self._split_loss(self._lose(kept(batch)))
        self._buffers.restore()
        return float(loss.detach())

    def check_gradient(self, sizes: Mapping[str, int]) -> None:
        bucket = self._buckets[0]
        if float(bucket.own.count) == 1:
            lose = given(self._again)
            check = GradientCheck(list(self._buckets), set(self._parameters), lose, list, self._has_16_bits)
            check.check(float(bucket.own.loss), self._loss_scale(), sizes)

    @abstractmethod
    def _lose(self, batch: Any) -> Any:
        """Return what the loss function returns."""

    @abstractmethod
    def _go_back(self, loss: torch.Tensor) -> None:
        """Run the backward pass."""

    def _on_backward(self) -> None:
        """Called after the backward pass."""
