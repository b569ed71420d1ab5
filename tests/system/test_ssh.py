"""``launch --ssh``: one command starts three hosts and a spare through real sshds, and the run does not need it any more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.faults import checkers
from megatron_ft.runtime import history
from tests import sshd, support
from tests.stores import await_
from tools import proc

pytestmark = pytest.mark.system

GROUPS, SPARES, STEPS, ENDLESS = 3, 1, 60, 100_000
DEADLINE_S = 180.0


@pytest.fixture
def lab(tmp_path):
    sshd.require()
    keys = tmp_path / "ssh"
    keys.mkdir()
    lab = sshd.Lab(keys, GROUPS + SPARES)
    yield lab
    lab.close()


def own(data_dir: Path, steps: int = STEPS) -> list:
    return ["--data", data_dir, "--steps", steps, "--seed", 1, *support.SMALL]


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory, data_dir) -> list[dict]:
    """The history of the same job on one host, to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    config = support.write_config(run_dir.with_suffix(".json"), detector={"straggler_factor": 0})
    where = ["--groups", GROUPS, "--config", config, "--run-dir", run_dir]
    done = support.ft("launch", *where, support.SCRIPT, "--", *own(data_dir))
    assert done.returncode == 0, done.stderr
    return history.read(run_dir)


class Job:
    """One ``launch --ssh``, called on the host that is only there for that."""

    def __init__(self, lab: sshd.Lab, directory: Path, data_dir: Path) -> None:
        self.lab, self.directory, self.data_dir = lab, directory, data_dir
        self.run_dir = directory / "runs" / "a"
        self.hosts = [f"root@{lab.address(host)} slots=1" for host in range(GROUPS + SPARES)]
        self.process: subprocess.Popen | None = None
        self.gate = support.Gate(directory, slowly=STEPS)

    def start(self, *options, steps: int = STEPS, cwd: Path = support.ROOT, saves: bool = False, **detector) -> None:
        (self.directory / "hosts").write_text("\n".join(self.hosts))
        detector = {"straggler_factor": 0, "heartbeat_timeout_s": support.HEARTBEAT_TIMEOUT_S, **detector}
        checkpoint = {"directory": str(self.directory / "saved")} if saves else {}
        changes = {"rejoin": {}, "detector": detector, "checkpoint": checkpoint}
        config = support.write_config(self.directory / "config.json", **changes)
        where = ["--ssh", "--ssh-command", self.lab.ssh, "--hostfile", self.directory / "hosts", "--spare-hosts", SPARES]
        script = support.SCRIPT if steps == ENDLESS else self.gate.script
        what = ["--groups", GROUPS, "--config", config, "--run-dir", self.run_dir, *options, script]
        command = support.command("launch", *where, *what, "--", *own(self.data_dir, steps))
        said = (self.directory / "said.log").open("w")
        # Python finds this package whatever the directory is.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support.ROOT), "MEGATRON_FT_OF_THE_TEST": "7"}
        options = {"stdout": said, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "cwd": cwd, "env": env}
        self.process = subprocess.Popen(self.lab.inside(self.lab.start, command), **options)

    def said(self) -> str:
        return (self.directory / "said.log").read_text()

    def all_said(self) -> str:
        """The ranks' last lines only: they have one for each step."""
        logs = [(path.name, path.read_text().splitlines()[-20:]) for path in sorted(self.run_dir.glob("logs/*"))]
        agents = [(path.name, path.read_text().splitlines()) for path in sorted(self.run_dir.glob("agents/*"))]
        return "\n".join([self.said(), *("\n".join([f"== {name}", *lines]) for name, lines in [*agents, *logs])])

    def events(self, event: str) -> list[dict]:
        return [line for line in history.read(self.run_dir) if line["event"] == event]

    def ranks(self) -> list[dict]:
        return json.loads((self.run_dir / "ranks.json").read_text())

    def await_(self, condition, what: str) -> None:
        try:
            await_(condition, what, DEADLINE_S, 0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.all_said()}") from None

    def await_step(self, step: int) -> None:
        self.await_(lambda: any(line["step"] >= step for line in self.events("step")), f"step {step}")

    def await_back(self, group: int) -> None:
        self.await_(lambda: any(group in view["joined"] for view in self.events("view")), f"group {group} is back")

    def await_exit(self) -> int:
        self.await_(lambda: self.process.poll() is not None, "the starter ends")
        return self.process.returncode

    def await_nobody(self) -> None:
        """No process but sshds is left on any host."""
        self.await_(lambda: not self.agents(), "all agents have ended")

    def agents(self, host: int | None = None) -> set[int]:
        """All on the hosts, or one of them, that is ours: agents, their keepers and ranks."""
        hosts = range(GROUPS + SPARES) if host is None else [host]
        return {pid for one in hosts for pid in self.lab.processes(one) if proc.program(pid).startswith("python")}

    def agent(self, host: int) -> int:
        """The ``megatron-ft launch`` of a host."""
        return next(pid for pid in self.agents(host) if "launch" in proc.command(pid)[3:4])

    def check(self, reference: list[dict]) -> None:
        lines = history.read(self.run_dir)
        found = checkers.check_history(lines, GROUPS * support.PER_GROUP, reference)
        assert not found, "\n".join([*found, self.all_said()])
        assert [line["step"] for line in lines if line["event"] == "step"] == list(range(STEPS))


