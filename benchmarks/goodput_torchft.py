"""The run of ``goodput.py`` with torchft 0.2.0: replica groups that are killed as a trace says, and started again at once.

Started with torchft's interpreter (``recovery_torchft.environment``), this file is one replica group.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import recovery_model
import recovery_torchft

_PORT = 29512
HELD_OUT, SAMPLES = 10**6, 256


def evaluate(model) -> float:
    import torch

    with torch.no_grad():
        return float(recovery_model.loss_of(model, recovery_model.batch(HELD_OUT, samples=SAMPLES)))


def run(directory: Path, settings: dict, steps: int, strike) -> tuple[int, float, float, list[dict]]:
    """Return the microbatches committed after the first step, the seconds they took, the final loss, and the kills by
    ``strike``."""
    python, tight = recovery_torchft.environment(), recovery_torchft.TIGHTEST
    lighthouse, env = recovery_torchft.lighthouse(tight, _PORT)
    groups, workers = settings["groups"], {}
    with (directory / "log").open("w") as log:
        options = {"cwd": directory, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
        server = subprocess.Popen(lighthouse, **options)

        def start(group: int) -> None:
            job = json.dumps({**settings, "steps": steps, "manager": tight["manager"]})
            workers[group] = subprocess.Popen([str(python), __file__, str(group), job, str(directory)], **options)

        def look_after() -> None:
            """Act as a supervisor: start a group again that has ended before the steps were done."""
            for group, worker in workers.items():
                if worker.poll() is not None and not (directory / f"loss.{group}").exists():
                    start(group)

        def over() -> bool:
            look_after()
            return any((directory / f"loss.{group}").exists() for group in range(groups))

        def kill(group: int) -> bool:
            there = workers[group].poll() is None
            workers[group].send_signal(signal.SIGKILL)
            workers[group].wait()
            start(group)
            return there

        try:
            for group in range(groups):
                start(group)
            while not _committed(directory, groups):
                look_after()
                time.sleep(0.02)
            # All groups are there once before the first failure, as in ours.
            while not any(line["participants"] == groups for line in _committed(directory, groups).values()):
                time.sleep(0.02)
            begun = time.time()
            struck = strike(begun, over, kill)
        finally:
            for process in (*workers.values(), server):
                process.kill()
                process.wait()
    committed = _committed(directory, groups)
    after = [line for line in committed.values() if line["ended"] > begun]
    loss = next(float(path.read_text()) for path in sorted(directory.glob("loss.*")))
    count = sum(line["participants"] for line in after) * settings["per_group"]
    return count, max(line["ended"] for line in after) - begun, loss, struck


def _committed(directory: Path, groups: int) -> dict[int, dict]:
    """Return each step as seen by a group that took part in it."""
    lines = [line for group in range(groups) for line in recovery_torchft.attempts_of(directory, group)]
    return {line["step"]: line for line in lines if line["committed"]}


def replica(group: int, job: dict, directory: Path) -> None:
    """One replica group of one rank, from its start, or its start again, to the last step."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the benchmark
    socket.gethostname = lambda: "127.0.0.1"
    import torch

    torch.set_num_threads(1)
    model = recovery_model.build(job["megabytes"])
    optimizer = torch.optim.Adam(model.parameters(), lr=job["rate"])
    buckets = recovery_model.flat_gradients(model)
    loss = recovery_model.loss_of
    manager = recovery_torchft._manager(group, "127.0.0.1", job["manager"], model, optimizer)
    with open(directory / f"attempts.{group}", "a", buffering=1) as lines:
        while (step := manager.current_step()) < job["steps"]:
            manager.start_quorum()
            for bucket in buckets:
                bucket.zero_()
            for index in range(job["per_group"]):
                inputs = recovery_model.batch(step, group, index)
                (loss(model, inputs) / job["per_group"]).backward()
            for work in [manager.allreduce(bucket) for bucket in buckets]:
                work.wait()
            committed = manager.should_commit()
            if committed:
                optimizer.step()
            line = {"step": manager.current_step() - 1, "committed": committed, "ended": time.time()}
            lines.write(json.dumps({**line, "participants": manager.num_participants()}) + "\n")
    (directory / f"loss.{group}").write_text(str(evaluate(model)))


if __name__ == "__main__":
    replica(int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
