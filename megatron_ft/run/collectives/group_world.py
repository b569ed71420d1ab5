"""torch.distributed inside one group: to the engine, the group is the world.

The store through which its process groups meet runs in position 0, on a port that the system chooses: no two jobs and
no two groups can meet by accident, nothing has to be configured, and it ends with the group. It listens on this host's
address in the hosts' network only; gloo listens on the first address of that interface.

Failures it assumes: any rank of the group may vanish while the world is made or later. Process groups of gloo can then be
cut (``utils.socket_tracker``), so that no rank stays in a collective for gloo's half hour, and NCCL's are aborted
(``run.collectives.user_process_groups``). gloo forgets a send that it has begun to write, or begins after the cut (its
``Pair::signalException`` passes over these, torch 2.13): such a rank stays until its agent ends it, with the group's next
start or the run's end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.errors import EngineError
from megatron_ft.run.collectives import gloo_sockets
from megatron_ft.run.collectives.device_copies import own_device
from megatron_ft.run.collectives.intra_group import ENDLESS_S, IntraGroup
from megatron_ft.run.store import listen, serve_on
from megatron_ft.utils import net, socket_tracker

_START_TIMEOUT = timedelta(minutes=10)


class World:
    """One rank's membership in its group's ``torch.distributed`` world."""

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}
        self._before = socket_tracker.opened()
        self._cut = False

    @classmethod
    def join(cls, env: RankEnvironment, inner: IntraGroup | None, backend: str | None) -> World:
        """Meet the other ranks of the group, which ``inner`` joins; None: there is one rank. Raises ``Lost`` when one of
        them is gone.

        Raises ``EngineError`` if ``torch.distributed`` is already initialised.
        """
        if dist.is_initialized():
            raise EngineError(
                "torch.distributed is initialised already, with a world that is not this group's; leave that to "
                "session.init_distributed(), and call it before anything else does"
            )
        world = cls()
        interface = net.interface_of(env.address)
        if interface is not None:  # otherwise gloo uses the address of the host's name, which other hosts may not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if torch.cuda.is_available():  # NCCL takes the present device; the agent has numbered this host's ranks
            torch.cuda.set_device(own_device())
        store = world._meet(env, inner)
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        longest_s = env.config.fault_tolerance.detector.longest_collective_s if "nccl" in backend else ENDLESS_S
        with world.made_here():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("world", store),
                rank=env.position,
                world_size=env.config.ranks_per_group,
                timeout=timedelta(seconds=longest_s),
            )
        return world

    def _meet(self, env: RankEnvironment, inner: IntraGroup | None) -> dist.TCPStore:
        """Return the group's store, through which its process groups are built."""
        place: list[Any] = []
        if env.position == 0:
            with listen(env.address, 0) as listener:
                store = serve_on(listener, _START_TIMEOUT)
            place = [env.address, store.port]
        if inner is not None:
            address, port = inner.gather(place)[0]
            if env.position > 0:
                store = dist.TCPStore(address, port, is_master=False, timeout=_START_TIMEOUT)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)  # some libraries look there
        self._sockets.update(socket_tracker.connected_to((store.host, store.port)))
        return store

    @contextmanager
    def made_here(self) -> Iterator[None]:
        """Make the process groups of gloo that are created until the end of this block cuttable, also those that the
        script creates between two such blocks (a ``PipelineModule`` does). Other connections of the process are not
        affected."""
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the store ended with its rank: the group is lost
                self._sockets.update(gloo_sockets.of_world(self._before))
            if self._cut:
                self.cut()

    def cut(self) -> None:
        """End the waits for other ranks of the group, but those that gloo forgets. Callable from any thread."""
        self._cut = True
        socket_tracker.shut_down(self._sockets)
