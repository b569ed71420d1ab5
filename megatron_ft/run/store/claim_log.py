"""The claim log of a run (``core.lifecycle.store_failover``) as files of the run directory, and the clients that follow it.

``RUN_DIR/store/claim-<run id>-<number>.json`` is created exactly once, by a hard link to a complete file, and never
changes. Every claim carries an HMAC with the run's secret, over itself and the HMAC of the claim before it. The run id
is part of the name, so that the claims of an earlier run do not count. A process that no longer finds the newest claim
it has read makes no claim and reads none: the run directory was given to another run, or restored from a backup, while
the process slept.

A process has one :class:`Locator`. All of its clients of the embedded store connect to the address of the newest claim
that the locator has read. When it reads a claim with another address, it cuts their connections, so that a thread that
waits on the old store moves, too, also when the old store still answers.

Failures it assumes: the file system is away or hangs for any time (every call ends within ``timeout_s``; a creation
that did not end in time may take effect later, and is then found by the next look).
"""

from __future__ import annotations

import hmac
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from megatron_ft import codec
from megatron_ft.config.rank_env import CLAIMS
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim, Seat
from megatron_ft.errors import RunStopped
from megatron_ft.run.store.base import StoreGone
from megatron_ft.utils import shared_file
from megatron_ft.utils.auth.secret import Secret
from megatron_ft.utils.vital_thread import VitalThread

TOLD = "claim"
"""The file beside the ranks' pulses in which their agent says which claim is the newest."""
_TIMEOUT_S = 5.0
_LOOK_S = 0.1
_READ_S, _LATE_S = 0.5, 2.0
"""While :meth:`Locator.answers` is called, the log is read at this interval; a read that takes longer has not answered."""
_ASKED_S = 10.0
"""Seconds after the last call of :meth:`Locator.answers` until the log is not read for it any more."""

Answer = TypeVar("Answer")


class LogAway(StoreGone):
    """The claim log cannot be read or written now."""


class Fenced(RunStopped):
    """A claim leaves this seat out: another part of the run goes on without it."""


class Log:
    """The claim log of run ``run_id``. ``timeout_s`` bounds every call. All methods raise ``LogAway``; any thread."""

    def __init__(self, run_dir: Path, run_id: str, secret: Secret, timeout_s: float = _TIMEOUT_S) -> None:
        self.run_id = run_id
        self._directory, self._timeout_s = run_dir / CLAIMS, timeout_s
        self._key = secret.of("claim", run_id)
        self._claims: tuple[Claim, ...] = ()
        self._last_mac = ""
        """The MAC of the newest claim in ``_claims``."""
        self._stuck: threading.Thread | None = None
        self._lock = threading.Lock()

    def read(self) -> tuple[Claim, ...]:
        """Return all claims that exist."""
        return self._bounded(self._read)

    def create(self, claim: Claim) -> bool:
        """Make that claim, which follows the newest one that was read. Return False when a claim of that number exists."""
        text = json.dumps(codec.encode(claim), sort_keys=True)

        def make() -> bool:
            if claim.number == 0:
                shared_file.make_directory(self._directory)
            elif len(self._read()) != claim.number:
                return False
            raw = {"claim": text, "mac": self._mac(text, self._last_mac)}
            return shared_file.create(self._path(claim.number), json.dumps(raw) + "\n")

        return self._bounded(make)

    def _read(self) -> tuple[Claim, ...]:
        try:
            there = set(os.listdir(self._directory))  # makes a network file system look at the directory
        except FileNotFoundError:
            there = set()
        if self._claims and (newest := self._path(len(self._claims) - 1)).name not in there:
            raise LogAway(
                f"{newest} is gone: {self._directory.parent} was given to another run or restored from a backup; "
                "this run makes no claim there any more"
            )
        while (path := self._path(len(self._claims))).name in there:
            claim, self._last_mac = self._open(path, shared_file.read_record(path), len(self._claims))
            self._claims += (claim,)
        return self._claims

    def _open(self, path: Path, data: bytes, number: int) -> tuple[Claim, str]:
        """Return the claim in that file, and its HMAC."""
        try:
            raw = json.loads(data)
            text, mac = raw["claim"], raw["mac"]
            if hmac.compare_digest(mac, self._mac(text, self._last_mac)):
                claim = codec.decode(Claim, json.loads(text))
                if (claim.number, claim.run_id) == (number, self.run_id):
                    return claim, mac
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise LogAway(
            f"{path} is damaged or forged, or follows another claim than the one that was read here (docs/security.md); "
            "no claim after it counts until it is deleted"
        )

    def _bounded(self, operation: Callable[[], Answer]) -> Answer:
        """Carry out a call in a thread that is left behind when the file system hangs; at most one such thread exists."""
        done: Future[Answer] = Future()

        def work() -> None:
            try:
                done.set_result(operation())
            except Exception as error:  # the waiting thread raises it
                done.set_exception(error.with_traceback(None))

        with self._lock:
            if self._stuck is not None and self._stuck.is_alive():
                raise LogAway(f"the file system of {self._directory} has not answered since it was asked last")
            thread = threading.Thread(target=work, name="megatron_ft-claims", daemon=True)
            thread.start()
            thread.join(self._timeout_s)
            self._stuck = thread if thread.is_alive() else None
        if not done.done():
            raise LogAway(f"the file system of {self._directory} has not answered for {self._timeout_s:g} s")
        try:
            return done.result(0)
        except OSError as error:
            raise LogAway(f"the claim log in {self._directory} cannot be used: {error}") from None

    def _path(self, number: int) -> Path:
        return self._directory / f"claim-{self.run_id}-{number:06d}.json"

    def _mac(self, text: str, before: str) -> str:
        return self._key.mac((before + text).encode(errors="surrogateescape")).hex()


