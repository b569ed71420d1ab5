"""Save the last complete state of a run, which a group on its way back holds when all members are lost
(``core.lifecycle.last_state`` decides).

The group writes the state as a checkpoint of its own attempt, all positions by itself, and ends; the job goes on from the
newest complete checkpoint. Other groups on their way back do the same, and nothing is agreed on with them.

Failures it assumes: any rank of the group is lost at any moment, or cannot write its part; another job has the directory.
Nothing is published then, and the job goes on from an older checkpoint.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.core.lifecycle import last_state
from megatron_ft.core.lifecycle.checkpoint_protocol import CheckpointSchedule
from megatron_ft.core.lifecycle.last_state import Part
from megatron_ft.errors import CheckpointError, StoreError
from megatron_ft.run import checkpoint, orders
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.group_executor import GroupExecutor
from megatron_ft.run.rejoin.joiner import DONE
from megatron_ft.run.rejoin.state_receiver import Held
from megatron_ft.types import given
from megatron_ft.utils import directory_lock

_log = logging.getLogger(__name__)


class LastSave:
    """The leader's part. ``steps``: the number of steps of the run."""

    def __init__(self, executor: GroupExecutor, env: RankEnvironment, steps: int) -> None:
        self._executor, self._env, self._steps = executor, env, steps
        self._rank, self._began = executor.rank, time.monotonic()
        self._agreement = executor.rank.agreement
        self._directory = Path(env.config.fault_tolerance.checkpoint.directory)

    def save(self) -> str:
        """Save the state that the group holds, if it holds one. Returns what became of it, to be added to the reason for
        which the group ends. Raises ``Lost`` when a rank of the group is gone."""
        held = self._newest()
        if held is None or not self._env.config.fault_tolerance.checkpoint.directory:
            return ""
        history = self._rank.history
        try:
            made = self._publish(held)
        except CheckpointError as error:
            history.note("checkpoint_failed", step=held.step, reason=str(error))
            return f"; the state of step {held.step}, which it holds, is not saved: {error}"
        return f"; the state that step {held.step} starts from is saved in {made}"

    def _newest(self) -> Held | None:
        """Make the last steps that the donors have sent, and return what the group holds then."""
        following = self._executor.local.following
        if following.held is not None and following.stands == following.held.step:
            self._executor.carry_out(orders.AwaitRest())
            while given(following.receiver).ready() and self._executor.carry_out(orders.MakeStep()) == DONE:
                continue
        return following.held

    def _publish(self, held: Held) -> Path:
        env, started = self._env, time.monotonic()
        ranks = env.config.ranks_per_group
        attempt = f"{self._agreement.run_id}.f{env.group}.{env.incarnation}"
        try:
            receipts = self._executor.carry_out(orders.SaveAlone(held.step, attempt))
            parts = [Part(at, said.get("step"), said.get("error", "")) for at, said in enumerate(receipts)]
            if why := last_state.refusal(parts, ranks, held.step):
                raise CheckpointError(why)
            meta = self._meta(held)
            history = self._rank.history
            # No checkpoint may have a step that the record lacks, and no other group writes it.
            history.set_writer(True)
            lock = directory_lock.lock(self._directory, self._agreement.run_id)
            try:
                made = checkpoint.complete(
                    self._directory,
                    held.step,
                    attempt,
                    receipts,
                    run_id=self._agreement.run_id,
                    groups=1,
                    ranks_per_group=ranks,
                    meta=meta,
                )
            finally:
                lock.release()
        except CheckpointError:
            checkpoint.discard(self._directory, held.step, attempt, _log.info)
            raise
        took_s, size = time.monotonic() - started, sum(f["bytes"] for said in receipts for f in said["files"].values())
        what = {"step": held.step, "path": str(made), "bytes": size, "parts": 1, "writers": [env.group]}
        history.note("checkpoint", seconds=round(took_s, 6), blocked_s=round(took_s, 6), **what)
        return made

    def _meta(self, held: Held) -> dict[str, object]:
        """Return the metadata as the leader of the donors would have written it."""
        if held.result is None:
            raise CheckpointError(f"its donors did not know the result of step {held.step - 1}")
        job = CheckpointSchedule().to_json(time.monotonic() - self._began, planned=False)
        identity = self._executor.local.identities.agreed
        with suppress(StoreError):
            identity = self._executor.local.identities.of_run()
        return restore.meta(self._env.config, self._steps, held.result, held.carried["speeds"], job, identity)
