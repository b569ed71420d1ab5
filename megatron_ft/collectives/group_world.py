"""torch.distributed inside one group: to the engine, the group is the world.

The store through which its process groups meet lives in position 0, on a port that the system chooses: no two jobs and no
two groups can meet by accident, nothing has to be configured, and it ends with the group. Where it is, the control store
tells.

Failures it assumes: any rank of the group may vanish while the world is made or later. Process groups of gloo can then be
cut (``runtime.sockets``), so that nobody stays in a collective for gloo's half hour; NCCL's are aborted by their watchdog
(``runtime.inside``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ft.errors import EngineError
from megatron_ft.runtime import sockets
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.connect import wait_for
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.inner import ENDLESS_S, Lost

_START_TIMEOUT = timedelta(minutes=10)


class World:
    """One rank's membership in its group's ``torch.distributed`` world."""

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}
        self._before = sockets.opened()
        self._cut = False

    @classmethod
    def join(
        cls, env: RankEnvironment, agreement: Agreement, backend: str | None, interrupted: Callable[[], bool]
    ) -> World:
        """Meet the other ranks of the group. Raises ``Lost`` when ``interrupted`` became true first.

        Raises ``EngineError`` when ``torch.distributed`` is initialised already.
        """
        if dist.is_initialized():
            raise EngineError(
                "torch.distributed is initialised already, with a world that is not this group's; leave that to "
                "session.init_distributed(), and call it before anything else does"
            )
        world = cls()
        interface = sockets.interface_of(env.address)
        if interface is not None:  # else gloo asks what the host's name resolves to, which others may not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if torch.cuda.is_available():  # NCCL takes the present device; the agent has numbered this host's ranks
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        with world.made_here(env.store):
            store = cls._store(env, agreement, interrupted)
            dist.init_process_group(
                backend or ("nccl" if torch.cuda.is_available() else "gloo"),
                store=dist.PrefixStore("world", store),
                rank=env.position,
                world_size=env.config.ranks_per_group,
                timeout=timedelta(seconds=ENDLESS_S),
            )
        return world

    @staticmethod
    def _store(env: RankEnvironment, agreement: Agreement, interrupted: Callable[[], bool]) -> dist.TCPStore:
        name = f"world/{env.seat}"
        if env.position == 0:
            store = dist.TCPStore(env.address, 0, is_master=True, wait_for_workers=False, timeout=_START_TIMEOUT)
            agreement.say(name, [env.address, store.port])
        else:
            if not wait_for(lambda: agreement.get(name) is not None, interrupted):
                raise Lost("a rank of the group was gone before all of them had started")
            address, port = agreement.get(name)
            store = dist.TCPStore(address, port, is_master=False, timeout=_START_TIMEOUT)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)  # some libraries look there
        return store

    @contextmanager
    def made_here(self, control_store: str) -> Iterator[None]:
        """Process groups that are made until the end of this block can be cut, also by the script between two such blocks
        (a ``PipelineModule`` makes its own). ``control_store``: whose connections are left alone."""
        try:
            yield
        finally:
            ports = [int(port) for port in re.findall(r":(\d+)", control_store)]
            self._sockets.update(sockets.connected_since(self._before, except_to=ports))
            if self._cut:
                self.cut()

    def cut(self) -> None:
        """Nobody waits for another rank of the group any more. Any thread."""
        self._cut = True
        sockets.shut_down(self._sockets)
