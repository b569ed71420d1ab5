"""Prefetching: loads a group's own share of a step, then the rest of the shards it hosts.

The microbatches that a group takes over from a lost one are nearly always in its stack
(``core.replication.placement``), and so in memory when the step is interrupted. One background thread loads them, if the
dataset may be read ahead (:data:`Dataset`):

- The training thread loads a missing sample itself. It waits for at most one running call of the dataset, never for the
  queue.
- Calls of the dataset never overlap, so the dataset need not be thread-safe.
- A sample for which the dataset raises in the background is skipped; the training thread gets the error if it needs it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from megatron_ft.data import generators
from megatron_ft.data.loader import Loader
from megatron_ft.data.order import data_seed
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch

_log = logging.getLogger(__name__)

Dataset = Callable[[Microbatch], Any]
"""A function from a microbatch id to the input of the engine's loss function. It must be a pure function of the id.

It may draw from the global generators, which are seeded by the microbatch. Then it must be called in the training thread:
the generators belong to the process, and a background thread would draw the numbers of the model's dropout. With an
attribute ``read_ahead`` that is true, a dataset says that it does not draw, and a background thread calls it, too, one call
at a time; it has to name the device that it uses, if any.
"""


class Prefetcher:
    """Loads the samples of one group in the background. All methods belong to the training thread.

    It holds at most ``len(own) + len(stack)`` samples of the last :meth:`begin`: with own microbatches from the stack,
    at most one step's stack and the next step's own share.

    Args:
        seed: seed of the run, for the numbers that a dataset draws.
        calling: Called before and after each call of the dataset, in the calling thread.
    """

    def __init__(self, seed: int = 0, calling: Callable[[], None] = lambda: None) -> None:
        self._seed, self._calling = seed, calling
        self._dataset: Dataset | None = None
        self._may_prefetch = False
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
        """Begin a step: load these microbatches in this order, and drop all others.

        Args:
            dataset: The dataset.
            own: The step's microbatches that this group computes, in order.
            stack: The microbatches of the shards it hosts, which it may have to take over.
            following: Its own share of the next step, as far as it is known.
        """
        own, stack = tuple(own), tuple(stack)
        order = dict.fromkeys((*own, *stack, *following))
        with self._changed:
            if not _same(dataset, self._dataset):
                self._dataset, self._may_prefetch, self._held = dataset, False, {}
            self._held = {microbatch: sample for microbatch, sample in self._held.items() if microbatch in order}
            self._wanted = set(order)
            self._queue = deque(m for m in order if m not in self._held and m != self._loading)
            self._capacity = len(own) + len(stack)
            if isinstance(dataset, Loader):
                dataset.expect(self._queue)
            self._wake()

    def want(self, microbatches: Iterable[Microbatch]) -> None:
        """Load these microbatches of the present step too, before all others."""
        with self._changed:
            new = [m for m in microbatches if m not in self._held and m not in self._wanted and m != self._loading]
            self._wanted.update(new)
            self._queue.extendleft(reversed(new))
            self._capacity += len(new)
            if isinstance(self._dataset, Loader):
                self._dataset.expect(self._queue)
            self._wake()

    def held(self, microbatches: Iterable[Microbatch]) -> set[Microbatch]:
        """Return those of ``microbatches`` whose samples are in memory."""
        with self._changed:
            return self._held.keys() & set(microbatches)

    def rest(self, dataset: Dataset, step: int) -> None:
        """Begin step ``step`` without loading, because the step is too short for it. Loaded samples of it are kept."""
        with self._changed:
            if not _same(dataset, self._dataset):
                self._dataset, self._may_prefetch, self._held = dataset, False, {}
            if self._held:
                self._held = {
                    microbatch: sample for microbatch, sample in self._held.items() if microbatch.step >= step
                }
            self._wanted, self._queue = set(self._held), deque()

    def drop(self) -> None:
        """Drop all samples, and wait for a running call of the dataset: the samples of a microbatch are about to change."""
        with self._changed:
            self._held, self._wanted, self._queue = {}, set(), deque()
            if isinstance(self._dataset, Loader):
                self._dataset.expect(())
            # no limit: one call of the dataset, as for Prefetcher.get
            self._changed.wait_for(lambda: self._loading is None)

    def get(self, microbatch: Microbatch) -> tuple[Any, bool]:
        """Return the sample, which is no longer held then, and whether it was in memory at the time of the call.

        Raises whatever the dataset raises.
        """
        with self._changed:
            if microbatch in self._held:
                return self._take(microbatch), True
            self._asked = True  # this sample comes before the queue
            # no limit: one call of the dataset; agents judge: detector.hang_timeout_s, or storage_timeout_s while
            # others are in storage
            self._changed.wait_for(lambda: self._loading is None)
            if microbatch in self._held:  # it was just being loaded
                self._asked = False
                return self._take(microbatch), False
            self._wanted.discard(microbatch)
        try:
            return self._call(microbatch), False
        finally:
            with self._changed:
                self._asked = False
                self._changed.notify_all()

    def put_back(self, microbatch: Microbatch, sample: Any) -> None:
        """Hold a sample of the present step again. A microbatch whose sample is not held is computed later than others, so
        that its gradient would be added in another order."""
        with self._changed:
            self._wanted.add(microbatch)
            self._held[microbatch] = sample

    def close(self) -> None:
        """Begin no more calls of the dataset in the background, and drop all samples."""
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
        """Wake the thread if there is something to load. Needless wake-ups are expensive in a short step."""
        if self._queue:
            self._changed.notify_all()

    def _call(self, microbatch: Microbatch) -> Any:
        """Call the dataset in the training thread, while the background does not. The first call checks what the dataset
        says of itself, before the background begins."""
        assert self._dataset is not None, "a step has begun"
        if self._may_prefetch:
            return self._load(self._dataset, microbatch)
        number = data_seed(self._seed, microbatch)
        generators.seed(number)
        sample = self._load(self._dataset, microbatch)
        owner = getattr(self._dataset, "__self__", self._dataset)  # of a bound method
        if read_ahead := getattr(owner, "read_ahead", False):
            if names := generators.drawn(number):
                raise DataError(
                    f"the dataset has read_ahead = {read_ahead!r} and draws from the global generator of "
                    f"{' and '.join(names)} for microbatch {microbatch}: a dataset that draws is called in the training "
                    f"thread only. Remove read_ahead, or let the dataset draw from a generator that it has made"
                )
            self._may_prefetch = True
        return sample

    def _load(self, dataset: Dataset, microbatch: Microbatch) -> Any:
        self._calling()
        try:
            return dataset(microbatch)
        finally:
            self._calling()

    # --- the background -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._load_next():
            pass

    def _load_next(self) -> bool:
        """Load one sample. Returns False at the end. It is a function so that the waiting thread keeps no sample
        alive."""
        job = self._next()
        if job is None:
            return False
        dataset, microbatch = job
        sample, found = None, False
        try:
            sample, found = self._load(dataset, microbatch), True
        except BaseException as error:  # an error of the user's code must not end this thread
            if not self._complained:  # a dataset that fails for one sample often fails for all
                _log.warning(f"the dataset failed in the background, training calls it itself: {error!r}")
            self._complained = True
        with self._changed:
            self._loading = None
            if found and microbatch in self._wanted and _same(dataset, self._dataset):
                self._held[microbatch] = sample
            self._changed.notify_all()
        return True

    def _next(self) -> tuple[Dataset, Microbatch] | None:
        """Wait for something to load, and return it; None at the end."""
        with self._changed:
            while True:
                # no limit: the thread that reads ahead has nothing else to do
                self._changed.wait_for(self._is_due)
                if self._closed:
                    return None
                microbatch = self._queue.popleft()
                if microbatch in self._wanted:  # otherwise the training thread was faster
                    self._loading = microbatch
                    assert self._dataset is not None, "what is wanted is wanted of a dataset"
                    return self._dataset, microbatch

    def _is_due(self) -> bool:
        if self._closed:
            return True
        room = len(self._held) < self._capacity
        return bool(self._queue) and room and not self._asked and self._may_prefetch


def _same(one: Dataset, other: Dataset | None) -> bool:
    """Return whether both are the same dataset. A bound method is a new object at each access."""
    if one is other:
        return True
    bound = getattr(one, "__self__", None)
    return bound is not None and bound is getattr(other, "__self__", None) and one == other
