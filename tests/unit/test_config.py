"""Bad settings are refused with value, rule and remedy; good ones resolve to the batch they describe."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft import config
from megatron_ft.config import RunConfig
from megatron_ft.errors import ConfigError


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"gradient_acumulation_steps": 4}, ["gradient_acumulation_steps", "did you mean 'gradient_accumulation_steps'"]),
        ({"fault_tolerance": {"polcy": "x"}}, ["fault_tolerance.polcy", "did you mean 'policy'"]),
        ({"fault_tolerance": {"policy": "magic"}}, ["'magic'", "stacked_quota"]),
        ({"fault_tolerance": {"min_groups": 5}}, ["min_groups is 5", "4 groups", "lower it"]),
        ({"fault_tolerance": {"min_groups": 0}}, ["min_groups is 0", ">= 1"]),
        ({"fault_tolerance": {"min_groups": True}}, ["min_groups is True", "whole number"]),
        ({"fault_tolerance": {"bucket_mb": -1}}, ["bucket_mb is -1", "> 0"]),
        ({"fault_tolerance": {"bucket_mb": "big"}}, ["'big'", "number"]),
        ({"fault_tolerance": []}, ["fault_tolerance is []", "object"]),
        ({"fault_tolerance": {"detector": {"timeout": 3}}}, ["fault_tolerance.detector.timeout", "not known"]),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 8}, ["train_batch_size 10", "4 groups", "32"]),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
            ["train_batch_size is 64", "128", "drop one"],
        ),
        ({"train_batch_size": 2}, ["train_batch_size 2", "4 groups"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps is 0", ">= 1"]),
        ({"gradient_clipping": "no"}, ["gradient_clipping is 'no'", "number"]),
    ],
)
def test_bad_settings_are_refused(raw, words):
    with pytest.raises(ConfigError) as error:
        config.resolve(raw, groups=4)
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
        config.load(path, groups=4)
    assert all(word in str(error.value) for word in words)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(tmp_path / "nope.json", groups=4)


@given(groups=st.integers(1, 9), samples=st.integers(1, 9), per_group=st.integers(1, 9))
def test_any_two_of_the_three_batch_settings_give_the_third(groups, samples, per_group):
    full = {
        "train_batch_size": groups * samples * per_group,
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": per_group,
    }
    whole = config.resolve(full, groups=groups)
    assert whole.microbatches == groups * per_group
    for name in ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        rest = {key: value for key, value in full.items() if key != name}
        assert config.resolve(rest, groups=groups) == whole


def test_a_setting_of_deepspeed_that_is_not_used_is_named():
    with pytest.warns(UserWarning, match="zero_optimization"):
        config.resolve({"zero_optimization": {"stage": 1}}, groups=2)


def test_the_resolved_config_survives_json():
    resolved = config.resolve({"fault_tolerance": {"detector": {"report_timeout_s": 5}}}, groups=2)
    assert RunConfig.from_json(json.loads(json.dumps(resolved.to_json()))) == resolved
    assert resolved.fault_tolerance.detector.report_timeout_s == 5.0
