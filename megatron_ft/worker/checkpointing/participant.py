"""One rank's part in saving: copy its share of the state between two steps, write it beside the next ones, say how it went.

Training waits for the copy only. How it went (a receipt, or why there is none) is said on the control store under
``saved/<part>/<position>``, one key for all attempts, so the store does not grow with them.

Failures it assumes: whatever a disk can do, and a store that is away. Each costs this attempt to save, and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.core import detector
from megatron_ft.core.saving import Saves
from megatron_ft.engines.base import Engine
from megatron_ft.errors import CheckpointError, FTError
from megatron_ft.runtime import checkpoint
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.checkpoint.memory import GB, Shelf
from megatron_ft.runtime.checkpoint.write import place_of
from megatron_ft.runtime.environment import RankEnvironment

_POLL_S = 0.02
_PATIENCE_S = 600.0
"""A file system that hangs does not keep a job from ending."""


def saved_key(part: int, position: int) -> str:
    """Where the rank at ``position`` of the group that writes ``part`` says how it went."""
    return f"saved/{part}/{position}"


class Saving:
    """``cost_s`` is what the last save has cost the training thread; ``take`` and ``decline`` are called there. ``lost``:
    why nothing is to be waited for here any more, if so."""

    def __init__(self, env: RankEnvironment, agreement: Agreement, lost: Callable[[], str]) -> None:
        self._lost = lost
        self._group, self._position = env.group, env.position
        self._directory = Path(env.config.fault_tolerance.checkpoint.directory)
        self._agreement = agreement.clone()
        self._speaking = threading.Lock()
        self._saver = checkpoint.Saver()
        self._shelf = Shelf(self._directory, env.config.fault_tolerance.checkpoint.memory_gb * GB)
        self.cost_s = 0.0

    def take(self, order: Saves, engine: Engine) -> None:
        """Copy this rank's share and begin to write it."""
        started = time.monotonic()
        refused = self._copy_and_start(order, engine)
        if refused:
            self.decline(order, refused)
        self.cost_s = time.monotonic() - started

    def _copy_and_start(self, order: Saves, engine: Engine) -> str | None:
        if order.last:
            self._wait_for_former()
        self._saver.poll()
        if self._saver.busy:  # before the copy: memory for two may not be there
            return self._saver.start(f"step {order.at}", lambda: None)
        try:
            copy = checkpoint.snapshot(engine.state(), order.part_of(self._group), len(order.writers))
        except (FTError, MemoryError, RuntimeError) as error:  # torch raises the last one when memory runs out
            return f"its state cannot be copied: {error}"
        return self._saver.start(f"step {order.at}", lambda: self._write(order, copy))

    def _wait_for_former(self) -> None:
        """Another chance does not come: it waits for one that was to be the last, say, and came to nothing."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._saver.busy and not self._lost() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _write(self, order: Saves, copy: checkpoint.Snapshot) -> None:
        said: dict[str, Any] = {"error": "its writer ended for an unknown reason"}
        try:
            said = checkpoint.write_part(self._directory, order.at, order.attempt, self._position, copy)
            # Before the word: after the last save of a run nothing is waited for.
            place = place_of(self._directory, order.at, order.attempt)
            for name, entry in said["files"].items():
                self._shelf.take(place / name, entry["sha256"], entry["bytes"])
        except CheckpointError as error:
            said = {"error": str(error)}
        finally:
            self._say(order, said)

    def decline(self, order: Saves, why: str, late: bool = False) -> None:
        """This rank does not save what it was asked to."""
        said = {"error": why, "late": late}
        threading.Thread(target=self._say, args=(order, said), name="checkpoint-word", daemon=True).start()

    def tell(self, signal: detector.Signal) -> None:
        """All groups, from any thread."""
        threading.Thread(target=self._tell, args=(signal,), name="checkpoint-word", daemon=True).start()

    def _tell(self, signal: detector.Signal) -> None:
        with self._speaking, contextlib.suppress(FTError):  # who waits for it does not do so forever
            self._agreement.announce(signal)

    def _say(self, order: Saves, said: dict[str, Any]) -> None:
        if "error" in said:
            print(f"megatron_ft: group {self._group}: step {order.at} is not saved: {said['error']}", flush=True)
        key = saved_key(order.part_of(self._group), self._position)
        try:
            with self._speaking:
                self._agreement.say(key, {**said, "step": order.at, "attempt": order.attempt})
        except FTError as error:
            print(f"megatron_ft: group {self._group}: step {order.at} is saved in vain: {error}", flush=True)
