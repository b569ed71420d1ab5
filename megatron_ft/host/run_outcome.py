"""The exit code of an agent, and the line that explains it: what the ends of its ranks mean for the run."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.core.lifecycle import run_ending
from megatron_ft.errors import NOT_SAVED
from megatron_ft.host.agent_record import AgentRecord
from megatron_ft.host.rank_process import Rank
from megatron_ft.record import run_directory, run_state
from megatron_ft.types import Exit
from megatron_ft.utils.console import say


class RunOutcome:
    """Says and records how a run has ended. ``saves``: the run has checkpoints."""

    def __init__(self, record: AgentRecord, run_dir: Path, saves: bool) -> None:
        self._record, self._run_dir, self._saves = record, run_dir, saves
        self._failed_after: list[tuple[Path, Exit, signal.Signals | None]] = []

    def failed_after(self, rank: Rank, death: Exit, signalled: signal.Signals | None) -> None:
        """Take in a rank that failed after the last step. ``signalled``: the signal that had told this agent to stop."""
        self._failed_after.append((rank.log, death, signalled))

    def of_complete(self, end: Mapping[str, Any], tells: bool) -> int:
        """Conclude a run that has made its last step: what comes after that step may have failed or not been saved.

        Args:
            end: the fields of the run's ``end`` line.
            tells: this agent writes to the run record for those that have nothing to add.
        """
        failure = run_directory.what_failed_after(end, self._failed_after)
        unsaved = run_directory.what_is_not_saved(end)
        if not failure and not unsaved:
            return 0
        if failure or tells:
            self._record.note("not_saved", reason=failure or unsaved, exit_code=NOT_SAVED)
        say(failure or unsaved)
        return NOT_SAVED

    def of_stopped(
        self, recorded: run_state.RunState, signalled: signal.Signals | None, ending: run_ending.Ending, tells: bool
    ) -> int:
        """Conclude a run that has not made its last step.

        Args:
            recorded: the record as it is now.
            signalled: the signal that has told this agent to stop.
            ending: what the losses of all groups mean for the run.
            tells: this agent writes the ``stop`` line.
        """
        code, reason = ending.code, ending.reason
        if signalled is not None:
            code, reason = 128 + signalled, f"stopped by {signalled.name} {run_ending.when(recorded.last_step)}"
        elif (cause := ending.cause) is not None:
            reason += f"; output in {run_directory.log(self._run_dir, cause.group, cause.position)}"
        reason += run_directory.what_is_saved(recorded) if self._saves else ""
        if not self._run_dir.is_dir():
            reason += "; the run directory is gone, so that the run may have come further than is known here"
        if tells:
            self._record.note("stop", reason=reason, exit_code=code)
        say(reason)
        return code
