"""The control store as the run sees it: JSON under the run's id, logs without holes, and a memory that can be lost.

It is used at the start, at the end, and when an epoch changes; fault-free steps never touch it. Every thread that uses
it needs its own client (:meth:`ControlStore.clone`).

Failures it assumes: those of :mod:`.base`. A store that came back empty would let epoch 0 begin again, so the run
writes a marker (``run/<run id>``) that names the store's *memory*. Every new connection reads it before it is used; a
process that finds it missing or different gets ``StoreLostMemory`` until it has called :meth:`ControlStore.restore`.

Any process that reaches the store's port can write to it, so every value carries an HMAC with the run's secret over its
key and itself. A value without a valid HMAC is *forged*: it counts as absent, and is reported once for each key
(:meth:`ControlStore.when_forged`). A compare-and-set replaces a forged value by its own, atomically. In the notice log
a forged entry stays, because readers may have passed it already; it reads as a notice without content.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_ft.config.store_address import EtcdAddress, is_etcd
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.key_lifetimes import Floor
from megatron_ft.run.store.base import Store, StoreConflict, StoreGone, StoreLostMemory, encode, patient
from megatron_ft.run.store.claim_log import Locator, split
from megatron_ft.run.store.etcd_store import EtcdStore
from megatron_ft.run.store.tcp_store import TcpStore
from megatron_ft.utils.auth import secret as secrets
from megatron_ft.utils.auth.secret import MAC_BYTES, Secret

_log = logging.getLogger(__name__)

_FLOOR = "floor"
NOTICES = "notice"
"""The log of everything that may end an epoch: deaths seen by agents, epochs broken at some group."""

_SAYS_NOTHING = signals.to_json(signals.ForgedNotice())

Address = tuple[str, int] | str | Locator
"""``(host, port)`` or ``"host:port"`` of an embedded store, or an etcd's address (``store_address``). A ``Locator`` for
an embedded store that another host may take over."""


_FORGED_LOOK_S = 0.05
_PUT_TRIES = 100
_MOST_FORGED = 1000
"""The most keys that are reported as forged; later ones are ignored without a report, so that they cost no memory."""


class _Memory:
    """The shared knowledge of all clients of one run in one process: the store's memory that it has agreed to, how far
    each log is known to be filled, and the forged keys that it has reported."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.filled: tuple[str | None, dict[str, int]] = (None, {})
        self.forged: set[str] = set()
        self.tell_forged: Callable[[str], None] = lambda key: None
        self.lock = threading.Lock()


