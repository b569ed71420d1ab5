"""The device of a simulated group: kernels in a stream, and communicators that behave like NCCL's.

An operation waits in the stream for the one before it, runs on the device while the process may be stopped, and ends some
time before the process looks. What NCCL does and gloo does not:

- After an abort the kernels return as if they were done, at any time, and leave garbage in their buffers.
- A peer's abort or death is not seen; the operations stay pending until their own abort.
- A kernel that is aborted lets the kernels of the peers end, too, with garbage: a wait ends at an abort, and what follows
  the wait tells the peer to go on (``waitPeer`` and ``postPeer`` of NCCL's ``prims_simple.h``). So what a process has
  seen counts only once all members have confirmed theirs (``Group._confirm``). The model does not do this to messages.
- An abort may hang, and then every later init of that process hangs. An init may hang, too: always if a member dies
  meanwhile. Both have a deadline.

As a planted bug (``WATCHDOG_S``): a watchdog that kills a process whose operation does not end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ft.proof.returning_group import Outcome
from megatron_ft.types import GroupId, View, given

if TYPE_CHECKING:
    from megatron_ft.proof.simulated_group import Group

POLL = 0.5
"""A process sees an end on the device at most this much later."""
INIT_S, ABORT_S = 12.0, 6.0
"""Deadlines of an init and of an abort."""
LATE_SHARE = 0.2
"""Share of the aborted kernels that return long after the abort has."""
WATCHDOG_S: float | None = None


class Sum(NamedTuple):
    """A bucket, or a group's part of one; ``seconds`` per microbatch of each group are with bucket 0. ``attempts``:
    the attempts of the step in which the parts were computed; there must be one. ``states``: what groups compare, with
    bucket 0."""

    gradient: int = 0
    seconds: Mapping[GroupId, float] = {}
    attempts: frozenset[int] = frozenset()
    states: Mapping[GroupId, str] = {}


def added(parts: Iterable[Sum]) -> Sum:
    """Returns the sum of the groups' parts."""
    gradients, seconds, attempts, states = zip(*parts, strict=True)
    return Sum(
        sum(gradients),
        {group: s for part in seconds for group, s in sorted(part.items())},
        frozenset[int]().union(*attempts),
        {group: state for part in states for group, state in sorted(part.items())},
    )


@dataclass(eq=False)
class Buffer:
    """Memory of the device; ``used_by`` the operation that was started in it last."""

    value: Sum | Outcome
    used_by: Launched | None = None


@dataclass(eq=False)
class Launched:
    """An operation in the stream; it reduces what ``sources`` send and, if ``sends``, begins by sending its buffer to the
    other members."""

    key: tuple
    view: View
    buffer: Buffer
    sources: tuple[GroupId, ...]
    sends: bool = True
    running: bool = False
    ending: bool = False
    done: bool = False


