"""Hosts that do not hear each other: the limit of a silence, and the hosts that leave.

Every agent sends a heartbeat to every other one, twenty times a second; if there are many hosts, to some
(:func:`are_partners`). A missing heartbeat has several possible causes: the other host is gone, or the way from it, or the
way *to* it, or it was too busy. So silence accuses a pair of hosts, not one of them, and the silences of all agents are
combined before any host leaves (hard cases 12, 13):

- the host that misses, or is missed by, the most others leaves first, until no two that stay miss each other. A host
  that is cut off from all others but not from the control store is *itself* the one that leaves, whatever it believes;
- among equals, a host that has not accused another leaves first: it is probably gone; then the one with fewer live
  groups; then the one with the higher number, so that all groups decide the same.

One agent alone waits long, because the fault may be its own. Each heartbeat says which hosts its sender *doubts*: those
whose silence is three times the longest gap of that link, and at least ``agreed_s``. When all hosts that an agent hears
doubt the same host as it does, and together are more than half of all hosts, it waits no longer (:func:`are_agreed`). The
side of a cut that has no majority, two hosts, and hosts of which each hears only some wait for ``least_s``.

Assumes: heartbeats may be lost, doubled or late. Time in which the agent itself did not run does not count as silence. A
host that was never heard may not know this host yet, and is waited for longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megatron_ft.types import GroupId

LISTEN_S = 0.1
"""The most seconds that one look adds to a silence."""
AGREED = 3 / 8
"""``agreed_s`` as a part of ``least_s``."""
FIRST_S = 30.0
"""Least time in seconds for which the first heartbeat of a host is awaited."""
_FACTOR = 3.0
_MOST_S = 30.0
"""The limit of a silence grows no further, however slowly the gaps of a link have grown."""
_GAP_FORGOTTEN = 0.9995
"""The longest gap fades with every heartbeat: half of it is forgotten after about 1,400, one minute and a quarter."""

EVERYBODY = 32
"""Up to this number of hosts, all send heartbeats to each other."""

Unit = tuple[GroupId, ...]
"""The groups of one host, which are reached, and lost, together."""


def are_partners(one: int, other: int, hosts: int) -> bool:
    """Return whether two of ``hosts`` hosts send heartbeats to each other. A host that came later, with a number from
    ``hosts`` on, takes the place of that number modulo ``hosts``.

    Of many hosts, those that are 1, 2, 4, 8, ... numbers apart around the circle do: 2 log2(hosts) partners for each.
    These are neighbours, which share a rack, and hosts far away, so when racks are cut off, all their hosts are missed
    and leave.
    """
    if one == other:
        return False
    apart = (one - other) % hosts
    return hosts <= EVERYBODY or any(step & (step - 1) == 0 for step in (apart, hosts - apart))


@dataclass(frozen=True)
class Peer:
    """The knowledge of an agent about another one.

    Attributes:
        looked: local time of the last look, in seconds; None before the first.
        heartbeats: number of heartbeats heard.
        silent_s: seconds since the last heartbeat.
        longest_s: the longest gap between two heartbeats in seconds, fading.
        lost: the other is silent for longer than allowed.
    """

    looked: float | None = None
    heartbeats: int = 0
    silent_s: float = 0.0
    longest_s: float = 0.0
    lost: bool = False

    def timeout_s(self, least_s: float) -> float:
        """Return the seconds a silence may last: three times the longest remembered gap, but at most 30 s, and at least
        ``least_s``."""
        return max(least_s, min(_FACTOR * self.longest_s, _MOST_S) if self.heartbeats else FIRST_S)

    def rest_s(self, least_s: float) -> float:
        """Return the seconds until the silence is too long; below 0 if it is."""
        return self.timeout_s(least_s) - self.silent_s


def listen(peer: Peer, heartbeats: int, now: float, least_s: float, heard: float | None = None) -> Peer:
    """Take in the number of heartbeats heard so far, the last of them at ``heard`` (default: ``now``); ``lost`` of the
    result tells whether the other is silent for too long."""
    if peer.looked is None:
        return replace(peer, looked=now, heartbeats=heartbeats)
    passed_s = min(max(now - peer.looked, 0.0), LISTEN_S)
    if heartbeats == peer.heartbeats:
        peer = replace(peer, looked=now, silent_s=peer.silent_s + passed_s)
        return replace(peer, lost=peer.lost or peer.rest_s(least_s) < 0.0)
    since_s = min(max(now - (now if heard is None else heard), 0.0), passed_s)
    silent_s = peer.silent_s + passed_s - since_s
    # A silence that led to an accusation is an outage, and must not make the next one be noticed later; nor must the first.
    faded_s = peer.longest_s * _GAP_FORGOTTEN ** (heartbeats - peer.heartbeats)
    longest_s = peer.longest_s if peer.lost or not peer.heartbeats else max(faded_s, silent_s)
    return replace(peer, looked=now, heartbeats=heartbeats, silent_s=since_s, longest_s=longest_s, lost=False)


def are_agreed(about: int, doubts: Mapping[int, Collection[int]], hosts: int) -> bool:
    """Return whether enough hosts doubt a host that this one doubts.

    Args:
        about: the host that is doubted.
        doubts: host that is heard here -> the hosts that it doubts.
        hosts: number of all hosts that are not lost, with this one and ``about``.
    """
    return 2 * (len(doubts) + 1) > hosts and all(about in doubted for doubted in doubts.values())


def who_leaves(silences: Collection[tuple[Unit, Unit]], live: Collection[GroupId]) -> frozenset[GroupId]:
    """Return the groups to leave out, so that no two hosts that stay miss each other.

    Args:
        silences: pairs (groups of the host that listens, groups of the host that it does not hear).
        live: the live groups.
    """
    present = set(live)
    pairs = {(by, about) for by, about in silences if present & set(by) and present & set(about) and by != about}
    units = _worst_first(pairs, present)
    if len(units) > 2:  # racks may be cut off; where each host hears few others, the worst are not all of one side
        fewest = _fewest(pairs)
        units = fewest if fewest is not None and len(fewest) < len(units) else units
    return frozenset(present.intersection(itertools.chain(*units)))


def are_unanimous(
    silences: Collection[tuple[Unit, Unit]], live: Collection[GroupId], leaving: Collection[GroupId]
) -> bool:
    """Return whether all hosts that stay miss all hosts that leave, and are more: what others may still say changes
    nothing. ``silences``, ``live``: as in :func:`who_leaves`, whose result is ``leaving``."""
    staying, gone = set(live) - set(leaving), set(leaving)
    missing: dict[Unit, set[Unit]] = {}
    for by, about in silences:
        if staying & set(by) and gone & set(about):
            missing.setdefault(about, set()).add(by)
    told = all(staying <= set(itertools.chain(*by)) and len(by) > len(missing) for by in missing.values())
    return told and gone <= set(itertools.chain(*missing))


def _worst_first(pairs: Collection[tuple[Unit, Unit]], present: Collection[GroupId]) -> list[Unit]:
    leaving: list[Unit] = []
    while pairs:
        # Only accusations of hosts that still stay: a host that accused one that leaves may be lost since.
        speakers = {by for by, _ in pairs}
        missed: dict[Unit, set[Unit]] = {}
        for by, about in pairs:
            missed.setdefault(by, set()).add(about)
            missed.setdefault(about, set()).add(by)
        groups = {unit: sum(group in present for group in unit) for unit in missed}
        worst = max(missed, key=lambda unit: (len(missed[unit]), unit not in speakers, -groups[unit], unit))
        leaving.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return leaving


def _fewest(pairs: Collection[tuple[Unit, Unit]]) -> list[Unit] | None:
    """Return the fewest hosts without which no two miss each other (Koenig's theorem); None if they have not two sides."""
    import networkx  # hundreds of modules, which are hardly ever needed

    graph = networkx.Graph(sorted(pairs))
    if not networkx.is_bipartite(graph):
        return None
    found: list[Unit] = []
    for part in networkx.connected_components(graph):
        one, _ = networkx.bipartite.sets(graph.subgraph(part))
        matching = networkx.bipartite.hopcroft_karp_matching(graph.subgraph(part), one)
        found += networkx.bipartite.to_vertex_cover(graph.subgraph(part), matching, one)
    return found
