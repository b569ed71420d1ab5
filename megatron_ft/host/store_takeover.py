"""The agent's thread that takes part in the succession of the embedded control store (``core.lifecycle.store_succession``).

It looks ten times a second, beside the thread that supervises the ranks, which may wait for a store that does not
answer. When the log holds a new claim, all clients of this agent connect to its store, and the ranks of this host get the
claim's number through a file in memory.

Failures it assumes: the file system of the run directory is away (nothing is taken over meanwhile).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from megatron_ft.core.detection.heartbeats import Said
from megatron_ft.core.lifecycle.group_returns import RestartManager
from megatron_ft.core.lifecycle.store_failover import Claim, Seat
from megatron_ft.core.lifecycle.store_succession import PROBE_S, Here, Succession
from megatron_ft.core.protocol.shell import carry_out
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.host import operator_requests
from megatron_ft.host.local_ranks import LocalRanks
from megatron_ft.host.peers import Hosts
from megatron_ft.run.store.tcp_store import TcpStore
from megatron_ft.types import given
from megatron_ft.utils import shared_file
from megatron_ft.utils.console import say
from megatron_ft.utils.vital_thread import described

_LOOK_S = 0.1
_END_S = 10.0
"""The longest wait for a look that is under way at the end; the file system may hang."""


class StoreTakeover(Here):
    """The succession of the store as one agent follows it.

    Args:
        hosts: the run's hosts, after they have met.
        ranks: of this host.
        restarts: they know the newest view.
        moved: called in this object's thread when the store is at another address.
        note: called with (what, detail) for the run record.
    """

    def __init__(
        self,
        hosts: Hosts,
        run_dir: Path,
        ranks: LocalRanks,
        restarts: RestartManager,
        moved: Callable[[], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._hosts, self._run_dir, self._ranks, self._restarts = hosts, run_dir, ranks, restarts
        self._locator, self._keeper = given(hosts.locator), given(hosts.keeper)
        self._moved, self._note = moved, note
        self._probe = TcpStore(self._locator, PROBE_S)
        self._address = self._locator.claims[-1].address
        self._succession = Succession(hosts.place.rank, hosts.heartbeats, self)
        self._said = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron_ft-succession", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take nothing over from now on: this host's part in the run is over."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stop.wait(_LOOK_S):
            try:
                carry_out(self._succession.look())
            except Exception as error:  # of a bug, too: this host would not take the store over any more
                known = isinstance(error, StoreError | LaunchError | OSError)
                if (why := str(error) if known else f"the look at the control store {described(error)}") != self._said:
                    self._said = why
                    say(f"{why}; no host takes the control store over meanwhile")

    # --- what the succession is carried out with ----------------------------------------------------------------------

    @property
    def claims(self) -> tuple[Claim, ...]:
        return self._locator.claims

    @property
    def serves(self) -> bool:
        return self._keeper.serves

    def now(self) -> float:
        return time.monotonic()

    def name(self, host: int) -> str:
        return self._hosts.said(host)

    def members(self) -> set[Seat]:
        return {*self._restarts.seats.view.members, *self._ranks.entered()}

    def seats(self) -> frozenset[Seat]:
        return self._ranks.seats()

    def housing(self, groups: Collection[int]) -> frozenset[int]:
        return self._hosts.housing(groups)

    def tell(self, said: Said) -> None:
        self._hosts.heartbeats.says = said

    async def read(self) -> bool:
        return self._locator.poll()

    async def answers(self) -> bool:
        try:
            self._probe.get("probe")
        except StoreError:
            return False
        return True

    def serve(self) -> str:
        self._keeper.serve()
        return self._keeper.address

    async def create(self, claim: Claim) -> None:
        if self._locator.create(claim):
            self._note("moved", f"claim {claim.number}: {claim.reason}")
            operator_requests.write_store_address(self._run_dir, self._locator.text, say)

    def follow(self, claim: Claim) -> None:
        with contextlib.suppress(OSError):
            shared_file.write(self._ranks.starter.told, str(claim.number))
        here = claim.host == self._hosts.place.rank
        self._keeper.serve() if here else self._keeper.stand_by()
        if claim.address != self._address:
            self._address = claim.address
            where = "here" if here else f"on {self.name(claim.host)}"
            say(f"the control store is {where} from now on, at {claim.address} (claim {claim.number}: {claim.reason})")
            self._moved()
