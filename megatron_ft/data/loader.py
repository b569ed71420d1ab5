"""The microbatches of a map-style dataset, as ``torch.utils.data.DataLoader`` users expect them, by microbatch id.

A microbatch is a pure function of its id: shuffling follows ``data.order``, and a worker process seeds its generators
(``data.generators``) as the prefetcher does in the rank, so that augmentations are the same whichever group computes it.

Failures it assumes: a worker process dies (the rank then fails, and is started again as any other); the rank is killed (its
workers die with it, so that no inherited socket stays open).
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from megatron_ft.data import generators
from megatron_ft.data.order import BatchSchedule, data_seed, sample_indices
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.types import Microbatch
from megatron_ft.utils import lifeline, process_name

_AHEAD = 2
"""Microbatches that are loaded ahead for each worker, as DataLoader's ``prefetch_factor``."""


class Loader:
    """Microbatches of ``dataset``; see ``Session.loader``. Calls of a loader do not overlap, but :meth:`expect`
    may be called meanwhile.

    Args:
        groups: N, the number of shards in a step; not the number of live groups.
        microbatches_per_group: number of microbatches in a shard, or the numbers of all steps.
        seed: of the order and of the workers' random numbers.
        others: as in ``Session.loader``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        groups: int,
        microbatches_per_group: int | BatchSchedule,
        samples_per_microbatch: int,
        seed: int,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> None:
        _check_indexed(dataset, "session.loader")
        if not isinstance(num_workers, int) or num_workers < 0:
            raise ConfigError(f"session.loader: num_workers is {num_workers!r}; it must be a whole number >= 0")
        self._size = len(dataset) if hasattr(dataset, "__len__") else None
        if self._size == 0:
            raise DataError("session.loader: the dataset has no samples")
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._groups, self._sizes = groups, BatchSchedule.of(microbatches_per_group)
        self._samples = samples_per_microbatch
        self.tokens_per_microbatch: int = samples_per_microbatch * getattr(dataset, "seq_len", 0)
        """0 if the dataset does not say how long its samples are."""
        self._collate = collate_fn or default_collate
        self._expected: list[Microbatch] = []
        self._loading: dict[Microbatch, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._workers, self._pool = num_workers, None
        if num_workers:
            # Forked now: later this process has connections that a fork would hold open.
            context = _Forking()
            try:
                own = (os.getpid(), context.Value("i", 0), dataset, self._collate, worker_init_fn)
                self._pool = ProcessPoolExecutor(num_workers, context, _begin, own)
                # no limit: the start of the workers; the script's worker_init_fn is its own code
                self._pool.submit(int).result()
            except OSError as error:
                raise DataError(
                    f"session.loader: num_workers is {num_workers}, and no worker process can be started: {error}; their "
                    f"semaphores are in /dev/shm: make it larger (docker run --shm-size 1g), or use num_workers=0"
                ) from None

    @property
    def read_ahead(self) -> bool:
        """See ``data.prefetch.Dataset``. A thread that waits for a worker disturbs nothing."""
        plain = getattr(self._dataset, "read_ahead", False) and self._collate is default_collate
        return self._pool is not None or plain

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What all ranks compare: the dataset's own ``fingerprint`` (or that of Hugging Face's or Megatron's datasets), else
        its type and size, and the order."""
        names = ("fingerprint", "_fingerprint", "unique_description_hash")
        own = next(filter(None, (getattr(self._dataset, name, None) for name in names)), None)
        own = own() if callable(own) else own
        return {"dataset": own or type(self._dataset).__name__, "samples": self._size, "shuffle": self._shuffle}

    def __len__(self) -> int:
        """Return the number of steps of one data epoch with the first step's size, rounded up. Raises ``TypeError`` for a
        stream."""
        if self._size is None:
            raise TypeError("the dataset has no length, so it has no epochs")
        return -(-self._size // (self._groups * self._sizes.at(0) * self._samples))

    def epoch(self, step: int) -> int:
        """Return the number of the data epoch in which ``step`` begins, from 0; always 0 for a stream."""
        return 0 if self._size is None else self._sizes.before(step) * self._groups * self._samples // self._size

    def indices(self, microbatch: Microbatch) -> list[int]:
        """Return the sample numbers of a microbatch. Every sample occurs once per data epoch; a step may contain samples of
        two epochs."""
        if self._size is not None and self._shuffle:
            return sample_indices(
                microbatch,
                groups=self._groups,
                microbatches_per_group=self._sizes,
                samples_per_microbatch=self._samples,
                num_samples=self._size,
                seed=self._seed,
            ).tolist()
        number = self._sizes.number(microbatch, self._groups)
        numbers = range(number * self._samples, (number + 1) * self._samples)
        return list(numbers) if self._size is None else [each % self._size for each in numbers]

    def expect(self, microbatches: Iterable[Microbatch]) -> None:
        """Begin to load those that come next, in this order; forget all others."""
        if self._pool is None:
            return
        with self._lock:
            self._expected = list(microbatches)
            for microbatch in self._loading.keys() - set(self._expected):
                self._loading.pop(microbatch).cancel()
            self._load_ahead()

    def _load_ahead(self) -> None:
        for microbatch in self._expected:
            if len(self._loading) >= _AHEAD * self._workers:
                return
            if microbatch not in self._loading:
                self._loading[microbatch] = self._submit(microbatch)

    def _submit(self, microbatch: Microbatch) -> Future[bytes]:
        assert self._pool is not None
        return self._pool.submit(_load, self.indices(microbatch), data_seed(self._seed, microbatch))

    def __call__(self, microbatch: Microbatch) -> Any:
        """Return the batch of a microbatch. Raises what the dataset raises, and ``DataError`` if a worker has died."""
        if self._pool is None:
            return self._collate(_samples(self._dataset, self.indices(microbatch)))
        try:
            with self._lock:
                loading = self._loading.pop(microbatch, None) or self._submit(microbatch)
                self._expected = [other for other in self._expected if other != microbatch]
                self._load_ahead()
            # no limit: one call of the dataset, as for Prefetcher.get; a worker that dies ends it
            return pickle.loads(loading.result())
        except BrokenProcessPool:
            raise DataError(
                "session.loader: a worker process has died; if the kernel killed it for memory (dmesg says so), use fewer "
                "num_workers"
            ) from None


def _check_indexed(dataset: Any, caller: str) -> None:
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{caller}: a {type(dataset).__name__} has no dataset[index]; any group must be able to load any sample. Write "
            f"the stream to files once, by megatron_ft.data.prepare(directory, documents=stream), or give an object whose "
            f"dataset[number] returns the sample with that number"
        )


