"""The part that is the same in all engines whose ranks compute every microbatch together (``port.JointEngine``).

Every rank has its own parameters, or its part of each, and buckets of their gradients. What concerns the whole group (the
norm, the loss, the number of tokens) is summed over its ranks when the step is committed, after the sums over the groups.

Failures it assumes: any rank of the group may vanish; a collective inside the group then raises ``RuntimeError``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_ft.data import generators
from megatron_ft.errors import EngineError
from megatron_ft.run.engines import rounds
from megatron_ft.run.engines.buckets import Bucketed
from megatron_ft.run.engines.exact_rounding import square_norm
from megatron_ft.run.engines.gradient_check import GradientCheck, kept
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Control, Listed, Ready, Work
from megatron_ft.types import given


class JointBucketed(Bucketed):
    """The common part.

    Args:
        model, parameters: see :class:`~megatron_ft.run.engines.buckets.Bucketed`.
        layout: the place of this rank.
        shard_group: the ranks among which each microbatch is divided, if there are several.
        divide: what of it is divided: ``"samples"`` or ``"sequence"``, see :func:`share`.
        settings: see :class:`~megatron_ft.run.engines.buckets.Bucketed`.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        layout: Layout,
        shard_group: dist.ProcessGroup | None = None,
        divide: str = "samples",
        **settings: Any,
    ) -> None:
        super().__init__(model, parameters, **settings)
        self.layout, self.peers = layout, rounds.peers(layout)
        self._shard_group, self._divide = shard_group, divide
        self._divided = layout.shards

    _reports = 0
    """The number of elements in ``StepResult.reports``: the first of those that microbatches add to for the script's log."""

    def compute(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("the ranks of the group compute together: flush")

    def _share(self, batch: Any) -> Any:
        """Return this rank's share of a microbatch."""
        return share(batch, self.layout, self._divide)

    def _count_loss(self, loss: torch.Tensor | None, microbatches: int = 1) -> None:
        """Count a microbatch, with the loss over this rank's share of its samples if this rank has computed it."""
        whole = loss if loss is None or self._per_token else loss / self.layout.shards
        self._buckets.count(whole, microbatches)

    def _all_complete(self, ready: Ready | None) -> None:
        """Tell ``ready`` of all buckets (``Work.ready``)."""
        if ready is not None:
            for bucket in range(self.num_buckets):
                ready(bucket)

    def _totals(self, loss: float, tokens: int) -> tuple[float, float, int, tuple[float, ...]]:
        self._sum_inside()
        views = self._views(self._counted)
        told = torch.zeros(3 + self._reports, dtype=torch.float64, device=self._buckets[0].local.device)
        if self.layout.slice == 0:  # the slices of a stage compute the same loss; of the stages only the last has one
            told[0], told[2] = loss, tokens
            told[3:] = self._buckets.sum_riders[self._first_report :][: self._reports]
        if self._rounding is not None:
            told[1] = square_norm(views)
        elif views:
            told[1] = sum(norm.double().square() for norm in torch._foreach_norm(views))
        told[1] += self._flaw()
        dist.all_reduce(told)
        return float(told[0]), sqrt(float(told[1])), int(told[2]), tuple(told[3:].tolist())

    def _sum_inside(self) -> None:
        """Sum over the ranks of the group what the step's sums have in several of them: the changes of buffers, of which
        each shard has those of its samples."""
        changes = self._buckets.sum_riders[self._first_change :]
        if self._shard_group is not None and len(changes):
            dist.all_reduce(changes, group=self._shard_group)

    @property
    def checks_by_flushes(self) -> bool:
        return True

    def check_by_flushes(self, flush: Callable[[], None], sizes: Mapping[str, int]) -> bool:
        def lose() -> float:
            self.begin_step()
            flush()
            return self._own_loss

        def renew() -> None:
            lose()
            for bucket in self._buckets:
                bucket.keep_local()
            self._sum_inside()

        renew()
        if not float(self._buckets[0].own.count):
            return False
        self._gradient_check(lose, renew).check(self._own_loss, self._loss_scale(), sizes)
        return True

    def _gradient_check(self, lose: Callable[[], float], renew: Callable[[], None] = lambda: None) -> GradientCheck:
        device = self._buckets[0].local.device

        def total(numbers: Sequence[float]) -> list[float]:
            told = torch.tensor(numbers, dtype=torch.float64, device=device)
            dist.all_reduce(told)
            return told.tolist()

        buckets, counted = list(self._buckets), self._counted
        return GradientCheck(buckets, counted, lose, total, self._has_16_bits, self._on_moved, renew)

    @property
    def _own_loss(self) -> float:
        """This rank's part of the loss: the slices of a stage compute the same one."""
        return float(self._buckets[0].own.loss) if self.layout.slice == 0 else 0.0

    def _on_moved(self) -> None:
        """Make the model use the parameters of the buckets, which have changed."""

    def _views(self, parameters: Collection[nn.Parameter]) -> list[torch.Tensor]:
        """Return the views of ``parameters`` in the step's sums."""
        return [
            view
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.sum_views, strict=True)
            if parameter in parameters
        ]


