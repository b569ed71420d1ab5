"""Which group writes the final model after the last step: one at a time, and another one when the writer is lost.

A group that wants to write creates a numbered claim on the control store, which only one group can do. The owner of the
newest claim shows regularly that it works. A claim is over when its owner says that writing has failed, or when it has
shown nothing for ``lease_s`` seconds of the observer's own clock; then any group that has not tried creates the next one.

A writer that is only frozen may go on while its successor writes. Both write the same model, each under a name of its
own, and the file takes its final name in one step, so the model is whole whichever of them is later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """The newest claim, as it is on the control store.

    Args:
        number: from 0.
        owner: name of the start of the group that has created it.
        heartbeats: how often its owner has shown that it works.
        failed: why its owner could not write; empty as long as it may.
    """

    number: int
    owner: str
    heartbeats: int = 0
    failed: str = ""


Action = Literal["done", "claim", "write", "wait", "fail"]
"""What a rank does next: ``done``: return, the model is saved; ``claim``: create the claim with the next number;
``write``: its own claim stands; ``wait``: look again; ``fail``: no group is left that could write."""


@dataclass(frozen=True)
class Waiter:
    """One rank that wants the model to be saved.

    Args:
        own: name of the start of its group.
        lease_s: seconds after which a claim is over that shows nothing.
        since: the time at which the newest claim had last changed; at first, the time of the first look.
        may_write: the rank has not tried to write yet. Only one rank of a group may.
        claim: the newest claim at the last look.
        groups: number of groups that may write; after as many claims a failed one is the last. 0: it is not known.
    """

    own: str
    lease_s: float
    since: float
    may_write: bool = True
    claim: Claim | None = None
    groups: int = 0


def look(waiter: Waiter, saved: bool, claim: Claim | None, now: float) -> tuple[Waiter, Action]:
    """Return the group's state and next action, after it has looked at the store.

    Args:
        saved: whether a group has said that the model is saved.
        claim: the newest claim; None without one.
        now: time of this process's own clock, in seconds.
    """
    if saved:
        return waiter, "done"
    if claim != waiter.claim:
        waiter = replace(waiter, claim=claim, since=now)
    if waiter.may_write and claim is not None and claim.owner == waiter.own:
        return replace(waiter, may_write=False), "write"
    if claim is not None and not claim.failed and now - waiter.since < waiter.lease_s:
        return waiter, "wait"
    if waiter.may_write:
        return waiter, "claim"
    all_tried = claim is not None and claim.failed and claim.number + 1 >= waiter.groups > 0
    # A rank that may write needs up to one lease to see that the owner is gone.
    return waiter, "wait" if now - waiter.since < 2 * waiter.lease_s and not all_tried else "fail"
