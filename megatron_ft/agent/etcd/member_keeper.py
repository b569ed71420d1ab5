"""Keep one member of the run's own etcd running, as a process of its own that ``agent.etcd.members`` starts. No torch here.

A member that dies is started again at once on its data; but not if its etcd may have lost some of it
(``binary.keeps_its_word``): then the agent has another member instead. The member's directory is useless once the agent
has ended, because a later agent belongs to another run or has another member. So the keeper removes it at its end,
however the agent has ended.

Failures it assumes: etcd dies or is stopped, any number of times (``agent.process_keeper``); it has been removed from
its cluster, or its directory is gone, and then it must never run again; the agent dies, and then all ends; the keeper
is killed, and its etcd dies with it (the agent starts another keeper).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.agent import process_keeper
from megatron_ft.agent.etcd import binary
from megatron_ft.utils import lifeline, process_name
from megatron_ft.utils.console import say

LOG = "etcd.log"
"""The log is beside the data, since the run directory may be slower than a member can wait."""
QUOTA_BYTES = 8 * 2**30
"""The most that etcd supports; its default is 2 GiB, beyond which it accepts no writes."""
_DATA = "data"
_REMOVED = 0
"""The exit code of etcd when its cluster has removed it."""
_TAIL_BYTES = 4096


def arguments(name: str, directory: Path, client: str, peer: str, cluster: str, joins: bool) -> list[str]:
    """Return etcd's arguments. ``client`` and ``peer`` are URLs, ``cluster`` lists all members; ``joins``: it exists.

    This project checks changes itself (``core.lifecycle.etcd_membership``): etcd would not let a member be added while
    another is lost.
    """
    options = {
        "--name": name,
        "--data-dir": str(directory / _DATA),
        "--listen-client-urls": client,
        "--advertise-client-urls": client,
        "--listen-peer-urls": peer,
        "--initial-advertise-peer-urls": peer,
        "--initial-cluster": cluster,
        "--initial-cluster-state": "existing" if joins else "new",
        "--strict-reconfig-check": "false",
        # Half of etcd's defaults: a leader lost with its host is replaced by the time the host counts as silent.
        "--heartbeat-interval": "50",
        "--election-timeout": "500",
        "--pre-vote": "true",
        # Deleted keys take room until their revisions are compacted, and a view change of 1,024 groups writes over 100 MB.
        "--auto-compaction-mode": "periodic",
        "--auto-compaction-retention": "1m",
        "--quota-backend-bytes": str(QUOTA_BYTES),
        "--logger": "zap",
        "--log-level": "warn",
    }
    return [f"{name}={value}" for name, value in options.items()]


def keep(
    command: Sequence[str], directory: Path, run_dir: Path, entry: Path, begun: bool, once: bool, runs: list[int]
) -> None:
    """Keep etcd running until it must not run again. ``entry``: the file that names the running pid, which is also the
    last of ``runs``; ``begun``: etcd has run already, and must have its data; ``once``: it must not run on data that it
    has not closed."""
    name = _value(command, "--name")

    def start() -> int:
        nonlocal begun
        if begun and not (directory / _DATA / "member").is_dir():
            say(f"what member {name} of the control store had in {directory} is gone: it is not started again")
            raise SystemExit(1)  # the same member with an empty memory would vote twice
        if begun and once:
            say(f"member {name} of the control store is not started again: this version of etcd may have lost writes")
            raise SystemExit(1)
        begun = True
        runs[:] = [_start(command, directory)]
        return runs[0]

    process_keeper.keep(
        start,
        f"member {name} of the control store",
        run_dir,
        entry,
        {"address": _value(command, "--listen-client-urls"), "name": name},
        over=lambda code: code == _REMOVED,
        last_words=lambda: _last_words(directory / LOG),
        member=name,
    )
    say(f"member {name} of the control store has been removed: another host has one in its place")


def _start(command: Sequence[str], directory: Path) -> int:
    keeper = os.getpid()
    log = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid == 0:
        try:
            lifeline.end_with(keeper)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.execve(command[0], list(command), binary.environment())
        finally:
            os._exit(127)
    os.close(log)
    return pid


def _last_words(log: Path) -> str:
    """Return the last error that etcd has logged, in zap's JSON."""
    try:
        text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    for line in reversed(text.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if said.get("level") in ("fatal", "panic", "error"):
            return f" ({said.get('msg', '')}: {said.get('error', '')})".replace(": )", ")")
    return ""


def _value(command: Sequence[str], option: str) -> str:
    return next(word.partition("=")[2] for word in command if word.startswith(f"{option}="))


def main() -> int:
    """Keep one member running, as the agent's command line says."""
    parser = argparse.ArgumentParser(description="Keep a member of a run's own etcd.")
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="deleted at the end")
    parser.add_argument("--entry", type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="the member has run already")
    parser.add_argument("--once", action="store_true", help="it must not be started on data that it has not closed")
    parser.add_argument("command", nargs="+", help="etcd and its options, after --")
    options = parser.parse_args()

    def end(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the terminal is for the agent
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # the keeper waits for it
    runs: list[int] = []
    try:
        lifeline.end_with(options.agent, signal.SIGTERM)
        process_name.take(f"keeper of the run's etcd {options.run_dir}", "ft-etcd-keeper")
        keep(options.command, options.directory, options.run_dir, options.entry, options.again, options.once, runs)
        return 0
    finally:
        for pid in runs:
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    os.kill(pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own
                    os.waitpid(pid, 0)
        shutil.rmtree(options.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            options.entry.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
