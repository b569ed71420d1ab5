"""Launchers are detected from their environment variables."""

from __future__ import annotations

import pytest

from megatron_ft.errors import LaunchError
from megatron_ft.launchers import detect
from megatron_ft.launchers.slurm import commands

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "n[1-4]",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-n0-12@1",
}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    monkeypatch.setattr(commands, "node_names", lambda text: {"n[1-4]": ["n1", "n2", "n3", "n4"]}[text])
    monkeypatch.setattr(commands, "node_address", lambda name: f"10.0.0.{name[1:]}")


@pytest.mark.parametrize(
    ("environ", "what", "hosts", "rank", "job", "target"),
    [
        (SRUN, "Slurm, job 7, step 3", 4, 2, "7.3.0", "10.0.0.1"),
        ({**SRUN, "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "2"}, "Slurm, job 7, step 3", 4, 0, "7.3.2", "10.0.0.2"),
        (TORCHRUN, "torchrun, run abc", 3, 1, "abc.n0:29500.0", "n0"),
        ({**SRUN, **TORCHRUN}, "torchrun, run abc", 3, 1, "abc.n0:29500.0", "n0"),
        (OPEN_MPI, "Open MPI", 5, 4, "prterun-n0-12@1", None),
        (MPICH, "an MPI with PMI", 2, 1, "", None),
    ],
)
def test_the_environment_of_a_launcher_gives_the_place_of_the_host(environ, what, hosts, rank, job, target):
    assert detect.find(environ) == detect.Surroundings(what, hosts, rank, job, target)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
        {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
        {**TORCHRUN, "GROUP_WORLD_SIZE": "1"},
    ],
)
def test_a_launcher_on_one_host_is_ignored(environ):
    assert detect.find(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, "not a step on each of them"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "32"}, "32 tasks on 4 nodes; .* --ntasks-per-node=1"),
        ({**SRUN, "SLURM_NODEID": "x"}, "SLURM_NODEID to 'x', which is not a number"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "8 processes on this host.* --nproc-per-node 1"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2 processes on this host"),
    ],
)
def test_several_processes_on_a_host_are_refused(environ, words):
    with pytest.raises(LaunchError, match=words):
        detect.find(environ)
