"""Build the outer communicator of a view together with everybody in it, without ever getting stuck in it.

gloo's constructor waits for peers that may have died since the view was agreed on. So all members first meet on the
control store, and the construction runs in a thread that is abandoned when a verdict makes it pointless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.runtime.outer import Broken, OuterCommunicator
from megatron_ft.runtime.store import ControlStore
from megatron_ft.types import View

_POLL_S = (0.001, 0.01)
_CONNECT_TIMEOUT_S = 30.0


class Connector:
    """One rank's side of building communicators; keeps an unfinished build, so that asking again goes on with it."""

    def __init__(self, env: RankEnvironment, store: ControlStore, agreement: Agreement) -> None:
        self._env, self._store, self._agreement = env, store, agreement
        self._build: _Build | None = None

    def connect(self, view: View, interrupted: Callable[[], bool]) -> OuterCommunicator | None:
        """The communicator of ``view``, or None when ``interrupted`` became true first (ask again if it still matters).

        Raises ``Broken`` when it cannot be built.
        """
        self._agreement.say(f"ready/{view.epoch}/{self._env.group}", True)
        if not self._wait(lambda: self._all_ready(view), interrupted):
            return None
        if self._build is None or self._build.epoch != view.epoch:
            self._build = _Build(view, self._env, self._store)
        build = self._build
        if not self._wait(build.over, interrupted):
            return None
        self._build = None
        return build.result()

    def _all_ready(self, view: View) -> bool:
        return all(self._agreement.get(f"ready/{view.epoch}/{group}") is not None for group in view.live)

    @staticmethod
    def _wait(condition: Callable[[], bool], interrupted: Callable[[], bool]) -> bool:
        shortest, longest = _POLL_S
        pause = shortest
        while not condition():
            if interrupted():
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True


class _Build:
    """One construction in a thread of its own."""

    def __init__(self, view: View, env: RankEnvironment, store: ControlStore) -> None:
        self.epoch = view.epoch
        self._deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        self._outer: OuterCommunicator | None = None
        self._error: Exception | None = None
        rendezvous = store.rendezvous(f"outer/{view.epoch}/{env.position}")
        timeout_s = env.config.fault_tolerance.detector.collective_timeout_s
        self._thread = threading.Thread(
            target=self._run, args=(rendezvous, env, view, timeout_s), name="megatron_ft-connect", daemon=True
        )
        self._thread.start()

    def _run(self, rendezvous: object, env: RankEnvironment, view: View, timeout_s: float) -> None:
        try:
            self._outer = OuterCommunicator(rendezvous, env.group, view.live, view.epoch, timeout_s, env.address)
        except RuntimeError as error:
            self._error = error.with_traceback(None)

    def over(self) -> bool:
        return not self._thread.is_alive() or time.monotonic() > self._deadline

    def result(self) -> OuterCommunicator:
        if self._outer is not None:
            return self._outer
        raise Broken(f"the outer communicator of epoch {self.epoch} could not be built: {self._why()}")

    def _why(self) -> str:
        if self._error is None:
            return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
        return str(self._error).splitlines()[0]
