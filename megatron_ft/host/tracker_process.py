"""The process that sends the run record to trackers, as the agent of host 0 keeps it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.utils import shared_file

_RESTARTS = 3
_END_S = 10.0


class Tracking:
    """The process reads the record and cannot touch training. ``names``: trackers; if empty, there is no process."""

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self._names, self._run_dir = names, run_dir
        self._process: subprocess.Popen | None = None
        self._starts = 0

    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    def poll(self) -> None:
        """Start the process again if it has died; one that exited with 0 is done."""
        if self._process is not None and self._process.poll():
            self.start()

    def start(self) -> None:
        self._process = None
        if not self._names or self._starts > _RESTARTS:
            return
        self._starts += 1
        command = [sys.executable, "-m", "megatron_ft.host.tracker", "--run-dir", str(self._run_dir)]
        with shared_file.append_to(self._run_dir / "logs" / "tracker.log") as output:
            self._process = subprocess.Popen(
                [*command, "--track", ",".join(self._names)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """Wait for the process, which ends after the history's last line; kill one that hangs after ``_END_S``."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # no limit: the process was killed before; it ends, unless it is inside the kernel (state D)
            self._process.wait()
