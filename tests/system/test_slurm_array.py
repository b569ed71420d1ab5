"""Array jobs in a real Slurm, three elements with a group each and one in reserve: only the lost one is queued again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_ft.faults import checkers
from megatron_ft.launch.board import Board
from megatron_ft.runtime import history
from tests import slurm, support
from tests.stores import await_
from tools import proc

pytestmark = pytest.mark.system

STEPS, GROUPS = 60, 3
OWN = ["--steps", STEPS, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
SCRIPT = support.ROOT / "slurm" / "array.sbatch"
DEADLINE_S, LOOK_S = 180.0, 0.2
GATE = """
import time
from pathlib import Path
from megatron_ft.runtime.session import Session
make = Session.train_step
def train_step(self, *arguments, **options):
    deadline = time.monotonic() + 1.0
    while not Path({gate!r}).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return make(self, *arguments, **options)
Session.train_step = train_step
"""
"""Steps take a second longer until that file is there: the run does not end before its test has seen what it waits for."""

cluster = slurm.lab(4)


def config(path: Path, directory: Path) -> Path:
    changes = {"rejoin": {}, "detector": {"straggler_factor": 0}, "checkpoint": {"directory": str(directory)}}
    return support.write_config(path, **changes)


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory, data_dir) -> list[dict]:
    directory = tmp_path_factory.mktemp("reference")
    settings = ["--config", config(directory / "config.json", directory / "saved"), "--run-dir", directory / "run"]
    done = support.ft("launch", "--groups", GROUPS, *settings, support.SCRIPT, "--", "--data", data_dir, *OWN)
    assert done.returncode == 0, done.stderr
    return history.read(directory / "run")


class Array:
    """One submitted array of four elements."""

    def __init__(self, lab, directory: Path, data_dir: Path, *options: str) -> None:
        self.lab, self.directory, self.run_dir = lab, directory, directory / "run"
        self.gate = directory / "go"
        script = support.changed_script(directory / "train.py", GATE.format(gate=str(self.gate)))
        own = {"MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"), "RUN_DIR": str(self.run_dir)}
        own |= {"CONFIG": str(config(directory / "config.json", directory / "saved")), "OMP_NUM_THREADS": "1"}
        batch = ["sbatch", "--parsable", "--array=0-3", f"--output={directory}/element.%a.log", *options, SCRIPT]
        arguments = [script, "--", "--data", data_dir, *OWN]
        done = lab.run([*batch, *arguments], env={**lab.env, **own}, cwd=support.ROOT, check=True)
        self.id = done.stdout.strip()

    @property
    def lines(self) -> list[dict]:
        starts = [*sorted((self.run_dir / "earlier").glob("*")), self.run_dir]
        return checkers.joined([history.read(start) for start in starts])

    def events(self, event: str) -> list[dict]:
        return [line for line in history.read(self.run_dir) if line["event"] == event]

    def await_(self, condition, what: str) -> None:
        try:
            await_(condition, what, DEADLINE_S, LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def await_step(self, step: int) -> None:
        self.await_(lambda: any(line["step"] >= step for line in self.events("step")), f"step {step}")

    def said(self) -> str:
        files = [*self.directory.glob("*.log*"), *self.run_dir.glob("logs/*"), *self.run_dir.glob("array/*/*")]
        listed = self.lab.run(["squeue", "--states=all", "--jobs", self.id]).stdout
        return "\n".join([listed, *(f"== {path.name}\n{path.read_text()}" for path in sorted(files))])

    def elements(self) -> dict[int, tuple[str, str, str]]:
        """Job id, state and node of each."""
        asked = ["squeue", "--noheader", "--array", "--states=all", "--jobs", self.id, "--format", "%K %A %T %N"]
        rows = (line.split() for line in self.lab.run(asked).stdout.splitlines())
        return {int(row[0]): (row[1], row[2], row[3] if len(row) > 3 else "") for row in rows}

    def state(self, element: int) -> str:
        return self.elements()[element][1]

    def start_now(self, element: int) -> None:
        """One that was requeued; Slurm would wait for two minutes."""
        self.await_(lambda: self.state(element) == "PENDING", f"element {element} is requeued")
        self.lab.run(["scontrol", "update", f"jobid={self.elements()[element][0]}", "StartTime=now"], check=True)

    def beat(self, element: int):
        return Board(self.run_dir / "array" / self.id).last(element)

    def kill(self, element: int, *words: str) -> None:
        """SIGKILL to the process of that element whose command has these words."""
        node = self.elements()[element][2]
        pids = [pid for pid in self.lab.tasks_of(node) if set(words) <= set(proc.command(pid)[:5])]
        proc.send(sorted(pids)[:1], 9)

    def finish(self, reference: list[dict]) -> None:
        """All elements end with 0; all steps are made, with all microbatches, and the losses of the failure-free run."""
        self.gate.touch()
        over = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}
        self.await_(lambda: {state for _, state, _ in self.elements().values()} <= over, "all elements have ended")
        assert {state for _, state, _ in self.elements().values()} == {"COMPLETED"}, self.said()
        found = checkers.check_history(self.lines, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, self.said()])
        assert [line["step"] for line in self.lines if line["event"] == "step"] == list(range(STEPS))


@pytest.fixture
def submit(cluster, tmp_path, data_dir):
    arrays: list[Array] = []

    def submit(*options: str) -> Array:
        arrays.append(Array(cluster, tmp_path, data_dir, *options))
        return arrays[-1]

    yield submit
    for node in cluster.nodes:
        cluster.thaw(node)
        cluster.heal(node)
        if cluster.slurmd(node) == "dead":
            cluster.start_node(node)
    for array in arrays:
        cluster.run(["scancel", array.id])
    await_(lambda: set(cluster.states().values()) == {"idle"}, "all nodes are idle again", DEADLINE_S, LOOK_S)


def back(array: Array, group: int) -> bool:
    return any(group in view["joined"] for view in array.events("view"))


def test_an_element_without_power_is_replaced_and_comes_back_as_a_spare(cluster, submit, failure_free):
    array = submit()
    array.await_step(3)
    group = next(rank["group"] for rank in json.loads((array.run_dir / "ranks.json").read_text()) if rank["group"] == 1)
    _, _, node = array.elements()[1]
    spare = array.elements()[3][2]
    cluster.cut(node)
    cluster.kill_node(node)
    array.await_(lambda: back(array, group), "the spare element has taken group 1 over")
    assert array.events("restart")[-1]["host"] == spare, array.said()
    cluster.heal(node)
    cluster.start_node(node)
    array.start_now(1)
    array.await_(lambda: [line["what"] for line in array.events("host")].count("spare") == 2, "it stands by")
    assert array.beat(1).restarts == 1
    array.finish(failure_free)
    assert not (array.run_dir / "earlier").exists(), "one run, without a pause"
