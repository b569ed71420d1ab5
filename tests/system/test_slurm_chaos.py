"""A burn-in on a real Slurm; jobs that continue when the same script is submitted again."""

from __future__ import annotations

import pytest

from megatron_ft.proof import verdict
from tests import slurm, support
from tests.slurm_jobs import STEPS, Submitted

pytestmark = pytest.mark.system

SLURM = support.ROOT / "slurm"

cluster = slurm.lab(4)
failure_free = slurm.failure_free(STEPS)


@pytest.fixture
def submit(cluster, tmp_path, data_dir):
    jobs: list[Submitted] = []

    def submit(script: str, **variables: str) -> Submitted:
        batch = ["--nodes=4", f"--output={tmp_path}/batch.{len(jobs)}.log", SLURM / script]
        jobs.append(Submitted(cluster, tmp_path, data_dir, batch, **variables))
        return jobs[-1]

    yield submit
    slurm.clear(cluster, jobs)


@pytest.mark.long
def test_a_burn_in_with_every_kind_of_fault_finds_every_promise_kept(submit, failure_free):
    """This seed draws a kill, a stop, an exception and the agent of a node; one that finds no rank is drawn again."""
    job = submit("chaos.sbatch", FAULTS="4", EVERY_S="1", SEED="54")

    def over() -> bool:
        lines = job.lines
        return verdict.faults(lines) >= 4 and not verdict.unnoticed(lines) and not verdict.absent(lines)

    job.await_(over, "the last fault is over")
    job.go()
    job.await_end()
    job.check(failure_free)
    said = (job.directory / "batch.0.log").read_text()
    assert "4 of 4 faults were injected" in said and "injected faults, every promise was kept" in said, said
    kinds = {line["kind"] for line in job.events("inject")}
    assert "agent" in kinds and len(kinds) > 2, said


@pytest.mark.long
def test_a_job_that_was_cancelled_goes_on_when_it_is_submitted_again(cluster, submit, failure_free):
    first = submit("pretrain.sbatch")
    first.await_step(5)
    cluster.run(["scancel", first.id], check=True)
    first.await_end()
    second = submit("pretrain.sbatch")
    second.go()
    second.await_end()
    second.check(failure_free)
    assert (second.run_dir / "earlier" / "0001").exists()


@pytest.mark.long
def test_a_job_that_was_stopped_goes_on_when_it_is_submitted_again(submit, failure_free):
    first = submit("pretrain.sbatch")
    first.await_step(5)
    stopped = support.ft("stop", first.run_dir)
    assert stopped.returncode == 0, stopped.stderr
    first.await_end()
    second = submit("pretrain.sbatch")
    second.go()
    second.await_end()
    second.check(failure_free)
    assert second.events("resume")[0]["step"] >= 6, "what had been made was saved"


def test_at_the_time_limit_the_run_saves_and_goes_on_in_the_requeued_job(cluster, submit, failure_free):
    job = submit("pretrain.sbatch", SBATCH_TIMELIMIT="10", STOP_BEFORE_S="580")
    job.await_(lambda: job.events("stop") and job.states() == {"PENDING"}, "it is requeued")
    job.go()
    cluster.run(["scontrol", "update", f"jobid={job.id}", "StartTime=now", "TimeLimit=100"], check=True)
    job.await_end()
    job.check(failure_free)
    assert (job.run_dir / "earlier" / "0001").exists() and job.events("resume")
