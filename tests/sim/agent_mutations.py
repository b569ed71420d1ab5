"""Planted bugs in what agents decide, as in ``mutations``: which heartbeats count, which hosts are silent, which ranks are
given up, which start follows, who takes the store over."""

from __future__ import annotations

from dataclasses import replace

from megatron_ft.core.detection import link_detector, rank_health
from megatron_ft.core.detection.heartbeats import Listener
from megatron_ft.core.detection.link_detector import Peer
from megatron_ft.core.detection.rank_health import Health, Sample
from megatron_ft.core.lifecycle import restart_policy, store_failover
from megatron_ft.core.lifecycle.group_returns import RestartManager
from megatron_ft.core.lifecycle.store_succession import Succession
from megatron_ft.core.protocol import signals
from megatron_ft.proof.scenario import Fault, Scenario, draw_fail_over
from megatron_ft.proof.simulated_hosts import LEAST_S
from tests.sim.planted import registry

MUTATIONS, mutation = registry(range(400), draw_fail_over)


# --- heartbeats -------------------------------------------------------------------------------------------------------


@mutation("a heartbeat of an old incarnation counts, and one that is sent again", "is heard again, ")
def _(patch):
    def hear(self, host, count, said, now):
        self._others[host].count = -1
        return HEAR(self, host, count, said, now)

    patch.setattr(Listener, "hear", hear)


@mutation("an agent that was stopped evicts all others when it wakes up", "is silent, 0.1 s after")
def _(patch):
    patch.setattr(link_detector, "LISTEN_S", 1e9)


@mutation("a host is silent as soon as two heartbeats are missing", "is silent, 0.2 s after")
def _(patch):
    patch.setattr(Peer, "timeout_s", lambda self, least_s: 0.15)


@mutation("a host that was never heard gets no time to begin", "is silent, 0.9 s after")
def _(patch):
    patch.setattr(link_detector, "FIRST_S", 0.0)


@mutation("the length of an outage is learned", "does not say after", range(170, 400))
def _(patch):
    patch.setattr(link_detector, "listen", lambda peer, *look: LISTEN(replace(peer, lost=False), *look))


@mutation("no agent says that a host is heard again", "is silent, and hears it")
def _(patch):
    patch.setattr(Listener, "look", lambda self, now: [change for change in LOOK(self, now) if not change.heard])


def late_and_lost(seed):
    """The agent of a host is stopped for a moment, and later that host dies."""
    late = Fault(5.0, "agent stops", (seed % 3,), 2.0 + seed % 20 / 10)
    return Scenario(seed, 3, 1, 1, 12, faults=(late, Fault(15.0, "host dies", (seed % 3,))), spare_hosts=0)


@mutation("a host is doubted after less than the floor", "do not doubt", range(40), late_and_lost)
def _(patch):
    patch.setattr(Peer, "timeout_s", lambda self, least_s: 0.05 if least_s < LEAST_S else TIMEOUT(self, least_s))


@mutation("a link that was late gets no more time", "s late before", range(40), late_and_lost)
def _(patch):
    patch.setattr(link_detector, "_FACTOR", 1.0)


@mutation("a minority of the hosts agrees", "of the others only the hosts", range(400), draw_fail_over)
def _(patch):
    patch.setattr(link_detector, "are_agreed", lambda about, doubts, hosts: AGREED(about, doubts, 0))


@mutation("a host is lost although another one hears it", "do not doubt")
def _(patch):
    def are_agreed(about, doubts, hosts):
        return AGREED(about, dict.fromkeys(doubts, (about,)), hosts)

    patch.setattr(link_detector, "are_agreed", are_agreed)


def doubted_before(seed):
    """All doubt host 0, hear it again, and then host 1 does not."""
    faults = Fault(5.0, "agent stops", (0,), 8.0), Fault(13.5, "cut", (0, 1), 30.0)
    return Scenario(seed, 3, 1, 1, 12, faults=faults, spare_hosts=0)


@mutation("what a late heartbeat of earlier on doubts is believed", "do not doubt", range(180, 190), doubted_before)
def _(patch):
    def hear(self, host, count, said, now):
        counts = HEAR(self, host, count, said, now)
        if host in self._others:
            self._others[host].said = said
        return counts

    patch.setattr(Listener, "hear", hear)


@mutation("a host that may be silent itself is a witness", "of the others only the hosts", range(2200, 2230))
def _(patch):
    def witnesses(self):
        heard = {host: one.said for host, one in self._others.items() if one.peer.rest_s(self.agreed_s) > 0.0}
        return {host: said.doubts for host, said in heard.items() if said is not None}

    patch.setattr(Listener, "_witnesses", witnesses)


# --- ranks ------------------------------------------------------------------------------------------------------------


