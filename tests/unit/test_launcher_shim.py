"""The environment of another launcher becomes arguments of ``megatron-ft launch``."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_ft.cluster.launchers import launcher_shim
from megatron_ft.errors import FTError

DEEPSPEED = {
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_SIZE": "4",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def configs(tmp_path, monkeypatch):
    """Creates ds.json and x.json in the working directory of the shim."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "x.json").write_text(json.dumps({"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}))


def options(**changes) -> argparse.Namespace:
    known = {"ranks_per_group": 2, "run_dir": "runs/a", "config": None, "overwrite": False, "script": "train.py"}
    known |= {"megatron_lm": False, "module": False}
    return argparse.Namespace(**{**known, "arguments": ["--deepspeed_config", "ds.json", "--steps", "3"], **changes})


def test_deepspeeds_launcher_on_two_hosts():
    found = launcher_shim.find(DEEPSPEED)
    assert (found.launcher, found.hosts, found.host, found.local_rank) == ("deepspeed", 2, 1, 0)
    assert " ".join(launcher_shim.command(found, options())) == (
        "launch --groups 4 --ranks-per-group 2 --config ds.json --run-dir runs/a --hosts 2 --host-rank 1 "
        "--store node0:29500 train.py -- --deepspeed_config ds.json --steps 3"
    )


def test_torchrun_on_one_host_leaves_its_port_alone():
    found = launcher_shim.find(TORCHRUN)
    assert (found.launcher, found.store, found.local_rank) == ("torchrun", "node0:29501", 2)
    words = launcher_shim.command(
        found, options(arguments=["--deepspeed_config=x.json"], overwrite=True, ranks_per_group=None)
    )
    assert words[words.index("--hosts") + 1] == "1" and "--store" not in words and "--overwrite" in words
    assert words[words.index("--config") + 1] == "x.json"
    assert words[1:5] == ["--groups", "1", "--ranks-per-group", "4"], "the config says how a group is split"


def test_an_unchanged_script_of_megatron_lm_needs_no_config():
    own = ["--tensor-model-parallel-size", "2", "--global-batch-size", "16"]
    words = launcher_shim.command(
        launcher_shim.find(TORCHRUN), options(arguments=own, megatron_lm=True, ranks_per_group=None)
    )
    assert words[1:5] == ["--groups", "2", "--ranks-per-group", "2"] and "--config" not in words
    assert words[words.index("--megatron-lm") :] == ["--megatron-lm", "train.py", "--", *own]


def test_a_group_may_have_ranks_on_several_hosts():
    words = launcher_shim.command(launcher_shim.find(DEEPSPEED), options(ranks_per_group=8))
    assert words[1:5] == ["--groups", "1", "--ranks-per-group", "8"]


@pytest.mark.parametrize(
    ("env", "changes", "words"),
    [
        ({}, {}, ["neither CROSS_RANK nor TORCHELASTIC_RUN_ID", "megatron-ft launch"]),
        (
            {**TORCHRUN, "PET_NNODES": "2", "PET_NODE_RANK": "1"},
            {},
            ["Kubernetes' training operator has 2 hosts", "--hosts 1"],
        ),
        ({**TORCHRUN, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, {}, ["this allocation of Slurm has 2 hosts"]),
        ({**DEEPSPEED, "LOCAL_SIZE": "2"}, {}, ["8 ranks on 2 hosts, 2 of them on this one"]),
        ({**DEEPSPEED, "CROSS_RANK": "x"}, {}, ["CROSS_RANK to 'x', which is not a number"]),
        ({**DEEPSPEED, "MASTER_ADDR": None}, {}, ["deepspeed", "has not set MASTER_ADDR"]),
        (DEEPSPEED, {"ranks_per_group": 3}, ["8 ranks", "4 on this host", "3 (--ranks-per-group, or"]),
        (DEEPSPEED, {"arguments": []}, ["the config is missing", "--deepspeed_config"]),
        (DEEPSPEED, {"arguments": ["--deepspeed_config", "y.json"]}, ["y.json does not exist"]),
        (DEEPSPEED, {"arguments": ["--deepspeed_config", "x.json"]}, ["--ranks-per-group is 2", "are 4"]),
    ],
)
def test_a_start_that_is_not_possible_is_refused(env, changes, words):
    with pytest.raises(FTError) as error:
        launcher_shim.command(
            launcher_shim.find({name: value for name, value in env.items() if value is not None}), options(**changes)
        )
    for word in words:
        assert word in str(error.value)
