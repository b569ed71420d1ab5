"""What the tests of Slurm jobs submit: the example with three groups, checkpoints, and a run that waits for its test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_ft.faults import checkers
from megatron_ft.runtime import history
from tests import support
from tests.stores import await_
from tools.slurm_lab import Lab

STEPS, GROUPS = 40, 3
OWN = ["--steps", STEPS, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
DEADLINE_S, LOOK_S = 180.0, 0.2
OVER = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}
_GATE = """
import itertools
import time
from pathlib import Path
from megatron_ft.runtime.session import Session
make, made = Session.train_step, itertools.count()
def train_step(self, *arguments, **options):
    deadline = time.monotonic() + 2.5 * (next(made) > 4)
    while not Path({gate!r}).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return make(self, *arguments, **options)
Session.train_step = train_step
"""


def config(path: Path, directory: Path) -> Path:
    changes = {"rejoin": {}, "detector": {"straggler_factor": 0}, "checkpoint": {"directory": str(directory)}}
    return support.write_config(path, **changes)


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory, data_dir) -> list[dict]:
    """The history of the same job on one host, to which nothing happens."""
    directory = tmp_path_factory.mktemp("reference")
    settings = ["--config", config(directory / "config.json", directory / "saved"), "--run-dir", directory / "run"]
    done = support.ft("launch", "--groups", GROUPS, *settings, support.SCRIPT, "--", "--data", data_dir, *OWN)
    assert done.returncode == 0, done.stderr
    return history.read(directory / "run")


class Submitted:
    """One job, or array, in a lab. Its steps take longer until :meth:`go`: it does not end before its test has seen what it
    waits for."""

    def __init__(self, lab: Lab, directory: Path, data_dir: Path, batch: Sequence[object], **variables: str) -> None:
        self.lab, self.directory, self.run_dir = lab, directory, directory / "run"
        self._gate = directory / "go"
        script = support.changed_script(directory / "train.py", _GATE.format(gate=str(self._gate)))
        own = {"MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"), "RUN_DIR": str(self.run_dir)}
        own |= {"CONFIG": str(config(directory / "config.json", directory / "saved")), "OMP_NUM_THREADS": "1"}
        command = ["sbatch", "--parsable", *batch, script, "--", "--data", data_dir, *OWN]
        done = lab.run(command, env={**lab.env, **own, "SPARE_NODES": "1", **variables}, cwd=support.ROOT, check=True)
        self.id = done.stdout.strip()

    def go(self) -> None:
        self._gate.touch()

    @property
    def lines(self) -> list[dict]:
        """The history of all its starts, as one."""
        starts = [*sorted((self.run_dir / "earlier").glob("*")), self.run_dir]
        return checkers.joined([history.read(start) for start in starts])

    def events(self, event: str) -> list[dict]:
        return [line for line in history.read(self.run_dir) if line["event"] == event]

    def await_(self, condition: Callable[[], object], what: str) -> None:
        try:
            await_(condition, what, DEADLINE_S, LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def await_step(self, step: int) -> None:
        self.await_(lambda: any(line["step"] >= step for line in self.events("step")), f"step {step}")

    def said(self) -> str:
        logs = [*self.directory.glob("*.log*"), *self.run_dir.glob("*.log*"), *self.run_dir.glob("logs/*")]
        files = [*logs, *self.run_dir.glob("array/*/*")]
        listed = self.lab.run(["squeue", "--states=all", "--jobs", self.id]).stdout
        return "\n".join([listed, *(f"== {path.name}\n{path.read_text()}" for path in sorted(files))])

    def states(self) -> set[str]:
        """Of the job, or of all elements."""
        asked = ["squeue", "--noheader", "--array", "--states=all", "--jobs", self.id, "--format", "%T"]
        return set(self.lab.run(asked).stdout.split())

    def await_end(self) -> None:
        self.await_(lambda: self.states() <= OVER, "the end")

    def check(self, reference: list[dict]) -> None:
        """It has ended with 0; all steps are made, with all microbatches, and the losses of the failure-free run."""
        assert self.states() == {"COMPLETED"}, self.said()
        found = checkers.check_history(self.lines, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, self.said()])
        assert [line["step"] for line in self.lines if line["event"] == "step"] == list(range(STEPS))


def mend(lab: Lab, submitted: Sequence[Submitted]) -> None:
    """All nodes are well, and idle."""
    for node in lab.nodes:
        lab.thaw(node)
        lab.heal(node)
        if lab.slurmd(node) == "dead":
            lab.start_node(node)
    for job in submitted:
        lab.run(["scancel", job.id])
    await_(lambda: set(lab.states().values()) == {"idle"}, "all nodes are idle again", DEADLINE_S, LOOK_S)
