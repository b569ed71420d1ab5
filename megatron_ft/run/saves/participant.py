"""One rank's part in saving: copy its share of the state between two steps, write it during the next ones, report.

Training waits for the copy only. The outcome (a receipt, or the reason for none) is published on the control store
under ``saved/<number>/<position>``, one key for all attempts, so the store does not grow with them. The number is that
of the part; numbers after the last part belong to witnesses, groups that write nothing and only send the checksum of
their state.

Failures it assumes: any failure of a disk, and a store that is away. Each costs this attempt to save, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.core.protocol import signals
from megatron_ft.errors import CheckpointError, FTError
from megatron_ft.run import checkpoint, registered_state
from megatron_ft.run.checkpoint.memory_copies import GB, ReplicaCache
from megatron_ft.run.checkpoint.writer import place_of
from megatron_ft.run.engines.port import Engine
from megatron_ft.run.rank import Rank
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.state_checksum import StateCheck

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_PATIENCE_S = 600.0
"""Seconds: a file system that hangs does not keep a job from ending."""


def saved_key(voice: int, position: int) -> str:
    """Return the key under which the rank at ``position`` of an order's ``voices[voice]`` publishes the outcome."""
    return f"saved/{voice}/{position}"


class CheckpointParticipant:
    """``cost_s`` is the time that the last save took of the training thread, which calls ``take`` and ``decline``."""

    def __init__(self, rank: Rank, registered: Registered) -> None:
        settings = rank.env.config.fault_tolerance.checkpoint
        self._rank, self._registered = rank, registered
        self._group, self._position = rank.group, rank.position
        self._directory = Path(settings.directory)
        self._agreement = rank.agreement.clone()
        self._speaking = threading.Lock()
        self._saver = checkpoint.Saver()
        self._replicas = ReplicaCache(self._directory, settings.memory_gb * GB)
        self.cost_s = 0.0

    def take(self, order: Saves, engine: Engine, states: StateCheck) -> None:
        """Copy this rank's share and begin to write it; the receipt has the checksum of its whole state. A witness
        sends that checksum and writes nothing."""
        part = order.part_of(self._group)
        if part is None:
            self._beside(self._say, order, {"state": states.whole(order.at)})
            return
        started = time.monotonic()
        refused = self._copy_and_start(order, part, engine, states)
        if refused:
            self.decline(order, refused)
        self.cost_s = time.monotonic() - started

    def write_alone(self, step: int, attempt: str, engine: Engine) -> dict[str, Any]:
        """Write all of this rank's state, which ``step`` starts from; no other group writes a part of it. Returns the
        receipt once it is durable, or why there is none (``error``)."""
        try:
            return self._write_part(step, attempt, self._copy(engine, 0, 1))
        except CheckpointError as error:
            return {"error": str(error)}

    def _copy(self, engine: Engine, part: int, parts: int) -> checkpoint.Snapshot:
        try:
            state = dict(engine.state())
            if self._registered:
                state[registered_state.KEY] = self._registered.state()
            return checkpoint.snapshot(state, part, parts)
        except (FTError, MemoryError, RuntimeError) as error:  # torch raises the last one when memory runs out
            raise CheckpointError(f"its state cannot be copied: {error}") from None

    def _copy_and_start(self, order: Saves, part: int, engine: Engine, states: StateCheck) -> str | None:
        """Return the reason why it cannot, if there is one."""
        deadline = time.monotonic() + _PATIENCE_S
        # This one is the last chance, e.g. after a planned last save that failed: it waits for the one before.
        while order.last and self._saver.busy and not self._rank.lost_because and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._saver.poll()
        if self._saver.busy:  # before the copy: memory for two may not be there
            return self._saver.start(f"step {order.at}", lambda: None)
        try:
            copy = self._copy(engine, part, len(order.writers))
        except CheckpointError as error:
            return str(error)
        whole = states.whole(order.at) if len(order.voices) > 1 else 0
        return self._saver.start(f"step {order.at}", lambda: self._write(order, copy, whole))

    def _write(self, order: Saves, copy: checkpoint.Snapshot, whole: int) -> None:
        said: dict[str, Any] = {"error": "its writer ended for an unknown reason"}
        try:
            said = {**self._write_part(order.at, order.attempt, copy), "state": whole}
        except CheckpointError as error:
            said = {"error": str(error)}
        finally:
            self._say(order, said)

    def _write_part(self, step: int, attempt: str, copy: checkpoint.Snapshot) -> dict[str, Any]:
        said = checkpoint.write_part(self._directory, step, attempt, self._position, copy)
        # Before the receipt: after the last save of a run no rank waits for anything.
        place = place_of(self._directory, step, attempt)
        for name, entry in said["files"].items():
            self._replicas.take(place / name, entry["sha256"], entry["bytes"])
        return said

    def decline(self, order: Saves, why: str, late: bool = False) -> None:
        """Report that this rank does not save as ordered."""
        self._beside(self._say, order, {"error": why, "late": late})

    def tell(self, signal: signals.Signal) -> None:
        """Tell all groups. Callable from any thread."""
        self._beside(self._tell, signal)

    def _beside(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="checkpoint-word", daemon=True).start()

    def _tell(self, signal: signals.Signal) -> None:
        with self._speaking, contextlib.suppress(FTError):  # the waiting group has a time limit
            self._agreement.announce(signal)

    def _say(self, order: Saves, said: dict[str, Any]) -> None:
        if "error" in said and order.part_of(self._group) is not None:
            _log.info(f"group {self._group}: step {order.at} is not saved: {said['error']}")
        key = saved_key(order.voices.index(self._group), self._position)
        try:
            with self._speaking:
                self._agreement.put(key, {**said, "step": order.at, "attempt": order.attempt})
        except FTError as error:
            _log.info(f"group {self._group}: step {order.at} is saved in vain: {error}")
