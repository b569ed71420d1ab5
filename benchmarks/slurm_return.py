"""The time from the loss of a node until its group works again on the spare node, in a real Slurm of virtual nodes.

    python benchmarks/slurm_return.py [--trials 5]        (as root; tools/slurm_lab.py)

Three groups and a spare node. In each trial another job is submitted; after some steps a node loses its power (its link
first, so that its connections are not even closed, then its processes) or a rank is killed with SIGKILL. ``store_node`` is
the node of the embedded control store, which another node then takes over. Seconds since the loss:
``noticed`` (first word of it in the record), ``started`` (the new process), ``back`` (it takes part in a step). ``ours``
is ``back`` less the time from the process's start to its script's being ready, as the group itself says it. Writes
results/slurm_return.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

sys.path.insert(0, str(common.ROOT))
from megatron_ft.record import history
from tools.slurm_lab import Lab, LabError

ASKED = {"node_back_s": 15.0, "ours_s": 2.0}
STEPS, STRIKE_AT, PATIENCE_S = 2000, 10, 180.0
NODES = {0: "n2", 1: "n3"}
"""The node of each group. The batch shell is on n1, so groups 0 to 2 are on n2 to n4, and n2 is host 0, with an
embedded store."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    kinds = {
        "node": (1, _lose_node),
        "store_node": (0, _lose_node),
        "rank": (1, _kill_rank),
    }
    found: dict[str, list[dict]] = {what: [] for what in kinds}
    try:
        with tempfile.TemporaryDirectory() as directory, Lab(Path(directory) / "lab", 4) as lab:
            data = common.prepare_data(Path(directory) / "data")
            for number in range(options.trials):
                for what, kind in kinds.items():
                    found[what].append(trial(lab, Path(directory) / f"{what}{number}", data, *kind))
                    print(what, found[what][-1], flush=True)
    except LabError as error:
        sys.exit(f"slurm_return: {error}")
    summary = {what: {name: round(statistics.median(t[name] for t in trials), 3) for name in trials[0]}
               for what, trials in found.items()}  # fmt: skip
    print(json.dumps(summary, indent=1))
    print(f"raw numbers in {common.save('slurm_return', {'asked': ASKED, 'summary': summary, 'trials': found})}")


def trial(
    lab: Lab, directory: Path, data: Path, victim: int, strike: Callable[[Lab, Path, int], None]
) -> dict[str, float]:
    """Run one job, and end it when its group is back."""
    directory.mkdir()
    run_dir, config = directory / "run", directory / "config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}))
    own = {
        "MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"),
        "RUN_DIR": str(run_dir),
        "CONFIG": str(config),
    }
    model = ["--layers", "2", "--width", "64", "--seq-len", "32"]
    script = ["examples/pretrain_gpt/train.py", "--", "--data", data, "--steps", STEPS, *model]
    batch = ["sbatch", "--parsable", "--nodes=4", f"--output={directory}/batch.log", "slurm/pretrain.sbatch", *script]
    environment = {**lab.env, **own, "OMP_NUM_THREADS": "1"}
    job = lab.run([str(word) for word in batch], env=environment, cwd=common.ROOT, check=True).stdout.strip()
    try:
        _await(lambda: any(line["step"] >= STRIKE_AT for line in _events(run_dir, "step")))
        struck = time.time()
        strike(lab, run_dir, victim)
        _await(lambda: any(line["t"] > struck and victim in line["live"] for line in _returned(run_dir, victim)))
        return _judged(run_dir, victim, struck)
    finally:
        for node in lab.nodes:
            lab.heal(node)
            if lab.slurmd(node) == "dead":
                lab.start_node(node)
        lab.run(["scancel", job])
        _await(lambda: set(lab.states().values()) == {"idle"})


def _lose_node(lab: Lab, run_dir: Path, victim: int) -> None:
    lab.cut(NODES[victim])
    lab.kill_node(NODES[victim])


def _kill_rank(lab: Lab, run_dir: Path, victim: int) -> None:
    ranks = json.loads((run_dir / "ranks.json").read_text())
    os.kill(next(rank["pid"] for rank in ranks if rank["group"] == victim), signal.SIGKILL)


def _returned(run_dir: Path, victim: int) -> list[dict]:
    """Return the steps that the group took part in after its return."""
    back = [line["step"] for line in _events(run_dir, "rejoined") if line["group"] == victim]
    return [line for line in _events(run_dir, "step") if back and line["step"] >= back[0]]


def _judged(run_dir: Path, victim: int, struck: float) -> dict[str, float]:
    after = [line for line in history.read(run_dir) if line["t"] > struck]
    word = next(line for line in after if line["event"] in ("fault", "silence"))
    start = next(line for line in after if line["event"] == "restart")
    rejoined = next(line for line in after if line["event"] == "rejoined")
    back = next(line["t"] for line in _returned(run_dir, victim) if line["t"] > struck)
    ready = rejoined["t"] - rejoined["seconds"]  # its script had got to its first step
    seconds = {"noticed": word["t"], "started": start["t"], "ready": ready, "back": back}
    found = {name: round(at - struck, 3) for name, at in seconds.items()}
    return {**found, "ours": round(found["back"] - (found["ready"] - found["started"]), 3)}


def _events(run_dir: Path, event: str) -> list[dict]:
    return common.of(history.read(run_dir), event)


def _await(condition: Callable[[], object]) -> None:
    common.wait_until(condition, PATIENCE_S, 0.05)


if __name__ == "__main__":
    main()
