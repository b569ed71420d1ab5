"""The cost of our data parallelism between groups beside each engine's own, when nothing fails.

    python benchmarks/engines.py [--pairs 30] [--kinds NAME ...]

Same model, same microbatches, same number of ranks, both clip, no dropout. Two jobs live side by side, ours and the engine
alone, and take turns step by step: while one trains, the other waits in a socket. Each turn is timed from outside, from
the word to start until the last rank is done. Both have to compute the same losses. Two groups against one world with data
parallelism 2 between replicas:

    deepspeed           2 ranks: one DeepSpeedEngine each
    deepspeed zero 2/3  4 ranks: ZeRO inside groups of two, against ZeRO over all four
    deepspeed pipeline  4 ranks: PipelineModules of two stages
    fsdp                4 ranks: FSDP2 inside groups of two, against FSDP2's HSDP
    torch pipeline      4 ranks: torch's 1F1B over two stages, against the same with DistributedDataParallel around stages
    megatron            2 ranks: megatron-core, on the stand-in for a GPU in both
    megatron pipeline   4 ranks: two stages each

DeepSpeed's all-reduce through shared memory is off in both: it is for one host only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import common
import torch
import torch.distributed as dist

GROUPS, PER_GROUP, SAMPLES, SEQ_LEN = 2, 4, 2, 64
LAYERS, WIDTH, HEADS = 6, 384, 6
MODEL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": SEQ_LEN,
}
WAIT = timedelta(minutes=5)
WARMUP = 3
LIMIT = 1.02
LR = 1e-4
"""Without warm-up a larger one makes the loss jump, which multiplies differences of a rounding."""
EXAMPLES = common.ROOT / "examples"

ALIKE = 1e-5
Losses = Sequence[Any]
"""Of a rank's microbatches, or of the whole step."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--job", nargs=4, metavar=("SYSTEM", "KIND", "DATA", "PORT"), help="of the processes it starts")
    options = parser.parse_args()
    if options.job:
        system, kind, data, port = options.job
        return job(system, kind, Path(data), int(port), options.pairs)
    results = {kind: compare(kind, options.pairs) for kind in options.kinds}
    if options.kinds == list(KINDS):
        print(f"raw numbers in {common.save('engines', {'limit': LIMIT, 'results': results})}")
    good = all(found["ratio"] <= LIMIT and found["losses_differ_by"] <= ALIKE for found in results.values())
    return 0 if good else 1


# --- the process that times -------------------------------------------------------------------------------------------


def compare(kind: str, pairs: int) -> dict[str, Any]:
    turns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)
    ranks = GROUPS * KINDS[kind].ranks
    with tempfile.TemporaryDirectory() as temporary:
        data = common.prepare_data(Path(temporary) / "data")
        own = ["--pairs", str(pairs), "--job"]
        jobs = {"ours": start_ours(kind, Path(temporary), [*own, "ours", kind, str(data), str(turns.port)])}
        jobs["alone"] = start_alone(kind, [*own, "alone", kind, str(data), str(turns.port)])
        try:
            found = take_turns(turns, jobs, pairs)
            losses = {system: [loss_of(turns, system, number) for number in range(pairs)] for system in jobs}
        finally:
            for processes in jobs.values():
                for process in processes:
                    process.terminate()
                    process.wait()
    ours, alone = (statistics.median(found[system]) for system in ("ours", "alone"))
    ratios = sorted(mine / other for mine, other in zip(found["ours"], found["alone"], strict=True))
    ratio, quarter = statistics.median(ratios), len(ratios) // 4
    off = max(abs(o - a) / a for o, a in zip(losses["ours"], losses["alone"], strict=True))
    spread = f"{ratios[quarter]:.3f} to {ratios[-quarter - 1]:.3f}"
    print(
        f"{kind}: ours {1e3 * ours:.1f} ms, alone {1e3 * alone:.1f} ms, median ratio of the pairs {ratio:.3f} (half of them "
        f"{spread}); losses of {pairs} steps differ by up to {off:.0e}",
        flush=True,
    )
    seconds = {"ours_s": found["ours"], "alone_s": found["alone"]}
    return {"ranks": ranks, "ratio": ratio, "losses_differ_by": off, **seconds, "losses": losses["ours"]}


