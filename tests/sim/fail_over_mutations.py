"""Planted bugs in the fail-over of the control store, as in ``mutations``."""

from __future__ import annotations

from dataclasses import replace

from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_succession import Succession
from megatron_ft.core.protocol import machine
from megatron_ft.proof import store_client
from megatron_ft.proof.scenario import Fault, Scenario, draw_fail_over
from megatron_ft.proof.simulated_group import Group
from megatron_ft.proof.simulated_hosts import Agent
from megatron_ft.record import lineage
from tests.sim.planted import registry

MUTATIONS, mutation = registry(range(400), draw_fail_over)


def only_what_follows(patch):
    """The checkers ignore the log and the fences, and look only at their effects: commits, and that the run goes on."""
    patch.setattr(lineage, "_log", lambda lines: ())
    patch.setattr(lineage, "_sealed", lambda lines: ())


@mutation("no seat is fenced", "which does not come after it")
def _(patch):
    only_what_follows(patch)
    _change_proposals(patch, lambda state, action: replace(action, fence=()))


@mutation(
    "a view is written before those that it leaves out are fenced", "which does not come after it", range(180, 400)
)
def _(patch):
    only_what_follows(patch)

    async def later(self, proposal):
        self.cluster.kernel.after(20.0, lambda: self.gone or fence(self, proposal.fence))
        return ()

    def fence(self, seats):
        need = set(seats) - store_failover.fenced(self.client.claims)
        if need:
            self.client.create(store_failover.fence(self.client.claims[-1], need, self.me, ""), [self.seat])

    patch.setattr(Group, "fence", later)


def store_cut_off(seed):
    """The group of the store's host fences the other one, whose host then claims the store together with a spare host."""
    faults = Fault(8.0 + seed % 20 / 4, "host isolated", (0,), 117.0), Fault(40.0, "claims race", (1, 4))
    return Scenario(seed, 2, 2, 2, 8, faults=faults, spare_hosts=2)


@mutation("a fenced seat goes on, and may claim", "which does not come after it", range(40), store_cut_off)
def _(patch):
    only_what_follows(patch)

    def reads(self, claim):
        if self.seat not in claim.fenced:
            READS(self, claim)

    patch.setattr(Group, "reads", reads)
    patch.setattr(store_failover, "may_claim", lambda own, claims: True)


@mutation("a fence is made without having read the log", "which is fenced")
def _(patch):
    patch.setattr(lineage, "_sealed", lambda lines: ())

    async def fence(self, proposal):
        if proposal.fence:
            claim = store_failover.fence(self.client.world.disk.log[-1], proposal.fence, self.me, "")
            await self.client.create(claim, [self.seat])
        return ()

    patch.setattr(Group, "fence", fence)


@mutation("fenced seats stay in a view", "which claims had fenced", range(1270, 1290))
def _(patch):

    def reads(self, claim):
        if self.seat in claim.fenced:
            READS(self, claim)

    patch.setattr(Group, "reads", reads)


@mutation("a group that is taken for dead counts as ended", "which live and are not fenced")
def _(patch):

    def died(state, event):
        return DIED(state, replace(event, ended=True))

    patch.setattr(machine, "_died", died)


@mutation("a claim is made at any number", "claim 2 is made when 1 are there")
def _(patch):
    async def take_over(self, last):
        claim = store_failover.taken_over(last, self._me, self._here.serve(), "")
        await self._here.create(replace(claim, number=claim.number + 1))

    patch.setattr(Succession, "take_over", take_over)


@mutation("reports are put back and the view is not", "lives and ends: left out by claim", range(220, 400))
def _(patch):
    patch.setattr(Group, "knows", lambda self: KNOWS(self)[1:])


@mutation("nothing is put back", "lives and ends: left out by claim")
def _(patch):
    patch.setattr(Group, "knows", lambda self: [])
    patch.setattr(Agent, "knows", lambda self: [])


@mutation("no host takes the store over", "no progress")
def _(patch):
    patch.setattr(store_failover, "due_s", lambda outlook: None)


@mutation("an agent that is started on the store's host waits for the store", "no progress")
def _(patch):
    patch.setattr(store_failover, "due_s", lambda outlook: DUE(replace(outlook, keeps=True)))


@mutation("processes read the log at their start only", "no progress")
def _(patch):
    patch.setattr(store_client.Client, "_poll", lambda self: None)


@mutation("hosts that are lost together outvote the last one", "lives and ends: group", range(400))
def _(patch):
    patch.setattr(machine, "_cut_off", lambda state, silent=(): CUT_OFF(state))


def _change_proposals(patch, change):
    patch.setattr(machine, "_proposal", lambda state: tuple(change(state, action) for action in PROPOSAL(state)))


READS = Group.reads
KNOWS = Group.knows
DIED = machine._died
DUE = store_failover.due_s
PROPOSAL = machine._proposal
CUT_OFF = machine._cut_off
