"""The embedded control store in processes of its own: an agent starts a keeper, the keeper keeps a store running.

The agent owns the listening socket, so the port belongs to the run from the first moment to the last: no other program
can take it between two stores, and a client that connects meanwhile is served as soon as the next store is there. The
keeper only forks a store, waits for its end and forks the next, which is therefore there within milliseconds, without
importing torch again. A store comes back empty; groups and agents rebuild what it has to know
(``store.ControlStore.restore``).

The keeper of host 0 serves from the start. Those of other hosts stand by: they own their port and do nothing, until
their host takes the store over (``host.store_takeover``).

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

from megatron_ft.errors import FTError, LaunchError
from megatron_ft.record import history, run_directory
from megatron_ft.run import store
from megatron_ft.types import given
from megatron_ft.utils import directory_lock, file_descriptors, lifeline, net, process_name, shared_file, steady_clock
from megatron_ft.utils.console import say
from megatron_ft.utils.process_status import ended_with, process_status
from megatron_ft.utils.vital_thread import described

RESTARTS, WITHIN_S = 5, 60.0
"""This number of restarts within that time is made at once; the next one waits until the time has passed."""
STOPPED_S = 10.0
"""Seconds to wait for a store that is stopped (SIGSTOP, a debugger) before another takes its place."""
_LOOK_S = 0.1
_MOST_S = 0.25
"""The most that one look adds to a time: while the keeper was stopped itself, it has seen nothing."""

_BEGIN, _SERVES = b"1", b"+"
_FIRST_S = 60.0
"""Seconds for the first store to serve; a longer silence is left to its client, which says what it waits for."""


class StoreSupervisor:
    """The agent's side. ``address``: where the store answers; ``port`` 0 takes a free one. ``serves``: whether there is
    to be a store. Any thread may call its methods.

    Raises ``LaunchError`` when the port is in use, or the first store ends before it serves.
    """

    def __init__(self, bind: str, port: int, run_dir: Path, serves: bool = True) -> None:
        self._run_dir, self.serves = run_dir, serves
        self._listener = store.listen(bind, port)
        self.address = net.joined(bind, self._listener.getsockname()[1])
        self._order: int | None = None
        self._lock = threading.Lock()
        self.pid: int | None = None
        if not serves or not _may_fork():
            self.pid = self._start()
            return
        served, reports = os.pipe()
        self.pid = self._start(reports)
        os.close(reports)
        self._await_first(served)

    def _await_first(self, served: int) -> None:
        """Wait until the first store serves. Its client would wait for minutes for one that has ended."""
        words, last = b"", b" "
        # no limit: the store's process says that it serves, ends, or says nothing for _FIRST_S
        while last and file_descriptors.readable(served, _FIRST_S):
            last = os.read(served, 4096)
            words += last
        os.close(served)
        if not (last or words.endswith(_SERVES)):
            self.close()
            said = words.decode(errors="replace").strip()
            raise LaunchError(f"the control store's process has ended before it served: {said or 'it gave no reason'}")

    def poll(self) -> None:
        """Start another keeper if this one has died: it was killed, because it does not end by itself."""
        with self._lock:
            if self.pid is None:
                return
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if not ended:
                return
            pid, self.pid = self.pid, None
            if self.serves:
                why = ended_with(os.waitstatus_to_exitcode(status))
                say(f"the keeper of the control store (pid {pid}) {why}, and took the store along; another is started")
                self.pid = self._start()

    def serve(self) -> None:
        """Have a store from now on. A keeper that stands by starts it within milliseconds."""
        with self._lock:
            if self.serves:
                return
            self.serves = True
            try:
                if self.pid is not None and self._order is not None:
                    os.write(self._order, _BEGIN)
                    return
            except BrokenPipeError:  # the keeper was killed
                # no limit: the process has ended: nothing reads from its pipe
                os.waitpid(given(self.pid), 0)
            self.pid = self._start()

    def stand_by(self) -> None:
        """Have no store any more: another host has it."""
        with self._lock:
            if self.serves:
                self.serves = False
                self._end()

    def close(self) -> None:
        """End the keeper, and the store with it."""
        with self._lock:
            self._end()
            self._listener.close()
            if self.serves:
                with contextlib.suppress(OSError):
                    (self._run_dir / run_directory.STORE).unlink(missing_ok=True)

    def _end(self) -> None:
        pid, self._order = self.pid, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own
                # no limit: the process was killed before; it ends, unless it is inside the kernel (state D)
                os.waitpid(pid, 0)
            self.pid = None

    def _start(self, reports: int | None = None) -> int | None:
        """Start a keeper: the first by a fork, which takes no time; later ones, beside other Python threads, where a
        fork would not be safe, as a new process when they have to serve. Until then there is none.

        ``reports``: the descriptor to which a forked one's first store reports."""
        agent = os.getpid()
        if _may_fork():
            awaited, self._order = os.pipe()
            if self.serves:
                os.write(self._order, _BEGIN)
            pid = os.fork()
            if pid == 0:
                os.close(self._order)
                _run(lambda: _keep(self._listener, self._run_dir, agent, awaited, reports), reports)
            os.close(awaited)
            return pid
        if not self.serves:
            return None
        command = [sys.executable, "-m", "megatron_ft.host.store_keeper", "--run-dir", str(self._run_dir)]
        actions = [(os.POSIX_SPAWN_DUP2, self._listener.fileno(), 0)]
        return os.posix_spawn(sys.executable, [*command, "--agent", str(agent)], os.environ, file_actions=actions)


