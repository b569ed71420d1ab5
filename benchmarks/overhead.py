"""The cost of fault tolerance when nothing fails, and the time until a blocked survivor returns after a failure.

    python benchmarks/overhead.py [--groups 2] [--pairs 40]     our step against the same loop with a plain all_reduce
    python benchmarks/overhead.py --unblock [--pairs 200]       from abort() to the return of a pending all-reduce

Both loops run in the same processes on equal models and the same microbatches, alternating, in one run. The plain loop is
what a user would write: accumulate into flat buckets, all-reduce them, divide, clip, step. Either both loops send buckets
during backward (the plain one with the same hooks that DDP uses) or both after it. Both clip in every step: where nothing
is to be clipped ours leaves a pass over the gradients out, which is no merit of fault tolerance.

Two sizes: 50 MB of gradients, where the ratio counts, and next to none, where the difference is the fixed cost of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 1024
SIZES = {
    "50 MB": {"layers": 12, "width": WIDTH, "rows": 256, "pairs": 1},
    "fixed": {"layers": 4, "width": 16, "rows": 8, "pairs": 25},
}
"""Square layers of fp32: 12 x 1024 x 1024 x 4 bytes are 50.3 MB. ``rows`` is the size of a microbatch. ``pairs``: the
factor for the number of pairs of steps of which the median is taken. Steps of milliseconds are noisy, and the first
ones share the machine with the launcher, which is busy beside them."""

CLIPPING = 1e-6
UNBLOCKED = 4
"""Members of the communicator that is aborted; the last one never joins in."""


def main() -> None:
    common.give_secret()
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--unblock", action="store_true")
    options = parser.parse_args()
    if options.unblock:
        unblock(options.pairs)
        return
    results = {}
    for size in SIZES:
        for overlap in (True, False):
            name = f"{size}, {'both overlap' if overlap else 'none overlaps'}"
            results[name] = found = compare(options, size, overlap)
            print(
                f"{name}: ours {1e3 * found['median_ours_s']:.2f} ms, plain {1e3 * found['median_plain_s']:.2f} ms, "
                f"ratio {found['ratio_of_medians']:.3f}, median of the differences {found['median_difference_ms']:.2f} ms"
            )
    about = {"groups": options.groups, "sizes": SIZES, "load_average": os.getloadavg()}
    print(f"raw numbers in {common.save('overhead', {**about, **results})}")


def compare(options: argparse.Namespace, size: str, overlap: bool) -> dict[str, object]:
    """Make one launched run of both loops; times in seconds, one of each kind for every step."""
    with tempfile.TemporaryDirectory() as directory:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        config = Path(directory, "config.json")
        section = {"bucket_mb": 8, "overlap": overlap}
        config.write_text(json.dumps({"gradient_clipping": CLIPPING, "fault_tolerance": section}))
        steps = options.warmup + options.pairs * SIZES[size]["pairs"]
        job = (size, steps, f"{directory}/times", server.port)
        subprocess.run(
            common.launch(options.groups, config, Path(directory, "run"), __file__, "--", *job),
            check=True,
            cwd=common.ROOT,
            env=common.environment(),
            stdout=sys.stderr,
        )
        times = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("times.*"))]
    # A step ends everywhere when its slowest group ends.
    ours, plain = (
        [max(group[kind][i] for group in times) for i in range(options.warmup, steps)] for kind in ("ours", "plain")
    )
    return {
        "median_ours_s": statistics.median(ours),
        "median_plain_s": statistics.median(plain),
        "ratio_of_medians": statistics.median(ours) / statistics.median(plain),
        "median_of_paired_ratios": statistics.median(a / b for a, b in zip(ours, plain, strict=True)),
        "median_difference_ms": 1e3 * statistics.median(a - b for a, b in zip(ours, plain, strict=True)),
        "ours_s": ours,
        "plain_s": plain,
    }


# --- one group --------------------------------------------------------------------------------------------------------


def rank(size: str, steps: int, out: str, port: int) -> None:
    """Run one group: alternate between a step of ours and a plain one."""
    import megatron_ft
    from megatron_ft.types import Microbatch

    session = megatron_ft.init(seed=1)
    shape, group, groups = SIZES[size], session.group, session.config.groups
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=group, world_size=groups
    )

    def dataset(microbatch: Microbatch) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * microbatch.step + microbatch.shard)
        return torch.randn(shape["rows"], shape["width"], generator=generator)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = [nn.Linear(shape["width"], shape["width"], bias=False) for _ in range(shape["layers"])]
        model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    engine = session.wrap(*build(), loss_fn)
    plain = Plain(*build(), [b.elements for b in engine._buckets], session.config.fault_tolerance.overlap, groups)
    turns: list[tuple[str, Callable[[int], object]]] = [
        ("ours", lambda step: session.train_step(engine, dataset)),
        ("plain", lambda step: plain.step(dataset(Microbatch(step, group, 0)))),
    ]
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for step in session.steps(steps):
        for name, turn in turns if step % 2 else reversed(turns):
            dist.barrier()
            started = time.perf_counter()
            turn(step)
            times[name].append(time.perf_counter() - started)
    Path(f"{out}.{group}").write_text(json.dumps(times))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Plain:
    """The loop without fault tolerance, one microbatch a step: flat buckets, last parameter first."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int], overlap: bool, groups: int
    ) -> None:
        self.model, self.optimizer, self.groups = model, optimizer, groups
        self.flats: list[torch.Tensor] = []
        self.works: list[dist.Work] = []
        parameters = list(reversed(list(model.parameters())))
        for size in sizes:
            flat, offset = torch.zeros(size), 0
            while offset < size:
                parameter = parameters.pop(0)
                parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
            self.flats.append(flat)
            if overlap:  # the last parameter of the bucket: every layer is used once, so gradients come in order
                parameter.register_post_accumulate_grad_hook(lambda _, flat=flat: self._send(flat))

    def _send(self, flat: torch.Tensor) -> None:
        self.works.append(dist.all_reduce(flat, async_op=True))

    def step(self, batch: torch.Tensor) -> None:
        for flat in self.flats:
            flat.zero_()
        loss_fn(self.model, batch).backward()
        if not self.works:
            for flat in self.flats:
                self._send(flat)
        for work in self.works:
            work.wait()
        self.works.clear()
        for flat in self.flats:
            flat.div_(self.groups)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)
        self.optimizer.step()


