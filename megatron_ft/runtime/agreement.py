"""What one group says and asks on the control store while an epoch changes, and how it waits when the store is away.

Fault-free steps come nowhere near it. In a recovery nothing can be decided without the store, so a call is tried until it
answers: nobody commits meanwhile, nobody splits, and training goes on when it is back (hard case 16).

Failures it assumes: the store is gone or silent for a while, or comes back empty (:meth:`Agreement.restore`, hard case 17).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from megatron_ft.core import detector
from megatron_ft.runtime import watcher
from megatron_ft.runtime.environment import seat
from megatron_ft.runtime.store import ControlStore, patient
from megatron_ft.types import GroupId, Report, View

DONE = "done"
"""Collection: the seats whose groups have committed all steps."""
_REPORT = "report/"


def report_collection(epoch: int) -> str:
    """Where the reports of an epoch are."""
    return f"{_REPORT}{epoch}"


Answer = TypeVar("Answer")


class Agreement:
    """One group's side, used by its training thread; ``patience_s``: after that long a store that is away ends the group."""

    def __init__(self, store: ControlStore, group: GroupId, patience_s: float) -> None:
        self._store, self._group, self._patience_s = store, group, patience_s
        self._view: View | None = None
        self._mine: dict[str, Any] = {}
        self._added: dict[tuple[str, str], Any] = {}
        self._said: list[tuple[detector.Signal, str]] = []

    @property
    def run_id(self) -> str:
        return self._store.run_id

    def clone(self) -> Agreement:
        """For another thread, on a connection of its own; what is said through it is not remembered."""
        return Agreement(self._store.clone(), self._group, self._patience_s)

    def view(self, epoch: int) -> View | None:
        """The view that stands for ``epoch``, if one does."""
        raw = self._ask(lambda: self._store.get(f"view/{epoch}"))
        return None if raw is None else self._stands(View.from_json(raw))

    def propose(self, view: View) -> tuple[View, bool]:
        """Compare-and-set: the view that stands from now on, and whether this group wrote it."""
        by = uuid.uuid4().hex
        raw, own = self._ask(lambda: self._store.claim(f"view/{view.epoch}", view.to_wire(), by))
        return self._stands(View.from_json(raw)), own

    def _stands(self, view: View) -> View:
        """Remember it at once: should the store forget now, no older view may be put back in its place."""
        if self._view is None or view.epoch > self._view.epoch:
            self._view = view
        return view

    def rendezvous(self, name: str) -> Any:
        """A torch store whose keys nobody else uses."""
        return self._ask(lambda: self._store.rendezvous(name))

    def create(self, key: str, value: Any) -> Any:
        """Compare-and-set: what stands there from now on."""
        return self._ask(lambda: self._store.create(key, value))

    def adopted(self, view: View) -> None:
        """The view this group follows: what belongs to older ones does not matter any more."""
        self._view = view
        self._mine = {key: value for key, value in self._mine.items() if not key.startswith("ready/")}
        self._added = {where: value for where, value in self._added.items() if not where[0].startswith(_REPORT)}
        self._said = [(signal, by) for signal, by in self._said if not isinstance(signal, detector.Reset)]

    def publish(self, report: Report) -> None:
        self._add(report_collection(report.epoch), str(self._group), report.to_json())

    def reports(self, epoch: int, groups: Collection[GroupId]) -> tuple[Report, ...]:
        """Those of these groups that are there."""
        told = self._ask(lambda: self._store.members(report_collection(epoch), set(map(str, groups))))
        return tuple(map(Report.from_json, told.values()))

    def done(self, incarnation: int, how: Any) -> None:
        """That start of this group has committed all steps."""
        self._add(DONE, seat(self._group, incarnation), how)

    def all_done(self, view: View) -> dict[GroupId, Any] | None:
        """How every member says that it is done; None while one does not."""
        told = self._ask(lambda: self._store.members(DONE))
        seats = {group: seat(group, view.incarnations.get(group, 0)) for group in view.live}
        return {group: told[name] for group, name in seats.items()} if told.keys() >= set(seats.values()) else None

    def stands(self, collection: str) -> None:
        """This group is one of those that wait there for each other."""
        self._add(collection, str(self._group), True)

    def standing(self, collection: str) -> set[GroupId]:
        """All of them, so far."""
        return set(map(int, self._ask(lambda: self._store.members(collection))))

    def _add(self, collection: str, member: str, value: Any) -> None:
        self._added[collection, member] = value
        self._ask(lambda: self._store.add(collection, member, value))

    def announce(self, signal: detector.Signal) -> None:
        """Tell every group, once, however often it has to be tried."""
        by = uuid.uuid4().hex
        if not isinstance(signal, detector.Agreed):  # who has forgotten the view is asked, not told
            self._said.append((signal, by))
        self._ask(lambda: watcher.announce(self._store, signal, by))

    def say(self, key: str, value: Any) -> None:
        """Write a key that is this group's alone, and remember it in case the store forgets."""
        self._mine[key] = value
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> Any | None:
        return self._ask(lambda: self._store.get(key))

    def restore(self, store: ControlStore) -> None:
        """Another thread, on its own client: the store is back and empty; give it what this group knows."""
        view = self._view
        if view is not None:
            store.restore(view.epoch, view.to_wire(), dict(self._mine))
            for (collection, member), value in list(self._added.items()):
                store.add(collection, member, value)
            for signal, by in list(self._said):
                watcher.announce(store, signal, by)

    def _ask(self, operation: Callable[[], Answer]) -> Answer:
        return patient(operation, patience_s=self._patience_s)
