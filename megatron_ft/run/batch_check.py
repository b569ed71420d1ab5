"""One rank's part in comparing batches (``core.exactness.batches`` chooses and decides).

Each rank that loads samples does so in the first step that its group makes with another one, or alone: the first of a
run, and the first after a restart or after the return of a group. Where two batches differ, the two groups publish
what their batches contain, for the message. If it is known which group is wrong, that group leaves, and the others compute
the step again; if not, all stop before the update.

Failures it assumes: the control store may be away, or a group may be lost while it publishes; the message then does not
say what differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from megatron_ft.core.exactness import batches
from megatron_ft.core.exactness.batches import Leaf, Pair, Sent
from megatron_ft.data import batch_digest
from megatron_ft.errors import StartOver, StoreError
from megatron_ft.run.rank import Rank
from megatron_ft.run.state_guard import StateGuard, await_found
from megatron_ft.run.step_timer import TAG_BITS
from megatron_ft.types import GroupId, Microbatch, Plan, View

_NAMING_S = 5.0
"""Seconds that a group waits for what the batches of two groups contain."""


class BatchCheck:
    """The comparison at one rank; ``guard`` has the slots in which digests travel, and ends the run. ``load``: returns the
    batch of a microbatch; None at a rank that loads none. Only the training thread calls its methods."""

    def __init__(self, rank: Rank, guard: StateGuard, load: Callable[[Microbatch], Any] | None) -> None:
        self._group, self._position, self._incarnation = rank.group, rank.position, rank.env.incarnation
        self._slots, self._halt, self._agreement, self._load = guard.slots, guard.halt, rank.agreement, load
        self._done: set[tuple[GroupId, int]] = set()  # groups and incarnations that have been found equal
        self._epoch = -1  # of a view all of whose groups have been
        # What this rank has loaded in this step of ``Sent.own`` and of ``Sent.other``; alone a group loads one twice.
        self._own: dict[Microbatch, list[batch_digest.Leaf]] = {}
        self._other: dict[Microbatch, list[batch_digest.Leaf]] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._own, self._other = {}, {}

    def due(self, view: View | None) -> bool:
        """Return whether a group of ``view`` has not been compared."""
        if view is None or view.epoch == self._epoch:
            return view is None
        if self._done.issuperset(view.members):
            self._epoch = view.epoch
            return False
        return True

    def chosen(self, plan: Plan, view: View) -> tuple[Microbatch, ...]:
        """Return the microbatches whose batches the ranks of this group send: none, or two."""
        return batches.chosen(plan, view.live, self._group) or () if self.due(view) else ()

    def loaded(self, microbatch: Microbatch, batch: Any, view: View | None) -> None:
        """Take note of a batch that is about to be computed, which may change it. A group sends its first."""
        if not self._own and self.due(view):
            self._own[microbatch] = batch_digest.leaves(batch)

    def say(self, chosen: Sequence[Microbatch]) -> None:
        """Put the digests of the ``chosen`` batches into bucket 0, when this rank has computed all of its own."""
        if not chosen or self._load is None:
            return
        said = list[int]()
        for microbatch, known in zip(chosen, (self._own, self._other), strict=True):
            if microbatch not in known:
                known[microbatch] = batch_digest.leaves(self._load(microbatch))
            said += (_tag(microbatch), batch_digest.digest(known[microbatch]))
        # A group begins with incarnation 0, or was added; one that has returned has not been compared before.
        returned = self._incarnation > 0 and (self._group, self._incarnation) not in self._done
        self._slots.say_batches(Sent(*said)._replace(returned=int(returned)))

    def sent(self) -> bool:
        """Return whether a group has sent digests, once bucket 0 is reduced."""
        return any(self._slots.batches())

    def compare(self, step: int, view: View) -> set[GroupId]:
        """Compare, once bucket 0 of ``step`` is reduced and before the update.

        Returns:
            The groups whose batch is not the right one, so that the step must be computed without them.

        Raises ``StartOver`` in such a group, ``InvariantBroken`` where it is not known which batch is right.
        """
        found = list(map(batches.compared, self._slots.batches()))
        for at, one in enumerate(found):
            for group, pair in one.wrong.items():
                what = self._differ(step, pair, at, waits=self._group == group)
                if self._group == group:
                    raise StartOver(
                        f"group {group} leaves: {what}. It has come back, so the other group is believed; it starts again: "
                        f"look at the files and the code that its hosts load data from (docs/data.md)"
                    )
            if one.undecided:
                what = self._differ(step, one.undecided, at, waits=True)
                self._halt(
                    step,
                    f"{what}. A batch must follow from the microbatch id alone, "
                    "otherwise a group that takes it over trains on other samples: no iterator, counter, clock, os.urandom, "
                    "file list in the order of the disk, or generator of the script's own that goes on from call to call; "
                    f"the global generators of random, numpy and torch are seeded (docs/data.md). Step {step} was not made",
                )
        wrong = {group for one in found for group in one.wrong}
        if not wrong:
            compared = {group for one in found for group in one.groups}
            self._done |= {seat for seat in view.members if seat[0] in compared}
        return wrong

    def _differ(self, step: int, pair: Pair, at: int, waits: bool) -> str:
        """Publish what this rank has loaded of the microbatch of ``pair``; if it ``waits``, return the difference in words.
        ``at``: number of the ranks that differ among those that share the bucket."""
        sent, position = self._slots.batches()[at], at if self._slots.shared else self._position
        tag, agreement = sent[pair.owner].own_tag, self._agreement.clone(_NAMING_S)
        keys = [f"divergence/{step}/batch/{position}/{tag}/{one}" for one in ("own", "other")]
        found, deadline = list[Sequence[Leaf]](), time.monotonic() + _NAMING_S
        with suppress(StoreError):
            for key, group, known in zip(keys, pair, (self._own, self._other), strict=True):
                mine = [one for one in known if _tag(one) == tag]
                if group == self._group and mine and position == self._position:
                    agreement.put(key, [str(mine[0]), *known[mine[0]][: batch_digest.MOST]])
            for key in keys if waits else ():
                found.append(await_found(agreement, key, deadline) or ())
        name = next((f" {leaves[0]}" for leaves in found if leaves), "")
        owner, checker = pair
        where = (f"in group {owner}", f"in group {checker}")
        who = f"groups {owner} and {checker} have loaded different batches for microbatch{name}"
        if owner == checker:
            where = ("the first time", "the second time")
            who = f"group {owner} has loaded microbatch{name} twice, with different results"
        what = batches.difference(found[0][1:], found[1][1:], where) if len(found) == 2 and all(found) else ""
        return f"{who}{what and ': '}{what}"


def _tag(microbatch: Microbatch) -> int:
    return batch_digest.number(str(microbatch), TAG_BITS)
