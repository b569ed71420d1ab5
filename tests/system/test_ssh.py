"""``launch --ssh`` with three hosts and a spare one, each with a real sshd. The run does not depend on the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_ft.errors import WIPED_OUT
from megatron_ft.record import history, invariants, run_directory
from tests import sshd, support
from tests.stores import await_, etcd_missing
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
    """The history of the same job on one host without failures."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    config = support.write_config(run_dir.with_suffix(".json"), detector={"straggler_factor": 0})
    where = ["--groups", GROUPS, "--config", config, "--run-dir", run_dir]
    done = support.ft("launch", *where, support.SCRIPT, "--", *own(data_dir))
    assert done.returncode == 0, done.stderr
    return history.read(run_dir)


class Job:
    """One ``launch --ssh``, on a host that takes no part in the run."""

    def __init__(self, lab: sshd.Lab, directory: Path, data_dir: Path) -> None:
        self.lab, self.directory, self.data_dir = lab, directory, data_dir
        self.run_dir = directory / "runs" / "a"
        self.hosts = [f"root@{lab.address(host)} slots=1" for host in range(GROUPS + SPARES)]
        self.process: subprocess.Popen | None = None
        self.gate = support.Gate(directory, slowly=STEPS)

    def start(
        self,
        *options,
        steps: int = STEPS,
        cwd: Path = support.ROOT,
        saves: bool = False,
        settings: Mapping[str, object] = {},
        **detector,
    ) -> None:
        """Start the launcher; ``settings``: of fault_tolerance, in place of those of this test."""
        (self.directory / "hosts").write_text("\n".join(self.hosts))
        detector = {"straggler_factor": 0, "heartbeat_timeout_s": support.HEARTBEAT_TIMEOUT_S, **detector}
        checkpoint = {"directory": str(self.directory / "saved")} if saves else {}
        changes = {"rejoin": {}, "detector": detector, "checkpoint": checkpoint, **settings}
        config = support.write_config(self.directory / "config.json", **changes)
        where = [
            "--ssh",
            "--ssh-command",
            self.lab.ssh,
            "--hostfile",
            self.directory / "hosts",
            "--spare-hosts",
            SPARES,
        ]
        script = support.SCRIPT if steps == ENDLESS else self.gate.script
        what = ["--groups", GROUPS, "--config", config, "--run-dir", self.run_dir, *options, script]
        command = support.command("launch", *where, *what, "--", *own(self.data_dir, steps))
        said = (self.directory / "said.log").open("w")
        # Python must find this package from any working directory.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support.ROOT), "MEGATRON_FT_OF_THE_TEST": "7"}
        options = {"stdout": said, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "cwd": cwd, "env": env}
        self.process = subprocess.Popen(self.lab.inside(self.lab.start, command), **options)

    def said(self) -> str:
        return (self.directory / "said.log").read_text()

    def all_said(self) -> str:
        """Return all output; of the ranks, which print each step, the last lines."""
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
        self.await_(lambda: self.process.poll() is not None, "the launcher ends")
        return self.process.returncode

    def await_nobody(self) -> None:
        """Wait until no process but sshd is left on any host."""
        self.await_(lambda: not self.agents(), "all agents have ended")

    def agents(self, host: int | None = None) -> set[int]:
        """Return the agents, keepers and ranks on one host or on all."""
        hosts = range(GROUPS + SPARES) if host is None else [host]
        return {pid for one in hosts for pid in self.lab.processes(one) if proc.program(pid).startswith("python")}

    def agent(self, host: int) -> int:
        """Return the process of ``megatron-ft launch`` on a host."""
        return next(pid for pid in self.agents(host) if "launch" in proc.command(pid)[3:4])

    def lines(self) -> list[dict]:
        """Return the history of all starts of the job, as one."""
        starts = run_directory.starts_of(self.run_dir)
        return invariants.joined([history.read(start) for start in starts])

    def check(self, reference: list[dict]) -> None:
        lines = self.lines()
        found = invariants.check_history(lines, GROUPS * support.PER_GROUP, reference)
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
    """Start sshd on all hosts."""
    for host in range(GROUPS + SPARES):
        lab.begin(host)


def test_the_run_survives_the_loss_of_the_launcher_and_of_all_connections(lab, job, up, failure_free):
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


@pytest.mark.long
def test_a_host_without_power_is_replaced_by_the_spare_host(lab, job, up, failure_free):
    """Its ssh connection, its agent and its log fall silent; the launcher and the other hosts continue."""
    job.start("--export", "ONE=two words")
    job.await_step(5)
    environment = proc.environment(job.agent(0))
    assert {"ONE=two words", "MEGATRON_FT_OF_THE_TEST=7", "OMP_NUM_THREADS=1"} <= set(environment)
    lab.power_off(1)
    job.await_back(1)
    told = f"{lab.address(0)}: megatron_ft: "
    lines = lambda: [line for line in job.said().splitlines() if line.startswith(told)]  # noqa: E731
    job.await_(lambda: any("of host 1 (" in line for line in lines()), "host 0 has reported the lost host")
    job.gate.open()
    assert job.await_exit() == 0, job.all_said()
    job.check(failure_free)
    assert [line["what"] for line in job.events("host")] == ["spare", "took over"]
    assert f"all {STEPS} steps are done" in job.said()
    job.await_nobody()


@pytest.fixture
def etcd(lab, tmp_path):
    """Return a function that starts an etcd beside the launcher, on its earlier data; and the address."""
    running: list[subprocess.Popen] = []
    url = f"http://{lab.address(lab.start)}:2379"
    where = ["--data-dir", tmp_path / "etcd", "--listen-client-urls", url, "--advertise-client-urls", url]

    def start() -> subprocess.Popen:
        with (tmp_path / "etcd.log").open("ab") as log:
            command = lab.inside(lab.start, ["etcd", *map(str, where)])
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        return running[-1]

    yield start, url.replace("http", "etcd")
    for one in running:
        one.kill()
        one.wait()


