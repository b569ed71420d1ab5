"""Pre-train a small GPT of megatron-core: tensor, pipeline, sequence and expert parallelism inside each group.

    megatron-ft launch --groups 2 --config examples/pretrain_gpt_megatron/ds_config.json --run-dir runs/megatron \
        examples/pretrain_gpt_megatron/train.py -- --data data/sotu --steps 20
    megatron-ft launch --groups 2 --megatron --run-dir runs/without examples/pretrain_gpt_megatron/train.py -- \
        --data data/sotu --train-iters 20 --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 16

Arguments have Megatron-LM's names. What both an argument and the run's config say must agree. With `launch --megatron` the
config follows from the arguments; with `--config` alone they can be left out. `--data` is a directory made by `megatron-ft
prepare`, or the `.bin` and `.idx` of Megatron's own corpora, named as for `--data-path`: `--data PREFIX --vocab-size
50257`, or a blend, `--data 0.7 A 0.3 B`. A group is `pipeline.stages` x `fault_tolerance.inner_shards` (Megatron's
data-parallel ranks) x `tensor_parallel.autotp_size` ranks. The lines marked `ft` make the script fault-tolerant.
"""

import sys
from functools import partial
from pathlib import Path

import on_cpu
import torch

import megatron_ft  # ft
from megatron_ft.config import megatron_arguments
from megatron_ft.data import open_corpora

on_cpu.install()  # without a GPU, for trying it: before megatron-core is used

import arguments  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402


def forward_step(batches, model):
    batch = next(batches)
    device = next(model.parameters()).device
    tokens, labels = batch["input_ids"].to(device), batch["labels"].to(device)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=device).triu(1)[None, None]
    return model(tokens, positions, hidden, labels=labels), loss_fn


def loss_fn(losses):
    return losses.float().mean(), {}


def load(directory, chunks):
    """Load the newest model in a directory of Megatron's checkpoints. The optimizer copies weights, so it comes later."""
    step = int((Path(directory) / "latest_checkpointed_iteration.txt").read_text())
    place = f"{directory}/iter_{step:07d}"
    content = dist_checkpointing.load_content_metadata(place)
    parts = {str(number): chunk.sharded_state_dict(metadata=content) for number, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(parts, place)
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(number)])


def main() -> None:
    args = arguments.parse()
    session = megatron_ft.init(seed=args.seed)  # ft
    sizes = session.config
    megatron_arguments.check(sizes, sys.argv[1:])
    count = arguments.virtual_stages(args, sizes.stages)
    config = arguments.model_config(args, sizes, count)
    if args.vocab_size is None:
        dataset = session.dataset(args.data[0], seq_len=args.seq_length)  # ft: microbatch id -> tensors
    else:
        dataset = session.loader(open_corpora(args.data, args.seq_length, vocab_size=args.vocab_size))  # ft
    session.init_distributed()  # ft: instead of torch.distributed.init_process_group; the world is this group
    parallel_state.initialize_model_parallel(
        sizes.slices,
        sizes.stages,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed + parallel_state.get_pipeline_model_parallel_rank())
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization, qk_layernorm=config.qk_layernorm
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    build = partial(
        GPTModel,
        config,
        spec,
        args.vocab_size or dataset.vocab_size,
        args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    chunks = []
    for chunk in range(count):
        stage = chunk if count > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = build(pre_process=first, post_process=last, vp_stage=stage).to(args.device)
        chunks.append(DistributedDataParallel(config, ddp, model.bfloat16() if args.bf16 else model))
    if args.load:
        load(args.load, [chunk.module for chunk in chunks])
    how = OptimizerConfig(
        clip_grad=sizes.gradient_clipping,
        bf16=args.bf16,
        params_dtype=config.params_dtype,
        **arguments.given(args, arguments.OPTIMIZER),
    )
    optimizer = get_megatron_optimizer(how, chunks, use_gloo_process_groups=False)
    batch = sizes.samples_per_microbatch * sizes.microbatches  # Megatron's scheduler counts samples
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=how.lr,
        min_lr=how.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=how.weight_decay,
        end_wd=how.weight_decay,
        wd_incr_steps=args.lr_decay_iters * batch,
        wd_incr_style="constant",
    )

    engine = session.megatron(chunks, optimizer, forward_step, scheduler, seq_length=args.seq_length)  # ft
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of forward_backward_func and optimizer.step
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
