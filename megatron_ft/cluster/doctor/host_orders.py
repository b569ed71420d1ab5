"""Orders to other processes: host 0 gives them to all hosts (:class:`Hub`), and each carries them out (:func:`serve`).

``doctor`` and ``qualify`` use it, and a host of ``qualify`` for its processes, too. Host 0 gives orders to itself over a
connection like any other host. Failures assumed: a host is missing, ends, freezes or is cut off at any moment. Every
order has a time limit, and a host that exceeds it is named and left out of the following orders.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from megatron_ft.cluster.doctor import meeting
from megatron_ft.cluster.doctor.meeting import Channel, Meeting, Message
from megatron_ft.errors import LaunchError
from megatron_ft.types import given
from megatron_ft.utils.auth.handshake import Door
from megatron_ft.utils.auth.secret import Secret

_POLL_S = 0.1
_HELLO_S = 5.0
_END_S = 60.0
"""Time in which this host's own part ends what it has started."""
_HOST_RECORD = {"name", "address", "port"}


# --- every host -------------------------------------------------------------------------------------------------------


class Part:
    """What one process can do for the one that gives it orders. The public methods that a subclass adds are the orders:
    they take the words of the order, and return the answer.

    Attributes:
        failures: errors of an order that are answered (``failed``); any other ends the process.
        lost_code: exit code when host 0 is lost.
        silent_s: longest time before the next order; None: no limit.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = ()
    lost_code: ClassVar[int] = 1
    silent_s: float | None = None

    def listens(self, own: str, secret: Secret) -> int:
        """Return the port at which this part takes connections of other hosts (0: none). It is called before each attempt
        to connect to host 0, with this host's address and the secret."""
        return 0

    def leave(self) -> None:
        """End what the part has started. Called once, after the last order."""


def attend(where: Meeting, part: Part) -> tuple[int, str]:
    """Carry out orders until host 0 ends the check. Returns the exit code and the last line; raises ``LaunchError``."""
    try:
        channel = meeting.reach(where, part.listens)
        return (part.lost_code, channel) if isinstance(channel, str) else serve(channel, part)
    finally:
        part.leave()


def serve(channel: Channel, part: Part) -> tuple[int, str]:
    """Carry out the orders of a connection until its other end says ``end``. Returns the exit code and the last line."""
    try:
        while True:
            order = channel.receive(limit_s := part.silent_s)
            if (do := order.pop("do")) == "end":
                return order["code"], order["line"]
            if do.startswith("_") or hasattr(Part, do) or not hasattr(part, do):
                raise LaunchError(
                    f"host 0 has given an order that is none: {do!r}; install the same version on all hosts"
                )
            try:
                answer = getattr(part, do)(**order)
            except part.failures as error:
                first = f"{type(error).__name__}: {error}".splitlines()[0]
                answer = {"failed": getattr(error, "in_full", first)}  # that of a ``Broken`` operation
            with contextlib.suppress(OSError):  # host 0 may have given this host up, and says so in its next message
                channel.send(answer)
    except TimeoutError:
        return part.lost_code, f"host 0 ({channel.peer}) has been silent for {limit_s:g} s: it is frozen or cut off"
    except OSError:
        return part.lost_code, f"host 0 ({channel.peer}) has ended before the check was complete; see its output"
    finally:
        channel.close()


# --- host 0 -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gathered(where: Meeting, makes: Callable[[], Part]) -> Iterator[Hub]:
    """Gather the hosts that come within the patience of the meeting; this one carries out orders in a thread of its own.

    ``makes`` returns its part, while other hosts connect already. Raises ``LaunchError``.
    """
    where = meeting.with_secret(where)
    listener = meeting.listen(where)
    hub = Hub(listener, where, given(where.secret))
    address, port = listener.getsockname()[:2]
    itself = replace(where, store=(address, port), secret_by_file=False, address=where.address or address)
    own: threading.Thread | None = None
    try:
        with meeting.announced(where, listener):
            own = threading.Thread(target=attend, args=(itself, makes()), name="megatron_ft-own-part", daemon=True)
            own.start()
            hub.wait(where.patience_s)
        yield hub
    finally:
        hub.close()
        if own is not None:
            own.join(_END_S)


