"""Known clusters. Every number has a source, or is marked as an assumption.

They are inputs, not :class:`Cluster` objects, because flags and files replace single values (``inputs.cluster``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Inputs = Mapping[str, float | int | None]


@dataclass(frozen=True)
class Preset:
    """Inputs of a cluster, and where their values come from."""

    inputs: Inputs
    source: str


PRESETS: Mapping[str, Preset] = {
    "llama3-16k": Preset(
        {
            "gpus": 16_384,
            "gpus_per_group": 128,
            "failures_per_1000_node_days": 3.79,
            "step_s": 6.2,
            "steps": 930_000,
            "restart_s": 200,
            "checkpoint_s": 60,
            "microbatches": 16,
        },
        "Llama 3 405B (arXiv 2407.21783): Table 5 (419 interruptions in 54 days), 128 replicas of 16 sequences, 16M tokens "
        "per step at 400 TFLOP/s per GPU, 15.6T tokens. Restart: FT-HSDP (arXiv 2602.00277) at 16k. Assumed: checkpoint, "
        "rejoin",
    ),
    "fthsdp-100k": Preset(
        {
            "gpus": 98_304,
            "gpus_per_group": 1024,
            "system_mtbf_s": 1080,
            "step_s": 10,
            "allreduce_s": 1,
            "steps": 100_000,
            "restart_s": 900,
            "checkpoint_s": 60,
            "detection_s": 60,
        },
        "FT-HSDP (arXiv 2602.00277): MTBF 18 min at 100k GPUs, restart 900 s at 98k, collectives time out after about 60 s. "
        "Assumed: 96 replicas, step, steps, checkpoint, rejoin",
    ),
    "spare-600k": Preset(
        {
            "gpus": 600_000,
            "gpus_per_group": 1000,
            "system_mtbf_s": 300,
            "step_s": 70,
            "allreduce_s": 6,
            "steps": 10_000,
            "restart_s": 3600,
            "checkpoint_s": 60,
            "detection_s": 0,
            "reconfigure_s": 0.2,
        },
        "SPARe (arXiv 2603.00357), published simulation at N = 600; it has no time for detection. Assumed: 16 microbatches "
        "per group, rejoin after 15 min",
    ),
    "recover-512": Preset(
        {
            "gpus": 512,
            "gpus_per_group": 8,
            "failures_per_1000_node_days": 6.50,
            "step_s": 20,
            "steps": 50_000,
            "restart_s": 200,
            "checkpoint_s": 60,
            "microbatches": 128,
            "detection_s": 20,
        },
        "ReCoVer (arXiv 2605.11215): 512 A100, W = 64, G = 128. Rate: RSC-1's A100s (arXiv 2410.21680). Assumed: step, "
        "steps, restart, checkpoint, detection, rejoin",
    ),
    "lab-64": Preset(
        {
            "gpus": 64,
            "gpus_per_group": 8,
            "failures_per_1000_node_days": 4.7,
            "step_s": 2,
            "steps": 500_000,
            "restart_s": 948,
            "checkpoint_s": 30,
            "detection_s": 5,
        },
        "Rate: OPT-175B's logbook (35 restarts of 124 nodes in 2 months). Restart: a torchft user's 948 s from fault to "
        "full recovery. Assumed: 8 groups of one node, step, steps, checkpoint, rejoin",
    ),
}
