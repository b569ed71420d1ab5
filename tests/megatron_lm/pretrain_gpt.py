"""What Megatron-LM's ``pretrain_gpt.py`` does, in our own words. It knows nothing of megatron_ft."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

_INTEGERS = ("tokens", "labels", "position_ids")


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        )
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization)
    if args.context_parallel_size > 1:
        from tests.megatron_lm import context_attention

        context_attention.put_into(spec)
    return GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def _is_first_or_last(vp_stage):
    options = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return mpu.is_pipeline_first_stage(**options) or mpu.is_pipeline_last_stage(**options)


def get_batch(iterator, vp_stage):
    """The first of the tensor-parallel ranks reads; the ranks of a context have a part of each sequence."""
    if not _is_first_or_last(vp_stage):
        return {"tokens": None, "position_ids": None, "labels": None, "loss_mask": None, "attention_mask": None}
    args = get_args()
    shape = (args.micro_batch_size, args.seq_length)
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(iterator)
        batch = {name: data[name].contiguous() for name in (*_INTEGERS, "loss_mask")}
    else:
        batch = {name: torch.empty(shape, dtype=torch.int64) for name in _INTEGERS}
        batch["loss_mask"] = torch.empty(shape)
    if mpu.get_tensor_model_parallel_world_size() > 1:
        group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
        for value in batch.values():
            torch.distributed.broadcast(value, source, group=group)
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    later = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
    return {**batch, "attention_mask": later[None, None]}


def loss_func(loss_mask, output):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message="found NaN in the local loss", tolerance=0.0, fatal=True
        )
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(iterator, model):
    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def _reads(vp_stage=None):
    return mpu.get_tensor_model_parallel_rank() == 0 and _is_first_or_last(vp_stage)


def train_valid_test_datasets_provider(sizes, vp_stage=None):
    args = get_args()
    each = [args.train_data_path, args.valid_data_path, args.test_data_path]
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        blend_per_split=[get_blend_from_list(path) for path in each] if any(each) else None,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, sizes, partial(_reads, vp_stage=vp_stage), config).build()


train_valid_test_datasets_provider.is_distributed = True

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider,
    )
