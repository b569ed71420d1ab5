"""The control-store client of one group while an epoch changes, and how it waits when the store is away.

Fault-free steps do not use it. In a recovery nothing can be decided without the store, so a call is repeated until the
store answers. No group commits meanwhile, the run cannot split, and training resumes with the store (hard case 16).

Failures it assumes: the store is gone or silent, or comes back empty (:meth:`CoordinationClient.restore`, hard case 17).
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_ft import codec
from megatron_ft.core.lifecycle.store_failover import Claim, Seat
from megatron_ft.core.protocol import key_lifetimes, signals
from megatron_ft.errors import StoreError
from megatron_ft.run.store import (
    AWAY,
    ControlStore,
    Locator,
    LogAway,
    StoreConflict,
    garbage_collection,
    patient,
    watcher,
)
from megatron_ft.types import GroupId, Report, View, seat

DONE = "done"
"""The collection of the seats whose groups have committed all steps."""
_REPORT = "report/"
_FLOOR_S = 1.0
"""Seconds between two looks of a group that finds no next view for whether that view was deleted."""


def report_collection(epoch: int) -> str:
    """Return the name of the collection with the reports of an epoch."""
    return f"{_REPORT}{epoch}"


Answer = TypeVar("Answer")


def digest(view: View) -> str:
    """Return a hash that distinguishes views of one epoch; only a tampered store can hold two of them."""
    return hashlib.sha256(json.dumps(view.to_wire(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Claimant:
    """A group's part in the claim log of its run: the log, the group's ``seat``, and the number of its host."""

    log: Locator
    seat: Seat
    host: int


class CoordinationClient:
    """One group's client, used by its training thread.

    Large because it has a method for each thing that a group says or asks; all share the wait for a store that is away.

    Args:
        patience_s: the group ends when the store has been away for this number of seconds.
        claimant: given in a run that keeps a claim log. Every method raises ``Fenced`` then, once a claim leaves this
            group out.
    """

    def __init__(
        self,
        store: ControlStore,
        group: GroupId,
        patience_s: float,
        remembers: bool = True,
        claimant: Claimant | None = None,
    ) -> None:
        self._store, self._group, self._patience_s, self._remembers = store, group, patience_s, remembers
        self._claimant, self._claims_taken = claimant, 0
        self._log_away_since: float | None = None
        self._fence_due_since: float | None = None
        self._view: View | None = None
        self._looked_at_floor = time.monotonic()
        self._mine: dict[str, Any] = {}
        self._added: dict[tuple[str, str], Any] = {}
        self._said: list[tuple[signals.Signal, str]] = []

    @property
    def run_id(self) -> str:
        return self._store.run_id

    def clone(self, patience_s: float | None = None) -> CoordinationClient:
        """Return a client on its own connection, for another thread or patience. Its writes are not restored."""
        patience_s = patience_s or self._patience_s
        return CoordinationClient(
            self._store.clone(), self._group, patience_s, remembers=False, claimant=self._claimant
        )

    @property
    def memory(self) -> str | None:
        """The id of the control store's memory that this process has agreed to (``ControlStore.memory``)."""
        return self._store.memory

    def view(self, epoch: int) -> View | None:
        """Return the view of ``epoch`` if there is one; a later view if that has been deleted already."""
        while True:
            memory = self.memory
            answer = self._ask(lambda: self._store.get(f"view/{epoch}") or self._later_view(epoch))
            if memory == self.memory:  # a view in another memory does not count any more
                return None if answer is None else self._stands(answer, memory)

    def look_at_view(self, epoch: int) -> View | None:
        """Like :meth:`view`, for a group without a seat: it puts no view back after the store has forgotten."""
        raw = self._ask(lambda: garbage_collection.find_view(self._store, epoch))
        return None if raw is None else View.from_json(raw)

    def _later_view(self, epoch: int) -> Any | None:
        """Return a later view if that of ``epoch`` was deleted, e.g. while this process was stopped for long."""
        now = time.monotonic()
        if now - self._looked_at_floor < _FLOOR_S:
            return None
        self._looked_at_floor = now
        return garbage_collection.find_view(self._store, epoch)

    def fence(self, seats: Collection[Seat], reason: str) -> tuple[Claim, ...] | None:
        """Fence these seats by a claim; called before a view is proposed that leaves a group out.

        Returns an empty tuple when the view may be proposed. Otherwise returns claims that are new to this group, and
        fences nothing: the caller takes them in, and decides on the view anew. Returns None when the log cannot be read
        now: the caller looks for the view of another group, and tries again. Raises ``StoreError`` when that has lasted
        for ``patience_s``. A run without a claim log fences nothing.
        """
        claimant = self._claimant
        if claimant is None:
            return ()
        try:
            new = claimant.log.fence(seats, claimant.seat, claimant.host, reason, self._claims_taken)
        except LogAway as error:
            self._fence_due_since = self._patient_since(self._fence_due_since, error)
            return None
        self._fence_due_since = None
        self._claims_taken += len(new)
        return new

    def log_answers(self) -> bool:
        """Return whether the claim log can be read now, in a run that keeps one. While it cannot, the silence of a
        group means nothing: the group may not know of this store. Raises ``StoreError`` after ``patience_s``."""
        if self._claimant is None or self._claimant.log.answers():
            self._log_away_since = None
            return True
        why = "the file system of the claim log does not answer"
        self._log_away_since = self._patient_since(self._log_away_since, why)
        return False

    def _patient_since(self, since: float | None, why: object) -> float:
        """Return since when the log is waited for. Raises ``StoreError`` when ``patience_s`` has passed."""
        now = time.monotonic()
        if since is not None and now - since >= self._patience_s:
            raise StoreError(
                f"no group can be left out of the run since {self._patience_s:g} s, and the interrupted step needs it: {why}"
            )
        return now if since is None else since

    def check(self) -> None:
        """Raise ``Fenced`` when a claim that is known here leaves this group out."""
        if self._claimant is not None:
            self._claimant.log.check(self._claimant.seat)

    def propose(self, view: View, memory: str | None = None) -> tuple[View, bool] | None:
        """Compare-and-set: return the view that stands from now on, and whether this group wrote it.

        ``memory``: the store's memory when the view was decided on; the present one by default. Returns None and writes
        nothing when the store has another memory by now: a group that has adopted the next view puts that view back
        there, and no report.
        """
        by, memory = uuid.uuid4().hex, memory or self.memory
        wire = view.to_wire()
        if self._view is not None and self._view.epoch == view.epoch - 1:
            wire["after"] = digest(self._view)

        def put() -> tuple[Any, bool] | None:
            if self.memory != memory:
                return None
            with self._store.only_in(memory):
                return self._store.claim(f"view/{view.epoch}", wire, by)

        answer = self._ask(put)
        return None if answer is None else (self._stands(answer[0], memory), answer[1])

    def _stands(self, raw: Mapping[str, Any], memory: str | None) -> View:
        """Remember a standing view at once: if the store forgets now, no older view may be put back in its place. If
        the store has forgotten meanwhile, write the view there; this group ends if another view is there."""
        view, mine = View.from_json(raw), self._view
        if mine is not None and mine.epoch == view.epoch - 1 and raw.get("after", (own := digest(mine))) != own:
            raise StoreConflict(
                f"view {view.epoch} in the control store follows another view {mine.epoch} than this group does: another "
                f"process has deleted or replaced what stood there (docs/security.md). This group stops"
            )
        if mine is None or view.epoch > mine.epoch:
            self._view = view
            if self.memory != memory:
                self._ask(lambda: self.restore(self._store))
        return view

    def rendezvous(self, name: str) -> Any:
        """Return a torch store whose keys no other process group uses."""
        return self._ask(lambda: self._store.rendezvous(name))

    def create(self, key: str, value: Any) -> Any:
        """Compare-and-set: return the value that stands from now on."""
        return self._ask(lambda: self._store.create(key, value))

    def settle(self, key: str, value: Any) -> Any:
        """Do :meth:`create`, and remember the standing value in case the store forgets."""
        self._mine[key] = standing = self.create(key, value)
        return standing

    def adopted(self, view: View) -> None:
        """Note the view that this group follows: keys of older views do not matter any more."""
        self._view = view
        self._mine = {key: value for key, value in self._mine.items() if not key.startswith("ready/")}
        self._added = {where: value for where, value in self._added.items() if where[0] == DONE}
        needed = key_lifetimes.kept([signal for signal, _ in self._said], view)
        self._said = [(signal, by) for signal, by in self._said if signal in needed]

    def publish(self, report: Report) -> None:
        self._add(report_collection(report.epoch), str(self._group), codec.encode(report))

    def reports(self, epoch: int, groups: Collection[GroupId]) -> tuple[Report, ...]:
        """Return the reports of these groups that are there."""
        told = self._ask(lambda: self._store.members(report_collection(epoch), set(map(str, groups))))
        return tuple(codec.decode(Report, raw) for raw in told.values())

    def done(self, incarnation: int, how: Any) -> None:
        """Note that this start of the group has committed all steps."""
        self._add(DONE, seat(self._group, incarnation), how)

    def all_done(self, view: View) -> dict[GroupId, Any] | None:
        """Return what every member has written when it was done; None while one has not."""
        told = self._ask(lambda: self._store.members(DONE))
        seats = {group: seat(group, view.incarnations.get(group, 0)) for group in view.live}
        return {group: told[name] for group, name in seats.items()} if told.keys() >= set(seats.values()) else None

    def stands(self, collection: str) -> None:
        """Add this group to a collection of groups that wait there for each other."""
        self._add(collection, str(self._group), True)

    def standing(self, collection: str) -> set[GroupId]:
        """Return the groups in that collection so far."""
        return set(map(int, self._ask(lambda: self._store.members(collection))))

    def _add(self, collection: str, member: str, value: Any) -> None:
        self._added[collection, member] = value
        self._ask(lambda: self._store.add(collection, member, value))

    def announce(self, signal: signals.Signal) -> None:
        """Tell every group once, however often the call has to be repeated."""
        by = uuid.uuid4().hex
        if self._remembers and not isinstance(signal, signals.ViewAgreed):  # its view is read again, not told
            self._said.append((signal, by))
        self._ask(lambda: watcher.announce(self._store, signal, by))

    def put(self, key: str, value: Any) -> None:
        """Write a key that only this group writes, and remember it in case the store forgets."""
        if self._remembers:
            self._mine[key] = value
        self._ask(lambda: self._store.set(key, value))

    def delete(self, keys: Collection[str]) -> None:
        """Remove keys that no process needs any more, and that this group does not remember."""
        self._ask(lambda: self._store.delete(keys))

    def get(self, key: str) -> Any | None:
        return self._ask(lambda: self._store.get(key))

    def restore(self, store: ControlStore) -> None:
        """Give a store that is back and empty what this group knows; called in another thread, on its own client."""

        def repeat(fresh: ControlStore) -> None:
            for (collection, member), value in list(self._added.items()):
                fresh.add(collection, member, value)
            for signal, by in list(self._said):
                watcher.announce(fresh, signal, by)

        view = None
        while view is not self._view:  # the training thread may adopt the next view meanwhile
            view = self._view
            if view is not None:
                store.restore(view.epoch, view.to_wire(), dict(self._mine), repeat)

    def _ask(self, operation: Callable[[], Answer]) -> Answer:
        def asked() -> Answer:
            self.check()
            return operation()

        try:
            return patient(asked, patience_s=self._patience_s)
        except AWAY as error:
            raise StoreError(
                f"no control store has answered for {self._patience_s:g} s, and the interrupted step needs one: {error}"
            ) from None
