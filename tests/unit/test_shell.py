"""The loop of a group in what neither transcripts nor simulated histories reach reliably."""

from __future__ import annotations

from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.ports import Clock, Ranks, Store
from megatron_ft.core.protocol.shell import Shell, carry_out

PATIENCE_S = 3.0


class Alone(Ranks, Store, Clock):
    """The ports of the only group, which can end the run after ten looks."""

    looks = 0
    ended = 0

    def now(self) -> float:
        return float(self.looks)

    async def await_others(self) -> bool:
        self.looks += 1
        return self.looks > 10

    async def announce(self, said: machine.EpochAborted, detail: str = "") -> None:
        assert said.why == "not every live group is done 3 s after this one"
        self.ended += 1
        assert self.ended < 10, "the epoch ends in every turn"

    async def publish(self, report: machine.Report) -> None: ...

    async def propose(self, view: machine.View) -> machine.View:
        return view


def test_a_group_that_waits_for_the_end_ends_its_epoch_once_in_each_patience():
    """Its own next view stands at once, so it waits for the end again without having waited for a view."""
    ports = Alone()
    state = machine.start(0, machine.Job(shards=1, per_shard=1, buckets=1, steps=1), first_view(1))
    shell = Shell(machine.changed(state, step=1), ports, ports, ports)
    carry_out(shell.finish(PATIENCE_S))
    assert ports.ended == 3 and shell.state.view.epoch == 3
