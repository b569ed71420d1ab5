"""The control store and the notice log of a real group, for its loop: ports of ``core.protocol.shell``.

The watcher's thread brings verdicts; the training thread, which may be in the middle of an action, takes them later. The
group that collects reports looks for them all the time, and tells the others when the view stands; those look themselves
from time to time, because it may be lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import cast

from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.protocol.messages import AwaitView, Event, Propose
from megatron_ft.core.protocol.ports import Clock, News, Store
from megatron_ft.core.protocol.shell import Shell
from megatron_ft.run.collectives.intra_group import Lost
from megatron_ft.run.rank import Rank
from megatron_ft.types import Report, View

_POLL_S = 0.001
FAR_S = 0.25
"""Seconds between two looks for what others announce."""
_SPARING = 4.0
"""After a look, the next waits for this multiple of its duration: a store of thousands of groups is busy."""


class LeaderStore(Store, Clock):
    """The ports ``Store`` and ``Clock``. ``leaving``: why this group leaves after the present step; ``left``: whether it has
    said so."""

    def __init__(self, rank: Rank) -> None:
        self.shell: Shell  # of the training thread
        self.leaving, self.left = "", False
        self._rank, self._agreement, self._history = rank, rank.agreement, rank.history
        self._verdicts: queue.SimpleQueue[signals.Verdict] = queue.SimpleQueue()
        self._stirred = threading.Event()
        self._memory = rank.agreement.memory
        self._agreed, self._over = 0, False
        self._looked = 0.0
        self._began: float | None = None  # the present look; None: none was due

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def put(self, verdict: signals.Verdict) -> None:
        """Keep a verdict for the training thread. Callable from any thread."""
        self._verdicts.put(verdict)
        self._stirred.set()

    def claims_changed(self) -> None:
        """Make the training thread check now if this group is left out. Callable from any thread."""
        self._stirred.set()

    def pending(self) -> bool:
        """Return whether a verdict has come in that the training thread has not taken."""
        return not self._verdicts.empty()

    async def verdict(self) -> Event | None:
        """Raises ``Fenced`` when a claim leaves this group out, ``Lost`` when a rank of it is lost."""
        self._agreement.check()
        if self._moved():
            return machine.Replaced()
        if self.leaving and not self.left:
            return self._leave()
        while self.pending():
            # no limit: it does not block: there is an entry, and only this thread takes any
            match verdict := self._verdicts.get():
                case signals.ViewAgreed(epoch=epoch):
                    self._agreed = max(epoch, self._agreed)
                    continue
                case signals.RunFinished():
                    self._over = True
                    continue
                case machine.GroupFailed() if self._rank.lost_because:
                    raise Lost(self._rank.lost_because)
            return cast(Event, verdict)  # other objects receive the other verdicts
        return None

    def _moved(self) -> bool:
        """Return whether the store has another memory by now: then no report counts that was read before."""
        before, self._memory = self._memory, self._agreement.memory
        return before != self._memory

    def _leave(self) -> machine.LeaveAnnounced:
        """Announce that the group leaves. It hears that at once: it must not begin to reduce the next step."""
        self.left = True
        said = signals.LeaveAnnounced(self._rank.group, self.shell.state.step, self.leaving, self._rank.env.incarnation)
        self._agreement.announce(said)
        self._history.note("leave", group=self._rank.group, after=said.after, reason=said.why)
        return said

    # --- agreement ----------------------------------------------------------------------------------------------------

    async def look(self, awaited: AwaitView) -> News | None:
        if not self._is_due(awaited.epoch):
            self._began = None
            return None
        self._looked = self._began = time.monotonic()
        standing = self._agreement.view(awaited.epoch + 1)
        if standing is not None:
            return machine.ViewSeen(standing)
        reports = self._agreement.reports(awaited.epoch, awaited.missing) if awaited.missing else ()
        if self._moved():
            return machine.Replaced()
        return machine.ReportsSeen(reports) if reports else machine.Tick()

    def _is_due(self, epoch: int | None = None) -> bool:
        """Return whether it is time to look. The collecting group always looks; it tells the others, but may be lost."""
        told = epoch is not None and (self.shell.state.collects or self._agreed > epoch)
        return told or time.monotonic() - self._looked > FAR_S

    async def log_answers(self) -> bool:
        return self._agreement.log_answers()

    async def publish(self, report: Report) -> None:
        self._agreement.publish(report)
        self._rank.points.reach("recover", self.shell.state.step)

    async def announce(self, said: machine.EpochAborted, detail: str = "") -> None:
        self._rank.link.tell_broken(said.epoch, said.why, said.after, detail)

    async def fence(self, proposal: Propose) -> Sequence[machine.GroupFailed] | None:
        claims = self._agreement.fence(proposal.fence, proposal.view.reason)
        return None if claims is None else [died for claim in claims for died in store_failover.verdicts(claim)]

    async def propose(self, view: View) -> View | None:
        answer = self._agreement.propose(view, self._memory)
        if answer is None:
            return None
        standing, own = answer
        if own:
            self._agreement.announce(signals.ViewAgreed(standing.epoch))
        return standing

    async def is_over(self) -> bool:
        """It is announced, and looked for from time to time."""
        self._began = time.monotonic()
        if not self._over and self._is_due():
            self._looked = self._began
            self._over = self._agreement.get("ended") is not None
        return self._over

    # --- clock --------------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    async def pause(self) -> None:
        longest_s = FAR_S / 2 if self._began is None else _SPARING * (time.monotonic() - self._began)
        self.wait(longest_s)

    def wait(self, longest_s: float) -> None:
        """Wait for the next verdict, at most ``longest_s`` seconds."""
        self._stirred.wait(max(_POLL_S, longest_s))
        self._stirred.clear()