class Hub:
    """Host 0's connections to all hosts.

    Attributes:
        address: at which it listens.
        host records: name, address and port of each host that has connected.
        gone: reason for each host that takes part no longer.
    """

    def __init__(self, listener: socket.socket, where: Meeting, secret: Secret) -> None:
        self.address: str = listener.getsockname()[0]
        self.host_records: dict[int, dict[str, Any]] = {}
        self.gone: dict[int, str] = {}
        self._where = where
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._open = True
        self._door = Door(listener, secret.of(meeting.MEET), self._welcome, "megatron_ft-doctor-hub", _HELLO_S)

    @property
    def present(self) -> list[int]:
        return sorted(self._channels.keys() - self.gone.keys())

    def wait(self, patience_s: float) -> None:
        """Waits until all hosts have connected, at most ``patience_s``. Hosts that connect later are refused."""
        end = time.monotonic() + patience_s
        while len(self._channels) < self._where.hosts and time.monotonic() < end:
            time.sleep(_POLL_S)
        with self._lock:
            self._open = False

    def ask(self, orders: Mapping[int, Message], timeout_s: float) -> dict[int, Message]:
        """Gives the orders and returns the answers. A host that does not answer within ``timeout_s`` is gone."""
        answers: dict[int, Message] = {}
        end = time.monotonic() + timeout_s
        for host in set(orders) & set(self.present):
            with self._leaving(host, timeout_s, orders[host]["do"]):
                self._channels[host].send(orders[host])
        for host in set(orders) & set(self.present):
            with self._leaving(host, timeout_s, orders[host]["do"]):
                answers[host] = self._channels[host].receive(max(_POLL_S, end - time.monotonic()))
        return answers

    def ask_all(self, order: Message, timeout_s: float) -> dict[int, Message]:
        return self.ask(dict.fromkeys(self.present, order), timeout_s)

    def end(self, code: int, line: str) -> None:
        """Tells all hosts the verdict and closes all connections."""
        for host in self.present:
            with contextlib.suppress(OSError):
                self._channels[host].send({"do": "end", "code": code, "line": line})
        self.close()

    def close(self) -> None:
        self._door.close()
        for channel in list(self._channels.values()):
            channel.close()

    @contextlib.contextmanager
    def _leaving(self, host: int, timeout_s: float, doing: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            why = f"its {self._where.command} has ended (order: {doing})"
            if isinstance(error, TimeoutError):
                why = f"no answer within {timeout_s:g} s (order: {doing}): it is frozen or cut off"
            self.gone[host] = why
            line = f"host 0 has continued without this host: {why}"
            with contextlib.suppress(OSError):
                self._channels[host].send({"do": "end", "code": 1, "line": line})

    def _welcome(self, connection: socket.socket, hello: Message) -> None:
        rank, host_record = hello["rank"], hello["host_record"]
        if not isinstance(rank, int) or not isinstance(host_record, dict) or not host_record.keys() >= _HOST_RECORD:
            raise ValueError("the first message has no rank or no host_record")
        channel = Channel(connection)
        with self._lock:
            refused = self._refusal(rank, hello)
            if not refused:
                self._channels[rank], self.host_records[rank] = channel, host_record
                try:
                    channel.send({"welcome": True})  # wait() takes the lock, so no order can precede it
                except OSError:  # the host connects again
                    del self._channels[rank], self.host_records[rank]
                    raise
        if refused:
            channel.send({"refused": refused})
            channel.close()

    def _refusal(self, rank: int, hello: Message) -> str:
        hosts, job = self._where.hosts, self._where.job
        if hello.get("job") != job:
            return f"--job-id is {hello.get('job')} on this host and {job} on host 0; give all hosts the same"
        if hello.get("hosts") != hosts or rank not in range(hosts):
            return f"--hosts is {hello.get('hosts')} on this host and {hosts} on host 0; give all hosts the same"
        if rank in self._channels:
            host_record = self.host_records[rank]
            return f"--host-rank {rank} is taken by {host_record['name']} ({host_record['address']}); give each host its own"
        return "" if self._open else "host 0 has begun without this host; start it on all hosts at the same time"