def take_turns(turns: dist.TCPStore, jobs: dict[str, list[subprocess.Popen]], pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each step of both. The job that begins a pair alternates, too."""
    found: dict[str, list[float]] = {system: [] for system in jobs}
    for system in jobs:
        turns.wait([f"{system}/ready/all"])
    for number in range(WARMUP + pairs):
        for system in sorted(jobs, reverse=bool(number % 2)):
            began = time.perf_counter()
            turns.set(f"{system}/go/{number}", "")
            turns.wait([f"{system}/done/{number}/all"])
            if number >= WARMUP:
                found[system].append(time.perf_counter() - began)
    turns.set("end", "")
    return found


def loss_of(turns: dist.TCPStore, system: str, number: int) -> float:
    """Return the mean of what the ranks of a job have found as the loss of a step."""
    name = f"{system}/loss/{number}"
    turns.wait([f"{system}/lost/{number}/all"])
    said = [float(turns.get(f"{name}/{place}")) for place in range(1, turns.add(name, 0) + 1)]
    return statistics.mean(said)


def start_ours(kind: str, directory: Path, arguments: list[str]) -> list[subprocess.Popen]:
    section = {"model": MODEL, "detector": {"straggler_factor": 0}, **KINDS[kind].section}
    (directory / "ours.json").write_text(json.dumps({**settings(kind), "fault_tolerance": section}))
    command = common.launch(GROUPS, directory / "ours.json", directory / "run", __file__, "--", *arguments)
    return [subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)]


def start_alone(kind: str, arguments: list[str]) -> list[subprocess.Popen]:
    ranks = GROUPS * KINDS[kind].ranks
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(common.free_port())}
    return [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**environment(), **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(common.ROOT)}


def settings(kind: str) -> dict[str, Any]:
    """Return the settings of the batch and of DeepSpeed, the same in both."""
    batch = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": PER_GROUP}
    return {**batch, "gradient_clipping": 1.0, **KINDS[kind].engine}


# --- a rank -----------------------------------------------------------------------------------------------------------


def job(system: str, kind: str, data: Path, port: int, pairs: int) -> int:
    turns = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)
    steps = WARMUP + pairs
    step = ours(kind, data, steps) if system == "ours" else alone(kind, data, steps)
    meet(turns, f"{system}/ready", kind)
    for number in range(steps):
        turns.wait([f"{system}/go/{number}"])
        found = next(step)
        meet(turns, f"{system}/done/{number}", kind)
        if found:  # not at the first stages of a pipeline
            name = f"{system}/loss/{number}"
            turns.set(
                f"{name}/{turns.add(name, 1)}", str(statistics.mean(torch.as_tensor(one).item() for one in found))
            )
        meet(turns, f"{system}/lost/{number}", kind)
    turns.wait(["end"])  # a job that ends while the other still trains would disturb it
    list(step)
    return 0


def meet(turns: dist.TCPStore, name: str, kind: str) -> None:
    if turns.add(name, 1) == GROUPS * KINDS[kind].ranks:
        turns.set(f"{name}/all", "")


def ours(kind: str, data: Path, steps: int) -> Iterator[Losses]:
    import megatron_ft

    session = megatron_ft.init()
    dataset = session.dataset(data, seq_len=SEQ_LEN)
    engine = KINDS[kind].ours(session, kind, dataset.vocab_size)

    def train() -> Iterator[Losses]:
        for _ in session.steps(steps):
            yield [session.train_step(engine, dataset).loss]

    return train()


def alone(kind: str, data: Path, steps: int) -> Iterator[Losses]:
    from megatron_ft.data.dataset import PackedDataset
    from megatron_ft.types import Microbatch

    if "deepspeed" in kind:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    sizes = {"samples_per_microbatch": SAMPLES, "groups": GROUPS, "microbatches_per_group": PER_GROUP, "seed": 0}
    dataset = PackedDataset(data, seq_len=SEQ_LEN, **sizes)
    shards = KINDS[kind].section.get("inner_shards", 1)
    # Of the ranks of a pipeline, the data axis is the inner one; of shards, the outer one.
    replica, shard = dist.get_rank() % GROUPS, 0
    if shards > 1:
        replica, shard = divmod(dist.get_rank(), shards)

    def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(PER_GROUP):
            whole = dataset(Microbatch(step, replica, index))
            yield {name: one.chunk(shards)[shard] for name, one in whole.items()}

    train_step = KINDS[kind].alone(kind, dataset.vocab_size)
    return (train_step(batches(step)) for step in range(steps))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def example(name: str) -> None:
    sys.path.insert(0, str(EXAMPLES / name))


def plain_model(vocab_size: int) -> tuple[Any, Any]:
    """Return the GPT of plain PyTorch's example, and its loss function."""
    example("pretrain_gpt")
    from model import GPT, GPTConfig
    from train import loss_fn

    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size, LAYERS, WIDTH, HEADS, SEQ_LEN, dropout=0.0)), loss_fn


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def ours_deepspeed(session: Any, kind: str, vocab_size: int) -> Any:
    session.init_distributed()
    model, optimizer, loss_fn = made_for_deepspeed(kind, session.config, vocab_size)
    return session.deepspeed(model, optimizer=optimizer, **({"loss_fn": loss_fn} if loss_fn else {}))


