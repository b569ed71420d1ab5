"""The agent's part in the fail-over of the embedded control store: it follows the claim log, and takes the store over
when ``core.lifecycle.store_failover`` decides that it is this host's turn.

One thread of the agent looks ten times a second, beside the thread that supervises the ranks, which may wait for a
store that does not answer. When the log holds a new claim, all clients of this agent connect to its store, and the
ranks of this host get the claim's number through a file in memory.

Failures it assumes: the store's host is lost, frozen or cut off; this host was frozen itself, and others have taken the
store over; the file system of the run directory is away (nothing is taken over meanwhile).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_ft.agent import operator_requests
from megatron_ft.agent.heartbeat import BEAT_S, Said
from megatron_ft.agent.peers import Hosts
from megatron_ft.coordination.store.tcp_store import TcpStore
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim, Outlook, Seat
from megatron_ft.errors import LaunchError, StoreError
from megatron_ft.types import View, given
from megatron_ft.utils import shared_file
from megatron_ft.utils.console import say
from megatron_ft.utils.vital_thread import described

_PROBE_S = 0.5
"""Seconds that the store of a silent host may take to answer; a store whose process has ended is recognised at once. A
store that has not answered is not asked again for as long, so that the waiting time of this host's turn is not rounded
up to the length of another question."""
_MOST_S = 0.25 + _PROBE_S
"""The most that one look adds to a waiting time: an agent that was frozen has not waited."""
_END_S = 10.0
"""The longest wait for a look that is under way at the end; the file system may hang."""
_LOOK_S = 1.0
"""Seconds between two reads of the log without a hint, while the store's host is not heard."""


class StoreTakeover:
    """The succession of the store as one agent follows it.

    Args:
        hosts: the run's hosts, after they have met.
        seats: returns the seats of this host's groups that may still live.
        entered: returns those of ``seats`` whose ranks have entered a view. These are members, although the store may have
            gone before this agent read that view.
        view: returns the newest view that is known here.
        told: the file in which the ranks of this host look for the number of the newest claim.
        moved: called in this object's thread when the store is at another address.
        note: called with (what, detail) for the run record.
    """

    def __init__(
        self,
        hosts: Hosts,
        run_dir: Path,
        seats: Callable[[], frozenset[Seat]],
        entered: Callable[[], frozenset[Seat]],
        view: Callable[[], View],
        told: Path,
        moved: Callable[[], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._hosts, self._run_dir = hosts, run_dir
        locator = self._locator = given(hosts.locator)
        self._seats, self._entered, self._view = seats, entered, view
        self._told, self._moved, self._note = told, moved, note
        self._probe = TcpStore(locator, _PROBE_S)
        self._taken, self._address = 0, locator.claims[-1].address
        self._waited_s = self._looked = self._read_at = self._silent_until = 0.0
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
        self._looked = time.monotonic()
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not self._stop.wait(BEAT_S):
            try:
                self._poll()
            except Exception as error:  # of a bug, too: this host would not take the store over any more
                known = isinstance(error, StoreError | LaunchError | OSError)
                if (why := str(error) if known else f"the look at the control store {described(error)}") != self._said:
                    self._said = why
                    say(f"{why}; no host takes the control store over meanwhile")

    def _poll(self) -> None:
        beats, me, locator = self._hosts.beats, self._hosts.place.rank, self._locator
        now = time.monotonic()
        elapsed_s, self._looked = min(now - self._looked, _MOST_S), now
        said = beats.said()
        store = self._newest().host
        lost = store != me and store not in said
        if max((one.newest for one in said.values()), default=-1) > locator.newest or (
            (lost or not said) and now - self._read_at > _LOOK_S
        ):
            self._read_at = now
            if locator.poll():
                self._follow()
                return  # all of the above was observed of an older store
        self._follow()
        answers = not lost or self._answers()
        beats.says = Said(locator.newest, answers)
        outlook = self._outlook(store, said, answers) if lost else None
        due_s = None if outlook is None else store_failover.due_s(outlook)
        self._waited_s = 0.0 if due_s is None else self._waited_s + elapsed_s
        if outlook is not None and due_s is not None and self._waited_s > due_s:
            self._take_over(outlook)

    def _outlook(self, store: int, said: Mapping[int, Said], answers: bool) -> Outlook:
        me, claims = self._hosts.place.rank, self._locator.claims
        members = {*self._view().members, *self._entered()}
        return Outlook(
            me=me,
            hosts=self._hosts.housing(store_failover.unfenced(members, claims)),
            heard=frozenset(said) | {me},
            reaching=frozenset(host for host, one in said.items() if one.reaching),
            store=store,
            answers=answers,
            seats=self._seats(),
            out=store_failover.fenced(claims),
        )

    def _newest(self) -> Claim:
        return self._locator.claims[-1]

    def _answers(self) -> bool:
        if time.monotonic() < self._silent_until:
            return False
        try:
            self._probe.get("probe")
        except StoreError:
            self._silent_until = time.monotonic() + _PROBE_S
            return False
        return True

    def _take_over(self, outlook: Outlook) -> None:
        """Start this host's store, and claim it; the groups and agents rebuild it."""
        locator, last = self._locator, self._newest()
        if locator.poll() or last.host != outlook.store or not store_failover.may_claim(outlook.seats, locator.claims):
            return  # another host was faster, or this one is out of the run
        keeper = given(self._hosts.keeper)
        keeper.serve()
        silent_s = max(
            (change.silent_s for change in self._hosts.beats.silences() if change.rank == last.host), default=0.0
        )
        reason = f"{self._hosts.said(last.host)} has not been heard for {silent_s:.1f} s and its store does not answer"
        claim = store_failover.taken_over(last, outlook.me, keeper.address, reason)
        try:
            if locator.create(claim):
                self._note("moved", f"claim {claim.number}: {reason}")
                operator_requests.write_store_address(self._run_dir, self._newest().address, say)
        finally:
            self._follow()

    def _follow(self) -> None:
        """Carry out the claims that were read since the last call."""
        claims = self._locator.claims
        new, self._taken = claims[self._taken :], len(claims)
        if not new:
            return
        self._waited_s = self._silent_until = 0.0  # a store that was just claimed gets the same time
        with contextlib.suppress(OSError):
            shared_file.write(self._told, str(self._locator.newest))
        newest, keeper = claims[-1], given(self._hosts.keeper)
        here = newest.host == self._hosts.place.rank
        keeper.serve() if here else keeper.stand_by()
        if newest.address != self._address:
            self._address = newest.address
            where = "here" if here else f"on {self._hosts.said(newest.host)}"
            say(
                f"the control store is {where} from now on, at {newest.address} (claim {newest.number}: {newest.reason})"
            )
            self._moved()
