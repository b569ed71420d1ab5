"""DeepSpeed pipelines on several hosts (network namespaces), under the launchers that users have."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.record import invariants
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint
from tests import listening, netlab, support
from tests.deepspeed_kills import MODEL, SCRIPT, start

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

BIN = Path(sys.executable).parent
GROUPS, STEPS = 2, 6
FAKE_SSH = """#!/usr/bin/env bash
# What pdsh runs in place of ssh: the command, on the host of that address.
while [[ $1 == -* ]]; do shift; done
host=${1##*@}; shift
exec ip netns exec "LABh$(( ${host##*.} - 1 ))" bash -c "$*"
"""


@pytest.fixture
def lab(request):
    netlab.require()
    lab = netlab.Lab(request.param)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data_dir) -> list[dict]:
    """The history of the same job on one host, without failures."""
    run = start(tmp_path_factory.mktemp("alone") / "run", data_dir, groups=GROUPS, steps=STEPS)
    run.check()
    return run.history


class Job:
    """The launchers of a job, one or one for each host; ended by pid, whatever the test did."""

    def __init__(self, directory: Path, data_dir: Path) -> None:
        self.directory = directory
        detector = {"stopped_timeout_s": support.TIMEOUT_S, "straggler_factor": 0}
        detector["heartbeat_timeout_s"] = support.HEARTBEAT_TIMEOUT_S
        engine = {"pipeline": {"stages": 2}}
        self.config = support.write_config(directory / "ds.json", engine=engine, model=MODEL, detector=detector)
        self.own = ["--data", data_dir, "--steps", STEPS, "--deepspeed_config", self.config]
        self.shim = ["megatron_ft.cluster.launchers.launcher_shim", "--run-dir", directory / "run", SCRIPT, *self.own]
        self.started: list[subprocess.Popen] = []

    def start(self, command, holds=(), **environment) -> None:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            **injection_points.to_env(list(holds)),
            **environment,
        }
        output = (self.directory / f"said{len(self.started)}.log").open("w")
        options = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": support.ROOT, "env": env}
        self.started.append(subprocess.Popen(list(map(str, command)), **options))

    @property
    def run(self) -> support.Run:
        return support.Run(self.directory / "run", self.started[0], GROUPS)

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("said*.log"))) + self.run.logs()

    def check(self, reference: list[dict]) -> None:
        assert self.started[0].wait(timeout=support.TIMEOUT_S) == 0, self.said()
        found = invariants.check_history(self.run.history, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, *map(str, self.run.history), self.said()])
        assert len(self.run.events("step")) == STEPS


@pytest.fixture
def job(tmp_path, data_dir):
    job = Job(tmp_path, data_dir)
    yield job
    for process in job.started:
        process.kill()
        process.wait()


HOLD = Breakpoint(1, 2, "backward", position=1)


@pytest.mark.parametrize("lab", [2], indirect=True)
def test_deepspeeds_own_launcher_on_two_hosts(lab, job, alone, tmp_path):
    """One command gets a hostfile; pdsh starts it on both hosts."""
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed (Debian: pdsh); deepspeed starts other hosts through it")
    (tmp_path / "hosts").write_text("".join(f"{lab.address(host)} slots=2\n" for host in lab.hosts))
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(FAKE_SSH.replace("LABh", lab.namespace(0).removesuffix("0")))
    ssh.chmod(0o755)
    where = [
        "--hostfile",
        tmp_path / "hosts",
        "--master_addr",
        lab.address(0),
        "--master_port",
        29500,
        "--no_ssh_check",
    ]
    path = f"{ssh.parent}:{os.environ['PATH']}"
    job.start(lab.inside(0, [BIN / "deepspeed", *where, "--module", *job.shim]), [HOLD], PATH=path)
    job.run.strike(HOLD)
    job.check(alone)
    assert "started by deepspeed, on host 1 of 2" in job.said()


@pytest.mark.parametrize("lab", [2], indirect=True)
def test_torchrun_on_two_hosts(lab, job, alone):
    for host in lab.hosts:
        where = ["--nnodes", 2, "--node-rank", host, "--nproc-per-node", 2, "--master-addr", lab.address(0)]
        command = [BIN / "torchrun", *where, "--master-port", 29500, "-m", *job.shim]
        job.start(lab.inside(host, command), [HOLD])
    job.run.strike(HOLD)
    job.check(alone)


@pytest.mark.parametrize("lab", [4], indirect=True)
def test_groups_across_hosts(lab, job, alone, tmp_path):
    """Each stage on a host of its own. One is cut off: its group is out, and the stage before it is released, from a process
    group that the script's PipelineModule has made (DeepSpeed sums the norm in it before the optimizer's step).

    Until then every socket on which a process of the run listens is bound to its host's address on the hosts' network."""
    hold, pause = Breakpoint(1, 1, "update", position=1), Breakpoint(0, 2, "begin")
    (tmp_path / "hosts").write_text("".join(f"{lab.address(host)} slots=1\n" for host in lab.hosts))
    options = ["--groups", GROUPS, "--config", job.config, "--run-dir", tmp_path / "run"]
    for host in lab.hosts:
        command = support.command(
            "launch", "--hostfile", tmp_path / "hosts", "--port", 29500, *options, SCRIPT, "--", *job.own
        )
        job.start(lab.inside(host, command), [hold, pause])
    support.await_held(job.run, 1, 1)
    leader = support.await_held(job.run, 0)
    for host in lab.hosts:
        found = listening.listeners(lab.processes(host))
        assert {listener.address for listener in found} == {lab.address(host)}, found
    lab.cut(3)

    def missed() -> bool:
        pairs = [(line["by"], line["about"]) for line in job.run.events("silence")]
        return any(lab.address(2) in by and lab.address(3) in about for by, about in pairs)

    # All hosts miss it; the host that shares a group with it knows most. No view is made before that host has reported.
    support.wait_for(missed, job.run)
    os.kill(leader, signal.SIGCONT)
    job.check(alone)
    (view,) = job.run.events("view")[1:]
    why = view["lost"]["1"]
    assert "host 3 (" in why and "the group has ranks on both" in why, why
    assert job.started[2].wait(timeout=support.TIMEOUT_S) == 0, job.said()
    assert "group 1 is out" in (tmp_path / "run" / "logs" / "g1.p0.log").read_text()
