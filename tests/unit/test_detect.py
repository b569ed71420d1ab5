"""The place of this host is found in the variables of launchers and services; what leaves it open is refused."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_ft.cluster.launchers import detect, host_place
from megatron_ft.cluster.launchers.slurm import commands
from megatron_ft.errors import LaunchError
from megatron_ft.run import standalone_run
from megatron_ft.utils import net

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "n[1-4]",
}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}
ONE_TASK = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "3",
    "RANK": "1",
    "LOCAL_RANK": "0",
    "GROUP_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
DEEPSPEED = {
    **{"CROSS_SIZE": "2", "CROSS_RANK": "1", "LOCAL_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1"},
    **{"MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-n0-12@1",
    "PMIX_RANK": "4",
}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}
JSRUN = {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "1"}
HOROVOD = {"HOROVOD_SIZE": "2", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_CROSS_RANK": "1", "HOROVOD_LOCAL_SIZE": "1"}
FLUX = {"FLUX_JOB_ID": "f5", "FLUX_JOB_NNODES": "2", "FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "PMI_SIZE": "2"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TRAIN_JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0-0.job", "PET_MASTER_PORT": "29400"}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "TRAINING_JOB_NAME": "t1",
}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {"workerpool0": ["w0:2222"], "workerpool1": ["w1:2222", "w2:2222"]},
            "task": {"type": "workerpool1", "index": 1},
        }
    )
}
BATCH = {
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
    "AWS_BATCH_JOB_ID": "j#1",
    "AWS_BATCH_JOB_ATTEMPT": "1",
}
AZURE = {"AZUREML_NODE_COUNT": "2", "NODE_RANK": "1", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "WORLD_SIZE": "2"}
NUMBERED = {
    "torchrun": (TORCHRUN, 3, 1, "abc.n0:29500.0", "n0", 0),
    "torchrun in Slurm": ({**SRUN, **TORCHRUN}, 3, 1, "abc.n0:29500.0", "n0", 0),
    "deepspeed": (DEEPSPEED, 2, 1, "", "n0", 29500),
    "Open MPI": (OPEN_MPI, 5, 4, "prterun-n0-12@1", None, 0),
    "MPICH": (MPICH, 2, 1, "", None, 0),
    "jsrun": (JSRUN, 2, 1, "", None, 0),
    "Horovod": (HOROVOD, 2, 1, "", None, 0),
    "Flux": (FLUX, 2, 1, "f5", None, 0),
    "PyTorchJob": (PYTORCH_JOB, 2, 1, "", "job-master-0", 23456),
    "PyTorchJob with 8 GPUs": (
        {**PYTORCH_JOB, "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"},
        *(2, 1, "", "job-master-0", 23456),
    ),
    "TrainJob": (TRAIN_JOB, 2, 1, "", "job-0-0.job", 29400),
    "torchrun for one host in a TrainJob": (
        {**TORCHRUN, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "WORLD_SIZE": "1", "RANK": "0", **TRAIN_JOB},
        *(2, 1, "", "job-0-0.job", 29400),
    ),
    "SageMaker": (SAGEMAKER, 2, 1, "t1", "algo-1", 0),
    "Vertex": (VERTEX, 3, 2, "", "w0", 2222),
    "AWS Batch": (BATCH, 2, 1, "j.1", "10.0.0.4", 0),
    "Azure ML": (AZURE, 2, 1, "", "10.0.0.4", 0),
    "LWS": ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "l"}, 2, 1, "", "l", 0),
    "SkyPilot": (
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        *(2, 1, "", "10.0.0.1", 0),
    ),
    "dstack": (
        {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
        *(2, 1, "", "10.0.0.1", 0),
    ),
    "NODE_RANK": ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, 2, 1, "", "a", 0),
}
REFUSED = {
    "batch shell": (SHELL, "4 hosts.*srun --ntasks-per-node=1.*--hosts 1"),
    "interactive step": ({**SHELL, **ONE_TASK, "SLURM_STEP_ID": "4294967290"}, "4 hosts.*--hosts 1"),
    "srun --pty": ({**SHELL, **ONE_TASK, "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4000"}, "4 hosts.*--hosts 1"),
    "32 tasks": ({**SRUN, "SLURM_STEP_NUM_TASKS": "32"}, "8 processes on this host.*--ntasks-per-node=1"),
    "3 tasks on 2": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0"},
        "2 processes on this host",
    ),
    "no number": ({**SRUN, "SLURM_NODEID": "x"}, "SLURM_NODEID to 'x', which is not a number"),
    "no place": ({**PYTORCH_JOB, "RANK": ""}, "2 hosts for this job, and no variable says which.*--hosts 1"),
    "out of range": ({**PYTORCH_JOB, "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
    "torchrun with 8": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "8 processes on this host.* --nproc-per-node 1"),
    "Open MPI with 2": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "2 processes on this host"),
    "Azure ML with 8": ({**AZURE, "WORLD_SIZE": "16", "LOCAL_RANK": "0"}, "8 processes on this host"),
    "a second process": ({**PYTORCH_JOB, "LOCAL_RANK": "1"}, "2 processes on this host"),
    "elastic": ({"PET_NNODES": "1:4"}, "4 hosts.*no variable says which"),
    "PMIx": ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, "several hosts, perhaps,.*--hosts 1"),
    "LSF": ({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 4 b 4"}, "LSF has 2 hosts.*--hosts 1"),
    "Grid Engine": ({"NHOSTS": "2", "PE_HOSTFILE": "/x"}, "Grid Engine has 2 hosts"),
    "Azure Batch": ({"AZ_BATCH_NODE_LIST": "10.0.0.4;10.0.0.5"}, "Azure Batch has 2 hosts"),
}
ALONE = {
    "nothing": {},
    "batch shell of one node": {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"},
    "one task": {**SRUN, **ONE_TASK},
    "one task of a larger job": {**SHELL, **SRUN, **ONE_TASK, "PMIX_RANK": "0"},
    "torchrun with one process": {**TORCHRUN, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "WORLD_SIZE": "1"},
    "a pod alone": {**PYTORCH_JOB, "WORLD_SIZE": "1", "RANK": "0", "PET_NNODES": "1", "PET_NODE_RANK": "0"},
    "LSF on one host": {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 4"},
    "a parameter server": {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "ps", "index": 0}}'},
}


@pytest.fixture(autouse=True)
def addresses(monkeypatch):
    monkeypatch.setattr(commands, "node_address", lambda name: f"10.0.0.{name[1:]}")


@pytest.mark.parametrize("case", NUMBERED)
def test_the_variables_give_the_place_of_the_host(case):
    environ, hosts, rank, job, first, port = NUMBERED[case]
    found = detect.find(environ)
    assert (found.hosts, found.host_rank, found.job, found.first, found.port) == (hosts, rank, job, first, port)
    with pytest.raises(LaunchError, match=f"{hosts} hosts.*megatron-ft launch.*standalone=True"):
        standalone_run.check_alone(environ)


def test_a_slurm_step_names_another_node_and_counts_its_restarts():
    found = detect.find(SRUN)
    assert (found.name, found.job, found.hosts, found.host_rank) == ("srun", "7.3.0", 4, 2)
    assert detect.target(found, SRUN) == "10.0.0.1"
    found = detect.find({**SRUN, "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "2"})
    assert (found.job, found.host_rank, detect.target(found, SRUN)) == ("7.3.2", 0, "10.0.0.2")


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_the_place_open_is_refused(case):
    environ, words = REFUSED[case]
    with pytest.raises(LaunchError, match=words):
        detect.find(environ)
    with pytest.raises(LaunchError):
        standalone_run.check_alone(environ)


@pytest.mark.parametrize("case", ALONE)
def test_one_process_of_a_launcher_is_alone(case):
    assert detect.find(ALONE[case]) is None
    standalone_run.check_alone(ALONE[case])


def test_the_hosts_in_the_file_of_pbs_are_counted(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("a.x\na.x\nb.x\n")
    with pytest.raises(LaunchError, match="PBS has 2 hosts"):
        detect.find({"PBS_JOBID": "5", "PBS_NODEFILE": str(file)})
    file.write_text("a.x\na.x\n")
    assert detect.find({"PBS_JOBID": "5", "PBS_NODEFILE": str(file)}) is None


@pytest.mark.parametrize(
    ("environ", "given", "store", "job"),
    [
        (TRAIN_JOB, {}, "job-0-0.job:29400", None),
        (TRAIN_JOB, {"port": 4000}, "job-0-0.job:4000", None),
        (TRAIN_JOB, {"store": "a:1", "job_id": "j"}, "a:1", "j"),
        ({**PYTORCH_JOB, "RANK": "0", "MASTER_ADDR": "localhost"}, {}, "10.9.9.9:23456", None),
        (SAGEMAKER, {}, None, "t1"),
        (SAGEMAKER, {"port": 4000}, "algo-1:4000", "t1"),
    ],
)
def test_hosts_meet_at_the_port_that_the_environment_names(monkeypatch, environ, given, store, job):
    """In pods, whose names have their addresses already."""
    monkeypatch.setattr(host_place.os, "environ", {**environ, "KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    monkeypatch.setattr(net, "of", lambda name: ["10.0.0.1"])
    monkeypatch.setattr(net, "own_address", lambda target: "10.9.9.9")
    options = argparse.Namespace(**{"port": 0, "store": None, "job_id": None, "address": None, **given})
    host_place.from_surroundings(options)
    assert (options.hosts, options.store, options.job_id) == (2, store, job)


def test_several_hosts_without_the_number_of_this_one_are_refused():
    with pytest.raises(LaunchError, match="--hosts is 2 and --host-rank is missing.*from 0 to 1"):
        host_place.check_rank(argparse.Namespace(hosts=2, host_rank=None))
