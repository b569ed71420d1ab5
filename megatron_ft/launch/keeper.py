"""The embedded control store in processes of its own: host 0's agent starts a keeper, the keeper keeps a store running.

The agent owns the listening socket, so the port is the run's from the first moment to the last: no other program can take
it between two stores, and who connects meanwhile is served as soon as the next one is there. The keeper does nothing but
fork a store, wait for its end and fork the next, which therefore is there within milliseconds, without importing torch
again. A store comes back empty; the groups and agents rebuild what it has to know (``store.ControlStore.restore``).

Failures it assumes: the store dies or is stopped, any number of times; the keeper dies (its store dies with it, and the
agent starts another one); the agent dies, and then both end. A store that runs but does not answer is not noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_ft.launch import addresses, kept, lifeline, record
from megatron_ft.launch.console import say
from megatron_ft.runtime import history, store


class Keeper:
    """The agent's side. ``address``: where the store answers; ``port`` 0 takes a free one.

    Raises ``LaunchError`` when the port is in use.
    """

    def __init__(self, bind: str, port: int, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._listener = store.listen(bind, port)
        self.address = addresses.joined(bind, self._listener.getsockname()[1])
        self.pid = self._start()

    def look(self) -> None:
        """Start another keeper if this one has died: somebody has killed it, it does not end by itself."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            why = kept.ended_with(os.waitstatus_to_exitcode(status))
            say(f"the keeper of the control store (pid {self.pid}) {why}, and took the store along; another is started")
            self.pid = self._start()

    def close(self) -> None:
        """End it, and the store with it."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own
            os.waitpid(self.pid, 0)
        self._listener.close()
        with contextlib.suppress(OSError):
            (self._run_dir / record.STORE).unlink(missing_ok=True)

    def _start(self) -> int:
        """The first by a fork, since that takes no time; beside other threads of Python that would not be safe."""
        agent = os.getpid()
        if threading.active_count() == 1:
            pid = os.fork()
            if pid == 0:
                _run(lambda: _keep(self._listener, self._run_dir, agent))
            return pid
        command = [sys.executable, "-m", "megatron_ft.launch.keeper", "--run-dir", str(self._run_dir)]
        actions = [(os.POSIX_SPAWN_DUP2, self._listener.fileno(), 0)]
        return os.posix_spawn(sys.executable, [*command, "--agent", str(agent)], os.environ, file_actions=actions)


# --- in the keeper ----------------------------------------------------------------------------------------------------


def _keep(listener: socket.socket, run_dir: Path, agent: int) -> NoReturn:
    """Fork stores, one after the other, until the agent ends."""
    lifeline.end_with(agent)
    os.setsid()  # Ctrl-C on the terminal is for the agent
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it is waited for
    # The server asks the name server who every client is: one that does not answer costs a second, not ten.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    kept.keep(
        lambda: _fork_store(listener),
        "the control store",
        lambda pid: _write(run_dir, pid, listener),
        lambda what, pid, detail: _note(run_dir, what, pid, detail),
    )
    raise AssertionError("a store is kept until the agent ends")


def _fork_store(listener: socket.socket) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(lambda: _serve(listener, keeper))
    return pid


def _serve(listener: socket.socket, keeper: int) -> NoReturn:
    lifeline.end_with(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    server = store.serve_on(listener)
    while server is not None:
        signal.pause()
    raise AssertionError("a store serves until it is killed")


def _write(run_dir: Path, pid: int, listener: socket.socket) -> None:
    address = addresses.joined(*listener.getsockname()[:2])
    entry = {"pid": pid, "host": socket.gethostname(), "address": address, "started": round(time.time(), 6)}
    with contextlib.suppress(OSError):  # a full disk is no reason to have no store
        record.replace(run_dir / record.STORE, entry)


def _note(run_dir: Path, what: str, pid: int, detail: str) -> None:
    with contextlib.suppress(OSError):
        history.append(run_dir, "store", what=what, pid=pid, host=socket.gethostname(), detail=detail)


# --- both processes ---------------------------------------------------------------------------------------------------


def _run(part: Callable[[], NoReturn]) -> NoReturn:
    """Never back into the code that forked: the outermost call of a forked process."""
    try:
        _detach()
        part()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _detach() -> None:
    """Whoever reads what the agent prints does not wait for us."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="Keep the control store of a run; its listening socket is standard input.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--agent", type=int, required=True)
    options = parser.parse_args()
    listener = socket.socket(fileno=os.dup(0))
    _run(lambda: _keep(listener, options.run_dir, options.agent))


if __name__ == "__main__":
    main()
