"""Random input to everything of the project's own that listens: no exception in any thread, memory flat, service unaffected.

``python -m tests.fuzz [--inputs N] [--seed S] [--only NAME]``; tests/unit/test_fuzz.py runs a few of each, and
tests/integration/test_fuzzed_run.py sends them to all ports of a run that trains.

A *stranger* does not know the secret; a *member* does and says nonsense, as a process of another version would.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import queue
import random
import socket
import struct
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_ft.cluster.doctor import bandwidth
from megatron_ft.cluster.doctor.host_orders import Hub
from megatron_ft.cluster.doctor.meeting import MEET, Meeting
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.detection.heartbeats import Said
from megatron_ft.core.protocol import signals
from megatron_ft.data.order import BatchSchedule
from megatron_ft.host.checkpoint_cache import CheckpointCache
from megatron_ft.host.heartbeat import _SIGNED, HeartbeatService
from megatron_ft.run import store
from megatron_ft.run.checkpoint.memory_copies import ReplicaCache
from megatron_ft.run.checkpoint.peer_copies import COPIES
from megatron_ft.run.collectives import framing
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.rejoin import state_receiver
from megatron_ft.run.rejoin.state_sender import StateSender
from megatron_ft.run.store import NOTICES, ControlStore
from megatron_ft.utils import heap
from megatron_ft.utils.auth import handshake
from megatron_ft.utils.auth.handshake import Door
from megatron_ft.utils.auth.secret import Key, Secret

SECRET = Secret("0123456789abcdef" * 4)
KEY = SECRET.of("run")
HERE = "127.0.0.1"
WAIT_S = SETTLE_S = 60.0
MOST_GROWTH_BYTES = 24 << 20
"""Limit for resident memory, which the stacks of threads and the allocators' free blocks let grow by a few MB."""
MOST_HELD_BYTES, MOST_HELD_PER_INPUT = 128 << 10, 128
"""Limit for the memory of Python objects. At 1,000 inputs a listener that keeps 300 bytes of each one exceeds it; without
a leak it grows by 70 KB at most: a member of the control store remembers each forged key."""
MOST_MORE = 2
"""Limit for the number of descriptors, and of threads, that are added: ``serves`` may leave a member connected."""


@dataclass
class Target:
    """A listener of the project. ``give`` delivers one input and returns when it has been dealt with; ``serves`` asks
    whether a well-behaved member is still served."""

    give: Callable[[random.Random], None]
    serves: Callable[[], bool]


# --- inputs -----------------------------------------------------------------------------------------------------------


def noise(rng: random.Random, most: int = 6000) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 4, 36, 72, rng.randrange(most))))


