"""An evaluation between two steps that all groups share (``core.scheduling.evaluation_division``).

The control store has the division, the result of each chunk and the total; there is no communicator between the groups, so
no group waits for one that is lost. The leader of a group decides, and all its ranks compute each batch.

Failures it assumes: a group dies, freezes or is cut off at any moment; the store may come back empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from megatron_ft.core.scheduling.evaluation_division import Division, collects, next_chunk
from megatron_ft.data import generators
from megatron_ft.data.order import evaluation_seed
from megatron_ft.errors import DataError
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import GroupId

_LOOK_S = (0.02, 0.25)
_PATIENCE_S = 1.0
"""A group computes the chunks of others, too, when none has come for so many seconds and for twice the time of its own
longest chunk."""
SAMPLES = "samples"
"""Name of the number of samples in the result."""

Sums = dict[str, float]


class Samples(Protocol):
    """A dataset of the kind that ``torch.utils.data.DataLoader`` takes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Evaluation:
    """One evaluation, at one rank.

    Args:
        fn: batch -> name -> value; the values of all batches are added up.
        dataset: the samples.
        batch: number of samples in a batch.
        collate: samples -> batch; None: torch's ``default_collate``.
        name: name of the evaluation, for messages.
        seed: seed of the run, for the numbers that samples, ``collate`` and ``fn`` draw.
        key: its prefix on the control store; no other evaluation of the run has it.
    """

    def __init__(
        self,
        fn: Callable[[Any], Mapping[str, Any]],
        dataset: Samples,
        batch: int,
        collate: Callable[[list[Any]], Any] | None,
        name: str,
        seed: int,
        key: str,
    ) -> None:
        self._fn, self._dataset, self._batch = fn, dataset, batch
        self._collate: Callable[[list[Any]], Any] = collate or default_collate
        self._name, self._seed, self._key = name, seed, key
        self._samples = len(dataset)
        if not self._samples:
            raise DataError(f"session.evaluate: the dataset of {name!r} has no samples")

    def compute(self, batches: Sequence[range]) -> Sums:
        """Evaluate batches, given by the numbers of their samples. Raises what the script's function raises."""
        sums: Sums = {}
        with torch.no_grad():
            for samples in batches:
                generators.seed(evaluation_seed(self._seed, self._name, samples.start))
                found = self._fn(self._collate([self._dataset[index] for index in samples]))
                if not isinstance(found, Mapping):
                    raise DataError(
                        f"session.evaluate: the function of {self._name!r} returned a {type(found).__name__}; it must "
                        f"return a mapping of names to the sums over the batch"
                    )
                _add(sums, {**found, SAMPLES: len(samples)})
        return sums

    def share(
        self,
        agreement: CoordinationClient,
        me: GroupId,
        live: Sequence[GroupId],
        lost: Callable[[], Collection[GroupId]],
        carry_out: Callable[[Sequence[range]], Sums] | None,
    ) -> Sums:
        """Leader: take part until the total is known, and return it. Raises ``DataError``.

        Args:
            live: the members of the newest view.
            lost: returns those of them that are known to be lost.
            carry_out: has this group compute batches; None for a group that has no state yet: it waits for the total.
        """
        wanted = {"groups": list(live), "samples": self._samples, "batch": self._batch}
        plan = agreement.create(f"{self._key}/plan", wanted)
        if (plan["samples"], plan["batch"]) != (self._samples, self._batch):
            raise DataError(
                f"session.evaluate: {self._name!r} has {self._samples} samples in batches of {self._batch} in group {me}, "
                f"and {plan['samples']} in batches of {plan['batch']} in another one; all groups must evaluate the same data"
            )
        division = Division(tuple(plan["groups"]), self._samples, self._batch)
        # What a chunk is depends on their number: a store that came back empty may have been given another plan.
        keys = [f"{self._key}/chunk/{number}of{division.chunks}" for number in range(division.chunks)]
        published: dict[int, Sums] = {}
        patience_s, since, pause_s = _PATIENCE_S, time.monotonic(), _LOOK_S[0]
        # no limit: each turn asks the store, which has its patience, and a group computes itself what comes too late;
        # one that has no state yet waits for groups that have it, and ends with them
        while (total := agreement.get(f"{self._key}/total")) is None:
            gone, late = lost(), time.monotonic() - since > patience_s
            if late or collects(division, me, gone):
                for chunk, key in enumerate(keys):
                    if chunk not in published and (sums := agreement.get(key)) is not None:
                        published[chunk], since, late = sums, time.monotonic(), False
            if len(published) == division.chunks:
                whole: Sums = {}
                for _, part in sorted(published.items()):
                    _add(whole, part)
                agreement.create(f"{self._key}/total", whole)
                agreement.delete(keys)
            elif carry_out and (number := next_chunk(division, me, published, gone, late)) is not None:
                began = time.monotonic()
                sums = carry_out([division.samples_of(batch) for batch in division.batches_of(number)])
                published[number] = agreement.create(keys[number], sums)
                since = time.monotonic()
                patience_s = max(patience_s, 2 * (since - began))
            else:
                time.sleep(pause_s)  # other groups compute; when they are late, this group computes their part
                pause_s = min(2 * pause_s, _LOOK_S[1])
        return total

    def left(self) -> list[str]:
        """Return the keys that the store still has of it when it has ended."""
        return [f"{self._key}/plan", f"{self._key}/total"]


def _add(sums: Sums, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value)
