"""The engines under test. A new engine is one entry of :data:`KITS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_ft.run.engines.layout import Layout
from tests.conformance import model as toy


@dataclass(frozen=True)
class Kit(ABC):
    """One engine in one layout. ``exact``: it declares that equal microbatches give equal bits in every group. ``joint``:
    its ranks compute every microbatch together. ``overlaps``: it tells when a bucket is complete.
    ``tolerance``: a factor of the differences from fp32 that are allowed."""

    stages: int = 1
    shards: int = 1
    slices: int = 1
    exact: bool = True
    joint: bool = True
    overlaps: bool = True
    tolerance: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.stages * self.shards * self.slices

    def layout(self, rank: int) -> Layout:
        return Layout.of(rank, stages=self.stages, slices=self.slices, shards=self.shards)

    @abstractmethod
    def build(self, layout: Layout, dropout: float, settings: dict[str, Any]) -> Any:
        """Return an engine with the weights of ``model.whole``. ``torch.distributed`` is initialised."""

    @abstractmethod
    def tensors(self, engine: Any) -> dict[str, torch.Tensor]:
        """Return parameters and buffers as in ``model.whole().state_dict()``, each whole, those that this rank knows. All
        ranks call it."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def loss_of(settings: Mapping[str, Any]) -> Any:
    return toy.token_loss_fn if settings.get("loss_reduction") == "token" else toy.loss_fn


def adapted(options: Mapping[str, Any], module: nn.Module) -> None:
    """Make the blocks of a module as ``options`` say: ``checkpointed``, ``compiled``."""
    for block in module.modules():
        if isinstance(block, toy.Block):
            block.checkpointed = options.get("checkpointed", False)
            if options.get("compiled"):
                block.compile(backend="aot_eager")


class Native(Kit):
    def build(self, layout: Layout, dropout: float, settings: dict[str, Any]) -> Any:
        from megatron_ft.run.engines.torch_native import TorchNativeEngine

        model = toy.whole(dropout)
        adapted(self.options, model)
        return TorchNativeEngine(model, adamw(model.parameters()), loss_of(settings), **settings)

    def tensors(self, engine: Any) -> dict[str, torch.Tensor]:
        return dict(engine.model.state_dict())


class Fsdp(Kit):
    """FSDP2 over the shards, tensor parallelism over the slices."""

    def build(self, layout: Layout, dropout: float, settings: dict[str, Any]) -> Any:
        from torch.distributed.fsdp import fully_shard

        from megatron_ft.run.engines.fsdp import FsdpEngine

        mesh = init_device_mesh("cpu", (self.shards, self.slices), mesh_dim_names=("dp", "tp"))
        model = toy.whole(dropout)
        for block in list(model)[1:-1]:
            divide(block, mesh["tp"])
        if self.shards > 1:
            for block in list(model)[1:-1]:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        adapted(self.options, model)
        optimizer = adamw(model.parameters())
        own = {"layout": layout, "mesh": mesh["dp"], "divide": self.options.get("divide", "samples"), **settings}
        own["reduce"] = "each" if settings.get("exact_bits") else self.options.get("reduce", "each")
        return FsdpEngine(model, optimizer, loss_of(settings), **own)

    def tensors(self, engine: Any) -> dict[str, torch.Tensor]:
        return {name: full(tensor) for name, tensor in engine.model.state_dict().items()}


class Pipeline(Kit):
    """A pipeline of torch's, with tensor parallelism or FSDP2 inside its stages. ``options``: ``schedule``, its name;
    ``chunks``, the number of stages of each rank."""

    def build(self, layout: Layout, dropout: float, settings: dict[str, Any]) -> Any:
        from torch.distributed import pipelining
        from torch.distributed.fsdp import fully_shard

        from megatron_ft.run.engines.torch_pipeline import TorchPipeline

        mesh = init_device_mesh("cpu", (self.stages, self.shards, self.slices), mesh_dim_names=("pp", "dp", "tp"))
        chunks = self.options.get("chunks", 1)
        count, stages = self.stages * chunks, []
        for chunk in range(chunks):
            number = chunk * self.stages + layout.stage
            mine = range(number * toy.PARTS // count, (number + 1) * toy.PARTS // count)
            module = nn.Sequential(OrderedDict((str(one), toy.part(one, dropout)) for one in mine))
            for block in module:
                if isinstance(block, toy.Block):
                    divide(block, mesh["tp"])
            if self.shards > 1:
                fully_shard(module, mesh=mesh["dp"])
            adapted(self.options, module)
            group = mesh["pp"].get_group()
            stages.append(pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=group))
        optimizer = adamw([parameter for stage in stages for parameter in stage.submod.parameters()])
        loss = toy.of_tokens if settings.get("loss_reduction") == "token" else toy.of_outputs
        schedule = getattr(pipelining, self.options["schedule"])
        return TorchPipeline(stages, optimizer, loss, schedule, layout=layout, mesh=mesh, **settings)

    def tensors(self, engine: Any) -> dict[str, torch.Tensor]:
        return {name.partition(".")[2]: full(tensor) for name, tensor in engine.model.state_dict().items()}


