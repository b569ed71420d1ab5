"""ReCoVer's experiment (arXiv 2605.11215) on real processes: half of the groups are lost, one at a time, in an all-reduce.

    python benchmarks/recover_live.py [--quick]

*Plain*: 16 groups of one rank, a small GPT; one group dies for good inside an all-reduce in every tenth step, 8 in all.
*3D*: 8 groups of 4 ranks, the DeepSpeed example with 2 pipeline stages and 2 slices of tensor parallelism; 4 groups die.
Policy ``recover``, and the failure-free run of the same seed: the losses of all steps, side by side.

*Effective throughput* (plain): committed steps per second, from the first step to the last one before the next loss; a step
that is made again counts when it is made for the last time. Checkpoint-restart saves every
``CHECKPOINT_S``; at each loss the whole job ends, as it does with a launcher that ends all ranks when one dies, and is
started again with one group less from the newest checkpoint. Its losses come after the same steps. A microbatch takes
``MICROBATCH_S`` as on a device of its own (``recovery_model.py``), so half of the groups take twice as long for a step.

Writes results/recover_live.json and docs/results/lost_half.png. Takes about 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import goodput
import recovery_model

sys.path.insert(0, str(common.ROOT))
from megatron_ft import data
from megatron_ft.cluster.faults import kill as inject
from megatron_ft.record import history, invariants, run_directory
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint

PLAIN = {"groups": 16, "ranks": 1, "per_group": 4, "steps": 100, "every": 10, "losses": 8}
THREE_D = {"groups": 8, "ranks": 4, "per_group": 2, "steps": 24, "every": 5, "losses": 4}
MICROBATCH_S, CHECKPOINT_S, MEGABYTES = 0.1, 2.0, 1
EXAMPLE = common.ROOT / "examples" / "pretrain_gpt_deepspeed" / "train.py"
MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the plain runs with 4 groups, without writing results")
    options = parser.parse_args()
    os.environ[recovery_model.COMPUTE], os.environ[recovery_model.PACE] = "small_gpt", str(MICROBATCH_S)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    plain = {**PLAIN, "groups": 4, "losses": 2, "steps": 40} if options.quick else PLAIN
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        found = {"plain": compared(root / "plain", plain)}
        found["plain"]["restart"] = restarted(root / "restart", plain)
        found["plain"]["over_restart"] = over_restart(found["plain"], plain)
        if not options.quick:
            os.environ.pop(recovery_model.PACE)
            data.prepare(
                root / "data", [common.ROOT / "megatron_ft" / "data" / "addresses.txt"], vocab_size=512, log=str
            )
            found["3D"] = compared(root / "3d", THREE_D, root / "data")
    for name, one in found.items():
        kinds = {key: value for key, value in one.items() if key not in ("recover", "failure_free", "restart")}
        print(name, json.dumps(kinds))
    if not options.quick:
        settings = {
            "settings": {"plain": PLAIN, "3D": THREE_D},
            "microbatch_s": MICROBATCH_S,
            "checkpoint_s": CHECKPOINT_S,
        }
        print(f"raw numbers in {common.save('recover_live', {**settings, **found})}")
        draw(found, common.ROOT / "docs" / "results" / "lost_half.png")


def compared(directory: Path, of: dict[str, int], dataset: Path | None = None) -> dict[str, Any]:
    """Return the losses and times of the steps, without failures and with half of the groups lost."""
    holds = [
        Breakpoint(of["groups"] - 1 - number, of["every"] * (number + 1), "reduce", position=number % of["ranks"])
        for number in range(of["losses"])
    ]
    free, recover = (
        _record(directory / name, of, struck, dataset) for name, struck in (("free", ()), ("recover", holds))
    )
    violations = invariants.check_history(recover, of["groups"] * of["per_group"], free)
    assert not violations, violations
    plans = [line["plan"] for line in common.of(recover, "recovery")]
    return {
        "largest_loss_difference": invariants.largest_loss_difference(recover, free),
        "groups_lost": sum(len(view["lost"]) for view in common.of(recover, "view")),
        "microbatches_of_every_step": sorted({line["microbatches"] for line in common.of(recover, "step")}),
        "kinds": [plan["recovery"] for plan in plans],
        "failure_free": _steps(free),
        "recover": _steps(recover),
    }


def _record(directory: Path, of: dict[str, int], holds: Sequence[Breakpoint], dataset: Path | None) -> list[dict]:
    with launched(directory, of, of["groups"], {"policy": "recover"}, holds, dataset) as agent:
        for hold in holds:
            inject.strike(directory / "run", [hold], 300, lambda: agent.poll() is None)
        if agent.wait(900):
            raise RuntimeError((directory / "log").read_text()[-3000:])
    return history.read(directory / "run")


def restarted(directory: Path, of: dict[str, int]) -> dict[str, Any]:
    """Return the times of the steps with checkpoint-restart: after each loss the rest starts again."""
    settings = {"policy": "restart", "checkpoint": {"directory": str(directory / "saved"), "period_s": CHECKPOINT_S}}
    for number in range(of["losses"] + 1):
        with launched(directory, of, of["groups"] - number, settings) as agent:
            due = of["every"] * (number + 1) if number < of["losses"] else of["steps"]
            while agent.poll() is None and not any(
                line["step"] >= due - 1 for line in common.of(history.read(directory / "run"), "step")
            ):
                time.sleep(0.02)
            if number == of["losses"]:
                agent.wait(300)
            elif agent.poll() is None:
                agent.kill()  # its ranks end with it
        if agent.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError((directory / "log").read_text()[-3000:])
    starts = run_directory.starts_of(directory / "run")
    lines = [line for start in starts for line in common.of(history.read(start), "step")]
    return {**_steps(lines), "made_again": len(lines) - of["steps"], "restarts": len(starts) - 1}


@contextmanager
def launched(
    directory: Path,
    of: dict[str, int],
    groups: int,
    section: dict[str, Any],
    holds: Sequence[Breakpoint] = (),
    dataset: Path | None = None,
) -> Iterator[subprocess.Popen]:
    """Start a run in ``directory/run``; end it if it still runs."""
    directory.mkdir(parents=True, exist_ok=True)
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": of["per_group"]}
    patient = {"detector": {"stopped_timeout_s": 300.0, "straggler_factor": 0}, "rejoin": {"enabled": False}}
    config: dict[str, Any] = {**batch, "fault_tolerance": {**patient, **section}}
    job: list[object] = [__file__, "--", "train", of["steps"], directory / "loss"]
    if dataset is not None:
        config |= {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}
        config["fault_tolerance"]["model"] = MODEL
        job = ["--preload", "deepspeed", EXAMPLE, "--", "--data", dataset, "--steps", of["steps"], "--seed", 1]
    (directory / "config.json").write_text(json.dumps(config))
    environment = common.environment() | injection_points.to_env(list(holds))
    with (directory / "log").open("w") as output:
        command = common.launch(groups, directory / "config.json", directory / "run", *job)
        agent = subprocess.Popen(command, cwd=common.ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield agent
    finally:
        if agent.poll() is None:
            agent.terminate()
        agent.wait()


def _steps(lines: list[dict]) -> dict[str, list[float]]:
    """Return the loss of each step, and when it was made (seconds since the first one); of a repeated step the last."""
    steps = {line["step"]: line for line in common.of(lines, "step")}
    begun = min(line["t"] for line in common.of(lines, "step"))
    return {
        "losses": [one["loss"] for one in steps.values()],
        "t": [round(one["t"] - begun, 3) for one in steps.values()],
    }


def over_restart(found: dict[str, Any], of: dict[str, int]) -> list[float]:
    """Return the steps per second of ``recover`` over those of checkpoint-restart, after each number of losses from 1 on."""
    ends = [of["every"] * (number + 1) - 1 for number in range(1, of["losses"])] + [of["steps"] - 1]
    return [round(found["restart"]["t"][end] / found["recover"]["t"][end], 3) for end in ends]


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, name in zip(axes, ("plain", "3D"), strict=False):
        one, of = found[name], {"plain": PLAIN, "3D": THREE_D}[name]
        axis.plot(one["failure_free"]["losses"], color="0.6", linewidth=4, label="without failures")
        axis.plot(
            one["recover"]["losses"], color="C0", linewidth=1, label=f"{of['losses']} of {of['groups']} groups lost"
        )
        for number in range(of["losses"]):
            axis.axvline(of["every"] * (number + 1), color="C3", linewidth=0.5)
        ranks = "one rank" if of["ranks"] == 1 else "4 ranks, DeepSpeed PP 2 x TP 2"
        axis.set(xlabel="step", ylabel="loss", title=f"{of['groups']} groups of {ranks}")
        axis.legend(frameon=False)
    axes[2].plot(range(1, PLAIN["losses"] + 1), found["plain"]["over_restart"], marker="o")
    axes[2].set(
        xlabel="groups lost",
        title="steps per second so far,\ncheckpoint-restart's = 1",
        ylim=(0, 1.1 * max(found["plain"]["over_restart"])),
    )
    axes[2].axhline(1, color="0.6", linewidth=0.5)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    goodput.train(int(sys.argv[2]), Path(sys.argv[3]), MEGABYTES) if sys.argv[1:2] == ["train"] else main()
