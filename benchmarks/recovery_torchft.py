"""One trial of ``recovery.py`` with torchft 0.2.0: four replica groups with its Manager and ProcessGroupGloo.

torchft is no dependency of this project: it is installed into a virtual environment of its own in the cache folder, which
uses the torch of the calling interpreter, so both systems run on the same build. Started there, this file is one replica
group; it writes a line for each attempt at a step. torchft's manager says itself whether an attempt was committed.

Gradients go through ``Manager.allreduce``, in flat buckets as here. torchft's DistributedDataParallel would do the same, but
in 0.2.0 it fails an assertion in the survivors (``ddp.py``, ``assert fut._fut``) when gloo reports the lost peer.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import venv
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.2.0"
GROUPS = 4
WARMUP = 10
TIMEOUT_S = 240.0
_PORT = 29510

DEFAULTS: dict[str, dict] = {"lighthouse": {}, "manager": {}}
"""The defaults of the programs: heartbeat every 0.1 s, dead after 5 s, tick 0.1 s, all timeouts 60 s."""


def tight(milliseconds: int) -> dict[str, dict]:
    """Return settings with which a replica is dead after that time without a heartbeat, and a collective fails after
    the same time."""
    return {
        "lighthouse": {
            "heartbeat_timeout_ms": milliseconds,
            "join_timeout_ms": milliseconds,
            "quorum_tick_ms": 10,
        },
        "manager": {"heartbeat_interval": min(0.05, milliseconds / 10_000), "timeout": milliseconds / 1000},
    }


TIGHTEST = tight(500)
"""Its recovery takes as long as these say, so what counts is how tight they can be without losing replicas for nothing;
``recovery.py --hogs`` measures that."""


def environment() -> Path:
    """Return the interpreter of torchft's virtual environment, which is made when it is not there."""
    import torch

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_ft" / f"torchft-{VERSION}"
    python = cache / "bin" / "python"
    shared = str(Path(torch.__file__).parents[1])
    if (cache / "ready").is_file() and (cache / "ready").read_text() == shared:
        return python
    venv.create(cache, with_pip=True, clear=True)
    site = next((cache / "lib").glob("python*/site-packages"))
    # Its own packages come first; those it lacks, torch above all, are taken from here and not installed a second time.
    (site / "shared.pth").write_text(shared)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"torchft=={VERSION}"], check=True, stdout=sys.stderr)
    subprocess.run([python, "-c", "import torchft"], check=True, stdout=sys.stderr)
    (cache / "ready").write_text(shared)
    return python


def trial(directory: Path, fault: str, megabytes: int, victim: int, seed: int, settings: dict, lab=None) -> dict:
    """Strike with one fault (``kill``, ``stop``, ``cut``) in the middle of training; return its cost. ``lab``: one
    host per group."""
    with _running(directory, megabytes, settings, lab) as workers:
        survivors = [group for group in range(GROUPS) if group != victim]
        _await(workers, lambda: all(trained(directory, group) >= WARMUP for group in range(GROUPS)))
        step_s = statistics.median_high(
            [a["ended"] - a["begun"] for a in attempts_of(directory, survivors[0]) if a["committed"]][-WARMUP:]
        )
        time.sleep(random.Random(seed).uniform(0, 2 * step_s))
        struck = time.time()
        _strike(workers[victim], fault, victim, lab)
        living = [workers[group] for group in survivors]
        reached = _await(living, lambda: all(_recovered(directory, g, struck) for g in survivors), must=False)
        attempts = {group: [a for a in attempts_of(directory, group) if a["ended"] > struck] for group in survivors}
        first = [_recovered(directory, group, struck) for group in survivors]
        times = [a["ended"] - struck for a in first if a is not None]
        delays = [
            a["ended"] - _committed_before(directory, group, a) - step_s
            for group, a in zip(survivors, first, strict=True)
            if a is not None
        ]
        return {
            "group": victim,
            "fault_to_commit_s": min(times) if times else None,
            "all_survivors_s": max(times) if reached else None,
            "stall_s": statistics.median_high([_longest(attempts[group]) for group in survivors]),
            "delay_s": min(delays) if delays else None,
            "interrupted_step": _fate([attempts[group] for group in survivors]),
            "survivors_crashed": sum(worker.poll() is not None for worker in living),
            "attempts_discarded": [sum(not a["committed"] for a in attempts[group]) for group in survivors],
            "false_alarms": sum(
                not a["committed"] for a in attempts_of(directory, survivors[0]) if a["ended"] < struck
            ),
            "fault_free_step_s": step_s,
        }


def endure(directory: Path, megabytes: int, settings: dict, minutes: float) -> dict:
    """Train for that time without any fault; return the number of attempts discarded, or committed without all
    replicas."""
    with _running(directory, megabytes, settings, None) as workers:
        _await(workers, lambda: all(trained(directory, group) for group in range(GROUPS)))
        deadline = time.monotonic() + 60 * minutes
        _await(workers, lambda: time.monotonic() > deadline, must=False)
        crashed = sum(worker.poll() is not None for worker in workers)
    # Until all were there once, replicas that came later had to be waited for, or to catch up.
    own = [_since_complete(attempts_of(directory, group)) for group in range(GROUPS)]
    wrong = [sum(not a["committed"] or a["participants"] < GROUPS for a in attempts) for attempts in own]
    return {"attempts": max(map(len, own)), "false_alarms": max(wrong), "crashed": crashed}


def _since_complete(attempts: list[dict]) -> list[dict]:
    complete = (i for i, a in enumerate(attempts) if a["committed"] and a["participants"] == GROUPS)
    return attempts[next(complete, len(attempts)) :]


# --- judging ----------------------------------------------------------------------------------------------------------


