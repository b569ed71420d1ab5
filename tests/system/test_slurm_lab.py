"""The Slurm cluster that other tests break: the effects of its faults on real jobs, and that nothing of it is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import slurm, support
from tests.stores import DEADLINE_S, await_
from tools import netlab, proc, slurm_lab
from tools.slurm_lab import Lab

pytestmark = pytest.mark.system

TOOL = support.ROOT / "tools" / "slurm_lab.py"
KEEP = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
"""Options of a step that goes on when it loses some of its tasks."""
BEAT = """
cd "$0"; at=$SLURMD_NODENAME
while echo $((i += 1)) > $at.part; do mv $at.part $at; sleep 0.05; done
"""

cluster = slurm.lab(3)
plain = slurm.lab(3, plain=True, topology=True)
accounted = slurm.lab(1, scope="function", plain=True, accounting=True)


class Job:
    """A job with all nodes, and a step with one task on each, which counts in a file."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self._directory = lab, directory
        directory.mkdir(exist_ok=True)
        granted = lab.run(["salloc", "--no-shell", "--no-kill", "-N", len(lab.nodes)], check=True).stderr
        self.id = granted.split("Granted job allocation ")[1].split()[0]
        self.srun = subprocess.Popen(self.step(len(lab.nodes), *KEEP, "sh", "-c", BEAT, directory), env=lab.env)
        await_(lambda: len(self.heartbeats()) == len(lab.nodes), "all tasks run")

    def step(self, nodes: int, *words: object) -> list[str]:
        return ["srun", f"--jobid={self.id}", "--overlap", f"-N{nodes}", f"-n{nodes}", *map(str, words)]

    def heartbeats(self) -> dict[str, int]:
        found = ((self._directory / node) for node in self.lab.nodes)
        return {path.name: int(path.read_text()) for path in found if path.exists()}

    def await_beats(self, *nodes: str) -> None:
        """Wait for several more counts of each of the tasks."""
        before = self.heartbeats()
        await_(lambda: all(self.heartbeats()[node] > before[node] + 5 for node in nodes), f"{', '.join(nodes)} go on")

    def end(self) -> None:
        """End the job; the nodes are whole and idle afterwards, whatever was done to them."""
        for node in self.lab.nodes:
            self.lab.thaw(node)
            if not self.lab.shape.plain:
                self.lab.heal(node)
            if self.lab.slurmd(node) == "dead":
                self.lab.start_node(node)
        self.srun.kill()  # it would wait for tasks that are gone
        self.srun.wait()
        self.lab.run(["scancel", self.id], check=True)
        await_(lambda: set(self.lab.states().values()) == {"idle"}, "all nodes are idle again")


@pytest.fixture
def job(cluster, tmp_path):
    job = Job(cluster, tmp_path)
    yield job
    job.end()


def reaches(lab: Lab, node: str) -> bool:
    """Return whether the node's slurmd can be connected to."""
    try:
        socket.create_connection((lab.address(node), lab.shape.ports[1 + lab.nodes.index(node)]), timeout=1.0).close()
    except OSError:
        return False
    return True


def left_of(lab: Lab) -> list[str]:
    """Return what is left of a lab that was up: processes, namespaces, links, files."""
    words = {pid: [*proc.command(pid), *proc.environment(pid)] for pid in proc.pids() if pid != os.getpid()}
    own = str(lab.directory)
    found = [f"process {pid}: {told}" for pid, told in words.items() if any(own in word for word in told)]
    if not lab.shape.plain:
        name = f"slurm{lab.shape.slot}"
        lines = netlab.ip("netns", "list").splitlines() + netlab.ip("-br", "link").splitlines()
        found += [line for line in lines if line.startswith((f"{name}h", f"{name}sw", f"{name}@"))]
    return found + list(map(str, lab.directory.glob("**/*")))


def tool(*arguments: object, **options) -> subprocess.CompletedProcess:
    """Run the command of the lab to its end."""
    command = [sys.executable, TOOL, *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=2 * DEADLINE_S, **options)


def test_a_job_sees_hosts_that_know_each_other(cluster):
    told = cluster.run(["srun", "-N3", "sh", "-c", "hostname; getent hosts n1 n2 n3"], check=True).stdout.split("\n")
    hosts = [f"{cluster.address(node):<15} {node}" for node in cluster.nodes]
    assert sorted(filter(None, told)) == sorted([*cluster.nodes, *hosts * 3])
    assert len({cluster.address(node) for node in cluster.nodes}) == 3


