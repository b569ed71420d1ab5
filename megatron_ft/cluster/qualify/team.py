"""Host 0's hold on the processes of all hosts: orders to them, and a whole team before every check.

A member that has ended, is silent or says that its abort is stuck gets a new process before the next check.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_ft.cluster.doctor.host_orders import Hub
from megatron_ft.cluster.doctor.meeting import Message
from megatron_ft.cluster.qualify.device_seats import Seat
from megatron_ft.cluster.qualify.outcomes import CheckFailed

START_S = 180.0
"""Time in which a new process imports torch and connects to the store."""
ORDER_S = 60.0
_MORE_S = 10.0
"""A host answers that much later than its members, at most."""


def ask(hub: Hub, orders: Mapping[int, Message], limit_s: float) -> dict[int, Message]:
    """Return the answer of each host. Raises ``CheckFailed`` for a host that is lost, or could not do it."""
    answers = hub.ask(orders, limit_s + _MORE_S)
    for host in orders:
        why = hub.gone.get(host) or answers.get(host, {}).get("failed")
        if why:
            raise CheckFailed(f"host {host}: {why}")
    return answers


class Team:
    """The members: one process for each group.

    Args:
        hub: the connections to all hosts.
        seats: the place of each group.
        store: address and port of the torch store at which communicators meet.
    """

    def __init__(self, hub: Hub, seats: Sequence[Seat], store: tuple[str, int]) -> None:
        self._hub, self._seats, self._store = hub, seats, store
        self._lacking = set(range(len(seats)))
        self._epoch = 0
        self.offers: dict[int, Any] = {}
        self.watchdog: dict[str, str] = {}

    @property
    def everybody(self) -> list[int]:
        return list(range(len(self._seats)))

    def whole(self) -> None:
        """Start what is lacking. Raises ``CheckFailed``."""
        lacking = sorted(self._lacking)
        starts = self._by_host({member: dict(self._seats[member].env) for member in lacking})
        ask(self._hub, {host: {"do": "start", "members": members} for host, members in starts.items()}, ORDER_S)
        self._lacking -= set(lacking)
        enters = {
            member: {
                "do": "enter",
                "me": member,
                "store": list(self._store),
                "address": self._hub.host_records[self._seats[member].host]["address"],
                "device": self._seats[member].device,
            }
            for member in lacking
        }
        for member, said in self.tell(enters, START_S).items():
            self.offers[member] = said["offer"]
            self.watchdog = said["watchdog"]

    def meet(self, kind: str, members: Iterable[int] | None = None) -> float:
        """Build a communicator of these members (default: all). Returns the longest time in seconds."""
        if members is None:
            self.whole()
        named = self.everybody if members is None else sorted(members)
        self._epoch += 1
        order = {
            "do": "connect",
            "kind": kind,
            "name": f"qualify/{self._epoch}",
            "epoch": self._epoch,
            "members": named,
            "hosts": [self._seats[member].host for member in named],
        }
        return max(said["seconds"] for said in self.tell(dict.fromkeys(named, order)).values())

    def tell_all(self, order: Message, limit_s: float = ORDER_S) -> dict[int, Message]:
        return self.tell(dict.fromkeys(self.everybody, order), limit_s)

    def tell(self, orders: Mapping[int, Message], limit_s: float = ORDER_S) -> dict[int, Message]:
        """Give each member its order and return the answers. Raises ``CheckFailed`` for one that could not do it."""
        by_host = self._by_host(orders)
        told = {host: {"do": "members", "orders": own, "limit_s": limit_s} for host, own in by_host.items()}
        said = ask(self._hub, told, limit_s)
        answers = {int(member): answer for own in said.values() for member, answer in own.items()}
        found = []
        for member, answer in sorted(answers.items()):
            if "failed" in answer:
                found.append(f"group {member}: {answer['failed']} (order: {orders[member]['do']})")
            if "lost" in answer:
                self._lacking.add(member)
        if found:
            raise CheckFailed("; ".join(found))
        return answers

    def _by_host(self, said: Mapping[int, Message]) -> dict[int, dict[str, Message]]:
        found: dict[int, dict[str, Message]] = {}
        for member, one in said.items():
            found.setdefault(self._seats[member].host, {})[str(member)] = one
        return found

    def signal(self, member: int, number: signal.Signals) -> None:
        """Send a signal to the process of one member."""
        if number is signal.SIGKILL:
            self._lacking.add(member)
        order = {"do": "signal", "member": member, "number": int(number)}
        ask(self._hub, {self._seats[member].host: order}, ORDER_S)

    def replace(self, member: int) -> None:
        """Have the member's process replaced before the next check."""
        self._lacking.add(member)
