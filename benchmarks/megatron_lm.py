"""The cost of ``launch --megatron-lm`` beside plain Megatron-LM, when nothing fails.

    python benchmarks/megatron_lm.py [--pairs 20] [--iterations 30]

The same script (``tests/megatron_lm/pretrain_gpt.py``) with the same arguments on the same 2 ranks: two groups of one rank,
and torchrun with data parallelism 2. The two take turns. Times are those that Megatron's own loop logs for each iteration;
the first ones of a run are left out. Both have to log the same losses.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common

from tests.megatron_lm import runs

WARMUP, LIMIT = 5, 1.02
ARGUMENTS = (
    *runs.MOCK,
    *("--num-layers", 4, "--hidden-size", 256, "--num-attention-heads", 4, "--seq-length", 128),
    *("--max-position-embeddings", 128, "--eval-iters", 0, "--lr", 1e-4),
)
_TIME = re.compile(r" iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    megatron = runs.unpacked()
    arguments = (*ARGUMENTS, "--train-iters", options.iterations, "--lr-decay-iters", options.iterations)
    rows: list[dict[str, Any]] = []
    for number in range(options.pairs):
        with tempfile.TemporaryDirectory() as directory:
            own = runs.said(runs.start(Path(directory, "run"), megatron, 1, *arguments))
        plain = runs.plain(megatron, 2, *arguments)
        worst = max(
            abs(values["lm loss"] / own.iterations[iteration]["lm loss"] - 1)
            for iteration, values in plain.iterations.items()
        )
        row = {"plain_ms": median(plain), "ours_ms": median(own), "losses_differ_by": worst}
        rows.append(row)
        print(
            f"{number + 1} of {options.pairs}: plain {row['plain_ms']:.1f} ms, ours {row['ours_ms']:.1f} ms", flush=True
        )
    ratios = [row["ours_ms"] / row["plain_ms"] for row in rows]
    ratio = statistics.median(ratios)
    print(
        f"ours takes {ratio:.3f} times as long (at most {LIMIT}); {min(ratios):.3f} to {max(ratios):.3f} in single pairs"
    )
    path = common.save("megatron_lm", {"ratio": ratio, "limit": LIMIT, "iterations": options.iterations, "pairs": rows})
    print(f"raw numbers in {path}")


def median(said: runs.Said) -> float:
    """Return the median time in ms of an iteration, over all logs of a run."""
    found = [float(ms) for log in said.logs for number, ms in _TIME.findall(log) if int(number) > WARMUP]
    return statistics.median(found)


if __name__ == "__main__":
    main()
