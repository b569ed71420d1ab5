"""The control store: a few keys with compare-and-set, hosted outside the ranks by the first agent.

It is used at the start, at the end, and when an epoch changes; fault-free steps never touch it. Every thread that talks
to it needs its own client (:meth:`ControlStore.clone`): a TCPStore client serialises its calls, and one of them may wait.

Failures it assumes: the host is gone (calls raise :class:`StoreError` at once) or answers late. A frozen host blocks the
calling thread; the training thread only calls it while a recovery needs it.
"""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ft.errors import LaunchError, StoreError

NOTICES = "notice"
"""Log of everything that may end an epoch: deaths seen by agents, epochs broken at some group."""


class ControlStore:
    """JSON values under string keys, all prefixed with the run id, so that two runs can never read each other."""

    def __init__(self, address: tuple[str, int], run_id: str, timeout_s: float, client: Any = None) -> None:
        self.address, self.run_id, self.timeout_s = address, run_id, timeout_s
        if client is None:
            client = self._connect()
        self._client = client

    def _connect(self) -> Any:
        host, port = self.address
        try:
            return dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s)
            )
        except RuntimeError as error:
            raise StoreError(f"control store {host}:{port} does not answer ({_first_line(error)})") from None

    def clone(self) -> ControlStore:
        """The same store over a connection of its own."""
        return ControlStore(self.address, self.run_id, self.timeout_s, self._client.clone())

    def set(self, key: str, value: Any) -> None:
        with self._errors():
            self._client.set(self._key(key), json.dumps(value))

    def get(self, key: str) -> Any | None:
        """The value, or None when the key does not exist. Never waits for it."""
        with self._errors():
            if not self._client.check([self._key(key)]):
                return None
            return json.loads(self._client.get(self._key(key)))

    def create(self, key: str, value: Any) -> Any:
        """Compare-and-set: write ``value`` unless the key exists; return what stands there now."""
        with self._errors():
            return json.loads(self._client.compare_set(self._key(key), "", json.dumps(value)))

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Wait until the key exists and return its value; None after ``timeout_s``."""
        try:
            with self._errors():
                self._client.wait([self._key(key)], timedelta(seconds=timeout_s))
        except StoreTimeout:
            return None
        return self.get(key)

    def append(self, log: str, value: Any) -> int:
        """Add an entry to a log without holes: entry k exists only if all before it do. Returns its index."""
        index = 0
        marked = {"value": value, "by": uuid.uuid4().hex}
        while self.create(f"{log}/{index}", marked) != marked:
            index += 1
        return index

    def entry(self, log: str, index: int, timeout_s: float) -> Any | None:
        """Wait for entry ``index`` of a log; None after ``timeout_s``."""
        marked = self.wait(f"{log}/{index}", timeout_s)
        return None if marked is None else marked["value"]

    def rendezvous(self, prefix: str) -> Any:
        """A torch store for building a process group, on a connection of its own."""
        with self._errors():
            return dist.PrefixStore(self._key(prefix), self._client.clone())

    def _key(self, key: str) -> str:
        return f"{self.run_id}/{key}"

    def _errors(self) -> _StoreErrors:
        return _StoreErrors(self.address)


class StoreTimeout(StoreError):
    """The key did not appear in time."""


class _StoreErrors:
    """Turns torch's store exceptions into ours, and a timeout into :class:`StoreTimeout`."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        first = _first_line(error)
        if isinstance(error, dist.DistStoreError) and "imeout" in first:
            raise StoreTimeout(first) from None
        host, port = self.address
        raise StoreError(
            f"control store {host}:{port} is gone ({first}); its agent has ended or the network to it is cut. "
            f"Start the run again"
        ) from None


def host(bind: str, port: int) -> tuple[Any, int]:
    """Start a store server in this process; returns (server, port). ``port`` 0 takes a free one.

    Raises ``LaunchError`` when the port is in use. The server lives in a thread of torch's, until the object is dropped.
    """
    try:
        server = dist.TCPStore(bind, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise LaunchError(
                f"port {port} is in use by another program; give another --port, or leave it out to take a free one"
            ) from None
        raise LaunchError(f"the control store cannot listen on {bind}:{port}: {_first_line(error)}") from None
    return server, server.port


def _first_line(error: BaseException) -> str:
    """torch appends a C++ stack to its messages; only the first line is for people."""
    return (str(error).splitlines() or [type(error).__name__])[0]
