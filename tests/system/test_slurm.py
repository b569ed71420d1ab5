"""Real jobs in a real Slurm, three groups and a spare node: whatever fails, each job makes all its steps, once."""

from __future__ import annotations

import os

import pytest

from tests import slurm
from tests.slurm import STEPS, comes_back_on, lose, pid_of
from tools import proc

pytestmark = pytest.mark.system

cluster = slurm.lab(4)
submit = slurm.submitted()
failure_free = slurm.failure_free(STEPS)


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
    assert "(n3)" in why, why
    assert [line["what"] for line in job.events("host")] == ["spare", "took over"]


@pytest.mark.long
def test_the_node_of_host_0_is_replaced_like_any_other(cluster, submit, failure_free):
    job = submit(STORE="embedded")
    job.await_step(5)
    lose(cluster, "n2")
    comes_back_on(job, 0, "n1")
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert "n2 is host 0" in (job.directory / "batch.log").read_text()
    assert "(n2)" in next(view["lost"]["0"] for view in job.events("view") if "0" in view["lost"])


@pytest.mark.long
def test_a_frozen_node_is_replaced_and_named(cluster, submit, failure_free):
    job = submit()
    job.await_step(5)
    cluster.freeze("n4")
    comes_back_on(job, 2, "n1")
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert "(n4)" in next(view["lost"]["2"] for view in job.events("view") if "2" in view["lost"])


@pytest.mark.long
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


@pytest.mark.long
def test_a_supervisor_that_is_killed_is_started_again_by_the_script(cluster, submit, failure_free):
    """The new supervisor finds the running steps; nothing is started twice."""
    job = submit()
    job.await_step(5)
    supervisor = next(pid for pid in cluster.tasks_of("n1") if "supervise" in proc.command(pid)[:4])
    os.kill(supervisor, 9)
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert not job.events("fault") and len(job.events("view")) == 1
    assert (job.directory / "batch.log").read_text().count("hosts, 1 of them in reserve") == 1


@pytest.mark.long
def test_a_controller_that_restarts_costs_nothing(cluster, submit, failure_free):
    job = submit()
    job.await_step(5)
    cluster.restart_controller()
    job.await_end("COMPLETED")
    job.check(failure_free)
    assert not job.events("fault") and len(job.events("view")) == 1
