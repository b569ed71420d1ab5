"""What makes a checkpoint of an order to save, in a thread beside training: it waits for the receipts of all writers, makes
the manifest of them, which is last, and deletes checkpoints that are too old.

Failures it assumes: any writer is lost, late or slow; the store is away; the disk is full; the directory is another run's by
now. The attempt then fails with ``CheckpointError``, and its files are deleted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves
from megatron_ft.errors import CheckpointError
from megatron_ft.run import checkpoint
from megatron_ft.run.saves.participant import saved_key
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import View, given
from megatron_ft.utils import directory_lock

_log = logging.getLogger(__name__)

LOOK_S = (0.01, 0.5)
"""Seconds until receipts are looked for again: at first, and at most."""
_PATIENCE_S = 1800.0
"""Seconds after which a save is given up, if half of ``detector.collective_timeout_s`` (the time that other groups wait
for this one at the end) is not less. A file system that hangs must not keep those that work from being used."""


class Attempt:
    """An attempt that this rank conducts. The training thread writes ``meta`` and ``dropped``, the other thread reads
    them. ``states``: if they differ, the checksums of the states of each writer and witness."""

    def __init__(self, order: Saves, view: View, former: Saves | None) -> None:
        self.order, self.view, self.former = order, view, former
        self.states: dict[int, tuple[int, ...]] = {}
        self.meta: dict[str, Any] | None = None
        self.dropped = ""
        self.late = self.stuck = False
        self.blamed: set[int] = set()


class Conductor:
    """Conducts one attempt at a time. ``saver``: its thread; ``patience_s``: seconds after which a save is given up. The
    training thread calls its methods."""

    def __init__(self, agreement: CoordinationClient, config: RunConfig) -> None:
        self._agreement, self._config = agreement.clone(), config
        self._directory = Path(config.fault_tolerance.checkpoint.directory)
        self.patience_s = min(_PATIENCE_S, config.fault_tolerance.detector.longest_collective_s / 2)
        self.saver = checkpoint.Saver()
        self._lock: directory_lock.Lock | None = None

    def start(self, attempt: Attempt) -> str | None:
        """Begin an attempt. Return why it cannot begin; None if it has."""
        return self.saver.start(f"step {attempt.order.at}", partial(self._conduct, attempt))

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint; -1 if none is found."""
        with contextlib.suppress(CheckpointError, OSError):
            return max((found.step for found in checkpoint.find(self._directory) if found.complete), default=-1)
        return -1

    def close(self) -> None:
        """Release the directory for the next job: the run has ended."""
        if self._lock is not None:
            self._lock.release()

    # --- in its thread ------------------------------------------------------------------------------------------------

    def _conduct(self, attempt: Attempt) -> dict[str, Any]:
        """Conduct an attempt from the order to the checkpoint. Raises ``CheckpointError``."""
        order = attempt.order
        self._agreement.announce(order)
        self._discard_former(attempt.former)
        try:
            receipts = self._await(attempt)
            self._refuse_different_states(attempt, receipts)
            written = [receipt for (voice, _), receipt in receipts.items() if voice < len(order.writers)]
            self._hold()
            made = checkpoint.complete(
                self._directory,
                order.at,
                order.attempt,
                written,
                run_id=self._agreement.run_id,
                groups=len(attempt.view.live),
                ranks_per_group=self._config.ranks_per_group,
                meta=attempt.meta,
            )
        except CheckpointError:
            checkpoint.discard(self._directory, order.at, order.attempt)
            raise
        try:
            checkpoint.prune(self._directory, self._config.fault_tolerance.checkpoint.keep)
        except CheckpointError as error:  # the checkpoint itself is complete
            _log.info(str(error))
        return {"path": str(made), "bytes": sum(f["bytes"] for receipt in written for f in receipt["files"].values())}

    def _discard_former(self, former: Saves | None) -> None:
        """Delete the files of a lost leader's attempt, which may have been completed all the same."""
        if former is None:
            return
        for found in checkpoint.find(self._directory):
            if found.unfinished and found.path.endswith(former.attempt):
                checkpoint.discard(self._directory, former.at, former.attempt)

    def _await(self, attempt: Attempt) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the receipts of all writers and witnesses; the loss of a group with a receipt does not matter."""
        order, receipts = attempt.order, {}
        missing = [(voice, p) for voice in range(len(order.voices)) for p in range(self._config.ranks_per_group)]
        deadline, (pause, longest) = time.monotonic() + self.patience_s, LOOK_S
        while True:
            dropped = attempt.dropped  # before the look: receipts from before the drop are seen
            for place in missing:
                said = self._agreement.get(saved_key(*place))
                if said is not None and (said["step"], said["attempt"]) == (order.at, order.attempt):
                    self._refuse_errors(attempt, place, said)
                    receipts[place] = said
            missing = [place for place in missing if place not in receipts]
            if not missing and attempt.meta is not None:
                return receipts
            if dropped:
                raise CheckpointError(dropped)
            if time.monotonic() > deadline:
                attempt.blamed, attempt.stuck = {order.voices[voice] for voice, _ in missing}, True
                names = ", ".join(f"position {p} of group {order.voices[voice]}" for voice, p in missing)
                raise CheckpointError(
                    f"not written within {self.patience_s:g} s by {names}; does that file system hang?"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _refuse_errors(self, attempt: Attempt, place: tuple[int, int], said: dict[str, Any]) -> None:
        if "error" in said:
            group = attempt.order.voices[place[0]]
            attempt.late, attempt.blamed = said.get("late", False), {group}
            who = f"group {group}"
            named = said["error"].startswith(f"{who} ")
            raise CheckpointError(said["error"] if named else f"{who}: {said['error']}")

    def _refuse_different_states(self, attempt: Attempt, receipts: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
        """Refuse states that are not equal in all groups that were asked."""
        found = {
            group: tuple(receipts[voice, position]["state"] for position in range(self._config.ranks_per_group))
            for voice, group in enumerate(attempt.order.voices)
        }
        if len(set(found.values())) > 1:
            attempt.states = found
            names = " ".join(map(str, sorted(found)))
            raise CheckpointError(f"the states of groups {names} differ, so no checkpoint is made of them")

    def _hold(self) -> None:
        """Check with its lock that the directory is still this run's: another job may have been given it meanwhile."""
        try:
            if self._lock is not None:
                self._lock.check()
                return
        except CheckpointError:
            given(self._lock).release()  # another leader of this run held it, or another run: the new lock decides
            self._lock = None
        self._lock = directory_lock.lock(self._directory, self._agreement.run_id)