def _may_fork() -> bool:
    """Return whether no other Python thread can hold what a forked process would need."""
    harmless = {threading.current_thread().name, directory_lock.THREAD}
    return {thread.name for thread in threading.enumerate()} <= harmless


# --- in the keeper ----------------------------------------------------------------------------------------------------


def _keep(
    listener: socket.socket, run_dir: Path, agent: int, order: int | None = None, reports: int | None = None
) -> NoReturn:
    """Fork stores, one after the other, until the agent ends. A full disk is no reason to have no store.

    ``order``: wait first until something can be read from it. ``reports``: the first store reports there that it serves, or
    why it does not.
    """
    lifeline.end_with(agent)
    process_name.take(f"keeper of the control store {run_dir}", "ft-store-keeper")
    os.setsid()  # Ctrl-C on the terminal is for the agent
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # the keeper waits for it
    # The server asks the name server for every client's name: a silent name server costs a second, not ten.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if order is not None and not os.read(order, 1):
        raise SystemExit  # the agent has ended
    deaths: deque[float] = deque(maxlen=RESTARTS)
    host, address = socket.gethostname(), net.joined(*listener.getsockname()[:2])

    def note(event: str, pid: int, detail: str) -> None:
        with contextlib.suppress(OSError):
            history.append(run_dir, "store", what=event, pid=pid, host=host, detail=detail)

    # no limit: a keeper has nothing else to do, and ends with its agent
    while True:
        pid, reports = _fork_store(listener, reports), None
        said = {"pid": pid, "host": host, "address": address, "started": round(steady_clock.now(), 6)}
        with contextlib.suppress(OSError):
            shared_file.write_json(run_dir / run_directory.STORE, said)
        if deaths:
            note("restarted", pid, "")
        why = _await_end(pid)
        wait_s = deaths[0] + WITHIN_S - time.monotonic() if len(deaths) == RESTARTS else 0.0
        deaths.append(time.monotonic())
        when = f"in {wait_s:.0f} s, it ended {RESTARTS + 1} times within {WITHIN_S:g} s" if wait_s > 0 else "at once"
        note("died", pid, f"{why}; started again {when}")
        say(f"the control store (pid {pid}) {why}; it is started again {when}")
        time.sleep(max(0.0, wait_s))


def _fork_store(listener: socket.socket, reports: int | None) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(lambda: _serve(listener, keeper, reports), reports)
    if reports is not None:
        os.close(reports)  # the agent sees the end of the store
    return pid


def _await_end(pid: int) -> str:
    """Wait until the store has ended; kill it when it was stopped for too long. Return the reason."""
    stopped_s, looked = 0.0, time.monotonic()
    # no limit: a keeper has nothing else to do, and ends with its agent
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return ended_with(os.waitstatus_to_exitcode(status))
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
        looked, before = time.monotonic(), looked
        stopped_s = stopped_s + min(looked - before, _MOST_S) if process_status(pid).state == "T" else 0.0
        if stopped_s > STOPPED_S:
            os.kill(pid, signal.SIGKILL)
            # no limit: the process was killed before; it ends, unless it is inside the kernel (state D)
            os.waitpid(pid, 0)
            return f"was stopped for {STOPPED_S:g} s and is ended"


def _serve(listener: socket.socket, keeper: int, reports: int | None) -> NoReturn:
    lifeline.end_with(keeper)
    process_name.take("control store", "ft-store")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    server = store.serve_on(listener)
    if reports is not None:
        os.write(reports, _SERVES)
        os.close(reports)
    # no limit: the store's process has nothing else to do, and ends with its keeper
    while server is not None:
        signal.pause()
    raise AssertionError("a store serves until it is killed")


# --- both processes ---------------------------------------------------------------------------------------------------


def _run(part: Callable[[], NoReturn], reports: int | None = None) -> NoReturn:
    """Run the outermost call of a forked process, which never returns to the code that forked. ``reports``: the descriptor
    that gets the last words of a store that does not serve."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):  # the agent's, whose reader does not wait for this process
            os.dup2(null, fd)
        os.close(null)
        part()
    except BaseException as error:
        traceback.print_exc()
        if reports is not None:
            words = str(error) if isinstance(error, FTError) else described(error)
            with contextlib.suppress(OSError):  # it serves, and has closed it
                os.write(reports, words.encode(errors="replace"))
    finally:
        os._exit(1)


def main() -> NoReturn:
    """Keep a control store running, as the agent's command line says."""
    parser = argparse.ArgumentParser(
        description="Keep the control store of a run; its listening socket is standard input."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--agent", type=int, required=True)
    options = parser.parse_args()
    listener = socket.socket(fileno=os.dup(0))
    _run(lambda: _keep(listener, options.run_dir, options.agent))


if __name__ == "__main__":
    main()
