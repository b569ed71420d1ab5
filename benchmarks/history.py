"""The cost of reading the record of a long run with many groups: an agent's first look, each later one, and the report.

    python benchmarks/history.py [--groups 512] [--steps 100000]

The record is written by the class that ranks use, with random times of microbatches and a lost and returned group every
500 steps. Each reader is a process of its own: ``seconds``, of them ``cpu_seconds`` of the processor (the others are
waiting, on a busy machine for the processor), and ``megabytes``, what its peak memory grows by while it reads.
``agent``: the first look at the whole record. ``later look``: at one more step. ``report``: the command, tables and both
pictures, without timelines. ``report with timelines``: the same with a timeline file of every group that the picture shows
(the command reads no others; ``timeline_bytes``). A replay reads the whole record into memory and is not measured.
Writes results/history.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.ROOT))
from megatron_ft.core.detection import stragglers
from megatron_ft.record import history, run_state
from megatron_ft.types import View

EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--read", choices=READERS, help="for itself")
    parser.add_argument("--run-dir", type=Path, help="for itself")
    options = parser.parse_args()
    if options.read:
        print(json.dumps(measure(options.read, options.run_dir)))
        return
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        write(run_dir, options.groups, options.steps)
        size = (run_dir / history.FILE).stat().st_size
        longest = max(len(line) for line in (run_dir / history.FILE).open("rb") if b'"step"' in line[:60])
        found = {"groups": options.groups, "steps": options.steps, "bytes": size, "longest_step_line": longest}
        found["load_average_1m"] = os.getloadavg()[0]
        for name in READERS:
            if name == "report with timelines":
                found["timeline_bytes"] = write_timelines(run_dir, options.groups, options.steps)
            words = [sys.executable, __file__, "--read", name, "--run-dir", directory]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, found[name], flush=True)
    print(common.save("history", found))


def write(run_dir: Path, groups: int, steps: int) -> None:
    rng = random.Random(0)
    book = history.History(run_dir)
    book.set_writer(True)
    history.append(run_dir, "start", run_id="r", groups=groups, ranks_per_group=1, host="h")
    history.append(run_dir, "begin", steps=steps, microbatches=groups, buckets=4)
    live, epoch = list(range(groups)), 0
    all_seconds = ({group: 0.1 + 0.01 * rng.random() for group in live} for _ in range(50))
    told = [stragglers.brief(seconds, stragglers.Speeds(), 1.5) for seconds in all_seconds]
    for step in range(steps):
        if step % EVERY == 0:
            lost = step // EVERY % groups
            live = (
                list(range(groups)) if step // EVERY % 2 == 0 else [group for group in range(groups) if group != lost]
            )
            book.record("view", **View(epoch, tuple(live), "Connection reset by peer", step=step).to_json())
            epoch += 1
            if len(live) < groups:
                fields = {"position": 0, "pid": 1, "host": "h", "signal": "SIGKILL", "code": None, "detail": ""}
                history.append(run_dir, "fault", group=lost, **fields, how="agent's waitpid", detected_s=None)
        fields = {"step": step, "loss": 10.0 / (1 + step), "microbatches": groups, "epoch": epoch - 1, "live": live}
        book.record("step", later=step % 50 != 49, **fields, duration_s=0.1, **told[step % 50])
    book.write()


def agent(run_dir: Path) -> None:
    assert run_state.Watched(run_dir).poll().last_step


def write_timelines(run_dir: Path, groups: int, steps: int) -> int:
    """Write timelines of the groups that are shown, as ranks write them: two lines a step. Return their size."""
    from megatron_ft.record import run_plots
    from megatron_ft.record.run_record import RunRecord

    (run_dir / "timeline").mkdir()
    record = RunRecord.load(run_dir)
    begin = (record.steps.times[-1] - record.steps.times[0]) / steps  # as fast as the record was written
    size = 0
    for group, position in run_plots._rows(record):
        with (run_dir / "timeline" / f"g{group}.p{position}.jsonl").open("w") as file:
            for step in range(steps):
                t = record.steps.times[0] + step * begin
                ends = [round(t + begin * share, 6) for share in (0.0, 0.5, 0.6, 0.7)]
                spans = [[phase, ends[i], ends[i + 1]] for i, phase in enumerate(("compute", "reduce", "update"))]
                for own in (spans[:1], spans[1:]):
                    size += file.write(json.dumps({"step": step, "epoch": 0, "spans": own}) + "\n")
    return size


def report(run_dir: Path) -> None:
    from megatron_ft.commands import report_command

    report_command.run(argparse.Namespace(run_dir=run_dir, reference=None, slurm=False))


READERS = {"agent": agent, "report": report, "later look": agent, "report with timelines": report}


def measure(name: str, run_dir: Path) -> dict[str, Any]:
    from megatron_ft.commands import report_command  # noqa: F401 - not measured

    watched = run_state.Watched(run_dir)
    if name == "later look":
        watched.poll()
        live = list(range(512))
        history.append(run_dir, "step", step=10**6, loss=1.0, microbatches=512, epoch=10**6, live=live, duration_s=0.1)
    before, began, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
    if name == "later look":
        assert watched.poll().last_step == 10**6
    else:
        READERS[name](run_dir)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": round(seconds, 6), "cpu_seconds": round(cpu, 6), "megabytes": round(grown / 1024, 1)}


if __name__ == "__main__":
    main()