class Megatron(Kit):
    """megatron-core's parallelism around the same model. ``options``: ``chunks``, the number of stages of each rank;
    ``distributed``: its distributed optimizer, and losses, learning rates and checks of losses as Megatron-LM has them."""

    def build(self, layout: Layout, dropout: float, settings: dict[str, Any]) -> Any:
        from examples.pretrain_gpt_megatron import on_cpu

        on_cpu.install()
        from megatron.core import parallel_state, rerun_state_machine
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer import TransformerConfig

        from megatron_ft.run.engines.megatron.megatron_engine import MegatronEngine
        from tests.conformance import megatron_model

        chunks = self.options.get("chunks", 1)
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(
                self.slices,
                self.stages,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                create_gloo_process_groups=False,
            )
        per_token = settings.get("loss_reduction") == "token"
        config = TransformerConfig(
            num_layers=toy.BLOCKS,
            hidden_size=toy.WIDTH,
            num_attention_heads=2,
            tensor_model_parallel_size=self.slices,
            pipeline_model_parallel_size=self.stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            calculate_per_token_loss=per_token,
            hidden_dropout=dropout,
        )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.options.get("distributed", False)
        )
        count = self.stages * chunks
        numbers = [chunk * self.stages + layout.stage for chunk in range(chunks)]
        stages = [megatron_model.Stage(config, number, count, dropout) for number in numbers]
        models = [DistributedDataParallel(config, ddp, stage) for stage in stages]
        how = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=settings["gradient_clipping"],
            use_distributed_optimizer=ddp.use_distributed_optimizer,
        )
        optimizer = get_megatron_optimizer(how, models, use_gloo_process_groups=False)
        for group in optimizer.param_groups:  # as torch.optim.AdamW in the reference: all weights decay
            group["weight_decay"], group["wd_mult"] = 0.1, 1.0
        sizes = {"seq_length": toy.LENGTH, "samples": toy.SAMPLES}
        step = megatron_model.forward_step(per_token, three=ddp.use_distributed_optimizer)
        if ddp.use_distributed_optimizer:
            rates = {
                "init_lr": 0.01,
                "max_lr": 0.01,
                "min_lr": 0.01,
                "lr_warmup_steps": 0,
                "lr_decay_style": "constant",
            }
            weights = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"}
            sizes["scheduler"] = OptimizerParamScheduler(
                optimizer, lr_decay_steps=100, wd_incr_steps=100, **rates, **weights
            )
            rerun_state_machine.destroy_rerun_state_machine()
            rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
        return MegatronEngine(models, optimizer, step, layout=layout, **sizes, **settings)

    def tensors(self, engine: Any) -> dict[str, torch.Tensor]:
        from tests.conformance import megatron_model

        return {name.partition(".")[2]: megatron_model.full(t) for name, t in engine._model.named_parameters()}


