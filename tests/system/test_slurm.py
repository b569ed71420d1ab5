"""Real jobs in a real Slurm, three groups and a spare node: whatever is done to them, each makes all its steps, once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_ft.faults import checkers
from megatron_ft.runtime import history
from tests import slurm, support
from tests.stores import await_, etcd_missing
from tools import proc

pytestmark = pytest.mark.system

STEPS, GROUPS = 80, 3
OWN = ["--steps", STEPS, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
SCRIPT = support.ROOT / "slurm" / "pretrain.sbatch"
DEADLINE_S, LOOK_S = 180.0, 0.2

cluster = slurm.lab(4)


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


class Job:
    """One submitted job. The batch shell is on n1, which is the spare node; host 0, with the store, is n2."""

    def __init__(self, lab, directory: Path, data_dir: Path, *options: str, **variables: str) -> None:
        self.lab, self.directory, self.run_dir = lab, directory, directory / "run"
        settings = config(directory / "config.json", directory / "saved")
        own = {"MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"), "RUN_DIR": str(self.run_dir)}
        own |= {"CONFIG": str(settings), "OMP_NUM_THREADS": "1", "SPARE_NODES": "1", **variables}
        batch = ["sbatch", "--parsable", "--nodes=4", f"--output={directory}/batch.log", *options, SCRIPT]
        script = [support.SCRIPT, "--", "--data", data_dir, *OWN]
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
        assert [line["step"] for line in self.lines if line["event"] == "step"] == list(range(STEPS))


def restore(lab) -> None:
    """All nodes are well."""
    for node in lab.nodes:
        lab.thaw(node)
        lab.heal(node)
        if lab.slurmd(node) == "dead":
            lab.start_node(node)


@pytest.fixture
def submit(cluster, tmp_path, data_dir):
    jobs: list[Job] = []

    def submit(*options: str, **variables: str) -> Job:
        jobs.append(Job(cluster, tmp_path, data_dir, *options, **variables))
        return jobs[-1]

    yield submit
    restore(cluster)
    for job in jobs:
        cluster.run(["scancel", job.id])
    await_(lambda: set(cluster.states().values()) == {"idle"}, "all nodes are idle again", DEADLINE_S, LOOK_S)


def pid_of(job: Job, group: int) -> int:
    return next(rank["pid"] for rank in json.loads((job.run_dir / "ranks.json").read_text()) if rank["group"] == group)


def lose(lab, node: str) -> None:
    """As if its power were cut: its connections are not even closed."""
    lab.cut(node)
    lab.kill_node(node)


def comes_back_on(job: Job, group: int, node: str) -> None:
    job.await_(lambda: any(group in view["joined"] for view in job.events("view")), f"group {group} is back")
    assert job.events("restart")[-1]["host"] == node, job.said()


def test_a_killed_rank_comes_back_on_its_node(cluster, submit, failure_free):
    job = submit()
    job.await_step(5)
    os.kill(pid_of(job, 2), 9)
    comes_back_on(job, 2, "n4")
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert [(fault["host"], fault["signal"]) for fault in job.events("fault")] == [("n4", "SIGKILL")]


def test_a_node_without_power_is_replaced_by_the_spare_one_and_named(cluster, submit, failure_free):
    job = submit()
    job.await_step(5)
    lose(cluster, "n3")
    comes_back_on(job, 1, "n1")
    job.await_end("COMPLETED")
    job.check(failure_free)
    why = next(view["lost"]["1"] for view in job.events("view") if "1" in view["lost"])
    assert "host n3" in why, why
    assert [line["what"] for line in job.events("host")] == ["spare", "took over"]


@pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())
def test_the_node_of_host_0_is_replaced_like_any_other_with_an_etcd_of_the_runs_own(cluster, submit, failure_free):
    job = submit(STORE="etcd")
    job.await_step(5)
    lose(cluster, "n2")
    comes_back_on(job, 0, "n1")
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert "n2 n3 n4 have the control store" in (job.directory / "batch.log").read_text()
    assert "host n2" in next(view["lost"]["0"] for view in job.events("view") if "0" in view["lost"])


def test_a_frozen_node_is_replaced_and_named(cluster, submit, failure_free):
    job = submit()
    job.await_step(5)
    cluster.freeze("n4")
    comes_back_on(job, 2, "n1")
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert "host n4" in next(view["lost"]["2"] for view in job.events("view") if "2" in view["lost"])


def test_the_job_goes_on_without_its_batch_node(cluster, submit, failure_free):
    """A second supervisor ends the job; Slurm calls that cancelled, the job's comment and the record tell the truth."""
    job = submit()
    steps = ["squeue", "--noheader", "--steps", "--jobs", job.id, "--format", "%j"]
    job.await_(lambda: "mft-second" in cluster.run(steps).stdout, "a second supervisor")
    job.await_step(5)
    lose(cluster, "n1")
    job.await_end("CANCELLED", "NODE_FAIL")
    job.check(failure_free)
    assert "the run has got to its end (exit code 0)" in cluster.run(["scontrol", "show", "job", job.id]).stdout


def test_a_supervisor_that_is_killed_is_started_again_by_the_script(cluster, submit, failure_free):
    """It finds what runs; nothing is started twice."""
    job = submit()
    job.await_step(5)
    supervisor = next(pid for pid in cluster.tasks_of("n1") if "supervise" in proc.command(pid)[:4])
    os.kill(supervisor, 9)
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert not job.events("fault") and len(job.events("view")) == 1
    assert (job.directory / "batch.log").read_text().count("nodes, 1 of them in reserve") == 1


def test_a_controller_that_restarts_costs_nothing(cluster, submit, failure_free):
    job = submit()
    job.await_step(5)
    cluster.restart_controller()
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert not job.events("fault") and len(job.events("view")) == 1


def test_at_the_time_limit_the_run_saves_and_goes_on_in_the_requeued_job(cluster, submit, failure_free):
    job = submit("--time=10", STOP_BEFORE_S="580")
    job.await_(lambda: job.events("stop") and job.state() == "PENDING", "it is requeued")
    cluster.run(["scontrol", "update", f"jobid={job.id}", "StartTime=now", "TimeLimit=100"], check=True)
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert (job.run_dir / "earlier" / "0001").exists() and job.events("resume")
