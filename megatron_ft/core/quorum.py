"""Who keeps a member of the run's own etcd, and how a member whose host is lost is replaced: decisions only.

Intuition. Three members survive the loss of one; the loss of a second, later, only if another host has become a member
meanwhile. The newcomer first learns all there is without a vote (a *learner*), so that nothing depends on it yet. Then the
lost member is removed and the newcomer gets its vote: between the two there are two members, for some milliseconds, and
both are there. Each change is one that etcd makes or refuses as a whole, and the next one follows from what stands then.
So whoever dies in between, another host goes on.

Assumes: what a host says of the members may be old; a change that is refused is thought about again. etcd has one learner at
most. A member whose host only seems lost is replaced, too; it finds itself removed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SIZE = 3
"""Members. Five would survive two losses at once, and cost two more hosts in every write."""
PATIENCE_S = 10.0
"""So long a host is silent before its member is replaced. It may come back, and then nothing is better."""
_TURN_S = 5.0


@dataclass(frozen=True)
class Member:
    """``id``: etcd's. ``learner``: it has no vote yet."""

    id: str
    learner: bool = False


@dataclass(frozen=True)
class Add:
    """This host becomes a learner."""


@dataclass(frozen=True)
class Remove:
    """A member that is lost, and does not count any more."""

    id: str


@dataclass(frozen=True)
class Promote:
    """This host's learner gets its vote."""

    id: str


Change = Add | Remove | Promote


def change(members: Collection[Member], mine: str | None, lost: Collection[str], synced: bool) -> Change | None:
    """What this host is to ask etcd for now; None: nothing, or to wait for somebody else.

    Args:
        mine: the id of this host's member that runs, if one does.
        lost: ids of those that are not coming back.
        synced: whether this host's learner knows all there is to know.
    """
    own = next((member for member in members if member.id == mine), None)
    if own is not None and not own.learner:
        return None
    dead = sorted((member for member in members if member.id in lost), key=lambda member: (not member.learner, member.id))
    voters = [member for member in members if not member.learner]
    learners = [member for member in members if member.learner]
    if own is not None:
        if len(voters) >= SIZE and dead:
            return Remove(dead[0].id) if synced else None
        if len(voters) >= SIZE:
            return Remove(own.id)  # the one it was to replace is back
        return Promote(own.id) if synced else None
    if learners:
        return Remove(dead[0].id) if dead and dead[0].learner else None
    return Add() if dead or len(voters) < SIZE else None


def patience_s(me: int, hosts: Collection[int]) -> float:
    """How long this host leaves a silent member's place to others. ``hosts``: all that are well and not members."""
    return PATIENCE_S + _TURN_S * sum(host < me for host in hosts)