class DeepSpeed(Kit):
    """DeepSpeed's engine around the whole model. ``options``: ``stage`` of ZeRO; others are settings of DeepSpeed."""

    def build(self, layout: Layout, dropout: float, settings: dict[str, Any]) -> Any:
        from deepspeed.accelerator import get_accelerator

        from megatron_ft.config import schema
        from megatron_ft.run.engines.deepspeed import build

        build.init_communication()
        if "fp16" in self.options:  # whatever DeepSpeed thinks of this processor
            get_accelerator().is_fp16_supported = lambda: True
        own = {key: value for key, value in self.options.items() if key not in ("stage", "checkpointed")}
        zero = {"stage": self.options.get("stage", 0), "stage3_param_persistence_threshold": 100}
        zero |= {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000}  # not half a billion elements
        section = {"inner_shards": self.shards, "loss_reduction": settings.get("loss_reduction", "microbatch")}
        raw = {
            "train_micro_batch_size_per_gpu": toy.SAMPLES,
            "fault_tolerance": section,
            "zero_optimization": zero,
            **own,
        }
        run = schema.resolve(raw, groups=1, ranks_per_group=self.ranks)
        if self.stages > 1:
            model = self._pipeline(dropout, settings.get("loss_reduction") == "token")
            optimizer = adamw(model.parameters())
            return build.build(model, run, settings=lambda shared: settings, optimizer=optimizer)
        model = toy.whole(dropout)
        adapted(self.options, model)
        loss = loss_of(settings)
        return build.build(
            model, run, settings=lambda shared: settings, loss_fn=loss, optimizer=adamw(model.parameters())
        )

    def _pipeline(self, dropout: float, per_token: bool) -> nn.Module:
        from deepspeed.pipe import LayerSpec, PipelineModule

        class Part(LayerSpec):  # made at its stage only
            def build(self, log: bool = False) -> nn.Module:
                return toy.part(*self.module_args)

        layers = [Part(nn.Module, number, dropout) for number in range(toy.PARTS)]
        loss = toy.of_tokens if per_token else toy.of_outputs
        interval = 1 if self.options.get("checkpointed") else 0
        return PipelineModule(
            layers,
            num_stages=self.stages,
            loss_fn=loss,
            partition_method="uniform",
            activation_checkpoint_interval=interval,
            checkpointable_layers=["Block"],  # the embedding's input needs no gradient
        )

    def tensors(self, engine: Any) -> dict[str, torch.Tensor]:
        from deepspeed.runtime.zero import GatheredParameters

        module = engine.engine.module
        with GatheredParameters(list(module.parameters()), enabled=self.options.get("stage") == 3):
            return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def divide(block: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh.size() > 1:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


HALF = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}

KITS: dict[str, Kit] = {
    "torch-native": Native(joint=False),
    "fsdp 2": Fsdp(shards=2),
    "tp 2": Fsdp(slices=2),
    "tp 2 x fsdp 2": Fsdp(slices=2, shards=2),
    "pp 2": Pipeline(stages=2, options={"schedule": "Schedule1F1B"}),
    "pp 2 interleaved": Pipeline(stages=2, options={"schedule": "ScheduleInterleaved1F1B", "chunks": 2}),
    "pp 2 zero bubble": Pipeline(stages=2, options={"schedule": "ScheduleInterleavedZeroBubble", "chunks": 2}),
    "pp 2 x tp 2": Pipeline(stages=2, slices=2, options={"schedule": "Schedule1F1B"}),
    "pp 2 x fsdp 2": Pipeline(stages=2, shards=2, options={"schedule": "Schedule1F1B"}),
    "deepspeed zero 1": DeepSpeed(joint=False, options={"stage": 1}),
    "deepspeed zero 2": DeepSpeed(shards=2, options={"stage": 2}),
    "deepspeed zero 3": DeepSpeed(shards=2, options={"stage": 3}),
    "deepspeed zero 2, fp16": DeepSpeed(shards=2, tolerance=300, options={"stage": 2, "fp16": HALF}),
    "deepspeed zero 1, fp16": DeepSpeed(joint=False, overlaps=False, tolerance=300, options={"stage": 1, "fp16": HALF}),
    "torch-native, checkpointed": Native(joint=False, options={"checkpointed": True}),
    "fsdp 2, checkpointed": Fsdp(shards=2, options={"checkpointed": True}),
    "fsdp 2, reduced with the last": Fsdp(shards=2, options={"reduce": "last"}),
    "fsdp 2, parts of sequences": Fsdp(shards=2, options={"divide": "sequence"}),
    "fsdp 2, compiled": Fsdp(shards=2, options={"compiled": True}),
    "pp 2, checkpointed": Pipeline(stages=2, options={"schedule": "Schedule1F1B", "checkpointed": True}),
    "deepspeed zero 3, checkpointed": DeepSpeed(shards=2, options={"stage": 3, "checkpointed": True}),
    "deepspeed pp 2, checkpointed": DeepSpeed(stages=2, options={"pipeline": {"stages": 2}, "checkpointed": True}),
    "deepspeed pp 2": DeepSpeed(stages=2, options={"pipeline": {"stages": 2}}),
    "megatron dp 2": Megatron(shards=2),
    "megatron dp 2, distributed optimizer": Megatron(shards=2, options={"distributed": True}),
    "megatron pp 2 x tp 2": Megatron(stages=2, slices=2),
    "megatron pp 2, virtual stages": Megatron(stages=2, options={"chunks": 2}),
}
