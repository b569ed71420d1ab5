"""Launchers that are forked from a process that has imported torch already: four fifths of the processor time of a short
run on this machine are imports, once in the agent and once in the process that its ranks are forked from.

``launch(...)`` stands for ``subprocess.Popen(support.command(...))`` in tests that are not about how a launcher starts,
and ``launch_on_host(...)`` for the same on a host of ``tests/netlab.py``. The process is the agent itself: tests signal it
by its pid. The agents of several hosts inherit the order of sets from one server, or from two where they have a network
each; in the tests of Slurm and ssh each is an interpreter of its own.

Run as a program, this module is the server: it imports, forks, and reports exit statuses. It ends with its client.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_ft.errors import FTError
from megatron_ft.host import forkserver, rank_bootstrap
from megatron_ft.utils import file_descriptors
from tests import launches
from tools.netlab import Network

_LENGTH, _STATUS = struct.Struct("=q"), struct.Struct("=i")
ROOT = Path(__file__).parent.parent
_UNKNOWN = "0" * 10
_CLONE_NEWNET = 0x40000000
_MODULES = (*forkserver.PRELOAD, "megatron_ft.cli", "megatron_ft.host.node_agent", "megatron_ft.record.follow")


class Launched:
    """A process that the server has forked; the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, arguments: Sequence[str], pid: int, output: int | None, status: int) -> None:
        self.args, self.pid, self.returncode = arguments, pid, None
        self._counts = launches.note(arguments)
        self.stdout = None if output is None else os.fdopen(output, encoding="utf-8", errors="replace")
        self._status, self._said = os.fdopen(status, "rb", buffering=0), b""

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if self.stdout.closed:
                self.wait(left)
                return self._said.decode(errors="replace"), None
            if not file_descriptors.readable(self.stdout.fileno(), left):
                raise subprocess.TimeoutExpired(self.args, timeout, self._said)
            if chunk := os.read(self.stdout.fileno(), 65536):
                self._said += chunk
            else:
                self.stdout.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and file_descriptors.readable(self._status.fileno(), timeout):
            word = self._status.read(_STATUS.size)
            self._status.close()
            self.returncode = os.waitstatus_to_exitcode(*_STATUS.unpack(word)) if word else -signal.SIGKILL
            if self._counts and self.returncode == FTError.exit_code:
                launches.refused()
        return self.returncode


class _Client:
    """This process's server, started with the first launch."""

    def __init__(self) -> None:
        self._lock, self._end = threading.Lock(), None

    def launch(
        self,
        *arguments: object,
        env: Mapping[str, str],
        cwd: Path | str = ROOT,
        stdout: IO | None = None,
        stderr: IO | None = None,
        network: str = "",
    ) -> Launched:
        """Start ``megatron-ft`` with these arguments; stdout and stderr go to a pipe, or to these files; without the second,
        both to the first. ``network``: the name of its network namespace, if not this process's."""
        arguments = [*map(str, arguments)]
        asked = {"arguments": arguments, "environment": dict(env), "directory": str(cwd), "network": network}
        request = json.dumps(asked).encode()
        output, says = (None, os.dup(stdout.fileno())) if stdout else os.pipe()
        status, tells = os.pipe()
        errs = os.dup(stderr.fileno() if stderr else says)
        with self._lock:
            end = self._end = self._end or self._start()
            socket.send_fds(end, [_LENGTH.pack(len(request))], [says, errs, tells])
            end.sendall(request)
            answer = end.recv(_LENGTH.size, socket.MSG_WAITALL)
        os.close(says), os.close(errs), os.close(tells)
        return Launched(arguments, *_LENGTH.unpack(answer), output, status)

    def _start(self) -> socket.socket:
        end, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
            own = {**forkserver.common_environment(os.cpu_count()), forkserver.AGENT_VARIABLE: _UNKNOWN}
            pipes = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=own, cwd=ROOT, **pipes)
        atexit.register(lambda: (end.close(), process.wait()))
        return end


_CLIENTS = _Client(), _Client()
launch = _CLIENTS[0].launch


def launch_on_host(lab: Network, host: int, *arguments: object, **options: Any) -> Launched:
    """Start ``megatron-ft`` on that host of ``lab``. Neighbours are forked from different servers, so that not all hosts
    of a run have the same order of sets."""
    return _CLIENTS[host % len(_CLIENTS)].launch(*arguments, network=lab.namespace(host), **options)


class _Inherited(forkserver.ForkServer):
    """The agent's fork server, forked from the agent itself before it has any thread."""

    def _begin(
        self, arguments: list[str], environment: Mapping[str, str], end: int
    ) -> subprocess.Popen | forkserver.Forked:
        if threading.active_count() > 1:  # the agent starts the whole job again
            return super()._begin(arguments, environment, end)
        agent = os.getpid()
        if pid := os.fork():
            return forkserver.Forked(pid)
        self._end.close()
        os.setsid()
        for target in (1, 2):
            os.dup2(self._said.fileno(), target)
        os.environ.clear()
        os.environ.update(environment)
        _show_agent(agent)
        sys.argv = [rank_bootstrap.__file__, *arguments]
        rank_bootstrap.main()


def _show_agent(pid: int) -> None:
    """Write the agent's pid where ``/proc/<pid>/environ`` of this process, and of the ranks it forks, has it: fault
    injection looks there to tell whose rank a process is."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    name = f"{forkserver.AGENT_VARIABLE}=".encode()
    at = begin + ctypes.string_at(begin, end - begin).index(name) + len(name)
    ctypes.memmove(at, str(pid).encode().ljust(len(_UNKNOWN), b"\0"), len(_UNKNOWN))


def _serve(end: socket.socket) -> dict[str, Any]:
    """Fork a launcher for each request. Returns the request in each of them."""
    for module in _MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    waking, wakes = os.pipe()
    os.set_blocking(waking, False), os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    poll = select.poll()
    poll.register(end, select.POLLIN), poll.register(waking, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if waking in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(waking, 4096)
            _report(running)
        if end.fileno() not in ready:
            continue
        length, descriptors, _, _ = socket.recv_fds(end, _LENGTH.size, 3)
        if not length:
            os._exit(0)
        request = json.loads(end.recv(_LENGTH.unpack(length)[0], socket.MSG_WAITALL))
        output, errors, status = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(output, 1), os.dup2(errors, 2)
            for descriptor in (output, errors, status, waking, wakes, end.detach(), *running.values()):
                os.close(descriptor)
            return request
        os.close(output), os.close(errors)
        running[pid] = status
        end.sendall(_LENGTH.pack(pid))


def _report(running: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status = running.pop(found[0])
            with contextlib.suppress(BrokenPipeError):
                os.write(status, _STATUS.pack(found[1]))
            os.close(status)


def _become(request: Mapping[str, Any]) -> None:
    """Go on as ``megatron-ft`` with these arguments, in that environment and directory."""
    from megatron_ft import cli

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if name := request["network"]:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"network namespace {name} cannot be entered")
    random.seed()
    forkserver.ForkServer = _Inherited
    sys.argv = [cli.__file__, *request["arguments"]]
    cli.run_and_exit()


if __name__ == "__main__":
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
