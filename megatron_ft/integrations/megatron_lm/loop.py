"""What stands in the place of functions of Megatron-LM's loop (``names.REPLACED``).

Megatron's world is the group. With the job's ``--global-batch-size`` its own accounting of samples, learning rate and
iterations is therefore right as it is: one of its iterations is one step of the session, which computes the group's part of
the microbatches. ``--iterations-to-skip`` are no steps.

Failures it assumes: those of ``Session.train_step``. A group that comes back gets its place in the loop with the state of
the other groups.
"""

from __future__ import annotations

import shutil
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import megatron_ft
from megatron_ft.config import megatron_lm_arguments, rank_env
from megatron_ft.config.megatron_lm_arguments import NEWEST
from megatron_ft.errors import CheckpointError, ConfigError, EngineError
from megatron_ft.integrations.megatron_lm import names
from megatron_ft.integrations.megatron_lm.samples import Deal, Source
from megatron_ft.integrations.megatron_lm.writers import Writers
from megatron_ft.run.engines.megatron.reports import VOTE
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.session import Session
from megatron_ft.types import given
from megatron_ft.utils import durable_file, shared_file
from megatron_ft.utils.vital_thread import VitalThread

_SCHEDULE = ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection")
"""Arguments that Megatron's loop passes on to its schedule."""
_CARRIED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Counters among Megatron's arguments that move with the iterations."""

