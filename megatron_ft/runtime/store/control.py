"""The control store as the run sees it: JSON under the run's id, logs without holes, and a memory that can be lost.

It is used at the start, at the end, and when an epoch changes; fault-free steps never touch it. Every thread that talks
to it needs its own client (:meth:`ControlStore.clone`).

Failures it assumes: those of :mod:`.port`. A store that came back empty would let epoch 0 begin again, so the run leaves
a marker (``run/<run id>``) that names the store's *memory*; every new connection looks for it before it is used, and
whoever finds it missing or different gets ``StoreLostMemory`` until this process has called :meth:`ControlStore.restore`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_ft.runtime.store.etcd import EtcdStore
from megatron_ft.runtime.store.port import Store, StoreConflict, StoreLostMemory, patient
from megatron_ft.runtime.store.tcp import TcpStore

NOTICES = "notice"
"""Log of everything that may end an epoch: deaths seen by agents, epochs broken at some group."""

ETCD = "etcd://"
OWN_ETCD = "etcd+own://"
"""One that the run has started: hosts that are lost are replaced in it, so clients ask it who its nodes are."""

Address = tuple[str, int] | str
"""``(host, port)`` or ``"host:port"`` of an embedded store, or ``"etcd://host:port,host:port,..."``;
``"etcd+own://..."`` is the run's own."""


