"""Launchers that end the whole job when one of their processes dies see the agent only; a rank's death is masked under
them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.record import history, invariants
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint
from tests import support

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "4", "--master_port", "29641", "--module"],
    "torchrun": ["torchrun", "--nproc-per-node", "4", "--master-port", "29651", "-m"],
}


@pytest.mark.parametrize("launcher", support.first_of({name: name for name in LAUNCHERS}, "torchrun"))
def test_a_stock_launcher_does_not_end_the_job_when_a_rank_dies(tmp_path, data_dir, launcher):
    command = LAUNCHERS[launcher]
    if not (BIN / command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    config = support.write_config(tmp_path / "ds.json", detector={"stopped_timeout_s": support.TIMEOUT_S})
    hold = Breakpoint(2, 2, "backward")
    shim = ["megatron_ft.cluster.launchers.launcher_shim", "--run-dir", tmp_path / "run", support.SCRIPT]
    own = ["--data", data_dir, "--steps", "4", "--layers", "2", "--width", "64", "--seq-len", "32"]
    process = subprocess.Popen(
        [str(word) for word in (BIN / command[0], *command[1:], *shim, *own, "--deepspeed_config", config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=support.ROOT,
        env={**os.environ, **injection_points.to_env([hold]), "DS_ACCELERATOR": "cpu"},
    )
    try:
        kill.strike(tmp_path / "run", [hold], support.TIMEOUT_S, lambda: process.poll() is None)
        said, _ = process.communicate(timeout=support.TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert f"started by {launcher}, on host 0 of 1" in said
    lines = history.read(tmp_path / "run")
    assert not invariants.check_history(lines, 4 * support.PER_GROUP), said
    assert [line["group"] for line in lines if line["event"] == "fault"] == [2]


@pytest.mark.long
def test_torchrun_with_one_process_on_each_node_gives_the_number_of_the_host(tmp_path, data_dir):
    """Two nodes run on one machine; they find each other through the run directory."""
    # On a busy machine an agent stands still for longer than the other one would wait for its heartbeat.
    config = support.write_config(tmp_path / "ds.json", detector={"heartbeat_timeout_s": support.TIMEOUT_S})
    own = ["--data", data_dir, "--steps", "3", "--layers", "2", "--width", "64", "--seq-len", "32"]
    launch = ["launch", "--groups", 2, "--config", config, "--run-dir", tmp_path / "run", support.SCRIPT, "--", *own]
    torchrun = [
        BIN / "torchrun",
        "--nnodes",
        2,
        "--nproc-per-node",
        1,
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        29661,
    ]
    nodes = [
        subprocess.Popen(
            [str(word) for word in (*torchrun, "--node-rank", rank, "--no-python", BIN / "megatron-ft", *launch)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=support.ROOT,
        )
        for rank in range(2)
    ]
    try:
        said = [node.communicate(timeout=support.TIMEOUT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # torchrun ends the processes that it has started
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [f"host {rank} of 2 (found: torchrun)" in text for rank, text in enumerate(said)] == [True, True]
    assert len([line for line in history.read(tmp_path / "run") if line["event"] == "step"]) == 3