def test_the_tasks_on_other_nodes_outlive_a_killed_one(cluster, job):
    assert all(cluster.tasks_of(node) for node in cluster.nodes)
    cluster.kill_node("n2")
    assert cluster.slurmd("n2") == "dead" and not cluster.tasks_of("n2")
    at = job.heartbeats()["n2"]
    job.await_beats("n1", "n3")
    assert job.heartbeats()["n2"] == at and job.srun.poll() is None


def test_a_node_that_is_back_takes_new_steps_of_its_job(cluster, job):
    cluster.kill_node("n2")
    cluster.start_node("n2")
    assert cluster.run(job.step(1, "-w", "n2", "hostname")).stdout == "n2\n"


@pytest.mark.long
def test_a_frozen_node_goes_on_when_it_thaws(cluster, job):
    cluster.freeze("n3")
    at = job.heartbeats()["n3"]
    job.await_beats("n1", "n2")
    assert job.heartbeats()["n3"] == at and cluster.slurmd("n3") == "frozen"
    cluster.thaw("n3")
    job.await_beats("n1", "n2", "n3")
    assert cluster.slurmd("n3") == "runs"


@pytest.mark.long
def test_a_cut_node_works_on_and_is_reached_again_when_healed(cluster, job):
    assert reaches(cluster, "n2")
    cluster.cut("n2")
    assert not reaches(cluster, "n2") and reaches(cluster, "n3")
    job.await_beats("n1", "n2", "n3")
    cluster.heal("n2")
    await_(lambda: reaches(cluster, "n2"), "it is reached again")
    assert cluster.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


@pytest.mark.long
def test_jobs_outlive_a_restart_of_the_controller(cluster, job):
    cluster.restart_controller()
    job.await_beats("n1", "n2", "n3")
    # Nodes are busy for a few seconds more, for new steps; a patient srun then sleeps for two minutes.
    step = job.step(3, "--immediate", "hostname")
    await_(lambda: sorted(cluster.run(step).stdout.split()) == cluster.nodes, "new steps start")
    assert job.srun.poll() is None


@pytest.mark.long
def test_plain_nodes_die_freeze_and_return_like_the_others(plain, tmp_path):
    job = Job(plain, tmp_path)
    plain.kill_node("n2")
    plain.freeze("n3")
    at = job.heartbeats()
    job.await_beats("n1")
    assert {**job.heartbeats(), "n1": 0} == {**at, "n1": 0}
    assert [plain.slurmd(node) for node in plain.nodes] == ["runs", "dead", "frozen"]
    plain.thaw("n3")
    job.await_beats("n1", "n3")
    job.end()
    told = plain.run(["srun", "-N3", "sh", "-c", "echo $SLURM_TOPOLOGY_ADDR"], check=True).stdout
    assert sorted(told.split()) == ["top.s1.n1", "top.s1.n2", "top.s2.n3"]
    with pytest.raises(slurm_lab.LabError, match="share one network"):
        plain.cut("n1")


@pytest.mark.long
def test_ended_jobs_and_their_steps_are_accounted_for(accounted):
    assert accounted.run(["srun", "--job-name=failing", "false"]).returncode == 1
    asked = ["sacct", "-n", "-P", "-o", "JobID,JobName,State,ExitCode"]
    known = "1|failing|FAILED|1:0\n1.0|failing|FAILED|1:0\n"
    await_(lambda: accounted.run(asked).stdout == known, "sacct knows them")
    assert "failing" in accounted.run(["sacct", "-c"], check=True).stdout
    accounted.down()
    assert not left_of(accounted)


@pytest.mark.long
@slurm.needs_slurm
def test_two_labs_side_by_side_of_which_nothing_is_left(tmp_path):
    one, other = Lab(tmp_path / "one", 2), Lab(tmp_path / "other", 3)
    with other:
        with one:
            jobs = [Job(lab, tmp_path / f"heartbeats{len(lab.nodes)}") for lab in (one, other)]
            one.kill_node("n1")
            one.freeze("n2")
        jobs[0].srun.wait(DEADLINE_S)
        assert not left_of(one) and not one.down()
        assert other.run(["srun", "-N3", "hostname"], check=True).stdout and left_of(other)
    jobs[1].srun.wait(DEADLINE_S)
    assert not left_of(other)


