"""Samples are dealt out as plain Megatron deals them out to the data-parallel ranks of all groups."""

from __future__ import annotations

import json
import subprocess
import sys

from megatron_ft.integrations.megatron_lm.samples import Deal, Source
from megatron_ft.types import Microbatch
from tests import support
from tests.megatron_lm import runs

SIZES = [(1, 1, 1, 1, 0), (2, 1, 2, 4, 0), (2, 2, 2, 4, 48), (3, 2, 3, 2, 36), (1, 4, 2, 3, 8)]
"""Micro-batch size, data-parallel ranks of a group, groups, microbatches of a step at each rank, consumed samples."""
TOTAL = 200
OF_MEGATRON = """
import json, sys, torch
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
print(json.dumps([
    [list(MegatronPretrainingSampler(total, begin, micro, rank, ranks)) for rank in range(ranks)]
    for total, micro, ranks, begin in json.loads(sys.argv[1])
]))
"""


def test_each_rank_gets_the_samples_that_megatron_gives_it(megatron):
    """In the order of its iterations; with a shard for each of the groups."""
    asked = json.dumps([[TOTAL, micro, inner * groups, begin] for micro, inner, groups, _, begin in SIZES])
    script = [sys.executable, "-c", OF_MEGATRON, asked]
    done = subprocess.run(
        script, env=runs.environment(megatron), capture_output=True, text=True, timeout=support.TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    for (micro, inner, groups, count, begin), theirs in zip(SIZES, json.loads(done.stdout), strict=True):
        batch = micro * inner * groups * count
        steps = (TOTAL - begin) // batch
        for shard in range(groups):
            for rank in range(inner):
                source = Source([*range(TOTAL)], Deal(micro, rank, inner, groups))
                source.begin_of = lambda step, batch=batch, begin=begin: begin + step * batch
                microbatches = (Microbatch(step, shard, index) for step in range(steps) for index in range(count))
                ours = [source(one).tolist() for one in microbatches]
                assert ours and ours == theirs[shard * inner + rank][: len(ours)]
