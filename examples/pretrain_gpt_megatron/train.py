"""Pre-train a small GPT of megatron-core: tensor, pipeline, sequence and expert parallelism inside each group.

    megatron-ft launch --groups 2 --config examples/pretrain_gpt_megatron/ds_config.json --run-dir runs/megatron \
        examples/pretrain_gpt_megatron/train.py -- --data data/sotu --steps 20

`--data` is a directory made by `megatron-ft prepare`, or the `.bin` and `.idx` of Megatron's own corpora, named as for its
`--data-path`: `--data PREFIX --vocab-size 50257`, or a blend, `--data 0.7 A 0.3 B`. A group is `pipeline.stages` x
`fault_tolerance.inner_shards` (Megatron's data-parallel ranks) x `tensor_parallel.autotp_size` ranks. With `--experts` the
layers are mixtures of experts, divided over the data-parallel ranks. With `--load` training starts from the model in a
distributed checkpoint of Megatron's, whatever its division was. The lines marked `ft` make it fault-tolerant.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import megatron_ft  # ft
from megatron_ft.data import open_corpora
from megatron_ft.engines.megatron import on_cpu

on_cpu.install()  # without a GPU, for trying it: before megatron-core is used

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=["data/sotu"], help="directory, PREFIX, or WEIGHT PREFIX ...")
    parser.add_argument("--vocab-size", type=int, help="number of token ids, for a PREFIX")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="initial weights, order of the samples, dropout")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--virtual-stages", type=int, default=1, help="model chunks of each rank of the pipeline")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument(
        "--experts", type=int, default=0, help="experts of each layer, divided over the data-parallel ranks"
    )
    parser.add_argument("--llama", action="store_true", help="a Llama: RMSNorm, SwiGLU, RoPE, two queries for each key")
    parser.add_argument(
        "--load", metavar="DIR", help="start from the model in this directory of Megatron's checkpoints"
    )
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    if args.vocab_size is None and not Path(args.data[0]).is_dir():
        parser.error(
            f"--data {' '.join(args.data)} is no directory made by `megatron-ft prepare`: give --vocab-size, too"
        )
    return args


def main() -> None:
    args = parse()
    session = megatron_ft.init(seed=args.seed)  # ft
    if args.vocab_size is None:
        dataset = session.dataset(args.data[0], seq_len=args.seq_len)  # ft: microbatch id -> tensors
    else:
        dataset = session.loader(open_corpora(args.data, args.seq_len))  # ft
    session.init_distributed()  # ft: instead of torch.distributed.init_process_group; the world is this group
    sizes = session.config
    parallel_state.initialize_model_parallel(
        sizes.slices,
        sizes.stages,
        virtual_pipeline_model_parallel_size=args.virtual_stages if args.virtual_stages > 1 else None,
        expert_model_parallel_size=sizes.inner_shards if args.experts else 1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed + parallel_state.get_pipeline_model_parallel_rank())
    mixture = {
        "num_moe_experts": args.experts,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": sizes.inner_shards,
        "add_bias_linear": False,
    }
    llama = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "num_query_groups": 2,
    }
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=4,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        tensor_model_parallel_size=sizes.slices,
        pipeline_model_parallel_size=sizes.stages,
        virtual_pipeline_model_parallel_size=args.virtual_stages if args.virtual_stages > 1 else None,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        overlap_p2p_comm=args.virtual_stages > 1,
        batch_p2p_comm=args.virtual_stages == 1,
        use_cpu_initialization=args.device == "cpu",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **((mixture if args.experts else {}) | (llama if args.llama else {})),
    )
    spec = get_gpt_layer_local_spec(num_experts=args.experts or None, normalization=config.normalization)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=args.distributed_optimizer)
    vocabulary = args.vocab_size or dataset.vocab_size
    build = partial(GPTModel, config, spec, vocabulary, args.seq_len, share_embeddings_and_output_weights=True)
    if args.llama:
        build = partial(build, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    chunks = []
    for chunk in range(args.virtual_stages):
        stage = chunk if args.virtual_stages > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = build(pre_process=first, post_process=last, vp_stage=stage).to(args.device)
        chunks.append(DistributedDataParallel(config, ddp, model.bfloat16() if args.bf16 else model))
    if args.load:
        load(args.load, [chunk.module for chunk in chunks])
    how = OptimizerConfig(
        lr=args.lr,
        min_lr=0.0,
        adam_beta2=0.95,
        weight_decay=0.1,
        clip_grad=sizes.gradient_clipping,
        use_distributed_optimizer=args.distributed_optimizer,
        bf16=args.bf16,
        params_dtype=config.params_dtype,
    )
    optimizer = get_megatron_optimizer(how, chunks, use_gloo_process_groups=False)
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": args.steps, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, 0.0, args.lr, 0.0, 10, args.steps + 10, "cosine", **decay)

    engine = session.megatron(chunks, optimizer, forward_step, scheduler, seq_length=args.seq_len)  # ft
    for step in session.steps(args.steps):  # ft
        result = session.train_step(engine, dataset)  # ft: instead of forward_backward_func and optimizer.step
        print(f"step {step}  loss {result.loss:.4f}  |g| {result.gradient_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
