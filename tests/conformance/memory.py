"""The memory of each engine between two steps, per parameter that a rank holds:

    python -m tests.conformance.memory

prints bytes of parameters, optimizer state and everything else (the gradients and the buffers of this layer), with fast and
with exact reduction, and writes benchmarks/results/engine_memory.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from megatron_ft.core.exactness import grid
from tests import support
from tests.conformance import model as toy
from tests.conformance import rank as one_rank
from tests.conformance.kits import KITS

WIDTH = 256
"""Of the model, which is large enough for what is not proportional to its size to vanish."""


def measure(group: one_rank.Group) -> dict[str, dict[str, float]]:
    results = {}
    for name, settings in (("fast", {}), ("exact", {"exact_bits": grid.MOST_BITS})):
        before = common.storages()
        engine = group.build(**{"bucket_mb": 1.0, **settings})
        for step in range(2):
            group.step(engine, [one_rank.IDS], step)
        after = {at: size for at, size in common.storages().items() if at not in before}
        state = engine.state()
        kept: dict[int, int] = {}
        collect(state, kept)
        mine = sum(parameter.numel() for parameter in engine._parameters)
        whole = sum(after.values())
        results[name] = {"state": sum(kept.values()) / mine, "other": (whole - sum(kept.values())) / mine}
        del engine, state
    return results


def collect(value: Any, kept: dict[int, int]) -> None:
    """Add the storages of a state."""
    if isinstance(value, torch.Tensor):
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for one in value.values():
            collect(one, kept)
    elif isinstance(value, list | tuple):
        for one in value:
            collect(one, kept)


def main() -> int:
    results = {}
    for name, kit in KITS.items():
        if {"checkpointed", "compiled", "divide"} & set(kit.options):  # the same engines with other models
            continue
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as place:
            outs = [Path(place, str(rank)) for rank in range(kit.ranks)]
            words = [sys.executable, "-m", __spec__.name, name]
            ranks = [
                subprocess.Popen([*words, str(number), str(store.port), str(out)], cwd=support.ROOT)
                for number, out in enumerate(outs)
            ]
            if any(rank.wait() for rank in ranks):
                return 1
            results[name] = json.loads(outs[0].read_text())["measured"]
        fast, exact = results[name]["fast"], results[name]["exact"]
        print(
            f"{name}: state {fast['state']:.1f}, other {fast['other']:.1f}; exact: other {exact['other']:.1f}",
            flush=True,
        )
    print(f"raw results in {common.save('engine_memory', {'width': WIDTH, 'results': results})}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    toy.WIDTH = WIDTH
    measured: dict[str, Any] = {}
    one_rank.CHECKS.clear()
    out = Path(sys.argv[4])
    one_rank.CHECKS["measured"] = lambda group: measured.update(measure(group))
    one_rank.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), out)
    out.write_text(json.dumps({"measured": measured}))