class Locator:
    """The address of a run's embedded store, for all clients of one process.

    Args:
        log: the claim log of the run.
        address: the store's address, ``HOST:PORT``, as long as no claim has been read.
    """

    def __init__(self, log: Log, address: str) -> None:
        self._log, self._text = log, address
        self.claims: tuple[Claim, ...] = ()
        """The claims read so far; replaced, never changed."""
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._asked = self._asked_since = self._read_at = -float("inf")

    @property
    def text(self) -> str:
        """The address as ``HOST:PORT``."""
        return self._text

    @property
    def address(self) -> tuple[str, int]:
        return split(self._text)

    @property
    def newest(self) -> int:
        """The number of the newest claim that was read; -1 for none."""
        return len(self.claims) - 1

    def attach(self, client: Any) -> None:
        """Call ``client.moved()``, in any thread, after :attr:`address` has changed."""
        with self._lock:
            self._clients.add(client)

    def poll(self) -> bool:
        """Read the log. Returns whether there was a new claim. Raises ``LogAway``."""
        began = time.monotonic()
        claims = self._log.read()
        with self._lock:
            self._read_at = max(began, self._read_at)
            if len(claims) <= len(self.claims):
                return False
            moved = claims[-1].address != self._text
            self.claims, self._text = claims, claims[-1].address
            clients = list(self._clients) if moved else []
        for client in clients:
            client.moved()
        return True

    def answers(self) -> bool:
        """Return whether the log was read to its end lately. The thread of :meth:`follow` reads it while this is called.

        Other processes that have not read of a new store cannot be expected there while the directory hangs.
        """
        now = time.monotonic()
        if now - self._asked > _ASKED_S:
            self._asked_since = now
        self._asked = now
        return now - max(self._asked_since, self._read_at) <= _LATE_S

    def _is_read_due(self) -> bool:
        now = time.monotonic()
        return now - self._asked <= _ASKED_S and now - self._read_at >= _READ_S

    def create(self, claim: Claim) -> bool:
        """Make that claim, and read the log. Returns whether this call made it. Raises ``LogAway``."""
        made = self._log.create(claim)
        self.poll()
        return made

    def check(self, seat: Seat) -> None:
        """Raise ``Fenced`` when a claim that was read leaves ``seat`` out."""
        for claim in self.claims:
            if seat in claim.fenced:
                which = f"claim {claim.number} of host {claim.by}"
                raise Fenced(f"group {seat[0]} is left out of the run by {which}: {claim.reason}")

    def fence(self, seats: Collection[Seat], own: Seat, by: int, reason: str, since: int) -> tuple[Claim, ...]:
        """Read the log to its end; when it holds no claim from number ``since`` on that fences a seat, make a claim
        that fences those of ``seats`` that no claim fences yet.

        In the other case, returns the claims from ``since`` on: the caller decides anew with them. Raises ``LogAway``,
        and ``Fenced`` when a claim leaves ``own`` out.
        """
        while True:
            self.poll()
            self.check(own)
            claims = self.claims
            if any(claim.fenced for claim in claims[since:]):
                return claims[since:]
            missing = frozenset(seats) - store_failover.fenced(claims)
            if not missing:
                return ()
            if not claims:
                raise LogAway("the claim log holds no claim of this run")
            if self.create(store_failover.fence(claims[-1], missing, by, reason)):
                return ()

    def follow(self, told: Path, heard: Callable[[], None] = lambda: None) -> None:
        """Start a thread that reads the log whenever the agent has written a greater number to ``told``, and while
        :meth:`answers` is called."""

        def run() -> None:
            pause = threading.Event()
            # no limit: a thread of its own; whoever has started it tells it to stop
            while not pause.wait(_LOOK_S):
                try:
                    if (read_told(told) > self.newest or self._is_read_due()) and self.poll():
                        heard()
                except LogAway:
                    continue

        VitalThread(run, "megatron_ft-claims-follower").start()


def read_told(path: Path) -> int:
    """Return the number in such a file; -1 while there is none."""
    try:
        return int(shared_file.read_record(path))
    except (OSError, ValueError):
        return -1


def split(address: str) -> tuple[str, int]:
    """Return ``HOST:PORT`` as a pair."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
