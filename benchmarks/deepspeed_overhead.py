"""The cost of our data parallelism between groups beside DeepSpeed's own, when nothing fails.

    python benchmarks/deepspeed_overhead.py [--pairs 30]

Same model, same microbatches, same number of ranks, both clip, nothing is compiled for either (DeepSpeed's all-reduce
through shared memory is off in both: it is for one host only). Two jobs live side by side, ours and plain DeepSpeed's, and
take turns step by step: while one trains, the other waits in a socket. Each turn is timed from outside, from the word to
start until the last rank is done.

    plain       2 ranks: 2 groups of one ``DeepSpeedEngine``, against one world with data parallelism 2
    pipeline    4 ranks: 2 groups that are pipelines of two stages, against one world of 2 stages x data parallelism 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import common
import torch
import torch.distributed as dist

GROUPS, PER_GROUP, SAMPLES, SEQ_LEN = 2, 4, 2, 64
MODEL = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "max_position_embeddings": SEQ_LEN}
STAGES = {"plain": 1, "pipeline": 2}
WAIT = timedelta(minutes=5)
WARMUP = 3
LIMIT = 1.02


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--job", nargs=4, metavar=("SYSTEM", "KIND", "DATA", "PORT"), help="of the processes it starts")
    options = parser.parse_args()
    if options.job:
        system, kind, data, port = options.job
        return job(system, kind, Path(data), int(port), options.pairs)
    results = {kind: compare(kind, options.pairs) for kind in options.kinds}
    print(f"raw numbers in {common.save('deepspeed_overhead', {'limit': LIMIT, 'results': results})}")
    return 0 if all(found["ratio"] <= LIMIT for found in results.values()) else 1


# --- the process that times -------------------------------------------------------------------------------------------


def compare(kind: str, pairs: int) -> dict:
    turns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)
    ranks = GROUPS * STAGES[kind]
    with tempfile.TemporaryDirectory() as temporary:
        data = common.prepare_data(Path(temporary) / "data")
        own = ["--pairs", str(pairs), "--job"]
        jobs = {"ours": start_ours(kind, Path(temporary), [*own, "ours", kind, str(data), str(turns.port)])}
        jobs["DeepSpeed"] = start_theirs(kind, [*own, "DeepSpeed", kind, str(data), str(turns.port)])
        try:
            found = take_turns(turns, jobs, ranks, pairs)
        finally:
            for processes in jobs.values():
                for process in processes:
                    process.terminate()
                    process.wait()
    ours, theirs = (statistics.median(found[system]) for system in ("ours", "DeepSpeed"))
    ratio = statistics.median(mine / other for mine, other in zip(found["ours"], found["DeepSpeed"], strict=True))
    print(f"{kind}: ours {1e3 * ours:.1f} ms, DeepSpeed's {1e3 * theirs:.1f} ms, median ratio of the pairs {ratio:.3f}")
    return {"ranks": ranks, "ratio": ratio, "ours_s": found["ours"], "deepspeed_s": found["DeepSpeed"]}


def take_turns(
    turns: dist.TCPStore, jobs: dict[str, list[subprocess.Popen]], ranks: int, pairs: int
) -> dict[str, list]:
    """Return the seconds of each step of both. The job that begins a pair alternates, too."""
    found: dict[str, list[float]] = {system: [] for system in jobs}
    for system in jobs:
        turns.wait([f"{system}/ready/all"])
    for number in range(WARMUP + pairs):
        for system in sorted(jobs, reverse=bool(number % 2)):
            began = time.perf_counter()
            turns.set(f"{system}/go/{number}", "")
            turns.wait([f"{system}/done/{number}/all"])
            if number >= WARMUP:
                found[system].append(time.perf_counter() - began)
    turns.set("end", "")
    return found


def start_ours(kind: str, directory: Path, arguments: list[str]) -> list[subprocess.Popen]:
    section = {"model": MODEL, "detector": {"straggler_factor": 0}}
    (directory / "ours.json").write_text(json.dumps({**settings(kind), "fault_tolerance": section}))
    job = ["--preload", "deepspeed", __file__, "--", *arguments]
    command = common.launch(GROUPS, directory / "ours.json", directory / "run", *job)
    return [subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)]


def start_theirs(kind: str, arguments: list[str]) -> list[subprocess.Popen]:
    ranks = GROUPS * STAGES[kind]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(common.free_port())}
    return [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**environment(), **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(common.ROOT)}


def settings(kind: str) -> dict:
    """Return the settings of DeepSpeed, the same in both."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": PER_GROUP,
        "gradient_clipping": 1.0,
        "steps_per_print": 2**31,
        **({"pipeline": {"stages": STAGES[kind]}} if STAGES[kind] > 1 else {}),
    }


