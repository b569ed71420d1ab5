"""The knowledge of one host about the others, from their heartbeats: which heartbeats count, which hosts are silent, and
what each host has said last (``link_detector.listen`` judges a silence).

The agent (``host.heartbeat``) and the simulated agent (``proof.simulated_hosts``) hand in the heartbeats
that arrive, and look twenty times a second, or less often.

Assumes: heartbeats are lost, doubled, late, sent again by a stranger, and overtake each other. Each agent counts its
heartbeats, so one that is not newer than all before it tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_ft.core.detection import link_detector

DOUBTS = 8
"""The most hosts that a heartbeat doubts. Where more are silent at once, the limit of one host alone holds for the rest."""


@dataclass(frozen=True)
class Said:
    """The content of a heartbeat: the number of the newest claim known to the sender (-1: none), whether the sender
    hears the control store's host, or is answered by the store, and the hosts that it doubts (``link_detector``)."""

    newest: int = -1
    reaching: bool = False
    doubts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Change:
    """Host ``rank`` is silent for ``silent_s``, or is heard again (``heard``)."""

    rank: int
    silent_s: float
    heard: bool


@dataclass
class _Other:
    """Another host.

    Attributes:
        count: the highest number of a heartbeat that was heard of it.
        heartbeats: the number of its heartbeats that counted.
        heard: local time of the last one.
        said: the content of the last one.
        peer: what is concluded from them.
    """

    count: int = 0
    heartbeats: int = 0
    heard: float = 0.0
    said: Said | None = None
    peer: link_detector.Peer = link_detector.Peer()


class Listener:
    """The heartbeats that one host hears. One thread hears and looks; any thread may ask.

    ``least_s`` may be changed at any time: silences shorter than that never count, or than ``agreed_s`` (default: the same)
    where enough hosts agree.
    """

    def __init__(self, least_s: float, agreed_s: float | None = None) -> None:
        self.least_s, self.agreed_s = least_s, least_s if agreed_s is None else agreed_s
        self.doubts: tuple[int, ...] = ()
        """The hosts that this one doubts, the last heard first, at most ``DOUBTS``: its heartbeats say so."""
        self.rest_s = float("inf")
        """Seconds from the last look until the next silence may be too long."""
        self._others: dict[int, _Other] = {}

    def listen_to(self, hosts: Iterable[int]) -> None:
        """Listen to these hosts, too."""
        # replaced, not changed: another thread may be using the old one
        self._others = {**{host: _Other() for host in hosts}, **self._others}

    def hear(self, host: int, count: int, said: Said, now: float) -> bool:
        """Take in a heartbeat at ``now``, and return whether it counts."""
        other = self._others.get(host)
        if other is None or count <= other.count:
            return False
        other.count, other.said, other.heard = count, said, now
        other.heartbeats += 1
        return True

    def look(self, now: float) -> list[Change]:
        """Judge the silences at ``now``, on a local monotonic clock in seconds, and return what has changed."""
        others = self._others
        before = {host: other.peer for host, other in others.items()}
        for other in others.values():
            other.peer = link_detector.listen(other.peer, other.heartbeats, now, self.least_s, other.heard)
        doubted = {host for host, other in others.items() if other.peer.lost or other.peer.rest_s(self.agreed_s) < 0.0}
        witnesses = self._witnesses()
        hosts = 1 + sum(not other.peer.lost for other in others.values())
        for host in sorted(doubted):
            if link_detector.are_agreed(host, witnesses, hosts):
                others[host].peer = replace(others[host].peer, lost=True)
        self.doubts = tuple(sorted(doubted, key=lambda host: others[host].peer.silent_s)[:DOUBTS])
        limits = ((other.peer, self.least_s if host in doubted else self.agreed_s) for host, other in others.items())
        self.rest_s = min((peer.rest_s(least_s) for peer, least_s in limits if not peer.lost), default=float("inf"))
        return [
            Change(host, max(peer.silent_s, others[host].peer.silent_s), heard=peer.lost)
            for host, peer in before.items()
            if peer.lost != others[host].peer.lost
        ]

    def _witnesses(self) -> dict[int, tuple[int, ...]]:
        """Return the hosts that were heard within ``agreed_s``, with those that they doubt: what others have said is old."""
        lately = {host: one.said for host, one in self._others.items() if one.peer.silent_s < self.agreed_s}
        return {host: said.doubts for host, said in lately.items() if said is not None}

    def known(self) -> set[int]:
        """Return the hosts that are, or were, listened to."""
        return set(self._others)

    def silent(self) -> set[int]:
        """Return the hosts that are not heard now."""
        return {host for host, other in self._others.items() if other.peer.lost}

    def said(self) -> dict[int, Said]:
        """Return the content of the newest heartbeats of the hosts that are heard now; hosts never heard are left out."""
        return {host: one.said for host, one in self._others.items() if one.said is not None and not one.peer.lost}

    def silences(self) -> list[Change]:
        """Return for how long each silent host has not been heard, as :meth:`look` would give it now."""
        return [Change(host, one.peer.silent_s, heard=False) for host, one in self._others.items() if one.peer.lost]
