"""The gradients of one rank in flat buckets: the part that all engines have in common.

A bucket has a local and a reduced tensor, one more for each standby part, and views of them shaped like its parameters.
The tensors hold the gradients, then with exact reduction the statistics of ``run.engines.exact_rounding``, then in bucket 0
the riders (other numbers to which each microbatch adds: tokens, changes of buffers) and the session's slots, then the
tail: [elements + statistics + riders + slots + TAIL] (``run.engines.port``). They are fp32; with exact reduction fp64, and
autograd leaves each microbatch's gradients in ``.grad``, where :meth:`Bucketed.collect` takes them.

Failures it assumes: none. A reduced tensor into which an abandoned reduction may still write is replaced.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import nn

from megatron_ft.data import generators
from megatron_ft.data.order import step_seed
from megatron_ft.errors import EngineError
from megatron_ft.run.engines import exact_rounding, tensor_checksum
from megatron_ft.run.engines.buffers import Buffers
from megatron_ft.run.engines.exact_rounding import ExactBucket, Rounding, square_norm
from megatron_ft.run.engines.hyperparameters import Hyperparameters, Values
from megatron_ft.run.engines.port import DIGEST, MODEL_CONFIG, OWN, TAIL, Miscount, Progress, Ready, StepResult

_CLIP_EPSILON = 1e-6
"""The constant that torch adds to the norm before it divides the limit by it."""
_LEAST_MB, _MOST_MB, _PARTS = 1.0, 25.0, 8
_TOKENS, _BASE = 2, 256
"""The number of tokens travels as two fp32 numbers, the lower digit to base 256 and the rest: their sums are exact up to
65,000 microbatches and 4 * 10^9 tokens in a step, where a single fp32 number would be exact up to 1.6 * 10^7 tokens."""


class Addend:
    """A flat tensor to which microbatches are added, and views of it."""

    def __init__(self, flat: torch.Tensor, views: list[torch.Tensor]) -> None:
        self.flat, self.views = flat, views
        self.loss, self.count = flat[-TAIL:]


class Bucket:
    """Some parameters, their local gradient and its reduction. ``sum`` is the one that holds the step's sum.

    ``adds_to``: the local gradient, or that of the standby part to which microbatches are added now.
    """

    def __init__(self, parameters: list[nn.Parameter], extra: int, units: int = 0) -> None:
        self.parameters = parameters
        ends = list(accumulate(parameter.numel() for parameter in parameters))
        self.spans = list(zip([0, *ends], ends, strict=False))
        """First and last element of each parameter's gradient."""
        self.elements = ends[-1]
        self.statistics = exact_rounding.statistics(units) if units else 0
        self.tail = self.statistics + extra + TAIL
        self.own = self.adds_to = self._addend()
        self.local, self.local_views = self.own.flat, self.own.views
        self.parts: dict[int, Addend] = {}
        self._spare: list[Addend] = []
        self.replace_reduced()

    def _addend(self) -> Addend:
        dtype = torch.float64 if self.statistics else torch.float32
        flat = torch.zeros(self.elements + self.tail, dtype=dtype, device=self.parameters[0].device)
        return Addend(flat, self._views(flat))

    def part(self, part: int) -> Addend:
        """Return the gradient of a standby part of this step, or with ``OWN`` the local one."""
        if part != OWN and part not in self.parts:
            addend = self._spare.pop() if self._spare else self._addend()
            addend.flat.zero_()
            self.parts[part] = addend
        return self.parts[part] if part != OWN else self.own

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[a:b].view_as(parameter) for (a, b), parameter in zip(self.spans, self.parameters, strict=True)]

    def begin_step(self) -> None:
        self.local.zero_()
        self.sum, self.sum_views = self.reduced, self.reduced_views
        self._spare += self.parts.values()  # memory of the last step
        self.parts, self.adds_to = {}, self.own

    def keep_local(self) -> None:
        self.sum, self.sum_views = self.local, self.local_views

    def replace_reduced(self) -> None:
        self.reduced = torch.zeros_like(self.local)
        self.reduced_views = self._views(self.reduced)
        self.sum, self.sum_views = self.reduced, self.reduced_views

    def aim(self) -> None:
        """Let autograd add the next gradients to the right place."""
        if self.statistics:
            self.clear_gradients()  # autograd leaves them in ``.grad``, and they are rounded when they are taken
        else:
            self.point_gradients_at(self.adds_to.views)

    def give(self) -> None:
        """Put the step's sum where an optimizer looks for gradients."""
        self.point_gradients_at(self.fp32_sum())

    def fp32_sum(self) -> list[torch.Tensor]:
        """Return the step's sum for each parameter in fp32, if need be in memory of the buffer that the step does not need
        any more."""
        if not self.statistics:
            return self.sum_views
        free = self.local if self.sum is self.reduced else self.reduced
        flat = free.view(torch.float32)[: self.elements].copy_(self.sum[: self.elements])
        return self._views(flat)

    def point_gradients_at(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Buckets(Sequence[Bucket]):
    """All buckets of one rank, last parameters first: the order in which backward finishes them.

    Args:
        parameters: in the order of the forward pass; the parameters of a bucket are on one device.
        bucket_mb: largest size in MiB of fp32; a single larger parameter gets a bucket of its own. None: an eighth of
            the gradients, but 1 to 25. With many buckets more are finished when a group is lost; few large ones are
            faster.
        slots: number of elements of bucket 0 between its riders and its tail, for the session.
        riders: number of elements of bucket 0 after its gradients; each microbatch adds to them as to a gradient.
        exact_bits: see ``core.exactness.grid.lowest``; 0: sums are rounded.
        apart: parameter -> number; those with different numbers are in different buckets.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_mb: float | None,
        slots: int,
        riders: int = 0,
        exact_bits: int = 0,
        apart: Mapping[nn.Parameter, int] = {},
    ) -> None:
        self._riders = riders
        self._buckets: list[Bucket] = []
        for group in _fill(parameters, bucket_mb, apart):
            first = not self._buckets
            units = len(group) + (2 if first else 0) if exact_bits else 0  # the loss and the changes are units, too
            self._buckets.append(Bucket(group, riders + slots if first else 0, units))
        self.rounding = Rounding(self._buckets, exact_bits) if exact_bits else None
        self.muted = False
        """True while microbatches are computed only for their digest."""
        self.riders_to = self._riders_of(self._buckets[0].local)

    def _riders_of(self, flat: torch.Tensor) -> torch.Tensor:
        first = self._buckets[0].elements + self._buckets[0].statistics
        return flat[first : first + self._riders]

    @property
    def sum_riders(self) -> torch.Tensor:
        """The riders of the step's sum; after :meth:`average`, the means over its microbatches."""
        return self._riders_of(self._buckets[0].sum)

    def add_to(self, part: int) -> None:
        """Add the next microbatches to a standby part, with ``OWN`` to the local gradients, with ``DIGEST`` to none."""
        self.muted = part == DIGEST
        if self.muted:
            self.riders_to = torch.zeros_like(self.riders_to)
            return
        for bucket in self._buckets:
            bucket.adds_to = bucket.part(part)
        self.riders_to = self._riders_of(self._buckets[0].adds_to.flat)

    def contribute(self, part: int) -> None:
        """Add a standby part to the local gradients."""
        for bucket in self._buckets:
            if part in bucket.parts:
                bucket.local.add_(bucket.parts[part].flat)

    def __getitem__(self, number):
        return self._buckets[number]

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def count(  # type: ignore[override]  # of microbatches; the one of a sequence is not used
        self, loss: torch.Tensor | None, microbatches: int = 1
    ) -> None:
        """Add ``microbatches`` to every bucket's count, even before backward, and ``loss``, their sum, if known."""
        value = None if loss is None else loss.detach()
        if self.muted:
            return
        for bucket in self._buckets:
            if value is not None and self.rounding is None:
                bucket.adds_to.loss.add_(value)
            bucket.adds_to.count.add_(microbatches)
        if value is not None and self.rounding is not None:
            self.rounding.add_loss(value)

    def check(self, step: int, microbatches: int) -> float:
        """Return the sum of the losses. Raises ``Miscount`` unless every bucket holds ``microbatches`` microbatches."""
        losses, counts = zip(*(bucket.sum[-TAIL:].tolist() for bucket in self._buckets), strict=True)
        if set(counts) != {microbatches}:
            raise Miscount(f"step {step}: buckets hold {counts} microbatches, not {microbatches}")
        return losses[0]

    def average(self, divisor: float, passes: int, norm: float, clipping: float) -> None:
        """Turn the sums of gradients into means and clip them to ``clipping``, unless that is 0, in one pass.

        Clips as ``torch.nn.utils.clip_grad_norm_`` clips the means, whose norm is ``norm``. Each pass over the
        gradients that is saved pays for half of the copy that reductions need (``run.collectives.bucket_allreduce``).
        Riders are divided by the number of forward passes, and not clipped.
        """
        clipped = clipping / (norm + _CLIP_EPSILON)
        for bucket in self._buckets:
            gradients = bucket.sum[: bucket.elements]
            if clipping and clipped < 1:
                gradients.mul_(clipped / divisor)
            else:
                gradients.div_(divisor)
        if self._riders:
            self.sum_riders.div_(passes)


class Bucketed:
    """The part of the ``Engine`` port that is the same in all engines.

    Large because that port is: a protocol of a step with a method for each of its moments, which engines override.

    Args:
        model: the module whose buffers are kept equal in all groups (``run.engines.buffers``).
        parameters: its trainable parameters, in the order of the forward pass.
        bucket_mb: see :class:`Buckets`.
        gradient_clipping: limit of the global norm; 0 turns clipping off.
        slots: number of elements of bucket 0 for the session (``run.engines.port.TAIL``).
        loss_reduction: ``"microbatch"``: the loss of a microbatch is a mean, and the step's loss is the mean of these.
            ``"token"``: a loss is a pair (sum over the tokens, number of tokens), and the step's sums are divided by
            the number of its tokens.
        seed: seed of the random numbers that the optimizer may draw, together with the number of the step.
        in_flight: see :class:`~megatron_ft.run.engines.buffers.Buffers`.
        exact_bits, apart: see :class:`Buckets`.
        reports: number of elements that each microbatch may add to for the script's log (``StepResult.reports``).
    """

    in_place = False
    replicated = False
    """False: each rank has its own part of the model, or of the optimizer's state."""
    takes_gradients = False
    """True: gradients of a microbatch are left in ``.grad`` without exact reduction, too, and :meth:`collect` adds them.
    False: autograd, or the engine, adds them to the buckets."""
    searches_scale = False
    _takes_scale_out = False
    """True: the engine divides gradients by :meth:`_loss_scale`; False: the optimizer does."""
    _divided = 1
    """The number of ranks of the group that make a forward pass of each microbatch, each of some of its samples."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        bucket_mb: float | None = None,
        gradient_clipping: float = 0.0,
        slots: int = 0,
        loss_reduction: str = "microbatch",
        seed: int = 0,
        in_flight: bool = False,
        exact_bits: int = 0,
        apart: Mapping[nn.Parameter, int] = {},
        reports: int = 0,
    ) -> None:
        self._parameters, self._model = parameters, model
        self._counted = set(parameters)
        """Those that this rank counts in norms. One of the ranks that share a parameter counts it."""
        self._clipping, self._seed = gradient_clipping, seed
        self._per_token = loss_reduction == "token"
        self._first_report = _TOKENS if self._per_token else 0
        self._first_change = self._first_report + reports
        self._buffers = Buffers(model, in_flight=in_flight)
        riders = self._first_change + self._buffers.elements
        self._buckets = Buckets(parameters, bucket_mb, slots, riders, exact_bits, apart)
        self.slots, self.num_buckets = slots, len(self._buckets)
        self._rounding = self._buckets.rounding
        self._part = OWN
        self._taken: set[int] = set()  # buckets whose gradients of the present microbatch were added before its end

    def tail(self, bucket: int) -> int:
        return self._buckets[bucket].tail

    @property
    def rounding(self) -> Rounding | None:
        """The grid of exact reduction; None without."""
        return self._rounding

    def exact(self, bucket: int) -> ExactBucket | None:
        return None if self._rounding is None else self._rounding.buckets[bucket]

    def local(self, bucket: int) -> torch.Tensor:
        return self._buckets[bucket].local

    def reduced(self, bucket: int) -> torch.Tensor:
        return self._buckets[bucket].sum

    def keep_local(self, bucket: int) -> None:
        self._buckets[bucket].keep_local()

    def replace_reduced(self, bucket: int) -> None:
        self._buckets[bucket].replace_reduced()

    def begin_step(self, microbatches: int = 1) -> None:
        if self._rounding is not None:
            self._rounding.begin(microbatches)
        for bucket in self._buckets:
            bucket.begin_step()
        self._aim(OWN)
        self._buffers.begin()

    def add_to(self, part: int) -> None:
        if part != self._part:
            self._aim(part)

    def _aim(self, part: int) -> None:
        self._part = part
        self._buckets.add_to(part)

    def contribute(self, part: int) -> None:
        self._buckets.contribute(part)

    def _split_loss(self, outcome: Any) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return the loss in a loss function's result, and the number of tokens where the loss is a sum over tokens.

        Raises ``EngineError`` for a result that ``loss_reduction`` does not expect."""
        if not self._per_token:
            if not isinstance(outcome, torch.Tensor) or outcome.numel() != 1:
                raise EngineError(
                    f'the loss function returned {_shown(outcome)}; with fault_tolerance.loss_reduction "microbatch" it '
                    f'must be one number, the mean over the microbatch (set it to "token" to return a sum and its tokens)'
                )
            return outcome, 0
        pair = outcome if isinstance(outcome, tuple | list) and len(outcome) == 2 else (None, None)
        loss, tokens = pair
        number = torch.as_tensor(tokens) if isinstance(tokens, int | torch.Tensor) else torch.empty(0)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or number.numel() != 1:
            raise EngineError(
                f'the loss function returned {_shown(outcome)}; with fault_tolerance.loss_reduction "token" it must '
                f"return (sum of the tokens' losses, number of these tokens)"
            )
        if number.device.type == "cpu" and (float(number) < 0 or float(number) != int(number)):
            raise EngineError(f"the loss function counted {float(number)} tokens; it must be a whole number, 0 or more")
        return loss, number.detach().to(torch.int64)

    def _count_tokens(self, tokens: int | torch.Tensor) -> None:
        """Add ``tokens`` to the tokens of the step."""
        if self._per_token:
            device = self._buckets.riders_to.device
            counted = torch.as_tensor(tokens, dtype=torch.int64, device=device).reshape(())
            self._buckets.riders_to[:_TOKENS] += torch.stack((counted % _BASE, counted // _BASE))

    def _take_changes(self) -> None:
        """After a forward pass: add the changes that it has made to buffers to the step."""
        changes = torch.zeros_like(self._buckets.riders_to[self._first_change :])
        self._buffers.take(changes)
        self._add_changes(changes)

    def _add_changes(self, changes: torch.Tensor) -> None:
        """Add the changes of buffers that the forward passes of one microbatch have made, as ``Buffers.take`` adds them."""
        total, values = self._buckets.riders_to[self._first_change :], self._buffers.changes
        if self._rounding is None or self._buckets.muted:
            total.add_(changes)
        elif values:
            self._rounding.add_changes(changes[:values], total[:values])
            total[values:].add_(changes[values:])

    def collect(self, digest: bool = False) -> int:
        if self._rounding is None and not self.takes_gradients:
            return 0
        said = self._collect(range(len(self._buckets)), digest)
        self._forget_gradients()
        return said

    def _collect(self, numbers: Sequence[int], digest: bool) -> int:
        """Add the gradients of the present microbatch in some buckets. Return their digest if ``digest``, else 0."""
        found = {number: self._gradients_of(self._buckets[number]) for number in numbers}
        known = (one for gradients in found.values() for one in gradients if one is not None)
        said = tensor_checksum.checksum(("", one) for one in known) if digest else 0
        for number, gradients in found.items():
            if number not in self._taken:
                self._take(number, gradients)
        self._taken.clear()
        return said

    def _take(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of the present microbatch in one bucket."""
        if self._buckets.muted:
            return
        if self._rounding is not None:
            self._rounding.buckets[number].add(gradients)
            return
        pairs = zip(self._buckets[number].adds_to.views, gradients, strict=True)
        known = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if known:
            torch._foreach_add_([view for view, _ in known], [gradient for _, gradient in known])

    def _gradients_of(self, bucket: Bucket) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the present microbatch, where autograd or the engine has left them."""
        return [parameter.grad for parameter in bucket.parameters]

    def _complete(self, ready: Ready | None, number: int) -> None:
        """Within backward: a bucket has all gradients of the microbatch. They are in the cache now, and their memory is
        free for those that follow."""
        bucket = self._buckets[number]
        self._take(number, self._gradients_of(bucket))
        self._taken.add(number)
        self._forget(bucket)
        if ready is not None:
            ready(number)

    def _forget(self, bucket: Bucket) -> None:
        """Clear the gradients that :meth:`_gradients_of` returns."""
        bucket.clear_gradients()

    def _forget_gradients(self) -> None:
        for bucket in self._buckets:
            self._forget(bucket)

    def check_gradient(self, sizes: Mapping[str, int]) -> None:
        """Do nothing: a subclass that can compute the loss of a microbatch again overrides it."""

    @property
    def _has_16_bits(self) -> bool:
        """True if the model has parameters that do not hold a small change."""
        return any(parameter.dtype.itemsize < 4 for parameter in self._model.parameters())

    def must_discard(self, microbatches: int) -> bool:
        return self._rounding is not None and self._rounding.judge(microbatches)

    def discard(self, microbatches: int) -> None:
        if self._rounding is not None:
            self._rounding.advance(microbatches)

    def _rest(self, scheduler: Any) -> dict[str, Any]:
        """Return the part of the state that is neither the model's nor the optimizer's."""
        rest = {"scheduler": scheduler.state_dict()} if scheduler is not None else {}
        unsaved = self._buffers.unsaved()
        if self._rounding is not None:
            rest["grid"] = self._rounding.state()
        if unsaved:
            rest["buffers"] = dict(unsaved)
        config: Any = getattr(self._model, "config", None)
        return rest | ({MODEL_CONFIG: json.loads(config.to_json_string())} if hasattr(config, "to_json_string") else {})

    def _load_rest(self, state: Mapping[str, Any], scheduler: Any) -> None:
        """Inverse of :meth:`_rest`, after the model was loaded."""
        if self._rounding is not None:
            self._rounding.load(state.get("grid"))
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
        self._buffers.load(state.get("buffers", {}))

    def update(self, step: int, microbatches: int, progress: Progress) -> StepResult:
        loss = self._buckets.check(step, microbatches)
        low, high = self._buckets.sum_riders[:_TOKENS].tolist() if self._per_token else (0, 0)
        loss, norm, tokens, reports = self._totals(loss, int(low) + _BASE * int(high))
        divisor = tokens if self._per_token else microbatches
        # Without a token there is no mean: the step counts, and its update is skipped.
        scale = self._loss_scale()
        loss, norm = (loss / divisor, norm / divisor / scale) if divisor else (nan, nan)
        factor = max(divisor, 1) * (scale if self._takes_scale_out else 1)
        self._buckets.average(factor, microbatches * self._divided, norm, self._clipping)
        progress("update")
        result = StepResult(step, loss, microbatches, norm, tokens, reports=reports)
        self.repeat(result)
        made = self.hyperparameters.made
        return replace(result, learning_rate=float(made[0].get("lr", 0.0)) if made else 0.0)

    def _loss_scale(self) -> float:
        """Return the factor of all gradients of the step (fp16)."""
        return 1.0

    def _skip(self) -> None:
        """Note a step whose gradient is not finite: its update is left out."""

    def _totals(self, loss: float, tokens: int) -> tuple[float, float, int, tuple[float, ...]]:
        """Return loss, norm of the gradients, tokens and reports of the step's sums; the same at all ranks of the group."""
        views = [view for bucket in self._buckets for view in bucket.sum_views]
        norm = float(torch.nn.utils.get_total_norm(views)) if self._rounding is None else sqrt(square_norm(views))
        return loss, norm + self._flaw(), tokens, ()

    def _flaw(self) -> float:
        """Return 0, or nan if a buffer would become inf or nan, which skips the update as such a gradient does."""
        changes = self._buckets.sum_riders[self._first_change :]
        return 0.0 if not len(changes) or bool(torch.isfinite(changes).all()) else nan

    def repeat(self, result: StepResult, values: Values | None = None) -> None:
        with self.hyperparameters.step(values):
            if isfinite(result.gradient_norm):
                self._buffers.add(self._buckets.sum_riders[self._first_change :], result.microbatches * self._divided)
                generators.seed(
                    step_seed(self._seed, result.step)
                )  # an optimizer that draws draws the same in every group
                self._optimize()
            else:
                self._skip()
        if self._rounding is not None:
            self._rounding.advance(result.microbatches)

    @abstractmethod
    def _torch_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers that update the parameters, in the same order in every group."""

    @cached_property
    def hyperparameters(self) -> Hyperparameters:
        return Hyperparameters(self._torch_optimizers())

    @abstractmethod
    def _optimize(self) -> None:
        """Take the optimizer's step with the gradients in ``Bucket.sum``."""

    def complete(self) -> None:
        """Do nothing: the step has left nothing."""

    def local_finite(self) -> bool:
        return all(bool(torch.isfinite(bucket.local).all()) for bucket in self._buckets)

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the flat local gradient of each bucket, as views; with exact reduction that of each parameter in the
        microbatch that was computed last. Fault injection changes them (``run.injection_points``)."""
        if self._rounding is not None:
            found = [one for bucket in self._buckets for one in self._gradients_of(bucket)]
            return [one.view(-1) for one in found if one is not None]
        return [bucket.local[: bucket.elements] for bucket in self._buckets]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self._model.named_modules()

    def local_losses(self) -> list[torch.Tensor]:
        """Return the sum of losses in each bucket, as views of one element."""
        return [bucket.local[-TAIL:-1] for bucket in self._buckets]

    def fingerprint(self) -> tuple[float, str]:
        """Return this rank's norm and sha256; the norm covers the parameters that it counts."""
        digest, square = hashlib.sha256(), 0.0
        for parameter in self._parameters:
            values = parameter.detach().cpu().contiguous()
            digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
            square += float(values.double().square().sum()) if parameter in self._counted else 0.0
        return square**0.5, digest.hexdigest()


def _shown(outcome: Any) -> str:
    if isinstance(outcome, torch.Tensor):
        return f"a tensor of shape {list(outcome.shape)}"
    if isinstance(outcome, tuple | list):
        return f"a {type(outcome).__name__} of {len(outcome)}"
    return f"a {type(outcome).__name__}"


def _fill(
    parameters: Sequence[nn.Parameter], bucket_mb: float | None, apart: Mapping[nn.Parameter, int]
) -> list[list[nn.Parameter]]:
    def kind(parameter: nn.Parameter) -> tuple[torch.device, int]:
        return parameter.device, apart.get(parameter, 0)

    total_mb = sum(parameter.numel() for parameter in parameters) * 4 / 2**20
    limit = (bucket_mb or min(max(total_mb / _PARTS, _LEAST_MB), _MOST_MB)) * 2**20 / 4
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.device, int], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        bucket = filling.get(kind(parameter), [])
        if not bucket or sum(one.numel() for one in bucket) + parameter.numel() > limit:
            bucket = filling[kind(parameter)] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets
