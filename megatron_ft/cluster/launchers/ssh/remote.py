"""The program that ``launch --ssh`` runs on each host, for one request: ``python -m
megatron_ft.cluster.launchers.ssh.remote``.

The request is JSON on standard input, so that no secret of it is in a list of processes. The answer is one marked line
of standard output, among whatever the start files of a shell print. Requests:

- ``check``: whether this host can take an agent.
- ``start``: start an agent. It runs in its own session under a keeper, a process that writes the agent's state into the
run directory: a growing heartbeat, at last the exit code. Neither needs the ssh connection.
- ``end``: end that agent.

Failures assumed: the connection breaks at any moment; a request arrives twice; the file system does not respond for a
while, or is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron_ft import __version__
from megatron_ft.utils import extras, net, shared_file
from megatron_ft.utils.process_status import process_status

MARK = "megatron_ft answers: "
BEAT_S = 5.0
_LAST_WRITE_S, _RETRY_S = 120.0, 2.0
"""The keeper repeats the write of the exit code for this long."""
_AGAIN_S = 0.5
"""Time between the two SIGTERMs: the first one makes an agent save, the second one end."""
_POLL_S = 0.05


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all hosts, without importing torch."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"megatron_ft": __version__, "python": python, "torch": extras.version("torch")}


def request(do: str, **fields: Any) -> str:
    """Returns the input of :func:`main` for a request."""
    return json.dumps({"do": do, **fields})


def answer(output: str) -> dict[str, Any] | None:
    """Returns the answer in the output of ssh; None when there is none."""
    found = [line.partition(MARK)[2] for line in output.splitlines() if MARK in line]
    try:
        return json.loads(found[-1]) if found else None
    except ValueError:
        return None


def main() -> int:
    """Carry out the request on standard input and print the answer."""
    asked = json.loads(sys.stdin.read())
    requests: Mapping[str, Callable[..., Any]] = {"check": _check, "start": _start, "end": _end}
    result = requests[asked.pop("do")](**asked)
    print(MARK + json.dumps(result), flush=True)
    return 0


def _check(
    *,
    directory: str,
    files: list[str],
    run_dir: str,
    token: str,
    name: str,
    seen: list[str],
    address: str | None,
    wanted: Mapping[str, str],
) -> dict[str, Any]:
    """Returns ``address``, by which the other hosts reach this one, and ``lacks``: "" or what prevents a start.

    Args:
        directory: working directory.
        files: script and config, relative to it.
        run_dir: run directory.
        token: a file in it that the starting host has just created.
        name: this host in the hostfile.
        seen: addresses of ``name`` on the starting host.
        address: address in the hostfile.
        wanted: versions on the starting host.
    """
    own = versions()
    other = [f"{what} {own.get(what)}, not {version}" for what, version in wanted.items() if own.get(what) != version]
    missing = [path for path in files if not os.path.isfile(os.path.join(directory, path))]
    tried = [address] if address else list(dict.fromkeys([*seen, *net.of(name)]))
    # A host's own name often resolves to a loopback address, by which other hosts cannot reach it.
    usable = [one for one in tried if net.binds(one) and (one in (address, name) or not net.is_loopback(one))]
    lacks = ""
    if other:
        lacks = f"has {' and '.join(other)}; install the same on all hosts"
    elif not os.path.isdir(directory):
        lacks = f"has no directory {directory}; start from one that all hosts have"
    elif missing:
        lacks = f"has no {missing[0]} in {directory}; copy it there, or start from a directory that all hosts share"
    elif not os.path.exists(token):
        lacks = f"does not see the files of --run-dir {run_dir}; choose a directory that all hosts share"
    elif not usable:
        lacks = (
            f"has no address that the other hosts can use: {name} resolves to {', '.join(tried) or 'none'}; add "
            f"address=ADDR to its line in the hostfile"
        )
    return {"lacks": lacks, "address": usable[0] if usable else None}


# --- start ------------------------------------------------------------------------------------------------------------


def _start(
    directory: str, command: list[str], environment: Mapping[str, str], log: str, state: str, before: list[str]
) -> dict[str, Any]:
    """Returns the state file of the agent. ``before``: those of earlier agents; one that is alive is not replaced."""
    for path in (*before, state):
        if _alive(shared_file.read_json(Path(path))):
            return {"state": path}
    with shared_file.append_to(log) as output:
        if os.fork() == 0:
            _keep(output.fileno(), directory, command, environment, Path(state))
    return {"state": state}


def _keep(output: int, directory: str, command: list[str], environment: Mapping[str, str], state: Path) -> NoReturn:
    """Turns this process into the agent's keeper, detached from the ssh connection."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for end, to in ((null, 0), (null, 1), (output, 2)):
            os.dup2(end, to)
        os.closerange(3, 256)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        own = {**os.environ, **environment}
        own["PATH"] = os.pathsep.join([os.path.dirname(command[0]), own.get("PATH", os.defpath)])
        code = _watch(subprocess.Popen(command, cwd=directory, env=own, stdin=subprocess.DEVNULL), state)
    except BaseException:
        traceback.print_exc()
        _write(state, {"pid": 0, "start": 0, "heartbeat": 0, "code": code})
    finally:
        os._exit(code & 0xFF)


def _watch(agent: subprocess.Popen, state: Path) -> int:
    """Writes the agent's state until it has ended; returns its exit code."""
    content: dict[str, Any] = {
        "pid": agent.pid,
        "start": started(agent.pid),
        "host": socket.gethostname(),
        "heartbeat": 0,
    }
    content["code"] = None
    # no limit: the agent's keeper, until the agent ends
    while content["code"] is None:
        _write(state, content)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agent.wait(timeout=BEAT_S)
            content["code"] = code if code >= 0 else 128 - code
        content["heartbeat"] += 1
    deadline = time.monotonic() + _LAST_WRITE_S
    while not _write(state, content) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return content["code"]


def _write(path: Path, content: Mapping[str, Any]) -> bool:
    try:
        shared_file.write_json(path, content)
    except OSError:
        return False
    return True


def started(pid: int) -> int:
    """Returns the start time of a process in clock ticks since boot; 0 when it does not exist."""
    try:
        status = process_status(pid)
    except OSError:
        return 0
    return 0 if status.ended else status.start


def _alive(state: Mapping[str, Any] | None) -> bool:
    """Compares the start time, too: another process may have got the agent's number."""
    if state is None or state["code"] is not None or state.get("host") != socket.gethostname():
        return False
    return started(state["pid"]) == state["start"] != 0


# --- end --------------------------------------------------------------------------------------------------------------


def _end(state: str, patience_s: float) -> dict[str, Any]:
    """Sends SIGTERM twice, and SIGKILL after ``patience_s``; an agent takes its ranks with it."""
    agent, killed = shared_file.read_json(Path(state)), False
    deadline = time.monotonic() + patience_s
    for _ in range(2):
        if _alive(agent):
            os.kill(agent["pid"], signal.SIGTERM)
            time.sleep(_AGAIN_S)
    while _alive(agent) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if _alive(agent):
        os.kill(agent["pid"], signal.SIGKILL)
        killed = True
    return {"killed": killed}


if __name__ == "__main__":
    sys.exit(main())