def alone_deepspeed(kind: str, vocab_size: int) -> Any:
    import deepspeed

    from megatron_ft.config import schema

    raw = {**settings(kind), "fault_tolerance": {"model": MODEL}}
    model, optimizer, loss_fn = made_for_deepspeed(kind, schema.resolve(raw, groups=GROUPS), vocab_size, GROUPS)
    shards = KINDS[kind].section.get("inner_shards", 1)
    config = {"zero_optimization": {"stage": 0}, **settings(kind), "steps_per_print": 2**31}
    config["train_micro_batch_size_per_gpu"] = SAMPLES // shards
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(batches: Iterator[Any]) -> Losses:
        if loss_fn is None:
            return [engine.train_batch((batch["input_ids"], batch["labels"]) for batch in batches)]
        losses = []
        for batch in batches:
            losses.append(loss_fn(engine, batch))
            engine.backward(losses[-1])
            engine.step()
        return losses

    return train


def made_for_deepspeed(kind: str, run: Any, vocab_size: int, data_axis: int = 1) -> tuple[Any, Any, Any]:
    """Return model, optimizer, and the loss function where the model is no pipeline."""
    if kind != "deepspeed pipeline":
        model, loss_fn = plain_model(vocab_size)
        return model, adamw(model.parameters()), loss_fn
    example("pretrain_gpt_deepspeed")
    import model as module

    topology = module.PipeModelDataParallelTopology
    module.PipeModelDataParallelTopology = lambda **axes: topology(**{**axes, "num_dp": data_axis})
    model = module.build(run, vocab_size, 1)
    return model, adamw(model.parameters()), None


# --- torch ------------------------------------------------------------------------------------------------------------


def sharded(vocab_size: int, mesh: Any) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model, loss_fn = plain_model(vocab_size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, loss_fn


def ours_fsdp(session: Any, kind: str, vocab_size: int) -> Any:
    model, loss_fn = sharded(vocab_size, session.mesh("cpu")["dp"])
    return session.wrap(model, adamw(model.parameters()), loss_fn)


def alone_fsdp(kind: str, vocab_size: int) -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (GROUPS, 2), mesh_dim_names=("replica", "shard"))
    model, loss_fn = sharded(vocab_size, mesh)
    optimizer = adamw(model.parameters())

    def train(batches: Iterator[Any]) -> Losses:
        losses = []
        for index, batch in enumerate(batches):
            model.set_requires_all_reduce(index == PER_GROUP - 1)
            losses.append(loss_fn(model, batch))
            (losses[-1] / PER_GROUP).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return train


def stage_of(vocab_size: int, number: int) -> Any:
    example("pretrain_gpt_native3d")
    from model import GPTConfig, Stage

    return Stage(GPTConfig(vocab_size, LAYERS, WIDTH, HEADS, SEQ_LEN, dropout=0.0), number, 2, 1)


def pipeline_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def ours_pipeline(session: Any, kind: str, vocab_size: int) -> Any:
    from torch.distributed import pipelining

    mesh = session.mesh("cpu")["pp"]
    module = stage_of(vocab_size, mesh.get_local_rank())
    stage = pipelining.PipelineStage(module, mesh.get_local_rank(), 2, torch.device("cpu"), group=mesh.get_group())
    return session.pipeline([stage], adamw(module.parameters()), pipeline_loss, pipelining.Schedule1F1B)


