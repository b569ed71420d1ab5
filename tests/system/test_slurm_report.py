"""What the report says of real jobs in a real Slurm: the right node, and the right meaning of Slurm's words."""

from __future__ import annotations

import os

import pytest

from megatron_ft.core import slurm_said
from tests import slurm, support
from tests.slurm import comes_back_on, lose, pid_of
from tools.slurm_lab import missing

pytestmark = pytest.mark.system

STEPS = 40
ACCOUNTING = not missing(accounting=True)
"""Where it is missing, the same is to be told without."""

cluster = slurm.lab(4, accounting=ACCOUNTING)
submit = slurm.submitted()


def rows(job: slurm.Job, *options: object) -> dict[str, str]:
    """What it was -> the report's line about it."""
    done = support.ft("report", job.run_dir, *options, env={**job.lab.env, "COLUMNS": "400"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.partition("Slurm: job")[2].splitlines() if line.startswith("│")]
    return {line.split("│")[1].partition("(")[0].strip(): line for line in lines}


def told_in_all_ways(job: slurm.Job) -> list[dict[str, str]]:
    """By the record alone, by Slurm now, and by what somebody has sent of ``sacct``, or of ``scontrol``."""
    sent = job.directory / "sent.txt"
    asked = ["sacct", "-D", "-P", "-j", job.id, "-o", ",".join(slurm_said.SACCT)]
    if ACCOUNTING:  # which hears of things later than the controller
        job.await_(lambda: "RUNNING" not in job.lab.run(asked, check=True).stdout, "accounting knows that the job has ended")
    sent.write_text(job.lab.run(asked if ACCOUNTING else ["scontrol", "show", "job", job.id], check=True).stdout)
    found = [rows(job), rows(job, "--slurm"), rows(job, "--sacct", sent)]
    for own in found:
        assert own["the job"].count("the run got to its end") == 1, found
    return found


def test_a_killed_rank_is_named_with_its_node(cluster, submit):
    job = submit(steps=STEPS)
    job.await_step(5)
    os.kill(pid_of(job, 2), 9)
    comes_back_on(job, 2, "n4")
    job.await_end("COMPLETED")
    ended = "its rank 0 of group 2 ended with SIGKILL, and the group came back"
    alone, now, sent = told_in_all_ways(job)
    for own in (alone, now, sent):
        assert [what for what, row in own.items() if ended in row] == ["agent of host 2"]
        assert "│ n4" in own["agent of host 2"]
        assert not any("was lost" in row for row in own.values()), own
    for own in (now, sent):
        assert "COMPLETED" in own["the job"] and "and the batch shell said so" in own["the job"]
    assert "RUNNING" in alone["the job"] and "ended with exit code 0, and after that it ended" in alone["the job"]
    # The supervisor asks accounting once, at its end; it may not have heard yet.
    assert ACCOUNTING or "COMPLETED 0:0, seen" not in alone["agent of host 0"]


def test_a_lost_node_is_named_and_that_slurm_does_not_know_it_yet(cluster, submit):
    job = submit(steps=STEPS)
    job.await_step(5)
    lose(cluster, "n3")
    comes_back_on(job, 1, "n1")
    before = rows(job, "--slurm")["agent of host 1"]
    assert "RUNNING" in before and "n3 was lost (nothing was heard of it from" in before
    assert "its group 1 went on on n1; Slurm lists its step until SlurmdTimeout" in before
    job.await_end("COMPLETED")
    for own in told_in_all_ways(job):
        assert [what for what, row in own.items() if "n3 was lost" in row and "agent" in what] == ["agent of host 1"], own


def test_a_job_that_was_cancelled_because_its_run_was_done(cluster, submit):
    job = submit(steps=STEPS)
    steps = ["squeue", "--noheader", "--steps", "--jobs", job.id, "--format", "%j"]
    job.await_(lambda: "mft-second" in cluster.run(steps).stdout, "a second supervisor")
    job.await_step(5)
    lose(cluster, "n1")
    job.await_(lambda: job.events("silence"), "the run, which goes on without it, misses it")
    job.await_end("CANCELLED", "NODE_FAIL")
    alone, now, sent = told_in_all_ways(job)
    why = "its batch node, n1, was lost (nothing was heard of it from"
    for own in (alone, now, sent):
        assert why in own["the job"] and "n1 was lost" in own["agent of host 3, in reserve"]
    for own in (now, sent):
        assert "CANCELLED" in own["the job"] and "could end the job: it cancelled it" in own["the job"]
    assert "RUNNING" in alone["the job"] and "the second supervisor, on n4, cancelled it after that" in alone["the job"]
