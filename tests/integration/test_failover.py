"""The host of the embedded control store is lost, or frozen: another host takes the store over, and the interrupted
step is made.

Several agents run on one machine, each with its own loopback address, and share one run directory.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from megatron_ft.errors import WIPED_OUT, RunStopped
from megatron_ft.record import invariants
from tests import support
from tests.integration.test_hosts import BEATS, Agents
from tests.stores import await_, parent_of, store_of

STEPS, HELD = 10, 4


class Hosts(Agents):
    """Agents of several hosts, with one group on each host."""

    def __init__(self, directory, data, **changes) -> None:
        super().__init__(directory, data)
        changes = {"store": "embedded", **changes}
        self.config = support.write_config(directory / "config.json", detector=BEATS, **changes)
        self.gate = support.Gate(directory, HELD, HELD + 3)
        self.script = self.gate.script

    def begin(self, hosts: int, own_directories: bool = False) -> support.Run:
        for host in range(hosts):
            name = f"run{host}" if own_directories and host else "run"
            self.start(host, groups=hosts, hosts=hosts, run_dir=self.directory / name)
        return support.Run(self.directory / "run", self.agents[hosts - 1], groups=hosts)

    def at(self, run: support.Run, step: int, ranks: int) -> None:
        try:
            support.wait_for(lambda: self.gate.waiting(step) == ranks, run)
        except AssertionError as error:
            self.kill()
            said = "\n".join(f"== host {host}\n{self.said(host)}" for host in self.agents)
            raise AssertionError(f"{said}\n{error}\n{claims(run)}\n{run.history}") from None

    def freeze(self, host: int, run: support.Run) -> list[int]:
        """Stop all processes of the store's host; return their pids."""
        ranks = json.loads((run.directory / "ranks" / f"{host}.json").read_text())
        store = store_of(run.directory)
        pids = [self.agents[host].pid, parent_of(store), store, *(rank["pid"] for rank in ranks)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def lose(self, host: int) -> None:
        """kill -9 takes the keeper, the store and the ranks along."""
        self.agents[host].send_signal(signal.SIGKILL)
        self.agents[host].wait()


@pytest.fixture
def hosts(tmp_path, data_dir):
    hosts = Hosts(tmp_path, data_dir)
    yield hosts
    hosts.kill()


@pytest.fixture(scope="module")
def references(tmp_path_factory, data_dir):
    made: dict[int, support.Run] = {}

    def of(groups: int) -> support.Run:
        if groups not in made:
            directory = tmp_path_factory.mktemp(f"reference{groups}") / "run"
            made[groups] = support.start(directory, data_dir, steps=STEPS, groups=groups)
            made[groups].check()
        return made[groups]

    return of


def check(hosts: Hosts, run: support.Run, reference: support.Run, left: tuple[int, ...]) -> None:
    codes = {host: hosts.agents[host].wait(timeout=support.TIMEOUT_S) for host in left}
    said = "\n".join(f"== host {host}\n{hosts.said(host)}" for host in left)
    assert set(codes.values()) == {0}, said + run.logs()
    found = invariants.check_history(run.history, run.groups * support.PER_GROUP, reference.history)
    assert not found, "\n".join([*found, said, *map(str, run.history), run.logs()])
    assert [line["step"] for line in run.events("end")] == [STEPS - 1]


def claims(run: support.Run) -> list[dict]:
    return [
        json.loads(json.loads(path.read_text())["claim"]) for path in sorted(run.directory.glob("store/claim-*.json"))
    ]


def next_host(run: support.Run) -> tuple[int, int]:
    """Return the host that holds the store now, of those that host 0 has left, and the other one. The host with the
    lower number has it, unless a busy machine kept that host from looking."""
    made = [(claim["host"], claim["fenced"]) for claim in claims(run)]
    host = made[-1][0]
    assert made[0] == (0, []) and made[-1] == (host, [[0, 0]]) and host != 0, made
    return host, 3 - host


def test_the_stores_host_is_lost_and_the_run_goes_on(hosts, references):
    """Then the next host is lost, too, and the last one goes on alone."""
    run = hosts.begin(3)
    hosts.at(run, HELD, 3)
    hosts.lose(0)
    hosts.gate.open(HELD)
    hosts.at(run, HELD + 3, 2)
    following, last = next_host(run)
    hosts.lose(following)
    hosts.gate.open()
    check(hosts, run, references(3), (last,))
    made = [(claim["host"], claim["fenced"]) for claim in claims(run)]
    assert made[-2:] == [(last, []), (last, [[following, 0]])]
    lost = [sorted(view["lost"]) for view in run.events("view") if view["lost"]]
    assert lost == [["0"], [str(following)]]
    assert {line["what"] for line in run.events("store")} == {"moved"}
    address = json.loads((run.directory / "config.json").read_text())["store_address"]
    assert address == claims(run)[-1]["address"] and address.startswith(f"127.0.0.{last + 1}:")


@pytest.mark.long
def test_the_other_of_two_hosts_takes_the_store_over(hosts, references):
    """The survivor hears exactly half of the hosts."""
    run = hosts.begin(2)
    hosts.at(run, HELD, 2)
    hosts.lose(0)
    hosts.gate.open()
    check(hosts, run, references(2), (1,))
    assert "any host may be lost: another one takes the store over" in hosts.said(0).splitlines()[0]
    assert [(claim["host"], claim["fenced"]) for claim in claims(run)] == [(0, []), (1, []), (1, [[0, 0]])]


@pytest.mark.long
def test_a_frozen_store_host_finds_itself_left_out_when_it_wakes_up(tmp_path, data_dir, references):
    """The store of the frozen host has forgotten nothing, and its ranks take themselves for members of the run;
    nothing of that host is used any more."""
    hosts = Hosts(tmp_path, data_dir, rejoin={"enabled": True})
    try:
        run = hosts.begin(3)
        hosts.at(run, HELD, 3)
        frozen = hosts.freeze(0, run)
        hosts.gate.open(HELD)
        hosts.at(run, HELD + 3, 2)
        next_host(run)
        for pid in reversed(frozen):
            os.kill(pid, signal.SIGCONT)
        log = run.directory / "logs" / "g0.p0.log"
        await_(lambda: "group 0 is left out of the run by claim" in log.read_text(), "it stops", support.TIMEOUT_S)
        hosts.gate.open()
        check(hosts, run, references(3), (0, 1, 2))
        await_(lambda: not any(map(alive, frozen[2:])), "the old store and the old rank have ended")
    finally:
        hosts.kill()


@pytest.mark.long
def test_a_spare_host_that_comes_after_the_stores_host_was_lost_finds_the_new_store(tmp_path, data_dir, references):
    """The spare host was given the address of the first store, which is gone, and it has to hear of the lost host."""
    hosts = Hosts(tmp_path, data_dir, rejoin={"enabled": True})
    try:
        for host in range(2):
            hosts.start(host, groups=2, hosts=3, spare_hosts=1)
        run = support.Run(hosts.directory / "run", hosts.agents[1], groups=2)
        hosts.at(run, HELD, 2)
        hosts.lose(0)
        hosts.gate.open(HELD)
        hosts.at(run, HELD + 3, 1)
        hosts.start(2, groups=2, hosts=3, spare_hosts=1)
        await_(lambda: len(run.events("host")) == 2, "it takes the lost group over", support.TIMEOUT_S)
        hosts.gate.open()
        check(hosts, run, references(2), (1, 2))
        assert [(line["host_rank"], line["what"]) for line in run.events("host")] == [(2, "spare"), (2, "took over")]
    finally:
        hosts.kill()


@pytest.mark.long
def test_a_spare_host_takes_the_store_over(hosts, references):
    """The spare hosts have lower numbers than the only other host with a group, which has joined later: both have their
    turn before that host, and each of them hears it."""
    hosts.gate = support.Gate(hosts.directory, slowly=15)  # 2 s more for each step: time for the joining host
    support.write_config(hosts.config, detector=BEATS, store="embedded", rejoin={"enabled": True})
    for host in range(3):
        hosts.start(host, groups=1, hosts=3, spare_hosts=2)
    run = support.Run(hosts.directory / "run", hosts.agents[0], groups=1)
    support.wait_for(lambda: [line["what"] for line in run.events("host")] == ["spare"] * 2, run)
    run.process = hosts.join(3, "--groups", 1)
    support.wait_for(lambda: any(1 in step["live"] for step in run.events("step")), run)  # it has the model
    hosts.lose(0)
    support.wait_for(lambda: run.events("store"), run)
    hosts.gate.open()
    check(hosts, run, references(1), (1, 2, 3))
    ((what, host),) = ((line["what"], line["host_rank"]) for line in run.events("store"))
    assert what == "moved" and host in (1, 2)
    assert [(claim["host"], claim["fenced"]) for claim in claims(run)] == [(0, []), (host, []), (host, [[0, 0]])]
    moved = run.events("store")[0]["t"]
    assert all(line["t"] > moved for line in run.events("host") if line["what"] == "took over"), "it had no group"


@pytest.mark.long
def test_a_stores_host_that_wakes_up_where_nothing_comes_back_stays_without_ending_the_run(hosts, references):
    """A supervisor, and every report, takes a line of the record that says that the run has stopped for the end of the
    run."""
    run = hosts.begin(2)
    hosts.at(run, HELD, 2)
    frozen = hosts.freeze(0, run)
    hosts.gate.open(HELD)
    hosts.at(run, HELD + 3, 1)
    for pid in reversed(frozen):
        os.kill(pid, signal.SIGCONT)
    support.wait_for(lambda: [line["code"] for line in run.events("fault")] == [RunStopped.exit_code], run)
    hosts.gate.open()
    check(hosts, run, references(2), (1,))
    assert hosts.agents[0].wait(timeout=support.TIMEOUT_S) == 0
    assert not run.events("stop")


@pytest.mark.long
def test_a_host_that_wakes_up_when_another_run_has_its_directory_leaves_that_run_alone(tmp_path, data_dir, references):
    """The file of the host's own claims is gone, so the host neither takes the store over nor leaves a group out."""
    hosts = Hosts(tmp_path, data_dir)
    try:
        run = hosts.begin(2)
        hosts.at(run, HELD, 2)
        ranks = json.loads((run.directory / "ranks" / "1.json").read_text())
        frozen = [hosts.agents[1].pid, *(rank["pid"] for rank in ranks)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        hosts.lose(0)
        listed = run.directory / "ranks.json"  # a list of another machine, where this one cannot look for processes
        listed.write_text(json.dumps([rank | {"host": "n2"} for rank in json.loads(listed.read_text())]))
        sleeper = hosts.agents.pop(1)
        hosts.start(0, groups=1, hosts=1, host_rank=0, overwrite=True)
        after = support.Run(run.directory, hosts.agents[0], groups=1)
        # The record of the run before is moved away while this waits, and the next begins empty.
        support.wait_for(lambda: [line["groups"] for line in after.events("start")] == [1], after)
        support.wait_for_step(after, HELD - 1)
        for pid in reversed(frozen):
            os.kill(pid, signal.SIGCONT)
        assert sleeper.wait(timeout=support.TIMEOUT_S) != 0
        said = sleeper.communicate()[0]
        assert "given to another run" in said or "is in use by run" in said, said
        hosts.gate.open()
        check(hosts, after, references(1), (0,))
        assert not after.events("silence") and len(after.events("view")) == 1, after.history
    finally:
        hosts.kill()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_run_ends_when_no_host_can_take_the_store_over_and_says_what_is_missing(tmp_path, data_dir, how):
    """The directory of the claims cannot be written. The run can be started again; it never sits idle. A host that is
    frozen closes no connection, as one that has lost its power."""
    hosts = Hosts(tmp_path, data_dir, rejoin={"enabled": True}, store_patience_s=12.0)
    frozen: list[int] = []
    try:
        run = hosts.begin(2)
        hosts.at(run, HELD, 2)
        (run.directory / "store").rename(tmp_path / "away")
        (run.directory / "store").write_text("")
        if how == "frozen":
            frozen += hosts.freeze(0, run)
        else:
            hosts.lose(0)
        hosts.gate.open()
        code, said = hosts.agents[1].wait(timeout=support.TIMEOUT_S), hosts.said(1)
        assert code == WIPED_OUT, said
        assert "the claim log in " in said and "no host takes the control store over meanwhile" in said
        assert "no control store has answered for 12 s" in said.splitlines()[-1]
        assert ("cannot go on without host 0" in said.splitlines()[-1]) == (how == "frozen"), said
    finally:
        for pid in reversed(frozen):
            os.kill(pid, signal.SIGCONT)
        hosts.kill()


@pytest.mark.long
def test_hosts_without_a_common_directory_train_and_report_that_the_store_does_not_move(hosts, references, monkeypatch):
    monkeypatch.setenv("MEGATRON_FT_SECRET", support.SECRET.text)
    hosts.gate.open()
    for name in ("logs", "ranks", "timeline"):  # host 0 makes them in its own directory
        (hosts.directory / "run1" / name).mkdir(parents=True)
    run = hosts.begin(2, own_directories=True)
    check(hosts, run, references(2), (0, 1))
    assert (
        "when that host is lost the run ends, because the hosts share no run directory" in hosts.said(0).splitlines()[0]
    )
    assert not claims(run)