def attempts_of(directory: Path, group: int | str) -> list[dict]:
    """Return the whole lines of a replica group's file."""
    try:
        text = (directory / f"attempts.{group}").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def trained(directory: Path, group: int, groups: int = GROUPS) -> int:
    """Return the number of steps committed with this number of groups, since the last one with others."""
    count = 0
    for attempt in attempts_of(directory, group):
        count = count + 1 if attempt["committed"] and attempt["participants"] == groups else 0
    return count


def _recovered(directory: Path, group: int, struck: float) -> dict | None:
    """Return the first commit after the fault in which the victim has no part."""
    for attempt in attempts_of(directory, group):
        if attempt["ended"] > struck and attempt["committed"] and attempt["participants"] == GROUPS - 1:
            return attempt
    return None


def _committed_before(directory: Path, group: int, attempt: dict) -> float:
    """Return the time at which this group had committed its last step before that one."""
    return max(a["ended"] for a in attempts_of(directory, group) if a["committed"] and a["ended"] < attempt["ended"])


def _fate(attempts: list[list[dict]]) -> str:
    """Return the fate of the first step that was not as before: committed without the victim's part, or discarded,
    everywhere or not."""
    changed = [next((a for a in own if not a["committed"] or a["participants"] < GROUPS), None) for own in attempts]
    fates = {"nothing" if a is None else "short" if a["committed"] else "discarded" for a in changed}
    return fates.pop() if len(fates) == 1 else "split"


def _longest(attempts: list[dict]) -> float:
    return max((a["ended"] - a["begun"] for a in attempts), default=0.0)


# --- running ----------------------------------------------------------------------------------------------------------


def lighthouse(
    settings: dict, port: int, address: str = "127.0.0.1", interface: str = "lo"
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a lighthouse, and the environment of it and of its replicas."""
    command = [str(environment().parent / "torchft_lighthouse"), "--min_replicas", "1", "--bind", f"[::]:{port}"]
    command += [text for name, value in settings["lighthouse"].items() for text in (f"--{name}", str(value))]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return command, {**os.environ, **own, "TORCHFT_LIGHTHOUSE": f"http://{address}:{port}"}


@contextmanager
def _running(directory: Path, megabytes: int, settings: dict, lab):
    """Run lighthouse and replica groups; they are ended by pid whatever happens."""
    python = environment()
    address = lab.address if lab else lambda group: "127.0.0.1"
    inside = lab.inside if lab else lambda group, command: command
    server, env = lighthouse(settings, _PORT, address(0), "eth0" if lab else "lo")
    processes = []
    try:
        with (directory / "log").open("w") as log:
            options = {"cwd": directory, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(inside(0, server), **options))
            for group in range(GROUPS):
                out, own = directory / f"attempts.{group}", json.dumps(settings["manager"])
                command = [str(python), __file__, str(group), str(megabytes), str(out), address(group), own]
                processes.append(subprocess.Popen(inside(group, command), **options))
        yield processes[1:]
    except Exception:
        print((directory / "log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _await(workers: list[subprocess.Popen], condition, must: bool = True) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        dead = any(worker.poll() is not None for worker in workers)
        if dead or time.monotonic() > deadline:
            if must:
                raise RuntimeError(
                    "torchft: a worker ended" if dead else f"torchft did not get there in {TIMEOUT_S:g} s"
                )
            return False
        time.sleep(0.01)
    return True


def _strike(worker: subprocess.Popen, fault: str, victim: int, lab) -> None:
    if fault == "cut":
        lab.cut(victim)
    else:
        worker.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def replica(
    group: int,
    megabytes: int,
    out: str,
    address: str,
    settings: dict,
    optimizer_of=None,
    microbatches: int = 1,
    warm=None,
) -> None:
    """Run one replica group of one rank: quorum, backward, reduce, and a step of the optimizer if torchft says so.

    ``optimizer_of``: (parameters) -> optimizer, by default SGD; ``microbatches``: the number that the group computes in
    an attempt; ``warm`` is called before the first quorum.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the benchmark
    socket.gethostname = lambda: address  # where torchft serves its checkpoints; a namespace has the machine's name
    import recovery_model
    import torch

    torch.set_num_threads(1)
    model = recovery_model.build(megabytes)
    optimizer_of = optimizer_of or (lambda parameters: torch.optim.SGD(parameters, lr=recovery_model.LEARNING_RATE))
    optimizer = optimizer_of(model.parameters())
    buckets = recovery_model.flat_gradients(model)
    if warm is not None:
        warm()
    manager = _manager(group, address, settings, model, optimizer)
    with open(out, "w", buffering=1) as lines:
        for attempt in range(sys.maxsize):
            begun, step = time.time(), manager.current_step()
            manager.start_quorum()
            for bucket in buckets:
                bucket.zero_()
            for microbatch in range(microbatches):
                recovery_model.loss_of(model, recovery_model.batch(attempt, group, microbatch)).backward()
            for work in [manager.allreduce(bucket) for bucket in buckets]:
                work.wait()
            committed = manager.should_commit()
            if committed:
                optimizer.step()
            line = {"begun": begun, "ended": time.time(), "step": step, "committed": committed}
            lines.write(json.dumps({**line, "participants": manager.num_participants()}) + "\n")


def _manager(group: int, address: str, settings: dict, model, optimizer):
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    def load_state(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    given = {name: timedelta(seconds=seconds) for name, seconds in settings.items()}
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(**{name: value for name, value in given.items() if name == "timeout"}),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"group_{group}",
        store_addr=address,
        store_port=store.port,
        hostname=address,
        rank=0,
        world_size=1,
        **given,
    )
    manager.own_store = store  # lives as long as the manager
    return manager


if __name__ == "__main__":
    replica(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
