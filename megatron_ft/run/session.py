"""The session: the object that a training script uses. It makes the objects of one rank, and hands each call on to the one
whose job it is.

``run.training_loop`` makes the steps, and what the groups do together between two steps; ``run.engine_maker`` makes
engines; ``run.verdict_handler`` hears of what happens; ``run.rank_executor`` carries out every operation of a step.
The rank at position 0 leads its group (``run.group_leader``), the other ranks follow (``run.group_follower``); the
training script is the same for both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from megatron_ft.config import rank_env
from megatron_ft.config import schema as config_module
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.data.loader import Loader, of_dataloader
from megatron_ft.data.order import BatchSchedule
from megatron_ft.data.prefetch import Dataset
from megatron_ft.errors import ConfigError
from megatron_ft.run import standalone_run
from megatron_ft.run.collectives.intra_group import IntraGroup
from megatron_ft.run.engine_maker import EngineMaker
from megatron_ft.run.engines.port import Engine, StepResult
from megatron_ft.run.engines.torch_native import LossFn
from megatron_ft.run.evaluation import Evaluation, Samples
from megatron_ft.run.group_follower import GroupFollower
from megatron_ft.run.group_leader import GroupLeader
from megatron_ft.run.rank_executor import RankExecutor
from megatron_ft.run.registered_state import Stateful
from megatron_ft.run.run_access import RunAccess
from megatron_ft.run.training_loop import BetweenSteps, TrainingLoop
from megatron_ft.run.verdict_handler import VerdictHandler
from megatron_ft.types import given

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage


_log = logging.getLogger(__name__)

ALONE = "no launcher has started this script: it is one group in one process, and no loss is masked"


def init(config: str | Path | None = None, *, seed: int | None = None, standalone: bool = False) -> Session:
    """Join the run for which the launcher started this process.

    A process that no launcher started is a run of its own, with one group (``python train.py``, a debugger, a notebook).
    Its run directory is temporary, and nothing is masked.

    Args:
        config: path of the run's config file. Default: the config that the launcher passed. A path that is given must
            lead to the same config.
        seed: seed of the order of the samples and of dropout; the same in every group. Default:
            ``fault_tolerance.seed``.
        standalone: the process is to be a run of its own. Default: it is one if no launcher started it, which is logged
            as a warning.

    Raises:
        LaunchError: another launcher, such as torchrun, started this process as one of several.
        ConfigError: ``config`` differs from the config with which the run was launched, or cannot be used by one
            process; ``seed`` is out of range; or ``standalone`` in a process that the launcher started.
        CheckpointError: as a run of its own, its checkpoint directory is used by another run.
        StoreError: the control store does not answer.
    """
    launched = rank_env.is_launched()
    if standalone and launched:
        raise ConfigError(
            "megatron_ft.init(standalone=True) in a script that `megatron-ft launch` has started; leave standalone out: "
            "a script that is started with python alone is a run of its own"
        )
    if not launched and not standalone:
        standalone_run.check_alone(os.environ)
        _log.warning(ALONE)
    env = RankEnvironment.from_env() if launched else standalone_run.found(config)
    if launched and config is not None:
        run = env.config
        own = config_module.load(config, groups=run.groups, ranks_per_group=run.ranks_per_group, shards=run.shards)
        if own != run:
            raise ConfigError(
                f"the script's config {config} differs from the one the run was launched with; pass the same file, or "
                f"call megatron_ft.init() without one"
            )
    if seed is not None:
        section = replace(env.config.fault_tolerance, seed=seed)
        section.check()
        env = replace(env, config=replace(env.config, fault_tolerance=section))
    return Session(env, listens=launched)


class Session:
    """One rank's access to the run, made by :func:`init`.

    A script calls :meth:`wrap` or :meth:`deepspeed`, then :meth:`train_step` for each of :meth:`steps`; see README.

    Large because it has each call that a script can make; each hands on to the object whose job it is.

    Attributes:
        config: the run's configuration, frozen.
        group: number of this rank's group.
        position: number of this rank in its group; the rank at position 0 leads the group.
    """

    def __init__(self, env: RankEnvironment, listens: bool = True) -> None:
        """``listens``: whether other processes belong to the run, whose notices are listened to."""
        self.env = env
        self.config = env.config
        self.group, self.position = env.group, env.position
        access = RunAccess(env)
        self._executor = RankExecutor(env, access.agreement)
        rank = self._rank = self._executor.rank
        role: type[GroupLeader | GroupFollower] = GroupFollower if env.position else GroupLeader
        self._role = role(self._executor, access.first)
        self._maker = EngineMaker(rank, lambda: self._verdicts.until_lost())
        self._verdicts = VerdictHandler(access, self._executor, self._role, self._maker)
        self._loop = TrainingLoop(self._verdicts)
        self._between = BetweenSteps(self._loop)
        rank.progress.start()
        self._verdicts.start(listens)
        if rank.size > 1:
            with self._verdicts.until_lost():
                rank.join(IntraGroup.build(env, access.agreement, lambda: bool(rank.lost_because)))

    @property
    def rank(self) -> int:
        """Number of this rank among all ranks of the run: ``group`` times the ranks per group, plus ``position``."""
        return self.group * self.config.ranks_per_group + self.position

    @property
    def step(self) -> int:
        """The next step to train; the number of steps that are committed. In a hook of the optimizer it is the step that is
        being made, also in a group that repeats the steps of others on its way back."""
        return self._loop.step

    @property
    def is_told_to_stop(self) -> bool:
        """Whether a launcher was told to stop the run; groups hear it at different times. A script that saves by itself
        (``fault_tolerance.checkpoint``) ends then, after a step on which its groups agree (:meth:`end`)."""
        return self._verdicts.is_told_to_stop

    @property
    def microbatches_per_group(self) -> int:
        """Number of microbatches in a shard, at :attr:`step`; a batch has as many for each of the shards.

        A script may set it between two steps, for the next step and all after it, to the same value in every rank.
        Checkpoints and a returning group carry the sizes. :meth:`loader` and :meth:`dataset` count the samples of all
        steps, so that each data epoch still has every sample once. In another dataset, whose function gets the
        microbatch id only, the sizes must follow from the step.
        """
        return self._executor.registered.sizes.at(self.step)

    @microbatches_per_group.setter
    def microbatches_per_group(self, number: int) -> None:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"session.microbatches_per_group = {number!r}: it must be a whole number >= 1")
        if not self._loop.total:
            raise ConfigError(
                f"session.microbatches_per_group = {number} before the first step: set it in the loop over session.steps; "
                f"the size at the start is gradient_accumulation_steps in the config"
            )
        self._loop.refuse_within_step("session.microbatches_per_group")
        if number != self.microbatches_per_group:
            self._executor.prefetcher.drop()  # samples of these steps may be loaded already
            self._executor.registered.sizes.change(self.step, number)

    @property
    def batch_sizes(self) -> BatchSchedule:
        """The numbers of microbatches in a shard, of all steps."""
        return self._executor.registered.sizes

    @property
    def gets_state(self) -> bool:
        """True if this rank's first state is that of other groups or of a checkpoint."""
        return self._loop.gets_state

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of the groups that have made the last step, ascending."""
        return self._loop.live

    @property
    def is_writer(self) -> bool:
        """True at one rank of the run: that at position 0 of the lowest living group.

        Use it for what may be done again, or left out once, when that group dies, such as printing. Another group takes
        the part over with the first step that is made without that group. Use :meth:`log` for what must be written
        exactly once, and :meth:`save_final` for the final model.
        """
        return self._loop.is_writer

    def log(self, values: Mapping[str, Any]) -> None:
        """Write values to the run record and to every tracker, once for the last committed step, whatever dies.

        All groups call it with the values that they have; those of one living group are written. Several calls after one
        step make one entry. Loss, gradient norm, learning rate and tokens per second are recorded without a call.

        Args:
            values: name -> number, text, or a tensor of one element.

        Raises:
            ConfigError: before the first step, or a value of another type.
        """
        self._loop.log(values)

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Samples,
        *,
        name: str = "evaluation",
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Evaluate a dataset between two steps, or before the first one. All groups share the samples; each sample
        counts once, also when groups die.

        All ranks call it with the same arguments, in the loop over :meth:`steps`. The results of a group that is lost
        or late are computed by the others. All ranks get the same sums.

        Args:
            fn: called with a batch, without gradients; returns name -> number, or tensor of one element. The values of
                all batches are added up in fp64, so that a mean is the quotient of two sums. The result must not depend
                on the group. The script sets the model to evaluation mode before, and back after the call.
            dataset: object with ``len(dataset)`` and ``dataset[index]``, such as :meth:`dataset` returns.
            name: name in messages. Evaluations of the same step have different names, or the same order at all ranks.
            batch_size: number of samples in a batch, >= 1; the last batch may be smaller. Default: the samples of a
                microbatch.
            collate_fn: list of samples -> batch. Default: ``torch.utils.data.default_collate``.

        Returns:
            The sums, and ``"samples"``, the number of samples.

        Raises:
            ConfigError: outside of the loop over :meth:`steps`, between :meth:`microbatches` and :meth:`commit`, or
            ``batch_size``
                is below 1.
            DataError: the groups have datasets of different sizes, or the dataset is empty.
        """
        seed = self.config.fault_tolerance.seed
        make = lambda batch, key: Evaluation(fn, dataset, batch, collate_fn, name, seed, key)  # noqa: E731
        return self._between.evaluate(name, batch_size, make)

    def register(self, name: str, stateful: Stateful) -> None:
        """Make an object's state part of the training state: checkpoints and the return of a group carry it.

        All ranks register the same names, before the first step. The state must be the same in all groups at the end of a
        step, as that of the model is. Tensors are put in place from the CPU.

        Args:
            name: name of the object in checkpoints and messages.
            stateful: object with ``state_dict()`` and ``load_state_dict(state)``, such as an average of the weights, the
                best loss, a curriculum or a sampler. The state consists of tensors, numbers, texts, None, lists, tuples
                and mappings.

        Raises:
            ConfigError: after the first step, for a name that is taken, or for a state of other types.
        """
        if self._loop.entered:
            raise ConfigError(f"session.register({name!r}, ...) after the first step: call it before session.steps")
        self._executor.registered.add(name, stateful)

    def save(self, path: str | Path, write: Callable[[Path], object]) -> Path:
        """Save a file or directory during training, such as the best model so far: one group writes it, and another one
        if that group is lost.

        Every rank calls it between two steps. It returns when the file is saved. What ``write`` makes gets its name
        only when it is complete; a file or directory that has that name already is replaced. A run that goes on from a
        checkpoint makes the steps after it, and their saves, again.

        Args:
            path: file or directory, on a file system that all groups share.
            write: called with a temporary path beside ``path``, for instance ``lambda path: torch.save(model.state_dict(),
                path)``, at position 0 of one group.

        Raises:
            ConfigError: before the first step, or between :meth:`microbatches` and :meth:`commit`.
            CheckpointError: no group could save it; in a group that has tried, the exception of ``write``.
        """
        self._loop.refuse_within_step("session.save")
        if not self._loop.entered:
            raise ConfigError("session.save before the first step: call it after train_step")
        return self._between.save(Path(path), write)

    def save_together(self, path: str | Path, write: Callable[[Path], object]) -> Path:
        """Do :meth:`save` with a ``write`` that all ranks of the group call together, each with the same path; also before
        the first step.

        Args, Raises: as :meth:`save`.
        """
        return self._between.save_together(Path(path), write)

    def say_not_saved(self, reason: str) -> None:
        """Write to the run record, and with it to the console, that a save of the script's own after the last step has
        failed. One rank of the run calls it."""
        self._rank.history.note("checkpoint_failed", step=self.step, reason=reason)

    def save_final(self, path: str | Path, write: Callable[[Path], object]) -> Path:
        """Save the final model, after the last step: one group writes it, and another one if that group is lost.

        Every rank calls it. It returns when the model is saved. What ``write`` makes gets its name only when it is
        complete; a file or directory that has that name already is replaced.

        Args:
            path: file or directory of the model, on a file system that all groups share.
            write: called with a temporary path beside ``path``, for instance ``model.save_pretrained``, at position 0 of
                one group.

        Raises:
            ConfigError: the last step is not made yet.
            CheckpointError: no group could save the model; in a group that has tried, the exception of ``write``.
        """
        total = self._loop.total
        if not 0 < total <= self.step:
            raise ConfigError(
                f"session.save_final after step {self.step} of {total}: call it after the loop over session.steps, "
                f"and session.save in it"
            )
        return self._between.save(Path(path), write)

    def wrap(
        self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn | None = None, scheduler: Any = None
    ) -> Engine:
        """Return an engine for a PyTorch model: a plain one, or one that FSDP2 (``fully_shard``) or tensor parallelism has
        divided over the ranks of the group, with :meth:`mesh`.

        The engine owns the optimizer, the learning-rate scheduler and the gradients from here on.

        Args:
            model: all its trainable parameters must be fp32.
            optimizer: any torch optimizer over the parameters of ``model``.
            loss_fn: (model, batch) -> scalar mean loss of one microbatch; with ``loss_reduction`` ``"token"``: (sum of
                the tokens' losses, number of tokens). With ``inner_shards`` the batch is this rank's share of the samples.
                Default: the script has a loop of its own (:meth:`microbatches`).
            scheduler: learning-rate scheduler without a metric, stepped once per committed step. Default: none.

        Raises:
            EngineError: the engine cannot train this model or optimizer.
            ConfigError: the config asks for a parallelism that the model does not have, or has another setting that only
                :meth:`deepspeed` uses.
        """
        made = self._loop.engine = self._maker.wrap(model, optimizer, loss_fn or self._loop.own.loss_fn, scheduler)
        return made

    def pipeline(
        self,
        stages: Sequence[PipelineStage],
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        schedule: type[Any],
        scheduler: Any = None,
        split: Callable[[Any], Any] | None = None,
    ) -> Engine:
        """Return an engine for stages of ``torch.distributed.pipelining``, made on :meth:`mesh`.

        Args:
            stages: this rank's stages, each a ``PipelineStage`` with ``group=session.mesh()["pp"].get_group()``. Tensor
                parallelism and FSDP2 may divide their modules further. All trainable parameters must be fp32.
            optimizer: any torch optimizer over the parameters of all of them.
            loss_fn: (output of the last stage, target) -> mean loss of a microbatch, or the pair that ``loss_reduction``
                asks for.
            schedule: a class such as ``Schedule1F1B`` or ``ScheduleInterleaved1F1B``. Each step runs it with as many
                microbatches as the plan has for this group; a number that it cannot run is divided, or run by a simpler one.
            scheduler: learning-rate scheduler, stepped once per committed step. Default: none.
            split: batch -> (tuple of the first stage's inputs, target). Default: a pair, or ``input_ids`` and ``labels``.

        Raises:
            EngineError: the engine cannot train these stages.
            ConfigError: the config has a setting that only :meth:`deepspeed` uses.
        """
        made = self._maker.pipeline(stages, optimizer, loss_fn, schedule, scheduler=scheduler, split=split)
        self._loop.engine = made
        return made

    def megatron(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Any,
        forward_step: Callable[[Iterator[Any], nn.Module], Any],
        scheduler: Any = None,
        *,
        seq_length: int,
        reads: bool | None = None,
        schedule: Mapping[str, Any] = {},
    ) -> Engine:
        """Return an engine for a model of megatron-core; replaces the calls of its schedule, ``finalize_model_grads`` and
        ``optimizer.step``.

        Call :meth:`init_distributed`, then Megatron's ``initialize_model_parallel`` with the sizes of the config, before the
        model is built: the world is this group.

        Args:
            chunks: this rank's model chunks (one without virtual stages), each in Megatron's ``DistributedDataParallel``.
            optimizer: of Megatron's ``get_megatron_optimizer``; its ``clip_grad`` is the config's ``gradient_clipping``.
            forward_step: Megatron's: (iterator over batches, model) -> (output, loss function). A batch holds this rank's
                share of the samples of a microbatch.
            scheduler: Megatron's ``OptimizerParamScheduler``, or one of torch's; stepped once per committed step. Megatron's
                counts samples, as in Megatron-LM: its ``lr_decay_steps`` is a number of samples.
            seq_length: length of the sequences, in tokens.
            reads: whether this rank reads samples, where each rank reads its own
                (``fault_tolerance.inner_shards_divide`` ``"script"``). Default: ranks take shares of one batch.
            schedule: further arguments of Megatron's schedule. Default: none.

        Raises:
            EngineError: megatron-core is not installed, or a setting of it cannot be made fault-tolerant.
            ConfigError: the config has a setting that only :meth:`deepspeed` uses.
        """
        own: dict[str, Any] = {"seq_length": seq_length, "reads": reads, "schedule": schedule}
        made = self._loop.engine = self._maker.megatron(chunks, optimizer, forward_step, scheduler=scheduler, **own)
        return made

    def mesh(self, device: str | None = None) -> DeviceMesh:
        """Return the ranks of this group as a mesh with the axes ``pp`` (``pipeline.stages``), ``dp``
        (``fault_tolerance.inner_shards``, for ``fully_shard``) and ``tp`` (``tensor_parallel.autotp_size``, for
        ``parallelize_module``). ``torch.distributed`` is initialised as by :meth:`init_distributed`.

        Args:
            device: type of the devices, such as ``"cpu"``. Default: that of torch's accelerator, else the CPU.
        """
        return self._maker.mesh(device)

    def init_distributed(self, backend: str | None = None) -> None:
        """Initialise ``torch.distributed`` with this group as the world.

        Replaces ``deepspeed.init_distributed`` and ``torch.distributed.init_process_group``; call it before anything
        that needs process groups is built. DeepSpeed's communication is initialised as well, if DeepSpeed is already
        imported, or is installed and the config has DeepSpeed settings. Later calls do not initialise the world again.

        Args:
            backend: name of a ``torch.distributed`` backend. Default: nccl with GPUs, else gloo.

        Raises:
            EngineError: ``torch.distributed`` is already initialised.
        """
        self._maker.init_distributed(backend)

    def deepspeed(self, model: nn.Module, **options: Any) -> Engine:
        """Return a DeepSpeed engine for ``model``; replaces ``deepspeed.initialize``.

        Args:
            model: a ``PipelineModule``, built after :meth:`init_distributed`; or any module, together with ``loss_fn``.
            options: ``loss_fn``: (engine, batch) -> mean loss of one microbatch, or the pair that ``loss_reduction``
                asks for; ``optimizer``, ``model_parameters`` and ``lr_scheduler`` as ``deepspeed.initialize`` takes
                them. All other settings come from the run's config.

        Raises:
            EngineError: the model or a setting cannot be made fault-tolerant; the message gives the reason.
        """
        made = self._loop.engine = self._maker.deepspeed(model, **options)
        return made

    def dataset(self, path: str | Path, *, seq_len: int, documents: bool = False) -> PackedDataset:
        """Return the dataset in a directory that ``megatron-ft prepare`` wrote.

        The dataset is called with a microbatch id and returns ``input_ids`` and ``labels``, int64 [samples, seq_len].
        Any other pure function of the microbatch id can replace it. The ``fingerprint`` of such a function (an
        attribute, or a method without arguments) is compared with those of the other ranks before the first step.

        Args:
            path: the directory.
            seq_len: tokens per sample.
            documents: whether batches also have ``document_ids`` and ``position_ids``, for attention within documents only.

        Raises:
            DataError: the directory is missing or damaged, or does not fit the request.
        """
        made = PackedDataset(path, seq_len=seq_len, documents=documents, **self._division)
        self._loop.datasets.append(made)
        return made

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> Loader:
        """Return the microbatches of a dataset, for :meth:`train_step`; ``len()`` of it is the number of steps of an epoch.

        Call it before :meth:`wrap`, :meth:`init_distributed` and :meth:`deepspeed`: workers are forked.

        Args:
            dataset: object with ``dataset[index]`` and ``len(dataset)``. Each data epoch has every sample once, in an order
                that follows from ``seed``. An object without a length is a stream: ``dataset[number]`` returns the sample
                with that number, 0, 1, 2, ...
            shuffle: whether each data epoch has another order; False: the order of the dataset.
            collate_fn: list of samples -> batch. Default: ``torch.utils.data.default_collate``.
            num_workers: number of processes that load microbatches, in each rank; 0: the training thread does, or with a
                dataset that has ``read_ahead`` a background thread. The global generators are seeded by the microbatch.
            worker_init_fn: called in each worker with its number.

        Raises:
            ConfigError, DataError: the dataset cannot be indexed or is empty, or ``num_workers`` is wrong.
        """
        workers: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": worker_init_fn}
        return Loader(dataset, shuffle=shuffle, collate_fn=collate_fn, **workers, **self._division)

    @property
    def _division(self) -> dict[str, Any]:
        """What divides the samples of a dataset into microbatches."""
        config, sizes = self.config, self._executor.registered.sizes
        samples, seed = config.samples_per_microbatch, config.fault_tolerance.seed
        return {
            "groups": config.shards,
            "microbatches_per_group": sizes,
            "samples_per_microbatch": samples,
            "seed": seed,
        }

    def prepare(self, dataloader: DataLoader[Any]) -> Loader:
        """Return :meth:`loader` for the dataset, order, ``collate_fn`` and workers of a torch ``DataLoader``.

        Raises:
            ConfigError: its batch is not a microbatch, or its sampler has an order of its own.
        """
        return self.loader(**of_dataloader(dataloader, self.config.samples_per_microbatch))

    def steps(self, total: int, dataset: Dataset | None = None) -> Iterator[int]:
        """Yield the numbers of the steps that this group has to train, in order, up to ``total``.

        After the last step the iterator waits until every live group is done and the run record is complete.

        Args:
            total: number of steps of the run, at least 1; the same at every rank. A job that goes on from a checkpoint may
                have another number than the job before it.
            dataset: the dataset for :meth:`train_step`, if :meth:`dataset` did not make it and it has a
                ``fingerprint``. A group that comes back with another dataset is then refused before it takes part, not
                in its first step.

        Raises:
            ConfigError: ``total`` is not a whole number >= 1, or :meth:`train_step` was not called in a step.
            DataError: another rank has another ``total``, and as in :meth:`train_step`.
            RunStopped, StoreError: as in :meth:`train_step`.
        """
        return self._loop.steps(total, dataset)

    def constant(self, name: str, value: Any) -> Any:
        """Return the value that the first rank of the run has called this with; also in a group that comes back, and in a
        job that goes on from a checkpoint. Each run has one name.

        Args:
            name: name of the value.
            value: anything that JSON can hold.
        """
        origin = self._loop.access.origin
        if origin is not None and name in (saved := origin.meta.get("identity", {})):
            value = saved[name]
        return self._executor.identities.settle(name, value)

    def end(self) -> None:
        """End the run after the last step that was made, before the number of :meth:`steps`. All ranks of all groups call it
        after the same step, and go on with the loop, which ends."""
        self._loop.total = self.step
        self._role.end(lambda: self.is_told_to_stop)

    def train_step(self, engine: Engine, dataset: Dataset) -> StepResult:
        """Compute, reduce and commit one step, also when groups die meanwhile. Return when this group has committed it.

        Args:
            engine: the engine that :meth:`wrap` or :meth:`deepspeed` returned.
            dataset: callable that returns the samples of a microbatch id.

        Raises:
            DataError: other ranks, or the checkpoint, have another dataset, seed or size of microbatches; or other ranks
                have another number of steps.
            RunStopped: this group was left out of the run, or fewer than ``min_groups`` are alive.
            StoreError: a recovery needed the control store, and the store did not answer for ``store_patience_s``.
        """
        return self._loop.train_step(engine, dataset)

    def microbatches(self, dataset: Dataset) -> Iterator[Any]:
        """Make one step with the script's own loop, and yield the batch of each microbatch that this rank has to compute.
        Their number is another one after a loss, and may be 0.

        For an engine that :meth:`wrap` made without ``loss_fn``. Each turn of the loop computes the loss of the batch and
        calls :meth:`backward` with it; :meth:`commit` follows the loop:

            for step in session.steps(1000):
                for batch in session.microbatches(dataset):
                    session.backward(loss_fn(model, batch))
                result = session.commit()

        Args:
            dataset: see :meth:`train_step`.

        Raises:
            ConfigError: the engine has a loss function, or a turn has not called :meth:`backward` once.
            DataError, RunStopped, StoreError: as in :meth:`train_step`.
        """
        engine = self._loop.engine
        if engine is None or not self._loop.has_own(engine):
            raise ConfigError(
                "session.microbatches needs an engine without a loss function: leave loss_fn out in session.wrap, or call "
                "session.train_step"
            )
        return self._loop.own.microbatches(lambda: self.train_step(engine, dataset))

    def backward(self, loss: torch.Tensor, tokens: int | torch.Tensor | None = None) -> None:
        """Run the backward pass of the microbatch whose batch :meth:`microbatches` has yielded.

        Args:
            loss: the mean loss of the microbatch; with ``loss_reduction`` ``"token"`` the sum of the tokens' losses.
            tokens: with ``"token"``, the number of these tokens.

        Raises:
            ConfigError: outside of the loop, or twice in one turn of it.
            RunStopped, StoreError: as in :meth:`train_step`.
        """
        self._loop.own.backward(loss if tokens is None else (loss, tokens))

    def commit(self) -> StepResult:
        """Update the model with the step that a loop over :meth:`microbatches` has made, and return its result.

        The optimizer acts here: a learning rate that the script sets before acts in this step. It must be called once
        in each step, without an evaluation or a save between the loop and it.

        Raises:
            ConfigError: before the end of the loop.
            RunStopped, StoreError: as in :meth:`train_step`.
        """
        result = self._loop.own.commit()
        # A group that has taken the committed state of another one has it already; its script has set values after that.
        values = given(self._loop.engine).hyperparameters
        values.write(values.left)
        return result

    def leave(self, why: str) -> None:
        """Make this group leave the run in order after the present step, e.g. on a maintenance notice or SIGTERM.

        The other groups continue without it, and no work is lost. Callable from any thread and from a signal handler.

        Args:
            why: the reason, for the log and the run record. The reason of the first call counts.
        """
        self._verdicts.leave(why)
