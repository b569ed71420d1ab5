"""Where the hosts meet for the check, as their options or their surroundings say: at HOST:PORT, or by a file.

The file is in a directory that all hosts see: host 0 takes a free port and writes there where it listens.

Failures it assumes: host 0 comes late or never, or is not where they look for it; an earlier check has left its file.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import queue
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.doctor.disk import PREFIX
from megatron_ft.doctor.line import Line, Message
from megatron_ft.errors import LaunchError
from megatron_ft.launch import addresses, hostfile

_CONNECT_S = 2.0
_WELCOME_S = 10.0
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Meeting:
    """Host ``rank`` of ``hosts``. ``store``: where host 0 listens, None: it says so in ``directory``. ``job``: tells this
    check from others there. ``address``: by which the others reach this host, None: found; ``target``: found by this one.
    ``names``: of all hosts, where they are known before they come. ``patience_s``: how long they are waited for."""

    hosts: int
    rank: int
    store: tuple[str, int] | None = None
    job: str = "only"
    directory: Path | None = None
    address: str | None = None
    target: str | None = None
    names: tuple[str, ...] = ()
    patience_s: float = 60.0

    @property
    def file(self) -> Path:
        """Only without ``store``."""
        assert self.directory is not None
        return self.directory / f"{PREFIX}.{re.sub(r'[^A-Za-z0-9_.-]', '_', self.job)}.json"

    def name(self, rank: int) -> str:
        """Of a host that has not said it."""
        return self.names[rank] if rank < len(self.names) else f"host {rank}"


def find(options: argparse.Namespace) -> Meeting | None:
    """From the options of ``megatron-ft doctor``, which its surroundings have completed. None: this machine alone.

    Raises ``LaunchError`` for what cannot be.
    """
    names: tuple[str, ...] = ()
    hosts, rank, store = options.hosts, options.host_rank, options.store
    by_file = options.job_id is not None and options.directory is not None
    if options.hostfile is not None:
        if hosts is not None or store is not None:
            raise LaunchError("--hostfile says what --hosts and --store say; leave these out")
        found = hostfile.read(options.hostfile)
        names, hosts = tuple(host.name for host in found), len(found)
        rank = hostfile.own_rank(options.hostfile, found) if rank is None else rank
        if hosts > 1 and not options.port and not by_file:
            raise LaunchError(f"--port is missing; it is a free port of {names[0]}, where the hosts meet")
        store = addresses.joined(names[0], options.port) if options.port else None
    if not options.factor > 1:
        raise LaunchError(f"--factor is {options.factor:g}; it has to be more than 1, or every host would be named")
    if options.patience_s < 0:
        raise LaunchError(f"--patience-s is {options.patience_s:g}; it is a number of seconds")
    if hosts in (None, 1) and rank in (None, 0) and (store is None or options.hostfile is not None):
        return None
    if hosts is None or rank is None:
        missing = "--hosts" if hosts is None else "--host-rank"
        raise LaunchError(f"{missing} is missing; all hosts together need --hosts H, --host-rank K and --store HOST:PORT")
    if not 0 <= rank < hosts:
        raise LaunchError(f"--host-rank is {rank} and --hosts is {hosts}; hosts are numbered from 0 to --hosts less one")
    if store is None and options.job_id is not None and options.directory is None:
        raise LaunchError("--directory is missing; without --store the hosts meet by a file in one that all of them see")
    where = None if store is None else addresses.split(store)
    if (where is None and (store is not None or not by_file)) or (where is not None and not where[1]):
        raise LaunchError(
            f"--store is {store!r}; all hosts need HOST:PORT, the address of host 0 and a free port there ([ADDRESS]:PORT "
            f"for IPv6); or the same new --job-id, and --directory, one that they share"
        )
    if options.directory is not None and where is None and not options.directory.is_dir():
        raise LaunchError(f"--directory {options.directory} is no directory here; give one that all hosts see")
    return Meeting(
        hosts=hosts,
        rank=rank,
        store=where,
        job=options.job_id or "only",
        directory=options.directory,
        address=options.address,
        target=options.target,
        names=names,
        patience_s=options.patience_s,
    )


# --- host 0 -----------------------------------------------------------------------------------------------------------


def listen(meeting: Meeting) -> socket.socket:
    """Where host 0 is to be found. Raises ``LaunchError``."""
    host, port = meeting.store or (meeting.address or addresses.own_address(meeting.target), 0)
    own = meeting.address or _resolved(host, port)
    try:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, port), family=family, backlog=1024)
    except OSError as error:
        where = addresses.joined(host, port)
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"--store is {where}, and port {port} is in use by another program; give another") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"--store is {where}, and {own} is no address of this host, {socket.gethostname()}; --host-rank 0 belongs "
                f"on the host that has it (or give --address, where it only forwards)"
            ) from None
        raise LaunchError(f"host 0 cannot listen on {where}: {error.strerror or error}") from None


def _resolved(host: str, port: int) -> str:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise LaunchError(f"--store: {host} stands for no address here ({error}); check it") from None


@contextlib.contextmanager
def announced(meeting: Meeting, listener: socket.socket):
    """While this lasts the others find host 0 by the file, if they look for one."""
    if meeting.store is not None:
        yield
        return
    own, port = listener.getsockname()[:2]
    temporary = meeting.file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"job": meeting.job, "store": [own, port]}), encoding="utf-8")
    os.replace(temporary, meeting.file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            meeting.file.unlink()


# --- every host -------------------------------------------------------------------------------------------------------


def reach(meeting: Meeting, hello: Callable[[str], Message]) -> tuple[Line, Message] | str:
    """The line to host 0 and its welcome; or why there is none. ``hello``: from this host's own address.

    Raises ``LaunchError`` where host 0 does not want this host.
    """
    end = time.monotonic() + meeting.patience_s
    while True:
        where = meeting.store or _read(meeting.file)
        if isinstance(where, tuple):
            try:
                line = Line(socket.create_connection(where, timeout=_CONNECT_S))
                own = meeting.address or line.address
                line.send(hello(own))
                welcome = line.next(_WELCOME_S)
                if welcome is not None and "no" in welcome:
                    raise LaunchError(welcome["no"])
                if welcome is not None:
                    return line, {**welcome, "own": own}
                why = f"{addresses.joined(*where)} is not host 0's"
            except OSError as error:
                why = f"{addresses.joined(*where)}: {error.strerror or error}"
                _call_out(where, meeting)
            except queue.Empty:
                why = f"{addresses.joined(*where)}: no answer within {_WELCOME_S:g} s"
        else:
            why = where
        if time.monotonic() > end:
            return f"host 0 is not reached within {meeting.patience_s:g} s ({why}); is it started, and up?"
        time.sleep(_PAUSE_S)


def _read(file: Path) -> tuple[str, int] | str:
    try:
        host, port = json.loads(file.read_text(encoding="utf-8"))["store"]
        return host, port
    except (OSError, ValueError, KeyError) as error:
        return str(error)


def _call_out(where: tuple[str, int], meeting: Meeting) -> None:
    """A datagram may pass where no connection is made: then it is the way back that is blocked."""
    with contextlib.suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as mouth:
            mouth.sendto(json.dumps({"job": meeting.job, "rank": meeting.rank}).encode(), target)
