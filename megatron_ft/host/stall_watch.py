"""An agent's part in finding the group that the others wait for, and whether storage is away for more than one of them.

An agent writes where its ranks are (``group_stalls.Place``) to a key of its own on the control store, but only after
they have been there for some seconds: in normal steps nothing is written. Other agents read the key only when they need
it: before they give up a rank that is stuck in storage (:meth:`Stalls.is_outage`), and on the lowest host that is
heard, while its groups wait, to report for which groups (``core.detection.group_stalls`` decides what is reported,
``core.detection.rank_health`` which ranks are given up).

Failures it assumes: the store is away (no rank is given up for storage meanwhile: that could not be announced anyway),
a host that has written is lost. Clocks of hosts may differ by a second; that changes only the seconds in a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from megatron_ft.config.schema import DetectorConfig
from megatron_ft.core.detection import group_stalls, rank_health
from megatron_ft.core.lifecycle.group_returns import RestartManager
from megatron_ft.host import rank_monitor
from megatron_ft.host.agent_client import AgentClient
from megatron_ft.host.peers import Hosts
from megatron_ft.host.rank_process import Rank
from megatron_ft.utils import steady_clock
from megatron_ft.utils.console import say

_ASK_EVERY_S, _HOSTS_A_SECOND = 1.0, 100
"""The other hosts are asked once a second, or more rarely where there are many: each costs the store one answer."""
_KEY = "stall"
_SHARE = 2.0
"""A host writes where its ranks are after the time until a line is due, divided by this: it must be there in time."""


class Stalls:
    """The stalls of one run as one agent sees them. ``note`` writes a line of the run record."""

    def __init__(
        self,
        client: AgentClient,
        hosts: Hosts,
        restarts: RestartManager,
        settings: DetectorConfig,
        note: Callable[..., None],
    ) -> None:
        self._client, self._hosts, self._restarts, self._note = client, hosts, restarts, note
        self._limits, self._notice_s = rank_monitor.limits(settings), settings.stall_notice_s
        self._here: list[group_stalls.Spot] = []
        self._written: list[tuple[object, ...]] = []
        self._told: dict[int, group_stalls.Told] = {}
        self._asked = self._looked = 0.0
        self._outage = False

    def poll_ranks(self, ranks: Iterable[Rank]) -> None:
        """Write what has changed and report what is due; called after each look at the living ``ranks`` of this host."""
        least_s = self._notice_s / _SHARE
        seen = [rank for rank in ranks if not rank.watched.given_up and not rank.dropped]
        spots = [
            group_stalls.spot(rank.group, rank.incarnation, rank.watched.health, self._limits, least_s) for rank in seen
        ]
        self._here = list(group_stalls.together(spots).values())
        self._write()
        if time.monotonic() - self._looked >= self._pause_s and self._is_first():
            self._looked = time.monotonic()
            self._say()

    def is_outage(self) -> bool:
        """Return whether storage is away for more than one group. True while that is unknown, because the store is away."""
        if time.monotonic() - self._asked >= self._pause_s:
            self._asked, self._outage = time.monotonic(), self._ask_for_outage()
        return self._outage

    @property
    def _pause_s(self) -> float:
        others = len(self._hosts.used - {self._hosts.place.rank})
        return max(_ASK_EVERY_S, others / _HOSTS_A_SECOND) if others else 0.0

    # --- this host ----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        if self._hosts.used == {self._hosts.place.rank}:
            return
        told = [spot for spot in self._here if spot.place != "busy" or spot.storage]
        picture: list[tuple[object, ...]] = [(spot.group, spot.incarnation, spot.place, spot.storage) for spot in told]
        if picture == self._written:
            return
        now = steady_clock.now()
        value = [{**asdict(spot), "since": round(now - spot.seconds, 3)} for spot in told]
        if self._client.put(f"{_KEY}/{self._hosts.place.rank}", value):
            self._written = picture

    # --- all hosts ----------------------------------------------------------------------------------------------------

    def _others(self) -> Iterable[tuple[int, list[group_stalls.Spot] | None]]:
        """Return what every other host that is heard has written; None where that is unknown."""
        for host in sorted(self._heard - {self._hosts.place.rank}):
            raw = self._client.get(f"{_KEY}/{host}")
            yield host, None if raw is None and self._client.away else self._members(map(_spot, raw or ()))

    @property
    def _heard(self) -> set[int]:
        return self._hosts.used - self._hosts.heartbeats.silent()

    def _members(self, spots: Iterable[group_stalls.Spot]) -> list[group_stalls.Spot]:
        view = self._restarts.seats.view
        return [spot for spot in spots if view.seats(spot.group, spot.incarnation)]

    def _ask_for_outage(self) -> bool:
        me, members = self._hosts.place.rank, self._restarts.seats.view.live
        stuck = {(me, spot.group) for spot in self._members(self._here) if spot.storage}
        decide = lambda: rank_health.is_outage(stuck, len(self._heard), members)  # noqa: E731
        if decide():
            return True
        for host, spots in self._others():
            if spots is None:
                return True
            stuck |= {(host, spot.group) for spot in spots if spot.storage}
            if decide():
                return True
        return False

    def _is_first(self) -> bool:
        """Return whether this host reports for all, and has a reason to ask the others."""
        if any(host < self._hosts.place.rank for host in self._heard):
            return False
        mine = self._members(self._here)
        return bool(self._told) or not mine or any(spot.place != "busy" for spot in mine)

    def _say(self) -> None:
        spots: list[group_stalls.Spot] = self._members(self._here)
        for _, theirs in self._others():
            if theirs is None:
                return
            spots += theirs
        self._told, lines = group_stalls.observe(self._told, group_stalls.together(spots), self._notice_s)
        for line in lines:
            say(str(line))
            fields = {"late": list(line.late), "waiting": list(line.waiting), "place": group_stalls.WORDS[line.place]}
            self._note("stall", **fields, seconds=round(line.seconds, 1), over=line.over)


class Standstill:
    """The time for which this host's ranks cannot go on: all of them wait for other groups, a host with a group is silent,
    and there is no control store on which the other groups could agree to go on without it.

    A connection to a host that has lost its power is not closed, so the ranks themselves notice nothing before
    ``collective_timeout_s``; and the agents could tell them only through the store.

    Args:
        patience_s: seconds for which that may last.
        round_s: the longest time between two looks of a busy agent: a call to a store that does not answer blocks it. An
            agent that did not look for longer was suspended, and has not seen anything.
        clock: monotonic, in seconds.
    """

    def __init__(self, patience_s: float, round_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._round_s, self._clock = patience_s, round_s, clock
        self._looked, self._seconds = clock(), 0.0

    def poll_ranks(self, ranks: Iterable[Rank], silent: bool, away: bool) -> bool:
        """Return whether that has lasted for longer than ``patience_s``.

        Args:
            ranks: the living ranks of this host.
            silent: a host with a group of the run is not heard.
            away: no control store answers.
        """
        now = self._clock()
        elapsed_s, self._looked = min(now - self._looked, self._round_s), now
        stands = silent and away
        if stands:
            last = [rank.watched.health.last for rank in ranks]
            stands = bool(last) and all(sample is not None and sample.waits for sample in last)
        self._seconds = self._seconds + elapsed_s if stands else 0.0
        return self._seconds > self._patience_s


def _spot(raw: dict) -> group_stalls.Spot:
    fields = {name: value for name, value in raw.items() if name != "since"}
    return replace(group_stalls.Spot(**fields), seconds=max(0.0, steady_clock.now() - raw["since"]))
