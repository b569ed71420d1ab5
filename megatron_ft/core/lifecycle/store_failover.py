"""The log of numbered claims: the host of the embedded control store, and the seats that are out of the run.

The run directory, which all hosts share, holds the log: claim n is a file that can be created only once, by a process that
has read all claims before it. A claim names the store's host and address, and the seats that it *fences*. An agent
makes a claim for its own host when the store's host is lost (a fail-over). A group makes one before it proposes a view
that leaves out a seat which may still live: the same store, and these seats fenced. A seat is one start of a group.
Only a seat that no claim fences may make a claim.

Three rules make it impossible that two views that exclude each other are both followed by commits, whichever stores they
were written to:

1. Before a group proposes a view that leaves out a member, it reads the log to its end, after it has decided so. Every seat
   that a claim has fenced is dead to the reader (:func:`verdicts`), and a fenced reader ends. So no live seat of such a view
   is fenced by a claim that is older than the view.
2. Before it does so, a claim fences each seat that the view leaves out, except those of which a process is known to have
   ended and those that have left in order (``messages.Propose.fence``).
3. A group that goes to another store puts its view there before anything else, and ends if another view of that epoch is
   there. So a group that reports an epoch on a store has adopted the view that stands there.

Proof. A view is followed by commits only if all its live seats adopt it, and a seat adopts one view of an epoch. Let the
views part after epoch e, V1 and V2 be the first ones of each side that all their live seats adopt, and S1, S2 the members
of view e among these. Neither is empty, because a group that enters has no say before it has connected or an older member
has reported; and they are disjoint, so each side leaves out the other's. If s1 in S1 and s2 in S2 were fenced by claims n2
and n1, say n1 < n2: the view for which n2 was made has s2 live and is younger than n1, against rule 1. Else all of one
side, say S2, were left out as ended. They had adopted V2 before they ended, and side 2 had fenced S1 before that, so side 1
has read of it (rule 1) when it leaves out the first of S2, with a fenced seat live; unless S1 had been left out as ended,
too, and so had adopted V1 before V2 was proposed, which was before S2 ended, which was before V1 was proposed.

Safety therefore depends neither on the place of the store nor on which store answers which process: a store of an older
claim that goes on beside the newest one can do no harm.

Assumes: a file is created at most once, whatever the file system delays, and a read that begins after a file was created
finds it; agents report the end of a process only when the kernel says so. Hosts may be dead, frozen, or cut off from some
hosts and not from the directory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_ft.core.protocol.messages import GroupFailed

HostId = int
Seat = tuple[int, int]
"""Group and incarnation."""

STEP_S = 0.5
"""The seconds that each further candidate waits longer before it claims the store."""
TIE_S = 0.3
"""The seconds that a host waits longer if it hears exactly half of the hosts: the store's own half may be well."""
MINORITY_S = 5.0
"""The seconds that a host waits longer if it hears fewer than half of the hosts: the others get time to fence it."""


@dataclass(frozen=True)
class Claim:
    """One entry of the log.

    Args:
        number: its place in the log; the store's host of the launch writes number 0.
        run_id: id of the run. A claim of another run is never followed.
        host: number of the host that hosts the store from now on.
        address: where that store listens, ``HOST:PORT``.
        fenced: seats that are out of the run from now on.
        by: number of the host on which the claim was made.
        reason: one sentence for people.
    """

    number: int
    run_id: str
    host: HostId
    address: str
    fenced: frozenset[Seat] = frozenset()
    by: HostId = 0
    reason: str = ""


def fenced(claims: Iterable[Claim]) -> frozenset[Seat]:
    """Return all seats that the claims of a log fence."""
    return frozenset().union(*(claim.fenced for claim in claims))


def unfenced(seats: Iterable[Seat], claims: Iterable[Claim]) -> frozenset[int]:
    """Return the groups of those of the seats that no claim fences; for a view's members, those that may go on."""
    return frozenset(group for group, _ in frozenset(seats) - fenced(claims))


def verdicts(claim: Claim) -> tuple[GroupFailed, ...]:
    """Return the verdicts of a claim for a group that reads it: each fenced seat is dead; a reader that is fenced ends.

    Their reason is that of the claim: a view has the same cause, whichever group proposes it.
    """
    return tuple(GroupFailed(group, claim.reason, incarnation) for group, incarnation in sorted(claim.fenced))


def may_claim(own: Collection[Seat], claims: Iterable[Claim]) -> bool:
    """Return whether a host with these seats may make the next claim. A host without seats (a spare) may."""
    out = fenced(claims)
    return not own or any(seat not in out for seat in own)


def taken_over(last: Claim, host: HostId, address: str, reason: str) -> Claim:
    """Return the claim by which ``host`` hosts the store from now on."""
    return Claim(last.number + 1, last.run_id, host, address, by=host, reason=reason)


def fence(last: Claim, seats: Collection[Seat], by: HostId, reason: str) -> Claim:
    """Return the claim that fences ``seats``; the store stays where it is."""
    return Claim(last.number + 1, last.run_id, last.host, last.address, frozenset(seats), by, reason)


@dataclass(frozen=True)
class Outlook:
    """The knowledge from which one agent decides whether to take the store over.

    Args:
        me: number of its host.
        hosts: hosts with a member of the newest view that it knows, and its own host if a group there has entered a later
            view; without the members that the log has fenced (:func:`unfenced`).
        heard: hosts whose heartbeats arrive here, and this one.
        reaching: of those heard, hosts whose heartbeats say that they hear the store's host, or that the store answers them.
        store: host of the newest claim.
        answers: True if the store answers this agent.
        seats: those of the groups on this host that may still live.
        out: all seats that the log has fenced.
        keeps: True if this agent runs the store when its host is that of the newest claim. An agent that was started on
            that host after another had ended does not run it.
    """

    me: HostId
    hosts: frozenset[HostId]
    heard: frozenset[HostId]
    reaching: frozenset[HostId]
    store: HostId
    answers: bool
    seats: frozenset[Seat] = frozenset()
    out: frozenset[Seat] = frozenset()
    keeps: bool = True


def due_s(outlook: Outlook) -> float | None:
    """Return the seconds this outlook must last until the agent claims the store for its host; None: it never does.

    The hosts that hear each other take turns, in the order of their numbers after the lost one's. A host that hears few
    others is probably the one that is cut off, and waits until the others have had the time to fence it. Hosts that
    hear no member need no store: it would be taken from those that go on. A group that was started again and has no
    seat yet is no member.
    """
    me, heard = outlook.me, outlook.heard | {outlook.me}
    orphan = me == outlook.store and not outlook.keeps  # the others hear this host, and wait for it
    lost = not outlook.answers and (orphan or (outlook.store not in heard and not outlook.reaching & heard))
    if not lost or not heard & outlook.hosts or (outlook.seats and outlook.seats <= outlook.out):
        return None
    if orphan:
        return 0.0
    turns = sorted(heard, key=lambda host: (host < outlook.store, host))
    waits_s = turns.index(me) * STEP_S
    here = 2 * len(heard & outlook.hosts)
    return waits_s + (MINORITY_S if here < len(outlook.hosts) else TIE_S if here == len(outlook.hosts) else 0.0)
