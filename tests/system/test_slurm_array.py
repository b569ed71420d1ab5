"""Array jobs in a real Slurm, three elements with a group each and one in reserve: only the lost one is queued again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.cluster.launchers.slurm.array_board import ArrayState
from megatron_ft.core.lifecycle.array_policy import Heartbeat
from tests import slurm, support
from tests.slurm_jobs import STEPS, Submitted
from tools import proc

pytestmark = pytest.mark.system

SCRIPT = support.ROOT / "slurm" / "array.sbatch"

cluster = slurm.lab(4)
failure_free = slurm.failure_free(STEPS)


class Array(Submitted):
    """An array job of four elements."""

    def __init__(self, lab, directory: Path, data_dir: Path, *options: str) -> None:
        batch = ["--array=0-3", f"--output={directory}/element.%a.log", *options, SCRIPT]
        super().__init__(lab, directory, data_dir, batch)

    def elements(self) -> dict[int, tuple[str, str]]:
        """Return state and node of each element."""
        asked = ["squeue", "--noheader", "--array", "--states=all", "--jobs", self.id, "--format", "%K %T %N"]
        rows = (line.split() for line in self.lab.run(asked).stdout.splitlines())
        return {int(row[0]): (row[1], "".join(row[2:])) for row in rows}

    def hosts(self) -> list[int]:
        """Return the elements that have begun the run, by group; the one in reserve last. They come in any order."""
        begun = list(ArrayState(self.run_dir / "array" / self.id).read()[0].hosts)
        return [*begun, *({0, 1, 2, 3} - set(begun))]

    def node(self, element: int) -> str:
        return self.elements()[element][1]

    def start_now(self, element: int) -> None:
        """Start a requeued element now; Slurm would wait for two minutes. A node refuses a job in the second in which
        it was killed there."""
        self.await_(lambda: self.elements()[element][0] == "PENDING", f"element {element} is requeued")
        self.lab.run(["scontrol", "update", f"jobid={self.id}_{element}", "StartTime=now+3"], check=True)

    def heartbeat(self, element: int) -> Heartbeat:
        return ArrayState(self.run_dir / "array" / self.id).last(element)

    def kill(self, element: int, word: str) -> None:
        """Send SIGKILL to the command of this project that runs there under that name."""
        pids = [pid for pid in self.lab.tasks_of(self.node(element)) if word in proc.command(pid)[:4]]
        assert pids, self.said()
        proc.send(sorted(pids)[:1], 9)

    def await_spares(self, count: int) -> None:
        what = f"{count} elements have come as spares"
        self.await_(lambda: [line["what"] for line in self.events("host")].count("spare") == count, what)


@pytest.fixture
def submit(cluster, tmp_path, data_dir):
    arrays: list[Array] = []

    def submit(*options: str) -> Array:
        arrays.append(Array(cluster, tmp_path, data_dir, *options))
        return arrays[-1]

    yield submit
    slurm.clear(cluster, arrays)


@pytest.mark.long
def test_an_element_without_power_is_replaced_and_comes_back_as_a_spare(cluster, submit, failure_free):
    array = submit()
    array.await_step(3)
    array.await_spares(1)
    element = array.hosts()[1]
    lost, spare = array.node(element), array.node(array.hosts()[3])
    cluster.cut(lost)
    cluster.kill_node(lost)
    array.await_back(1)
    assert array.events("restart")[-1]["host"] == spare, array.said()
    cluster.heal(lost)
    cluster.start_node(lost)
    array.start_now(element)
    array.await_spares(2)
    assert array.heartbeat(element).restarts == 1
    array.go()
    array.await_end()
    array.check(failure_free)
    assert not (array.run_dir / "earlier").exists(), "one run, without a pause"


@pytest.mark.long
def test_an_agent_and_then_its_element_are_killed_and_both_are_back_without_slurm(cluster, submit, failure_free):
    array = submit()
    array.await_step(3)
    array.await_spares(1)
    array.kill(array.hosts()[2], "launch")
    array.await_back(2)
    array.await_spares(2)
    array.kill(array.hosts()[1], "supervise")
    array.await_back(1)
    array.await_spares(3)
    assert [array.heartbeat(element).restarts for element in range(4)] == [0, 0, 0, 0]
    array.go()
    array.await_end()
    array.check(failure_free)


@pytest.mark.long
def test_at_the_time_limit_all_elements_are_requeued_and_go_on_from_the_checkpoint(cluster, submit, failure_free):
    array = submit()
    array.await_step(3)
    cluster.run(["scancel", "--signal=USR1", "--batch", f"{array.id}_2"], check=True)
    array.await_(lambda: array.states() == {"PENDING"}, "all are requeued")
    for element in range(4):
        array.start_now(element)
    array.go()
    array.await_end()
    array.check(failure_free)
    assert [array.heartbeat(element).restarts for element in range(4)] == [1, 1, 1, 1]
    assert len(list((array.run_dir / "earlier").iterdir())) == 1 and array.events("resume")


@pytest.mark.long
def test_all_elements_are_lost_and_the_run_begins_again(cluster, submit, failure_free):
    array = submit()
    array.await_step(3)
    cluster.run(["scontrol", "requeue", array.id], check=True)
    for element in range(4):
        array.start_now(element)
    array.await_(lambda: (array.run_dir / "earlier").exists() and array.events("step"), "the second start makes steps")
    array.go()
    array.await_end()
    array.check(failure_free)
