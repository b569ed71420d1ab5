"""The session: what a training script holds, and what ties one rank's parts together.

The rank (``runtime.rank``) can do everything a step needs. Position 0 leads its group (``runtime.leader``), the others
follow (``runtime.follower``); which of them a script's process is, it need not know. The watcher's thread hands every
verdict on: to the rank, which unblocks the training thread at once, and to the leader, which lets it decide.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from megatron_ft import config as config_module
from megatron_ft import split
from megatron_ft.core import detector
from megatron_ft.core.protocol import Died
from megatron_ft.core.saving import Saves, Stops
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.data.prefetch import Dataset
from megatron_ft.engines.base import Engine, StepResult
from megatron_ft.engines.torch_native import LossFn, TorchNativeEngine
from megatron_ft.errors import ConfigError, StoreError
from megatron_ft.runtime import copies, resume
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.follower import Follower
from megatron_ft.runtime.history import History
from megatron_ft.runtime.inner import Inner, Lost
from megatron_ft.runtime.inside import Inside
from megatron_ft.runtime.leader import Leader
from megatron_ft.runtime.rank import Rank
from megatron_ft.runtime.released import Census, wait_for_return
from megatron_ft.runtime.store import ControlStore, StoreGone, StoreLostMemory, patient
from megatron_ft.runtime.watchdog import Watchdog
from megatron_ft.runtime.watcher import Watcher
from megatron_ft.runtime.world import World
from megatron_ft.types import View

if TYPE_CHECKING:
    from megatron_ft.engines.deepspeed.engine import DeepSpeedData, DeepSpeedPipeline

_STORE_TIMEOUT_S = 10.0


def init(config: str | Path | None = None, *, seed: int | None = None) -> Session:
    """Join the run this process was started for.

    Args:
        config: path of the run's config; may be left out, the launcher has told. Given, it must say the same.
        seed: of the order of the samples and of dropout; beats ``fault_tolerance.seed``. The same in every group.

    Raises:
        LaunchError: the process was not started by ``megatron-ft launch``.
        ConfigError: ``config`` contradicts the one the run was launched with.
        StoreError: the control store does not answer.
    """
    env = RankEnvironment.from_env()
    if config is not None:
        sizes = {"groups": env.config.groups, "ranks_per_group": env.config.ranks_per_group, "shards": env.config.shards}
        own = config_module.load(config, **sizes)
        if own != env.config:
            raise ConfigError(
                f"the script's config {config} differs from the one the run was launched with; pass the same file, or "
                f"call megatron_ft.init() without one"
            )
    if seed is not None:
        section = replace(env.config.fault_tolerance, seed=seed)
        section.check()
        env = replace(env, config=replace(env.config, fault_tolerance=section))
    return Session(env)


class Session:
    """What a training script holds. Use :meth:`wrap`, :meth:`steps` and :meth:`train_step`; see README."""

    def __init__(self, env: RankEnvironment) -> None:
        self.env = env
        self.config = env.config
        self.group, self.position = env.group, env.position
        self._total, self._entered, self._leaving = 0, False, ""
        self._world: World | None = None
        self._store = ControlStore(env.store, env.run_id, _STORE_TIMEOUT_S)
        self._settings = env.config.fault_tolerance
        patience_s = self._settings.detector.collective_timeout_s
        agreement = self._agreement = Agreement(self._store, env.group, patience_s)
        self._engine: Engine | None = None
        self._origin: resume.Origin | None = None
        first = patient(self._first_view, patience_s=_STORE_TIMEOUT_S)
        history = History(env.run_dir)
        self._rank = Rank(env, agreement, history)
        self._copies = copies.of(env)
        self._census = Census(env.config.groups)
        self._inside = Inside(env.group, env.position, self._store.clone(), patience_s, env.incarnation)
        if env.position == 0:
            placement = config_module.placement_of(env.config)
            self._part: Leader | Follower = Leader(self._rank, env.config, agreement, history, placement, first)
        else:
            self._part = Follower(self._rank, 0 if first is None else first.step)
        Watcher(self._store.clone(), self._hear, self._store_is, self._store_is, agreement.restore).start()
        self._rank.pulse.start()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))
        if self._rank.size > 1:
            with self._until_lost():
                self._rank.join(Inner.build(env, agreement, lambda: bool(self._rank.lost_because)))

    # --- what a user touches ------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, scheduler: Any = None) -> TorchNativeEngine:
        """Make an engine of a plain PyTorch model. Raises ``EngineError`` for a model it cannot train.

        The optimizer, learning-rate scheduler and gradients belong to the engine from here on.
        """
        split.refuse_whole_model(self.config.engine, "a model given to session.wrap")
        if self.config.engine:
            names = ", ".join(sorted(self.config.engine))
            warnings.warn(f"settings that only session.deepspeed uses, not session.wrap: {names}", stacklevel=2)
        self._engine = TorchNativeEngine(
            model,
            optimizer,
            loss_fn,
            scheduler=scheduler,
            bucket_mb=None if self._settings.bucket_mb == config_module.AUTO else self._settings.bucket_mb,
            gradient_clipping=self.config.gradient_clipping,
            slots=self.config.room,
        )
        return self._engine

    def init_distributed(self, backend: str | None = None) -> None:
        """Instead of ``deepspeed.init_distributed`` or ``torch.distributed.init_process_group``: the world is this group.

        Call it before anything is built that needs process groups. DeepSpeed's communication is initialised with it, if
        DeepSpeed is imported already or the config has settings of it. ``backend``: by default nccl with GPUs, else gloo.
        """
        if self._world is None:
            with self._until_lost():
                self._world = World.join(self.env, self._agreement, backend, lambda: bool(self._rank.lost_because))
        expected = self.config.engine and importlib.util.find_spec("deepspeed") is not None
        if "deepspeed" in sys.modules or expected:
            from megatron_ft.engines.deepspeed import build

            build.init_communication()

    def deepspeed(self, model: nn.Module, **options: Any) -> DeepSpeedPipeline | DeepSpeedData:
        """Make an engine with DeepSpeed; in place of ``deepspeed.initialize``.

        Args:
            model: a ``PipelineModule``, built after :meth:`init_distributed`; or any module, with ``loss_fn``.
            options: ``loss_fn``: (engine, batch) -> mean loss of one microbatch; ``optimizer``, ``model_parameters``,
                ``lr_scheduler`` as ``deepspeed.initialize`` takes them. The rest comes from the run's config.

        Raises ``EngineError`` for what cannot be made fault-tolerant, with the reason.
        """
        from megatron_ft.engines.deepspeed import build

        self.init_distributed()
        with self._until_lost(), self._world.made_here(self.env.store):
            self._engine = build.build(model, self.config, slots=self.config.room, **options)
        return self._engine

    def dataset(self, path: str | Path, *, seq_len: int) -> PackedDataset:
        """The samples of every microbatch id, from a directory that ``megatron-ft prepare`` made.

        Called with a microbatch id it returns ``input_ids`` and ``labels``, int64 [samples, seq_len]. Raises
        ``DataError``. Any other pure function of the microbatch id can take its place.
        """
        return PackedDataset(
            path,
            seq_len=seq_len,
            samples_per_microbatch=self.config.samples_per_microbatch,
            groups=self.config.shards,
            microbatches_per_group=self.config.microbatches_per_group,
            seed=self._settings.seed,
        )

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps this group has to train, in order, up to ``total``; every rank passes the same.

        After the last one it waits until every live group is done, and the run record is complete.
        """
        if not isinstance(total, int) or isinstance(total, bool) or total < 1:
            raise ConfigError(f"session.steps({total!r}): the number of steps must be a whole number >= 1")
        self._total = total
        # Who comes back knows then only which step is the first, and what was loaded can be looked at before that.
        if (self._comes_back or self._origin is not None) and self._engine is not None:
            with self._until_lost():
                self._enter(self._engine)
        step = self._part.step
        while step < total:
            yield step
            if self._part.step <= step:
                raise ConfigError(f"step {step} was not trained; call session.train_step once in every step")
            step = self._part.step
        self._rank.close()
        with self._until_lost():
            self._part.finish()

    def train_step(self, engine: Engine, dataset: Dataset) -> StepResult:
        """Compute, reduce and commit one step, whatever dies meanwhile. Returns when this group has committed it.

        Raises:
            RunStopped: this group was left out of the run, or fewer than ``min_groups`` are alive.
            StoreError: a recovery needed the control store and it is gone.
        """
        with self._until_lost():
            if not self._entered:
                self._enter(engine)
            if self._leaving:
                self._part.leave(self._leaving)
            result = self._part.train_step(dataset)
        self._rank.pulse.enter("outside")
        return result

    def _enter(self, engine: Engine) -> None:
        self._entered = True
        self._rank.attach(engine)
        if self._origin is not None:
            self._rank.result = resume.load(self._origin, self.config, self.position, engine, self._copies)
        self._part.enter(self._total, self._comes_back, self._origin)

    @property
    def _comes_back(self) -> bool:
        """Whether this group was started again, or added, while the run goes on."""
        return self.env.incarnation > 0

    def leave(self, why: str) -> None:
        """This group leaves in order after the present step; for a maintenance notice or a handler of SIGTERM.

        The others go on without it and nothing is lost. Callable from any thread and from a signal handler.
        """
        self._leaving = self._leaving or why
        if isinstance(self._part, Leader):
            self._part.leave(why)

    def watch(self, groups: Mapping[str, Any], timeout_s: float | None = None) -> Watchdog:
        """Have process groups that your engine keeps inside this group watched; call it on every rank that is in them.

        When one breaks (NCCL's watchdog says so, or a gloo work given to the returned object's ``watch(work, name)`` takes
        longer than ``timeout_s``, by default ``detector.collective_timeout_s``), this group is out and the others go on.

        Args:
            groups: name -> ``torch.distributed`` process group.
        """
        return self._inside.watch(groups, timeout_s or self._settings.detector.collective_timeout_s)

    # --- what goes on behind it ---------------------------------------------------------------------------------------

    def _first_view(self) -> View | None:
        """A store that dies while ranks start is rebuilt by the agent: this rank knows nothing yet that it could lose."""
        try:
            self._store.check_begun()
            if self._comes_back:
                return None
            raw, origin = self._store.get("view/0"), self._store.get(resume.KEY)
        except StoreLostMemory:
            self._store.restore()
            raise
        if raw is None:
            raise StoreGone(f"control store {self.env.store} knows no view of run {self.env.run_id}; start it again")
        view = View.from_json(raw)
        self._origin = None if origin is None else resume.Origin(**origin)
        self._agreement.adopted(view)
        return view

    def _hear(self, verdict: detector.Verdict) -> None:
        """Watcher thread: unblock the training thread at once, and let it decide."""
        if isinstance(verdict, detector.Housed | detector.Refused):
            return  # what is where is the agents' business
        if isinstance(verdict, detector.Dismissed):
            if verdict.group == self.group and not self._leaving:
                self._part.hear(verdict)
                self._leaving = verdict.why
                print(f"megatron_ft: group {self.group} is asked to leave: {verdict.why}", flush=True)
            return
        if isinstance(verdict, Saves | Stops | detector.Agreed | detector.Over):  # no step waits for these
            self._part.hear(verdict)
            return
        self._census.hear(verdict)
        own = isinstance(verdict, Died) and verdict.group == self.group and verdict.incarnation >= self.env.incarnation
        if self._rank.size > 1 and own:
            self._rank.lose(verdict.reason)
            self._inside.abort()
            if self._world is not None:
                self._world.cut()
        self._part.hear(verdict)  # first: a training thread that is unblocked finds the reason there
        self._rank.hear(verdict)

    def _store_is(self, error: StoreError | None = None) -> None:
        news = "the control store answers again" if error is None else f"{error}; fault-free steps go on without it"
        print(f"megatron_ft: group {self.group}: {news}", flush=True)

    @contextmanager
    def _until_lost(self) -> Iterator[None]:
        """When another rank of this group is gone, this one has nothing to do here any more."""
        try:
            yield
        except Lost as lost:
            why = str(lost)
        else:
            return
        wait_for_return(self._rank, self._store, self._census, why, lambda: self._leaving)