def value(rng: random.Random, depth: int = 3) -> object:
    """Any JSON value."""
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False, -1, 0, 2**63, -(2**70), 1e308))
    if kind == 1:
        return rng.randrange(-5, 5)
    if kind in (2, 3):
        return rng.choice(("", "position", "want", "give", "\0", "\x1b[2J", "x" * rng.randrange(300)))
    if kind == 4:
        return rng.random()
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {str(value(rng, 0)): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def near(rng: random.Random, good: dict) -> dict:
    """An object like ``good`` with some fields missing, some of another type, or extra fields."""
    changed = {name: value(rng) if rng.random() < 0.4 else own for name, own in good.items() if rng.random() < 0.9}
    return {**changed, str(value(rng, 0)): value(rng)} if rng.random() < 0.2 else changed


def stranger_hello(rng: random.Random, challenge: bytes) -> bytes:
    """The hello of a stranger, which does not have the key: noise, or a hello that is nearly right."""
    if rng.random() < 0.4:
        return noise(rng)
    text = rng.choice((json.dumps(value(rng)).encode(), noise(rng, 4096), b"[" * 4096))[:4096]
    mac = Key(rng.randbytes(32)).mac(b"caller", challenge[4:], bytes(32), text)
    length = rng.choice((len(text), len(text), rng.randrange(2**32)))
    whole = struct.pack("=4s32s32sI", b"mft2", bytes(32), mac, length) + text
    return whole[: rng.choice((len(whole), rng.randrange(len(whole) + 1)))]


def as_stranger(address: tuple[str, int]) -> Callable[[random.Random], None]:
    def give(rng: random.Random) -> None:
        with socket.create_connection(address, timeout=WAIT_S) as end, contextlib.suppress(OSError):
            challenge = end.recv(36, socket.MSG_WAITALL)
            end.sendall(stranger_hello(rng, challenge))
            end.shutdown(socket.SHUT_WR)
            until_closed(end)

    return give


def as_member(address: tuple[str, int], key: Key, good: dict, after: Callable[[random.Random], bytes]) -> Callable:
    def give(rng: random.Random) -> None:
        with socket.create_connection(address, timeout=WAIT_S) as end, contextlib.suppress(OSError):
            handshake.greet(end, key, near(rng, good), WAIT_S)
            end.sendall(after(rng))
            end.shutdown(socket.SHUT_WR)
            until_closed(end)

    return give


def until_closed(end: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while end.recv(65536):
            pass


def message(rng: random.Random, good: dict) -> bytes:
    """A message with the framing of ``run.collectives.framing``, or nearly."""
    if rng.random() < 0.3:
        return noise(rng)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        framing.send_message(ours, near(rng, good))
        data = bytearray(theirs.recv(65536))
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def datagrams(address: tuple[str, int], good: Callable[[random.Random], bytes]) -> Callable[[random.Random], None]:
    mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def give(rng: random.Random) -> None:
        data = bytearray(good(rng) if rng.random() < 0.5 else noise(rng, 3000))
        if data and rng.random() < 0.8:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        mouth.sendto(bytes(data), address)

    return give


def as_passer_by(address: tuple[str, int]) -> Callable[[random.Random], None]:
    """Send noise to a TCPStore, without waiting for an answer. Half of the inputs begin as a client of a TCPStore does,
    so that the noise is read as requests."""

    def give(rng: random.Random) -> None:
        request = bytes([*struct.pack("<BI", 0, 0x3C85F7CE), rng.randrange(20)]) if rng.random() < 0.5 else b""
        with socket.create_connection(address, timeout=WAIT_S) as end, contextlib.suppress(OSError):
            end.sendall(request + noise(rng))

    return give


# --- targets ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _door(member: bool) -> Iterator[Target]:
    """The handshake alone, which is also how the ranks of a pipeline meet (``run.collectives.p2p_channel``)."""
    came: queue.SimpleQueue = queue.SimpleQueue()
    listener = framing.listen(HERE)
    address = listener.getsockname()[:2]

    def admit(end: socket.socket, hello: dict) -> None:
        came.put(hello)
        end.close()

    door = Door(listener, KEY, admit, "fuzzed")

    def serves() -> bool:
        framing.call(*address, KEY, {"position": "a member"}).close()
        while came.get(timeout=WAIT_S).get("position") != "a member":
            pass
        return door.pending == 0

    yield Target(as_member(address, KEY, {"position": 1}, noise) if member else as_stranger(address), serves)
    door.close()


class _Engine:
    """The engine of a donor; it is asked for nothing before a boundary."""


@contextlib.contextmanager
def _donor(member: bool) -> Iterator[Target]:
    places: queue.SimpleQueue = queue.SimpleQueue()
    env = RankEnvironment("run", 0, 0, "", HERE, Path(), RunConfig(groups=2), secret=SECRET)
    donor = StateSender(env, _Engine(), None, Registered(BatchSchedule(1)), lambda: 7, places.put)
    address = tuple(places.get()[:2])
    asked = {"at": -5, "part": 0, "parts": 1}

    def serves() -> bool:
        found = state_receiver.look_up(state_receiver.Peer(0, 0, *address), KEY, 0, "a member")
        if found is None:
            return False
        found[1].close()
        return True

    good = {"position": 0, "who": "a member"}
    give = (
        as_member(address, KEY.of(state_receiver.DONOR), good, lambda rng: message(rng, asked))
        if member
        else as_stranger(address)
    )
    yield Target(give, serves)
    donor.close()


@contextlib.contextmanager
def _copies(member: bool) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "memory").mkdir()
        shelf = ReplicaCache(Path(directory) / "ckpt", 1e6, Path(directory) / "memory")
        made = CheckpointCache(shelf, HERE, KEY)
        address = (HERE, made.port)

        def serves() -> bool:
            with framing.call(*address, KEY.of(COPIES), {"what": "want", "sha256": "0" * 64, "bytes": 1}) as end:
                return framing.receive_message(end) == {"there": False}

        good = {"what": "want", "sha256": "0" * 64, "bytes": 10}
        give = (
            as_member(address, KEY.of(COPIES), good, lambda rng: message(rng, {})) if member else as_stranger(address)
        )
        yield Target(give, serves)
        made.close(over=True)


@contextlib.contextmanager
def _hub(member: bool) -> Iterator[Target]:
    listener = socket.create_server((HERE, 0))
    address = listener.getsockname()[:2]
    hub = Hub(listener, Meeting(10**6, 0, address, "a"), SECRET)
    good = {"rank": 3, "hosts": 10**6, "job": "b", "host_record": {"name": "a", "address": HERE, "port": 1}}
    number = iter(range(10**6))

    def serves() -> bool:
        end = socket.create_connection(address, timeout=WAIT_S)
        with end:
            handshake.greet(end, SECRET.of(MEET), {**good, "job": "a", "rank": (rank := next(number))}, WAIT_S)
            end.settimeout(WAIT_S)
            while b"welcome" not in (said := end.recv(4096)) and said:
                pass
        return bool(said) and rank in hub.host_records

    yield Target(as_member(address, SECRET.of(MEET), good, noise) if member else as_stranger(address), serves)
    hub.close()


@contextlib.contextmanager
def _bandwidth() -> Iterator[Target]:
    receiver = bandwidth.Receiver(HERE, KEY)
    yield Target(as_stranger((HERE, receiver.port)), lambda: bandwidth.send_rate(HERE, receiver.port, KEY) > 0)
    receiver.close()


@contextlib.contextmanager
def _heartbeats() -> Iterator[Target]:
    hosts = [HeartbeatService(f"127.0.0.{number + 1}", number, KEY, 5.0) for number in range(2)]
    for number, host in enumerate(hosts):
        host.add({1 - number: (f"127.0.0.{2 - number}", hosts[1 - number].port)})

    def serves() -> bool:
        before = hosts[1]._others[0].heartbeats
        deadline = time.monotonic() + WAIT_S
        while hosts[1]._others[0].heartbeats <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        return hosts[1]._others[0].heartbeats > before

    def nearly(rng: random.Random) -> bytes:
        sender, count = rng.choice((0, 1, 2**32 - 1)), rng.randrange(2**64)
        return hosts[0]._message(sender, 1, count, Said(0, True))[: _SIGNED.size] + rng.randbytes(16)

    yield Target(datagrams(("127.0.0.2", hosts[1].port), nearly), serves)
    for host in hosts:
        host.close()


@contextlib.contextmanager
def _store() -> Iterator[Target]:
    """The control store. It is no listener of the project's own: what a stranger writes there, members read."""
    _server, port = store.host(HERE, 0)
    member = ControlStore((HERE, port), "run", WAIT_S, secret=SECRET)
    stranger = dist.TCPStore(HERE, port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    reads = {"k": member.get, "view/1": member.get, "report/1": member.members, "done": member.members}
    numbers = iter(range(10**7))

    def give(rng: random.Random) -> None:
        key, data = rng.choice(list(reads)), rng.choice((noise(rng, 300), json.dumps({"value": value(rng)}).encode()))
        if reads[key] == member.members and rng.random() < 0.5:
            stranger.set(f"run/{key}", rng.choice(("1\t", "")) + "\n")
            stranger.append(f"run/{key}", data)
        else:
            stranger.set(f"run/{key}", data)
        reads[key](key)
        index = next(numbers)
        if index % 10 == 0:
            stranger.set(f"run/{NOTICES}/{index // 10}", data)
            signals.from_json(member.entry(NOTICES, index // 10, WAIT_S))
            stranger.delete_key(f"run/{NOTICES}/{index // 10}")

    def serves() -> bool:
        member.set("own", 1)
        return member.get("own") == 1 and member.claim("view/1", {"epoch": 1}, "me") == ({"epoch": 1}, True)

    yield Target(give, serves)


TARGETS: dict[str, Callable[[], contextlib.AbstractContextManager[Target]]] = {
    "handshake": lambda: _door(member=False),
    "handshake, member": lambda: _door(member=True),
    "donor": lambda: _donor(member=False),
    "donor, member": lambda: _donor(member=True),
    "copies": lambda: _copies(member=False),
    "copies, member": lambda: _copies(member=True),
    "doctor hub": lambda: _hub(member=False),
    "doctor hub, member": lambda: _hub(member=True),
    "doctor bandwidth": _bandwidth,
    "heartbeats": _heartbeats,
    "control store": _store,
}


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result for one target. ``held_bytes``: growth of the memory of Python objects after the first tenth of the
    inputs; ``grown_bytes``: the same of resident memory; ``exceptions``: those of all threads."""

    inputs: int
    seconds: float
    held_bytes: int
    grown_bytes: int
    descriptors: int
    threads: int
    served: bool
    exceptions: tuple[str, ...]

    @property
    def good(self) -> bool:
        few = self.descriptors <= MOST_MORE and self.threads <= MOST_MORE
        flat = self.held_bytes < MOST_HELD_BYTES + MOST_HELD_PER_INPUT * self.inputs
        return self.served and not self.exceptions and few and flat and self.grown_bytes < MOST_GROWTH_BYTES


def fuzz(name: str, inputs: int, seed: int = 0) -> Outcome:
    """Give the target ``inputs`` random inputs."""
    rng, exceptions = random.Random(f"{name} {seed}"), []
    hook, threading.excepthook = threading.excepthook, lambda args: exceptions.append(repr(args.exc_value))
    logging.disable()  # a test runner keeps every line
    tracemalloc.start()
    try:
        with TARGETS[name]() as target:
            assert target.serves(), "before anything was done to it"
            begun = time.monotonic()
            _give(target, rng, inputs // 10)
            before, few = _memory(), _descriptors_and_threads()
            _give(target, rng, inputs - inputs // 10)
            served = target.serves()
            seconds = time.monotonic() - begun
            deadline = begun + seconds + SETTLE_S
            while True:  # the threads of the last connections end, and give their buffers back
                more = [new - old for new, old in zip(_descriptors_and_threads(), few, strict=True)]
                held, grown = (new - old for new, old in zip(_memory(), before, strict=True))
                outcome = Outcome(inputs, round(seconds, 2), held, grown, *more, served, tuple(exceptions))
                if outcome.good or time.monotonic() > deadline:
                    return outcome
                time.sleep(0.05)
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
        threading.excepthook = hook


def _give(target: Target, rng: random.Random, number: int) -> None:
    for _ in range(number):
        target.give(rng)


def _memory() -> tuple[int, int]:
    """Return the bytes of Python objects, and those of resident memory."""
    gc.collect()
    heap.give_back()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return tracemalloc.get_traced_memory()[0], pages * os.sysconf("SC_PAGESIZE")


def _descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(TARGETS), action="append", default=[])
    parser.add_argument("--save", action="store_true", help="to benchmarks/results/fuzz.json")
    options = parser.parse_args()
    found = []
    for name in options.only or TARGETS:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            outcome = fuzz(name, options.inputs, options.seed)
        found.append({"target": name, "seed": options.seed, "good": outcome.good, **vars(outcome)})
        print(json.dumps(found[-1]), flush=True)
    if options.save:
        _save({"targets": found})
    return 0 if all(one["good"] for one in found) else 1


def _save(result: dict) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    import common

    common.save("fuzz", result)


if __name__ == "__main__":
    sys.exit(main())
