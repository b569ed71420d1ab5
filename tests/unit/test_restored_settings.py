"""A run that goes on from a checkpoint has the settings of the one that saved it, where these affect the result."""

from __future__ import annotations

from dataclasses import fields

from megatron_ft.config.schema import FaultToleranceConfig, resolve
from megatron_ft.run.checkpoint import restore

CONFIG = {"fault_tolerance": {"loss_reduction": "token", "reduction": "exact"}}
"""Without these values the settings are not in older checkpoints."""
WITHOUT_EFFECT = {
    *("policy", "standby", "standby_memory_gb", "redundancy", "placement", "failure_domains", "min_groups", "rejoin"),
    *("store", "store_patience_s", "communicator", "detector", "verify", "skip_microbatches", "checkpoint"),
    # On rounding alone, and none with exact reduction:
    *("bucket_mb", "overlap", "inner_shards", "inner_shards_divide", "inner_shards_reduce"),
}
"""On the result of a run without failures; or meant to be changed when a run goes on (``skip_microbatches``)."""


def test_each_setting_is_compared_or_has_no_effect_on_the_result():
    names = restore.settings(resolve(CONFIG, groups=2))
    compared = {name.removeprefix("fault_tolerance.") for name in names if name.startswith("fault_tolerance.")}
    assert {field.name for field in fields(FaultToleranceConfig)} == compared | WITHOUT_EFFECT