def alone_pipeline(kind: str, vocab_size: int) -> Any:
    from torch.distributed import pipelining

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, GROUPS), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    module = stage_of(vocab_size, number)
    replicated = torch.nn.parallel.DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    stage = pipelining.PipelineStage(replicated, number, 2, device, group=group)
    schedule = pipelining.Schedule1F1B(stage, PER_GROUP, pipeline_loss)
    optimizer = adamw(module.parameters())

    def train(batches: Iterator[Any]) -> Losses:
        losses: list[torch.Tensor] = []
        listed = list(batches)
        tokens, labels = (torch.cat([batch[name] for batch in listed]) for name in ("input_ids", "labels"))
        schedule.step(
            *((tokens,) if number == 0 else ()),
            **({"target": labels, "losses": losses} if number else {}),
            return_outputs=False,
        )
        square = sum(p.grad.square().sum() for p in module.parameters())
        dist.all_reduce(square, group=group)
        torch._foreach_mul_([p.grad for p in module.parameters()], (1 / (square.sqrt() + 1e-6)).clamp(max=1))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return train


# --- Megatron ---------------------------------------------------------------------------------------------------------


def megatron_parts(vocab_size: int, stages: int) -> tuple[Any, Any, Any]:
    """Return the model chunks, the optimizer, and the example's module."""
    example("pretrain_gpt_megatron")
    import train as script
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(1, stages, create_gloo_process_groups=False)
    script.tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = script.GPTModel(
        config, script.get_gpt_layer_local_spec(), vocab_size, SEQ_LEN, share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    ddp = script.DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = [script.DistributedDataParallel(config, ddp, model)]
    how = script.OptimizerConfig(lr=LR, adam_beta2=0.95, weight_decay=0.1, clip_grad=1.0)
    return chunks, script.get_megatron_optimizer(how, chunks, use_gloo_process_groups=False), script


def ours_megatron(session: Any, kind: str, vocab_size: int) -> Any:
    session.init_distributed()
    chunks, optimizer, script = megatron_parts(vocab_size, session.config.stages)
    return session.megatron(chunks, optimizer, script.forward_step, seq_length=SEQ_LEN)


def alone_megatron(kind: str, vocab_size: int) -> Any:
    chunks, optimizer, script = megatron_parts(vocab_size, KINDS[kind].ranks)
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    run = get_forward_backward_func()
    losses: list[torch.Tensor] = []

    def forward_step(batches: Iterator[Any], model: Any) -> Any:
        output, loss_fn = script.forward_step(batches, model)

        def noted(output: torch.Tensor) -> Any:
            found = loss_fn(output)
            losses.append(found[0].clone())  # the schedule divides it in place
            return found

        return output, noted

    def train(batches: Iterator[Any]) -> Losses:
        losses.clear()
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        sizes = {"num_microbatches": PER_GROUP, "seq_length": SEQ_LEN, "micro_batch_size": SAMPLES}
        run(forward_step_func=forward_step, data_iterator=batches, model=chunks, forward_only=False, **sizes)
        optimizer.step()
        return losses

    return train


@dataclass(frozen=True)
class Kind:
    """``ranks`` of each group; the two sides; settings of DeepSpeed, and of the section ``fault_tolerance``."""

    ranks: int
    ours: Callable[[Any, str, int], Any]
    alone: Callable[[str, int], Callable[[Iterator[Any]], Losses]]
    engine: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)


_TWO_STAGES, _TWO_SHARDS = {"pipeline": {"stages": 2}}, {"inner_shards": 2}
KINDS = {
    "deepspeed": Kind(1, ours_deepspeed, alone_deepspeed),
    "deepspeed zero 2": Kind(2, ours_deepspeed, alone_deepspeed, {"zero_optimization": {"stage": 2}}, _TWO_SHARDS),
    "deepspeed zero 3": Kind(2, ours_deepspeed, alone_deepspeed, {"zero_optimization": {"stage": 3}}, _TWO_SHARDS),
    # DeepSpeed alone clips each stage by its own norm, so the limit is one that no norm reaches.
    "deepspeed pipeline": Kind(2, ours_deepspeed, alone_deepspeed, {**_TWO_STAGES, "gradient_clipping": 1e3}),
    "fsdp": Kind(2, ours_fsdp, alone_fsdp, {}, _TWO_SHARDS),
    "torch pipeline": Kind(2, ours_pipeline, alone_pipeline, _TWO_STAGES),
    "megatron": Kind(1, ours_megatron, alone_megatron),
    "megatron pipeline": Kind(2, ours_megatron, alone_megatron, _TWO_STAGES),
}


if __name__ == "__main__":
    sys.exit(main())
