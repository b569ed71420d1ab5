"""Gradients of one rank, cut into flat buckets: what every engine keeps, whatever it is an adapter of.

A bucket has a local and a reduced tensor, both fp32, [elements + slots + TAIL] (``engines.base``), and views of them shaped
like its parameters.

Failures it assumes: none. A reduction that is abandoned may still write into a reduced tensor: it is replaced then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron_ft.engines.base import TAIL

_CLIP_EPSILON = 1e-6
"""What torch adds to the norm before it divides the limit by it."""
_LEAST_MB, _MOST_MB, _PARTS = 1.0, 25.0, 8


class Bucket:
    """Some parameters, their local gradient and its reduction. ``sum`` is the one of both that holds the step's sum."""

    def __init__(self, parameters: list[nn.Parameter], slots: int) -> None:
        self.parameters = parameters
        self.elements = sum(parameter.numel() for parameter in parameters)
        self.local = torch.zeros(self.elements + slots + TAIL, dtype=torch.float32, device=parameters[0].device)
        self.local_views = self._views(self.local)
        self.loss, self.count = self.local[-TAIL:]
        self.replace_reduced()

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for parameter in self.parameters:
            views.append(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        return views

    def begin_step(self) -> None:
        self.local.zero_()
        self.sum, self.sum_views = self.reduced, self.reduced_views

    def keep_local(self) -> None:
        self.sum, self.sum_views = self.local, self.local_views

    def replace_reduced(self) -> None:
        self.reduced = torch.zeros_like(self.local)
        self.reduced_views = self._views(self.reduced)
        self.sum, self.sum_views = self.reduced, self.reduced_views

    def point_gradients_at(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view


class Buckets(Sequence[Bucket]):
    """All buckets of one rank, last parameters first: the order in which backward finishes them.

    Args:
        parameters: in the order of the forward pass; a bucket holds those of one device.
        bucket_mb: largest size in MiB of fp32; a single larger parameter gets a bucket of its own. None: an eighth of the
            gradients, but 1 to 25: of many buckets more are done when a group is lost, few large ones are faster.
        slots: how many numbers bucket 0 carries between its gradients and its tail.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_mb: float | None, slots: int) -> None:
        self.slots = slots
        filled = _fill(parameters, bucket_mb)
        self._buckets = [Bucket(group, slots if number == 0 else 0) for number, group in enumerate(filled)]

    def __getitem__(self, number):
        return self._buckets[number]

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def count(self, loss: torch.Tensor | None, microbatches: int = 1) -> None:
        """So many more are in every bucket, or will be at the end of the backward pass; ``loss``: their sum, where known."""
        value = None if loss is None else loss.detach()
        for bucket in self._buckets:
            if value is not None:
                bucket.loss.add_(value)
            bucket.count.add_(microbatches)

    def check(self, step: int, microbatches: int) -> float:
        """The sum of the losses. Raises ``AssertionError`` unless every bucket holds that many microbatches."""
        losses, counts = zip(*(bucket.sum[-TAIL:].tolist() for bucket in self._buckets), strict=True)
        assert set(counts) == {microbatches}, f"step {step}: buckets hold {counts} microbatches, not {microbatches}"
        return losses[0]

    def average(self, microbatches: int, norm: float, clipping: float) -> None:
        """Make means of the sums and clip them to ``clipping``, if that is not 0, in one pass.

        Clips as ``torch.nn.utils.clip_grad_norm_`` does to means; ``norm`` is the means'. Each pass over the gradients that
        is left out pays for half of the copy that reductions need (``runtime.reduction``).
        """
        clipped = clipping / (norm + _CLIP_EPSILON)
        for bucket in self._buckets:
            if clipping and clipped < 1:
                bucket.sum.mul_(clipped / microbatches)
            else:
                bucket.sum.div_(microbatches)


class Bucketed:
    """The part of the ``Engine`` port that follows from the buckets alone."""

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_mb: float | None, slots: int) -> None:
        self._parameters = parameters
        self._buckets = Buckets(parameters, bucket_mb, slots)

    @property
    def slots(self) -> int:
        return self._buckets.slots

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def local(self, bucket: int) -> torch.Tensor:
        return self._buckets[bucket].local

    def reduced(self, bucket: int) -> torch.Tensor:
        return self._buckets[bucket].sum

    def keep_local(self, bucket: int) -> None:
        self._buckets[bucket].keep_local()

    def replace_reduced(self, bucket: int) -> None:
        self._buckets[bucket].replace_reduced()

    def local_finite(self) -> bool:
        return all(bool(torch.isfinite(bucket.local).all()) for bucket in self._buckets)

    def local_gradients(self) -> list[torch.Tensor]:
        """The flat local gradient of each bucket, as views. Fault injection changes them (``runtime.points``)."""
        return [bucket.local[: bucket.elements] for bucket in self._buckets]

    def local_losses(self) -> list[torch.Tensor]:
        """The sum of losses that each bucket carries, as views of one element."""
        return [bucket.local[-TAIL:-1] for bucket in self._buckets]

    def fingerprint(self) -> tuple[float, str]:
        """Of this rank's parameters; the norm is of those that :meth:`_counts`."""
        digest, square = hashlib.sha256(), 0.0
        for parameter in self._parameters:
            values = parameter.detach().cpu().contiguous()
            digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
            square += float(values.double().square().sum()) if self._counts(parameter) else 0.0
        return square**0.5, digest.hexdigest()

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts it in norms: one that is in several ranks of a group is counted by one of them."""
        return True


def _fill(parameters: Sequence[nn.Parameter], bucket_mb: float | None) -> list[list[nn.Parameter]]:
    total_mb = sum(parameter.numel() for parameter in parameters) * 4 / 2**20
    limit = (bucket_mb or min(max(total_mb / _PARTS, _LEAST_MB), _MOST_MB)) * 2**20 / 4
    buckets: list[list[nn.Parameter]] = []
    filled = 0.0
    for parameter in reversed(parameters):
        if not buckets or filled + parameter.numel() > limit or buckets[-1][0].device != parameter.device:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
