"""The etcd that a run starts by itself: its outage when its leader's host loses its power, and its cost.

    python benchmarks/own_etcd.py [--trials 5] [--rest-s 20]        (as root: network namespaces; needs etcd)

Hosts 0 to 2 have a member each, host 3 has six clients that write a key every 20 ms. In each trial the leader's host loses
its power: its link first, so that its connections are not even closed, then its processes. ``outage_s`` of a client: from
there to its first write that is answered. Host 3 is a spare one, too: ``replaced_s`` is when it has a vote. At rest, with no
clients: processor seconds per second of a member and its keeper, packets and bytes per second of a host, both ways. Writes
results/own_etcd.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.ROOT))
from megatron_ft.runlog import run_directory
from megatron_ft.utils.process_status import process_status
from tools.netlab import Network, ip

MEMBERS, CLIENTS, EVERY_S, PATIENCE_S = 3, 6, 0.02, 60.0
SILENCE_S = 5.0
"""The bound that an agent has on a call."""


def main() -> None:
    common.give_secret()
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--rest-s", type=float, default=20.0)
    parser.add_argument("--host", nargs=3, help="for itself: rank, run directory, address of the store or -")
    parser.add_argument("--client", help="for itself: address of the store")
    options = parser.parse_args()
    if options.host:
        return host(int(options.host[0]), Path(options.host[1]), options.host[2])
    if options.client:
        return client(options.client)
    trials, rest = [], None
    for number in range(options.trials):
        with tempfile.TemporaryDirectory() as directory:
            lab = Lab(Path(directory))
            try:
                if number == 0:
                    rest = lab.at_rest(options.rest_s)
                    print("at rest", rest, flush=True)
                trials.append(lab.lose_leader())
                print(trials[-1], flush=True)
            finally:
                lab.down()
    outages = sorted(second for trial in trials for second in trial["outage_s"])
    summary = {
        "outage_s": {"median": statistics.median(outages), "longest": outages[-1]},
        "replaced_s": statistics.median(trial["replaced_s"] for trial in trials),
    }
    print(json.dumps(summary, indent=1))
    print(f"raw numbers in {common.save('own_etcd', {'summary': summary, 'at_rest': rest, 'trials': trials})}")
    return None


class Lab:
    """Three hosts with members, and a spare one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._net = Network(f"oe{os.getpid() % 10000}", "10.97.0", MEMBERS + 1)
        self._net.up()
        self._hosts = [self._start(rank, "-") for rank in range(MEMBERS)]
        self._address = [process.stdout.readline().split()[1] for process in self._hosts][0]
        _await(lambda: len(list((directory / run_directory.ETCD).glob("*.member"))) == MEMBERS)
        path = directory / "config.json"
        path.write_text(json.dumps({"store_address": self._address}))

    def _start(self, host: int, *own: str, command: tuple[str, ...] = ()) -> subprocess.Popen:
        words = command or ("--host", str(host), str(self._directory), *own)
        inside = ["ip", "netns", "exec", self._net.namespace(host), sys.executable, __file__, *words]
        return subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def at_rest(self, seconds: float) -> list[dict[str, float]]:
        before = [self._used(rank) for rank in range(MEMBERS)]
        time.sleep(seconds)
        after = [self._used(rank) for rank in range(MEMBERS)]
        pairs = zip(before, after, strict=True)
        return [{name: round((new[name] - old[name]) / seconds, 4) for name in old} for old, new in pairs]

    def _used(self, rank: int) -> dict[str, float]:
        entry = json.loads((self._directory / run_directory.ETCD / f"h{rank}.member").read_text())
        keeper = process_status(entry["pid"]).parent
        link = json.loads(ip("-n", self._net.namespace(rank), "-s", "-j", "link", "show", "eth0"))[0]["stats64"]
        sums = {f"{what}_per_s": float(link["rx"][what] + link["tx"][what]) for what in ("packets", "bytes")}
        return {"etcd_cpu": common.cpu_s(entry["pid"]), "keeper_cpu": common.cpu_s(keeper), **sums}

    def lose_leader(self) -> dict[str, Any]:
        spare = self._start(MEMBERS, self._address)
        spare.stdout.readline()
        clients = self._start(MEMBERS, command=("--client", self._address))
        leader = int(clients.stdout.readline())
        answered: list[list[float]] = [[] for _ in range(CLIENTS)]

        def read() -> None:
            for line in clients.stdout:
                who, when = line.split()
                answered[int(who)].append(float(when))

        threading.Thread(target=read, daemon=True).start()
        _await(lambda: all(len(times) > 20 for times in answered))
        lost = time.time()
        self._net.cut(leader)
        for pid in ip("netns", "pids", self._net.namespace(leader)).split():
            with contextlib.suppress(ProcessLookupError):  # it ended with its parent
                os.kill(int(pid), signal.SIGKILL)
        spare.stdin.write(f"{leader}\n")  # the spare host hears no beats here
        spare.stdin.flush()
        _await(lambda: all(times[-1] > lost + 1.0 for times in answered))
        voted = float(spare.stdout.readline())
        for process in (clients, spare):
            process.stdin.close()
            process.wait()
        gaps = [max(b - max(a, lost) for a, b in zip(times, times[1:], strict=False) if b > lost) for times in answered]
        return {"outage_s": [round(gap, 3) for gap in gaps], "replaced_s": round(voted - lost, 3)}

    def down(self) -> None:
        for process in self._hosts:
            process.stdin.close()
            process.wait()
        self._net.down()


def host(rank: int, run_dir: Path, store: str) -> None:
    """Act as an agent does for its member, until its input ends; the input names the lost hosts."""
    from megatron_ft.agent.etcd.members import EtcdCluster

    own = f"10.97.0.{rank + 1}"
    members = EtcdCluster(rank, MEMBERS, own, run_dir, PATIENCE_S, None if store == "-" else store)
    silent: dict[int, float] = {}
    over = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            silent[int(line)] = time.monotonic()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    members.watch(
        lambda: {other: time.monotonic() - since for other, since in silent.items()},
        lambda: {other: f"10.97.0.{other + 1}" for other in range(MEMBERS + 1)},
    )
    print(f"at {members.address}", flush=True)
    told = rank < MEMBERS
    while not over.wait(0.1):
        members.poll()
        if not told and members.keeping and members._voter:
            print(time.time(), flush=True)
            told = True
    members.close()


def client(address: str) -> None:
    """Print the leader's host, then the clients that got an answer, and the time."""
    from megatron_ft.coordination.store import ControlStore, patient

    first = ControlStore(address, "run", SILENCE_S)
    gateway = first._client._gateway
    status = gateway.call("/v3/maintenance/status", {})
    names = {raw["ID"]: raw["name"] for raw in gateway.call("/v3/cluster/member/list", {})["members"]}
    print(names[status["leader"]].removeprefix("h"), flush=True)

    def write(who: int) -> None:
        store = first.clone()
        while True:
            patient(lambda: store.set(f"key{who}", 1))
            sys.stdout.write(f"{who} {time.time()}\n")
            sys.stdout.flush()
            time.sleep(EVERY_S)

    for who in range(CLIENTS):
        threading.Thread(target=write, args=(who,), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def _await(condition: Any) -> None:
    common.wait_until(condition, PATIENCE_S)


if __name__ == "__main__":
    main()