class ControlStore:
    """JSON values under string keys, all prefixed with the run id, so that two runs can never read each other's keys.

    Large because it has a method for each operation on keys; all share the check that the store still remembers the run.

    Args:
        address: of the store, see :data:`Address`.
        run_id: id of the run; ``run/<run_id>`` is its marker.
        timeout_s: seconds of the store's silence after which a call raises ``StoreSilent``. A new ControlStore waits
            that long for a store to appear.
        secret: the run's; by default that of this process, which the launcher has started.

    Every method raises ``StoreGone``, ``StoreSilent`` or ``StoreLostMemory``; :func:`.base.patient` waits until they pass.
    """

    def __init__(
        self,
        address: Address,
        run_id: str,
        timeout_s: float,
        client: Store | None = None,
        memory: _Memory | None = None,
        secret: Secret | None = None,
    ) -> None:
        self.address, self.run_id, self.timeout_s = address, run_id, timeout_s
        self._secret = secret or secrets.here()
        self._mac_key = self._secret.of("store", run_id)
        self._memory = memory or _Memory()
        self._tries: dict[str, tuple[str | None, int]] = {}
        self._only: str | None = None
        if client is not None:
            self._client = client
            return
        self._client = open_store(address, timeout_s, self._verify)
        patient(lambda: self._client.get(self._marker), patience_s=timeout_s)

    def clone(self) -> ControlStore:
        """Return a client of the same store with its own connection, which is made at the first use."""
        return ControlStore(self.address, self.run_id, self.timeout_s, self._client.clone(), self._memory, self._secret)

    def close(self) -> None:
        self._client.close()

    def cut(self) -> None:
        """End every wait of this client, now and later. Any thread may call it."""
        self._client.cut()

    # --- keys ---------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        """Write a key that has one owner. A failed call may take effect later, even after the next ``set``."""
        self._client.set(self._key(key), self._wrapped(self._key(key), value))

    def get(self, key: str) -> Any | None:
        """Return the value, or None when the key does not exist, without waiting for it."""
        return self._value(self._key(key), self._client.get(self._key(key)))

    def create(self, key: str, value: Any) -> Any:
        """Compare-and-set: write ``value`` unless the key exists; return the value that stands now."""
        return self.claim(key, value)[0]

    def claim(self, key: str, value: Any, by: str | None = None) -> tuple[Any, bool]:
        """Compare-and-set: return the value that stands now, and whether this call wrote it.

        ``by`` distinguishes equal values. A retry of a failed call passes the same ``by``, so that an earlier attempt
        that took effect after all counts as its own. By default the call has an id of its own.
        """
        by = by or uuid.uuid4().hex
        name = self._key(key)
        text = self._wrapped(name, value, by)
        if self._is_notice(name):
            standing = self._open(name, self._client.create(name, text)) or {"value": _SAYS_NOTHING}
        else:
            standing = self._put(self._client, name, text)
        return standing["value"], standing.get("by") == by

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Wait until the key exists and return its value; None after ``timeout_s``."""
        name, deadline = self._key(key), time.monotonic() + timeout_s
        while True:
            text = self._client.wait(name, max(0.0, deadline - time.monotonic()))
            if text is None or (found := self._value(name, text)) is not None:
                return None if text is None else found
            if (left_s := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(_FORGED_LOOK_S, left_s))  # the store does not wait where a forged value stands

    def _put(self, client: Store, name: str, text: str) -> dict[str, Any]:
        """Compare-and-set of a whole key; return what stands there now. A forged value, never used, is replaced."""
        for _ in range(_PUT_TRIES):
            standing = client.create(name, text)
            if (found := self._open(name, standing)) is not None:
                return found
            client.swap(name, standing, text)
        raise StoreGone(f"control store {client.name}: another process writes forged values to {name} again and again")

    # --- collections --------------------------------------------------------------------------------------------------

    def add(self, collection: str, member: str, value: Any) -> None:
        """Write a member's value. It may be repeated or take effect late: a member has one value only."""
        name = self._key(collection)
        self._client.add(name, member, self._wrapped(f"{name}/{member}", value))

    def members(self, collection: str, only: Collection[str] | None = None) -> dict[str, Any]:
        """Return what all members, or ``only`` these, have written so far, in one request."""
        name, found = self._key(collection), {}
        for member, text in self._client.members(name):
            if only is None or member in only:
                opened = self._open(f"{name}/{member}", text)
                if opened is not None:
                    found[member] = opened["value"]
        return found

    # --- logs ---------------------------------------------------------------------------------------------------------

    def append(self, log: str, value: Any, by: str | None = None) -> int:
        """Add an entry to a log without holes: entry k exists only if all before it do. Returns its index.

        A retry of a failed call passes the same ``by``: the entry is then there once, in whatever order attempts take
        effect. Several processes that pass the same ``by`` append the same value; it is there once, unless one of them
        has read that entry already.
        """
        by = by or uuid.uuid4().hex
        begun_at = max(self._known(log), self.floor().index)
        # The index where the first attempt began: entries known before it are not of this call; an entry that another
        # thread has read since may be.
        begun = self._tries.get(by)
        if begun is None or begun[0] != self._memory.id:
            begun = self._tries[by] = (self._memory.id, begun_at)
        memory, index = begun
        while True:
            if not self.claim(f"{log}/{index}", value, by)[1]:
                index += 1
            # An entry below the floor was deleted and written anew just now: no process would read it there.
            elif index >= (floor := self.floor().index):
                break
            else:
                index = floor
        self._tries.pop(by)
        self._saw(log, index, memory)
        return index

    def entry(self, log: str, index: int, timeout_s: float) -> Any | None:
        """Wait for entry ``index`` of a log; None after ``timeout_s``."""
        memory = self._memory.id
        found = self.wait(f"{log}/{index}", timeout_s)
        if found is not None:
            self._saw(log, index, memory)
        return found

    def _known(self, log: str) -> int:
        """Return the least number of entries that the log is known to have; in a run of weeks it has thousands."""
        memory, filled = self._memory.filled
        return filled.get(log, 0) if memory == self._memory.id else 0

    def _saw(self, log: str, index: int, memory: str | None) -> None:
        if memory == self._memory.id:  # otherwise the entry was of a log that is forgotten by now
            of, filled = self._memory.filled
            others = filled if of == memory else {}
            self._memory.filled = (memory, {**others, log: max(others.get(log, 0), index + 1)})

    # --- what may be gone ---------------------------------------------------------------------------------------------

    def floor(self) -> Floor:
        """Return the bound below which views and entries of the notice log may have been deleted."""
        return self._floor(self._client.get(self._key(_FLOOR)))

    def raise_floor(self, floor: Floor) -> Floor:
        """Allow the deletion of everything below ``floor``; the floor is never lowered. Returns the floor that stands.

        A call that takes effect late changes nothing: its starting floor does not come again.
        """
        standing = self._client.get(self._key(_FLOOR))
        while (old := self._floor(standing)) != (
            new := Floor(max(old.epoch, floor.epoch), max(old.index, floor.index))
        ):
            if new.index > floor.index:
                return old  # another process has kept what matters of more entries than this one
            name = self._key(_FLOOR)
            standing = self._client.swap(name, standing, self._wrapped(name, vars(new)))
        return old

    def _floor(self, text: str | None) -> Floor:
        found = self._value(self._key(_FLOOR), text)
        return Floor() if found is None else Floor(**found)

    def listed(self) -> list[str]:
        """Return all keys of this run except its marker; an etcd lists the members of a collection one by one."""
        prefix = self._key("")
        return [key.removeprefix(prefix) for key in self._client.keys(prefix)]

    def delete(self, keys: Collection[str]) -> None:
        """Remove these keys for good. Repeated calls, and keys that do not exist, are no error."""
        self._client.delete([self._key(key) for key in keys])

    def forget(self) -> None:
        """Remove all keys of this run, and its marker, when no process will ask for them any more."""
        self.delete(self.listed())
        self._client.delete([self._marker])

    # --- process groups -----------------------------------------------------------------------------------------------

    def rendezvous(self, prefix: str) -> Any:
        """Return a torch store for building a process group, on a connection of its own.

        The call is repeated for ``timeout_s``: in a recovery no caller would repeat it, and a store that dies just then
        is back within milliseconds.
        """
        return patient(lambda: self._client.rendezvous(self._key(prefix)), patience_s=self.timeout_s)

    # --- the store's memory -------------------------------------------------------------------------------------------

    @property
    def memory(self) -> str | None:
        """The id of the memory that this process agreed to; None: no marker seen. Logs begin again at 0 when it changes."""
        return self._memory.id

    @contextmanager
    def only_in(self, memory: str | None) -> Iterator[None]:
        """Raise ``StoreLostMemory`` for calls inside this context if the store has another memory than this one."""
        self._only = memory
        try:
            yield
        finally:
            self._only = None

    def begin(self) -> None:
        """Write the run's marker unless it is there; the launcher does this before it writes anything else."""
        self._memory.id = self._mark(self._client)

    def check_begun(self) -> None:
        """Raise ``StoreLostMemory`` when the store does not know this run; for a process that joins it.

        A client that connected before the run was begun knows its memory from here on.
        """
        self._verify(self._client.get)
        if self._memory.id is None:
            raise self._lost(None)

    def restore(
        self,
        epoch: int | None = None,
        view: Any = None,
        own: Mapping[str, Any] | None = None,
        also: Callable[[ControlStore], None] = lambda store: None,
    ) -> None:
        """Rebuild a store that came back empty, as far as this process knows it; any number of survivors may do so. The
        clients of this process go on with it only when all is written: it may be lost again meanwhile.

        Args:
            epoch: of the view this process follows; None for a process that follows none (an agent).
            view: that view, as the store held it.
            own: keys that only this process writes and that still matter.
            also: writes the rest, members of collections and notices, to the client that it gets.

        While ``view/<epoch>`` stands, the groups that follow it can agree on no older epoch; who knows an older view finds
        this one by the floor. Raises ``StoreConflict`` when another view stands there: a group that had missed this one
        was faster, and the run would split.
        """
        client = open_store(self.address, self.timeout_s, None)
        fresh = ControlStore(self.address, self.run_id, self.timeout_s, client, secret=self._secret)
        try:
            memory = fresh._memory.id = self._mark(client)
            if epoch is not None:
                standing = fresh.create(f"view/{epoch}", view)
                mine = json.loads(json.dumps(view))
                if not isinstance(standing, dict) or any(standing.get(name) != value for name, value in mine.items()):
                    raise StoreConflict(
                        f"the control store {client.name} came back empty and was rebuilt with another view of epoch "
                        f"{epoch} than this group follows; stop this group, or run etcd, which forgets nothing"
                    )
                fresh.raise_floor(Floor(epoch))
            for key, value in (own or {}).items():
                fresh.set(key, value)
            also(fresh)
        finally:
            client.close()
        self._memory.id = memory

    def _mark(self, client: Store) -> str:
        """Return the memory that the run's marker names. A forged marker is replaced by one for the memory known here."""
        standing, known = client.get(self._marker), self._memory.id
        is_forged = known is not None and standing is not None and self._open(self._marker, standing) is None
        text = self._wrapped(self._marker, known if is_forged else uuid.uuid4().hex)
        return self._put(client, self._marker, text)["value"]

    def _lost(self, standing: str | None) -> StoreLostMemory:
        what = "knows no run" if standing is None else "was restarted empty and is being rebuilt for run"
        return StoreLostMemory(
            f"the control store {self._client.name} {what} {self.run_id}; it is rebuilt by the groups that live, and if "
            f"none does the run has to be started again"
        )

    def _verify(self, get: Callable[[str], str | None]) -> None:
        marker = get(self._marker)
        standing = self._value(self._marker, marker)
        if self._memory.id is None:
            self._memory.id = standing
        elif standing != self._memory.id or self._only not in (None, standing):
            raise self._lost(standing)

    @property
    def _marker(self) -> str:
        return f"run/{self.run_id}"

    def _key(self, key: str) -> str:
        return f"{self.run_id}/{key}"

    # --- authentication -----------------------------------------------------------------------------------------------

    def when_forged(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with every key at which a forged value is found, once for each key, in any thread."""
        self._memory.tell_forged = tell

    def _wrapped(self, name: str, value: Any, by: str | None = None) -> str:
        """Return the value as the store holds it under the full key ``name``: an HMAC, and JSON."""
        text = json.dumps({"value": value} if by is None else {"value": value, "by": by})
        return f"{self._mac(name, text.encode())} {text}"

    def _open(self, name: str, text: str) -> dict[str, Any] | None:
        """Return the JSON of what stands at ``name``; None when it is forged."""
        mac, _, content = text.partition(" ")
        raw = encode(content)
        if not hmac.compare_digest(encode(mac), self._mac(name, raw).encode()):
            self._found_forged(name)
            return None
        return json.loads(raw)

    def _value(self, name: str, text: str | None) -> Any | None:
        if text is None:
            return None
        opened = self._open(name, text)
        if opened is None:
            return _SAYS_NOTHING if self._is_notice(name) else None
        return opened["value"]

    def _is_notice(self, name: str) -> bool:
        return name.startswith(self._key(f"{NOTICES}/"))

    def _mac(self, name: str, raw: bytes) -> str:
        return self._mac_key.mac(encode(name), raw)[:MAC_BYTES].hex()

    def _found_forged(self, name: str) -> None:
        memory, key = self._memory, ascii(name.removeprefix(f"{self.run_id}/"))[1:-1][:120]
        with memory.lock:
            if key in memory.forged or len(memory.forged) >= _MOST_FORGED:
                return
            memory.forged.add(key)
        _log.info(f"control store: the value of {key} is forged and ignored (docs/security.md)")
        memory.tell_forged(key)


def open_store(address: Address, timeout_s: float, verify: Callable[..., None] | None = None) -> Store:
    """Return the client for that kind of address."""
    if isinstance(address, str):
        if is_etcd(address):
            return EtcdStore(EtcdAddress.parse(address), timeout_s, verify)
        address = split(address)
    return TcpStore(address, timeout_s, verify)
