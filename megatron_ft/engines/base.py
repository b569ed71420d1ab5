"""The narrow port between the one loop (``runtime.session``) and a training engine.

An engine owns model, optimizer and two sets of gradient buffers per bucket: the *local* one, into which every
microbatch this group computes is added and which nothing but :meth:`Engine.begin_step` clears, and the *reduced* one,
which holds the sum over the live groups. Keeping the local gradient is what makes a reduction repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_ft.types import Bucket, Microbatch

Progress = Callable[[str], None]
"""Called by an engine with the name of what it is about to do; fault injection hooks in here."""


@dataclass(frozen=True)
class StepResult:
    """What one committed step came to. ``loss`` is the mean over the global batch, ``microbatches`` the number that the
    reduction itself counted, ``gradient_norm`` the norm before clipping."""

    step: int
    loss: float
    microbatches: int
    gradient_norm: float


class Engine(Protocol):
    """What the session needs of an engine."""

    @property
    def num_buckets(self) -> int:
        """How many gradient buckets there are; the same in every group."""

    def begin_step(self) -> None:
        """Clear the local buffers: a new step starts."""

    def compute(self, microbatch: Microbatch, batch: Any, seed: int, progress: Progress) -> None:
        """Forward and backward; add gradient, loss and count to the local buffers. Random choices follow ``seed``."""

    def load_reduced(self, bucket: Bucket) -> torch.Tensor:
        """Copy the local buffer of ``bucket`` into its reduced buffer and return that: a flat tensor to sum in place."""

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        """The reduced buffer as it is, to hand to or take from another group."""

    def replace_reduced(self, bucket: Bucket) -> None:
        """Give up the reduced buffer (an abandoned collective may still write into it) and use a fresh one."""

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        """Divide the reduced sums by ``microbatches``, clip, take the optimizer's step.

        Raises ``AssertionError`` when a bucket does not hold exactly that many microbatches.
        """

    def state(self) -> Mapping[str, Any]:
        """Everything a group needs to stand where this one stands: nested mappings of tensors and plain values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""

    def fingerprint(self) -> tuple[float, str]:
        """L2 norm of all parameters, and the sha256 of their bytes."""
