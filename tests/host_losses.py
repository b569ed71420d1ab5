"""Each host of a run is lost in turn: the table of docs/host-losses.md, from real runs in network namespaces.

    python -m tests.host_losses [--hosts 2 3 4 5] [--blows power kill ...] [--stores embedded given] [--save]
                                [--shard K/N] [--missing [COMMIT]]

Each case is a run of its own: ``hosts`` hosts with one group each (or with groups of two hosts), perhaps a spare host, and
one host that is lost after some steps. The steps must be those of a run without failures, with the same losses, and the
survivors must end with the same parameters. ``--save`` adds each run to benchmarks/results/host_losses.json, with the commit
it was measured at and in place of an earlier run of the same case, and writes the table of all runs that are there to
docs/host-losses.md. ``--missing`` leaves out the cases that have a run of COMMIT (default: the present one) or of a later
commit. Processes with different shards may run at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import common
from megatron_ft.data import prepare
from megatron_ft.record import history, invariants
from tests import netlab, support, warm

STEPS = 60
STRIKE_AT = 4
FREEZE_S = 30.0
"""How long a frozen host stays frozen; a host that is cut off, too, is healed after it."""
PATIENCE_S = 120.0

BLOWS = {
    "power": "its link first, so that no connection is even closed, then its processes",
    "kill": "all its processes are killed; its kernel closes their connections",
    "freeze": f"all its processes are stopped for {FREEZE_S:g} s",
    "cut": f"its link is cut for {FREEZE_S:g} s",
    "double": "power, then the power of the host that has claimed the store in its place, before a step is committed",
}
STORES = {
    "embedded": "the embedded store, which another host takes over",
    "given": "an etcd that is there, on a host that is not lost",
}
HEALED = ("freeze", "cut")


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        hosts: number of hosts with groups.
        lost: number of the host that is lost; the embedded store is on host 0 first.
        blow: one of :data:`BLOWS`.
        store: one of :data:`STORES`.
        across: each group is spread over two hosts.
        spare: there is one more host, without groups.
    """

    hosts: int
    lost: int
    blow: str
    store: str
    across: bool = False
    spare: bool = False

    @property
    def impossible(self) -> str:
        """Return why there is no such run; empty when there is."""
        if self.across and (self.hosts % 2 or self.hosts < 4):
            return "groups of two hosts need an even number of hosts, and two groups"
        if self.blow == "double" and (
            self.store != "embedded" or self.lost or self.hosts < 3 or self.across or self.spare
        ):
            return "the store's host and its successor are lost, and another host with a group remains"
        return ""

    @property
    def groups(self) -> int:
        return self.hosts // 2 if self.across else self.hosts

    @property
    def hit(self) -> set[int]:
        """The groups that are lost with the host."""
        return {self.lost // 2 if self.across else self.lost}

    @property
    def returns(self) -> bool:
        """Return whether there is a host on which the lost groups can be started again."""
        return self.spare or self.blow in HEALED

    @property
    def is_even(self) -> bool:
        """Return whether the fault leaves each of two hosts alone with its groups: either of them may go on."""
        return self.blow == "cut" and self.hosts == 2

    def __str__(self) -> str:
        where = f"host {self.lost} of {self.hosts}{' and a spare' if self.spare else ''}"
        return f"{self.blow}, {where}, store {self.store}{', groups of two hosts' if self.across else ''}"


@dataclass
class Outcome:
    """The result of a case: seconds from the blow to the interrupted step's commit, and to the step in which the lost
    groups take part again (None: they do not); what is wrong, if anything."""

    case: Case
    commit_s: float | None = None
    return_s: float | None = None
    wrong: list[str] = field(default_factory=list)


class Trial:
    """One case, from the start of the agents to the judgement."""

    def __init__(self, case: Case, directory: Path, data: Path) -> None:
        self.case, self.directory, self.data = case, directory, data
        self.last = case.hosts + case.spare  # the host of the etcd that is given
        self.lab = netlab.Lab(self.last + (case.store == "given"))
        self.gate = support.Gate(directory, slowly=STEPS)
        self.agents: dict[int, warm.Launched] = {}
        self.etcd: subprocess.Popen[bytes] | None = None
        self.down = {case.lost} if case.blow not in HEALED else set()
        """Hosts that do not come back."""
        self.hit = set(case.hit)
        """Groups that are lost."""

    def start(self) -> None:
        case, lab = self.case, self.lab
        store = {"embedded": "embedded", "given": f"etcd://{lab.address(self.last)}:2379"}[case.store]
        detector = {"straggler_factor": 0}
        config = support.write_config(self.directory / "config.json", store=store, rejoin={}, detector=detector)
        if case.store == "given":
            self._start_etcd()
        own = ["--data", self.data, "--steps", STEPS, "--seed", 1, *support.SMALL, "--lr", 1e-4]
        for host in range(case.hosts + case.spare):
            where = ["--hosts", case.hosts + case.spare, "--host-rank", host, "--groups", case.groups]
            where += ["--spare-hosts", 1] if case.spare else []
            where += ["--ranks-per-group", 2] if case.across else []
            where += ["--job-id", "table"] if case.store == "given" else []
            where += (
                ["--store", f"{lab.address(0)}:29500"] if case.store == "embedded" else ["--address", lab.address(host)]
            )
            where += ["--config", config, "--run-dir", self.directory / "run", self.gate.script, "--", *own]
            with (self.directory / f"agent{host}.log").open("w") as output:
                env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.directory)}
                self.agents[host] = warm.launch_on_host(lab, host, "launch", *where, env=env, stdout=output)

    def _start_etcd(self) -> None:
        url = f"http://{self.lab.address(self.last)}:2379"
        options = ["--data-dir", self.directory / "etcd", "--listen-client-urls", url, "--advertise-client-urls", url]
        command = self.lab.inside(self.last, ["etcd", *map(str, options)])
        with (self.directory / "etcd.log").open("wb") as output:
            self.etcd = subprocess.Popen(command, stdout=output, stderr=output)

    def play(self, reference: list[dict]) -> Outcome:
        outcome = Outcome(self.case)
        try:
            self.start()
            self._await(lambda: len(self._steps()) > STRIKE_AT, "the first steps")
            if self.case.spare:
                self._await(lambda: any(line["what"] == "spare" for line in self._events("host")), "the spare host")
            struck = time.time()
            self._strike()
            self._await(lambda: self._first_after(struck) is not None, "the interrupted step")
            first = self._first_after(struck)
            outcome.commit_s = round(first["t"] - struck, 3)
            if self.case.is_even:
                self.hit = set(range(self.case.groups)) - set(first["live"])
            if self.case.blow in HEALED:
                time.sleep(max(0.0, struck + FREEZE_S - time.time()))  # the length of the fault
                self._heal()
                if self.case.spare and not self.case.is_even:
                    self._await(lambda: self._is_spare(self.case.lost), "the healed host's turn as a spare")
            if self.case.returns:
                self._await(lambda: self._back(struck) is not None, "the lost groups' return")
                outcome.return_s = round(self._back(struck)["t"] - struck, 3)
            self.gate.open()
            outcome.wrong += self._judge(reference)
        except AssertionError as error:
            outcome.wrong.append(str(error))
        return outcome

    def _strike(self) -> None:
        lab, lost = self.lab, self.case.lost
        {"kill": lab.kill_all, "freeze": lab.freeze, "cut": lab.cut}.get(self.case.blow, lab.power_off)(lost)
        if self.case.blow == "double":
            self._await(lambda: self._store_host() != lost, "a claim for the store")
            successor = self._store_host()
            lab.power_off(successor)
            self.down.add(successor)
            self.hit.add(successor)

    def _store_host(self) -> int:
        """Return the host that the newest claim names."""
        newest = max((self.directory / "run" / "store").glob("claim-*.json"))
        return json.loads(json.loads(newest.read_text())["claim"])["host"]

    def _heal(self) -> None:
        {"freeze": self.lab.thaw, "cut": self.lab.plug_in}[self.case.blow](self.case.lost)

    def _judge(self, reference: list[dict]) -> list[str]:
        codes = {}
        for host, agent in self.agents.items():
            if host not in self.down:
                try:
                    codes[host] = agent.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    codes[host] = -1
        wrong = [f"the agent of host {host} ended with {code}" for host, code in codes.items() if code]
        lines = history.read(self.directory / "run")
        wrong += invariants.check_history(lines, self.case.groups * support.PER_GROUP, reference)
        survivors = {line["group"] for line in lines if line["event"] == "survivor"}
        expected = set(range(self.case.groups)) - (set() if self.case.returns else self.hit)
        if survivors != expected:
            wrong.append(f"groups {sorted(survivors)} got to the end, not {sorted(expected)}")
        return wrong

    def _events(self, event: str) -> list[dict]:
        return [line for line in history.read(self.directory / "run") if line["event"] == event]

    def _steps(self) -> list[dict]:
        return self._events("step") if (self.directory / "run" / "history.jsonl").exists() else []

    def _first_after(self, struck: float) -> dict | None:
        return next((line for line in self._steps() if line["t"] > struck and self._misses(set(line["live"]))), None)

    def _misses(self, live: set[int]) -> bool:
        """Return whether a step of these groups was made without those that the fault takes out."""
        return len(live) < self.case.groups if self.case.is_even else not self.hit & live

    def _is_spare(self, host: int) -> bool:
        """Whether the agent of that host has said that its groups are on another host now."""
        said = (self.directory / f"agent{host}.log").read_text()
        return all(re.search(rf"groups ([\d ]+ )?{group} ([\d ]+ )?are on host", said) for group in self.case.hit)

    def _back(self, struck: float) -> dict | None:
        first = self._first_after(struck)
        return next(
            (line for line in self._steps() if first and line["t"] > first["t"] and self.hit <= set(line["live"])), None
        )

    def _await(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
            time.sleep(0.05)

    def said(self) -> str:
        """Return the output of the agents."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("agent*.log")))

    def close(self) -> None:
        for host in self.lab.hosts:
            self.lab.kill_all(host)
        for process in (*self.agents.values(), self.etcd):
            if process is not None:
                process.wait()
        self.lab.close()


class References:
    """The histories of the same jobs on one host, without failures; each is made once."""

    def __init__(self, directory: Path, data: Path) -> None:
        self._directory, self._data, self._made = directory, data, {}

    def of(self, case: Case) -> list[dict]:
        key = (case.groups, case.across)
        if key not in self._made:
            directory = self._directory / f"reference.{case.groups}.{case.across}"
            config = support.write_config(directory.with_suffix(".json"), detector={"straggler_factor": 0})
            own = ["--data", self._data, "--steps", STEPS, "--seed", 1, *support.SMALL, "--lr", 1e-4]
            where = ["--groups", case.groups, "--config", config, "--run-dir", directory]
            where += ["--ranks-per-group", 2] if case.across else []
            done = support.ft("launch", *where, support.SCRIPT, "--", *own)
            assert done.returncode == 0, done.stdout + done.stderr
            self._made[key] = history.read(directory)
        return self._made[key]


@contextlib.contextmanager
def bench() -> Iterator[Callable[[Case], Outcome]]:
    """Play cases in a directory of their own."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text = support.ROOT / "megatron_ft" / "data" / "addresses.txt"
        prepare(directory / "data", [text], vocab_size=512, log=lambda line: None)
        references = References(directory, directory / "data")

        def play(case: Case) -> Outcome:
            return play_in(Path(tempfile.mkdtemp(dir=directory)), directory / "data", references, case)

        yield play


def play_in(directory: Path, data: Path, references: References, case: Case) -> Outcome:
    trial = Trial(case, directory, data)
    try:
        outcome = trial.play(references.of(case))
        if outcome.wrong:
            outcome.wrong.append(trial.said())
        return outcome
    finally:
        trial.close()


def cases(hosts: list[int], blows: list[str], stores: list[str]) -> Iterator[Case]:
    """Return a case for every host of each number of hosts; with a spare host and without; groups of two hosts where
    possible."""
    for number in hosts:
        for lost in range(number):
            for blow in blows:
                for store in stores:
                    for across in (False, True):
                        for spare in (False, True):
                            case = Case(number, lost, blow, store, across, spare)
                            if not case.impossible:
                                yield case


# --- the table --------------------------------------------------------------------------------------------------------

TABLE = support.ROOT / "docs" / "host-losses.md"
HEAD = """# What a run does when any one host is lost

`make host-losses` writes this page (`tests/host_losses.py`) from real runs. The hosts are network namespaces of one
machine, with one group for each host, or groups of two hosts. In each run one host is lost after some steps. A run is
*right* when every step is committed once, with the losses of a run without failures, when all survivors end with the
same parameters, when the host or a spare one brings the lost groups back where that is possible, and when a healed host
whose groups are on the spare one by then becomes a spare itself. Of two hosts that a cut link leaves alone, either may
go on. *Commit* is the time in seconds from the blow to the commit of the interrupted step; *back* is the time to the
first step in which the lost groups take part again (a healed host is away for 30 s). Both are medians, with the largest
in brackets.

A run could start an etcd of its own until November 2026. In 128 runs (97482f901, fa65fed1a) it survived the same losses as
the embedded store; the median commit came later in all 16 rows with another host lost, and in 7 of 16 with host 0 lost.
"""
SLURM_HEAD = """
## In Slurm

`tests/slurm_losses.py`: jobs of `slurm/pretrain.sbatch` on four nodes of `tools/slurm_lab.py`, with three groups. n1 is the
batch node and the spare one, n2 is host 0. One job for each cell: seconds to the commit, and to the return of the lost
group.
"""


def kept() -> dict[str, list[dict]]:
    """Return the runs that are kept, by kind: runs, slurm."""
    file = common.RESULTS / "host_losses.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: found.get(name, []) for name in ("runs", "slurm")}


def save(kind: str, row: dict, key: Sequence[str]) -> None:
    """Keep this run in place of an earlier one with the same ``key``, and write the tables anew. ``kind``: runs, slurm."""
    row = {**row, "commit": common.commit()}
    with Path(tempfile.gettempdir(), "megatron_ft-host_losses.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another shard saves, too
        found = kept()
        found[kind] = [run for run in found[kind] if any(run[name] != row[name] for name in key)] + [row]
        common.save("host_losses", found)
        TABLE.write_text(page(found), encoding="utf-8")


def page(found: dict[str, list[dict]]) -> str:
    """Return the text of docs/host-losses.md for these runs."""
    slurm = [SLURM_HEAD, *slurm_table(found["slurm"])] if found["slurm"] else []
    return "\n".join([HEAD, *table(found["runs"]), *slurm, ""])


def slurm_table(runs: list[dict]) -> list[str]:
    """One line for each blow and store, one column for each node: seconds to the commit, and until the group is back."""
    nodes = sorted({run["node"] for run in runs})
    lines = [f"| blow | store | {' | '.join(nodes)} |", f"|---|---|{'---|' * len(nodes)}"]
    for blow, store in sorted({(run["blow"], run["store"]) for run in runs}, key=lambda kind: [*BLOWS].index(kind[0])):
        cells = []
        for node in nodes:
            some = [run for run in runs if (run["node"], run["blow"], run["store"]) == (node, blow, store)]
            cells += [_cell(some[0]) if some else ""]
        lines.append(f"| {blow} | {store} | {' | '.join(cells)} |")
    return lines


def _cell(run: dict) -> str:
    times = "" if run["commit_s"] is None else f", {run['commit_s']:.2f}, {run['return_s']:.2f}"
    return f"wrong{times}" if run["wrong"] else f"right{times}"


def table(runs: list[dict]) -> list[str]:
    """One line for each blow, store, kind of group, with a spare host and without."""
    lines = [
        *(f"- **{blow}**: {meaning}." for blow, meaning in BLOWS.items()),
        *(f"- store **{store}**: {meaning}." for store, meaning in STORES.items()),
        "",
        "| blow | store | groups | spare host | hosts | runs | right | commit, host 0 lost | commit, another lost | back |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    key = lambda run: (run["blow"], run["store"], run["across"], run["spare"])  # noqa: E731
    places = lambda kind: ([*BLOWS].index(kind[0]), [*STORES].index(kind[1]), *kind[2:])  # noqa: E731
    for blow, store, across, spare in sorted({key(run) for run in runs}, key=places):
        some = [run for run in runs if key(run) == (blow, store, across, spare)]
        numbers = sorted({run["hosts"] for run in some})
        right = sum(not run["wrong"] for run in some)
        cells = [blow, store, "two hosts each" if across else "one host each", "yes" if spare else "no"]
        cells += [" ".join(map(str, numbers)), str(len(some)), str(right)]
        cells += [_seconds([run for run in some if (not run["lost"]) == first], "commit_s") for first in (True, False)]
        cells += [_seconds(some, "return_s")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _seconds(runs: list[dict], name: str) -> str:
    values = [run[name] for run in runs if run[name] is not None]
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else ""


@functools.cache
def _is_of(first: str, commit: str) -> bool:
    """Return if ``commit`` is ``first``, or a later one."""
    command = ["git", "merge-base", "--is-ancestor", first, commit]
    return subprocess.run(command, cwd=support.ROOT, check=False, stderr=subprocess.DEVNULL).returncode == 0


def _shard(text: str) -> tuple[int, int]:
    shard, shards = map(int, text.split("/"))
    return shard, shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--blows", nargs="+", default=list(BLOWS), choices=list(BLOWS))
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=list(STORES))
    parser.add_argument("--lost", type=int, nargs="+", help="only these hosts (default: each)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="play one case of N only")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="K/N", help="the Kth (from 0) of N parts of them"
    )
    parser.add_argument("--save", action="store_true", help="keep the results, and write the table anew")
    parser.add_argument(
        "--missing", nargs="?", const="HEAD", metavar="COMMIT", help="only cases without a run of COMMIT or a later one"
    )
    options = parser.parse_args()
    chosen = [case for case in cases(options.hosts, options.blows, options.stores)
              if options.lost is None or case.lost in options.lost][:: options.every]  # fmt: skip
    shard, shards = options.shard
    chosen = chosen[shard::shards]
    if options.missing:
        done = [run for run in kept()["runs"] if _is_of(options.missing, run["commit"])]
        chosen = [case for case in chosen if not any(asdict(case).items() <= run.items() for run in done)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts' processes are ended on the way out
    failed = 0
    with bench() as play:
        for number, case in enumerate(chosen):
            outcome = play(case)
            failed += bool(outcome.wrong)
            took = f"commit {outcome.commit_s} s, back {outcome.return_s} s"
            print(f"{number + 1} of {len(chosen)}: {case}: {took}", flush=True)
            print("\n".join(outcome.wrong), end="\n" if outcome.wrong else "", flush=True)
            if options.save:
                row = {**asdict(outcome.case), "commit_s": outcome.commit_s, "return_s": outcome.return_s}
                save("runs", {**row, "wrong": outcome.wrong[:1]}, list(asdict(outcome.case)))
    print(f"{len(chosen)} runs, {failed} wrong")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
