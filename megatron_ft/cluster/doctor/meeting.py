"""How the hosts of one check find host 0 and connect to it: at ``--store HOST:PORT``, or by a file in a shared directory.

Without ``--store`` host 0 listens on a free port and writes its address into that file. Failures assumed: host 0 starts
late or never, or is unreachable; an earlier check has left its file.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ft.cluster.doctor.disk import PREFIX
from megatron_ft.cluster.launchers import host_place
from megatron_ft.errors import LaunchError
from megatron_ft.types import given
from megatron_ft.utils import net, shared_file
from megatron_ft.utils.auth import handshake
from megatron_ft.utils.auth import secret as secrets
from megatron_ft.utils.auth.secret import Secret

MEET = "doctor meets"
"""Purpose of the key for connections to host 0."""
_NO_SECRET = Secret("the doctor of hosts without a secret")
"""Used with --store and without MEGATRON_FT_SECRET: the check is not protected then (docs/security.md)."""
_CONNECT_S = 2.0
_WELCOME_S = 10.0
_RETRY_S = 0.2
_LONGEST = 1 << 24

Message = dict[str, Any]


@dataclass(frozen=True)
class Meeting:
    """The knowledge of one host about the check.

    Attributes:
        hosts: number of hosts.
        rank: this host, from 0.
        store: address at which host 0 listens; None: it is in a file in ``directory``.
        job: name that distinguishes this check from others in the same directory.
        directory: directory that all hosts share; None: no disk is tested.
        address: address by which the other hosts reach this one; None: detected.
        target: address of another host, by which ``address`` is detected.
        names: names of the hosts as far as they are known before the hosts connect.
        patience_s: time that hosts wait for each other.
        secret: authenticates the connections; None: from the file, or no protection with ``store``.
        secret_by_file: host 0 passes a new secret by the file, also with ``store``.
        command: its name, for messages.
    """

    hosts: int
    rank: int
    store: tuple[str, int] | None = None
    job: str = "only"
    directory: Path | None = None
    address: str | None = None
    target: str | None = None
    names: tuple[str, ...] = ()
    patience_s: float = 60.0
    secret: Secret | None = field(default_factory=secrets.given)
    secret_by_file: bool = False
    command: str = "doctor"

    @property
    def uses_file(self) -> bool:
        """True if host 0 writes ``file``."""
        return self.store is None or self.secret_by_file

    @property
    def file(self) -> Path:
        """The file with the address of host 0 and the secret; it needs ``directory``."""
        assert self.directory is not None
        return self.directory / f"{PREFIX}.{re.sub(r'[^A-Za-z0-9_.-]', '_', self.job)}.json"

    def name(self, rank: int) -> str:
        """Returns the name of a host that has not connected."""
        return self.names[rank] if rank < len(self.names) else f"host {rank}"


def find(options: argparse.Namespace) -> Meeting | None:
    """Reads the options of ``megatron-ft doctor``, completed by the launcher's environment. None: check this machine alone.

    Raises ``LaunchError`` for options that are missing or contradict each other.
    """
    by_file = options.job_id is not None and options.directory is not None
    listed = [] if options.hostfile is None else host_place.from_hostfile(options, by_file=by_file)
    hosts, rank, store = options.hosts, options.host_rank, options.store
    if options.patience_s < 0:
        raise LaunchError(f"--patience-s is {options.patience_s:g} and must be a number of seconds, 0 or more")
    if hosts in (None, 1) and rank in (None, 0) and store is None:
        return None
    if hosts is None or rank is None:
        missing = "--hosts" if hosts is None else "--host-rank"
        raise LaunchError(f"{missing} is missing; several hosts need --hosts H, --host-rank K and --store HOST:PORT")
    if not 0 <= rank < hosts:
        raise LaunchError(f"--host-rank is {rank} and must be from 0 to {hosts - 1}, as --hosts is {hosts}")
    if store is None and options.job_id is not None and options.directory is None:
        raise LaunchError("--directory is missing; without --store the hosts meet by a file in a directory they share")
    where = None if store is None else net.split(store)
    if (where is None and (store is not None or not by_file)) or (where is not None and not where[1]):
        raise LaunchError(
            f"--store is {store!r} and must be HOST:PORT, the address of host 0 and a free port there ([ADDRESS]:PORT for "
            f"IPv6); or give a new --job-id, the same on all hosts, and --directory, one that they share"
        )
    if options.directory is not None and where is None and not options.directory.is_dir():
        raise LaunchError(
            f"--directory {options.directory} is not a directory on this host; give one that all hosts share"
        )
    return Meeting(
        hosts=hosts,
        rank=rank,
        store=where,
        job=options.job_id or "only",
        directory=options.directory,
        address=options.address,
        target=options.target,
        names=tuple(host.name for host in listed),
        patience_s=options.patience_s,
    )


class Channel:
    """Exchanges JSON objects, one per line, over a connection to another host or process."""

    def __init__(self, connection: socket.socket) -> None:
        self.peer = ""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.peer = connection.getpeername()[0]
        self._connection, self._lines = connection, connection.makefile("rb")

    def send(self, message: Message) -> None:
        """Raises ``OSError``."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None) -> Message:
        """Raises ``TimeoutError``, and ``ConnectionError`` when the other end has closed the connection."""
        self._connection.settimeout(timeout_s)
        # no limit: the socket has a timeout, but where a host of qualify ends its process; the others send whole lines
        line = self._lines.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # another thread may be reading
        self._lines.close()
        self._connection.close()


