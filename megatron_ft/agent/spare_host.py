"""A host with room looks for ranks that have lost theirs (``core.spares`` decides which), and takes them over.

Failures it assumes: the store is away for a while, or forgets; several spares may look at the same time. Who was first says
the store, under the key of the start that is to be made.
"""

from __future__ import annotations

from collections import Counter

from megatron_ft.core import detector, restarts, spares
from megatron_ft.core.links import Unit
from megatron_ft.core.protocol import Leaves
from megatron_ft.launch.hosts import Hosts
from megatron_ft.launch.returns import Returns
from megatron_ft.launch.voice import Voice
from megatron_ft.runtime.environment import seat
from megatron_ft.types import GroupId

_WITNESSES = 2
"""So many hosts must say that they do not hear another one, before a host believes it that does not listen there itself."""


def start_key(group: GroupId, incarnation: int, position: int) -> str:
    """Which host makes that start of a group's part, ``position`` being the first of it."""
    return f"start/{seat(group, incarnation)}/{position}"


class Spare:
    """One host's. It hears all news from the beginning; who has given up a group itself takes none."""

    def __init__(self, hosts: Hosts, voice: Voice, returns: Returns) -> None:
        self._hosts, self._voice, self._returns = hosts, voice, returns
        self._refused: set[tuple[int, GroupId]] = set()
        self._unwanted: set[GroupId] = set()
        self._ended: list[detector.Ended] = []
        self._silences: dict[tuple[Unit, Unit], detector.Silent] = {}

    def hear(self, signal: detector.Signal) -> None:
        match signal:
            case detector.Refused(host=host, group=group):
                self._refused.add((host, group))
            case detector.Silent(heard=True):
                self._silences.pop(signal.units, None)
            case detector.Silent():
                self._silences[signal.units] = signal
            case detector.Ended():
                self._ended.append(signal)
            case _ if isinstance(verdict := detector.judge(signal), Leaves):
                self._unwanted.add(verdict.group)

    def look(self) -> list[tuple[spares.Part, int]]:
        """Parts that are this host's now, each with the incarnation that was the last elsewhere."""
        me = self._hosts.place.rank
        if self._voice.away or any(host == me for host, _ in self._refused):
            return []
        self._judge()
        away = self._hosts.beats.silent() | self._accused()
        lost = spares.vacant(self._hosts.parts, away, self._refused, self._unwanted, self._returns.seats.taken)
        fit = spares.fitting(lost, self._hosts.room - len(self._hosts.ranks))
        found = [(part, self._claim(part, away)) for part in fit]
        return [(part, last) for part, last in found if last is not None]

    def _judge(self) -> None:
        """Now: when it was heard, the view that says whether the others go on without that group may not have been."""
        ended, self._ended = self._ended, []
        for end in ended:
            if restarts.kind_of(end.exit, end.incarnation, self._returns.seats) in restarts.WANTED:
                self._unwanted.add(end.exit.group)

    def _accused(self) -> set[int]:
        """Hosts that others do not hear, of those that this one does not listen to: they are too many."""
        said = Counter(name for _, name in {(silent.by, silent.about) for silent in self._silences.values()})
        strangers = {part.host for part in self._hosts.parts} - self._hosts.beats.known() - {self._hosts.place.rank}
        return {host for host in strangers if said[self._hosts.name(host)] >= _WITNESSES}

    def _claim(self, part: spares.Part, away: set[int]) -> int | None:
        """The last start of the part that was somebody else's; None if the next is, too, or the store is away."""
        me, last = self._hosts.place.rank, self._returns.newest(part.group)
        while (owner := self._voice.claim(start_key(part.group, last + 1, part.positions[0]), me)) != me:
            if owner not in away and (owner, part.group) not in self._refused:
                return None
            last += 1  # its host was lost before anybody heard of that start
        return last
