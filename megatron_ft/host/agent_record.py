"""The run record as one agent writes and reads it, and the list of its ranks beside it.

Failures it assumes: the disk is full, the file system away, or the directory removed. A line that cannot be written is kept
and written with the next one; what it says about lost groups is printed. A record that cannot be read says what it said
last. Neither is a reason to end a run. The directory may have been given to another run; nothing is written into that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.host.rank_process import Rank
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.types import Exit
from megatron_ft.utils import steady_clock
from megatron_ft.utils.console import say

_LOOK_S = 5.0
"""The record may be long, so it is not read more often than this while the control store is away."""
_SAID = float("inf")
_KEPT = 1024
"""Lines that are kept until they can be written."""


class AgentRecord:
    """``usurped`` returns a true value once the run directory belongs to another run."""

    def __init__(self, run_dir: Path, usurped: Callable[[], object]) -> None:
        self._run_dir, self._usurped = run_dir, usurped
        self._watched = run_state.Watched(run_dir)
        self._complained = False
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._look_again = 0.0
        self._last_step: float | None = None  # when the store was first found away

    def note(self, event: str, **fields: Any) -> None:
        """Append a line, after those that could not be written before."""
        self._kept.append({"t": round(steady_clock.now(), 6), "event": event, **fields})
        if not self.write() and (words := _in_words(event, fields)):
            say(words)

    def write(self) -> bool:
        """Append the lines that could not be written yet; return False if one cannot be written now."""
        if self._usurped():
            return True
        try:
            while self._kept:
                history.append(self._run_dir, **self._kept[0])
                self._kept.popleft()
        except OSError as error:
            self._complain(error)
            return False
        return True

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

    def summary(self) -> run_state.RunState:
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


def _in_words(event: str, fields: Mapping[str, Any]) -> str:
    """Return what the launcher would show of a line about a lost group; "" for any other."""
    match event:
        case "fault":
            death = Exit(**{name: fields[name] for name in Exit.__dataclass_fields__ if name in fields})
            return f"group {death.group} lost: {death if death.signal or death.code is not None else death.detail}"
        case "given_up":
            return f"group {fields['group']} does not come back: {fields['reason']}"
        case "restart" if fields["pids"]:
            return f"group {fields['group']} is started again (incarnation {fields['incarnation']})"
    return ""
