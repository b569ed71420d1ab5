"""The settings that all ranks have to agree on before they train together: the number of steps, the data, its division,
and its order.

The first rank publishes its values on the control store, every other rank compares its own with these. Ranks compare
before their first step, when their group comes back, and when a run goes on from a checkpoint, with the checkpoint as
well (a job that goes on may have another number of steps than the job before it). If one differs when a run begins, no
step is made. A group that comes back is refused, and the others go on.

Failures it assumes: the control store may be away for a while, or come back empty; it is asked until it answers.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_ft.config.schema import RunConfig
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.data.prefetch import Dataset
from megatron_ft.errors import DataError
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import place_name

Identity = Mapping[str, Any]
"""The compared names and values, as JSON has them."""

REFUSED = "identity/refused"
"""The key on the control store of the reason why no step was made."""


def of_run(config: RunConfig, steps: int) -> Identity:
    """Return the values that the settings and the script's number of ``steps`` determine."""
    return {
        "number of steps (session.steps)": steps,
        "seed": config.fault_tolerance.seed,
        "samples per microbatch": config.samples_per_microbatch,
        "microbatches per shard": config.microbatches_per_group,
        "shards": config.shards,
    }


def of_data(dataset: Dataset | None, known: Dataset | None = None) -> Identity:
    """Return the values that ``dataset`` determines; none while the dataset is not known.

    For a :class:`PackedDataset` these are all that select samples, for another one its ``fingerprint`` (an attribute,
    or a method without arguments; text, a number or anything else that JSON can hold). A dataset without one is
    compared, too: another rank's may have one.

    Args:
        known: the dataset that the script has named before; a function without a fingerprint is assumed to read it.
    """
    if dataset is None:
        return {} if known is None else of_data(known)
    owner: Any = getattr(dataset, "__self__", dataset)  # e.g. the owner of the method ``data.batch``
    if isinstance(owner, PackedDataset):
        return owner.identity
    found = getattr(owner, "fingerprint", None)
    found = found() if callable(found) else found
    if found is None and known is not None:
        return of_data(known)
    try:
        return {"dataset fingerprint": json.loads(json.dumps(found))}
    except (TypeError, ValueError):
        raise DataError(
            f"the fingerprint of the dataset is a {type(found).__name__}; it must be text, a number or something else that "
            f"JSON can hold, the same in every rank"
        ) from None


def difference(mine: Identity, theirs: Identity) -> tuple[str, Any, Any] | None:
    """Return the first name, in the order of ``mine``, that has two values, and both; None if there is none."""
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            return name, mine.get(name), theirs.get(name)
    return None


class Identities:
    """One rank's side. ``agreed`` are the values that this rank and all others have."""

    def __init__(
        self, agreement: CoordinationClient, group: int, position: int, begins: bool, host_rank: int | None = None
    ) -> None:
        """``begins``: True if this group is in the run from its start or checkpoint; False if it comes back."""
        self._agreement, self._begins = agreement, begins
        self._who = f"rank {position} of group {group} on {place_name(socket.gethostname(), host_rank)}"
        self.agreed: dict[str, Any] = {}

    def agree(self, what: str, mine: Identity, checkpoint: tuple[str, Identity] | None = None) -> None:
        """Compare ``mine`` with the published values of ``what``, and publish it if there are none.

        Args:
            what: ``"run"`` or ``"data"``, which are compared separately.
            checkpoint: path of the one that the run goes on from, and the values agreed on when it was saved.

        Raises ``DataError`` naming both ranks and both values.
        """
        if not mine or mine.items() <= self.agreed.items():
            return
        if checkpoint is not None:
            path, saved = checkpoint
            common = [name for name in mine if saved.get(name) is not None]  # an older checkpoint may have fewer names
            found = difference(*({name: values[name] for name in common} for values in (mine, saved)))
            if found is not None:
                self._refuse(*found, f"checkpoint {path} was saved", "start with the data it was saved with")
        standing = self._agreement.settle(f"identity/{what}", {"who": self._who, "identity": dict(mine)})
        found = difference(mine, standing["identity"])
        if found is not None:
            self._refuse(*found, f"{standing['who']} trains", "give all hosts the same data, script and config")
        self.agreed |= mine

    def settle(self, name: str, value: Any) -> Any:
        """Return the value of the first rank that has called this in the run."""
        standing = self._agreement.settle("identity/script", {"who": self._who, "identity": {name: value}})
        self.agreed[name] = standing["identity"][name]
        return self.agreed[name]

    def of_run(self) -> dict[str, Any]:
        """Return the values that the ranks of the run have agreed on; this rank may not have compared all of them yet."""
        standing = (self._agreement.get(f"identity/{what}") for what in ("run", "data", "script"))
        return {name: value for one in standing if one for name, value in one["identity"].items()} | self.agreed

    def _refuse(self, name: str, mine: Any, theirs: Any, who: str, remedy: str) -> NoReturn:
        why = f"{name} is {_shown(mine)} for {self._who}, but {who} with {_shown(theirs)}; {remedy}"
        if self._begins:
            self._agreement.put(REFUSED, why)
        raise DataError(why)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
