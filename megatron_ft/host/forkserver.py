"""Ranks are forked from a process that has imported torch already, instead of each importing it by itself.

A rank then starts in milliseconds: when a run begins, when a lost rank comes back weeks later, and where eight ranks of
a node would all read the same files from a slow file system. The server only imports and forks; it has one thread and
has not touched a device: a forked process cannot use a CUDA context that was made before the fork, so a module that
makes one while it is imported is refused. A rank forked from it becomes the agent's child (the agent is a subreaper, so
the kernel lets it adopt), as if the agent had started it itself: the agent waits for it, and it ends with the agent.

Failures it assumes: the server cannot be started, is silent or dies: the agent then starts the rank as an interpreter
of its own. Ranks that were forked already do not need the server. A rank begins only when the agent tells it to, which
the agent does once it knows the rank: a rank whose start was given up, because the server answered too late, ends
instead, or there would be two of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ft.errors import LaunchError
from megatron_ft.types import given
from megatron_ft.utils import cores, lifeline, process_name

PRELOAD = ("torch", "torch._dynamo", "numpy", "megatron_ft.run.session", "megatron_ft.core.scheduling.maxflow")
"""``torch._dynamo`` is imported by torch when the first optimizer is made, and takes as long as torch. The last module
is imported when the first plan needs it, in the middle of a step."""
SERVE = "--serve-forks"
FORKS_NAME = "ranks are forked from this process"
AGENT_VARIABLE = "MEGATRON_FT_AGENT_PID"
_LENGTH = struct.Struct("=q")
"""The format of the length before a request, and of the answer: a pid, or the negative length of a refusal that follows."""
_BEGIN = b"1"
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it ``torch.cuda.is_available`` in an imported module asks NVML: CUDA's own answer would make forked ranks useless."""
_START_S, _ANSWER_S = 120.0, 10.0
"""Limits in seconds of an import from the slowest file systems and of a fork on a host that swaps; the agent is idle
meanwhile."""


class NotForked(Exception):
    """The server cannot be used, with the reason. An event, not a fault: the rank is started in another way."""


class Forked:
    """A process that the server forked and the agent has adopted; the part of ``subprocess.Popen`` that is needed here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        return given(self._reap(0))

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:  # otherwise the pid may belong to another process
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            # no limit: the agent polls; waits only for what was killed
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def common_environment(ranks: int) -> dict[str, str]:
    """Return the variables that all ranks of a host share; torch reads some at import. ``ranks``: their number here."""
    threads = max(1, cores.usable() // max(1, ranks))
    defaults = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONUNBUFFERED": "1"}
    defaults["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks the name server for every connection it makes
    return {**defaults, **os.environ}


class ForkServer:
    """The agent's end. It can be made before the agent has imported torch itself, so that both imports run in parallel.

    Args:
        environment: of the server.
        modules: modules to import beside :data:`PRELOAD`.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        lifeline.adopt_orphans()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close
        self._end, theirs = socket.socketpair()
        self._end.settimeout(_START_S)
        with theirs:
            own = {_ASK_NVML: "1", **environment, AGENT_VARIABLE: str(os.getpid())}
            self._process = self._begin([SERVE, str(theirs.fileno()), *modules], own, theirs.fileno())

    def _begin(self, arguments: list[str], environment: Mapping[str, str], end: int) -> subprocess.Popen | Forked:
        """Start the server; ``end``: the descriptor that it inherits."""
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_ft.host.rank_bootstrap", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            pass_fds=[end],
            start_new_session=True,
        )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: BinaryIO) -> Forked:
        """Run ``host.rank_bootstrap`` with these arguments, stdout and stderr to ``output``. Raises :class:`NotForked`, and
        ``LaunchError`` if a module to be imported once uses a GPU."""
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        begins, begin = os.pipe()
        with open(begins, "rb", buffering=0), open(begin, "wb", buffering=0) as told:
            try:
                socket.send_fds(self._end, [_LENGTH.pack(len(request))], [output.fileno(), begins])
                self._end.sendall(request)
                # no limit: the socket has a timeout: _START_S, later _ANSWER_S
                answer = self._end.recv(_LENGTH.size, socket.MSG_WAITALL)
                number = _LENGTH.unpack(answer)[0] if len(answer) == _LENGTH.size else 0
                # no limit: the socket has a timeout: _START_S, later _ANSWER_S
                refusal = self._end.recv(-number, socket.MSG_WAITALL).decode() if number < 0 else ""
            except OSError as error:
                raise self._failed(f"does not answer ({error})") from None
            if not number:
                raise self._failed("has ended")
            if refusal:
                raise LaunchError(refusal)
            told.write(_BEGIN)
        self._end.settimeout(_ANSWER_S)
        return Forked(number)

    def _failed(self, how: str) -> NotForked:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return NotForked(f"the process that ranks are forked from {how}" + (f": {said[-1]}" if said else ""))

    def close(self) -> None:
        """End the server; no further rank is started."""
        self._end.close()
        self._process.kill()
        # no limit: the process was killed before; it ends, unless it is inside the kernel (state D)
        self._process.wait()
        self._said.close()

    @property
    def pid(self) -> int:
        return self._process.pid