# --- host 0 -----------------------------------------------------------------------------------------------------------


def with_secret(meeting: Meeting) -> Meeting:
    """Returns the meeting with a secret: a new one where the file can pass it to the other hosts, or there are none."""
    if meeting.secret is not None:
        return meeting
    return replace(meeting, secret=Secret.new() if meeting.uses_file or meeting.hosts == 1 else _NO_SECRET)


def listen(meeting: Meeting) -> socket.socket:
    """Returns the socket at which host 0 listens. Raises ``LaunchError``."""
    host, port = meeting.store or (meeting.address or net.own_address(meeting.target), 0)
    own = meeting.address or next(iter(net.of(host)), None)
    if own is None:
        raise LaunchError(f"--store: the name {host} has no address on this host; correct it")
    if net.is_loopback(own) and not net.names_this_machine(host):
        own = net.address_for(host, 0, meeting.target)
    try:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, port), family=family, backlog=1024)
    except OSError as error:
        where = net.joined(host, port)
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"--store is {where}, and another program uses port {port}; choose a free port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"--store is {where}, and {own} is not an address of this host, {socket.gethostname()}; run --host-rank 0 "
                f"on the host that has it, or give --address where {host} only forwards connections"
            ) from None
        raise LaunchError(f"host 0 cannot listen on {where}: {error.strerror or error}") from None


@contextlib.contextmanager
def announced(meeting: Meeting, listener: socket.socket) -> Iterator[None]:
    """Keeps the file with the address of host 0, where the hosts use it."""
    if not meeting.uses_file:
        yield
        return
    own, port = listener.getsockname()[:2]
    content = {"store": [own, port], "secret": given(meeting.secret).text}
    shared_file.write_json(meeting.file, content, indent=None, mode=0o600)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            meeting.file.unlink()


# --- every host -------------------------------------------------------------------------------------------------------


def reach(meeting: Meeting, listens: Callable[[str, Secret], int] = lambda *_: 0) -> Channel | str:
    """Connects to host 0; returns the reason where that fails for ``patience_s``.

    Args:
        meeting: the check.
        listens: returns the port at which this host takes connections of others, from its address and the secret.

    Raises:
        LaunchError: host 0 refuses this host.
    """
    deadline = time.monotonic() + meeting.patience_s
    while True:
        try:
            if meeting.uses_file:
                where, secret = _read(meeting.file)
                where = meeting.store or where
            else:
                where, secret = given(meeting.store), meeting.secret or _NO_SECRET
            try:
                return _join(where, meeting, secret, listens)
            except OSError as error:
                reason = f"{net.joined(*where)}: {error.strerror or error}"
        except (OSError, ValueError, KeyError) as error:
            reason = str(error)
        if time.monotonic() > deadline:
            check = f"check that {meeting.command} runs there"
            return f"host 0 is not reached within {meeting.patience_s:g} s ({reason}); {check}"
        time.sleep(_RETRY_S)


def _join(where: tuple[str, int], meeting: Meeting, secret: Secret, listens: Callable[[str, Secret], int]) -> Channel:
    connection = socket.create_connection(where, timeout=_CONNECT_S)
    try:
        own = meeting.address or connection.getsockname()[0]
        host_record = {"name": socket.gethostname(), "address": own, "port": listens(own, secret)}
        hello = {"rank": meeting.rank, "hosts": meeting.hosts, "job": meeting.job, "host_record": host_record}
        handshake.greet(connection, secret.of(MEET), hello, _WELCOME_S)
        channel = Channel(connection)
        answer = channel.receive(_WELCOME_S)
    except BaseException:
        connection.close()
        raise
    if "refused" in answer:
        channel.close()
        raise LaunchError(answer["refused"])
    return channel


def _read(file: Path) -> tuple[tuple[str, int], Secret]:
    with open(shared_file.open_file(file, os.O_RDONLY), "rb") as opened:  # it holds a secret
        content = json.load(opened)
    host, port = content["store"]
    return (host, port), Secret(content["secret"])
