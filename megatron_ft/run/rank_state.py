"""The state of one rank as a whole, which other groups, and the other ranks of its group, may take over.

Failures it assumes: another group may be lost while it takes the state; its connection then breaks (``Broken``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_ft.errors import StartOver
from megatron_ft.run import registered_state
from megatron_ft.run.collectives import state_transfer
from megatron_ft.run.computing import Computing
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.rejoin.joiner import address_key
from megatron_ft.run.rejoin.state_sender import StateSender
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.types import given

_STATE_DIGITS = 16


class RankState:
    """The job to hand the state of a rank over, and to take another one.

    ``result`` is that of the last step committed here. ``carried`` are the values that its leader sends with the model,
    made by ``carry``. ``epoch``: that of the communicator, at the leader its own; None while the group has no state to
    give.
    """

    def __init__(self, computing: Computing, registered: Registered, guard: StateGuard) -> None:
        rank, engine = computing.rank, computing.engine
        self.result: StepResult | None = None
        self.carried: Mapping[str, Any] = {}
        self.carry: Callable[[], Mapping[str, Any]] = dict
        self.epoch: Callable[[], int | None] = lambda: None if rank.link.view is None else rank.link.view.epoch
        self._rank, self._engine, self._registered = rank, engine, registered
        self._guard, self._computing = guard, computing
        self._made: StepResult | None = None  # the last step, if it was made here
        self._sender: StateSender | None = None
        if rank.env.config.fault_tolerance.rejoin.enabled:
            where = lambda place: rank.agreement.put(address_key(rank.group, rank.position), place)  # noqa: E731
            self._sender = StateSender(rank.env, engine, guard.states, registered, lambda: self.epoch(), where)

    def boundary(self, step: int) -> None:
        """Before ``step`` begins: send followers the gradients of the one before."""
        if self._sender is not None:
            self._sender.boundary(step, self._made, self.carry)

    def settle(self, state: bool) -> None:
        """Copy unsent data of followers that is about to change."""
        if self._sender is not None:
            self._sender.settle(state)

    def commit(self, result: StepResult) -> None:
        """Note that the state is that after the step of ``result``, which was made here."""
        self.result = self._made = result

    def full(self) -> Mapping[str, Any]:
        """Return what a group that is behind takes. Its script makes the step's end by itself, so the script's objects
        are part of it only before the first step."""
        result = self.result
        first = {registered_state.KEY: self._registered.state()} if result is None else {}
        return {
            "carried": self.carried,
            "engine": self._engine.state(),
            "result": None if result is None else result.to_json(),
            "hyperparameters": self._engine.hyperparameters.left,
            **first,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Put a state in place that :meth:`full` has returned at another rank."""
        step = self._computing.step
        result = None if state["result"] is None else StepResult.from_json(state["result"])
        if result is not None and result.step == step and not math.isfinite(result.gradient_norm):
            # The others have committed this step; the gradient that this group gave to it is cleared below.
            self._guard.nonfinite.name(result.step, self._engine)
        self._engine.load_state(state["engine"])
        values = self._engine.hyperparameters
        values.made, values.left = None, state["hyperparameters"]
        values.write(values.left)  # the other script may have set others for the next step already
        self._registered.load(state.get(registered_state.KEY, {}))
        self.carried = state["carried"]
        self._made = None  # followers of this group have to see the gradients of every step
        if step >= 0:
            self._computing.clear()
        self.result = result or self.result

    def share(self) -> None:
        """Copy the leader's state to the other ranks of the group, if all hold the same."""
        if not self._engine.replicated:
            return
        inner = given(self._rank.inner)
        if self._rank.position == 0:
            for position in range(1, self._rank.size):
                inner.hand_over(partial(state_transfer.send_state, state=self.full(), to=position))
        else:
            self.load(inner.hand_over(lambda peer: state_transfer.receive_state(peer, 0)))

    def fingerprint(self) -> dict[str, Any]:
        """Return ``params_norm`` and ``params_sha256``: L2 norm and sha256 of the group's parameters; ``state``: a
        checksum of all its ranks' states. Raises ``StartOver`` if ranks that share their parameters hold different
        ones."""
        inner = self._rank.inner
        mine = (*self._engine.fingerprint(), self._guard.states.whole(self._computing.step + 1))
        norms, hashes, states = zip(*([mine] if inner is None else inner.gather(mine)), strict=True)
        norm, sha256 = norms[0], hashes[0]
        if self._computing.joint is not None and inner is not None:  # each rank has a part of the model
            norm, sha256 = math.hypot(*norms), hashlib.sha256(bytes.fromhex("".join(hashes))).hexdigest()
        elif len(set(hashes)) > 1:
            raise StartOver(f"group {self._rank.group} leaves: its ranks hold different parameters after the last step")
        whole = hashlib.sha256(repr(states).encode()).hexdigest()[:_STATE_DIGITS]
        return {"params_norm": norm, "params_sha256": sha256, "state": whole}
