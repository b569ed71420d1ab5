"""Build a communicator together with everybody in it, without ever getting stuck in it.

gloo's constructor waits for peers that may have died since it was agreed to build one. So the members of a view first meet
on the control store, and all of it runs in a thread that is abandoned when news make it pointless. Meanwhile the training
thread computes what the group has taken over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from megatron_ft.errors import StoreError
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.communicator import Broken, Communicator
from megatron_ft.runtime.environment import RankEnvironment
from megatron_ft.types import View

_POLL_S = (0.001, 0.01)
_CONNECT_TIMEOUT_S = 30.0


class Connector:
    """One rank's side of building communicators; keeps an unfinished build, so that asking again goes on with it."""

    def __init__(self, env: RankEnvironment, agreement: Agreement) -> None:
        self._env, self._agreement = env, agreement
        self._elsewhere = agreement.clone()
        self._build: Build | None = None
        self._lock = threading.Lock()

    def begin(self, view: View, agreement: Agreement | None = None) -> None:
        """Build the communicator of ``view`` at this position in the background. ``agreement``: of the calling thread, if it
        is not the training thread."""
        with self._lock:
            self._begin(view, agreement or self._agreement)

    def _begin(self, view: View, agreement: Agreement) -> None:
        if self._build is not None and self._build.epoch == view.epoch:
            return
        if self._build is not None:
            self._build.give_up()
        env, store = self._env, self._elsewhere
        agreement.say(self._ready(view, env.group), True)
        timeout_s = env.config.fault_tolerance.detector.collective_timeout_s
        name = f"outer/{view.epoch}/{env.position}"
        ready = lambda: all(store.get(self._ready(view, group)) is not None for group in view.live)  # noqa: E731
        self._build = Build(env, store, name, env.group, view.live, view.epoch, timeout_s, ready)

    def connect(self, view: View, interrupted: Callable[[], bool]) -> Communicator | None:
        """The communicator of ``view``, which was begun, or None when ``interrupted`` became true first (ask again if it
        still matters).

        Raises ``Broken`` when it cannot be built.
        """
        build = self._build
        if not wait_for(build.over, interrupted):
            return None
        self._build = None
        return build.result()

    def _ready(self, view: View, group: int) -> str:
        return f"ready/{view.epoch}/{group}.{self._env.position}"


def wait_for(condition: Callable[[], bool], interrupted: Callable[[], bool]) -> bool:
    """Poll until ``condition`` (True) or ``interrupted`` (False)."""
    shortest, longest = _POLL_S
    pause = shortest
    while not condition():
        if interrupted():
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


class Build:
    """One construction in a thread of its own; ``name`` is used by no other one. It begins when ``ready`` is true."""

    def __init__(
        self,
        env: RankEnvironment,
        agreement: Agreement,
        name: str,
        me: int,
        members: Sequence[int],
        epoch: int,
        timeout_s: float,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.epoch = epoch
        self._name, self._ready, self._agreement = name, ready, agreement
        self._deadline = float("inf")
        self._given_up = False
        self._made: Communicator | None = None
        self._error: Exception | None = None
        arguments = (me, members, epoch, timeout_s, env.address)
        self._thread = threading.Thread(target=self._run, args=arguments, name="megatron_ft-connect", daemon=True)
        self._thread.start()

    def _run(self, *arguments: object) -> None:
        try:
            if wait_for(self._ready, lambda: self._given_up):
                self._deadline = time.monotonic() + _CONNECT_TIMEOUT_S
                self._made = Communicator(self._agreement.rendezvous(self._name), *arguments)
        except (RuntimeError, StoreError) as error:
            self._error = error.with_traceback(None)

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._given_up = True

    def over(self) -> bool:
        return not self._thread.is_alive() or time.monotonic() > self._deadline

    def result(self) -> Communicator:
        """Raises ``Broken`` when there is none, ``StoreError`` when the control store did not answer for too long."""
        if self._made is not None:
            return self._made
        if isinstance(self._error, StoreError):
            raise self._error
        raise Broken(f"communicator {self._name} could not be built: {self._why()}")

    def _why(self) -> str:
        if self._error is None:
            return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
        return str(self._error).splitlines()[0]
