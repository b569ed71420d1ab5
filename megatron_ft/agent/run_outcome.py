"""The exit code of an agent, and the line that explains it: what the ends of its ranks mean for the run."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.agent.agent_record import AgentRecord
from megatron_ft.agent.rank_process import Rank
from megatron_ft.errors import NOT_SAVED
from megatron_ft.runlog import history, run_directory
from megatron_ft.types import Exit
from megatron_ft.utils.console import say


class RunOutcome:
    """Collects how ranks of one host have ended. ``saves``: the run has checkpoints."""

    def __init__(self, record: AgentRecord, saves: bool) -> None:
        self._record, self._saves = record, saves
        self._exits: dict[tuple[int, int], tuple[Rank, Exit]] = {}
        self._failed_after: list[tuple[Path, Exit, signal.Signals | None]] = []

    def failed_after(self, rank: Rank, death: Exit, signalled: signal.Signals | None) -> None:
        """Take in a rank that failed after the last step. ``signalled``: the signal that had told this agent to stop."""
        self._failed_after.append((rank.log, death, signalled))

    def ended_before(self, rank: Rank, death: Exit, member: bool) -> None:
        """Take in a rank that ended before the run did. ``member``: its start was a member of a view."""
        if not self._exits or member:
            place = rank.group, rank.position  # a newcomer without a seat is not why the run ends
            self._exits.pop(place, None)  # keeps the dict in the order of the exits
            self._exits[place] = rank, death

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
        self,
        recorded: history.Summary,
        signalled: signal.Signals | None,
        idle: bool,
        stuck: Sequence[Rank],
        tells: bool,
    ) -> int:
        """Conclude a run that has not made its last step.

        Args:
            recorded: the record as it is now.
            signalled: the signal that has told this agent to stop.
            idle: this host had no rank to run.
            stuck: the given-up ranks, if all groups are lost.
            tells: this agent writes the ``stop`` line.
        """
        ended = [(rank.log, death) for rank, death in self._exits.values()]
        code, reason = run_directory.why(recorded.last_step, signalled, ended, idle)
        if signalled is None and stuck:  # whatever their exit codes were afterwards
            code, reason = run_directory.why_given_up(recorded.last_step, stuck[-1].log, stuck[-1].watched.given_up)
        reason += run_directory.what_is_saved(recorded) if self._saves else ""
        if tells:
            self._record.note("stop", reason=reason, exit_code=code)
        say(reason)
        return code