class Device:
    """The device of one process, with one communicator at a time: that of ``view``, None if there is none.

    ``dooms``: the faults that are to come (``scenario.ON_DEVICE``).
    """

    def __init__(self, group: Group) -> None:
        self._group, self._cluster, self._kernel = group, group.cluster, group.cluster.kernel
        self._rng = random.Random(f"device {group.cluster.scenario.seed} {group.me}.{group.incarnation}")
        self.view: View | None = None
        self.buffers: dict[int, Buffer] = {}
        self.dooms: set[str] = set()
        self.stuck = False
        self.gives_up = 0.0
        self._ready = self._aborting = False
        self._abort_ends = 0.0
        self._stream: deque[Launched] = deque()
        self._parts: dict[tuple, dict[GroupId, Any]] = {}

    # --- the communicator ---------------------------------------------------------------------------------------------

    def init(self, view: View) -> Callable[[], bool]:
        """Build that of the view, or go on with it; the result tells whether it is there. ``gives_up``: its deadline."""
        if self.view is None:
            self.view, self._ready, self._aborting = view, False, False
            self.gives_up = self._kernel.now + INIT_S
            if self._doomed("exits in init"):
                self._later(1.0, lambda: self._cluster.exits(self._group, "exits in init"))
            alone = len(view.live) == 1  # there is nothing to build then
            if alone or not (self._doomed("init hangs") or self.stuck):
                self._later(2.0, self._built)
        return lambda: self._ready

    def _built(self) -> None:
        if self.view is not None and all(seat in self._cluster.groups for seat in self.view.members):
            self._ready = True
            self._group.see(("init", self.view.epoch), {})

    def abort(self) -> None:
        """Begin to abort. Any thread may call it, again and again."""
        if self.view is None or self._aborting:
            return
        self._aborting = True
        hangs = self._doomed("abort hangs") or self.stuck
        self._abort_ends = float("inf") if hangs else self._kernel.now + self._rng.uniform(0.01, 1.0)
        for launched in self._stream:
            late = self._rng.random() < LATE_SHARE
            self._later(20.0 if late else 0.5, partial(self._spoil, launched))
            for peer in launched.sources:
                self._send(launched.view, peer, ("leak", launched.key), None)
        self._stream.clear()

    async def close(self) -> bool:
        """Abort, and wait for that until its deadline. False: it is stuck, and so is the process."""
        if self.view is not None:
            self.abort()
            most = self._kernel.now + ABORT_S
            await self._group.sleep(max(0.0, min(self._abort_ends, most) - self._kernel.now))
            self.view = None
            self.stuck = self._abort_ends > most
        return not self.stuck

    def _doomed(self, kind: str) -> bool:
        found = kind in self.dooms
        self.dooms.discard(kind)
        return found

    # --- operations ---------------------------------------------------------------------------------------------------

    def all_reduce(self, key: tuple, part: Sum) -> None:
        """Start to sum a bucket, the last word of the key, over the members, in the bucket's buffer."""
        view, buffer = given(self.view), self.buffer(key[-1])
        buffer.value = part
        self._launch(Launched(key, view, buffer, view.live))

    def receive(self, key: tuple, source: GroupId, into: Sum | Outcome) -> None:
        self._launch(Launched(key, given(self.view), Buffer(into), (source,), sends=False))

    def buffer(self, bucket: int) -> Buffer:
        """The buffer of a bucket: another one if an operation has been abandoned in that of before."""
        buffer = self.buffers.get(bucket)
        if buffer is None or (buffer.used_by is not None and not buffer.used_by.done):
            buffer = self.buffers[bucket] = Buffer(Sum())
        return buffer

    def arrived(self, sender: GroupId, key: tuple, value: Any) -> None:
        """Another member's kernel has written into the memory of this device."""
        if key[0] == "leak":
            for launched in [launched for launched in self._stream if launched.key == key[1]]:
                self._stream.remove(launched)
                self._spoil(launched)
        else:
            self._parts.setdefault(key, {})[sender] = value
        self._run()

    def _launch(self, launched: Launched) -> None:
        if not self._aborting:
            launched.buffer.used_by = launched
            self._stream.append(launched)
            self._run()

    def _run(self) -> None:
        """Let the first operation of the stream begin, and end when it has what it waits for."""
        if not self._stream or self._group.gone:
            return
        first = self._stream[0]
        if not first.running:
            first.running = True
            for member in first.view.live if first.sends else ():
                if member == self._group.me:
                    self._parts.setdefault(first.key, {})[member] = first.buffer.value
                else:
                    self._send(first.view, member, first.key, first.buffer.value)
            if WATCHDOG_S is not None:
                self._kernel.after(WATCHDOG_S, partial(self._watch, first))
        if not first.ending and all(source in self._parts.get(first.key, ()) for source in first.sources):
            first.ending = True
            self._later(0.2, lambda: self._end(first))

    def _watch(self, launched: Launched) -> None:
        if not (launched.done or self._group.gone):
            self._cluster.exits(self._group)

    def _end(self, launched: Launched) -> None:
        if launched not in self._stream:
            return
        self._stream.popleft()
        parts = [self._parts[launched.key][source] for source in launched.sources]
        launched.buffer.value, launched.done = added(parts) if launched.sends else parts[0], True
        self._later(POLL, lambda: self._show(launched))
        self._run()

    def _spoil(self, launched: Launched) -> None:
        """The kernel returns as if it were done."""
        value, noise = launched.buffer.value, self._rng.getrandbits(64)
        spoilt = (
            value._replace(gradient=noise) if isinstance(value, Sum) else replace(value, params=f"garbage {noise:x}")
        )
        launched.buffer.value, launched.done = spoilt, True
        self._show(launched)

    def _show(self, launched: Launched) -> None:
        self._group.see(launched.key, dict.fromkeys(launched.sources, launched.buffer.value))

    def _send(self, view: View, member: GroupId, key: tuple, value: Any) -> None:
        if member != self._group.me:
            self._cluster.deliver(self._group.me, member, view.incarnations.get(member, 0), key, value)

    def _later(self, most: float, call: Callable[[], None]) -> None:
        self._kernel.after(self._rng.uniform(0.0, most), lambda: None if self._group.gone else call())
