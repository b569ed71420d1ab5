"""The knowledge of one host about the others, from their heartbeats: which heartbeats count, which hosts are silent, and
what each host has said last (``link_detector.listen`` judges a silence).

The agent (``agent.heartbeat``) and the simulated agent (``simulation.protocol.simulated_hosts``) hand in the heartbeats
that arrive, and look ten times a second or less often.

Assumes: heartbeats are lost, doubled, late, sent again by a stranger, and overtake each other. Each agent counts its
heartbeats, so one that is not newer than all before it tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ft.core.detection import link_detector


@dataclass(frozen=True)
class Said:
    """The content of a heartbeat: the number of the newest claim known to the sender (-1: none), and whether the sender
    hears the control store's host, or is answered by the store."""

    newest: int = -1
    reaching: bool = False


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
        beats: the number of its heartbeats that counted.
        said: the content of the last one.
        peer: what is concluded from them.
    """

    count: int = 0
    beats: int = 0
    said: Said | None = None
    peer: link_detector.Peer = link_detector.Peer()


class Listener:
    """The heartbeats that one host hears. One thread hears and looks; any thread may ask.

    ``least_s`` may be changed at any time: silences shorter than that never count.
    """

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self._others: dict[int, _Other] = {}

    def listen_to(self, hosts: Iterable[int]) -> None:
        """Listen to these hosts, too."""
        # replaced, not changed: another thread may be using the old one
        self._others = {**{host: _Other() for host in hosts}, **self._others}

    def hear(self, host: int, count: int, said: Said) -> bool:
        """Take in a heartbeat, and return whether it counts."""
        other = self._others.get(host)
        if other is None or count <= other.count:
            return False
        other.count, other.said = count, said
        other.beats += 1
        return True

    def look(self, now: float) -> list[Change]:
        """Judge the silences at ``now``, on a local monotonic clock in seconds, and return what has changed."""
        changes = []
        for host, other in self._others.items():
            before = other.peer
            after = other.peer = link_detector.listen(before, other.beats, now, self.least_s)
            if after.lost != before.lost:
                silent_s = before.silent_s if before.lost else after.silent_s
                changes.append(Change(host, silent_s, heard=before.lost))
        return changes

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
