"""An all-reduce of all hosts together, over the interface and the library that a run would use.

On every host in a process of its own (``python -m megatron_ft.doctor.everybody``), because a collective that does not end
can only be ended from outside. It says on its output how far it has come, so that who keeps the others waiting is named.

Failures it assumes: torch cannot be imported, the store's port is not reached, somebody does not come, the library finds no
way; anything may take forever.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from megatron_ft.launch import lifeline
from megatron_ft.runtime import sockets

MOST_S = 120.0
"""For all of it, on every host: torch alone may take a minute to import where a file system is cold."""
STAGES = ("started", "torch imported", "store reached", "all have come", "connected", "reduced")
REDUCED = len(STAGES) - 1
STOPPED = "stopped while it waited for the others"
_CONNECT_S = 60.0
_LOOK_S = 0.05
_NUMBERS = 1 << 18
_WITH_OTHERS = re.compile(r"connect|time[d ]* ?out|no answer|refused|reset|closed|reach|peer|remote|store", re.IGNORECASE)
"""In what torch says, when it is about another host: then that one may be the cause."""


@dataclass(frozen=True)
class Outcome:
    """How far a host has come (``STAGES``), after how long, and what it met there."""

    stage: int
    seconds: float
    trouble: str = ""

    @property
    def failed(self) -> bool:
        """By itself; who was stopped only waited."""
        return self.stage < REDUCED and self.trouble != STOPPED

    @property
    def alone(self) -> bool:
        """Whether what it met concerns no other host."""
        return self.failed and _WITH_OTHERS.search(self.trouble) is None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def take_part(order: Mapping[str, Any], address: str, stopped: Callable[[], bool]) -> Outcome:
    """This host's part of it, until it is over or ``stopped``. ``order``: store, rank, size, backend."""
    options = [f"--{name}={order[name]}" for name in ("store", "rank", "size", "backend")]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_ft.doctor.everybody", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(address),
    )
    reached, errors = [0], []
    readers = [
        threading.Thread(target=_note, args=(process.stdout, lambda line: reached.append(_stage(line))), daemon=True),
        threading.Thread(target=_note, args=(process.stderr, errors.append), daemon=True),
    ]
    for reader in readers:
        reader.start()
    trouble = ""
    while process.poll() is None and not trouble:
        if stopped():
            trouble = STOPPED
        elif time.monotonic() - begun > MOST_S:
            trouble = f"no answer within {MOST_S:g} s"
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
    process.kill()
    process.wait()
    for reader in readers:
        reader.join(1.0)
    stage = max(reached)
    if not trouble and stage < REDUCED:
        trouble = next((line for line in reversed(errors) if line), f"ended with {process.returncode}")
    return Outcome(stage, round(time.monotonic() - begun, 3), trouble)


def _environment(address: str) -> dict[str, str]:
    """As a run has it (``runtime.world``), and no more threads than are needed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    interface = sockets.interface_of(address)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def _note(stream: Any, take: Callable[[str], None]) -> None:
    for line in stream:
        take(line.strip())


def _stage(line: str) -> int:
    return STAGES.index(line) if line in STAGES else 0


class Store:
    """The store through which the hosts meet, on host 0. Raises ``OSError`` where it cannot be started."""

    def __init__(self, bind: str) -> None:
        environment = {**os.environ}
        environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # it asks for the name of every client
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.runtime.store.serve", "--bind", bind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self._process.stdout.readline().strip()), daemon=True)
        reader.start()
        reader.join(MOST_S)
        if not said or not said[0].isdigit():
            self._process.kill()
            errors = self._process.communicate()[1].strip().splitlines() or ["it says nothing"]
            raise OSError(f"no store can be started: {errors[-1]}")
        self.port = int(said[0])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# --- in the process of its own ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="One host's part of an all-reduce of all hosts.")
    parser.add_argument("--store", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--backend", required=True)
    options = parser.parse_args()
    lifeline.end_with(os.getppid())
    try:
        _reduce(options.store, options.rank, options.size, options.backend)
    except Exception as error:  # the outermost call: whatever torch raises, its first line is for people
        first = (str(error).splitlines() or [type(error).__name__])[0]
        where, _, what = first.rpartition(". ")  # gloo's: [enforce fail at its/source.cc:142] a condition. What happened
        print(what if where.startswith("[enforce fail") else first, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # the others may be gone already: nothing is to be taken down in order


def _reduce(address: str, rank: int, size: int, backend: str) -> None:
    import torch
    import torch.distributed as dist

    _say(1)
    host, _, port = address.rpartition(":")
    patient, soon = timedelta(seconds=MOST_S), timedelta(seconds=_CONNECT_S)
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=patient)
    _say(2)
    store.set(f"{backend}/{rank}", "here")
    store.wait([f"{backend}/{other}" for other in range(size)], patient)
    _say(3)
    prefixed = dist.PrefixStore(f"world/{backend}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=soon)
    device = "cuda" if backend == "nccl" else "cpu"
    if backend != "nccl":
        _say(4)  # NCCL connects with the first collective
    numbers = torch.full((_NUMBERS,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    total = float(numbers[0])
    expected = size * (size + 1) / 2
    if total != expected or float(numbers[-1]) != expected:
        raise RuntimeError(f"the sum is {total:g} and has to be {expected:g}")
    _say(REDUCED)
    # The last one to have its sum may still need this process's connections.
    store.set(f"{backend}/done/{rank}", "done")
    with contextlib.suppress(RuntimeError):
        store.wait([f"{backend}/done/{other}" for other in range(size)], soon)


def _say(stage: int) -> None:
    print(STAGES[stage], flush=True)


if __name__ == "__main__":
    main()
