"""A real Slurm cluster for tests (``tools/slurm_lab.py``): ``cluster = slurm.lab(3)`` makes a fixture of one. And jobs of
``slurm/pretrain.sbatch`` in it: ``submit = slurm.submitted()`` makes a fixture that submits them to ``cluster``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.faults import checkers
from megatron_ft.runtime import history
from tests import support
from tests.stores import await_
from tools.slurm_lab import Lab, missing

STEPS, GROUPS = 80, 3
DEADLINE_S, LOOK_S = 180.0, 0.2
SBATCH_SCRIPT = support.ROOT / "slurm" / "pretrain.sbatch"

needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())


def lab(nodes: int, scope: str = "module", **shape: Any):
    """A fixture: a lab of that many nodes, up as long as ``scope`` lasts; skips where there can be none. ``shape``: its
    other options."""

    @pytest.fixture(scope=scope)
    def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        why = missing(shape.get("plain", False), shape.get("accounting", False))
        if why:
            pytest.skip(why)
        with Lab(tmp_path_factory.mktemp("slurm") / "lab", nodes, **shape) as cluster:
            yield cluster

    return up


def own_arguments(steps: int) -> list[object]:
    """Of the training script."""
    return ["--steps", steps, "--seed", 1, *support.SMALL]


def config(path: Path, directory: Path) -> Path:
    changes = {"rejoin": {}, "detector": {"straggler_factor": 0}, "checkpoint": {"directory": str(directory)}}
    return support.write_config(path, **changes)


class Job:
    """One submitted job of so many ``steps``, three groups and a spare node. The batch shell is on n1, which is that node;
    host 0, with the store, is n2."""

    def __init__(
        self, lab: Lab, directory: Path, data_dir: Path, *options: str, steps: int = STEPS, **variables: str
    ) -> None:
        self.lab, self.directory, self.run_dir, self.steps = lab, directory, directory / "run", steps
        settings = config(directory / "config.json", directory / "saved")
        own = {"MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"), "RUN_DIR": str(self.run_dir)}
        own |= {"CONFIG": str(settings), "OMP_NUM_THREADS": "1", "SPARE_NODES": "1", **variables}
        batch = ["sbatch", "--parsable", "--nodes=4", f"--output={directory}/batch.log", *options, SBATCH_SCRIPT]
        script = [support.SCRIPT, "--", "--data", data_dir, *own_arguments(steps)]
        environment = {**lab.env, **own}
        done = lab.run([*batch, *script], env=environment, cwd=support.ROOT, check=True)
        self.id = done.stdout.strip()

    @property
    def lines(self) -> list[dict]:
        """The history of all its starts, as one."""
        starts = [*sorted((self.run_dir / "earlier").glob("*")), self.run_dir]
        return checkers.joined([history.read(start) for start in starts])

    def events(self, event: str) -> list[dict]:
        return [line for line in history.read(self.run_dir) if line["event"] == event]

    def await_step(self, step: int) -> None:
        self.await_(lambda: any(line["step"] >= step for line in self.events("step")), f"step {step}")

    def await_(self, condition, what: str) -> None:
        try:
            await_(condition, what, DEADLINE_S, LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        files = [*self.directory.glob("*.log*"), *self.run_dir.glob("logs/*")]
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(files))

    def state(self) -> str:
        return self.lab.run(["squeue", "--noheader", "--states=all", "--jobs", self.id, "--format", "%T"]).stdout.strip()

    def await_end(self, *states: str) -> None:
        """Slurm waits for lost nodes to come back, or for SlurmdTimeout."""
        self.await_(lambda: self.state() in ("COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "NODE_FAIL"), "the end")
        restore(self.lab)
        self.await_(lambda: self.state() != "COMPLETING", "all steps have ended")
        assert self.state() in states, f"{self.state()}\n{self.said()}"

    def check(self, reference: list[dict]) -> None:
        """All steps are made, with all microbatches, and the losses of the failure-free run."""
        found = checkers.check_history(self.lines, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, self.said()])
        assert [line["step"] for line in self.lines if line["event"] == "step"] == list(range(self.steps))


def restore(lab) -> None:
    """All nodes are well."""
    for node in lab.nodes:
        lab.thaw(node)
        lab.heal(node)
        if lab.slurmd(node) == "dead":
            lab.start_node(node)


def submitted():
    """A fixture: submits jobs to ``cluster``, and afterwards has all of that well and idle again."""

    @pytest.fixture
    def submit(cluster, tmp_path, data_dir):
        jobs: list[Job] = []

        def submit(*options: str, **variables: Any) -> Job:
            jobs.append(Job(cluster, tmp_path, data_dir, *options, **variables))
            return jobs[-1]

        yield submit
        restore(cluster)
        for job in jobs:
            cluster.run(["scancel", job.id])
        await_(lambda: set(cluster.states().values()) == {"idle"}, "all nodes are idle again", DEADLINE_S, LOOK_S)

    return submit


def pid_of(job: Job, group: int) -> int:
    return next(rank["pid"] for rank in json.loads((job.run_dir / "ranks.json").read_text()) if rank["group"] == group)


def lose(lab, node: str) -> None:
    """As if its power were cut: its connections are not even closed."""
    lab.cut(node)
    lab.kill_node(node)


def comes_back_on(job: Job, group: int, node: str) -> None:
    job.await_(lambda: any(group in view["joined"] for view in job.events("view")), f"group {group} is back")
    assert job.events("restart")[-1]["host"] == node, job.said()
