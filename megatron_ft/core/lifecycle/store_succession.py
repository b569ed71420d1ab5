"""An agent's part in the fail-over of the embedded control store: it follows the claim log, and takes the store over when
``store_failover`` says that it is this host's turn.

The agent (``host.store_takeover``) and the simulated one (``proof.simulated_hosts``) bring the port
:class:`Here`, and look ten times a second or less often. As in ``core.protocol.shell``, a real port blocks; a simulated
one suspends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from megatron_ft.core.detection.heartbeats import Listener, Said
from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import Claim, HostId, Outlook, Seat

PROBE_S = 0.5
"""Seconds that the store of a silent host may take to answer; a store whose process has ended is recognised at once. A
store that has not answered is not asked again for as long, so that the waiting time of this host's turn is not rounded
up to the length of another question."""
_MOST_S = 0.25 + PROBE_S
"""The most that one look adds to a waiting time: an agent that was frozen has not waited."""
_LOOK_S = 1.0
"""Seconds between two reads of the log without a hint, while the store's host is not heard."""


class Here(Protocol):
    """What an agent takes the store over with.

    Failures it assumes: the store's host is lost, frozen or cut off; this host was frozen itself, and others have taken
    the store over; the file system of the run directory hangs: then ``read`` and ``create`` raise, or return late.
    """

    @property
    def claims(self) -> Sequence[Claim]:
        """The claims read so far; another thread may read more."""

    @property
    def serves(self) -> bool:
        """Whether this host runs a store."""

    def now(self) -> float:
        """Return the time on a local monotonic clock, in seconds."""

    def name(self, host: HostId) -> str:
        """Return the name of a host for messages."""

    def members(self) -> Collection[Seat]:
        """Return the members of the newest view known here, and the seats here whose ranks have entered a view: these are
        members, although the store may have gone before this agent read that view."""

    def seats(self) -> frozenset[Seat]:
        """Return the seats of this host's groups that may still live."""

    def housing(self, groups: Collection[int]) -> frozenset[HostId]:
        """Return the hosts that have a rank of one of these groups."""

    def tell(self, said: Said) -> None:
        """Let the heartbeats of this host say that from now on."""

    async def read(self) -> bool:
        """Read the log to its end. Return whether there was a new claim."""

    async def answers(self) -> bool:
        """Return whether the store of the newest claim answers within ``PROBE_S``."""

    def serve(self) -> str:
        """Have a store on this host, and return its address."""

    async def create(self, claim: Claim) -> None:
        """Make that claim, unless another one has its number, and read the log."""

    def follow(self, claim: Claim) -> None:
        """Carry out a claim that is new here, and the newest one: connect to its store, and end one of this host."""


class Succession:
    """The succession of the store as the agent of host ``me`` follows it. ``listener``: the heartbeats that it hears."""

    def __init__(self, me: HostId, listener: Listener, here: Here) -> None:
        self._me, self._listener, self._here = me, listener, here
        self._taken, self._looked, self._waited_s = 0, here.now(), 0.0
        self._read_at = self._silent_until = -float("inf")

    async def look(self) -> None:
        """Look once, and do what is due."""
        here, now = self._here, self._here.now()
        elapsed_s, self._looked = min(now - self._looked, _MOST_S), now
        said, store = self._listener.said(), here.claims[-1]
        lost = store.host not in said and (store.host != self._me or not here.serves)
        if max((one.newest for one in said.values()), default=-1) > store.number or (
            (lost or not said) and now - self._read_at > _LOOK_S
        ):
            self._read_at = now
            if await here.read():
                self._follow()
                return  # all of the above was observed of an older store
        self._follow()
        answers = not lost or await self._answers()
        here.tell(Said(here.claims[-1].number, answers))
        outlook = self._outlook(store, said, answers) if lost else None
        due_s = None if outlook is None else store_failover.due_s(outlook)
        self._waited_s = 0.0 if due_s is None else self._waited_s + elapsed_s
        if due_s is not None and self._waited_s > due_s:
            await self.take_over(store)

    def _outlook(self, store: Claim, said: Mapping[HostId, Said], answers: bool) -> Outlook:
        here, claims = self._here, self._here.claims
        return Outlook(
            me=self._me,
            hosts=here.housing(store_failover.unfenced(here.members(), claims)),
            heard=frozenset(said) | {self._me},
            reaching=frozenset(host for host, one in said.items() if one.reaching),
            store=store.host,
            answers=answers,
            seats=here.seats(),
            out=store_failover.fenced(claims),
            keeps=here.serves,
        )

    async def _answers(self) -> bool:
        here = self._here
        if here.now() < self._silent_until:
            return False
        answers = await here.answers()
        if not answers:
            self._silent_until = here.now() + PROBE_S
        return answers

    async def take_over(self, last: Claim) -> None:
        """Have a store on this host and claim it, unless ``last`` is not the newest claim; groups and agents rebuild it."""
        here = self._here
        if await here.read() or here.claims[-1] != last or not store_failover.may_claim(here.seats(), here.claims):
            return  # another host was faster, or this one is out of the run
        silent_s = max((one.silent_s for one in self._listener.silences() if one.rank == last.host), default=0.0)
        reason = f"{here.name(last.host)} has not been heard for {silent_s:.1f} s and its store does not answer"
        try:
            await here.create(store_failover.taken_over(last, self._me, here.serve(), reason))
        finally:
            self._follow()

    def _follow(self) -> None:
        """Carry out the claims that were read since the last call."""
        claims = self._here.claims
        new, self._taken = claims[self._taken :], len(claims)
        if new:
            self._waited_s, self._silent_until = 0.0, -float("inf")  # a store that was just claimed gets the same time
            self._here.follow(new[-1])
