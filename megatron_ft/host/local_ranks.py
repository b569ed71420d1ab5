"""The rank processes that one agent has started: which of them live, which have ended, which were given up.

:class:`LocalRanks` starts, watches and ends processes, and keeps the list of them in the run directory. It does not
decide when a group is started or what an end means for the run: the agent does (``host.node_agent``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle.store_failover import Seat
from megatron_ft.host import forkserver, rank_monitor
from megatron_ft.host.agent_record import AgentRecord
from megatron_ft.host.peers import Hosts
from megatron_ft.host.rank_process import Rank, Starter
from megatron_ft.run import progress_counters
from megatron_ft.utils import steady_clock
from megatron_ft.utils.console import say

_KILLED_S, _KILLED_LOOK_S = 10.0, 0.005
"""The agent waits at most this long for killed ranks; a rank that is inside the kernel may not end for hours."""


class LocalRanks:
    """The ranks of ``hosts.place.rank``. ``monitor`` judges their processes; ``starter`` makes them."""

    def __init__(self, hosts: Hosts, run_dir: Path, config: RunConfig, starter: Starter, record: AgentRecord) -> None:
        self._hosts, self._run_dir, self._config, self._record = hosts, run_dir, config, record
        self._living: list[Rank] = []
        self._starts: dict[int, int] = {}  # group -> number of its last start on this host
        self._stuck: dict[tuple[int, int], Rank] = {}  # per place, the last rank that was given up
        self.starter = starter
        self.monitor = rank_monitor.Monitor(rank_monitor.limits(config.fault_tolerance.detector))

    def living(self) -> list[Rank]:
        return [rank for rank in self._living if rank.ended is None]

    def seats(self) -> frozenset[Seat]:
        """Return the seats of the groups with a living rank here. Callable from any thread."""
        return _seats(self.living())

    def entered(self) -> frozenset[Seat]:
        """Return those of :meth:`seats` whose ranks have entered a view. Reads a file for each living rank."""
        return _seats(rank for rank in self.living() if progress_counters.has_seat(rank.watched.pulse))

    def start(self, group: int, position: int, incarnation: int, epoch: int) -> None:
        """Start one rank. ``epoch``: of the newest view that is known here. Raises ``OSError``."""
        hosts = self._hosts
        env = RankEnvironment(
            run_id=hosts.run_id,
            run_dir=self._run_dir,
            group=group,
            position=position,
            store=hosts.store_address,
            address=hosts.place.address,
            config=self._config,
            incarnation=incarnation,
            copies=hosts.copies,
            epoch=epoch,
            host_rank=hosts.who["host_rank"],
            claims=hosts.succeeds,
            secret=hosts.secret,
        )
        self._starts[group] = incarnation
        self._living.append(self.starter.start(env))

    def pids(self, group: int) -> list[int]:
        return [rank.process.pid for rank in self.living() if rank.group == group]

    def ended(self) -> Iterator[Rank]:
        """Yield each rank whose process has ended since the last call."""
        for rank in self.living():
            if rank.poll() is not None:
                rank.ended = steady_clock.now()
                self._living.remove(rank)
                yield rank

    def given_up(self, is_outage: Callable[[], bool]) -> list[Rank]:
        """Return the living ranks that are newly found unable to continue (``core.detection.rank_health``)."""
        living = {rank.watched.pid: rank for rank in self.living()}
        found = [
            living[watched.pid] for watched in self.monitor.poll_ranks([r.watched for r in living.values()], is_outage)
        ]
        self._stuck.update({(rank.group, rank.position): rank for rank in found})
        return found

    def stuck(self) -> list[Rank]:
        """Return the ranks that were given up, of their group's last start on this host."""
        return [rank for rank in self._stuck.values() if rank.incarnation == self._starts[rank.group]]

    def reap_strays(self, known: set[int]) -> None:
        """Collect ended processes that are no child of the agent's. ``known``: children that are not ranks."""
        # Ranks that have ended are left out: in a run of weeks, their pids may be used again.
        forkserver.reap_strays(known | {rank.process.pid for rank in self.living()})

    def write(self) -> None:
        """Write the list of living ranks into the run directory."""
        self._record.write_ranks(self.living(), self._hosts.name(), self._hosts.place.rank)

    def end_all(self) -> None:
        """End every rank, in whatever state the agent is."""
        living, deadline = self.living(), time.monotonic() + _KILLED_S
        for rank in living:
            rank.kill()
        for rank in living:
            while rank.poll() is None and time.monotonic() < deadline:
                time.sleep(_KILLED_LOOK_S)
            rank.ended = steady_clock.now()
            if rank.poll() is None:
                where = f"rank {rank.position} of group {rank.group} (pid {rank.process.pid})"
                say(f"{where} was killed and has not ended within {_KILLED_S:g} s: it is inside the kernel (state D)")
        self.write()
        self.starter.close()


def _seats(ranks: Iterable[Rank]) -> frozenset[Seat]:
    return frozenset((rank.group, rank.incarnation) for rank in ranks)
