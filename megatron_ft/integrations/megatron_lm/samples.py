"""The samples of Megatron-LM's loop, in the order in which its ``single`` dataloader deals them out.

Megatron deals samples in turn: in each round every data-parallel rank gets the next ``micro_batch_size`` of them. With this
layer the data-parallel ranks are those of all groups, numbered group by group; a shard of the session stands for a group
of the beginning. So the microbatch of a rank is a closed form of its id.

Failures it assumes: none; what a dataset raises is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch


@dataclass(frozen=True)
class Deal:
    """How samples are dealt out to one rank.

    Args:
        micro_batch: samples of a microbatch at one data-parallel rank.
        rank, ranks: number of this data-parallel rank in its group, and number of those of a group.
        shards: number of shards.
    """

    micro_batch: int
    rank: int
    ranks: int
    shards: int

    @property
    def round(self) -> int:
        """The number of samples that all ranks together get in one round."""
        return self.micro_batch * self.ranks * self.shards

    def numbers(self, begin: int, shard: int, index: int) -> range:
        """Return the numbers of this rank's samples in the ``index``-th microbatch of a shard, where the first sample of all
        has the number ``begin``."""
        first = begin + index * self.round + (shard * self.ranks + self.rank) * self.micro_batch
        return range(first, first + self.micro_batch)


class Source:
    """One of Megatron's datasets at one rank.

    Args:
        dataset: None where Megatron has built none, because this rank reads no samples.
        deal: how it is dealt out.
    """

    read_ahead = True
    """Megatron's datasets draw from generators of their own."""

    def __init__(self, dataset: Any, deal: Deal, position: int = 0) -> None:
        self.dataset, self.deal, self.position = dataset, deal, position
        self.begin_of: Callable[[int], int] = lambda step: 0
        self.fingerprint: Any = self.describe()

    @property
    def reads(self) -> bool:
        """True if this rank reads samples."""
        return self.dataset is not None

    def describe(self) -> Any:
        """Return what all ranks compare; None where nothing is read."""
        if self.dataset is None:
            return None
        known = getattr(self.dataset, "unique_description_hash", None) or type(self.dataset).__name__
        return {"dataset": known, "samples": len(self.dataset), "micro batch": self.deal.micro_batch}

    def __call__(self, microbatch: Microbatch) -> Any:
        """Return this rank's batch of a microbatch of a step."""
        return self.batch(self.deal.numbers(self.begin_of(microbatch.step), microbatch.shard, microbatch.index))

    def batch(self, numbers: range) -> Any:
        """Return the batch of some samples. Raises ``DataError`` beyond the last one."""
        if numbers[-1] >= len(self.dataset):
            raise DataError(
                f"sample {numbers[-1]} is asked for, and the dataset has {len(self.dataset)}: it was built for fewer steps"
            )
        return default_collate([self.dataset[number] for number in numbers])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise DataError(
            "Megatron's loop reads its data iterator itself; megatron_ft reads the samples of each microbatch by its id, so "
            "this way of training cannot be made fault-tolerant"
        )
