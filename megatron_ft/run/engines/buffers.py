"""Buffers that a forward pass writes (BatchNorm's statistics, biases of experts), kept equal in all groups.

Each microbatch starts from the buffers' values at the beginning of the step. The changes that its forward pass makes
are added to numbers that travel with bucket 0 (``run.engines.buckets``), so they are counted exactly once, like the
microbatch's gradient. When the step is committed every group adds the sum of the changes, divided by the number of
microbatches. The result is a function of the set of microbatches alone; it does not depend on the group or the order in
which they were computed.

For BatchNorm this means one update per step, with the mean of the microbatches' statistics; ``num_batches_tracked``
counts steps. A buffer that forward never writes keeps its bits, also when one of them flips in memory during the step:
a change in a single microbatch without a write that torch has counted is not added, and the next microbatch starts from
the right value. A flip in a buffer that forward writes cannot be told from a write; like one in a gradient it is
included in the sum.

Failures it assumes: bits that flip in memory. A write to a buffer that cannot be merged ends the group with an
``EngineError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from megatron_ft.errors import EngineError
from megatron_ft.types import given

LARGEST = 2**16
"""Largest number of elements of a buffer that forward may write. Larger ones (rotary tables, masks) must not change."""


@dataclass(eq=False)
class _Entry:
    """One buffer. ``sites``: the modules that hold it, each with its key; a buffer may be shared. ``held`` and
    ``version``: the tensor from which the next forward pass starts, and torch's count of in-place writes to it at that
    time."""

    name: str
    tensor: torch.Tensor
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    start: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # only for buffers that forward may write
    held: torch.Tensor | None = None
    version: int | None = None

    @property
    def now(self) -> torch.Tensor | None:
        module, key = self.sites[0]
        return module._buffers.get(key)

    def put(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        for module, key in self.sites:
            if module._buffers.get(key) is not tensor:
                module._buffers[key] = tensor

    def mark(self) -> None:
        """Begin a forward pass: :attr:`written` is about writes after this call."""
        self.held, self.version = self.now, _version(self.now)

    @property
    def written(self) -> bool:
        """True if the buffer was written since :meth:`mark`, as far as torch can tell."""
        return self.now is not self.held or self.version is None or _version(self.now) != self.version

    @property
    def uncounted(self) -> bool:
        """True if torch's own kernels write the buffer without counting the write: statistics of BatchNorm."""
        return any(isinstance(module, _NormBase) for module, _ in self.sites)

    @property
    def persistent(self) -> bool:
        return any(key not in module._non_persistent_buffers_set for module, key in self.sites)

    def __str__(self) -> str:
        return f"buffer {self.name} ({str(self.tensor.dtype).removeprefix('torch.')}, {self.tensor.numel()} elements)"


