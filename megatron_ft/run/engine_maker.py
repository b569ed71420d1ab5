"""What makes a rank's engine, and the torch world of its group, in which most engines communicate.

Failures it assumes: another rank of the group may vanish while an engine is made; ``until_lost`` then ends this rank.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from megatron_ft.config import parallelism
from megatron_ft.config.schema import AUTO
from megatron_ft.errors import ConfigError, EngineError
from megatron_ft.run.collectives.group_world import World
from megatron_ft.run.engines import loss_scaling
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Engine
from megatron_ft.run.engines.torch_native import LossFn, TorchNativeEngine
from megatron_ft.run.rank import Rank
from megatron_ft.run.step_timer import slots_of_group
from megatron_ft.types import given

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class EngineMaker:
    """The methods are those of ``run.session.Session`` with the same names, which describes their arguments.

    Args:
        rank: for which an engine is made.
        until_lost: context in which an error ends this rank as a lost rank of the group does.
    """

    def __init__(self, rank: Rank, until_lost: Callable[[], AbstractContextManager[None]]) -> None:
        env, self._rank, self._until_lost = rank.env, rank, until_lost
        self._config = env.config
        self._world: World | None = None
        self._mesh: DeviceMesh | None = None
        sizes = {"stages": env.config.stages, "slices": env.config.slices, "shards": env.config.inner_shards}
        self._layout = Layout.of(env.position, **sizes)

    def settings(self, shared: bool) -> dict[str, Any]:
        """Return the settings that all engines have (``run.engines.buckets.Bucketed``); ``shared``: the ranks of a group sum
        their gradients."""
        settings, ranks = self._config.fault_tolerance, self._config.ranks_per_group if shared else 1
        loss_scaling.refuse()
        return {
            "bucket_mb": None if settings.bucket_mb == AUTO else settings.bucket_mb,
            "gradient_clipping": self._config.gradient_clipping,
            "slots": self._config.max_groups * slots_of_group(ranks, self._config.digests),
            "loss_reduction": settings.loss_reduction,
            "seed": settings.seed,
            "exact_bits": self._config.exact_bits,
            **({} if shared else {"divide": settings.inner_shards_divide}),
        }

    # --- the group's world ----------------------------------------------------------------------------------------------

    def join_world(self, backend: str | None) -> None:
        if self._world is None:
            with self._until_lost():
                self._world = World.join(self._rank.env, self._rank.inner, backend)

    def init_distributed(self, backend: str | None) -> None:
        self.join_world(backend)
        expected = self._config.engine and importlib.util.find_spec("deepspeed") is not None
        if "deepspeed" in sys.modules or expected:
            from megatron_ft.run.engines.deepspeed import build

            build.init_communication()

    def mesh(self, device: str | None) -> DeviceMesh:
        self.join_world(None if device is None else {"cuda": "nccl"}.get(device, "gloo"))
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            layout, device = self._layout, device or ("cuda" if torch.cuda.is_available() else "cpu")
            sizes = layout.stages, layout.shards, layout.slices
            with self._making():
                self._mesh = init_device_mesh(device, sizes, mesh_dim_names=("pp", "dp", "tp"))
        return self._mesh

    def cut(self) -> None:
        """Unblock the training thread if it waits for a rank of the group that is gone."""
        if self._world is not None:
            self._world.cut()

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Note the process groups that are made meanwhile, which are aborted when a rank is lost."""
        with self._until_lost(), given(self._world).made_here():
            yield

    # --- engines --------------------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, scheduler: Any) -> Engine:
        parallelism.refuse_unused(self._config.engine, "session.wrap")
        _refuse_metric(scheduler, "session.wrap")
        what = "a model given to session.wrap"
        if not _is_divided(model):
            parallelism.refuse_whole_model(self._config, what)
            return TorchNativeEngine(model, optimizer, loss_fn, scheduler=scheduler, **self.settings(shared=True))
        from megatron_ft.run.engines.fsdp import FsdpEngine

        parallelism.refuse_stages(self._config, what)
        own = {"layout": self._layout, "mesh": self.mesh(None)["dp"], **self.settings(shared=False)}
        own["reduce"] = self._config.fault_tolerance.inner_shards_reduce
        with self._making():
            return FsdpEngine(model, optimizer, loss_fn, scheduler=scheduler, **own)

    def pipeline(self, *arguments: Any, scheduler: Any, split: Callable[[Any], Any] | None) -> Engine:
        from megatron_ft.run.engines.torch_pipeline import TorchPipeline, split_batch

        parallelism.refuse_unused(self._config.engine, "session.pipeline")
        _refuse_metric(scheduler, "session.pipeline")
        own = {"layout": self._layout, "mesh": self.mesh(None), **self.settings(shared=False)}
        with self._making():
            return TorchPipeline(*arguments, scheduler=scheduler, split=split or split_batch, **own)

    def megatron(self, *arguments: Any, reads: bool | None, **options: Any) -> Engine:
        from megatron_ft.run.engines.megatron.megatron_engine import MegatronEngine

        parallelism.refuse_unused(self._config.engine, "session.megatron")
        if self._world is None:
            raise EngineError(
                "session.megatron before session.init_distributed(), which makes this group Megatron's world"
            )
        divide = self._config.fault_tolerance.inner_shards_divide
        if divide != ("samples" if reads is None else "script"):
            raise ConfigError(
                f'fault_tolerance.inner_shards_divide is "{divide}", which session.megatron does not support; leave it out, '
                f"and use Megatron's sequence_parallel"
            )
        if reads is None and self._config.groups > 1:
            _refuse_save()
        own = {"layout": self._layout, "samples": self._config.samples_per_microbatch, **self.settings(shared=False)}
        own |= {"shares": self._config.shards, "reads": reads, **options}
        with self._making():
            return MegatronEngine(*arguments, **own)

    def deepspeed(self, model: nn.Module, **options: Any) -> Engine:
        from megatron_ft.run.engines.deepspeed import build

        self.init_distributed(None)
        with self._making():
            return build.build(model, self._config, settings=self.settings, **options)


def _refuse_metric(scheduler: Any, caller: str) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"{caller}: the session steps the scheduler after each step, without the metric that ReduceLROnPlateau needs; "
            f"give another scheduler, or none and set the learning rate of the optimizer's param_groups in the script"
        )


def _refuse_save() -> None:
    """Raise ``ConfigError`` if Megatron-LM's own functions, with the arguments of a script, would save checkpoints."""
    found = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if save := getattr(found, "save", None):
        raise ConfigError(
            f"--save {save}: each group is a world of its own to Megatron-LM, and all of them would write the same files "
            f"there; start Megatron-LM's own script with launch --megatron-lm, or leave --save out and set "
            f"fault_tolerance.checkpoint.directory"
        )


def _is_divided(model: nn.Module) -> bool:
    """Return whether ranks hold parts of the model's parameters, as DTensors. Does not import what defines these: it takes
    a second."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in model.parameters())
