"""How a simulated process talks to the control store: to the one that never moves, or to that of the newest claim.

With fail-over each process reads the log of claims. When a claim names another store, or the store has forgotten the run,
the process first puts back what it knows, in order, then sends again what was not answered; an answer of an older store is
dropped. A frozen process does nothing of that until it wakes up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ft.core.lifecycle.store_failover import Claim, Seat
from megatron_ft.proof.kernel import Future
from megatron_ft.proof.network import Host
from megatron_ft.proof.simulated_store import RETRY, Operation, Request, Store

if TYPE_CHECKING:
    from megatron_ft.proof.simulated_hosts import Hosts

POLL = 2.0
"""How often a process looks for a new claim."""
LATE = 2 * POLL
"""A directory that has not answered for this long may have news that other processes do not know either."""
CONFLICT = "another view of that epoch stands there"
_FORGOTTEN = "the store does not know this process"


class Process(Protocol):
    """The process that uses a client."""

    frozen_until: float
    gone: bool

    def knows(self) -> Sequence[Operation]:
        """Returns the operations that restore an empty store; one that returns :data:`CONFLICT` ends the process."""
        ...

    def reads(self, claim: Claim) -> None:
        """The process reads a claim for the first time."""
        ...

    def moves(self) -> None:
        """The process moves to a new store, in which logs begin again."""
        return None

    def conflicts(self) -> None:
        """The view that the process puts back is not the one that stands there."""
        raise AssertionError("who has no seat puts no view back")


class Plain:
    """The client of a store that never moves and forgets nothing."""

    fails_over = False

    def __init__(self, store: Store, host: Host, gone: Callable[[], bool]) -> None:
        self._store, self._host, self._gone = store, host, gone

    def call(self, operation: Operation) -> Future:
        """The future has the answer, however often it takes to get one."""
        request = Request(self._store, self._host, operation, self._gone)
        request.send()
        return request.future


class Client:
    """The client of one process where the store can fail over. ``claims``: what the process has read of the log."""

    fails_over = True

    def __init__(self, world: Hosts, host: Host, process: Process, claims: Iterable[Claim], birth: int | None) -> None:
        self.world, self.host, self.process = world, host, process
        self.claims = list(claims)
        self.birth = birth
        """``birth`` of the store when this process restored it; None: the process has not done so."""
        self.token = 0
        self._pending: dict[Call, None] = {}
        self._reading: list[float] = []
        self.world.kernel.after(self.world.rng.uniform(0.0, POLL), self._poll)
        if birth is None:
            self._put_back()

    @property
    def store(self) -> Store:
        return self.world.stores[self.claims[-1].address]

    def call(self, operation: Operation) -> Future:
        """The future has the answer of the store of the newest claim, however often it takes to get one."""
        call = Call(self, operation)
        self._pending[call] = None
        if self.birth is not None:
            call.send()
        return call.future

    # --- the log ------------------------------------------------------------------------------------------------------

    def read(self) -> Future:
        """Read the log to its end, from now on."""
        future, began = Future(), self.world.kernel.now
        self._reading.append(began)

        def answered(claims: list[Claim]) -> None:
            self._reading.remove(began)
            self._take(claims)
            future.resolve(True)

        self.world.disk.read(self.host, len(self.claims)).then(lambda claims: self.awake(lambda: answered(claims)))
        return future

    @property
    def log_answers(self) -> bool:
        """Returns True if no read of the log has been waiting for long."""
        return not self._reading or self.world.kernel.now - min(self._reading) <= LATE

    def create(self, claim: Claim, makers: Collection[Seat]) -> Future:
        """Resolves to True if this call made the claim; False is not certain, see ``Disk.create``."""
        future = Future()
        made = self.world.disk.create(self.host, claim, makers)
        made.then(lambda result: self.awake(lambda: future.resolve(result)))
        return future

    def awake(self, call: Callable[[], None]) -> None:
        """Now, or when the process goes on; never if it is gone."""
        if self.process.gone:
            return
        if self.world.kernel.now < self.process.frozen_until:
            self.world.kernel.at(self.process.frozen_until, lambda: self.awake(call))
        else:
            call()

    def _poll(self) -> None:
        if not self.process.gone:
            self.read()
            self.world.kernel.after(POLL, lambda: self.awake(self._poll))

    def _take(self, claims: Iterable[Claim]) -> None:
        before = self.claims[-1].address
        for claim in claims:
            if claim.number == len(self.claims) and not self.process.gone:
                self.claims.append(claim)
                self.process.reads(claim)
        if self.claims[-1].address != before and not self.process.gone:
            self._put_back()

    # --- a store that knows nothing -----------------------------------------------------------------------------------

    def forgotten(self) -> None:
        """The store has lost its memory since this process put back what it knows."""
        if self.birth is not None:
            self._put_back()

    def _put_back(self) -> None:
        self.birth = None
        self.token += 1
        self.process.moves()
        self._next([lambda store: [store.birth], *self.process.knows()], None)

    def _next(self, operations: list[Operation], birth: int | None) -> None:
        """Carry them out one after the other; from the beginning if the store forgets meanwhile."""
        if not operations:
            self.birth = birth
            for call in list(self._pending):
                call.send()
            return
        token = self.token

        def answered(result: Any) -> None:
            if token != self.token:
                return
            if result == CONFLICT:
                self.process.conflicts()
            elif birth is not None and result == [_FORGOTTEN]:
                self._put_back()
            else:
                self._next(operations[1:], birth if birth is not None else result[0])

        def step(store: Store) -> Any:
            return [_FORGOTTEN] if birth is not None and store.birth != birth else operations[0](store)

        Call(self, step, answered).send()

    def answered(self, call: Call, result: Any) -> None:
        if call in self._pending:
            del self._pending[call]
            call.future.resolve(result)


class Call:
    """One operation on its way. ``told``: part of putting back, served whatever the store knows."""

    def __init__(self, client: Client, operation: Operation, told: Callable[[Any], None] | None = None) -> None:
        self.client, self.operation, self.told = client, operation, told
        self.future = Future()

    def send(self) -> None:
        """To the store of the newest claim that the process has read; again until it is answered."""
        Attempt(self, self.client.token, self.client.store).send()


class Attempt:
    """A call on its way to one store; it takes effect there once."""

    def __init__(self, call: Call, token: int, store: Store) -> None:
        self.call, self.client, self.token, self.store = call, call.client, token, store
        self.birth = call.client.birth
        self.result: Any = None

    @property
    def idle(self) -> bool:
        return self.token != self.client.token or (self.call.told is None and self.call not in self.client._pending)

    def send(self) -> None:
        if self.client.process.gone or self.idle:
            return
        if not self.client.world.network.send(self.client.host, self.store.host, lambda: self.store.arrived(self)):
            self.again()

    def again(self) -> None:
        self.store.kernel.after(RETRY, lambda: self.client.awake(self.send))

    def serve(self) -> None:
        if self.call.told is None and self.store.birth != self.birth:
            self._answer(self.client.forgotten)
            return
        if self.result is None:
            self.result = self.call.operation(self.store)
        if self.result is None:
            self.store.parked.append(self)
        else:
            self._answer(lambda: self._take(self.result))

    def _take(self, result: Any) -> None:
        if self.call.told is not None:
            self.call.told(result)
        else:
            self.client.answered(self.call, result)

    def _answer(self, then: Callable[[], None]) -> None:
        def arrive() -> None:
            if not self.idle:
                then()

        if not self.client.world.network.send(self.store.host, self.client.host, lambda: self.client.awake(arrive)):
            self.again()