@pytest.mark.long
@pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())
def test_a_run_that_finds_no_store_is_started_again_from_its_checkpoint(lab, job, up, etcd, failure_free):
    """A rank is lost while there is no etcd; the etcd is back when the run has ended with exit code 7."""
    start, address = etcd
    first = start()
    saves = {"directory": str(job.directory / "saved"), "period_s": 0.05}
    job.start(settings={"store": address, "store_patience_s": 3.0, "checkpoint": saves})
    job.await_(lambda: job.events("host") and job.events("checkpoint"), "a spare host and a checkpoint")
    saved = job.events("checkpoint")[-1]["step"]
    first.kill()
    support.kill([job.ranks()[1]["pid"]])
    job.await_(lambda: (job.run_dir / "earlier").exists() or job.events("stop"), "the run ends")
    start()
    job.gate.open()
    assert job.await_exit() == 0, job.all_said()
    job.check(failure_free)
    (earlier,) = (job.run_dir / "earlier").iterdir()
    (stop,) = (line for line in history.read(earlier) if line["event"] == "stop")
    assert stop["exit_code"] == WIPED_OUT and "no control store has answered for 3 s" in stop["reason"]
    assert job.events("resume")[0]["step"] >= saved
    assert "the whole job is started again (restart 1)" in job.said()


@pytest.mark.long
def test_a_run_that_loses_the_store_for_good_is_started_again_on_all_hosts_that_are_left(lab, job, up, failure_free):
    """No host can claim the store of the lost host. The agents that are left end one after the other, with code 7."""
    saves = {"directory": str(job.directory / "saved"), "period_s": 0.05}
    job.start(settings={"store": "embedded", "store_patience_s": 5.0, "checkpoint": saves})
    job.await_(lambda: job.events("host") and job.events("checkpoint"), "a spare host and a checkpoint")
    saved = job.events("checkpoint")[-1]["step"]
    (job.run_dir / "store").rename(job.directory / "store")
    (job.run_dir / "store").touch()
    lab.kill_all(0)
    job.await_((job.run_dir / "earlier").exists, "the whole job is started again")
    job.gate.open()
    assert job.await_exit() == 0, job.all_said()
    job.check(failure_free)
    assert job.events("resume")[0]["step"] >= saved
    assert "the whole job is started again (restart 1)" in job.said()
    assert f"{GROUPS} hosts, 0 of them in reserve" in job.said() and "gets no further agent" not in job.said()


def test_a_killed_agent_on_a_healthy_host_is_replaced_and_ctrl_c_stops_the_run_in_order(lab, job, up):
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
    assert [(line["what"], line["node"]) for line in job.events("ssh")] == [("spare agent", lab.address(2))]


@pytest.mark.long
def test_ctrl_c_twice_ends_the_agents_of_a_run_that_cannot_stop_in_order(job, up):
    """The run would save first, but one rank is stopped."""
    job.start(steps=ENDLESS, saves=True, stopped_timeout_s=DEADLINE_S, hang_timeout_s=DEADLINE_S)
    job.await_step(3)
    job.await_(lambda: len(job.ranks()) == GROUPS, "all agents have written down their ranks")
    os.kill(job.ranks()[1]["pid"], signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    job.await_(lambda: "the run is told to save and to stop" in job.said(), "it is told to stop")
    job.process.send_signal(signal.SIGINT)
    assert job.await_exit() != 0
    job.await_nobody()
    assert "second signal: all agents are ended" in job.said()


def test_hosts_that_are_not_ready_are_named_and_no_agent_is_started(lab, job, tmp_path):
    """Each host but the first lacks something else."""
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
    assert "3 of 4 hosts are not ready, and no agent is started" in said and "Traceback" not in said
    assert (
        f"{names[1]} cannot be reached: ssh: connect to host {names[1]} port 22: Connection refused; start sshd" in said
    )
    assert f"{names[2]} has megatron_ft 0.0.9, not " in said and "install the same on all hosts" in said
    assert f"{names[3]} has no directory {work}; start from one that all hosts have" in said
    assert f"  {names[0]}" not in said and not job.agents() and not job.events("start")


def test_an_unshared_run_directory_an_unknown_key_and_a_missing_python_are_reported(lab, job, tmp_path):
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
    assert (
        f"{names[0]} does not see the files of --run-dir {job.run_dir}; choose a directory that all hosts share" in said
    )
    assert f"{names[1]} cannot be reached: root@{names[1]}: Permission denied (publickey)" in said
    assert f"ssh-copy-id root@{names[1]}" in said
    assert f"{names[2]} cannot run {sys.executable}" in said
    assert f"{names[3]} cannot be reached" in said and f"try `ssh root@{names[3]} true`" in said
    assert not job.agents() and not job.events("start")


def test_a_failure_at_the_start_ends_all_agents_at_once(lab, job, up):
    """The run directory holds another run. Only the agent of host 0 checks that, and the others would wait for minutes."""
    job.run_dir.mkdir(parents=True)
    history.append(job.run_dir, "end", step=7)
    job.start()
    assert job.await_exit() == 2
    assert f"{lab.address(0)}: megatron-ft launch: --run-dir {job.run_dir} already holds a finished run" in job.said()
    job.await_nobody()


@pytest.mark.long
def test_hosts_with_two_networks_use_the_one_in_the_hostfile(lab, job, up, failure_free):
    """The loss of the network that ssh uses does not affect the run."""
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