@pytest.fixture
def job(lab, tmp_path, data_dir):
    job = Job(lab, tmp_path, data_dir)
    yield job
    if job.process is not None:
        job.process.kill()
        job.process.wait()


@pytest.fixture
def up(lab):
    """All of them are."""
    for host in range(GROUPS + SPARES):
        lab.begin(host)


def test_the_run_goes_on_when_who_has_started_it_is_killed_and_all_connections_with_it(lab, job, up, failure_free):
    job.start()
    job.await_step(3)
    job.process.kill()
    lab.power_off(lab.start)
    for host in range(GROUPS + SPARES):
        proc.send({pid for pid in lab.processes(host) if proc.program(pid) == "sshd"}, signal.SIGKILL)
    job.gate.open()
    job.await_(lambda: job.events("end"), "the end")
    job.await_nobody()
    job.check(failure_free)
    assert len(job.events("view")) == 1 and not job.events("fault")
    states = [json.loads(path.read_text()) for path in job.run_dir.glob("agents/*.json")]
    assert [state["code"] for state in states] == [0] * len(job.hosts)


def test_a_host_without_power_is_replaced_by_the_spare_one(lab, job, up, failure_free):
    """Its ssh connection, its agent and its log fall silent; the command goes on, and so do the others."""
    job.start("--export", "ONE=two words")
    job.await_step(5)
    environment = proc.environment(job.agent(0))
    assert {"ONE=two words", "MEGATRON_FT_OF_THE_TEST=7", "OMP_NUM_THREADS=1"} <= set(environment)
    lab.power_off(1)
    job.await_back(1)
    told = f"{lab.address(0)}: megatron_ft: "
    lines = lambda: [line for line in job.said().splitlines() if line.startswith(told)]  # noqa: E731
    job.await_(lambda: any(lab.address(1) in line for line in lines()), "host 0 has said whom it misses")
    job.gate.open()
    assert job.await_exit() == 0, job.all_said()
    job.check(failure_free)
    assert [line["what"] for line in job.events("host")] == ["spare", "took over"]
    assert f"all {STEPS} steps done" in job.said()
    job.await_nobody()


def test_an_agent_that_is_killed_on_a_host_that_is_well_comes_back_as_a_spare_and_ctrl_c_stops_in_order(lab, job, up):
    job.start(steps=ENDLESS)
    job.await_step(3)
    os.kill(job.agent(2), signal.SIGKILL)
    job.await_(lambda: [line["what"] for line in job.events("host")].count("spare") == 2, "a second spare")
    job.await_back(2)
    job.process.send_signal(signal.SIGINT)
    code = job.await_exit()
    (stop,) = job.events("stop")
    assert code == stop["exit_code"] != 0, job.all_said()
    job.await_nobody()
    steps = job.events("step")
    assert [line["step"] for line in steps] == list(range(len(steps)))
    assert "stopped by SIGINT: the run is told to save and to stop" in job.said()
    assert [(line["what"], line["host"]) for line in job.events("ssh")] == [("spare agent", lab.address(2))]


