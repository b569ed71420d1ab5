"""The engine port on megatron-core: tensor, pipeline (with virtual stages), sequence and expert parallelism, and its
distributed optimizer, inside a group.

A flush runs Megatron's own schedule over the microbatches that the plan has left for the group; the passes are surrounded
(``run.engines.staged``). Megatron adds gradients up in ``main_grad``, which is a view of a bucket; the memory of Megatron's
own gradient buffers is freed. Only with exact reduction they stay, and the gradients of each microbatch are taken from
there. Gradients are first summed over the groups. When the step is committed, Megatron's ``finalize_model_grads`` makes of
these sums what it makes of a group's own gradients (the sum over data-parallel ranks, of layer norms over tensor-parallel
ranks, of a shared embedding), so the sum over the groups can be repeated any number of times. Its optimizer then takes the
step.

Failures it assumes: any rank of the group may vanish; Megatron's collectives then raise ``RuntimeError``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_ft.errors import EngineError
from megatron_ft.run.engines import rounds
from megatron_ft.run.engines.arrivals import Arrivals
from megatron_ft.run.engines.buckets import Bucket
from megatron_ft.run.engines.hyperparameters import Values
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.megatron import megatron_names
from megatron_ft.run.engines.port import DIGEST, MEGATRON, Control, Listed, StepResult, Work
from megatron_ft.run.engines.staged import Staged
from megatron_ft.run.engines.state_tensors import named_state

megatron_names.check()

from megatron.core import parallel_state, rerun_state_machine, tensor_parallel  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate  # noqa: E402
from megatron.core.transformer.module import param_is_not_shared  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

from megatron_ft.run.engines.megatron import supported_settings, whole_model  # noqa: E402
from megatron_ft.run.engines.megatron.reports import MOST, Reports  # noqa: E402
from megatron_ft.run.engines.megatron.trackers import Trackers  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks whether it is None where Transformer Engine is missing, too
    moe_utils.te_general_gemm = None

_log = logging.getLogger(__name__)

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Any, Callable[[Any], Any]]]
"""Megatron's ``forward_step``: (iterator over batches, model) -> (output, loss function of the output). The loss function
returns (mean loss of the microbatch, report), or (sum, number of tokens, report), which ``calculate_per_token_loss`` needs:
without it, too, the loss of such a microbatch is its mean."""


class MegatronEngine(Staged):
    """A ``JointEngine``, made by ``Session.megatron``.

    Large because that port is, and each of its moments has to do as Megatron's own loop does there.

    Args:
        chunks: this rank's model chunks, each in Megatron's ``DistributedDataParallel``.
        optimizer: of ``get_megatron_optimizer``.
        forward_step: see :data:`ForwardStep`.
        scheduler: Megatron's ``OptimizerParamScheduler``, which counts samples, or any torch scheduler, which counts steps.
        seq_length: length of the sequences that stages exchange.
        samples: samples of a microbatch at all data-parallel ranks of the group together.
        shares: a step has this many times the microbatches of one of Megatron's data-parallel ranks. Default: 1.
        layout: the place of this rank; its shards are Megatron's data-parallel and context-parallel ranks.
        reads: whether this rank reads samples, which are its own then, as the ranks of Megatron-LM read theirs. Default:
            a batch is the group's, and each rank takes its share of it.
        schedule: further arguments for Megatron's schedule.
        settings: see :class:`~megatron_ft.run.engines.joint.JointBucketed`.

    Raises:
        EngineError: a setting of Megatron's with which a step could not be repeated or shared.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Any,
        forward_step: ForwardStep,
        *,
        scheduler: Any = None,
        seq_length: int,
        samples: int,
        shares: int = 1,
        layout: Layout,
        reads: bool | None = None,
        schedule: Mapping[str, Any] = {},
        **settings: Any,
    ) -> None:
        self._chunks: list[Any] = list(chunks)
        self._megatron, self._scheduler = optimizer, scheduler
        self._config = supported_settings.checked(self._chunks, optimizer, layout, settings)
        self._step, self._seq_length, self._samples = forward_step, seq_length, samples
        self._samples_here = samples // parallel_state.get_data_parallel_world_size()
        self._reads, self._schedule = reads, schedule
        self._report, self._trackers = Reports(), Trackers(self._config)
        self._reports = MOST
        _stop_reruns()
        self._finalize = self._config.finalize_model_grads_func or finalize_model_grads
        self._config.finalize_model_grads_func = None  # after the sum over the groups, not after each run
        # Interleaved schedules would call them in each run, of which a step may have several.
        self._config.grad_sync_func = self._config.param_sync_func = None
        optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self._inner = [one.optimizer for one in optimizers if one.optimizer]
        self._scaled = [one for one in optimizers if getattr(one, "grad_scaler", None)]
        self._shares, self._parts_of_loss = shares, 1.0
        if self._scaled:
            optimizer.scale_loss = self._config.grad_scale_func = lambda loss: loss * self._loss_scale()
        modules: list[Any] = [chunk.module for chunk in self._chunks]
        model = nn.ModuleDict({str(number): module for number, module in enumerate(modules)})
        parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        group = parallel_state.get_data_parallel_group(with_context_parallel=True) if layout.shards > 1 else None
        # Parameters of different buffers are summed over different data-parallel ranks: experts over fewer.
        sources = [
            (number, buffer)
            for number, chunk in enumerate(self._chunks)
            for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]
        source_of = {p: index for index, (_, buffer) in enumerate(sources) for p in buffer.params}
        settings["reports"] = MOST + self._trackers.elements
        super().__init__(model, parameters, layout=layout, shard_group=group, apart=source_of, **settings)
        self._source = [sources[source_of[bucket.parameters[0]]] for bucket in self._buckets]
        # Groups of Megatron's buckets, whose parameters are gathered by the forward passes that use them.
        groups = [group for chunk in self._chunks for group in _bucket_groups(chunk)]
        self._gathered = groups if self._chunks[0].ddp_config.overlap_param_gather else []
        self._scratch: torch.Tensor | None = None
        self.takes_gradients = self._rounding is not None
        self._own: dict[Any, torch.Tensor] = {p: p.main_grad for p in parameters} if self.takes_gradients else {}
        self._take_over_buffers()
        self._arrivals = Arrivals([bucket.parameters for bucket in self._buckets], register=_after_main_grad)
        self._of_stage = self._by_stage(len(self._chunks), lambda parameter: sources[source_of[parameter]][0])
        self._counted = {parameter for parameter in parameters if _counts_here(parameter)}
        self._begun = [0] * len(self._chunks)  # microbatches of the present run that have begun at each chunk
        self._outputs: dict[int, tuple[int, int, Any]] = {}  # id of an output -> chunk, index in the run, the output

    def _take_over_buffers(self) -> None:
        for number, chunk in enumerate(self._chunks):
            chunk.ddp_config.overlap_grad_reduce = False  # it is asked for with overlap_param_gather
            chunk.finish_grad_sync = partial(self._finish_grad_sync, number)
            chunk.start_grad_sync = lambda *_: None  # the memory that it would sum is freed
            chunk.zero_grad_buffer = lambda: None  # a step begins with zeros, and the memory may not be there
        if not self.takes_gradients:
            for _, buffer in {id(buffer): (number, buffer) for number, buffer in self._source}.values():
                buffer.offload_to_cpu(move_params=False, move_grads=True)  # it only frees the memory

    @property
    def reports(self) -> Reports:
        """What ``StepResult.reports`` says."""
        return self._report

    @property
    def trackers(self) -> Trackers:
        """What Megatron's layers record beside the loss."""
        return self._trackers

    @property
    def needs_samples(self) -> bool:
        if self._reads is not None:
            return self._reads
        return bool(parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage())

    def flush(self, control: Control, work: Work) -> None:
        self._work = work
        for listed, last in rounds.rounds(self.layout, control, work, most=rounds.ALL):
            filled = self._filled(listed)
            self._begin_run(filled, work.ready() if last else None, len(filled) - len(listed))
            self._run()
        self._buffers.restore()

    def _filled(self, listed: tuple[Listed, ...]) -> tuple[Listed, ...]:
        """Return as many microbatches as an interleaved schedule can run: some are computed again, and added to nothing."""
        stages, group = self.layout.stages, self._config.microbatch_group_size_per_vp_stage or self.layout.stages
        count = len(listed)
        if len(self._chunks) > 1:
            count = max(count, group)
            if 0 < count % group < stages:
                count += stages - count % group
        again = Listed(listed[-1].microbatch, False, DIGEST)
        return (*listed, *[again] * (count - len(listed)))

    def _run(self) -> None:
        self._begun = [0] * len(self._chunks)
        self._outputs.clear()
        reads = self._reads is not False
        batches = [map(self._batch, iter(self._listed)) if reads else None for _ in self._chunks]
        run = get_forward_backward_func()
        if not self._chunks[0].remove_forward_pre_hook_handles:  # in the first iteration of Megatron's loop
            self.complete()
        with self._surrounded():
            run(
                forward_step_func=self._forward_step,
                data_iterator=batches if len(self._chunks) > 1 else batches[0],
                model=self._chunks,
                num_microbatches=len(self._listed),
                seq_length=self._seq_length,
                micro_batch_size=self._samples_here,
                forward_only=False,
                **self._schedule,
            )

    def _batch(self, listed: Listed) -> Any:
        batch = self._work.batch(listed.microbatch)
        if self._reads is None:
            batch = self._share(batch)
        self._seed_pass()  # a call of the dataset in the middle of the pass has seeded for itself
        return batch

    # --- around Megatron's passes ---------------------------------------------------------------------------------------

    @contextmanager
    def _surrounded(self) -> Iterator[None]:
        """Let this engine take part in each pass of Megatron's schedules, which call these functions of their module."""
        forward, backward = schedules.forward_step, schedules.backward_step
        schedules.forward_step = partial(self._forward_pass, forward)
        schedules.backward_step = partial(self._backward_pass, backward)
        try:
            yield
        finally:
            schedules.forward_step, schedules.backward_step = forward, backward

    def _forward_pass(
        self,
        forward: Callable[..., Any],
        step: Any,
        batches: Any,
        model: nn.Module,
        count: int,
        *rest: Any,
        **options: Any,
    ) -> Any:
        number = self._chunks.index(model)
        index = self._begun[number]
        self._begun[number] += 1
        stage = number * self.layout.stages + self.layout.stage
        last = stage == len(self._chunks) * self.layout.stages - 1
        with self._forward(index, stage, last):
            # For one microbatch: a gradient must not depend on the number of those in this run.
            output, tokens = forward(step, batches, model, 1, *rest, **options)
            self._trackers.take(self._records)
        self._outputs[id(_single(output))] = number, index, output
        return output, tokens

    def _backward_pass(self, backward: Callable[..., Any], inputs: Any, output: Any, *rest: Any, **options: Any) -> Any:
        number, index, _ = self._outputs.pop(id(_single(output)))
        with self._backward(number, index):
            with self._arrivals.watch(None if self.takes_gradients else self._ready_in(index)):
                gradient = backward(inputs, output, *rest, **options)
            self._trackers.take(self._records)  # what is recomputed is recorded here
        return gradient

    @property
    def _records(self) -> torch.Tensor:
        """What the present microbatch adds its records to."""
        return self._buckets.riders_to[self._first_report + MOST : self._first_change]

    def _forward_step(self, batches: Iterator[Any], model: nn.Module) -> Any:
        output, loss_function = self._step(batches, model)

        def counted(*arguments: Any, **options: Any) -> Any:
            found = loss_function(*arguments, **options)
            if self._awaits_loss and isinstance(found[-1], Mapping):
                self._report.add(found[-1], self._buckets.riders_to[self._first_report :][:MOST])
            loss = found[0].detach().clone()
            if self._per_token:
                self._count_step_loss((loss, found[1]))
            else:  # of three values the first is a sum, which Megatron divides by the tokens, too
                self._count_step_loss(loss / found[1].clamp(min=1) if len(found) == 3 else loss)
            return found

        return output, counted

    def _seed_pass(self) -> None:
        super()._seed_pass()
        tensor_parallel.model_parallel_cuda_manual_seed(self._pass_seed)

    def begin_step(self, microbatches: int = 1) -> None:
        super().begin_step(microbatches)
        # So many parts Megatron makes of a loss before it scales it: gradients of 16 bits overflow in the same steps.
        self._parts_of_loss = 1.0 if self._per_token else max(1.0, microbatches / self._shares)
        for chunk in self._chunks:
            for group in _bucket_groups(chunk):
                group.reset()
            for parameter in chunk.params_with_grad:
                parameter.grad_added_to_main_grad = False
        if self.takes_gradients:
            for bucket in self._buckets:
                self._point(bucket, self._gradients_of(bucket))
                self._forget(bucket)

    def _aim(self, part: int) -> None:
        super()._aim(part)
        if not self.takes_gradients:
            for bucket in self._buckets:
                self._point(bucket, self._nowhere(bucket) if part == DIGEST else bucket.adds_to.views)

    def _nowhere(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return memory for gradients that are added to nothing."""
        if self._scratch is None:
            largest = max(parameter.numel() for parameter in self._parameters)
            self._scratch = torch.empty(largest, device=self._buckets[0].local.device)
        return [self._scratch[: parameter.numel()].view_as(parameter) for parameter in bucket.parameters]

    def _point(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> None:
        parameters: Sequence[Any] = bucket.parameters
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.main_grad = gradient

    def _gradients_of(self, bucket: Bucket) -> list[torch.Tensor]:
        return [self._own[parameter] for parameter in bucket.parameters]

    def _forget(self, bucket: Bucket) -> None:
        torch._foreach_zero_(self._gradients_of(bucket))

    # --- the step's end -------------------------------------------------------------------------------------------------

    def _sum_inside(self) -> None:
        super()._sum_inside()
        for bucket in self._buckets:
            self._point(bucket, bucket.sum_views)
        # The bias follows from counts of tokens in buffers, which are added when the step counts.
        bias, self._config.moe_router_enable_expert_bias = (
            getattr(self._config, "moe_router_enable_expert_bias", False),
            False,
        )
        try:
            self._finalize(self._chunks, None)
        finally:
            self._config.moe_router_enable_expert_bias = bias

    def _finish_grad_sync(self, chunk: int, force_all_reduce: bool | None = False) -> None:
        """In place of Megatron's function of a chunk: sum the step's sums over its data-parallel ranks, as Megatron does in
        its own buffers."""
        works = []
        for bucket, (number, buffer) in zip(self._buckets, self._source, strict=True):
            if number != chunk:
                continue
            gradients = bucket.sum[: bucket.elements]
            if buffer.gradient_scaling_factor != 1:
                gradients.mul_(buffer.gradient_scaling_factor)
            if buffer.data_parallel_world_size > 1:
                works.append(dist.all_reduce(gradients, group=buffer.data_parallel_group, async_op=True))
        for work in works:
            # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is lost
            work.wait()

    def repeat(self, result: StepResult, values: Values | None = None) -> None:
        self._step_samples = result.microbatches * self._samples
        # The mean over the forward passes has been taken, and Megatron takes that over the microbatches itself.
        records = self._buckets.sum_riders[self._first_report + MOST : self._first_change]
        self._trackers.put(records * (result.microbatches * self._divided))
        super().repeat(result, values)

    def complete(self) -> None:
        with torch.no_grad():
            for group in self._gathered:
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)

    def _leave_gathering(self) -> None:
        """Before this rank's parts of the parameters change: gather the others' when they are used."""
        for group in self._gathered:
            if group.param_gather_handle is not None:  # it would write over them
                group.start_param_sync(force_sync=True)
            group.param_gather_dispatched = False

    _takes_scale_out = True

    def _loss_scale(self) -> float:
        return float(self._megatron.get_loss_scale()) / self._parts_of_loss if self._scaled else 1.0

    @property
    def searches_scale(self) -> bool:  # type: ignore[override]  # most engines have a constant
        scalers = [one.grad_scaler for one in self._scaled]
        return any(float(one.scale) > float(getattr(one, "min_scale", one.scale)) for one in scalers)

    def _skip(self) -> None:
        # The scale follows from the steps that are skipped, which are the same in all groups. Megatron asks each optimizer
        # of a chain by itself, so that of experts gets a scale with which no loss was scaled.
        for one in self._scaled:
            one.grad_scaler.update(True)

    def _optimize(self) -> None:
        self._leave_gathering()
        for bucket in self._buckets:
            self._point(bucket, bucket.fp32_sum())
        if getattr(self._config, "moe_router_enable_expert_bias", False):
            _update_router_expert_bias(self._chunks, self._config)
        scalers = [one.grad_scaler for one in self._scaled]
        for one in self._scaled:
            one.grad_scaler = None  # the mean has no scale any more, and groups that come back need it as it is
        # Without Megatron's clipping: the mean is clipped already.
        if self._megatron.prepare_grads():
            raise EngineError("Megatron's optimizer skips a step whose gradient is finite")
        for one, scaler in zip(self._scaled, scalers, strict=True):
            one.grad_scaler = scaler
            scaler.update(False)
        self._megatron.step_with_ready_grads()
        self._megatron.zero_grad()  # a gradient that is left would be added to the next one
        if isinstance(self._scheduler, torch.optim.lr_scheduler.LRScheduler):
            self._scheduler.step()
        elif self._scheduler is not None:
            self._scheduler.step(increment=self._step_samples)

    def _torch_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._inner

    def state(self) -> Mapping[str, Any]:
        state = {
            "model": {
                name: value for name, value in self._model.state_dict().items() if isinstance(value, torch.Tensor)
            },
            "optimizers": [inner.state_dict() for inner in self._inner],
            "masters": self._masters(),
            "scalers": [one.grad_scaler.state_dict() for one in self._scaled],
            MEGATRON: self._whole_model,
        }
        return state | self._rest(self._scheduler)

    @cached_property
    def _whole_model(self) -> Mapping[str, Any]:
        return whole_model.described([chunk.module for chunk in self._chunks], self._config)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._leave_gathering()  # a donor may not have gathered them
        own = self._model.state_dict()
        with torch.no_grad():  # in place: Megatron's flat buffers are the same memory
            for name, value in state["model"].items():
                own[name].copy_(value)
            for mine, theirs in zip(self._masters(), state["masters"], strict=True):
                mine.copy_(theirs)
        for inner, saved in zip(self._inner, state["optimizers"], strict=True):
            inner.load_state_dict(saved)
        for one, saved in zip(self._scaled, state.get("scalers", ()), strict=False):  # a checkpoint may have none
            one.grad_scaler.load_state_dict(saved)
        if hasattr(self._scheduler, "num_steps"):
            self._scheduler.num_steps = 0  # Megatron's adds the saved number to the present one
        self._load_rest(state, self._scheduler)

    def _masters(self) -> list[torch.Tensor]:
        """Return the weights that the optimizer updates where they are not the model's: fp32 copies, or its shards."""
        known = {id(parameter) for parameter in self._parameters}
        groups = (group for inner in self._inner for group in inner.param_groups)
        return [p.detach() for group in groups for p in group["params"] if id(p) not in known]

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        first, *others = self._inner
        for name, tensor in named_state(self._model, first, self._buffers.unsaved(), self._masters()):
            # Of parameters that are gathered later this rank has its part, which follows from the fp32 weights.
            if not self._gathered or not name.startswith("parameter "):
                yield name, tensor
        for number, inner in enumerate(others, 1):
            for name, tensor in named_state(nn.Module(), inner, {}):
                yield f"{name}, optimizer {number}", tensor
        yield from ((f"loss scale {number}", one.grad_scaler.scale) for number, one in enumerate(self._scaled))


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _after_main_grad(parameter: Any, hook: Callable[[nn.Parameter], None]) -> None:
    """Have ``hook`` called when Megatron's own hook, which was registered before, has added a gradient to ``main_grad``."""
    accumulates = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    accumulates.register_hook(lambda *_: hook(parameter))


def _stop_reruns() -> None:
    """Turn Megatron's own search for wrong results off, which computes steps again."""
    machine = rerun_state_machine.get_rerun_state_machine()
    if machine.get_mode() != rerun_state_machine.RerunMode.DISABLED:
        machine.set_mode(rerun_state_machine.RerunMode.DISABLED)
        if not dist.get_rank():
            _log.warning(
                "Megatron's --rerun-mode is disabled: a step is computed by all groups, not by one; fault_tolerance.verify "
                "finds results that are wrong"
            )


def _counts_here(parameter: nn.Parameter) -> bool:
    """Return whether this rank counts a parameter in norms. One of the ranks that hold it counts it."""
    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    alone = dist.get_rank(group) == 0
    return alone and param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def _single(output: Any) -> Any:
    """Return the tensor that stands for a pass: schedules wrap an output in a list, and take it out again."""
    return output[0] if isinstance(output, list | tuple) else output
