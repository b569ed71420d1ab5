"""An all-reduce in SimGrid, message by message: ``/usr/bin/python3 tools/simgrid_allreduce.py --hosts 2 8 --bytes 1e9``.

A second opinion on ``tools/allreduce.py``: no formula here, only messages. Rank r contributes
the number 2^r, so that a sum tells what is in it, and at the end every rank must hold the sum of all. Lists of values
mean all their combinations; the times go to stdout as JSON.

It runs under any Python that has SimGrid. Debian's ``python3-simgrid`` belongs to /usr/bin/python3, so nothing of this
project or its environment is imported; an interpreter without SimGrid
imports :func:`python_with_simgrid` and :func:`simulate`.

Hosts hang on a switch without limits, each on a full-duplex link of its own with half of the latency. Models of the network:
*plain*: SimGrid's CM02 without its TCP window and without acknowledgements (cross-traffic), which is what the formula
assumes. *lv08*: SimGrid's default, fitted to TCP: 97% of the bandwidth, 13.01 times the latency, and data that comes in
takes 5% of its rate from what goes out (Velho, Legrand 2009).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product

MODELS = {
    "plain": ["network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0"],
    "lv08": ["network/model:LV08"],
}
LV08_FORWARD, LV08_BOTH_WAYS, LV08_LATENCY = 0.97, 0.97 / 1.05, 13.01
"""The share of the bandwidth of a link that carries data in one direction, or in both at a time; the factor of the
latency."""


def _whole(text: str) -> int:
    """Parse a whole number; 1e9 is one, too."""
    return int(float(text))


SPEED = 1e9
"""Work that a host does in a second."""
# Kind, least value and default; the names are those of the output too.
OPTIONS = {
    "algorithm": (str, None, ["ring", "tree"]),
    "model": (str, None, ["plain"]),
    "hosts": (_whole, 1, [2, 8]),
    "bytes": (_whole, 1, [1_000_000_000]),
    "slowdown": (float, 1, [1.0]),
    "slow_host": (_whole, 0, [0]),
    "positions": (_whole, 1, [1]),
    "bandwidth": (float, 1, [12.5e9]),
    "latency": (float, 0, [10e-6]),
}


# --- for interpreters without SimGrid ---------------------------------------------------------------------------------


def python_with_simgrid() -> str | None:
    """The interpreter that can import SimGrid: the system's, the one on the PATH or this one; None if there is none."""
    candidates = ["/usr/bin/python3", shutil.which("python3"), sys.executable]
    for python in filter(None, dict.fromkeys(candidates)):
        try:
            found = subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False)
        except OSError:
            continue
        if found.returncode == 0:
            return python
    return None


def version(python: str) -> str:
    asked = [python, "-c", "import simgrid; print(simgrid.simgrid_version)"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def simulate(python: str, **options: Sequence[object]) -> list[dict]:
    """Run this file under ``python``; ``options`` as on its command line. Returns the cases with their ``time_s``."""
    command = [python, __file__]
    for name, values in options.items():
        command += [f"--{name.replace('_', '-')}", *map(str, values)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


# --- in SimGrid -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="simgrid_allreduce", description="How long an all-reduce takes in SimGrid.")
    choices = {"model": list(MODELS), "algorithm": list(ALGORITHMS)}
    for name, (kind, _, default) in OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, nargs="+", default=default, choices=choices.get(name), help=f"{default}")
    options = vars(parser.parse_args())
    for name, (_, least, _) in OPTIONS.items():
        if least is not None and min(options[name]) < least:
            parser.error(f"{name} is {min(options[name])}; it must be at least {least}")
    if max(options["slow_host"]) >= min(options["hosts"]):
        parser.error(f"slow_host is {max(options['slow_host'])}, but {min(options['hosts'])} hosts are numbered from 0")
    try:
        import simgrid  # noqa: F401
    except ImportError:
        print("simgrid_allreduce: no SimGrid here; as root: apt-get install python3-simgrid", file=sys.stderr)
        return 2
    print(json.dumps([{**case, "time_s": _in_a_process(case)} for case in _cases(options)], indent=1))
    return 0


def _cases(options: dict) -> list[dict]:
    """Return all combinations that differ: with healthy links it does not matter which link would be degraded."""
    cases = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    healthy = options["slow_host"][0]
    return [case for case in cases if case["slowdown"] != 1 or case["slow_host"] == healthy]


def _in_a_process(case: dict) -> float:
    """Run in a process of its own: SimGrid has one engine per process, and aborts it on a deadlock, which is an
    exception here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_run, case).result()


def _run(case: dict) -> float:
    """Return the seconds of simulated time until all ranks of every position's communicator are done."""
    from simgrid import Actor, Engine

    settings = [f"--cfg={setting}" for setting in MODELS[case["model"]]]
    engine = Engine(["simgrid_allreduce", "--log=root.thresh:warning", *settings])
    hosts = platform(case)
    for position in range(case["positions"]):
        for rank, host in enumerate(hosts):
            arguments = (position, rank, len(hosts), case["bytes"])
            Actor.create(f"{position}:{rank}", host, ALGORITHMS[case["algorithm"]], *arguments)
    engine.run()
    return Engine.clock


def platform(case: dict) -> list:
    """Make the ``hosts`` of a case, with their links; return them."""
    from simgrid import LinkInRoute, NetZone

    zone = NetZone.create_star_zone("cluster")
    hosts = []
    for number in range(case["hosts"]):
        slowdown = case["slowdown"] if number == case["slow_host"] else 1.0
        host = zone.create_host(f"host{number}", SPEED)
        link = zone.create_split_duplex_link(f"link{number}", case["bandwidth"] / slowdown)
        link.set_latency(case["latency"] / 2)
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link, LinkInRoute.UP)], True)
        hosts.append(host)
    zone.seal()
    return hosts


def _ring(position: int, rank: int, N: int, size: int) -> None:
    """Reduce-scatter, then all-gather: round by round a part of the bytes goes to the next rank.

    The chunk sent in a round is the one received in the round before, through both halves.
    """
    chunks = [1 << rank] * N
    to_next, to_me = _mailbox(position, "ring", (rank + 1) % N), _mailbox(position, "ring", rank)
    for step in range(2 * (N - 1)):
        goes, comes = (rank - step) % N, (rank - step - 1) % N
        sent = to_next.put_async(chunks[goes], size * (goes + 1) // N - size * goes // N)
        got = to_me.get()
        chunks[comes] = chunks[comes] + got if step < N - 1 else got
        sent.wait()
    assert chunks == [(1 << N) - 1] * N, "not the sum of all groups"


def tree(position: int, rank: int, N: int, size: int) -> None:
    """Binomial tree: receive from one child after the other, send all to the parent; then the same in reverse."""
    held, distance = 1 << rank, 1
    while distance < N and not rank & distance:
        if rank + distance < N:
            held += _mailbox(position, "up", rank + distance).get()
        distance *= 2
    if rank:
        _mailbox(position, "up", rank).put(held, size)
        held = _mailbox(position, "down", rank).get()
    while distance > 1:
        distance //= 2
        if rank + distance < N:
            _mailbox(position, "down", rank + distance).put(held, size)
    assert held == (1 << N) - 1, "not the sum of all groups"


def _mailbox(position: int, way: str, rank: int):
    from simgrid import Mailbox

    return Mailbox.by_name(f"{position}:{way}:{rank}")


ALGORITHMS = {"ring": _ring, "tree": tree}

if __name__ == "__main__":
    sys.exit(main())
