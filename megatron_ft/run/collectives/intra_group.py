"""Orders and sums among the ranks of one group: position 0 gives the orders, and all ranks carry them out together.

Only the leader (position 0) runs the protocol. So all ranks of a group share one view without agreeing on it, and no
rank does anything outside of the group without the leader's knowledge: an order that concerns other groups ends with an
answer that all ranks receive.

Failures it assumes: any rank of the group may vanish, stop or be cut off at any time. The group cannot go on then, and
every operation here ends with :class:`Lost`, pending ones within milliseconds after a call of :meth:`IntraGroup.abort`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.run.collectives.base import Broken, Communicator, wait_for
from megatron_ft.run.collectives.communicator_choice import NCCL, Maker, Offer, with_nccl
from megatron_ft.run.collectives.rendezvous import Build
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import given

ENDLESS_S = 30 * 86400.0
"""Seconds that an operation inside a group may take. Silence is no failure here: followers wait for orders while the
leader's script does something else, and a stage waits for the one before it. The agent reports the death of a rank."""
_ATTEMPTS, _LATE_S = 3, 1.0
"""Attempts to meet, and the seconds after which a waiting rank looks whether another rank has failed."""
_SHORT = 1024
"""Bytes of an order that travels in one message, its length included."""
_LENGTH = 8


class Lost(Exception):
    """This group cannot go on because one of its ranks is gone. An event, which the session converts."""


def _meet(
    env: RankEnvironment, agreement: CoordinationClient, name: str, interrupted: Callable[[], bool]
) -> tuple[Communicator | None, list[str]]:
    """Make one attempt. Return this rank's end, if it has one, and the failure that each rank reports, if any."""
    positions = range(env.config.ranks_per_group)
    build = Build(agreement.clone(), name, Maker(env.position, positions, 0, ENDLESS_S, env.address))
    late = time.monotonic() + _LATE_S

    def said() -> list[str | None]:
        return [agreement.get(f"{name}/{position}") for position in positions]

    def wait(condition: Callable[[], bool]) -> None:
        # no limit: interrupted when a rank of the group is lost; one that hangs while it starts is given up by its
        # agent after detector.outside_timeout_s
        if not wait_for(condition, interrupted):
            raise Lost("a rank of the group was gone before all of them had started")

    wait(lambda: build.over() or (time.monotonic() > late and any(said())))
    communicator, why = None, ""
    try:
        # no limit: it does not block: the build is over, or it is given up
        communicator = build.result()
    except Broken as error:
        why = error.in_full
    agreement.put(f"{name}/{env.position}", why)
    reasons: list[str] = []

    def all_said() -> bool:
        reasons[:] = [reason for reason in said() if reason is not None]
        return len(reasons) == len(positions)

    wait(all_said)
    return communicator, reasons


class IntraGroup:
    """One rank's end of the group's communicator. Its methods, except :meth:`abort`, belong to the training thread."""

    def __init__(self, communicator: Communicator, position: int) -> None:
        self._communicator = communicator
        self.position, self.size = position, len(communicator.members)

    @classmethod
    def build(cls, env: RankEnvironment, agreement: CoordinationClient, interrupted: Callable[[], bool]) -> IntraGroup:
        """Meet the other ranks of the group. Raises :class:`Lost` if ``interrupted`` became true, or if it cannot be
        done.

        The ranks meet through the control store. If the store dies meanwhile, some of them may have met and others not.
        So all ranks report the outcome, and if it failed for one of them, all try once more.
        """
        for attempt in range(_ATTEMPTS):
            communicator, reasons = _meet(env, agreement, f"inner/{env.seat}/{attempt}", interrupted)
            if not any(reasons):
                return cls(given(communicator), env.position)
            if communicator is not None:
                communicator.close()
        raise Lost(next(filter(None, reasons)))

    def use(self, device: torch.device, offer: Offer, name: str, rendezvous: Callable[[str], Any]) -> None:
        """Sum tensors on ``device`` by NCCL, if all ranks offer it and each has a device of its own. All ranks call it.

        ``rendezvous`` returns the torch store of a name; no other communicator has this ``name``.
        """
        places = self.gather(offer.place if NCCL in offer.kinds else None)
        if None in places or len(set(places)) < self.size:
            return
        host = self._communicator
        made = self._communicator = with_nccl(host, device, name, rendezvous(name))
        if host.aborted:  # in the moment between
            made.abort()
        try:
            # no limit: an abort ends it when a rank of the group is lost
            made.connect()
        except RuntimeError as error:
            raise Lost(f"the ranks of the group could not connect by NCCL: {error}") from None

    def abort(self) -> None:
        """Make every pending and future operation raise :class:`Lost`, here and at the other ranks. Any thread."""
        self._communicator.abort()

    def order(self, name: str, **fields: Any) -> None:
        """Leader: tell the other ranks their next operation. ``fields`` are JSON."""
        text = json.dumps([name, fields]).encode()
        message = torch.zeros(max(_SHORT, _LENGTH + len(text)), dtype=torch.uint8)
        message[:_LENGTH].view(torch.int64)[0] = len(text)
        message[_LENGTH : _LENGTH + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._broadcast(message[:_SHORT].contiguous(), 0)
        if len(message) > _SHORT:
            self._broadcast(message[_SHORT:].contiguous(), 0)

    def next_order(self) -> tuple[str, dict[str, Any]]:
        """Followers: wait for the next order and return it."""
        message = torch.zeros(_SHORT, dtype=torch.uint8)
        self._broadcast(message, 0)
        length = int(message[:_LENGTH].view(torch.int64)[0])
        if _LENGTH + length > _SHORT:
            rest = torch.zeros(_LENGTH + length - _SHORT, dtype=torch.uint8)
            self._broadcast(rest, 0)
            message = torch.cat([message, rest])
        name, fields = json.loads(message[_LENGTH : _LENGTH + length].numpy().tobytes())
        return name, fields

    def all_reduce_min(self, value: int) -> int:
        """Return the least ``value`` of all ranks, once every rank has given one."""
        said = torch.zeros(self.size, dtype=torch.int64)
        said[self.position] = value
        self.sum(said)
        return int(said.min())

    def sum(self, *tensors: torch.Tensor) -> None:
        """Sum each tensor over the ranks, in place."""
        self._carry_out(lambda: [self._communicator.all_reduce(tensor) for tensor in tensors])

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by position, once every rank has given one. Values are JSON."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.position] = len(own)
        self.sum(lengths)
        found = []
        for position, length in enumerate(lengths.tolist()):
            text = own if position == self.position else torch.zeros(length, dtype=torch.uint8)
            self._broadcast(text, position)
            found.append(json.loads(text.numpy().tobytes()))
        return found

    def share(self, tensor: torch.Tensor, source: int) -> None:
        """Copy the tensor of rank ``source`` into ``tensor`` at the other ranks."""
        self._broadcast(tensor, source)

    def hand_over(self, operation: Callable[[Communicator], Any]) -> Any:
        """Run a point-to-point operation between two of the ranks (``run.collectives.state_transfer``)."""
        try:
            return operation(self._communicator)
        except Broken as error:
            raise Lost(error.in_full) from None

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._carry_out(lambda: [self._communicator.broadcast(tensor, source)])

    def _carry_out(self, start: Callable[[], list[Any]]) -> None:
        try:
            for work in start():
                # no limit: as long as the group's ranks live, of which agents judge; an abort ends it when one is
                # lost
                work.wait()
            self._communicator.confirm()
        except Broken as error:
            raise Lost(error.in_full) from None