@pytest.mark.long
@slurm.needs_slurm
def test_an_up_that_is_killed_half_way_leaves_nothing_that_down_does_not_find(tmp_path):
    half = "import os; Lab._await_idle = lambda self: os._exit(9)"
    killed = f"from tools.slurm_lab import Lab; {half}; Lab({str(tmp_path / 'lab')!r}, 2).up()"
    assert subprocess.run([sys.executable, "-c", killed], cwd=support.ROOT).returncode == 9
    lab = Lab(tmp_path / "lab")
    assert left_of(lab)
    assert tool("down", "--directory", lab.directory).returncode == 0
    assert not left_of(lab)
    assert "there is no lab" in tool("down", "--directory", lab.directory).stdout


@slurm.needs_slurm
def test_an_up_that_fails_reports_why_and_takes_down_what_there_was(tmp_path):
    slurmd = tmp_path / "bin" / "slurmd"
    slurmd.parent.mkdir()
    slurmd.write_text("#!/bin/sh\necho slurmd: no such luck >&2\nexit 3\n")
    slurmd.chmod(0o755)
    env = {**os.environ, "PATH": f"{slurmd.parent}:{os.environ['PATH']}"}
    failed = tool("up", "--directory", tmp_path / "lab", env=env)
    assert failed.returncode == 2 and failed.stderr.startswith("slurm_lab: the lab does not come up: ")
    assert "ends with 3" in failed.stderr and "start.log: slurmd: no such luck" in failed.stderr
    assert not left_of(Lab(tmp_path / "lab", plain=True)) and not (tmp_path / "lab").exists()


def test_the_command(cluster):
    where = ["--directory", cluster.directory]
    assert tool("run", *where, "srun", "-w", "n2", "hostname").stdout == "n2\n"
    script = tool("env", *where).stdout
    told = subprocess.run(["sh", "-c", f"{script}sinfo -h -o %D"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "3"
    tool("freeze", *where, "n3").check_returncode()
    assert "slurmd frozen, 0 processes" in tool("status", *where).stdout
    tool("thaw", *where, "n3").check_returncode()


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["kill-node", "n9"], "there is no node n9; this lab has n1, n2, n3"),
        (["start-node", "n1"], "the slurmd of n1 is not dead"),
        (["up"], "take it down first, or give another --directory"),
        (["run"], "run what?"),
        (["run", "no-such-command"], "no-such-command"),
    ],
)
def test_wrong_use_of_a_lab_gives_one_line(cluster, arguments, remedy):
    refused = tool(arguments[0], "--directory", cluster.directory, *arguments[1:])
    assert refused.returncode == 2 and refused.stderr.startswith("slurm_lab: ")
    assert len(refused.stderr.splitlines()) == 1 and remedy in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["freeze", "n1"], "start one: python tools/slurm_lab.py up"),
        (["env"], "start one: python tools/slurm_lab.py up"),
        (["up", "--nodes", "0"], "--nodes is 0; a lab has 1 to 60"),
        (["up", "--directory", "/tmp/" + "a" * 90], "take a shorter one"),
    ],
)
def test_wrong_use_without_a_lab_gives_one_line(tmp_path, arguments, remedy, capsys):
    assert slurm_lab.main([arguments[0], "--directory", str(tmp_path), *arguments[1:]]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and remedy in said


def test_missing_programs_are_reported_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert slurm_lab.main(["up", "--directory", str(tmp_path / "lab")]) == 2
    assert capsys.readouterr().err == "slurm_lab: a Slurm lab needs root\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm_lab, "_SBIN", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_lab.main(["up", "--directory", str(tmp_path / "lab")]) == 2
    assert "apt-get install slurmctld slurmd slurm-client munge\n" in capsys.readouterr().err
    for name in slurm_lab._PACKAGES:
        (tmp_path / name).touch(mode=0o755)
    assert slurm_lab.main(["up", "--directory", str(tmp_path / "lab")]) == 2
    assert "apt-get install iproute2" in capsys.readouterr().err
    monkeypatch.setattr(netlab, "missing", lambda: "this machine allows no network namespaces")
    (tmp_path / "ip").touch(mode=0o755)
    assert slurm_lab.main(["up", "--directory", str(tmp_path / "lab")]) == 2
    assert "this machine allows no network namespaces; nodes that share one network" in capsys.readouterr().err
    assert not (tmp_path / "lab").exists()