_GRIDS = "megatron_ft_grids"
"""Argument of Megatron's that keeps, in its checkpoints, the grid of each rank, which exact reduction goes on with."""
_DIVISION = (
    *("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
"""Arguments on which the grid of a rank depends."""
_PROBE_BYTES = 1 << 20
"""Size of a file that is written to find out why a save failed, or before it begins."""


@contextmanager
def installed() -> Iterator[None]:
    """Join the run, and replace functions of Megatron-LM's loop and arguments of the script (``sys.argv``) in the block. The
    run has ended after it."""
    if not rank_env.is_launched():
        raise ConfigError(
            "Megatron-LM's loop is made fault-tolerant in a run only: start it with megatron-ft launch --groups N "
            "--megatron-lm, or without megatron_ft by torchrun"
        )
    script, *words = sys.argv
    changed = megatron_lm_arguments.changed(words)
    session = megatron_ft.init()
    session.init_distributed(changed.backend)
    config = session.config
    batch = str(config.samples_per_step)
    sys.argv = [script, *changed.words, *(() if changed.missing is None else (changed.missing, batch))]
    loop = Loop(session, *names.loop(), changed.checks_nan)
    loop.install()
    yield
    loop.finish()


class Loop:
    """One rank's part. Methods with the name of a function of Megatron-LM get that function as ``original``.

    Large because it has a method for each function that it replaces, and they share what Megatron's loop has in one place.
    """

    def __init__(self, session: Session, module: Any, values: Sequence[str], checks_nan: bool) -> None:
        self._session, self._module, self._values, self._checks_nan = session, module, values, checks_nan
        self._made: list[Source] = []
        self._result: StepResult | None = None
        self._engine: Any = None
        self._steps: Iterator[int] | None = None
        self._started: Mapping[str, int] = {}  # counters at the first iteration of the run
        self._flops, self._flops_shift, self._ends = 0, 0, False  # the shift: what train() does not count itself
        self._saving: tuple[int, int] | None = None  # iteration that is being saved in the background, by which group
        self._begun: list[int] = []  # those that this group has begun to save there
        self._watched: set[BaseProcess] = set()  # processes that save, for which a thread waits
        self._total_losses: dict[str, Any] = {}
        self._grids: Sequence[Mapping[str, Any]] | None = None  # of the checkpoint that was loaded

    def install(self) -> None:
        """Replace the functions."""
        for name in names.REPLACED:
            setattr(self._module, name, partial(getattr(self, name), getattr(self._module, name)))
        Writers(self._session).install(self._module)

    def finish(self) -> None:
        """Wait until all groups are at the end."""
        if self._steps is None:
            raise EngineError(
                "the script has ended without training: it did not call megatron.training.pretrain, or all its iterations "
                "are done"
            )
        if next(self._steps, None) is not None:
            raise EngineError(f"the script has ended before iteration {self._args.train_iters}")

    @property
    def _args(self) -> Any:
        return self._module.get_args()

    # --- data ---------------------------------------------------------------------------------------------------------

    def build_train_valid_test_datasets(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """One group builds the index files that Megatron keeps, while the others wait; then each reads them."""
        found: list[Any] = []

        def build(path: Path) -> None:
            found.append(original(*arguments, **options))
            if not dist.get_rank():
                shared_file.write_json(path, self._module._TRAIN_START_TIME)

        self._session.save_together(self._marker, build)
        return found[-1] if found else original(*arguments, **options)

    @property
    def _marker(self) -> Path:
        """File that says when the group began that has built the index files."""
        return self._session.env.run_dir / "megatron_lm" / "datasets"

    def build_pretraining_data_loader(self, _: Callable[..., Any], dataset: Any, consumed: int) -> Source | None:
        args = self._args
        split = getattr(getattr(dataset, "split", None) or getattr(dataset, "index_split", None), "name", "")
        evaluates = split in ("valid", "test")
        own = getattr(args, "eval_micro_batch_size", None) if evaluates else None
        source = Source(dataset, self._deal(own or args.micro_batch_size), consumed)
        self._made.append(source)
        return source if source.reads else None

    def _deal(self, micro_batch: int) -> Deal:
        mpu = self._module.mpu
        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        return Deal(micro_batch, rank, ranks, self._session.config.shards)

    def build_train_valid_test_data_iterators(self, _: Callable[..., Any], provider: Any) -> tuple[Any, Any, Any]:
        """Return the sources in place of iterators; they belong to all ranks, also those that read nothing."""
        args, before = self._args, len(self._made)
        self._module.build_train_valid_test_data_loaders(provider)
        if len(self._made) == before:  # Megatron builds none here
            count = len(args.valid_data_path or ()) if getattr(args, "multiple_validation_sets", False) else 1
            self._made += [Source(None, self._deal(args.micro_batch_size)) for _ in range(count + 2)]
        train, *valid, test = made = self._made[before:]
        for source in made:  # all ranks of the group compare the same
            told = _of_all((source.describe(), source.position))
            source.fingerprint, source.position = next((one for one in told if one[0] is not None), told[0])
        if args.full_validation:
            raise EngineError("--full-validation is not supported; leave it out, and set --eval-iters")
        return train, valid[0] if not getattr(args, "multiple_validation_sets", False) else valid, test

    # --- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        original: Callable[..., Any],
        forward_step: Callable[..., Any],
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        iterator: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Run Megatron's loop from the iteration at which this group takes part."""
        args, session = self._args, self._session
        source = _source(iterator)
        self._check(args)
        self._engine = session.megatron(
            model,
            optimizer,
            self._voting(forward_step),
            scheduler,
            seq_length=args.seq_length,
            reads=source.reads,
            schedule=self._schedule(options),
        )
        if self._grids is not None:
            self._engine.rounding.load(self._grids[dist.get_rank()])
        self._watch_savers()
        if (begun := shared_file.read_json(self._marker)) is not None:  # a group that comes back has begun later
            self._module._TRAIN_START_TIME = begun
        here = {"iteration": args.iteration, **{name: getattr(args, name) for name in _CARRIED}}
        self._started = session.constant("megatron_lm", here)
        self._skips = sorted(
            one - 1 for one in args.iterations_to_skip if self._started["iteration"] < one <= args.train_iters
        )
        for name in _CARRIED:
            setattr(args, name, self._started[name])
        self._flops = args.num_floating_point_operations_so_far
        source.begin_of = self._begin_of
        session.register("megatron_lm", self)
        total = args.train_iters - self._started["iteration"] - len(self._skips)
        if total < 1:
            raise ConfigError(
                f"--train-iters {args.train_iters}: the run goes on at iteration {self._started['iteration']}"
            )
        self._steps, self._source = session.steps(total, source), source
        first = next(self._steps, total)
        if audit := rank_env.Audit.from_env():  # steps that are computed again end before the run did
            args.train_iters = min(args.train_iters, self._iteration(audit.last + 1))
        self._take_over(args, first)
        try:
            return original(forward_step, model, optimizer, scheduler, iterator, *rest, **options)
        except SystemExit as error:  # one of Megatron's conditions to exit, which all groups have met
            if error.code or not self._ends:
                raise
            session.end()
            self.finish()
            raise

    def get_optimizer_param_scheduler(self, original: Callable[..., Any], *arguments: Any) -> Any:
        """With a schedule of batch sizes, Megatron counts samples of ``--train-iters`` in batches of one microbatch of each
        of its data-parallel ranks: those of the job."""
        if getattr(self._args, "step_batch_size_schedule", None):
            self._args.global_batch_size = self._session.config.samples_per_step
        return original(*arguments)

    def _schedule(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what Megatron's loop passes on to its schedule. ``options``: those of the loop's function."""
        given_on = {name: options[name] for name in _SCHEDULE if options.get(name) is not None}
        return {**given_on, "decoder_seq_length": self._args.decoder_seq_length}

    def _check(self, args: Any) -> None:
        """Raise ``ConfigError`` where Megatron's arguments differ from the config of the run."""
        batch = self._session.config.samples_per_step
        rampup = args.rampup_batch_size or getattr(args, "step_batch_size_schedule", None)
        if args.global_batch_size != batch and not rampup:
            raise ConfigError(
                f"--global-batch-size is {args.global_batch_size}, and the run was launched for {batch}; give it on the "
                f"command line of launch --megatron-lm"
            )
        if args.fp16 and not args.loss_scale:  # as Megatron, whose scale is found by steps that overflow
            self._checks_nan = False
            if (policy := self._session.config.fault_tolerance.nonfinite) != "skip":
                raise ConfigError(
                    f'--fp16 and fault_tolerance.nonfinite "{policy}": a loss scale is found by skipping steps that '
                    f'overflow; use "skip", or --bf16'
                )

    def _take_over(self, args: Any, step: int) -> None:
        """Go to the iteration of ``step``, with the counters that the groups have there."""
        args.iteration = self._iteration(step)
        args.num_floating_point_operations_so_far, self._flops_shift = self._flops, 0

    def _iteration(self, step: int) -> int:
        """Return Megatron's iteration of a step. Iterations that are skipped are passed as soon as possible."""
        iteration = self._started["iteration"] + step
        for skipped in self._skips:
            if skipped > iteration:
                break
            iteration += 1
        return iteration

    def _begin_of(self, step: int) -> int:
        """Return the number of the first sample of a step."""
        sizes, deal = self._session.batch_sizes, self._source.deal
        skips = bisect_right(self._skips, self._iteration(step))
        samples = sizes.before(step) * deal.round
        skipped = sum(
            sizes.at(max(one - self._started["iteration"] - n, 0)) for n, one in enumerate(self._skips[:skips])
        )
        return self._started["consumed_train_samples"] + samples + skipped * deal.round

    def dummy_train_step(self, _: Callable[..., Any], iterator: Any) -> None:
        """In an iteration that is skipped: nothing is to be read."""

    def train_step(
        self,
        _: Callable[..., Any],
        forward_step: Any,
        iterator: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        config: Any,
        *rest: Any,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Make one step of the session, and return what Megatron's function returns."""
        config.finalize_model_grads_func = None  # train() has set it; the engine does that when the step is committed
        args, session = self._args, self._session
        shards = session.config.shards
        count = self._module.get_num_microbatches()
        if count % shards:
            raise ConfigError(
                f"the batch of iteration {args.curr_iteration} has {count} microbatches at each rank of a group, which "
                f"{shards} groups cannot share evenly; let all sizes of the ramp-up be multiples of groups x data-parallel "
                f"ranks x --micro-batch-size"
            )
        if self._result is not None:
            next(given(self._steps))
        if self._result is not None or not session.gets_state:  # else the state brings it, within this step
            session.microbatches_per_group = count // shards
        result = self._result = session.train_step(self._engine, self._source)
        values = self._engine.reports.means(result.reports)
        self._ends = bool(values.pop(VOTE, 0.0))
        if self._checks_nan and not (isfinite(result.loss) and isfinite(result.gradient_norm)):
            raise EngineError(
                f"iteration {args.curr_iteration}: loss {result.loss}, gradient norm {result.gradient_norm}; with "
                f"--no-check-for-nan-in-loss-and-grad training would go on without the update of this step"
            )
        skipped = int(not isfinite(result.gradient_norm))
        norm = None if skipped and args.fp16 else result.gradient_norm  # Megatron then logs none
        last = self._module.mpu.is_pipeline_last_stage(ignore_virtual=True)
        losses = {name: torch.tensor([value], device=self._device) for name, value in values.items()} if last else {}
        told = dict(zip(names.STEP, (losses, skipped, False, False, 0, norm, None, 0), strict=True))
        return tuple(told[name] for name in self._values)

    @property
    def _device(self) -> Any:
        return torch.cuda.current_device()

    def _voting(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_step`` whose reports also say whether this rank has a reason to exit, so that all groups know it
        at the same iteration."""

        def step(*arguments: Any, **options: Any) -> Any:
            output, loss = forward_step(*arguments, **options)

            def voted(*outputs: Any, **more: Any) -> Any:
                found = loss(*outputs, **more)
                return (*found[:-1], {VOTE: torch.tensor([float(bool(self._reason_to_exit()))]), **found[-1]})

            return output, voted

        return step

    def _reason_to_exit(self) -> str:
        minutes = self._args.exit_duration_in_mins
        if minutes and time.time() - self._module._TRAIN_START_TIME > 60 * minutes:
            return f"after {minutes} minutes"
        return "as it was told to stop" if self._session.is_told_to_stop else ""

    # --- what follows an iteration ------------------------------------------------------------------------------------

    def checkpoint_and_decide_exit(
        self,
        original: Callable[..., Any],
        model: Any,
        optimizer: Any,
        scheduler: Any,
        iteration: int,
        flops: int,
        *rest: Any,
    ) -> bool:
        args = self._args
        flops += self._flops_shift
        self._flops = flops
        arguments = iteration, model, optimizer, scheduler, flops, rest[0]
        self._save_again(*arguments)
        voted = self._ends
        self._ends = voted or bool(args.exit_interval and iteration % args.exit_interval == 0)
        with _changed(args, exit_duration_in_mins=None):  # each group has a clock of its own
            ends = original(model, optimizer, scheduler, iteration, flops, *rest)
        if voted and not ends:
            if args.save and not (args.save_interval and iteration % args.save_interval == 0):
                self._module.save_checkpoint_and_time(*arguments, train_data_iterator=rest[1])
            self._module.print_datetime(f"exiting program {self._reason_to_exit() or 'as another group has to'}")
        self._ends = bool(voted or ends)
        return self._ends

    def training_log(
        self, original: Callable[..., Any], losses: Any, total_losses: dict[str, Any], *rest: Any, **options: Any
    ) -> Any:
        """Log as Megatron does; its throughput is that of a GPU of the whole job."""
        args = self._args
        if self._total_losses is not total_losses:
            # The first time; those before are of a checkpoint, or of other groups.
            total_losses.update(self._total_losses)
            self._total_losses = total_losses
        if options.get("is_first_iteration") and self._session.env.incarnation:
            options["is_first_iteration"] = False  # of the process; Megatron would count its losses twice
        with _changed(args, world_size=args.world_size * len(self._session.live)):
            return original(losses, total_losses, *rest, **options)

    def state_dict(self) -> dict[str, Any]:
        """What groups have in common beside the model: Megatron's counters, and the losses that are not logged yet."""
        counters = {name: getattr(self._args, name) for name in _CARRIED}
        names = list(self._engine.reports.names)
        positions = [source.position for source in self._made]  # those of evaluations
        told = {"counters": counters, "flops": self._flops, "losses": dict(self._total_losses)}
        return {**told, "names": names, "positions": positions, "records": self._engine.trackers.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state["counters"].items():
            setattr(self._args, name, value)
        self._module.update_num_microbatches(self._args.consumed_train_samples, consistency_check=False)
        # The last of the states that a group which comes back takes over arrives in its first step: after `_take_over`.
        self._flops_shift += state["flops"] - self._flops
        self._flops = state["flops"]
        for source, position in zip(self._made, state["positions"], strict=True):
            source.position = position
        self._engine.reports.names = {name: place for place, name in enumerate(state["names"])}
        self._engine.trackers.load(state["records"])
        self._total_losses = {
            name: value.to(self._device) if torch.is_tensor(value) else value for name, value in state["losses"].items()
        }

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        _: Callable[..., Any],
        forward_step: Any,
        iterator: Any,
        model: Sequence[Any],
        process_non_loss_data: Any,
        config: Any,
        verbose: bool = False,
        non_loss_data_func: Any = None,
        eval_iters: int | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], None, bool]:
        """Evaluate in all groups together, and return what Megatron's function returns."""
        if non_loss_data_func is not None or process_non_loss_data is not None:
            raise EngineError("functions for data beside the loss are not supported in an evaluation; leave them out")
        args, session = self._args, self._session
        source = _source(iterator)
        iterations = args.eval_iters if eval_iters is None else eval_iters
        batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        deal = source.deal
        rounds, rest = divmod(batch, deal.round)
        if rest:
            raise ConfigError(
                f"--eval-global-batch-size {batch} is no multiple of {deal.round}, the samples of one microbatch of all "
                f"ranks; change it"
            )
        run = self._module.get_forward_backward_func()
        schedule = self._schedule(options)
        shards = session.config.shards

        def losses(unit: int) -> dict[str, float]:
            at, shard = divmod(unit, shards)
            begin = source.position + at * batch
            batches = (source.batch(deal.numbers(begin, shard, index)) for index in range(rounds))
            iterators = [batches if source.reads else None for _ in model]
            told = run(
                forward_step_func=forward_step,
                data_iterator=iterators if len(model) > 1 else iterators[0],
                model=model,
                num_microbatches=rounds,
                seq_length=args.seq_length,
                micro_batch_size=deal.micro_batch,
                forward_only=True,
                **schedule,
            )
            return self._summed(told)

        for chunk in model:
            chunk.eval()
        timers, config.timers = config.timers, None
        units = range(iterations * shards)
        sums = session.evaluate(losses, units, name="megatron_lm", batch_size=1, collate_fn=lambda one: one[0])
        config.timers = timers
        for chunk in model:
            chunk.train()
        source.position += iterations * batch
        args.consumed_valid_samples += iterations * batch
        found = {name[:-2]: sums[name] / sums[f"{name[:-2]} d"] for name in sums if name.endswith(" n")}
        return {name: torch.tensor(value, device=self._device) for name, value in found.items()}, None, False

    def _summed(self, told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the sums over some microbatches, of all ranks of the group, at each of them."""
        sft = getattr(self._args, "sft", False)
        sums: dict[str, float] = {}
        for report in told:
            for name, value in report.items():
                numbers = [float(one) for one in torch.as_tensor(value).reshape(-1)]
                above, below = numbers if len(numbers) == 2 else (numbers[0], 1.0)
                if sft and len(numbers) == 2:  # the mean of the means of microbatches
                    above, below = above / max(below, 1.0), 1.0
                sums[f"{name} n"] = sums.get(f"{name} n", 0.0) + above
                sums[f"{name} d"] = sums.get(f"{name} d", 0.0) + below
        mpu = self._module.mpu
        counts = mpu.get_tensor_model_parallel_rank() == 0  # the others have the same
        whole: dict[str, float] = {}
        for one in _of_all(sums if counts else {}):
            for name, value in one.items():
                whole[name] = whole.get(name, 0.0) + value
        return whole

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint_and_time(
        self, original: Callable[..., Any], iteration: int, *arguments: Any, **options: Any
    ) -> None:
        """Save once for all groups: the ranks of one group write, and those of another one if it is lost or cannot. If none
        can, training goes on; after the last iteration it ends with ``CheckpointError``."""
        args, save = self._args, partial(original, iteration, *arguments, **options)
        last = iteration >= args.train_iters or self._ends
        if self._engine.rounding is not None:
            setattr(args, _GRIDS, _of_all(self._engine.rounding.state()))
        if args.async_save and not last:
            self._saving = iteration, self._session.live[0]
            if self._session.group == self._session.live[0]:
                self._begun.append(iteration)
                save()  # begins it; Megatron names the checkpoint when it is complete
                self._watch_savers()
            return
        self._module.maybe_finalize_async_save(blocking=True)
        directory, name = Path(args.save), _place(iteration)

        def write(path: Path) -> None:
            why = _of_first(lambda: _obstacle(path, directory))  # found by Megatron, one rank alone would raise it
            try:
                if not why:
                    with _changed(args, save=str(path), async_save=False, save_retain_interval=None):
                        save()
            except (CheckpointException, OSError, RuntimeError) as error:
                if not isinstance(error, CheckpointException) and dist.get_world_size() > 1:
                    raise  # the other ranks wait for this one
                self._module.get_timers()("save-checkpoint").stop()
                self._module.get_timers()("interval-time").start()
                why = _failure(error, path, directory)
            if why:
                if not dist.get_rank():
                    raise CheckpointError(why)
                return
            dist.barrier()
            if not dist.get_rank():
                for made in (path / name).iterdir():
                    made.rename(path / made.name)
                (path / name).rmdir()
                (path / NEWEST).unlink()

        self._saving, failed = None, ""
        try:
            self._session.save_together(directory / name, write)
            if not dist.get_rank() and self._session.group in self._session.live[:2]:
                self._name(directory, iteration)  # the second one if the first is lost now
        except (CheckpointError, OSError) as error:
            failed = str(error)
        failed = _of_first(lambda: failed)
        if failed and last:
            raise CheckpointError(
                f"iteration {iteration} is not saved: {failed}. Then give the same command again; the newest checkpoint is "
                f"of iteration {max(_newest(directory), 0)}"
            )
        if failed and self._session.group == self._session.live[0]:
            self._say_not_saved(iteration, failed)

    def _watch_savers(self) -> None:
        """End this rank if a process that saves for it is killed: Megatron would wait for it without end. Another group
        saves then."""

        def watch(process: BaseProcess) -> None:
            connection.wait([process.sentinel])  # no limit: in a thread of its own, which nobody waits for
            if (process.exitcode or 0) == -SIGKILL:
                raise EngineError(
                    "a process that saves this rank's checkpoints in the background was killed; if the machine had no "
                    "memory for it, leave out --async-save"
                )

        for process in set(active_children() if self._args.async_save else ()) - self._watched:
            self._watched.add(process)
            VitalThread(watch, "megatron_ft-saver", args=(process,)).start()

    def _say_not_saved(self, iteration: int, why: str) -> None:
        if not dist.get_rank():
            self._session.say_not_saved(f"iteration {iteration}: {why}. Training goes on, until the next save")

    def maybe_finalize_async_save(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Let Megatron end a save in the background. If that has failed, training goes on without it."""
        while True:
            try:
                return original(*arguments, **options)
            except CheckpointException as error:  # in all ranks of the group that saves
                directory = Path(self._args.save)
                self._begun = [one for one in self._begun if one > _newest(directory)]
                why, iteration = _failure(error, directory, directory), self._begun.pop(0)
                self._say_not_saved(iteration, why)
                if not dist.get_rank():
                    shutil.rmtree(directory / _place(iteration), ignore_errors=True)

    def _name(self, directory: Path, iteration: int) -> None:
        """Let Megatron find a complete checkpoint, and delete the one before if it is not to be retained."""
        newest, retain = directory / NEWEST, self._args.save_retain_interval
        before = _newest(directory)
        if before == iteration:
            return
        shared_file.write(newest, str(iteration), durable=True, mode=0o666)
        if retain and before > 0 and before % retain:
            shutil.rmtree(directory / _place(before), ignore_errors=True)

    def _save_again(self, *arguments: Any) -> None:
        """Save if the group is lost that was saving in the background. A checkpoint that it has completed stands."""
        if self._saving is None or self._saving[1] in self._session.live:
            return
        begun, self._saving = self._saving[0], None
        if _newest(Path(self._args.save)) < begun:
            with _changed(self._args, async_save=False):
                self._module.save_checkpoint_and_time(*arguments)

    def load_checkpoint(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Load Megatron's checkpoint, unless this group gets its state from others or from a checkpoint of the session."""
        if self._session.gets_state:
            return 0, 0
        iteration, *others = original(*arguments, **options)
        args = self._args
        if iteration and self._session.config.exact_bits and args.ckpt_format == "torch_dist":
            from megatron.core.dist_checkpointing import load_common_state_dict

            path = Path(args.load, _place(iteration))
            if path.is_dir():
                saved = load_common_state_dict(str(path))["args"]
                if all(getattr(saved, name, None) == getattr(args, name, None) for name in _DIVISION):
                    self._grids = getattr(saved, _GRIDS, None)
        return iteration, *others


def _source(iterator: Source | Sequence[Source]) -> Source:
    """Return the source of this rank; with virtual stages it has one for each, of which some may read nothing."""
    if isinstance(iterator, Source):
        return iterator
    return next((one for one in iterator if one.reads), iterator[0])


def _of_all(value: Any) -> list[Any]:
    """Return the values of all ranks of the group."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def _of_first(value: Callable[[], str]) -> str:
    """Return the value of the first rank of the group at all of its ranks."""
    told = ["" if dist.get_rank() else value()]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _obstacle(path: Path, directory: Path) -> str:
    """Return why no file can be written to ``path``, a part of ``directory``, and what to do; "" if one can."""
    try:
        with durable_file.explained("writing to", directory, "--save"):
            path.mkdir(parents=True, exist_ok=True)
            durable_file.write(path / ".probe", [bytes(_PROBE_BYTES)])
            (path / ".probe").unlink()
    except CheckpointError as error:
        return str(error)
    return ""


def _failure(error: BaseException, path: Path, directory: Path) -> str:
    """Return, at all ranks, why a save failed: Megatron's exception does not say it of a full disk."""
    said = str(error).strip().rpartition("\n")[2]
    return _of_first(lambda: _obstacle(path, directory) or f"writing to {directory} failed: {said}")


@contextmanager
def _changed(args: Any, **values: Any) -> Iterator[None]:
    """Give some of Megatron's arguments other values in the block."""
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


def _place(iteration: int) -> str:
    """Return the name of Megatron's directory for the checkpoint of an iteration."""
    return f"iter_{iteration:07d}"


def _newest(directory: Path) -> int:
    """Return the iteration of the newest complete checkpoint; -1 if there is none."""
    found = megatron_lm_arguments.newest(str(directory))
    return int(found) if found.isdecimal() else -1
