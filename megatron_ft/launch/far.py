"""The other end of ``launch --ssh``: ``python -m megatron_ft.launch.far``, which ssh runs on each host, for one request.

The request is JSON on standard input, so that nothing of it is in a list of processes; the answer is one marked line of
standard output, among whatever a shell's start files print. ``look``: what this host has. ``start``: an agent, in a session
of its own under a keeper that writes a file of its state into the run directory: that it lives, and at last its exit code.
Neither needs the connection, or who has asked. ``end``: that agent.

Failures it assumes: the connection ends at any moment; a request comes twice; the file system is away for a while, or full.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron_ft import __version__
from megatron_ft.launch import addresses, record

MARK = "megatron_ft answers: "
BEAT_S = 5.0
"""How often a keeper says that its agent lives."""
_LAST_WORDS_S = 120.0
"""For so long it tries to write how its agent has ended."""
_RETRY_S = 2.0
_AGAIN_S = 0.5
"""An agent that is told to end twice does not save first."""


def versions() -> dict[str, str]:
    """What has to be the same on all hosts. Nothing is imported for it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    python = ".".join(platform.python_version_tuple()[:2])
    return {"megatron_ft": __version__, "python": python, "torch": torch}


def request(what: str, **fields: Any) -> str:
    """As :func:`main` reads it."""
    return json.dumps({"what": what, **fields})


def answer(output: str) -> dict[str, Any] | None:
    """What a host has said, None if it has said nothing."""
    found = [line.partition(MARK)[2] for line in output.splitlines() if MARK in line]
    try:
        return json.loads(found[-1]) if found else None
    except ValueError:
        return None


def main() -> int:
    asked = json.loads(sys.stdin.read())
    found = {"look": _look, "start": _start, "end": _end}[asked.pop("what")](**asked)
    print(MARK + json.dumps(found), flush=True)
    return 0


# --- look -------------------------------------------------------------------------------------------------------------


def _look(directory: str, files: list[str], token: str, name: str, seen: list[str], address: str | None) -> dict[str, Any]:
    """``seen``: what the name stands for where the request comes from; ``address``: what the hostfile says."""
    here = os.path.isdir(directory)
    tried = [address] if address else list(dict.fromkeys([*seen, *addresses.of(name)]))
    # A loopback address only where it is asked for: a host's own name often stands for one, by which nobody else reaches it.
    asked = {address, name}
    fit = [one for one in tried if addresses.binds(one) and (one in asked or not addresses.is_loopback(one))]
    return {
        "versions": versions(),
        "host": socket.gethostname(),
        "directory": here,
        "files": [path for path in files if here and os.path.isfile(os.path.join(directory, path))],
        "shared": os.path.exists(token),
        "address": fit[0] if fit else None,
        "tried": tried,
    }


# --- start ------------------------------------------------------------------------------------------------------------


def _start(
    directory: str, command: list[str], environment: Mapping[str, str], log: str, state: str, before: list[str]
) -> dict[str, Any]:
    """``before``: the states of agents that were started here earlier; one that lives is enough."""
    for path in (*before, state):
        if _lives(read(Path(path))):
            return {"runs": path}
    with open(log, "ab", buffering=0) as output:
        if os.fork() == 0:
            _run(output.fileno(), directory, command, environment, Path(state))
    return {"runs": state}


def _run(output: int, directory: str, command: list[str], environment: Mapping[str, str], state: Path) -> NoReturn:
    """Become the agent's keeper: nothing of the connection is left in it, and it never returns to who has forked it."""
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
        agent = subprocess.Popen(command, cwd=directory, env=own, stdin=subprocess.DEVNULL)
        code = _keep(agent, state)
    except BaseException:
        traceback.print_exc()
        _write(state, {"pid": 0, "start": 0, "beat": 0, "code": code})
    finally:
        os._exit(code & 0xFF)


def _keep(agent: subprocess.Popen, state: Path) -> int:
    """Until it has ended; its exit code."""
    said = {"pid": agent.pid, "start": started(agent.pid), "host": socket.gethostname(), "beat": 0, "code": None}
    while said["code"] is None:
        _write(state, said)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agent.wait(timeout=BEAT_S)
            said["code"] = code if code >= 0 else 128 - code
        said["beat"] += 1
    deadline = time.monotonic() + _LAST_WORDS_S
    while not _write(state, said) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return said["code"]


def _write(path: Path, value: Mapping[str, Any]) -> bool:
    try:
        record.replace(path, value)
    except OSError:
        return False
    return True


def read(path: Path) -> dict[str, Any] | None:
    """An agent's state, None before there is one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def started(pid: int) -> int:
    """When a process of this host was started, in clock ticks since its boot; 0 when it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _lives(said: Mapping[str, Any] | None) -> bool:
    """Whether that agent runs on this host: the number alone may be another process's by now."""
    if said is None or said["code"] is not None or not started(said["pid"]):
        return False
    return started(said["pid"]) == said["start"] and said.get("host") == socket.gethostname()


# --- end --------------------------------------------------------------------------------------------------------------


def _end(state: str, patience_s: float) -> dict[str, Any]:
    """Tell that agent to end, and its ranks; whoever has not after ``patience_s`` is killed, its ranks with it."""
    said, killed = read(Path(state)), False
    deadline = time.monotonic() + patience_s
    for number in (signal.SIGTERM, signal.SIGTERM):
        if _lives(said):
            os.kill(said["pid"], number)
            time.sleep(_AGAIN_S)
    while _lives(said) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _lives(said):
        os.kill(said["pid"], signal.SIGKILL)
        killed = True
    return {"killed": killed}


if __name__ == "__main__":
    sys.exit(main())
