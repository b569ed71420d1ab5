"""The microbatches of a map-style dataset: every sample once per epoch, the same batch whoever loads it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tempfile
import time
from itertools import product
from multiprocessing.context import ForkContext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from megatron_ft.data.loader import Loader, of_dataloader
from megatron_ft.data.prefetch import Prefetcher
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.types import Microbatch


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Large:
    """Samples of 400 kB."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((100_000,), float(index))}


class Noisy(Numbers):
    """Draws random numbers, and can kill the process that loads a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return index + torch.rand(1)


class Stream:
    def __getitem__(self, number: int) -> int:
        return number


def loader(dataset, groups=2, per_group=2, samples=3, **options) -> Loader:
    shape = {"groups": groups, "microbatches_per_group": per_group, "samples_per_microbatch": samples}
    return Loader(dataset, **shape, seed=7, **options)


def all_of(one: Loader, steps: int, groups=2, per_group=2) -> list[list[int]]:
    return [one(Microbatch(*place)).tolist() for place in product(range(steps), range(groups), range(per_group))]


@given(size=st.integers(1, 40), groups=st.integers(1, 3), per_group=st.integers(1, 3), samples=st.integers(1, 4))
def test_every_epoch_has_every_sample_once_shuffled_or_not(size, groups, per_group, samples):
    for shuffle in (True, False):
        one = loader(Numbers(size), groups, per_group, samples, shuffle=shuffle)
        steps = len(one)
        assert (steps - 1) * groups * per_group * samples < size <= steps * groups * per_group * samples
        seen = [index for batch in all_of(one, 2 * steps, groups, per_group) for index in batch]
        assert sorted(seen[:size]) == sorted(seen[size : 2 * size]) == list(range(size))
        if not shuffle:
            assert seen[:size] == list(range(size))
        assert one.epoch(0) == 0 and one.epoch(2 * steps) >= 1


def test_a_stream_gives_the_samples_in_their_order_for_ever():
    one = loader(Stream())
    assert [index for batch in all_of(one, 3) for index in batch] == list(range(36))
    assert one.epoch(10**6) == 0
    with pytest.raises(TypeError, match="no epochs"):
        len(one)


def test_workers_load_the_same_random_batches_as_other_workers_and_as_the_rank_in_any_order():
    order = [Microbatch(*place) for place in product(range(2), range(2), range(2))]
    one, other, none = (loader(Noisy(1000), num_workers=workers) for workers in (1, 2, 0))
    one.expect(order)
    first = {microbatch: one(microbatch) for microbatch in order}
    other.expect(order[:3])
    prefetcher = Prefetcher(seed=7)
    prefetcher.begin(none, order, [], [])
    for microbatch in reversed(order):
        assert torch.equal(other(microbatch), first[microbatch])
        assert torch.equal(prefetcher.get(microbatch)[0], first[microbatch])
    prefetcher.close()
    assert len({float(batch[0] % 1) for batch in first.values()}) == len(order), "each has random numbers of its own"


def test_the_prefetcher_has_workers_load_what_comes_next():
    prefetcher, one = Prefetcher(), loader(Numbers(1000), num_workers=2)
    own = [Microbatch(0, 0, 0), Microbatch(0, 0, 1)]
    prefetcher.begin(one, own, [Microbatch(0, 1, 0)], [Microbatch(1, 0, 0)])
    assert len(one._loading) == 4
    expected = loader(Numbers(1000))
    for microbatch in own:
        assert torch.equal(prefetcher.get(microbatch)[0], expected(microbatch))
    prefetcher.begin(one, [Microbatch(1, 0, 0)], [], [])
    assert torch.equal(prefetcher.get(Microbatch(1, 0, 0))[0], expected(Microbatch(1, 0, 0)))
    prefetcher.close()


def test_workers_need_neither_shared_memory_nor_a_short_temporary_directory(tmp_path, monkeypatch):
    """A batch with tensors of a size for which torch would make a file in /dev/shm and a socket in TMPDIR."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(multiprocessing.process.current_process(), "_config", {"semprefix": "/mp"})
    one = loader(Large(12), num_workers=1, shuffle=False)
    assert one(Microbatch(0, 0, 0))["x"].shape == (3, 100_000)
    assert not list(long.iterdir())


def test_workers_that_cannot_be_started_are_an_error_with_a_remedy(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ForkContext, "Value", full)
    with pytest.raises(DataError, match="num_workers is 1.*No space left.*/dev/shm.*num_workers=0"):
        loader(Numbers(9), num_workers=1)


def test_a_worker_that_dies_is_an_error_with_a_remedy():
    one = loader(Noisy(12), num_workers=1, shuffle=False)
    assert len(one(Microbatch(0, 0, 0))) == 3
    with pytest.raises(DataError, match="a worker process has died.*fewer num_workers"):
        one(Microbatch(0, 1, 1))


def test_workers_end_with_their_process_whatever_kills_it():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        one = loader(Numbers(10), num_workers=2)
        os.write(write, " ".join(map(str, one._pool._processes)).encode())
        signal.pause()
    workers = list(map(int, os.read(read, 100).split()))
    assert len(workers) == 2
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{worker}/exe") and _lives(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_dataloader_gives_dataset_order_collate_and_workers():
    def collate(samples):
        return samples

    data = TensorDataset(torch.arange(10))
    given_ = of_dataloader(DataLoader(data, 3, shuffle=True, collate_fn=collate, num_workers=2), 3)
    assert given_["dataset"] is data and given_["shuffle"] and given_["num_workers"] == 2
    assert given_["collate_fn"] is collate
    assert not of_dataloader(DataLoader(data, 3), 3)["shuffle"]
    for shuffle in (True, False):
        sampler = DistributedSampler(data, 2, 0, shuffle=shuffle)
        assert of_dataloader(DataLoader(data, 3, sampler=sampler), 3)["shuffle"] == shuffle


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda: of_dataloader([1], 3), "a list is not a torch DataLoader"),
        (lambda: of_dataloader(DataLoader(Numbers(9), 2), 3), "batch_size 2 and a microbatch has 3 samples"),
        (lambda: of_dataloader(DataLoader(Endless(), 3), 3), "session.prepare: a Endless has no dataset"),
        (
            lambda: of_dataloader(DataLoader(Numbers(9), 3, sampler=RandomSampler(Numbers(9), num_samples=6)), 3),
            "gives 6 of 9 numbers, the dataset has 9 samples.*Subset",
        ),
        (
            lambda: of_dataloader(DataLoader(Numbers(9), 3, sampler=SequentialSampler(range(6))), 3),
            "gives 6 of 6 numbers, the dataset has 9 samples",
        ),
        (
            lambda: of_dataloader(DataLoader(Numbers(9), 3, sampler=WeightedRandomSampler([1.0] * 9, 9)), 3),
            "has a WeightedRandomSampler",
        ),
        (lambda: loader(Endless()), "has no dataset"),
        (lambda: loader(Numbers(9), num_workers=-1), "num_workers is -1"),
    ],
)
def test_what_cannot_be_loaded_by_number_is_refused(refused, why):
    with pytest.raises(ConfigError, match=why):
        refused()


def test_ranks_compare_the_data_and_its_order():
    class Named(Numbers):
        fingerprint = "abc"

    assert loader(Named(5)).fingerprint == {"dataset": "abc", "samples": 5, "shuffle": True}
    assert (
        loader(Numbers(5)).fingerprint
        != loader(Numbers(6)).fingerprint
        != loader(Numbers(6), shuffle=False).fingerprint
    )
