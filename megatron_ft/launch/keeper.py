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
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_ft.launch import addresses, lifeline, record
from megatron_ft.runtime import history, store

RESTARTS, WITHIN_S = 5, 60.0
"""So often in that time a store is started again at once; the next time waits until that time has passed."""
STOPPED_S = 10.0
"""A stopped store (SIGSTOP, a debugger) is waited for; after that long another takes its place."""
_LOOK_S = 0.1
_MOST_S = 0.25
"""What one look adds to a time at most: while the keeper was stopped itself, it has seen nothing."""


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
            why = _ended_with(os.waitstatus_to_exitcode(status))
            _say(f"the keeper of the control store (pid {self.pid}) {why}, and took the store along; another is started")
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
    deaths: deque[float] = deque(maxlen=RESTARTS)
    while True:
        pid = _fork_store(listener)
        _write(run_dir, pid, listener)
        if deaths:
            _note(run_dir, "restarted", pid)
        why = _await_end(pid)
        wait_s = deaths[0] + WITHIN_S - time.monotonic() if len(deaths) == RESTARTS else 0.0
        deaths.append(time.monotonic())
        when = f"in {wait_s:.0f} s, it ended {RESTARTS + 1} times within {WITHIN_S:g} s" if wait_s > 0 else "at once"
        _note(run_dir, "died", pid, f"{why}; started again {when}")
        _say(f"the control store (pid {pid}) {why}; training goes on without it, it is started again {when}")
        time.sleep(max(0.0, wait_s))


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


def _await_end(pid: int) -> str:
    """Wait until it has ended; kill it when it has been stopped for too long. Returns what became of it."""
    stopped_s, looked = 0.0, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _ended_with(os.waitstatus_to_exitcode(status))
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
        looked, before = time.monotonic(), looked
        stopped_s = stopped_s + min(looked - before, _MOST_S) if _is_stopped(pid) else 0.0
        if stopped_s > STOPPED_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"was stopped for {STOPPED_S:g} s and is ended"


def _is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")  # not waited for, so it is there
    return text.rpartition(")")[2].split()[0] == "T"


def _write(run_dir: Path, pid: int, listener: socket.socket) -> None:
    address = addresses.joined(*listener.getsockname()[:2])
    entry = {"pid": pid, "host": socket.gethostname(), "address": address, "started": round(time.time(), 6)}
    with contextlib.suppress(OSError):  # a full disk is no reason to have no store
        record.replace(run_dir / record.STORE, entry)


def _note(run_dir: Path, what: str, pid: int, detail: str = "") -> None:
    with contextlib.suppress(OSError):
        history.append(run_dir, "store", what=what, pid=pid, host=socket.gethostname(), detail=detail)


def _ended_with(code: int) -> str:
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that went away
        print(f"megatron_ft: {line}", file=sys.stderr, flush=True)


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
