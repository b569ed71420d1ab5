"""Communicators of gloo whose process group outlives them: torch connects it to the members of each view (torch >= 2.14).

torch makes such a group without a connection (``enable_reconfigure``). A member has a handle, which changes with each
reconfiguration; ``reconfigure`` takes the handles of all members, in the order of their ranks, and a number that was never
used, and connects them. If that fails, the group is as before, and it can be tried again. torch offers this in
``torch.distributed`` for the default group; the process group itself has the same methods, so the world of the group's own
ranks is not involved.

A reconfiguration ends no operation. One that is pending keeps one of the group's two threads, and what is started in the
new view waits behind it. Therefore an abort cuts the connections here, too (``collectives.gloo_communicator``), and a
process group is used again only if all its operations have ended. One with an operation that gloo has forgotten, or whose
reconfiguration has not returned, is given up, and the next view gets a new one. A communicator that was left may be open
while the next view's is built; then there are two process groups, which are used in turn.

Failures it assumes: those of ``collectives.base``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ft.collectives.gloo_communicator import GlooCommunicator


def supported() -> bool:
    """Return whether this torch can reconfigure a process group of gloo."""
    return hasattr(dist.ProcessGroupGloo, "reconfigure")


class Endpoint:
    """A process group of one member, whose peers change. One communicator at a time uses it.

    Args:
        me: the member's number, by which torch tells members apart.
    """

    def __init__(self, me: int) -> None:
        self._store = _CurrentStore()
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options.enable_reconfigure = True
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # never used
        self.group = gloo(self._store, me, me + 1, options)

    def reconfigure(self, rendezvous: Any, place: int, size: int, device: Any, epoch: int, limit: timedelta) -> Any:
        """Connect to the other members. Return the store in which they have published their addresses.

        Args:
            rendezvous: torch store, with a prefix that no other communicator uses.
            place: of this member, from 0 to ``size`` - 1.
            size: number of members.
            device: of gloo; it listens for the other members of this view alone.
            epoch: the view's number.
            limit: time after which it fails.

        Raises ``RuntimeError`` if it fails; the group can be used again then.
        """
        self._store.current = rendezvous
        rendezvous.set(f"handle/{place}", self.group.get_reconfigure_handle())
        keys = [f"handle/{other}" for other in range(size)]
        rendezvous.wait(keys, limit)
        made: Any = dist.distributed_c10d
        options = made.ReconfigureOptions()
        options.uuid, options.timeout = epoch, limit
        options.handles = [handle.decode() for handle in rendezvous.multi_get(keys)]
        self.group.options._devices = [device]
        self.group.reconfigure(options).wait()  # it has no timeout; the options have
        return dist.PrefixStore(f"reconfigure/{epoch}", rendezvous)


class Endpoints:
    """The endpoints of one member that no communicator uses. Any thread may call it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._free: list[Endpoint] = []
        self._lock = threading.Lock()

    def take(self) -> Endpoint:
        """Return an endpoint that nobody else has."""
        with self._lock:
            return self._free.pop() if self._free else Endpoint(self._me)

    def give_back(self, endpoint: Endpoint) -> None:
        """Let another communicator have an endpoint in which no operation is pending."""
        with self._lock:
            self._free.append(endpoint)


class ReconfiguredCommunicator(GlooCommunicator):
    """A process group of gloo that was, or will be, that of another view.

    Args:
        endpoints: this member's, for all its communicators.
        rendezvous, me, members, epoch, timeout_s, address: see
            :class:`~megatron_ft.collectives.gloo_communicator.GlooCommunicator`.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        rendezvous: Any,
        me: int,
        members: Sequence[int],
        epoch: int,
        timeout_s: float,
        address: str = "127.0.0.1",
    ) -> None:
        self._endpoints = endpoints
        self._endpoint: Endpoint | None = None
        super().__init__(rendezvous, me, members, epoch, timeout_s, address)

    def _join(self, rendezvous: Any, size: int, device: Any, limit: timedelta) -> tuple[Any, Any]:
        endpoint = self._endpoints.take()
        try:
            met = endpoint.reconfigure(rendezvous, self._place, size, device, self.epoch, limit)
        except RuntimeError:
            self._endpoints.give_back(endpoint)
            raise
        self._endpoint = endpoint
        return endpoint.group, met

    def _release(self) -> Any:
        endpoint, self._endpoint = self._endpoint, None
        super()._release()
        if endpoint is not None and all(work.settled() for work in self._started):
            self._endpoints.give_back(endpoint)
            return None
        return endpoint


class _CurrentStore(dist.Store):
    """The store of a process group, which torch keeps for good: that of the present view. torch calls it from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Any = None


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: _CurrentStore, *arguments: Any) -> Any:
        return getattr(self.current, name)(*arguments)

    return call


for _name in (
    *("set", "get", "wait", "check", "compare_set", "add", "append"),
    *("multi_get", "multi_set", "has_extended_api", "delete_key", "deleteKey"),
):
    setattr(_CurrentStore, _name, _forwarded(_name))
