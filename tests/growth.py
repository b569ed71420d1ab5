"""View changes through a real control store, as a run makes them, with stand-ins for its two groups."""

from __future__ import annotations

from dataclasses import replace

from megatron_ft import codec
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.run.collectives.communicator_choice import GLOO, Offer
from megatron_ft.run.store import ControlStore, watcher
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.run.store.garbage_collection import GarbageCollector
from megatron_ft.types import Exit, PlanOrigin, Report, View

FIRST = first_view(2)


class Changes:
    """View changes of a run: group 1 is lost and comes back again and again, with two views each time. ``store``
    belongs to a run that has not begun."""

    def __init__(self, store: ControlStore) -> None:
        self.store = store
        store.begin()
        store.set("view/0", FIRST.to_wire())
        self.view = FIRST
        self.group = CoordinationClient(store, 0, 60.0)
        self.group.adopted(FIRST)
        self.garbage_collector = GarbageCollector(store.clone(), lambda group: group == 0, FIRST)
        self._start = 0

    def make(self, count: int) -> None:
        """Make this number of view changes, with a garbage collection after each."""
        for _ in range(count):
            self._lose() if 1 in self.view.live else self._come_back()
            self.garbage_collector.collect()

    def _lose(self) -> None:
        died = signals.RankExited(Exit(1, 0, 4242, "node7", "SIGKILL", None), self._start)
        watcher.announce(self.store, died)
        self.group.announce(signals.EpochAborted(self.view.epoch, "Connection reset by peer", by=0))
        self._stand(View(self.view.epoch + 1, (0,), str(died.exit), step=self.view.step, lost={1: "killed"}))

    def _come_back(self) -> None:
        self._start += 1
        self.store.set(f"start/1.{self._start}/0", 0)
        self.store.set(f"inner/1.{self._start}/0", ["node7", 1])
        watcher.announce(self.store, signals.JoinRequested(1, self._start, ((0, 0),), self.view.step))
        self._stand(View(self.view.epoch + 1, (0, 1), "asks", step=self.view.step + 1, joined=(1,)))

    def _stand(self, view: View) -> None:
        view = replace(view, plan_origin=PlanOrigin(view.live), incarnations={1: self._start} if self._start else {})
        self.group.publish(Report(self.view.epoch, 0, view.step))
        self.view, own = self.group.propose(view)
        assert own
        self.group.announce(signals.ViewAgreed(view.epoch))
        self.group.adopted(view)
        for group in view.live:
            self.group.put(f"ready/{view.epoch}/{group}.0", codec.encode(Offer((GLOO,))))
            self.store.set(f"outer/{view.epoch}/0/rank_{group}", "x" * 100)  # gloo writes a key like this

    def size(self) -> tuple[int, int]:
        """Return the number of keys of the run, and the bytes of their names and values."""
        keys = self.store.listed()
        return len(keys), sum(len(key) + len(self.store._client.get(self.store._key(key)) or "") for key in keys)
