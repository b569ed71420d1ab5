"""Planted bugs of groups on devices, as in ``mutations``."""

from __future__ import annotations

from functools import partial

from megatron_ft.proof import simulated_cluster, simulated_device
from megatron_ft.proof.scenario import draw, draw_on_devices
from megatron_ft.proof.simulated_device import Device
from megatron_ft.proof.simulated_group import Group
from tests.sim.planted import registry

MUTATIONS, mutation = registry(range(300), partial(draw_on_devices, draw))


@mutation("a completion counts that was seen after the abort began", "with bucket")
def _(patch):
    def cut(self, reason, in_order=False):
        self.device.abort()

    patch.setattr(Group, "_cut", cut)


@mutation("the buffer of an abandoned operation is used again", "with bucket")
def _(patch):
    def buffer(self, bucket):
        return self.buffers.setdefault(bucket, simulated_device.Buffer(simulated_device.Sum()))

    patch.setattr(Device, "buffer", buffer)


@mutation("a group waits for a reset by the peer that has aborted or died", "no progress")
def _(patch):
    patch.setattr(simulated_cluster, "PATIENCE", 1e6)

    def take_in(self, event):
        self._inbox.append(event)
        self._poke()

    patch.setattr(Group, "_take_in", take_in)


@mutation("a process goes on with a stuck communicator", "no progress")
def _(patch):
    async def close(self):
        await CLOSE(self)
        return True

    patch.setattr(Device, "close", close)


@mutation("the next epoch's communicator has the id of the one before", "counts 1, not 0")
def _(patch):
    patch.setattr(Group, "_name", lambda self, view: 0)


@mutation("a watchdog kills the processes whose operations do not end", "no fault has struck it")
def _(patch):
    patch.setattr(simulated_device, "WATCHDOG_S", 5.0)


@mutation("sums count that the other members have not confirmed", "with bucket")
def _(patch):
    async def confirm(self, view, step): ...

    patch.setattr(Group, "_confirm", confirm)


CLOSE = Device.close
