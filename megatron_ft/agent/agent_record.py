"""The run record as one agent writes and reads it, and the list of its ranks beside it.

Failures it assumes: the disk is full, or the file system away. A line that cannot be written is printed once, and a
record that cannot be read says what it said last: neither is a reason to end a run. The directory may have been given to
another run; nothing is written into that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.agent.rank_process import Rank
from megatron_ft.runlog import history, run_directory
from megatron_ft.utils.console import say

_LOOK_S = 5.0
"""The record may be long, so it is not read more often than this while the control store is away."""
_SAID = float("inf")


class AgentRecord:
    """``usurped`` returns a true value once the run directory belongs to another run."""

    def __init__(self, run_dir: Path, usurped: Callable[[], object]) -> None:
        self._run_dir, self._usurped = run_dir, usurped
        self._watched = history.Watched(run_dir)
        self._complained = False
        self._look_again = 0.0
        self._last_step: float | None = None  # when the store was first found away

    def note(self, event: str, **fields: Any) -> None:
        """Append a line."""
        if self._usurped():
            return
        try:
            history.append(self._run_dir, event, **fields)
        except OSError as error:
            self._complain(error)

    def note_fault(self, fields: dict[str, Any], noticed: float, how: str) -> None:
        """Append a ``fault`` line. ``detected_s`` counts from the injection; None for a fault that was not injected."""
        injected = self.summary().injected(fields["pid"])
        detected_s = None if injected is None else round(noticed - injected, 6)
        self.note("fault", **fields, how=how, detected_s=detected_s)

    def write_ranks(self, living: Sequence[Rank], host: str, number: int) -> None:
        """Write the list of ranks that live on this host, of that name and number."""
        if self._usurped():
            return
        try:
            run_directory.write_ranks(self._run_dir, [rank.listed(host) for rank in living], number)
        except OSError as error:
            self._complain(error)

    def summary(self) -> history.Summary:
        """Return what the record says by now."""
        try:
            return self._watched.poll()
        except OSError:
            return self._watched.known

    def has_end(self, away: bool) -> bool:
        """Return whether the record has the end of the run, while the control store is ``away``: a host that is cut off
        from the store cannot hear of it otherwise. Called regularly."""
        if not away:
            self._last_step = None
            return False
        if time.monotonic() < self._look_again:
            return False
        self._look_again = time.monotonic() + _LOOK_S
        summary = self.summary()
        self._say_committed(summary.last_step)
        return bool(summary.end)

    def _say_committed(self, step: int | None) -> None:
        """Print, once while the store is away, that a step begun since then was committed."""
        step = -1 if step is None else step
        if self._last_step is None:
            self._last_step = step
        elif step > self._last_step + 1:
            self._last_step = _SAID
            say(f"step {step} was committed since: training goes on without the control store")

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            say(f"run record not written, training goes on: {error}")
        self._complained = True
