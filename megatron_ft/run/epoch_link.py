"""One rank's connection to the ranks of equal position in the other groups, from view to view.

The watcher's thread brings verdicts (:meth:`EpochLink.on_signal`): one that ends the epoch aborts the communicator, and a
training thread that waits in a collective returns within milliseconds. All other methods belong to the training thread,
except :meth:`EpochLink.abort`.

Failures it assumes: a verdict may arrive before its view, or in the step before the one that it is about; it is kept
until that view's communicator stands. Any number of builds may fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import EpochAborted
from megatron_ft.run.collectives.base import Communicator
from megatron_ft.run.collectives.rendezvous import Connector
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import View, given

_log = logging.getLogger(__name__)


class EpochLink:
    """``view`` is the view of the last communicator that was built, ``outer`` that communicator, or None while there is
    none. ``connector`` builds it."""

    def __init__(self, env: RankEnvironment, agreement: CoordinationClient) -> None:
        self.view: View | None = None
        self.outer: Communicator | None = None
        self._group, self._agreement = env.group, agreement
        self.connector = Connector(env, agreement)
        self._step = -1
        self._heard: tuple[signals.Verdict, ...] = ()
        self._told = -1
        self._lock = threading.Lock()

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Unblock the training thread if it waits for a group that is gone. Any thread may call it."""
        with self._lock:
            self._heard = signals.remember(self._heard, verdict)
            if self.outer is not None:
                self._unblock(self.outer, [verdict])

    def abort(self) -> None:
        """Make the training thread return from operations with other groups. Any thread may call it."""
        with self._lock:
            if self.outer is not None:
                self.outer.abort()

    def begin_step(self, step: int) -> None:
        """Note the present step: a verdict that ends the epoch in this step may have come in the one before."""
        self._step = step
        with self._lock:
            if self.outer is not None:
                self._unblock(self.outer, self._heard)

    def _unblock(self, outer: Communicator, verdicts: Iterable[signals.Verdict]) -> None:
        """End the waits in ``outer``, if one of these verdicts ends its epoch."""
        for verdict in verdicts:
            if signals.ends(verdict, given(self.view), self._step):
                outer.leave() if signals.in_order(verdict) else outer.abort()

    def concerned(self, view: View, step: int | None = None) -> bool:
        """Return True if a verdict so far ends the epoch of ``view`` in ``step``, by default the present step."""
        with self._lock:
            return any(signals.ends(verdict, view, self._step if step is None else step) for verdict in self._heard)

    def tell_broken(self, epoch: int, reason: str, after: int = -1, detail: str = "") -> EpochAborted:
        """Tell all groups, once, that ``epoch`` is over for groups in a step later than ``after``. Return the message.

        ``detail``, the text of a library, goes to this rank's log only.
        """
        said = EpochAborted(epoch, reason, after, self._group)
        if epoch > self._told:
            self._told = epoch
            self._agreement.announce(said)
            if detail:
                _log.info(f"epoch {epoch} is over: {reason}: {detail}")
        return said

    def enter(self, view: View, interrupted: Callable[[], bool]) -> bool:
        """Take the communicator of ``view``, once it is built; False when ``interrupted`` became true first. Raises
        ``Broken``."""
        outer = self.connector.connect(interrupted)
        if outer is None:
            return False
        with self._lock:
            self.outer, self.view = outer, view
            self._heard = tuple(verdict for verdict in self._heard if not _is_over(verdict, view))
            self._unblock(outer, self._heard)
        return True

    def close(self) -> bool:
        """Close the communicator; False if there is none."""
        with self._lock:
            outer, self.outer = self.outer, None
        if outer is not None:
            outer.close()
        return outer is not None


def _is_over(verdict: signals.Verdict, view: View) -> bool:
    """Return True if the verdict concerns neither this view nor a later one."""
    return isinstance(verdict, EpochAborted) and verdict.epoch < view.epoch
