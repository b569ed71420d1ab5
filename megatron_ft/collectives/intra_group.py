"""The ranks of one group among themselves: position 0 gives orders, all of them carry them out, and sum up in between.

Only the leader (position 0) runs the protocol. So all ranks of a group share one view without agreeing on it, and none of
them does anything outside of the group that the leader does not know of: an order that touches other groups ends with an
answer that all ranks hear.

Failures it assumes: any rank of the group may vanish, stop or be cut off at any time. The group cannot go on then, and every
operation here ends with :class:`Lost`, pending ones within milliseconds once somebody has called :meth:`Inner.abort`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.communicator import Broken, Communicator
from megatron_ft.runtime.connect import Build, wait_for
from megatron_ft.runtime.environment import RankEnvironment

ENDLESS_S = 30 * 86400.0
"""Inside a group nobody is given up for silence: followers wait for orders for as long as the leader's script does something
else, a stage for the one before it. Who died is told by its agent."""
_ATTEMPTS, _LATE_S = 3, 1.0
"""To meet; and who has waited so long looks whether another rank has failed."""
_SHORT = 1024
"""Bytes of an order that travels in one message, its length included."""
_LENGTH = 8


class Lost(Exception):
    """This group cannot go on: one of its ranks is gone. An event, converted in the session."""


def _meet(
    env: RankEnvironment, agreement: Agreement, name: str, interrupted: Callable[[], bool]
) -> tuple[Communicator | None, list[str]]:
    """One attempt: this rank's end, if it has one, and what each rank says went wrong (empty: nothing)."""
    positions = range(env.config.ranks_per_group)
    build = Build(env, agreement.clone(), name, env.position, positions, 0, ENDLESS_S)
    late = time.monotonic() + _LATE_S

    def said() -> list[str | None]:
        return [agreement.get(f"{name}/{position}") for position in positions]

    def wait(condition: Callable[[], bool]) -> None:
        if not wait_for(condition, interrupted):
            raise Lost("a rank of the group was gone before all of them had started")

    wait(lambda: build.over() or (time.monotonic() > late and any(said())))
    communicator, why = None, ""
    try:
        communicator = build.result()
    except Broken as error:
        why = str(error)
    agreement.say(f"{name}/{env.position}", why)
    reasons: list[str | None] = []

    def all_said() -> bool:
        reasons[:] = said()
        return None not in reasons

    wait(all_said)
    return communicator, reasons


class Inner:
    """One rank's end. ``position`` and ``size`` as everywhere; all methods but :meth:`abort` are the training thread's."""

    def __init__(self, communicator: Communicator, position: int) -> None:
        self._communicator = communicator
        self.position, self.size = position, len(communicator.members)

    @classmethod
    def build(cls, env: RankEnvironment, agreement: Agreement, interrupted: Callable[[], bool]) -> Inner:
        """Meet the other ranks of the group. Raises :class:`Lost` when ``interrupted`` became true, or it cannot be done.

        They meet through the control store, which may die in the middle of it: then some of them may have met and others
        not. So all say how it went, and if it went wrong for one of them, all try once more.
        """
        for attempt in range(_ATTEMPTS):
            communicator, reasons = _meet(env, agreement, f"inner/{env.seat}/{attempt}", interrupted)
            if not any(reasons):
                return cls(communicator, env.position)
            if communicator is not None:
                communicator.close()
        raise Lost(next(filter(None, reasons)))

    def abort(self) -> None:
        """Make every pending and future operation raise :class:`Lost`, here and at the other ranks. Any thread."""
        self._communicator.abort()

    def order(self, name: str, **fields: Any) -> None:
        """Leader: tell the others what all do now. ``fields`` are JSON."""
        text = json.dumps([name, fields]).encode()
        message = torch.zeros(max(_SHORT, _LENGTH + len(text)), dtype=torch.uint8)
        message[:_LENGTH].view(torch.int64)[0] = len(text)
        message[_LENGTH : _LENGTH + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._broadcast(message[:_SHORT].contiguous(), 0)
        if len(message) > _SHORT:
            self._broadcast(message[_SHORT:].contiguous(), 0)

    def next_order(self) -> tuple[str, dict[str, Any]]:
        """The others: wait for it."""
        message = torch.zeros(_SHORT, dtype=torch.uint8)
        self._broadcast(message, 0)
        length = int(message[:_LENGTH].view(torch.int64)[0])
        if _LENGTH + length > _SHORT:
            rest = torch.zeros(_LENGTH + length - _SHORT, dtype=torch.uint8)
            self._broadcast(rest, 0)
            message = torch.cat([message, rest])
        name, fields = json.loads(message[_LENGTH : _LENGTH + length].numpy().tobytes())
        return name, fields

    def least(self, value: int) -> int:
        """The least of what all ranks say; nobody returns before all have said something."""
        said = torch.zeros(self.size, dtype=torch.int64)
        said[self.position] = value
        self.sum(said)
        return int(said.min())

    def sum(self, *tensors: torch.Tensor) -> None:
        """Sum each over the ranks, in place."""
        self._carry_out(lambda: [self._communicator.all_reduce(tensor) for tensor in tensors])

    def share(self, tensor: torch.Tensor, source: int) -> None:
        """Copy ``source``'s tensor into that of the others."""
        self._broadcast(tensor, source)

    def hand_over(self, operation: Callable[[Communicator], Any]) -> Any:
        """Point-to-point between two of the ranks (``runtime.transfer``)."""
        try:
            return operation(self._communicator)
        except Broken as error:
            raise Lost(str(error)) from None

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._carry_out(lambda: [self._communicator.broadcast(tensor, source)])

    def _carry_out(self, start: Callable[[], list[Any]]) -> None:
        try:
            for work in start():
                work.wait()
        except Broken as error:
            raise Lost(str(error)) from None