# --- unblocking -------------------------------------------------------------------------------------------------------


def unblock(rounds: int) -> None:
    """Start processes with pending all-reduces, one of which never joins in; return the time from abort() until all
    have returned."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "unblocked", str(me), str(rounds), str(server.port)],
            stdout=subprocess.PIPE,
            text=True,
            env=common.environment(),
        )
        for me in range(UNBLOCKED)
    ]
    outs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a process failed, see above")
    found = [1e3 * s for out in outs[:-1] for s in json.loads(out)]
    result = {"members": UNBLOCKED, "rounds": rounds, "median_ms": statistics.median(found), "max_ms": max(found)}
    path = common.save("unblock", {**result, "from_abort_ms": found, "load_average": os.getloadavg()})
    print(
        f"abort to return: median {result['median_ms']:.2f} ms, worst of {len(found)} {max(found):.1f} ms; raw in {path}"
    )


def unblocked(me: int, rounds: int, port: int) -> None:
    """Run one of the processes: print the seconds of each round."""
    from megatron_ft.run.collectives.base import Broken, Communicator
    from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator

    store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def meet(name: str) -> None:
        if store.add(name, 1) == UNBLOCKED:
            store.set(f"{name}/all", "")
        store.wait([f"{name}/all"])

    seconds: list[float] = []
    for number in range(rounds):
        outer = GlooCommunicator(dist.PrefixStore(f"e{number}", store), me, range(UNBLOCKED), number, 60.0)
        works = [] if me == UNBLOCKED - 1 else [outer.all_reduce(torch.ones(250_000)) for _ in range(4)]
        meet(f"started/{number}")
        began: list[float] = []

        def abort(outer: Communicator = outer, began: list[float] = began) -> None:
            began.append(time.perf_counter())
            outer.abort()

        # As in a run, another thread than the waiting one aborts. It first makes certain that the other one waits.
        timer = threading.Timer(0.005, abort)
        if works:
            timer.start()
        for work in works:
            try:
                work.wait()
            except Broken:
                continue
        if works:
            ended = time.perf_counter()
            timer.join()
            if ended > began[0]:  # otherwise a peer's abort was faster than this process's own
                seconds.append(ended - began[0])
        meet(f"ended/{number}")
        outer.close()
    print(json.dumps(seconds), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if "MEGATRON_FT_RUN_ID" in os.environ:
        rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["unblocked"]:
        unblocked(*map(int, sys.argv[2:]))
    else:
        main()
