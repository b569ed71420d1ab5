"""What Megatron-LM's arguments say in the config, and where they contradict it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from megatron_ft.config import megatron_arguments, schema
from megatron_ft.errors import ConfigError
from megatron_ft.run import engine_maker

WORDS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --hidden-size 128 "
    "--micro-batch-size 2 --global-batch-size=32 --data-path 0.7 A 0.3 B --bf16"
).split()


def test_a_config_follows_from_the_arguments():
    raw = {"fault_tolerance": {"reduction": "exact"}, "tensor_parallel": {"autotp_size": "auto"}}
    run = schema.resolve(megatron_arguments.settings(raw, WORDS, 4), groups=4)
    assert (run.stages, run.slices, run.inner_shards, run.ranks_per_group) == (2, 2, 2, 8)
    assert (run.samples_per_microbatch, run.microbatches_per_group) == (4, 2)  # 32 = 4 groups x 2 x (2 x 2 ranks)
    assert run.gradient_clipping == 1.0 and run.fault_tolerance.reduction == "exact"
    megatron_arguments.check(run, WORDS)
    assert raw == {"fault_tolerance": {"reduction": "exact"}, "tensor_parallel": {"autotp_size": "auto"}}


def test_what_is_left_out_is_as_the_config_has_it():
    raw = {"gradient_clipping": 0.5, "pipeline": {"stages": 3}, "gradient_accumulation_steps": 7}
    assert megatron_arguments.settings(raw, ["--num-layers", "4"], 2) == raw


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 1 makes pipeline.stages 1 .* says 2"),
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 4 makes tensor_parallel.autotp_size 4 .* says 1"),
        ("--expert-model-parallel-size 4", "--expert-model-parallel-size is 4 and fault_tolerance.inner_shards .* is 2"),
        ("--micro-batch-size 4", "--micro-batch-size 4 x .*inner_shards 2 makes train_micro_batch_size_per_gpu 8 .* says 4"),
        ("--global-batch-size 16", "--global-batch-size 16 makes train_batch_size .* 16 and the config says 24"),
        ("--clip-grad 1.0", "--clip-grad 1.0 makes gradient_clipping 1.0 and the config says 0.5"),
        ("--clip-grad -1", "--clip-grad is -1.0; it must be a number >= 0"),
        ("--context-parallel-size 2", "--context-parallel-size and --rampup-batch-size are not supported"),
        ("--rampup-batch-size 8 8 100", "--context-parallel-size and --rampup-batch-size are not supported"),
        ("--micro-batch-size two", "--micro-batch-size: invalid int value: 'two'"),
    ],
)  # fmt: skip
def test_an_argument_that_contradicts_the_config_is_refused(words, said):
    raw = {
        "pipeline": {"stages": 2},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "fault_tolerance": {"inner_shards": 2},
    }
    run = schema.resolve(raw, groups=3)
    with pytest.raises(ConfigError, match=said):
        megatron_arguments.check(run, words.split())
    if "--tensor" not in words:  # which the file leaves open
        with pytest.raises(ConfigError, match=said):
            megatron_arguments.settings(raw, words.split(), 3)


def test_a_script_that_saves_by_megatrons_own_functions_is_refused(monkeypatch):
    """Without --megatron-lm, every group would write the same files."""
    engine_maker._refuse_save()
    parsed = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(save="/shared/gpt"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", parsed)
    with pytest.raises(ConfigError, match=r"^--save /shared/gpt: .* launch --megatron-lm"):
        engine_maker._refuse_save()