def _samples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Return the samples, all in one call where the dataset has one for that, as Hugging Face's and ``torch.utils.data``."""
    several = getattr(dataset, "__getitems__", None)
    return several(indices) if several else [dataset[index] for index in indices]


def of_dataloader(dataloader: Any, samples_per_microbatch: int) -> dict[str, Any]:
    """Return the arguments of :class:`Loader` for a ``torch.utils.data.DataLoader``. Raises ``ConfigError``."""
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"session.prepare: a {type(dataloader).__name__} is not a torch DataLoader; give session.loader a dataset"
        )
    _check_indexed(dataloader.dataset, "session.prepare")
    if dataloader.batch_size != samples_per_microbatch or type(dataloader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"session.prepare: the DataLoader has batch_size {dataloader.batch_size} and a microbatch has "
            f"{samples_per_microbatch} samples; set train_micro_batch_size_per_gpu in the config to the same number (a "
            f"batch_sampler of your own cannot be used: give session.loader a dataset)"
        )
    sampler = dataloader.sampler
    shuffles = {
        RandomSampler: not getattr(sampler, "replacement", False),
        SequentialSampler: True,
        DistributedSampler: True,
    }
    if not shuffles.get(type(sampler), False):
        raise ConfigError(
            f"session.prepare: the DataLoader has a {type(sampler).__name__}; microbatches are found by number, in the "
            f"dataset's order or shuffled. Give session.loader a dataset whose dataset[index] is in your order"
        )
    _check_complete(sampler, dataloader.dataset)
    return {
        "dataset": dataloader.dataset,
        "shuffle": type(sampler) is RandomSampler or bool(getattr(sampler, "shuffle", False)),
        "collate_fn": dataloader.collate_fn,
        "num_workers": dataloader.num_workers,
        "worker_init_fn": dataloader.worker_init_fn,
    }


def _check_complete(sampler: Any, dataset: Any) -> None:
    """Raise ``ConfigError`` for a sampler of other numbers than those of all samples, each once."""
    if not hasattr(dataset, "__len__"):
        return
    source: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler.data_source
    drawn = sampler.num_samples if isinstance(sampler, RandomSampler) else len(source)
    if not len(source) == drawn == len(dataset):
        raise ConfigError(
            f"session.prepare: the {type(sampler).__name__} of the DataLoader gives {drawn} of {len(source)} numbers, the "
            f"dataset has {len(dataset)} samples, and an epoch has all of them; give a DataLoader of a "
            f"torch.utils.data.Subset"
        )


class _Worker(ForkProcess):
    """A worker process, which its rank does not wait for when it ends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "daemon": True})


class _Forking(ForkContext):
    Process = _Worker


# ---------------------------------------------------------------------------------------------------- in a worker process

_dataset: Any = None
_collate: Callable[[list[Any]], Any] = default_collate


def _begin(
    parent: int,
    count: Any,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    init: Callable[[int], Any] | None,
) -> None:
    """Prepare a worker process: it ends with its rank, and Ctrl-C is the rank's affair. ``count``: workers so far."""
    global _dataset, _collate
    lifeline.end_with(parent)
    process_name.take("data worker", "ft-data")
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)
    torch.set_num_threads(1)
    _dataset, _collate = dataset, collate
    with count.get_lock():
        number, count.value = count.value, count.value + 1
    if init is not None:
        init(number)


def _load(indices: Sequence[int], seed: int) -> bytes:
    """Return a pickled batch. torch would pass its tensors through files in /dev/shm, which containers keep small, and
    through sockets whose paths a long TMPDIR makes too long."""
    generators.seed(seed)
    return pickle.dumps(_collate(_samples(_dataset, indices)), protocol=pickle.HIGHEST_PROTOCOL)
