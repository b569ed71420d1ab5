"""The owner of a run directory and of the checkpoints' directory: the run's foremost agent holds a lock in both while the
run lives.

That is host 0's agent, and when host 0 is lost the agent of the lowest remaining host: it takes over both locks.
``utils.directory_lock`` explains how a lock works and how a dead holder is recognised.

Failures it assumes: an agent is killed or its host lost (the kernel's lock is free at once, the heartbeat stops); the file
system is away (nothing is taken over meanwhile); an agent was frozen while another run was given the directory
(``usurped``); a user removes the directory of a run that lives (it is made again).
"""

from __future__ import annotations

from pathlib import Path

from megatron_ft.config.schema import RunConfig
from megatron_ft.errors import CheckpointError, LaunchError
from megatron_ft.record import run_directory
from megatron_ft.utils import directory_lock
from megatron_ft.utils.console import say

_BEATS_S = 12.0
"""Two heartbeats of the lock."""


class Claims:
    """The directories of run ``run_id`` as one of its agents holds them, if it does. ``run_id`` may be set until they
    are taken. ``others``: other hosts can go on with the run when this one is lost."""

    def __init__(self, run_dir: Path, config: RunConfig, run_id: str, others: bool) -> None:
        self._run_dir, self.run_id = run_dir, run_id
        self._saved = config.fault_tolerance.checkpoint.directory
        self._others = others
        self._locks: list[directory_lock.Lock] = []
        self._tried = False

    def take(self) -> None:
        """Take the locks as host 0, before the run begins. Raises ``FTError`` while another run lives there."""
        if self._run_dir.exists() and not self._run_dir.is_dir():
            raise LaunchError(f"--run-dir {self._run_dir} is a file; give a directory")
        self._tried = True
        options = {"others": self._others, "heartbeats": False}
        self._locks.append(directory_lock.lock(self._run_dir, self.run_id, directory_lock.RUN, **options))
        if self._saved:  # its heartbeat begins at once: to read a checkpoint may take long
            former = self._locks[0].former
            self._locks.append(directory_lock.lock(Path(self._saved), self.run_id, dead=former))

    def begin(self) -> None:
        """Show from now on that the run lives. Called after the agent has forked what it forks: this starts a thread."""
        if self._locks:
            self._locks[0].begin()

    def check(self, foremost: bool) -> bool:
        """Take over, once, when all hosts before this one are lost. Return whether the run directory, or its lock, was
        removed and is made again, empty. Raises ``LaunchError`` if another run has the run directory by now."""
        again = bool(self._locks) and self._locks[0].removed and self._take_again()
        if foremost and not self._tried:
            self._tried = True
            try:
                self._locks.append(self._lock())
                if self._saved:
                    self._locks.append(directory_lock.lock(Path(self._saved), self.run_id))
            except LaunchError as error:
                raise LaunchError(f"{error}. This run is ended") from None
            except CheckpointError as error:
                say(str(error))  # no checkpoint depends on that lock
            except OSError as error:
                say(f"no process of this run holds the lock of {self._run_dir} any more: {error}")
        if self.usurped:
            raise LaunchError(f"{self.usurped}. This run is ended")
        return again

    def _take_again(self) -> bool:
        self._locks.pop(0).release()
        try:
            self._run_dir.mkdir(exist_ok=True)  # not its parents: they may be a file system that is not mounted
            self._locks.insert(0, self._lock())
        except LaunchError as error:
            raise LaunchError(f"{error}. This run is ended") from None
        except OSError as error:
            say(
                f"run directory {self._run_dir} was removed, and cannot be made again: {error.strerror or error}. The run "
                f"goes on without a record; lost groups are not started again, and `megatron-ft stop` cannot find the run"
            )
            return False
        return True

    @property
    def usurped(self) -> str:
        """The reason why the directory belongs to another run by now; "" while it does not."""
        return self._locks[0].usurped if self._locks else ""

    def release(self) -> None:
        """Release the directories: the run has ended here, and another may have them."""
        while self._locks:
            self._locks.pop().release()

    def _lock(self) -> directory_lock.Lock:
        return directory_lock.take(self._run_dir, self.run_id, directory_lock.RUN, others=self._others)


def check_free(run_dir: Path, own: str) -> None:
    """Raise ``LaunchError`` when a run lives there whose ``--job-id`` does not begin with ``own``: before any agent
    starts that would be refused, or would join a run that is not its own."""
    if run_directory.launch_of(run_dir).startswith(own):
        return
    # This only looks for a run that lives; the agent makes sure that one is dead.
    directory_lock.check_free(run_dir, directory_lock.RUN, patience_s=_BEATS_S)
