"""A host with room looks for ranks that have lost their host (``core.lifecycle.spare_policy`` decides which), and takes
them over.

Failures it assumes: the store is away for a while, or forgets; several spares may look at the same time. The store
decides which was first, by the key of the start that is to be made.
"""

from __future__ import annotations

from collections import Counter

from megatron_ft.core.detection.link_detector import Unit
from megatron_ft.core.lifecycle import restart_policy, spare_policy
from megatron_ft.core.lifecycle.group_returns import RestartManager
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import LeaveAnnounced
from megatron_ft.host.agent_client import AgentClient
from megatron_ft.host.peers import Hosts
from megatron_ft.types import GroupId, seat

_WITNESSES = 2
"""This number of hosts must report that they do not hear a host before a spare that does not listen to it believes them."""


def start_key(group: GroupId, incarnation: int, position: int) -> str:
    """Return the key that names the host of a start of a group's part; ``position`` is the first one of the part."""
    return f"start/{seat(group, incarnation)}/{position}"


class Spare:
    """One host as a spare. It hears all news from the beginning; after it has given up a group, it takes none."""

    def __init__(self, hosts: Hosts, client: AgentClient, restarts: RestartManager) -> None:
        self._hosts, self._client, self._restarts = hosts, client, restarts
        self._refused: set[tuple[int, GroupId]] = set()
        self._unwanted: set[GroupId] = set()
        self._ended: list[signals.RankExited] = []
        self._silences: dict[tuple[Unit, Unit], signals.HostSilent] = {}

    def on_signal(self, signal: signals.Signal) -> None:
        match signal:
            case signals.RestartRefused(host=host, group=group):
                self._refused.add((host, group))
            case signals.HostSilent(heard=True):
                self._silences.pop(signal.units, None)
            case signals.HostSilent():
                self._silences[signal.units] = signal
            case signals.RankExited():
                self._ended.append(signal)
            case _ if isinstance(verdict := signals.classify(signal), LeaveAnnounced):
                self._unwanted.add(verdict.group)

    def poll(self) -> list[tuple[spare_policy.Part, int]]:
        """Return the parts that this host has now, each with the last incarnation on another host."""
        me = self._hosts.place.rank
        if self._client.away or any(host == me for host, _ in self._refused):
            return []
        self._judge()
        away = self._hosts.heartbeats.silent() | self._accused()
        lost = spare_policy.vacant(self._hosts.parts, away, self._refused, self._unwanted, self._restarts.seats.taken)
        fit = spare_policy.fitting(lost, self._hosts.max_ranks - len(self._hosts.ranks))
        found = [(part, self._claim(part, away)) for part in fit]
        return [(part, last) for part, last in found if last is not None]

    def _judge(self) -> None:
        """Judge at the look, not when a signal arrives: the view that shows whether the others go on without that group
        may be later."""
        ended, self._ended = self._ended, []
        for end in ended:
            if restart_policy.kind_of(end.exit, end.incarnation, self._restarts.seats) in restart_policy.WANTED:
                self._unwanted.add(end.exit.group)

    def _accused(self) -> set[int]:
        """Return hosts that others do not hear and that this one does not listen to, where hosts are too many for that."""
        said = Counter(name for _, name in {(silent.by, silent.about) for silent in self._silences.values()})
        strangers = (
            {part.host for part in self._hosts.parts} - self._hosts.heartbeats.known() - {self._hosts.place.rank}
        )
        return {host for host in strangers if said[self._hosts.name(host)] >= _WITNESSES}

    def _claim(self, part: spare_policy.Part, away: set[int]) -> int | None:
        """Return the part's last start on another host; None if the next is another host's, too, or the store is away."""
        me, last = self._hosts.place.rank, self._restarts.newest(part.group)
        while (owner := self._client.claim(start_key(part.group, last + 1, part.positions[0]), me)) != me:
            if owner not in away and (owner, part.group) not in self._refused:
                return None
            last += 1  # its host was lost before that start became known
        return last