@mutation("a stopped rank is not given up", "does not give up", range(20, 400))
def _(patch):
    patch.setattr(rank_health, "classify", lambda health, *rest: CLASSIFY(replace(health, stopped_s=0.0), *rest))


@mutation("a rank that hangs is not given up", "does not give up", range(130, 400))
def _(patch):
    patch.setattr(Health, "is_overdue", lambda self, limits: False)


@mutation("a rank that waits for other groups counts as stuck", "gives up group")
def _(patch):
    patch.setattr(Sample, "waits", False)


def stopped_with_its_agent(seed):
    """A group is stopped for a moment, and its agent just after."""
    faults = Fault(20.0, "freeze", (1,), 8.0), Fault(20.5 + seed % 20 / 10, "agent stops", (1,), 6.0)
    return Scenario(seed, 2, 2, 1, 8, faults=faults, spare_hosts=0)


@mutation(
    "time in which the agent was stopped counts as time in which a rank was",
    "gives up group",
    range(40),
    stopped_with_its_agent,
)
def _(patch):
    patch.setattr(rank_health, "LOOK_S", 1e9)


def stopped_twice(seed):
    """A group is stopped twice for a moment, and its agent as well, which does not see the group run in between."""
    at = 20.0 + seed % 10 / 10
    faults = (
        Fault(at, "freeze", (1,), 2.0),
        Fault(at + 1.2, "agent stops", (1,), 2.0),
        Fault(at + 2.3, "freeze", (1,), 2.3),
    )
    return Scenario(seed, 2, 2, 1, 8, faults=faults, spare_hosts=0)


@mutation("two short stops count as one long one", "gives up group", range(40), stopped_twice)
def _(patch):
    patch.setattr(
        rank_health, "add", lambda health, sample, *rest: ADD(health, replace(sample, heartbeats=0, cpu_s=0.0), *rest)
    )


# --- starts -----------------------------------------------------------------------------------------------------------


@mutation(
    "a group is started again while a host is silent", "and does not hear the hosts of the groups", range(220, 400)
)
def _(patch):
    patch.setattr(RestartManager, "due", lambda self, unheard: DUE_STARTS(self, ()))


def killed_often(seed):
    kills = tuple(Fault(10.0 + 50.0 * number, "kill", (1,)) for number in range(4))
    return Scenario(seed, 2, 1, 1, 60, faults=kills, spare_hosts=0, rejoins=True)


@mutation("the starts of an hour are not counted", "again, 3 times in an hour", range(40), killed_often)
def _(patch):
    patch.setattr(restart_policy, "started", lambda group, now: replace(STARTED(group, now), again=()))


@mutation("the end of an older start is taken for that of the newest", "is made while the group lives", range(90, 400))
def _(patch):
    def take(self, signal):
        if isinstance(signal, signals.RankExited) and signal.exit.group in self._groups:
            signal = replace(signal, incarnation=self._groups[signal.exit.group].incarnation)
        TAKE(self, signal)

    patch.setattr(RestartManager, "_take", take)


# --- the store --------------------------------------------------------------------------------------------------------


def fenced_unread(seed):
    """The group of host 1 is fenced while its agent, which is slow to read that, takes the store over."""
    lost = Fault(12.0 + seed % 40, "host dies", (0,))
    faults = Fault(5.0, "disk slow", (1,), 100.0), lost, Fault(20.0, "freeze", (1,), 100.0)
    faults = tuple(sorted(faults, key=lambda fault: fault.at))
    return Scenario(seed, 3, 2, 1, 12, faults=faults, spare_hosts=0)


@mutation("the store is taken over with an old claim: the log was not read", "fenced", range(200), fenced_unread)
def _(patch):
    async def take_over(self, last):
        newest = self._here.world.disk.log[-1]
        await self._here.create(store_failover.taken_over(newest, self._me, self._here.serve(), ""))

    patch.setattr(Succession, "take_over", take_over)


def left_out(seed):
    """The group of host 1 is stopped, and fenced; then the store's host is lost."""
    faults = Fault(20.0, "freeze", (1,), 100.0), Fault(40.0, "host dies", (0,))
    return Scenario(seed, 3, 2, 1, 12, faults=faults, spare_hosts=0)


@mutation("the agent of groups that are all left out takes the store over", "fenced", range(40), left_out)
def _(patch):
    patch.setattr(store_failover, "due_s", lambda outlook: DUE(replace(outlook, seats=frozenset())))
    patch.setattr(store_failover, "may_claim", lambda own, claims: True)


HEAR = Listener.hear
LOOK = Listener.look
LISTEN = link_detector.listen
AGREED = link_detector.are_agreed
TIMEOUT = Peer.timeout_s
CLASSIFY = rank_health.classify
ADD = rank_health.add
DUE_STARTS = RestartManager.due
STARTED = restart_policy.started
TAKE = RestartManager._take
DUE = store_failover.due_s
