"""Which gradients of a backward pass have been added already.

Failures it assumes: none. Gradients that come in several parts, after the first ones were sent, are refused with an
``EngineError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_ft.errors import EngineError
from megatron_ft.run.engines.port import Ready
from megatron_ft.types import Bucket


class Arrivals:
    """The gradients of the present microbatch that have been added, as reported by autograd's hooks.

    A parameter whose gradient comes in several parts (reentrant checkpointing of layers that share it) makes its bucket
    look complete too early. So no bucket is reported before one whole backward pass has shown that there are no such
    parts.

    Args:
        buckets: the parameters of each bucket.
        check: called within backward with each gradient that has been added: the numbers of its bucket and in it, and its
            parameter.
        register: has a function called with a parameter whenever its gradient has been added. Default: autograd adds it.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        check: Callable[[Bucket, int, nn.Parameter], None] = lambda number, index, parameter: None,
        register: Callable[[Any, Callable[[Any], None]], object] = torch.Tensor.register_post_accumulate_grad_hook,
    ) -> None:
        self._buckets, self._check = buckets, check
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._told: set[Bucket] = set()
        self._watching, self._seen_whole, self._in_parts = False, False, False
        self._ready: Ready | None = None
        for number, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket):
                register(parameter, partial(self._add, number, index))

    @contextmanager
    def watch(self, ready: Ready | None) -> Iterator[None]:
        """Watch a backward pass; ``ready`` is called with each complete bucket."""
        for arrived in self._arrived:
            arrived.clear()
        self._told.clear()
        self._ready = ready if self._seen_whole and not self._in_parts else None
        self._watching = True
        try:
            yield
            self._seen_whole = True
        finally:
            self._watching, self._ready = False, None

    def _add(self, number: Bucket, index: int, parameter: nn.Parameter) -> None:
        if not self._watching:
            return
        self._check(number, index, parameter)
        bucket, arrived = self._buckets[number], self._arrived[number]
        if number in self._told:
            raise EngineError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient in several parts, which it did not before, "
                f"and the first ones have been sent; set fault_tolerance.overlap to false"
            )
        self._in_parts |= index in arrived
        arrived.add(index)
        if self._ready is not None and not self._in_parts and len(arrived) == len(bucket):
            self._told.add(number)
            self._ready(number)
