"""A real Slurm cluster for tests (``tools/slurm_lab.py``): ``cluster = slurm.lab(3)`` makes a fixture of one.

``submit = slurm.submitted()`` makes a fixture that submits jobs of ``slurm/pretrain.sbatch`` to ``cluster``. For jobs
of the other sbatch scripts see ``slurm_jobs``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.record import history, invariants, run_directory
from tests import support
from tests.stores import await_
from tools.slurm_lab import Lab, missing

STEPS, GROUPS = 60, 3
DEADLINE_S, LOOK_S = 180.0, 0.2
OVER = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}
SBATCH_SCRIPT = support.ROOT / "slurm" / "pretrain.sbatch"

needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())


def lab(nodes: int, scope: str = "module", **shape: Any):
    """Make a fixture: a lab with this number of nodes, up for the length of ``scope``; it skips where there can be no
    lab. ``shape``: other options of the lab."""

    @pytest.fixture(scope=scope)
    def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        why = missing(shape.get("plain", False), shape.get("accounting", False))
        if why:
            pytest.skip(why)
        with Lab(tmp_path_factory.mktemp("slurm") / "lab", nodes, **shape) as cluster:
            yield cluster

    return up


def own_arguments(steps: int) -> list[object]:
    """Return the arguments of the training script."""
    return ["--steps", steps, "--seed", 1, *support.SMALL]


def config(path: Path, directory: Path, **detector: Any) -> Path:
    """Write a config with checkpoints in ``directory``; ``detector``: its settings, in place of a long heartbeat
    timeout."""
    detector = {"straggler_factor": 0, **(detector or {"heartbeat_timeout_s": support.HEARTBEAT_TIMEOUT_S})}
    changes = {"rejoin": {}, "detector": detector, "checkpoint": {"directory": str(directory)}}
    return support.write_config(path, **changes)


def failure_free(steps: int):
    """Make a fixture: the history of the same job on one host, without failures."""

    @pytest.fixture(scope="module")
    def alone(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> list[dict]:
        directory = tmp_path_factory.mktemp("reference")
        settings = ["--config", config(directory / "config.json", directory / "saved"), "--run-dir", directory / "run"]
        script = [support.SCRIPT, "--", "--data", data_dir, *own_arguments(steps)]
        done = support.ft("launch", "--groups", GROUPS, *settings, *script)
        assert done.returncode == 0, done.stderr
        return history.read(directory / "run")

    return alone


class Submission:
    """A job that ``sbatch`` was given with these options: the example with three groups, checkpoints and a spare node.

    The job makes ``steps`` steps, slowly until :meth:`go`: it does not end before its test has seen what it waits for.
    """

    def __init__(
        self, lab: Lab, directory: Path, data_dir: Path, batch: Sequence[object], steps: int, **variables: str
    ) -> None:
        self.lab, self.directory, self.run_dir, self.steps = lab, directory, directory / "run", steps
        self._gate = support.Gate(directory, slowly=steps)
        settings = self.config(directory)
        own = {"MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"), "RUN_DIR": str(self.run_dir)}
        own |= {"CONFIG": str(settings), "OMP_NUM_THREADS": "1", "SPARE_NODES": "1", **variables}
        command = ["sbatch", "--parsable", *batch, self._gate.script, "--", "--data", data_dir, *own_arguments(steps)]
        done = lab.run(command, env={**lab.env, **own}, cwd=support.ROOT, check=True)
        self.id = done.stdout.strip()

    def config(self, directory: Path) -> Path:
        return config(directory / "config.json", directory / "saved")

    def go(self) -> None:
        self._gate.open()

    @property
    def lines(self) -> list[dict]:
        """The history of all starts of the job, as one."""
        starts = run_directory.starts_of(self.run_dir)
        return invariants.joined([history.read(start) for start in starts])

    def events(self, event: str) -> list[dict]:
        return [line for line in history.read(self.run_dir) if line["event"] == event]

    def await_step(self, step: int) -> None:
        self.await_(lambda: any(line["step"] >= step for line in self.events("step")), f"step {step}")

    def await_back(self, group: int) -> None:
        self.await_(lambda: any(group in view["joined"] for view in self.events("view")), f"group {group} is back")
        # The agent that starts a group may write the ``restart`` line later than the group is back.
        self.await_(lambda: any(line["group"] == group for line in self.events("restart")), "its start is recorded")

    def await_(self, condition: Callable[[], object], what: str) -> None:
        try:
            await_(condition, what, DEADLINE_S, LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        logs = [*self.directory.glob("*.log*"), *self.run_dir.glob("*.log*"), *self.run_dir.glob("logs/*")]
        files = [*logs, *self.run_dir.glob("array/*/*")]
        listed = self.lab.run(["squeue", "--states=all", "--jobs", self.id]).stdout
        return "\n".join([listed, *(f"== {path.name}\n{path.read_text()}" for path in sorted(files))])

    def states(self) -> set[str]:
        """Return the states of the job, or of all elements."""
        asked = ["squeue", "--noheader", "--array", "--states=all", "--jobs", self.id, "--format", "%T"]
        return set(self.lab.run(asked).stdout.split())

    def await_over(self, what: str, *also: str) -> None:
        """Wait until no part of the job runs or is to run; the states in ``also`` end the wait, too."""
        self.await_(lambda: set() < self.states() <= {*OVER, *also}, what)

    def check(self, reference: list[dict]) -> None:
        """Check that all steps are made, with all microbatches, and with the losses of the failure-free run."""
        found = invariants.check_history(self.lines, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, self.said()])
        assert [line["step"] for line in self.lines if line["event"] == "step"] == list(range(self.steps))


class Job(Submission):
    """A job of ``slurm/pretrain.sbatch``. The batch shell is on n1, which is the spare node; host 0, with the store,
    is n2."""

    def __init__(
        self, lab: Lab, directory: Path, data_dir: Path, *options: str, steps: int = STEPS, **variables: str
    ) -> None:
        batch = ["--nodes=4", f"--output={directory}/batch.log", *options, SBATCH_SCRIPT]
        super().__init__(lab, directory, data_dir, batch, steps, **variables)

    def await_end(self, *states: str) -> None:
        """Wait until the job is in one of these states. Slurm waits for lost nodes to come back, or for
        SlurmdTimeout."""
        self.go()
        self.await_over("the end", "COMPLETING")
        restore(self.lab)
        self.await_over("all steps have ended")
        assert self.states() <= set(states), self.said()


def restore(lab: Lab) -> None:
    """Make all nodes well."""
    for node in lab.nodes:
        lab.thaw(node)
        lab.heal(node)
        if lab.slurmd(node) == "dead":
            lab.start_node(node)


def clear(lab: Lab, jobs: Sequence[Submission]) -> None:
    """Make all nodes well and idle."""
    restore(lab)
    for job in jobs:
        lab.run(["scancel", job.id])
    await_(lambda: set(lab.states().values()) == {"idle"}, "all nodes are idle again", DEADLINE_S, LOOK_S)


def submitted():
    """Make a fixture: it submits jobs to ``cluster``, and afterwards makes all of the cluster well and idle again."""

    @pytest.fixture
    def submit(cluster, tmp_path, data_dir):
        jobs: list[Job] = []

        def submit(*options: str, **variables: Any) -> Job:
            jobs.append(Job(cluster, tmp_path, data_dir, *options, **variables))
            return jobs[-1]

        yield submit
        clear(cluster, jobs)

    return submit


def pid_of(job: Job, group: int) -> int:
    def pids() -> list[int]:
        return [rank["pid"] for rank in run_directory.read(job.run_dir / "ranks.json") if rank["group"] == group]

    job.await_(pids, f"the agent of group {group} has written its rank down")
    return pids()[0]


def lose(lab, node: str) -> None:
    """Stop a node as a power cut does: its connections are not closed."""
    lab.cut(node)
    lab.kill_node(node)


def comes_back_on(job: Job, group: int, node: str) -> None:
    job.await_back(group)
    assert job.events("restart")[-1]["host"] == node, job.said()
