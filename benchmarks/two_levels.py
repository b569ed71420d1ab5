"""Sums between groups that share hosts: in one level and in two, in fp32 and as bf16.

    sudo python benchmarks/two_levels.py [--rounds 9] [--mbit 500] [--megabytes 4]

Hosts are network namespaces whose links have a limited rate (Linux only; needs root, iproute2 and tc). In each round all
ways take turns on the same groups; a sum is four buckets, started together. Printed for each way: the median time, its
ratio to one level in fp32, what the first host has sent, and the time to connect at the slowest member. "as gloo adds bf16"
is what gloo does by itself: it rounds after each addition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

from megatron_ft.run.collectives.base import Communicator
from megatron_ft.run.collectives.communicator_choice import GLOO, Choice, Maker
from megatron_ft.run.store import listen, serve_on
from tools import netlab

SHAPES = ((2, 2), (2, 4), (4, 2), (4, 1))
"""Hosts, and groups on each."""
BUCKETS, WARMUP, LIMIT_S = 4, 1, 300.0
WAYS = ("one level, fp32", "two levels, fp32", "one level, as gloo adds bf16", "two levels, bf16")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbit", type=int, default=500)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        print(json.dumps(Member(**json.loads(args.member)).measure(args.rounds)))
        return 0
    if why := netlab.missing():
        print(why, file=sys.stderr)
        return 1
    found = [one_shape(hosts, each, args) for hosts, each in SHAPES]
    settings = {"rounds": args.rounds, "mbit": args.mbit, "megabytes": args.megabytes, "buckets": BUCKETS}
    print(f"raw numbers in {common.save('two_levels', {**settings, 'shapes': found})}")
    return 0


def one_shape(hosts: int, each: int, args: argparse.Namespace) -> dict[str, Any]:
    network = netlab.Network("mft2lv", "10.97.0", hosts)
    try:
        network.up()
        network.join()
        for host in network.hosts:
            rate = ["root", "tbf", "rate", f"{args.mbit}mbit", "burst", "256kb", "latency", "20ms"]
            subprocess.run(network.inside(host, ["tc", "qdisc", "add", "dev", "eth0", *rate]), check=True)
        with listen(network.own_address, 0) as listener:
            store = serve_on(listener)
            members = []
            for me in range(hosts * each):
                own = {
                    "me": me,
                    "size": hosts * each,
                    "each": each,
                    "store": [network.own_address, store.port],
                    "address": network.address(me // each),
                    "elements": int(args.megabytes * 2**20 / 4),
                }
                words = [sys.executable, __file__, "--rounds", str(args.rounds), "--member", json.dumps(own)]
                command = network.inside(me // each, words)
                members.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=common.environment()))
            said = [json.loads(member.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for member in members]
    finally:
        network.down()
    print(f"{hosts} hosts, {each} groups on each:")
    first = statistics.median(said[0]["seconds"][WAYS[0]])
    for way in WAYS:
        seconds = statistics.median(said[0]["seconds"][way])
        sent, connect = said[0]["sent"][way] / 2**20, max(one["connect"].get(way, 0.0) for one in said)
        print(f"  {way:30} {seconds * 1e3:7.1f} ms ({seconds / first:.2f})  host 0 sent {sent:6.1f} MB", end="")
        print(f"  connected in {connect * 1e3:.0f} ms" if connect else "")
    return {"hosts": hosts, "groups_on_each": each, "members": said}


class Member:
    """One group. Times are its own, from a barrier on."""

    def __init__(self, me: int, size: int, each: int, store: list[Any], address: str, elements: int) -> None:
        torch.set_num_threads(1)
        self._me, self._members, self._each, self._address = me, range(size), each, address
        self._store = dist.TCPStore(*store, is_master=False)
        self._tensors = [torch.zeros(elements) for _ in range(BUCKETS)]
        self._rounded = [torch.zeros(elements, dtype=torch.bfloat16) for _ in range(BUCKETS)]
        self._connect: dict[str, float] = {}
        own = {member: member // each for member in self._members}
        apart = dict.fromkeys(self._members, 0)
        flat = self._made(WAYS[0], apart, False)
        two = self._made(WAYS[1], own, False)
        rounded = self._made(WAYS[3], own, True)
        self._ways: dict[str, Callable[[], Sequence[Any]]] = {
            WAYS[0]: lambda: [flat.all_reduce(tensor) for tensor in self._tensors],
            WAYS[1]: lambda: [two.all_reduce(tensor) for tensor in self._tensors],
            WAYS[2]: lambda: [flat._group.allreduce([tensor]) for tensor in self._rounded],  # type: ignore[attr-defined]
            WAYS[3]: lambda: [rounded.all_reduce(tensor) for tensor in self._rounded],
        }
        self._barrier = flat

    def _made(self, way: str, host_of: dict[int, int], rounded: bool) -> Communicator:
        maker = Maker(self._me, self._members, 0, 60.0, self._address, rounded=rounded)
        began = time.monotonic()
        made = maker.make(Choice.of(GLOO, host_of), way, lambda name: dist.PrefixStore(name, self._store))
        made.connect()
        self._connect[way] = time.monotonic() - began
        return made

    def measure(self, rounds: int) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        sent = dict.fromkeys(WAYS, 0)
        for number in range(WARMUP + rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                for tensor in (*self._tensors, *self._rounded):
                    tensor.fill_(1.0)
                self._barrier.all_reduce(torch.zeros(1)).wait()
                before, began = _sent(), time.monotonic()
                for work in self._ways[way]():
                    work.wait()
                if number >= WARMUP:
                    seconds[way].append(time.monotonic() - began)
                self._barrier.all_reduce(torch.zeros(1)).wait()
                sent[way] = _sent() - before
                for tensor in self._rounded if "bf16" in way else self._tensors:
                    assert bool((tensor == len(self._members)).all())
        return {"seconds": seconds, "sent": sent, "connect": self._connect}


def _sent() -> int:
    """Return the bytes that this host has sent to others."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    sys.exit(main())