class _Memory:
    """What all clients of one run in one process know: which memory of the store it has agreed to, and how far each log is
    known to be filled."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.filled: tuple[str | None, dict[str, int]] = (None, {})


class ControlStore:
    """JSON values under string keys, all prefixed with the run id, so that two runs can never read each other.

    Args:
        address: where the store is, see :data:`Address`.
        run_id: of the run; ``run/<run_id>`` is its marker.
        timeout_s: how long any call may find the store silent before it raises ``StoreSilent``. A new ControlStore waits
            that long for a store to appear.

    Every method raises ``StoreGone``, ``StoreSilent`` or ``StoreLostMemory``; :func:`.port.patient` waits them out.
    """

    def __init__(
        self, address: Address, run_id: str, timeout_s: float, client: Store | None = None, memory: _Memory | None = None
    ) -> None:
        self.address, self.run_id, self.timeout_s = address, run_id, timeout_s
        self._memory = memory or _Memory()
        self._tries: dict[str, tuple[str | None, int]] = {}
        if client is not None:
            self._client = client
            return
        self._client = open_store(address, timeout_s, self._verify)
        patient(lambda: self._client.get(self._marker), patience_s=timeout_s)

    def clone(self) -> ControlStore:
        """The same store over a connection of its own, which is made when first used."""
        return ControlStore(self.address, self.run_id, self.timeout_s, self._client.clone(), self._memory)

    def close(self) -> None:
        self._client.close()

    def cut(self) -> None:
        """From any thread: whoever waits there waits no more, and nobody will."""
        self._client.cut()

    # --- keys ---------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        """Write. For keys with one owner; a call that failed may be carried out later, even after the next ``set``."""
        self._client.set(self._key(key), _wrapped(value))

    def get(self, key: str) -> Any | None:
        """The value, or None when the key does not exist. Never waits for it."""
        return _value(self._client.get(self._key(key)))

    def create(self, key: str, value: Any) -> Any:
        """Compare-and-set: write ``value`` unless the key exists; return what stands there now."""
        return self.claim(key, value)[0]

    def claim(self, key: str, value: Any, by: str | None = None) -> tuple[Any, bool]:
        """Compare-and-set: (what stands there now, whether this call put it there).

        ``by`` tells equal values apart; pass the same again to retry a call that failed: one that took effect after all
        has won. Left out, the call has an id of its own.
        """
        by = by or uuid.uuid4().hex
        standing = json.loads(self._client.create(self._key(key), _wrapped(value, by)))
        return standing["value"], standing.get("by") == by

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Wait until the key exists and return its value; None after ``timeout_s``."""
        return _value(self._client.wait(self._key(key), timeout_s))

    # --- collections --------------------------------------------------------------------------------------------------

    def add(self, collection: str, member: str, value: Any) -> None:
        """Write a member's value; as often as it takes, and it may take effect late: a member has one value only."""
        self._client.add(self._key(collection), member, _wrapped(value))

    def members(self, collection: str, only: Collection[str] | None = None) -> dict[str, Any]:
        """What all members have written so far, or ``only`` these, asked for at once."""
        found = self._client.members(self._key(collection))
        return {member: _value(text) for member, text in found.items() if only is None or member in only}

    # --- logs ---------------------------------------------------------------------------------------------------------

    def append(self, log: str, value: Any, by: str | None = None) -> int:
        """Add an entry to a log without holes: entry k exists only if all before it do. Returns its index.

        ``by``: pass the same again to retry a call that failed; the entry is there once, whatever took effect when. Several
        processes that pass the same say the same thing, and it is there once, unless one has read that entry already.
        """
        by = by or uuid.uuid4().hex
        # Where the first attempt began: entries that were known by then are not of this call, one that another thread
        # has read since may be.
        begun = self._tries.get(by)
        if begun is None or begun[0] != self._memory.id:
            begun = self._tries[by] = (self._memory.id, self._known(log))
        memory, index = begun
        while not self.claim(f"{log}/{index}", value, by)[1]:
            index += 1
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
        """So many entries of it there are at least; a run of weeks has thousands."""
        memory, filled = self._memory.filled
        return filled.get(log, 0) if memory == self._memory.id else 0

    def _saw(self, log: str, index: int, memory: str | None) -> None:
        if memory == self._memory.id:  # else the entry was of a log that is forgotten by now
            of, filled = self._memory.filled
            others = filled if of == memory else {}
            self._memory.filled = (memory, {**others, log: max(others.get(log, 0), index + 1)})

    # --- signs of life ------------------------------------------------------------------------------------------------

    def beat(self, name: str, ttl_s: float) -> None:
        """Say that the owner of ``name`` lives; to be repeated at least every third of ``ttl_s`` (etcd: 2 s or more)."""
        self._client.beat(self._key(f"beat/{name}"), ttl_s)

    def beating(self, name: str) -> bool:
        """Whether ``name`` gave a sign of life within its ``ttl_s``. With an embedded store the first look is one too."""
        return self._client.beating(self._key(f"beat/{name}"))

    # --- process groups -----------------------------------------------------------------------------------------------

    def rendezvous(self, prefix: str) -> Any:
        """A torch store for building a process group, on a connection of its own.

        Tried again for ``timeout_s``: in a recovery nobody else would, and a store that dies just then is back in no time.
        """
        return patient(lambda: self._client.rendezvous(self._key(prefix)), patience_s=self.timeout_s)

    # --- the store's memory -------------------------------------------------------------------------------------------

    @property
    def memory(self) -> str | None:
        """Names the memory that this process agreed to; logs begin again at 0 when it changes. None: no marker seen."""
        return self._memory.id

    def begin(self) -> None:
        """Write the run's marker, unless it is there: what the launcher does before it writes anything else."""
        self._memory.id = self._mark(self._client)

    def check_begun(self) -> None:
        """Raises ``StoreLostMemory`` when the store does not know this run: for a process that joins it.

        One that connected before the run was begun knows its memory from here on.
        """
        self._verify(self._client.get)
        if self._memory.id is None:
            raise self._lost(None)

    def restore(self, epoch: int | None = None, view: Any = None, own: Mapping[str, Any] | None = None) -> None:
        """Rebuild a store that came back empty, as far as this process knows it; any number of survivors may do so.

        Args:
            epoch: of the view this process follows; None for one that follows none (an agent).
            view: that view, as the store held it.
            own: keys that only this process writes and that still matter (its report of this epoch, ``done``).

        With ``view/<epoch>`` standing, no older epoch can be agreed on by whoever follows it. Raises ``StoreConflict``
        when another view stands there: somebody who had missed this one was faster, and the run would split.
        Notices are not rebuilt; who announced one that may still matter announces it again.
        """
        client = open_store(self.address, self.timeout_s, None)
        try:
            memory = self._mark(client)
            if epoch is not None:
                standing = json.loads(client.create(self._key(f"view/{epoch}"), _wrapped(view)))["value"]
                if standing != json.loads(json.dumps(view)):
                    raise StoreConflict(
                        f"the control store {client.name} came back empty and was rebuilt with another view of epoch "
                        f"{epoch} than this group follows; stop this group, or run etcd, which forgets nothing"
                    )
            for key, value in (own or {}).items():
                client.set(self._key(key), _wrapped(value))
        finally:
            client.close()
        self._memory.id = memory

    def _mark(self, client: Store) -> str:
        return json.loads(client.create(self._marker, json.dumps({"memory": uuid.uuid4().hex})))["memory"]

    def _lost(self, standing: str | None) -> StoreLostMemory:
        what = "knows no run" if standing is None else "was restarted empty and is being rebuilt for run"
        return StoreLostMemory(
            f"the control store {self._client.name} {what} {self.run_id}; it is rebuilt by the groups that live, and if "
            f"none does the run has to be started again",
            restored=standing is not None,
        )

    def _verify(self, get: Callable[[str], str | None]) -> None:
        marker = get(self._marker)
        standing = None if marker is None else json.loads(marker)["memory"]
        if self._memory.id is None:
            self._memory.id = standing
        elif standing != self._memory.id:
            raise self._lost(standing)

    @property
    def _marker(self) -> str:
        return f"run/{self.run_id}"

    def _key(self, key: str) -> str:
        return f"{self.run_id}/{key}"


def open_store(address: Address, timeout_s: float, verify: Callable[..., None] | None = None) -> Store:
    """The client that the address asks for."""
    if isinstance(address, str):
        for scheme in (ETCD, OWN_ETCD):
            if address.startswith(scheme):
                return EtcdStore(_endpoints(address.removeprefix(scheme)), timeout_s, verify, scheme == OWN_ETCD)
        address = _endpoints(address)[0]
    return TcpStore(address, timeout_s, verify)


def _endpoints(text: str) -> tuple[tuple[str, int], ...]:
    pairs = [endpoint.rpartition(":") for endpoint in text.split(",")]
    return tuple((host.strip("[]"), int(port)) for host, _, port in pairs)


def _wrapped(value: Any, by: str | None = None) -> str:
    return json.dumps({"value": value} if by is None else {"value": value, "by": by})


def _value(text: str | None) -> Any | None:
    return None if text is None else json.loads(text)["value"]