class Buffers:
    """The buffers that ``model`` has when this is made. Buffers that a forward pass creates are ignored.

    Args:
        model: the module whose forward passes are computed.
        in_flight: True if a forward pass may begin before the backward pass of an earlier one (a pipeline). Each
        microbatch
            then gets tensors of its own, because autograd may have kept the earlier ones.
    """

    def __init__(self, model: nn.Module, *, in_flight: bool = False) -> None:
        found: dict[int, _Entry] = {}
        for prefix, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found.setdefault(id(tensor), _Entry(name, tensor)).sites.append((module, key))
        entries = list(found.values())
        merged = [entry for entry in entries if _can_be_merged(entry.tensor)]
        self._floats = [entry for entry in merged if entry.tensor.is_floating_point()]
        self._integers = [entry for entry in merged if not entry.tensor.is_floating_point()]
        self._merged = self._floats + self._integers
        self._fixed = [entry for entry in entries if not _can_be_merged(entry.tensor)]
        self._in_flight = in_flight
        self.changes = sum(entry.tensor.numel() for entry in self._merged)
        """Number of elements of the buffers that forward may write."""
        self.elements = self.changes + len(self._merged)
        """Number of elements in bucket 0: the changes, and a sign of a write for each buffer (:meth:`take`)."""
        self._uncounted = [entry.uncounted for entry in self._merged]
        for entry in self._merged:
            entry.start = entry.tensor.detach().clone()
        sizes = torch.tensor([entry.tensor.numel() for entry in self._merged], dtype=torch.int64)
        self._owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step from the present values of the buffers."""
        for entry in self._merged:
            if entry.now is not None and entry.now is not entry.tensor:
                entry.put(entry.now)
        if self._merged:
            torch._foreach_copy_([entry.start for entry in self._merged], [entry.tensor for entry in self._merged])
        for entry in self._fixed + self._merged:
            entry.mark()

    @torch.no_grad()
    def take(self, total: torch.Tensor) -> None:
        """After a forward pass: add its changes to ``total``, fp32 or fp64 [elements].

        After the changes ``total`` has a number for each buffer: 1 for a change of its value, and 1 more if torch has
        counted a write, or cannot count writes to it. The sum over the step's microbatches is 1 only if a single one
        has a change that no write explains.

        Raises ``EngineError`` if the pass wrote a buffer that cannot be merged.
        """
        for entry in self._fixed:
            if entry.now is not entry.held or _version(entry.now) != entry.version:
                raise EngineError(
                    f"{entry} was written in forward, and the groups would come to hold different values; only real and "
                    f"integer buffers of at most {LARGEST} elements can be written there: make it one, or leave it as it is"
                )
        if not self._merged:
            return
        for entry in self._merged:
            if entry.now is None or entry.now.shape != entry.start.shape or entry.now.dtype != entry.start.dtype:
                raise EngineError(
                    f"{entry} got another shape or type in forward, so it cannot be kept equal in all groups"
                )
        kinds = ((self._floats, torch.float32), (self._integers, torch.int64))
        changes = [_changes(entries, dtype) for entries, dtype in kinds if entries]
        change = torch.cat([change.to(total) for change in changes])
        pairs = zip(self._merged, self._uncounted, strict=True)
        written = total.new_tensor([entry.written or uncounted for entry, uncounted in pairs])
        self._owners = self._owners.to(total.device)
        changed = torch.zeros_like(written).index_add_(0, self._owners, (change != 0).to(total)).clamp_(max=1)
        total[: self.changes].add_(change)
        total[self.changes :].add_(changed + written)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values from which the step started."""
        if not self._merged:
            return
        for entry in self._merged:
            entry.put(entry.start.clone() if self._in_flight else entry.tensor)
        if not self._in_flight:
            torch._foreach_copy_([entry.tensor for entry in self._merged], [entry.start for entry in self._merged])
        for entry in self._merged:
            entry.mark()

    @torch.no_grad()
    def add(self, mean: torch.Tensor, microbatches: int) -> None:
        """Commit the step: add the mean change of its ``microbatches``, fp32 or fp64 [elements].

        Raises ``EngineError``, in every group alike, when an integer would not stay one.
        """
        mean, signs = mean[: self.changes], mean[self.changes :] * microbatches
        if microbatches > 1:
            flipped = (signs.round() == 1).to(self._owners.device)[self._owners].to(mean.device)
            mean = torch.where(flipped, 0, mean)
        integers = mean[sum(entry.tensor.numel() for entry in self._floats) :]
        uneven = bool(len(integers)) and bool((integers != integers.round()).any())
        offset = 0
        for entry in self._merged:
            change = mean[offset : offset + entry.tensor.numel()]
            offset += entry.tensor.numel()
            if not entry.tensor.is_floating_point():
                if uneven and bool((change != change.round()).any()):
                    raise EngineError(
                        f"{entry} was changed by a different number in some microbatches; a step changes a buffer by the "
                        f"mean over its microbatches, which must be whole for an integer: make it a float"
                    )
                change = change.to(entry.tensor.dtype)
            entry.tensor.add_(change.view(entry.tensor.shape).to(entry.tensor.device))

    def unsaved(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers that ``model.state_dict()`` leaves out; the state of a group includes them."""
        return {entry.name: entry.tensor for entry in self._merged if not entry.persistent}

    @torch.no_grad()
    def load(self, unsaved: Mapping[str, torch.Tensor]) -> None:
        """Load the result of :meth:`unsaved`, after the model's state was loaded."""
        own = self.unsaved()
        for name, value in unsaved.items():
            own[name].copy_(value)
        self.begin()


def _can_be_merged(tensor: torch.Tensor) -> bool:
    real = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    return real and tensor.numel() <= LARGEST and tensor.layout == torch.strided


def _changes(entries: list[_Entry], dtype: torch.dtype) -> torch.Tensor:
    now = torch.cat([given(entry.now).detach().reshape(-1).to(entries[0].start.device, dtype) for entry in entries])
    start = torch.cat([entry.start.reshape(-1).to(entries[0].start.device, dtype) for entry in entries])
    # A mask of -inf that stays as it is must not give -inf - -inf, which is not a number.
    same = (now == start) | ((now != now) & (start != start))
    return torch.where(same, 0, now - start)


def _version(tensor: torch.Tensor | None) -> int | None:
    if tensor is None or tensor.is_inference():  # the latter counts no writes
        return None
    return tensor._version
