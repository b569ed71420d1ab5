"""Samples ahead of their need: a group's own share of a step, then the rest of the shards it hosts.

What a group takes over from a lost one is nearly always of its stack (``core.replication``), so it is in memory already
when the step is interrupted. One thread loads; it is never waited for:

- a sample that is not there is loaded by the training thread itself, which waits for the one call of the dataset that
  is going on, never for the queue;
- calls of the dataset never overlap, so it need not be thread-safe;
- a dataset that raises here leaves a gap; the training thread meets the error itself if it needs that sample.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from megatron_ft.types import Microbatch

Dataset = Callable[[Microbatch], Any]
"""Microbatch id -> whatever the engine's loss function takes. Must be a pure function of the id.

It is called from a background thread too, one call at a time: it names its device, if it uses one, and has a random
generator of its own, if it needs one.
"""


class Prefetcher:
    """Loads the samples of one group in the background; made, told and asked by the training thread.

    Holds at most ``len(own) + len(stack)`` samples of what :meth:`begin` was told last, so with own microbatches from the
    stack at most one step's stack and the next step's own share.

    Args:
        random_state: a value that differs after a draw from the random numbers that training uses (dropout). A dataset
            that draws from them too would change what the model learns when it ran beside the training thread: such a
            one is found by its first call, which is always the training thread's, and never called in the background.
    """

    def __init__(self, random_state: Callable[[], Any] = lambda: None) -> None:
        self._random_state = random_state
        self._dataset: Dataset | None = None
        self._may_prefetch: bool | None = None
        self._queue: deque[Microbatch] = deque()
        self._wanted: set[Microbatch] = set()
        self._held: dict[Microbatch, Any] = {}
        self._capacity = 0
        self._loading: Microbatch | None = None
        self._asked = False
        self._closed = False
        self._complained = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="megatron_ft-prefetch", daemon=True)
        self._thread.start()

    def begin(
        self, dataset: Dataset, own: Iterable[Microbatch], stack: Iterable[Microbatch], following: Iterable[Microbatch]
    ) -> None:
        """A step begins. Load in this order; what is neither of these is dropped.

        Args:
            own: the step's microbatches that this group is going to compute, in order.
            stack: those of the shards it hosts; it may have to take them over.
            following: its own share of the next step, as far as can be known.
        """
        own, stack = tuple(own), tuple(stack)
        order = dict.fromkeys((*own, *stack, *following))
        with self._changed:
            if not _same(dataset, self._dataset):
                self._dataset, self._may_prefetch, self._held = dataset, None, {}
            self._held = {microbatch: sample for microbatch, sample in self._held.items() if microbatch in order}
            self._wanted = set(order)
            self._queue = deque(m for m in order if m not in self._held and m != self._loading)
            self._capacity = len(own) + len(stack)
            self._wake()

    def rest(self, dataset: Dataset, step: int) -> None:
        """Step ``step`` begins, and is too short to load anything beside it. What is there of it is kept."""
        with self._changed:
            if not _same(dataset, self._dataset):
                self._dataset, self._may_prefetch, self._held = dataset, None, {}
            if self._held:
                self._held = {microbatch: sample for microbatch, sample in self._held.items() if microbatch.step >= step}
            self._wanted, self._queue = set(self._held), deque()

    def get(self, microbatch: Microbatch) -> tuple[Any, bool]:
        """The sample, and whether it was in memory when it was asked for. It is handed out, not kept.

        Raises whatever the dataset raises.
        """
        with self._changed:
            if microbatch in self._held:
                return self._take(microbatch), True
            self._asked = True  # before the next one of the queue
            self._changed.wait_for(lambda: self._loading is None)
            if microbatch in self._held:  # it was the one that was being loaded
                self._asked = False
                return self._take(microbatch), False
            self._wanted.discard(microbatch)
        try:
            return self._call(microbatch), False
        finally:
            with self._changed:
                self._asked = False
                self._changed.notify_all()

    def close(self) -> None:
        """No more calls of the dataset are begun in the background; what is held is dropped."""
        with self._changed:
            self._closed = True
            self._held, self._wanted, self._queue = {}, set(), deque()
            self._changed.notify_all()

    def _take(self, microbatch: Microbatch) -> Any:
        self._wanted.discard(microbatch)
        sample = self._held.pop(microbatch)
        self._wake()
        return sample

    def _wake(self) -> None:
        """There is something to load, or room for it. A thread that wakes for nothing costs a small step a lot."""
        if self._queue:
            self._changed.notify_all()

    def _call(self, microbatch: Microbatch) -> Any:
        """In the training thread, while the background is kept out. The first call decides about prefetching."""
        if self._may_prefetch is not None:
            return self._dataset(microbatch)
        before = self._random_state()
        sample = self._dataset(microbatch)
        self._may_prefetch = self._random_state() == before
        if not self._may_prefetch:
            self._complain(
                "the dataset draws from the global random numbers, so it cannot be called beside training and nothing is "
                "prefetched; give it a generator of its own"
            )
        return sample

    # --- the background -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._load_next():
            pass

    def _load_next(self) -> bool:
        """Load one sample; False at the end. A call of its own, so that nothing is kept alive by the waiting thread."""
        job = self._next()
        if job is None:
            return False
        dataset, microbatch = job
        sample, found = None, False
        try:
            sample, found = dataset(microbatch), True
        except BaseException as error:  # somebody else's code must not end this thread, whatever it raises
            self._complain(f"the dataset failed in the background, training calls it itself: {error!r}")
        with self._changed:
            self._loading = None
            if found and microbatch in self._wanted and _same(dataset, self._dataset):
                self._held[microbatch] = sample
            self._changed.notify_all()
        return True

    def _next(self) -> tuple[Dataset, Microbatch] | None:
        """What to load now, waiting for it; None at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(self._is_due)
                if self._closed:
                    return None
                microbatch = self._queue.popleft()
                if microbatch in self._wanted:  # else the training thread was faster
                    self._loading = microbatch
                    return self._dataset, microbatch

    def _is_due(self) -> bool:
        if self._closed:
            return True
        room = len(self._held) < self._capacity
        return bool(self._queue) and room and not self._asked and bool(self._may_prefetch)

    def _complain(self, what: str) -> None:
        """Once: a dataset that fails at one sample is likely to fail at every one."""
        if not self._complained:
            print(f"megatron_ft: {what}", file=sys.stderr, flush=True)
        self._complained = True


def _same(one: Dataset, other: Dataset | None) -> bool:
    """Whether they are one dataset; ``data.batch`` is another object each time it is looked up."""
    if one is other:
        return True
    bound = getattr(one, "__self__", None)
    return bound is not None and bound is getattr(other, "__self__", None) and one == other
