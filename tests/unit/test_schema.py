"""Bad settings are refused with value, rule and remedy; good ones resolve to the batch they describe."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import parallelism, schema
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.replication import placement as replication
from megatron_ft.core.replication.placement import shared_hosts
from megatron_ft.errors import ConfigError, EngineError


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"gradient_acumulation_steps": 4},
            ["gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'"],
        ),
        ({"fault_tolerance": {"polcy": "x"}}, ["fault_tolerance.polcy", "did you mean 'policy'"]),
        ({"fault_tolerance": {"policy": "magic"}}, ["'magic'", "stacked_quota"]),
        ({"fault_tolerance": {"min_groups": 5}}, ["min_groups is 5", "4 groups", "lower it"]),
        ({"fault_tolerance": {"skip_microbatches": "3/1.0"}}, ["skip_microbatches is '3/1.0'", "STEP/SHARD.INDEX"]),
        ({"fault_tolerance": {"skip_microbatches": ["3/1"]}}, ["skip_microbatches is ['3/1']", "STEP/SHARD.INDEX"]),
        ({"fault_tolerance": {"skip_microbatches": ["3/4.0"]}}, ["'3/4.0'", "shards 0 to 3"]),
        ({"fault_tolerance": {"skip_microbatches": [f"3/{n}.0" for n in range(4)]}}, ["all 4 microbatches of step 3"]),
        ({"fault_tolerance": {"min_groups": 0}}, ["min_groups is 0", ">= 1"]),
        ({"fault_tolerance": {"min_groups": True}}, ["min_groups is True", "whole number"]),
        ({"fault_tolerance": {"bucket_mb": -1}}, ["bucket_mb is -1", "> 0"]),
        ({"fault_tolerance": {"bucket_mb": "big"}}, ["'big'", '"auto" or a number > 0']),
        ({"fault_tolerance": {"reduce_dtype": "fp16"}}, ["reduce_dtype", "'fp16'", "fp32, bf16"]),
        ({"fault_tolerance": {"overlap": 1}}, ["overlap is 1", "true or false"]),
        ({"fault_tolerance": []}, ["fault_tolerance is []", "object"]),
        ({"fault_tolerance": {"detector": {"timeout": 3}}}, ["fault_tolerance.detector.timeout", "not known"]),
        ({"fault_tolerance": {"detector": {"stall_notice_s": 0}}}, ["detector.stall_notice_s is 0", "> 0"]),
        (
            {"fault_tolerance": {"detector": {"storage_timeout_s": 3600}}},
            ["detector.storage_timeout_s is 3600", 'collective_timeout_s is "auto", at most 1800', "raise that, too"],
        ),
        (
            {"fault_tolerance": {"detector": {"collective_timeout_s": 60, "outside_timeout_s": 90}}},
            ["detector.outside_timeout_s is 90", "collective_timeout_s is 60"],
        ),
        (
            {"fault_tolerance": {"rejoin": {"enabled": "yes"}}},
            ["fault_tolerance.rejoin.enabled is 'yes'", "true or false"],
        ),
        ({"fault_tolerance": {"rejoin": {"restarts_per_hour": 0}}}, ["rejoin.restarts_per_hour is 0", ">= 1"]),
        ({"fault_tolerance": {"rejoin": {"restarts": 2}}}, ["fault_tolerance.rejoin.restarts", "restarts_per_hour"]),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 8}, ["train_batch_size 10", "4 groups", "32"]),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
            ["train_batch_size is 64", "128", "drop one"],
        ),
        ({"train_batch_size": 2}, ["train_batch_size 2", "4 groups"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps is 0", ">= 1"]),
        ({"gradient_clipping": "no"}, ["gradient_clipping is 'no'", "number"]),
        ({"fault_tolerance": {"redundancy": "most"}}, ["redundancy is 'most'", '"auto" or a whole number >= 1']),
        ({"fault_tolerance": {"redundancy": 0}}, ["redundancy is 0", ">= 1"]),
        ({"fault_tolerance": {"redundancy": 2.0}}, ["redundancy is 2.0", "whole number"]),
        ({"fault_tolerance": {"redundancy": True}}, ["redundancy is True", "whole number"]),
        ({"fault_tolerance": {"redundancy": 5}}, ["redundancy is 5", "4 groups", "lower it", "--groups"]),
        ({"fault_tolerance": {"redundancy": 3}}, ["redundancy is 3", "at most one host", "up to redundancy 2", "full"]),
        (
            {"fault_tolerance": {"redundancy": 2, "placement": "full"}},
            ["redundancy is 2", "every shard", "leave it out"],
        ),
        ({"fault_tolerance": {"placement": "random"}}, ["'random'", "golomb, consecutive, full"]),
        ({"fault_tolerance": {"failure_domains": "rack1"}}, ["failure_domains is 'rack1'", "list", "each group"]),
        ({"fault_tolerance": {"failure_domains": ["a", "b"]}}, ["names 2 domains", "4 groups", "one for each"]),
        ({"fault_tolerance": {"failure_domains": [1, "1", 2, 2]}}, ["[1, '1', 2, 2]", "all of them strings or"]),
        ({"fault_tolerance": {"failure_domains": [True, False, True, False]}}, ["whole numbers"]),
        (
            {"fault_tolerance": {"failure_domains": list("abab"), "placement": "consecutive"}},
            ["failure_domains is given", 'placement is "consecutive"', "does not look at domains", '"golomb"'],
        ),
        ({"fp16": {"enabled": "false"}}, ['fp16.enabled is the string "false"', "write false without quotes"]),
        ({"fault_tolerance": {"rejoin": {"enabled": "True"}}}, ["rejoin.enabled is the string", "write true without"]),
        ({"zero_optimization": {"stage": 1, "cpu_offload": "false"}}, ["zero_optimization.cpu_offload is the string"]),
    ],
)
def test_bad_settings_are_refused(raw, words):
    with pytest.raises(ConfigError) as error:
        schema.resolve(raw, groups=4)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON", "line 1"]),
        ("[1]", ["list", "object"]),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', ["'gradient_clipping' is given twice"]),
        ("\x80", ["cannot be read"]),
    ],
)
def test_bad_files_are_refused(tmp_path, text, words):
    path = tmp_path / "c.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        schema.load(path, groups=4)
    assert all(word in str(error.value) for word in words)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        schema.load(tmp_path / "nope.json", groups=4)


@given(groups=st.integers(1, 9), samples=st.integers(1, 9), per_group=st.integers(1, 9))
def test_any_two_of_the_three_batch_settings_give_the_third(groups, samples, per_group):
    full = {
        "train_batch_size": groups * samples * per_group,
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": per_group,
    }
    whole = schema.resolve(full, groups=groups)
    assert whole.microbatches == groups * per_group
    for name in ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        rest = {key: value for key, value in full.items() if key != name}
        assert schema.resolve(rest, groups=groups) == whole


@pytest.mark.parametrize(
    ("groups", "section", "redundancy"),
    [
        (1, {}, 1),
        (2, {}, 1),
        (4, {}, 2),
        (9, {}, 3),  # SPARe's formula says 4, the Golomb property allows 3
        (9, {"placement": "consecutive"}, 4),
        (9, {"placement": "full"}, 9),
        (200, {}, 8),
        (600, {}, 10),
        (4, {"redundancy": 1}, 1),
        (4, {"redundancy": 3, "placement": "consecutive"}, 3),
        (4, {"redundancy": 4, "placement": "full"}, 4),
    ],
)
def test_the_redundancy_in_force_is_a_number(groups, section, redundancy):
    resolved = schema.resolve({"fault_tolerance": section}, groups=groups)
    assert resolved.fault_tolerance.redundancy == redundancy
    placement = schema.placement_of(resolved)
    assert (placement.groups, placement.redundancy) == (groups, redundancy)


@pytest.mark.parametrize("groups", [*range(1, 34), 64, 100])
def test_auto_is_possible_for_every_number_of_groups(groups):
    placement = schema.placement_of(schema.resolve({}, groups=groups))
    assert 1 <= placement.redundancy <= replication.optimal_redundancy(groups)
    assert groups == 1 or shared_hosts(placement) <= 1


def test_hosts_are_spread_over_failure_domains():
    resolved = schema.resolve({"fault_tolerance": {"failure_domains": ["a", "a", "b", "b"]}}, groups=4)
    placement = schema.placement_of(resolved)
    assert all(len({"aabb"[group] for group in placement.hosts[shard]}) == 2 for shard in range(4))


def test_impossible_domains_are_reported():
    section = {"failure_domains": [0, 0, 0, 1], "redundancy": 2}
    with pytest.warns(UserWarning, match="fault_tolerance.failure_domains: .*one per domain needs"):
        schema.resolve({"fault_tolerance": section}, groups=4)


def test_the_config_says_how_a_group_is_split():
    raw = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "bf16": {"enabled": True}}
    resolved = schema.resolve(raw, groups=3)
    assert (resolved.ranks_per_group, resolved.stages, resolved.slices) == (4, 2, 2)
    assert schema.resolve(raw, groups=3, ranks_per_group=4) == resolved
    assert schema.resolve({"pipeline": {"stages": "auto"}}, groups=3, ranks_per_group=5).ranks_per_group == 5
    assert schema.resolve({}, groups=3).ranks_per_group == 1


PIPELINE = {"pipeline": {"stages": 2}}


@pytest.mark.parametrize(
    ("raw", "ranks", "words"),
    [
        (
            PIPELINE,
            3,
            ["--ranks-per-group is 3", "pipeline.stages 2 x tensor_parallel.autotp_size 1", "are 2", "leave it out"],
        ),
        (
            PIPELINE,
            4,
            ["--ranks-per-group is 4", "data parallelism would be declared twice", "2 times as many --groups"],
        ),
        ({"zero_optimization": {"stage": 2}}, 2, ["stage is 2", "inner_shards to 2 in place of --ranks-per-group"]),
        ({"pipeline": {"stages": 0}}, None, ["pipeline.stages is 0", ">= 1"]),
        ({"pipeline": 2}, None, ["pipeline is 2", "object"]),
        ({"data_parallel_size": 4}, None, ["data_parallel_size is 4", "declared twice", "--groups"]),
        ({"mesh_param": [2, 2]}, None, ["mesh_param is [2, 2]", "declared twice"]),
        ({"elasticity": {"enabled": True}}, None, ["elasticity is enabled", "leave it out"]),
        ({**PIPELINE, "zero_optimization": {"stage": 3}}, None, ["stage is 3 and pipeline.stages 2", "0 or 1"]),
        ({**PIPELINE, "zero_optimization": {"stage": 2}}, None, ["stage is 2 and pipeline.stages 2", "0 or 1"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, None, ["offloads", "leave it out"]),
        (
            {"fp16": {"enabled": True}, "fault_tolerance": {"nonfinite": "stop"}},
            None,
            ["fp16", 'nonfinite is "stop"', "bf16"],
        ),
        (
            {**PIPELINE, "fault_tolerance": {"model": {"num_hidden_layers": 3}}},
            None,
            ["layers is 3", "use one of 1, 3"],
        ),
        (
            {"tensor_parallel": {"autotp_size": 4}, "fault_tolerance": {"model": {"num_attention_heads": 6}}},
            None,
            ["num_attention_heads is 6", "autotp_size is 4", "use one of 1, 2, 3, 6"],
        ),
        (
            {"tensor_parallel": {"autotp_size": 4}, "fault_tolerance": {"model": {"num_key_value_heads": 2}}},
            None,
            ["num_key_value_heads is 2", "autotp_size is 4"],
        ),
        (
            {"fault_tolerance": {"model": {"hidden_size": 10, "num_attention_heads": 4}}},
            None,
            ["hidden_size is 10", "4"],
        ),
        ({"fault_tolerance": {"model": {"num_hidden_layers": "many"}}}, None, ["num_hidden_layers is 'many'", ">= 1"]),
        ({"fault_tolerance": {"model": 7}}, None, ["fault_tolerance.model is 7", "config.json"]),
    ],
)
def test_an_impossible_split_of_a_group_is_refused(raw, ranks, words):
    with pytest.raises(ConfigError) as error:
        schema.resolve(raw, groups=2, ranks_per_group=ranks)
    for word in words:
        assert word in str(error.value)


def test_a_model_that_is_not_split_contradicts_stages():
    with pytest.raises(EngineError, match="pipeline.stages is 2, .* the model is not divided"):
        parallelism.refuse_whole_model(schema.resolve(PIPELINE, groups=2), "the model")
    parallelism.refuse_whole_model(schema.resolve({"zero_optimization": {"stage": 1}}, groups=2), "the model")


def test_the_ranks_of_a_group_are_stages_times_slices_times_shards():
    raw = {**PIPELINE, "train_micro_batch_size_per_gpu": 6, "fault_tolerance": {"inner_shards": 3}}
    assert schema.resolve(raw, groups=2).ranks_per_group == 6
    with pytest.raises(ConfigError, match="inner_shards is 3, among which .* divided evenly; use a multiple of 3"):
        schema.resolve({**raw, "train_micro_batch_size_per_gpu": 4}, groups=2)
    with pytest.raises(ConfigError, match="fault_tolerance.inner_shards 3 are 6"):
        schema.resolve(raw, groups=2, ranks_per_group=4)


def test_the_model_may_be_in_a_file_of_its_own(tmp_path):
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "model_type": "llama"}
    (tmp_path / "llama.json").write_text(json.dumps(shape))
    (tmp_path / "ds.json").write_text(json.dumps({"fault_tolerance": {"model": "llama.json"}}))
    assert schema.load(tmp_path / "ds.json", groups=2).model == shape
    (tmp_path / "ds.json").write_text(json.dumps({"fault_tolerance": {"model": "lama.json"}}))
    with pytest.raises(ConfigError, match="fault_tolerance.model .*lama.json does not exist"):
        schema.load(tmp_path / "ds.json", groups=2)


@pytest.mark.parametrize(("policy", "factor"), [("drop", 0.0), ("stacked_quota", 2.0)])
def test_with_drop_no_group_counts_as_slow(policy, factor):
    section = {"policy": policy, "detector": {"straggler_factor": 2}}
    run = schema.resolve({"fault_tolerance": section}, groups=3)
    assert run.fault_tolerance.detector.straggler_factor == factor
    job = schema.job_of(run, schema.placement_of(run), buckets=2, steps=5)
    assert (job.straggler_factor, job.policy.shrinks, job.buckets, job.steps) == (factor, policy == "drop", 2, 5)


def test_the_resolved_config_survives_json():
    section = {"detector": {"report_timeout_s": 5}, "failure_domains": ["a", "b"], "skip_microbatches": ["3/1.0"]}
    section["rejoin"] = {"enabled": True, "restarts_per_hour": 2}
    resolved = schema.resolve({"fault_tolerance": section}, groups=2)
    assert RunConfig.from_json(json.loads(json.dumps(resolved.to_json()))) == resolved
    assert resolved.fault_tolerance.detector.report_timeout_s == 5.0


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ({"bf16": {"enabled": True}, "steps_per_print": 5}, "bf16"),
        ({"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}, "optimizer, scheduler"),
        ({"zero_optimization": {"stage": 1}}, "zero_optimization"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types"),
    ],
)
def test_settings_that_affect_the_result_and_that_an_engine_would_ignore_are_refused(engine, names):
    with pytest.raises(ConfigError, match=f"sets {names}, which only session.deepspeed uses"):
        parallelism.refuse_unused(engine, "session.wrap")


def test_settings_that_are_off_or_without_effect_are_no_reason_to_refuse():
    off = {
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 0},
        "pipeline": {"stages": 1},
        "sparse_gradients": False,
    }
    parallelism.refuse_unused({**off, "wandb": {"enabled": True}}, "session.wrap")
    with pytest.raises(ConfigError, match="sets bf16"):
        parallelism.refuse_unused({**off, "bf16": {"enabled": True}}, "session.wrap")


@pytest.mark.parametrize(
    ("section", "groups", "message"),
    [
        ({"policy": "spare", "redundancy": 1}, 4, "a shard without a second host ends the attempt"),
        ({"policy": "spare"}, 2, 'fault_tolerance.redundancy is 1 with 2 groups and placement "golomb"'),
        ({"policy": "recover", "redundancy": 2}, 4, "any group computes any microbatch: leave it out"),
        ({"policy": "replication", "redundancy": 3}, 8, "divide the number of groups: 2 4 8"),
        ({"policy": "replication"}, 1, "none, start with more groups"),
        ({"policy": "replication", "failure_domains": [0, 0, 1, 1]}, 4, "copies are neighbouring groups"),
        ({"policy": "spare", "standby": "slack"}, 4, "has standby work of its own or none"),
        ({"policy": "restart"}, 4, "checkpoint.directory is empty"),
    ],
)
def test_a_policy_that_the_run_cannot_have_is_refused(section, groups, message):
    with pytest.raises(ConfigError, match=message):
        schema.resolve({"fault_tolerance": section}, groups=groups)


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({}, 0),
        ({"standby": "slack"}, 1),
        ({"policy": "spare", "redundancy": 3}, 2),
        ({"policy": "replication"}, 1),
        ({"policy": "recover"}, 1),
    ],
)
def test_standby_work_that_may_need_too_much_memory_is_refused(section, parts):
    run = schema.resolve({"fault_tolerance": {**section, "standby_memory_gb": 1.0}}, groups=8)
    schema.check_standby_memory(run, 10**9 // max(parts, 1))
    if parts:
        with pytest.raises(ConfigError, match=f"may stand by for {parts} others, with .* GB of gradients for each"):
            schema.check_standby_memory(run, 10**9 // parts + 1000)
    unbounded = schema.resolve({"fault_tolerance": section}, groups=8)
    schema.check_standby_memory(unbounded, 10**15)


@pytest.mark.parametrize("gone", ["staged", "reconfigure"])
def test_a_communicator_of_an_earlier_version_is_refused_with_the_remedy_and_its_record_can_be_read(gone):
    with pytest.raises(ConfigError, match=f'communicator is "{gone}", which is gone; use "gloo"'):
        schema.resolve({"fault_tolerance": {"communicator": gone}}, groups=2)
    raw = schema.resolve({}, groups=2).to_json()
    raw["fault_tolerance"]["communicator"] = gone
    assert RunConfig.from_json(raw).fault_tolerance.communicator == "gloo"