# --- a rank -----------------------------------------------------------------------------------------------------------


def job(system: str, kind: str, data: Path, port: int, pairs: int) -> int:
    turns = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)
    step = (ours if system == "ours" else theirs)(kind, data, WARMUP + pairs)
    meet(turns, f"{system}/ready", kind)
    for number in range(WARMUP + pairs):
        turns.wait([f"{system}/go/{number}"])
        next(step)
        meet(turns, f"{system}/done/{number}", kind)
    turns.wait(["end"])  # a job that ends while the other still trains would disturb it
    list(step)
    return 0


def meet(turns: dist.TCPStore, name: str, kind: str) -> None:
    if turns.add(name, 1) == GROUPS * STAGES[kind]:
        turns.set(f"{name}/all", "")


def ours(kind: str, data: Path, steps: int):
    import megatron_ft

    session = megatron_ft.init()
    session.init_distributed()
    dataset = session.dataset(data, seq_len=SEQ_LEN)
    model, optimizer, loss_fn = made(kind, session.config, dataset.vocab_size)
    engine = session.deepspeed(model, optimizer=optimizer, **({"loss_fn": loss_fn} if loss_fn else {}))

    def train():
        for _ in session.steps(steps):
            yield session.train_step(engine, dataset)

    return train()


def theirs(kind: str, data: Path, steps: int):
    import deepspeed

    from megatron_ft.config import schema
    from megatron_ft.data.dataset import PackedDataset

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    raw = {**settings(kind), "fault_tolerance": {"model": MODEL}}
    sizes = {"samples_per_microbatch": SAMPLES, "groups": GROUPS, "microbatches_per_group": PER_GROUP, "seed": 0}
    dataset = PackedDataset(data, seq_len=SEQ_LEN, **sizes)
    model, optimizer, loss_fn = made(kind, schema.resolve(raw, groups=GROUPS), dataset.vocab_size, data_axis=GROUPS)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**settings(kind), "zero_optimization": {"stage": 0}}
    )
    replica = engine.grid.get_data_parallel_rank() if loss_fn is None else dist.get_rank()
    batches = (batch for step in range(steps) for batch in samples(dataset, step, replica))

    def plain():
        for _ in range(PER_GROUP):
            loss = loss_fn(engine, next(batches))
            engine.backward(loss)
            engine.step()

    def pipeline():
        engine.train_batch((batch["input_ids"], batch["labels"]) for batch in batches)

    def train():
        for _ in range(steps):
            yield (pipeline if loss_fn is None else plain)()

    return train()


def samples(dataset, step: int, replica: int):
    from megatron_ft.types import Microbatch

    return (dataset(Microbatch(step, replica, index)) for index in range(PER_GROUP))


def made(kind: str, run, vocab_size: int, data_axis: int = 1):
    """Return model, optimizer, and the loss function where the model is no pipeline."""
    from megatron_ft.engines import fused

    example = "pretrain_gpt" if kind == "plain" else "pretrain_gpt_deepspeed"
    sys.path.insert(0, str(common.ROOT / "examples" / example))
    torch.manual_seed(1)
    if kind == "plain":
        from model import GPT, GPTConfig
        from train import loss_fn

        layers, width = MODEL["num_hidden_layers"], MODEL["hidden_size"]
        model = GPT(GPTConfig(vocab_size, layers=layers, width=width, seq_len=SEQ_LEN, dropout=0.0))
    else:
        import model as example_module

        loss_fn, topology = None, example_module.PipeModelDataParallelTopology
        example_module.PipeModelDataParallelTopology = lambda **axes: topology(**{**axes, "num_dp": data_axis})
        model = example_module.build(run, vocab_size, 1)
    return model, fused.adamw(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1), loss_fn


if __name__ == "__main__":
    sys.exit(main())
