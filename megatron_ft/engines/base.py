"""The narrow port between the one loop (``runtime.leader``) and a training engine.

An engine owns model, optimizer and two gradient buffers per bucket: the *local* one, into which every microbatch this
group computes is added and which nothing but :meth:`Engine.begin_step` clears, and the *reduced* one, which holds the sum
over the live groups. Keeping the local gradient is what makes a reduction repeatable. Both are flat, fp32, ``[elements +
TAIL]``; ``runtime.reduction`` fills the second from the first.

Failures it assumes: none of its own. A reduction may fail at any time and leave garbage in the reduced buffer, also later;
what an engine raises ends its group, and the others take its microbatches over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megatron_ft.types import Bucket, Microbatch

TAIL = 2
"""A bucket's last two numbers: the sum of the losses and the number of microbatches. They are reduced with the gradients,
so every bucket proves by itself that all of the step's microbatches are in it. Bucket 0 has an engine's ``slots`` before
them: numbers of the session's, one of each group, that are the same at everybody once they are reduced."""

Progress = Callable[[str], None]
"""Called by an engine with the name of what it is about to do; fault injection hooks in here."""

Ready = Callable[[Bucket], None]
"""Called by an engine inside a backward pass when nothing more of the microbatch will be added to a bucket. The thread may
be autograd's, the training thread waits for it."""


def manual_seed(seed: int) -> None:
    """Of all devices' random numbers.

    Without an accelerator ``torch.manual_seed`` does the same, and formats three stack traces for backends that are not
    there: half of what a small step costs.
    """
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)


@dataclass(frozen=True)
class StepResult:
    """What one committed step came to. ``loss`` is the mean over the global batch, ``microbatches`` the number that the
    reduction itself counted, ``gradient_norm`` the norm over all buckets before clipping: inf or nan if it is."""

    step: int
    loss: float
    microbatches: int
    gradient_norm: float

    def to_json(self) -> list[Any]:
        """In the order in which the constructor takes them."""
        return [self.step, self.loss, self.microbatches, self.gradient_norm]


class Engine(Protocol):
    """What the session needs of an engine."""

    @property
    def num_buckets(self) -> int:
        """How many gradient buckets there are; the same in every group."""

    @property
    def alike(self) -> bool:
        """Whether all ranks of a group hold the same state. If not, the engine has made them start alike by itself."""

    @property
    def slots(self) -> int:
        """How many numbers bucket 0 carries between its gradients and its tail."""

    def begin_step(self) -> None:
        """Clear the local buffers: a new step starts."""

    def compute(
        self, microbatch: Microbatch, batch: Any, seed: int, progress: Progress, ready: Ready | None = None
    ) -> None:
        """Forward and backward; add gradient, loss and count to the local buffers. Random choices follow ``seed``.

        ``ready`` is told the buckets that are complete before backward ends, each at most once, in any order. An engine
        may name none of them, e.g. a bucket of which some parameter gets no gradient.
        """

    def local(self, bucket: Bucket) -> torch.Tensor:
        """The local buffer, to read."""

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        """The reduced buffer: to sum in, to hand to or to take from another group."""

    def keep_local(self, bucket: Bucket) -> None:
        """The local buffer holds the sum already (nobody else is alive): use it as the reduced one in this step.

        Safe because :meth:`update` is the first to change it, and after that nobody can ask for this step again.
        """

    def replace_reduced(self, bucket: Bucket) -> None:
        """Give up the reduced buffer (an abandoned collective may still write into it) and use a fresh one."""

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        """Divide the reduced sums by ``microbatches``, clip to the norm over all of them, take the optimizer's step.

        Where that norm is not finite the step counts, but parameters, optimizer and scheduler stay as they are.
        Raises ``AssertionError`` when a bucket does not hold exactly that many microbatches.
        """

    def repeat(self, result: StepResult) -> None:
        """Take the optimizer's step of ``result`` as another group has: the reduced buffers hold what :meth:`update` has
        left in them there."""

    def local_finite(self) -> bool:
        """Whether this group's own part of the step, losses included, is finite. Asked after a norm that is not."""

    def state(self) -> Mapping[str, Any]:
        """Everything a group needs to stand where this one stands: nested mappings of tensors and plain values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""

    def fingerprint(self) -> tuple[float, str]:
        """L2 norm of all parameters, and the sha256 of their bytes."""


class Control(Protocol):
    """Short messages (a few whole numbers) between two ranks of a group, while they compute together."""

    def tell(self, position: int, words: Sequence[int]) -> None:
        """Never waits."""

    def heard(self, position: int) -> tuple[int, ...] | None:
        """The next message, if one is there."""

    def hear(self, position: int) -> tuple[int, ...]:
        """The next message; waits for it."""


class Listed(NamedTuple):
    """A microbatch to compute; ``patch``: another group had it before."""

    microbatch: Microbatch
    patch: bool


class Work(Protocol):
    """What a rank needs of its session while the ranks of its group compute microbatches together."""

    def listed(self) -> Sequence[Listed]:
        """Position 0 only: the group's, in order; those that it has taken over come on top, at any time."""

    def batch(self, microbatch: Microbatch) -> Any:
        """Its samples."""

    def seed(self, microbatch: Microbatch) -> int:
        """Random choices follow it."""

    def span(self, kind: str, listed: Listed) -> AbstractContextManager[None]:
        """Around each pass, ``forward`` or ``backward``: for the timeline, and for fault injection."""

    def computed(self, microbatch: Microbatch) -> None:
        """Its backward pass has ended here."""


class JointEngine(Engine, Protocol):
    """An engine whose ranks compute every microbatch together (pipeline, tensor parallelism): each has its own parameters,
    and so buckets of its own. ``compute`` is not used."""

    @property
    def loads(self) -> bool:
        """Whether this rank needs samples."""

    @property
    def peers(self) -> Sequence[int]:
        """Positions with which this rank needs a line (:class:`Control`); they need one with it as well."""

    def flush(self, control: Control, work: Work) -> None:
        """Forward and backward of everything that is listed, until nothing is left; all ranks of the group call it."""
