"""The arguments of ``train.py``, with the names, types and defaults that Megatron-LM has.

Those of the model and the optimizer are fields of megatron-core's own configs. Megatron-LM has more of them: add a name to
``MODEL`` or ``OPTIMIZER`` for another field, or build the model of your own script.
"""

import argparse
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_ft.config.schema import RunConfig
from megatron_ft.errors import ConfigError

MODEL = """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels hidden_dropout
attention_dropout normalization layernorm_epsilon qk_layernorm init_method_std add_bias_linear add_qkv_bias sequence_parallel
bf16 num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_load_balancing_type
moe_aux_loss_coeff moe_z_loss_coeff moe_router_topk moe_router_score_function moe_router_pre_softmax
moe_router_enable_expert_bias moe_router_bias_update_rate moe_token_dispatcher_type recompute_granularity recompute_method
recompute_num_layers recompute_modules distribute_saved_activations""".split()
OPTIMIZER = (
    "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum use_distributed_optimizer".split()
)
RENAMED = {"num_moe_experts": "--num-experts"}


def add_fields(parser: argparse._ActionsContainer, of: type, names: Iterable[str]) -> None:
    """Add arguments for fields of a dataclass of megatron-core. An argument that is left out gets no attribute."""
    known, hints = {field.name: field for field in fields(of)}, get_type_hints(of)
    for name in names:
        argument = RENAMED.get(name, f"--{name.replace('_', '-')}")
        argument = known[name].metadata.get("argparse_meta", {}).get("arg_names", [argument])[0]
        kind = hints[name]
        if get_origin(kind) is Union:  # Optional, or one value or one for each layer
            kind = next(one for one in get_args(kind) if one is not NoneType)
        if kind is bool:
            options = {"action": "store_false" if known[name].default else "store_true"}
        elif get_origin(kind) is Literal:
            options = {"choices": get_args(kind)}
        elif get_origin(kind) is list:
            options = {"nargs": "+"}
        else:
            options = {"type": kind}
        parser.add_argument(argument, dest=name, default=argparse.SUPPRESS, help=f"{of.__name__}.{name}", **options)


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the fields that the command line has."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", "--data-path", nargs="+", default=["data/sotu"], help="directory, PREFIX, or WEIGHT PREFIX ..."
    )
    data.add_argument("--vocab-size", type=int, help="number of token ids, for a PREFIX")
    data.add_argument("--seq-length", type=int, default=128)
    model = parser.add_argument_group("model")
    add_fields(model, TransformerConfig, MODEL)
    model.add_argument("--swiglu", action="store_true")
    model.add_argument("--group-query-attention", action="store_true", help="needs --num-query-groups")
    model.add_argument("--max-position-embeddings", type=int, help="longest sequence (default: --seq-length)")
    model.add_argument("--position-embedding-type", choices=("learned_absolute", "rope"), default="learned_absolute")
    model.add_argument("--rotary-base", type=int, default=10000)
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--load", metavar="DIR", help="start from the model in this directory of Megatron's checkpoints")
    sizes = parser.add_argument_group("sizes", "left out: the config's; given: what the config says, too")
    for name in ("--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--expert-model-parallel-size"):
        sizes.add_argument(name, type=int)
    sizes.add_argument("--micro-batch-size", type=int, help="samples of a microbatch at each data-parallel rank")
    sizes.add_argument("--global-batch-size", type=int, help="samples of a step: groups x microbatches x samples")
    chunks = sizes.add_mutually_exclusive_group()
    chunks.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    chunks.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", "--train-iters", type=int, default=20)
    training.add_argument("--seed", type=int, default=1, help="initial weights, order of the samples, dropout")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.add_argument("--clip-grad", type=float, help="as gradient_clipping of the config")
    add_fields(training, OptimizerConfig, OPTIMIZER)
    training.add_argument("--lr-warmup-iters", type=int, default=0)
    training.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    training.add_argument(
        "--lr-decay-style", choices=("constant", "linear", "cosine", "inverse-square-root"), default="cosine"
    )
    parser.set_defaults(num_layers=4, hidden_size=128, num_attention_heads=4, lr=1e-3, min_lr=0.0, bf16=False)
    parser.set_defaults(use_distributed_optimizer=False, num_moe_experts=None, sequence_parallel=False)
    args = parser.parse_args()
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or max(args.steps, args.lr_warmup_iters + 1)
    if args.vocab_size is None and not Path(args.data[0]).is_dir():
        parser.error(
            f"--data {' '.join(args.data)} is no directory made by `megatron-ft prepare`: give --vocab-size, too"
        )
    if args.group_query_attention != hasattr(args, "num_query_groups"):
        parser.error("--group-query-attention and --num-query-groups belong together: give both or none of them")
    if args.max_position_embeddings < args.seq_length:
        parser.error(
            f"--max-position-embeddings is {args.max_position_embeddings} and --seq-length {args.seq_length}; raise it"
        )
    if args.lr_decay_iters <= args.lr_warmup_iters:
        parser.error(f"--lr-decay-iters is {args.lr_decay_iters}; it must be above --lr-warmup-iters")
    return args


def virtual_stages(args: argparse.Namespace, stages: int) -> int:
    """Return the number of model chunks of each rank of the pipeline."""
    layers = args.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return args.num_virtual_stages_per_pipeline_rank
    if layers < 1 or args.num_layers % (stages * layers):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage is {layers} and --num-layers {args.num_layers} over {stages} stages; "
            f"their product must divide the layers"
        )
    return args.num_layers // (stages * layers)


def model_config(args: argparse.Namespace, sizes: RunConfig, chunks: int) -> TransformerConfig:
    """Return megatron-core's config of the model. ``sizes``: the run's config; ``chunks``: of each rank."""
    experts = (args.expert_model_parallel_size or sizes.inner_shards) if args.num_moe_experts else 1
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    settings = given(args, MODEL)
    if args.swiglu:
        settings |= {"gated_linear_unit": True, "activation_func": F.silu}
    try:
        return TransformerConfig(
            tensor_model_parallel_size=sizes.slices,
            pipeline_model_parallel_size=sizes.stages,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            expert_model_parallel_size=experts,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            use_cpu_initialization=args.device == "cpu",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            **settings,
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"megatron-core refuses the arguments: {error}; correct them") from error
