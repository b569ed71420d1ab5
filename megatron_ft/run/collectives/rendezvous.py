"""Build a communicator together with all its members, without blocking on a member that is gone.

To connect, a back end waits for peers that may have died since the members agreed to build. So the members of a view
first meet on the control store, where each says what it can use (``communicator_choice``), and the build runs in a thread
that is abandoned when news make it pointless. Meanwhile the training thread computes the microbatches that the group has
taken over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from megatron_ft import codec
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.errors import ConfigError, StoreError
from megatron_ft.run.collectives.base import BUILD_TIMEOUT_S, Broken, Communicator, wait_for
from megatron_ft.run.collectives.communicator_choice import GLOO, Choice, Maker, Offer, agree
from megatron_ft.run.collectives.gloo_communicator import broken
from megatron_ft.run.store.client import CoordinationClient, digest
from megatron_ft.types import View, given
from megatron_ft.utils.vital_thread import VitalThread

_FLAT = Choice(GLOO, ())


class Connector:
    """One rank's side of building communicators. It keeps an unfinished build, so that the next call continues it."""

    def __init__(self, env: RankEnvironment, agreement: CoordinationClient) -> None:
        self._env, self._agreement = env, agreement
        self._elsewhere = agreement.clone()
        self._build: Build | None = None
        self._lock = threading.Lock()
        self._device = torch.device("cpu")
        self._offer = Offer((GLOO,))

    def use(self, device: torch.device, offer: Offer) -> None:
        """Build communicators for tensors on ``device`` from now on, of a kind that all members offer."""
        self._device, self._offer = device, offer

    def begin(self, view: View, agreement: CoordinationClient | None = None) -> None:
        """Build the communicator of ``view`` at this position in the background. ``agreement``: that of the calling
        thread, if it is not the training thread."""
        with self._lock:
            if self._build is not None and self._build.epoch == view.epoch:
                return
            if self._build is not None:
                self._build.give_up()
            env, store = self._env, self._elsewhere
            (agreement or self._agreement).put(self._ready(view, env.group), codec.encode(self._offer))
            timeout_s = env.config.fault_tolerance.detector.longest_collective_s
            # Groups that follow different views of one epoch, out of a tampered store, must never reduce together.
            name = f"outer/{view.epoch}/{env.position}/{digest(view)}"
            rounded = env.config.fault_tolerance.reduce_dtype == "bf16"
            maker = Maker(env.group, view.live, view.epoch, timeout_s, env.address, self._device, rounded)
            offers: dict[int, Offer] = {}

            def choice() -> Choice | None:
                for group in view.live:
                    if group not in offers:
                        if (offer := store.get(self._ready(view, group))) is None:
                            return None
                        offers[group] = codec.decode(Offer, offer)
                return agree(offers)

            self._build = Build(store, name, maker, choice)

    def connect(self, interrupted: Callable[[], bool]) -> Communicator | None:
        """Return the communicator that was begun, or None if ``interrupted`` became true first. The caller may ask again.

        Raises ``Broken`` when it cannot be built.
        """
        build = given(self._build)
        # no limit: its members have detector.collective_timeout_s to come, then it has BUILD_TIMEOUT_S; news
        # interrupt it
        if not wait_for(build.over, interrupted):
            return None
        self._build = None
        # no limit: it does not block: the build is over
        return build.result()

    def _ready(self, view: View, group: int) -> str:
        return f"ready/{view.epoch}/{group}.{self._env.position}"


class Build:
    """One construction in a thread of its own, under a unique ``name``. It begins when ``choice`` returns what the members
    take, and is given up if that takes longer than the maker's timeout: a member that lives may never come."""

    def __init__(
        self,
        agreement: CoordinationClient,
        name: str,
        maker: Maker,
        choice: Callable[[], Choice | None] = lambda: _FLAT,
    ) -> None:
        self.epoch = maker.epoch
        self._agreement, self._name, self._maker, self._choice = agreement, name, maker, choice
        self._build_by = float("inf")
        self._why = f"within {BUILD_TIMEOUT_S:g} s"
        self._given_up = False
        self._lock = threading.Lock()
        self._made: Communicator | None = None
        self._connected = False
        self._error: Exception | None = None
        self._thread = VitalThread(self._run, "megatron_ft-connect")
        self._thread.start()

    def _run(self) -> None:
        ready_by = time.monotonic() + self._maker.timeout_s
        try:
            if not wait_for(lambda: self._choice() is not None, lambda: self._given_up or time.monotonic() > ready_by):
                self._why = "because not all of its members came in time"
                return
            self._build_by = time.monotonic() + BUILD_TIMEOUT_S
            made = self._maker.make(given(self._choice()), self._name, self._agreement.rendezvous)
            with self._lock:
                self._made = made
            if self._given_up:
                self.give_up()
            # no limit: its thread is left behind after BUILD_TIMEOUT_S, and an abort ends it
            made.connect()
            self._connected = True
        except (RuntimeError, OSError, StoreError, ConfigError) as error:
            self._error = error.with_traceback(None)

    def give_up(self) -> None:
        """Give up the communicator: its resources are freed now, or when the build ends."""
        self._given_up = True
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()

    def over(self) -> bool:
        return not self._thread.is_alive() or time.monotonic() > self._build_by

    def result(self) -> Communicator:
        """Return the communicator. Raises ``Broken`` without one, ``StoreError`` after the patience with the store,
        ``ConfigError`` if the members cannot agree on its kind."""
        made = self._made
        if made is not None and self._connected:
            return made
        self.give_up()
        if isinstance(self._error, StoreError | ConfigError):
            raise self._error
        failed = f"communicator {self._name} could not be built"
        if self._error is None:
            raise Broken(f"{failed} {self._why}")
        raise Broken(failed, broken(self._error).detail)