def reap_strays(known: set[int]) -> None:
    """Reap processes that dead ranks have left behind, as a subreaper must. ``known``: pids waited for elsewhere."""
    while True:
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None and found.si_pid not in known:
                # no limit: it does not block: the process has ended
                os.waitpid(found.si_pid, 0)
                continue
        return


# --- the server -------------------------------------------------------------------------------------------------------


def serve(arguments: Sequence[str]) -> None:
    """Run the server's process; return in every forked rank, with its arguments in ``sys.argv``."""
    agent = os.getppid()
    lifeline.end_with(agent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_name.take(FORKS_NAME, "ft-forks")
    inherited, *modules = arguments
    end = socket.socket(fileno=int(inherited))
    refusal = _import(modules).encode()
    gc.collect()
    gc.freeze()  # the ranks' collectors do not write to shared memory pages
    while True:
        # no limit: the server waits for requests, and ends with the agent
        length, descriptors, _, _ = socket.recv_fds(end, _LENGTH.size, 2)
        if not length:
            os._exit(0)
        # no limit: the rest of a request that the agent sends at once; it ends with the agent
        request = end.recv(_LENGTH.unpack(length)[0], socket.MSG_WAITALL)
        if refusal:
            end.sendall(_LENGTH.pack(-len(refusal)) + refusal)
        elif not _fork(end, agent):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    end.close()
    output, begins = descriptors
    if os.read(begins, 1) != _BEGIN:
        os._exit(1)  # the agent has started another one
    os.close(begins)
    _become(json.loads(request), output)


def _import(modules: Sequence[str]) -> str:
    """Import :data:`PRELOAD` and ``modules``. Return why ranks cannot be forked after that, or ""."""
    for module in (*PRELOAD, *modules):
        importlib.import_module(module)
        if _uses_cuda():
            return (
                f"--preload: importing {module} initialises CUDA, and a rank that is forked after that cannot use a GPU; "
                f"leave {module} out of --preload, let it touch the GPU in a function instead of at import, or use "
                f"--no-preload"
            )
    return ""


def _uses_cuda() -> bool:
    """Return whether this process has a CUDA context, or has asked the CUDA driver for something: torch then refuses
    CUDA in every forked process."""
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized() or not cuda._is_compiled():
        return cuda.is_initialized()
    forked = os.fork()
    if not forked:
        os._exit(cuda._is_in_bad_fork())
    # no limit: the forked process answers and ends
    return os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) != 0


def _fork(end: socket.socket, agent: int) -> bool:
    """Fork a rank that the agent adopts, and tell the agent its pid. False in the rank."""
    told, tell = os.pipe()
    between = os.fork()
    if between:
        os.close(tell)
        # no limit: the process between forks once and ends
        os.waitpid(between, 0)  # from now on the rank is the agent's child
        pid_of_rank = os.read(told, _LENGTH.size)
        if not pid_of_rank:
            os._exit(1)  # the agent waits for an answer, and sees the end of this process at once
        end.sendall(pid_of_rank)
        os.close(told)
        return True
    os.close(told)
    middle = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no process or memory is left
        print(f"fork: {error.strerror}", flush=True)
        os._exit(1)
    if pid:
        os.write(tell, _LENGTH.pack(pid))
        os._exit(0)
    os.close(tell)
    # no limit: the process between forks once and ends
    while os.getppid() == middle:
        time.sleep(0.0002)
    if os.getppid() != agent:
        os._exit(1)  # the agent has died meanwhile
    return False


def _become(asked: Mapping[str, Any], output: int) -> None:
    """Give this process the arguments, environment and output of a new interpreter."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = [str(Path(__file__).with_name("rank_bootstrap.py")), *asked["arguments"]]
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
