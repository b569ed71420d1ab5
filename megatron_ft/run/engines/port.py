"""The narrow port between the training loop (``core.protocol.shell``) and a training engine.

An engine owns the model, the optimizer and two gradient buffers per bucket. The *local* buffer accumulates every
microbatch that this group computes and contributes, and only :meth:`Engine.begin_step` clears it. The *reduced* buffer
holds the sum over the live groups. A reduction can be repeated because the local gradient is kept. Standby work is kept
apart: each *part* has buffers of its own, like the local ones, until :meth:`Engine.contribute` adds them. All are flat,
``[elements + TAIL]``, fp32 or with exact reduction fp64; ``run.collectives.bucket_allreduce`` fills the reduced buffer from
the local one.

Failures it assumes: none of its own. A reduction may fail at any time and write garbage into the reduced buffer, also
later. An exception that an engine raises ends its group, and the other groups take over its microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from megatron_ft.run.engines.exact_rounding import ExactBucket
from megatron_ft.run.engines.hyperparameters import Hyperparameters, Values
from megatron_ft.types import Bucket, Microbatch

TAIL = 2
"""Number of elements at the end of a bucket: the sum of the losses and the number of microbatches. They are reduced
with the gradients, so every bucket proves by itself that it contains all microbatches of the step. Bucket 0 has an
engine's ``slots`` before them: numbers of the session, equally many for each group (``run.step_timer.Slots``), which
are equal in all groups after the reduction. Before the slots, bucket 0 has the ``riders`` of
``run.engines.buckets.Buckets``."""

PARTS = "parts"
"""Key of :meth:`Engine.state` that says which parts of which tensors a rank holds, where the state can be divided anew:

    {"model": {name: [shape of the whole, offset, shape of the part]}, "optimizer": {number of the parameter: the same},
     "names": [names of the optimizer's parameters in the whole model, by number]}

A part has its place in every axis: it is a box. Tensors of the optimizer that are shaped like their parameter are parts
like it; all others, and those without an entry, are the same at every rank (``run.checkpoint.reshard``)."""

PARTITIONS = "partitions"
"""Key of :meth:`Engine.state` with ZeRO-2 and 3: which elements of which parameters the partitions of a rank hold:

    {"shapes": {name of a parameter: shape}, "tied": {another name of it: name},
     "pieces": [for each partition: [[name, begin in the partition, begin in the flattened parameter, elements], ...]]}
"""

STAGED = "staged"
"""Key of :meth:`Engine.state`: names of the model's tensors begin with the number of their stage."""

MODEL_CONFIG = "model_config"
"""Key of :meth:`Engine.state`: the content of Hugging Face's ``config.json``, for a model of ``transformers``."""

MEGATRON = "megatron"
"""Key of :meth:`Engine.state` of a Megatron model (``run.engines.megatron.whole_model``):

    {"tensors": {name of a tensor at this rank: {
         "name": its name in a model that is not divided,
         "key": its name in Megatron's checkpoints, "shape": of the whole there,
         "stacked": number of first axes of that shape that the tensor does not have (experts),
         "boxes": [[offset, shape of the part], ...]: where its pieces belong, which follow each other along its first axis
     }},
     "objects": [names of what is no tensor in Megatron's checkpoints, all of them None],
     "content": Megatron's metadata of the names,
     "settings": {setting of Megatron's config or of its GPTModel: value}}
"""

Progress = Callable[[str], None]
"""Called by an engine with the name of the action that it is about to take; fault injection uses it."""

Ready = Callable[[Bucket], None]
"""Called by an engine inside a backward pass when a bucket has received its last contribution of the microbatch. The
calling thread may be autograd's; the training thread waits for it."""


OWN, DIGEST = 0, -1
"""The number of the local buffers among those that gradients are added to; others are numbers of standby parts. With
``DIGEST`` a microbatch is computed for its digest alone, and added to nothing."""


class Miscount(AssertionError):
    """A bucket does not hold exactly the step's microbatches. All groups raise it, because their sums are equal."""


@dataclass(frozen=True)
class StepResult:
    """The result of one committed step.

    Args:
        step: number of the step, from 0.
        loss: mean over the global batch.
        microbatches: the number of microbatches that the reduction itself counted.
        gradient_norm: norm over all buckets before clipping; may be inf or nan.
        tokens: number of tokens in the step with ``loss_reduction`` ``"token"``, where ``loss`` is the mean over them;
            else 0.
        learning_rate: of the first group of the optimizer's parameters in this step; 0 for an optimizer without one.
        reports: sums over the step's microbatches of the numbers that a loss function reports for the script's log; the
            engine knows what they are (``MegatronEngine.reports``).
    """

    step: int
    loss: float
    microbatches: int
    gradient_norm: float
    tokens: int = 0
    learning_rate: float = 0.0
    reports: tuple[float, ...] = ()

    def to_json(self) -> list[Any]:
        """Return the fields in the order of the constructor's arguments."""
        *numbers, reports = astuple(self)
        return [*numbers, list(reports)]

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> StepResult:
        """Inverse of :meth:`to_json`. Checkpoints of earlier versions have fewer fields."""
        return replace(cls(*raw[:6]), reports=tuple(*raw[6:]))


class Gradients(Protocol):
    """The buckets to reduce, of one engine or of all ranks of a group (``run.collectives.intra_group_gradients``)."""

    @property
    def in_place(self) -> bool:
        """True if the local buffers are the reduced ones: their owner makes them anew before each attempt to reduce them."""

    @property
    def num_buckets(self) -> int:
        """The number of gradient buckets; the same in every group."""

    def tail(self, bucket: Bucket) -> int:
        """Return how many elements at the end of a bucket are not gradients. They are never rounded on the wire."""

    def exact(self, bucket: Bucket) -> ExactBucket | None:
        """Return the grid of a bucket, with exact reduction; None without."""

    def local(self, bucket: Bucket) -> torch.Tensor:
        """Return the local buffer; the caller must not write to it."""

    def reduced(self, bucket: Bucket) -> torch.Tensor:
        """Return the reduced buffer. The caller sums in it, sends it to another group or receives it from one."""

    def keep_local(self, bucket: Bucket) -> None:
        """Use the local buffer as the reduced one in this step, because this group is the only live one.

        This is safe because :meth:`update` is the first to change the buffer, and no group can ask for this step again
        after that.
        """

    def replace_reduced(self, bucket: Bucket) -> None:
        """Replace the reduced buffer by a fresh one: an abandoned collective may still write into the old one."""


class Engine(Gradients, Protocol):
    """The operations that the session needs of an engine."""

    @property
    def replicated(self) -> bool:
        """True if all ranks of a group hold the same state. If False, the engine makes their initial states agree."""

    @property
    def slots(self) -> int:
        """The number of elements that bucket 0 has between its gradients and its tail."""

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Those of the optimizers."""

    def begin_step(self, microbatches: int = 1) -> None:
        """Clear the local buffers at the beginning of a step, or of another attempt of it.

        ``microbatches``: the largest number of microbatches that the groups contribute to the step together."""

    def add_to(self, part: int) -> None:
        """Add gradient, loss and count of the next microbatches to this standby part, with :data:`OWN` to the local
        buffers, with :data:`DIGEST` to nothing. A step begins with :data:`OWN`."""

    def contribute(self, part: int) -> None:
        """Add a standby part to the local buffers. Nothing is added to the part after that. A part to which nothing was
        added counts as zeros."""

    def compute(
        self,
        microbatch: Microbatch,
        batch: Any,
        seed: int,
        progress: Progress,
        ready: Ready | None = None,
        keep: bool = False,
    ) -> None:
        """Run forward and backward of one microbatch; add gradient, loss and count where :meth:`add_to` says. With exact
        reduction the gradient is added by :meth:`collect`.

        Args:
            microbatch: id of the microbatch.
            batch: its samples, as the dataset returned them.
            seed: seed of all random choices, e.g. dropout.
            progress: see :data:`Progress`.
            ready: called with each bucket that is complete before backward ends, at most once per bucket, in any order.
                An engine may omit buckets, e.g. one with a parameter that gets no gradient. Default: no calls.
            keep: with exact reduction, leave the gradient as it is for :meth:`collect`, which needs all of it for a digest.
                Default: an engine may add parts of it before.
        """

    def collect(self, digest: bool = False) -> int:
        """With exact reduction, after the backward pass of each microbatch: add its gradient where :meth:`add_to` says.
        Return the digest of the gradient's bits at this rank if ``digest``, else 0."""

    def check_gradient(self, sizes: Mapping[str, int]) -> None:
        """In the first step of a process, after the first microbatch was collected: compare its gradient with the slope
        of its loss. All ranks that compute together call it, unless they do :meth:`JointEngine.check_by_flushes`.

        Args:
            sizes: numbers by which a library might divide or multiply: name -> number.

        Raises:
            EngineError: the gradient is a multiple of that of the loss.
        """

    def must_discard(self, microbatches: int) -> bool:
        """Return whether the reduced sums must not be used, because a gradient was too large for the grid; the same in
        all groups. Always False without exact reduction."""

    def discard(self, microbatches: int) -> None:
        """Prepare another attempt after sums that must not be used: choose a grid that holds their microbatches."""

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        """Divide the reduced sums, clip the means to the global norm and take the optimizer's step.

        If that norm is not finite, the step counts, but parameters, optimizer and scheduler keep their values.

        Args:
            step: number of the step; random numbers that the optimizer draws follow from the run's seed and it.
            microbatches: number of microbatches in the step; the divisor, unless tokens are counted.
            progress: see :data:`Progress`.

        Raises:
            Miscount: a bucket does not hold exactly ``microbatches``.
        """

    def repeat(self, result: StepResult, values: Values | None = None) -> None:
        """Take the optimizer's step that another group took with ``result``. The reduced buffers must hold the values
        that :meth:`update` left in them there. ``values``: the hyperparameters with which it took the step; None: those that
        are in place here."""

    @property
    def searches_scale(self) -> bool:
        """True if the loss scale can become smaller: a step that is skipped may be part of the search for one."""

    def local_finite(self) -> bool:
        """Return True if this group's own gradients and losses of the step are finite, after a norm that is not."""

    def complete(self) -> None:
        """Finish what the last step has left to the next one, before :meth:`state` is saved or a script reads the model.
        All ranks of a group call it."""

    def state(self) -> Mapping[str, Any]:
        """Return the complete state of a group: nested mappings of tensors and plain values. What :meth:`complete`
        has not finished is finished where the state is loaded."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state`."""

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor for all tensors of :meth:`state`, without copies. All groups have the same names, shapes and
        dtypes in the same order, and between two steps the same values."""

    def fingerprint(self) -> tuple[float, str]:
        """Return the L2 norm of all parameters, and the sha256 of their bytes."""


class Control(Protocol):
    """A channel for short messages (a few integers) between ranks of a group that compute together."""

    def send_words(self, position: int, words: Sequence[int]) -> None:
        """Send ``words`` to the rank at ``position`` without blocking."""

    def heard(self, position: int) -> tuple[int, ...] | None:
        """Return the next message from ``position``, or None if none has arrived."""

    def receive_words(self, position: int) -> tuple[int, ...]:
        """Wait for the next message from ``position`` and return it."""


class Listed(NamedTuple):
    """A microbatch to compute; ``patch`` is True if another group had it before; ``part``: see :meth:`Engine.add_to`;
    ``digest``: the digest of its gradient is asked for."""

    microbatch: Microbatch
    patch: bool
    part: int = OWN
    digest: bool = False


class Work(Protocol):
    """The services of the session for an engine whose ranks compute microbatches together."""

    def listed(self) -> Sequence[Listed]:
        """Return the group's microbatches in the order in which they should begin, at position 0 only. More may come at any
        time, and those that have not begun may change their order; those that have begun keep theirs."""

    def closes(self, listed: Sequence[Listed]) -> bool:
        """Return whether these microbatches, which begin now, are the last of the step, so that no other may join them; at
        position 0 only."""

    def ready(self) -> Ready | None:
        """Return the function to call with each bucket that is complete within the last microbatches of the step; None: no
        bucket may be sent yet. At every rank, after :meth:`closes` has returned True at position 0."""

    def batch(self, microbatch: Microbatch) -> Any:
        """Return the samples of ``microbatch``."""

    def seed(self, microbatch: Microbatch) -> int:
        """Return the seed of all random choices for ``microbatch``."""

    def span(self, kind: str, listed: Listed) -> AbstractContextManager[None]:
        """Return the context of one pass, ``forward`` or ``backward``, for the timeline and for fault injection."""

    def computed(self, listed: Listed) -> None:
        """Report that the backward pass of a microbatch has ended at this rank."""


class JointEngine(Engine, Protocol):
    """An engine whose ranks compute every microbatch together (pipeline, tensor parallelism). Each rank has its own
    parameters and its own buckets. ``compute`` is not used."""

    @property
    def needs_samples(self) -> bool:
        """True if this rank needs samples."""

    @property
    def peers(self) -> Sequence[int]:
        """The positions with which this rank needs a channel (:class:`Control`); the relation is symmetric."""

    @property
    def checks_by_flushes(self) -> bool:
        """True if :meth:`check_by_flushes` takes the place of :meth:`Engine.check_gradient`; the same at all ranks."""

    def check_by_flushes(self, flush: Callable[[], None], sizes: Mapping[str, int]) -> bool:
        """Before the first flush of a process: compare the gradient of a microbatch with the slope of its loss, both of
        passes of its own. All ranks of the group call it. Return False if there was no microbatch. The caller begins the
        step again.

        Args:
            flush: makes a flush of the group's first microbatch alone, if it has one; the same one in each call.
            sizes, errors: see :meth:`Engine.check_gradient`.
        """

    def flush(self, control: Control, work: Work) -> None:
        """Run forward and backward of every listed microbatch until none is left, and add each where its ``part`` says.
        All ranks of the group call it."""
