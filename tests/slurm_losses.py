"""Each node of a Slurm job is lost in turn: the second table of docs/host-losses.md (jobs in ``tools/slurm_lab.py``).

    python -m tests.slurm_losses [--nodes n1 n2 n3 n4] [--blows power kill freeze cut] [--save]

Each case is a job of its own: ``sbatch --nodes=4 slurm/pretrain.sbatch`` with three groups, a spare node and default
settings. n1 is the batch node and the spare one; n2 is host 0. One node is lost after some steps. All steps must be
committed once, with the losses of a run without failures, and the lost group must come back.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from megatron_ft.data import prepare
from megatron_ft.record import history
from tests import host_losses, slurm, support
from tests.host_losses import FREEZE_S, HEALED
from tools.slurm_lab import Lab

NODES = ("n1", "n2", "n3", "n4")
BLOWS = ("power", "kill", "freeze", "cut")
STRIKE_AT = 5


class Defaults(slurm.Job):
    """A job with the detector's default settings."""

    def config(self, directory: Path) -> Path:
        return slurm.config(directory / "config.json", directory / "saved", straggler_factor=0)


def play(lab: Lab, directory: Path, data: Path, reference: list[dict], node: str, blow: str) -> dict:
    """Play one job. ``commit_s`` and ``return_s`` are None for the spare node, of which no group is lost."""
    group = NODES.index(node) - 1
    row = {"node": node, "blow": blow, "store": "embedded", "commit_s": None, "return_s": None, "wrong": []}
    job = Defaults(lab, directory, data)
    try:
        job.await_step(STRIKE_AT)
        job.await_(lambda: job.events("host"), "the spare node")
        struck = time.time()
        strike = {"power": slurm.lose, "kill": Lab.kill_node, "freeze": Lab.freeze, "cut": Lab.cut}[blow]
        strike(lab, node)
        if group >= 0:
            job.await_back(group)
        if blow in HEALED:
            time.sleep(max(0.0, struck + FREEZE_S - time.time()))  # the length of the fault
            slurm.restore(lab)
        job.await_end("COMPLETED", "CANCELLED")
        job.check(reference)
        if group >= 0:
            row |= _times(job, group, struck)
    except AssertionError as error:
        row["wrong"] = [str(error)]
    finally:
        slurm.clear(lab, [job])
    return row


def _times(job: slurm.Job, group: int, struck: float) -> dict[str, float]:
    steps = [line for line in job.events("step") if line["t"] > struck]
    commit = next(line for line in steps if group not in line["live"])
    back = next(line for line in steps if line["t"] > commit["t"] and group in line["live"])
    return {"commit_s": round(commit["t"] - struck, 3), "return_s": round(back["t"] - struck, 3)}


def reference(directory: Path, data: Path) -> list[dict]:
    """Return the history of the same job on one host, without failures."""
    settings = ["--config", slurm.config(directory / "reference.json", directory / "saved")]
    settings += ["--run-dir", directory / "reference"]
    script = [support.SCRIPT, "--", "--data", data, *slurm.own_arguments(slurm.STEPS)]
    done = support.ft("launch", "--groups", slurm.GROUPS, *settings, *script)
    assert done.returncode == 0, done.stderr
    return history.read(directory / "reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", default=list(NODES), choices=NODES)
    parser.add_argument("--blows", nargs="+", default=list(BLOWS), choices=BLOWS)
    parser.add_argument("--save", action="store_true", help="keep the results, and write the table anew")
    options = parser.parse_args()
    cases = [(node, blow) for blow in options.blows for node in options.nodes]
    failed = 0
    with tempfile.TemporaryDirectory() as name, Lab(Path(name) / "lab", len(NODES)) as lab:
        directory = Path(name)
        text = support.ROOT / "megatron_ft" / "data" / "addresses.txt"
        prepare(directory / "data", [text], vocab_size=512, log=lambda line: None)
        alone = reference(directory, directory / "data")
        for number, case in enumerate(cases):
            own = directory / str(number)
            own.mkdir()
            row = play(lab, own, directory / "data", alone, *case)
            failed += bool(row["wrong"])
            took = f"commit {row['commit_s']} s, back {row['return_s']} s"
            print(f"{number + 1} of {len(cases)}: {' '.join(case)}: {took}", *row["wrong"], flush=True)
            if options.save:
                host_losses.save("slurm", {**row, "wrong": row["wrong"][:1]}, ("node", "blow", "store"))
    print(f"{len(cases)} jobs, {failed} wrong")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
