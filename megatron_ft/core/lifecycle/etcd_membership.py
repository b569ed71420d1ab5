"""The members of the run's own etcd: the hosts that begin it, and the replacement of a lost member. Decisions only.

Intuition. Three members survive the loss of one; they survive the later loss of a second only if another host has
become a member meanwhile. The newcomer first receives all data without a vote (a *learner*), so that nothing depends on
it yet. Then the lost member is removed and the newcomer gets its vote: between the two changes there are two members,
for some milliseconds, and both are reachable. etcd makes or refuses each change as a whole, and the next one follows
from the members that stand then. So if any host dies in between, another one goes on.

Assumes: a host's list of the members may be old; a change that is refused is decided again. etcd has at most one
learner. A member whose host only seems lost is replaced, too; it finds itself removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

SIZE = 3
"""The number of members. Five would survive two losses at once, and cost two more hosts in every write."""
PATIENCE_S = 10.0
"""Seconds for which a host is silent before its member is replaced. If the host comes back, no replacement is needed."""
_TURN_S = 5.0


@dataclass(frozen=True)
class Member:
    """A member of etcd.

    Attributes:
        id: the identifier that etcd gave it.
        learner: True while it has no vote.
    """

    id: str
    learner: bool = False


@dataclass(frozen=True)
class Add:
    """Add this host as a learner."""


@dataclass(frozen=True)
class Remove:
    """Remove the member ``id``, which is lost or not needed."""

    id: str


@dataclass(frozen=True)
class Promote:
    """Give this host's learner ``id`` its vote."""

    id: str


Change = Add | Remove | Promote


@dataclass(frozen=True)
class Able:
    """A host's report of itself, before the run has its final control store.

    Attributes:
        lacks: why the host can start no etcd; empty if it can.
        directory: path of the run directory there; empty if it is not the directory of host 0.
    """

    lacks: str
    directory: str


def founders(hosts: Mapping[int, Able]) -> tuple[tuple[int, ...], str]:
    """Return the hosts on which the run's own etcd begins with ``"store": "auto"``, and the reason; none: the store is
    embedded.

    The decision depends on the reports of all hosts only, so all hosts come to the same one.
    """
    if len(hosts) < SIZE:
        return (), f"an etcd of the run's own needs {SIZE} hosts"
    if len(directories := {host.directory for host in hosts.values()}) > 1 or "" in directories:
        return (), "an etcd of the run's own needs a run directory that all hosts see at the same path"
    able = sorted(number for number, host in hosts.items() if not host.lacks)
    if len(able) < SIZE:
        number = min(hosts.keys() - set(able))
        return (
            (),
            f"{len(able)} of {SIZE} hosts that are needed can start an etcd; host {number}: {hosts[number].lacks}",
        )
    return tuple(able[:SIZE]), f"{len(able)} of {len(hosts)} hosts can start an etcd"


def change(members: Collection[Member], mine: str | None, lost: Collection[str], synced: bool) -> Change | None:
    """Return the change that this host must request from etcd now; None: none, or another host is to make it.

    Args:
        members: the present members.
        mine: id of this host's member that runs, if one does.
        lost: ids of members that are not coming back.
        synced: True if this host's learner has received all data.
    """
    own = next((member for member in members if member.id == mine), None)
    if own is not None and not own.learner:
        return None
    dead = sorted(
        (member for member in members if member.id in lost), key=lambda member: (not member.learner, member.id)
    )
    voters = [member for member in members if not member.learner]
    learners = [member for member in members if member.learner]
    if own is not None:
        if len(voters) >= SIZE and dead:
            return Remove(dead[0].id) if synced else None
        if len(voters) >= SIZE:
            return Remove(own.id)  # the member that it was to replace is back
        return Promote(own.id) if synced else None
    if learners:
        return Remove(dead[0].id) if dead and dead[0].learner else None
    return Add() if dead or len(voters) < SIZE else None


def patience_s(me: int, hosts: Collection[int]) -> float:
    """Return the seconds for which this host leaves a silent member's place to other hosts.

    Args:
        me: number of this host.
        hosts: all hosts that are well and not members.
    """
    return PATIENCE_S + _TURN_S * sum(host < me for host in hosts)