class OneByOne(JointBucketed):
    """The part that is the same in engines whose ranks all pass through one microbatch after the other, each with its
    share of the samples."""

    _again: Callable[[], float] | None = None
    """Computes this rank's part of the loss of the first microbatch again."""
    _at_a_time = 1
    """The number of microbatches that the ranks may agree on together."""
    needs_samples = True

    def flush(self, control: Control, work: Work) -> None:
        for found, last in rounds.rounds(self.layout, control, work, most=self._at_a_time):
            for listed, following in zip(found, (*found[1:], None), strict=True):
                self._will_follow(following is not None and following.part == listed.part)
                self._pass(work, listed, last and following is None)

    def _will_follow(self, same: bool) -> None:
        """Before a pass: ``same``: another microbatch certainly follows, whose gradient is added to the same part."""

    def _pass(self, work: Work, listed: Listed, last: bool) -> None:
        with work.span("forward", listed):
            self.add_to(listed.part)
            batch = self._share(work.batch(listed.microbatch))
            # The slices of a shard drop from the same activations.
            seed = (work.seed(listed.microbatch) + self.layout.shard) % 2**63
            self._again = self._again or partial(self._compute_loss, kept(batch), seed)
            generators.seed(seed)
            loss, tokens = self._split_loss(self._lose(batch))
            self._count_loss(loss)
            self._count_tokens(tokens)
            self._take_changes()
        with work.span("backward", listed):
            ready = work.ready() if last and not listed.digest else None
            # Libraries take the mean over the shards, of which each has lost a part of the sum.
            self._go_back(loss * self.layout.shards if self._per_token else loss, ready)
            self._buffers.restore()
        work.computed(listed)
        self._taken_with(ready)

    def _compute_loss(self, batch: Any, seed: int) -> float:
        """Return this rank's part of the loss of a microbatch, with the present parameters."""
        generators.seed(seed)
        with torch.no_grad():
            loss, _ = self._split_loss(self._lose(kept(batch)))
        self._buffers.restore()
        value = float(loss) if self._per_token else float(loss) / self.layout.shards
        return value if self.layout.slice == 0 else 0.0

    def check_gradient(self, sizes: Mapping[str, int]) -> None:
        if float(self._buckets[0].own.count) == 1:
            self._gradient_check(given(self._again)).check(self._own_loss, self._loss_scale(), sizes)

    @property
    def checks_by_flushes(self) -> bool:
        """False: a forward pass without a backward pass costs no more than that."""
        return False

    @abstractmethod
    def _lose(self, batch: Any) -> Any:
        """Return what the loss function returns."""

    @abstractmethod
    def _go_back(self, loss: torch.Tensor, ready: Ready | None) -> None:
        """Run the backward pass. ``ready``: see ``Work.ready``."""

    def _taken_with(self, ready: Ready | None) -> None:
        """After the gradients were added: tell ``ready`` of buckets that backward has not told it of."""


_AXES = {"samples": 0, "sequence": 1}


def share(batch: Any, layout: Layout, divide: str = "samples") -> Any:
    """Return this rank's share of a microbatch: with ``"samples"`` a part of each tensor's first axis, with ``"sequence"``
    of the second one of those that have it.

    Raises ``EngineError`` for a batch of another type, or an axis that cannot be divided evenly.
    """
    if layout.shards == 1:
        return batch
    if isinstance(batch, torch.Tensor):
        axis = _AXES[divide]
        if divide == "sequence" and batch.dim() < 2:
            return batch
        if not batch.dim() or batch.shape[axis] % layout.shards:
            raise EngineError(
                f"a batch holds a tensor of shape {list(batch.shape)}, whose {('first', 'second')[axis]} axis cannot be "
                f"divided among fault_tolerance.inner_shards {layout.shards}; let it be that of the {divide}, with a "
                f"multiple of {layout.shards}"
            )
        return batch.chunk(layout.shards, axis)[layout.shard].contiguous()
    if isinstance(batch, Mapping):
        return {key: share(value, layout, divide) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [share(value, layout, divide) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise EngineError(
        f"a batch holds a {type(batch).__name__}, which cannot be divided among fault_tolerance.inner_shards "
        f"{layout.shards}; a batch may be a tensor, or lists, tuples and mappings of tensors"
    )