def test_ctrl_c_twice_ends_the_agents_of_a_run_that_cannot_stop_in_order(job, up):
    """It would save first, and one rank is stopped."""
    job.start(steps=ENDLESS, saves=True, stopped_timeout_s=DEADLINE_S, hang_timeout_s=DEADLINE_S)
    job.await_step(3)
    job.await_(lambda: len(job.ranks()) == GROUPS, "all agents have written down their ranks")
    os.kill(job.ranks()[1]["pid"], signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    job.await_(lambda: "the run is told to save and to stop" in job.said(), "it is told to stop")
    job.process.send_signal(signal.SIGINT)
    assert job.await_exit() != 0
    job.await_nobody()
    assert "told again: all agents are ended" in job.said()


def test_whoever_is_not_ready_is_named_and_nothing_is_started(lab, job, tmp_path):
    """Each host lacks something else; only the first has everything."""
    shared = tmp_path / "shared"
    work, package = shared / "work", support.ROOT / "megatron_ft" / "__init__.py"
    work.mkdir(parents=True)
    other = tmp_path / "other_version.py"
    other.write_text(package.read_text().replace("__version__ = ", '__version__ = "0.0.9"  # '))
    lab.begin(0)
    lab.begin(2, f"mount --bind {other} {package}")
    lab.begin(3, f"mount -t tmpfs none {shared}")
    job.start(cwd=work)
    assert job.await_exit() == 2
    said = job.said()
    names = [lab.address(host) for host in range(GROUPS + SPARES)]
    assert "nothing is started, 3 of 4 hosts are not ready" in said and "Traceback" not in said
    assert f"{names[1]} is not reached: ssh: connect to host {names[1]} port 22: Connection refused; no sshd there" in said
    assert f"{names[2]} has megatron_ft 0.0.9, not " in said and "install the same on all hosts" in said
    assert f"{names[3]} has no directory {work}; start from one that all hosts have" in said
    assert f"  {names[0]}" not in said and not job.agents() and not job.events("start")


def test_a_run_directory_of_its_own_a_key_that_is_not_known_and_no_python_are_told(lab, job, tmp_path):
    job.run_dir.parent.mkdir()
    (tmp_path / "nobody").write_text("")
    lab.begin(0, f"mount -t tmpfs none {job.run_dir.parent}")
    lab.begin(1, f"mount --bind {tmp_path / 'nobody'} {lab.directory / 'user.pub'}")
    lab.begin(2, f"mount --bind /dev/null {os.path.realpath(sys.executable)}")
    lab.begin(3)
    lab.cut(3)
    job.start()
    assert job.await_exit() == 2
    said, names = job.said(), [lab.address(host) for host in range(GROUPS + SPARES)]
    assert f"{names[0]} does not see what is written to --run-dir {job.run_dir} here" in said
    assert f"{names[1]} is not reached: root@{names[1]}: Permission denied (publickey)" in said
    assert f"ssh-copy-id root@{names[1]}" in said
    assert f"{names[2]} cannot run {sys.executable}" in said
    assert f"{names[3]} is not reached" in said and "is it up, and is there a way to it?" in said
    assert not job.agents() and not job.events("start")


def test_what_fails_at_the_start_ends_the_others_at_once(lab, job, up):
    """The run directory holds another run. Only host 0's agent looks, and the others would wait for it for minutes."""
    job.run_dir.mkdir(parents=True)
    history.append(job.run_dir, "end", step=7)
    job.start()
    assert job.await_exit() == 2
    assert f"{lab.address(0)}: megatron-ft launch: --run-dir {job.run_dir} already holds a finished run" in job.said()
    job.await_nobody()


def test_hosts_with_two_networks_run_over_the_one_that_the_hostfile_names(lab, job, up, failure_free):
    """Over ssh's the run does not go: when that is lost, nothing happens to it."""
    lab.add_network()
    job.hosts = [f"{lab.address(host)} slots=1 address={lab.second_address(host)}" for host in range(GROUPS + SPARES)]
    job.start()
    job.await_step(3)
    for host in lab.hosts:
        lab.cut(host)
    job.await_step(13)  # for longer than a silence has to last
    job.gate.open()
    assert job.await_exit() == 0, job.all_said()
    job.check(failure_free)
    assert len(job.events("view")) == 1 and not job.events("silence")
    job.await_nobody()
