"""Write a file once for all groups, such as the best model so far or the final one, in one group at a time
(``core.lifecycle.final_save_policy``).

Failures it assumes: the writer dies, freezes or is cut off at any moment; its disk is full; it wakes up when another
group has taken over. Partial data has a temporary name, and is never read.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ft.core.lifecycle.final_save_policy import Claim, Waiter, look
from megatron_ft.errors import CheckpointError, StoreError
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.utils.wait_notice import beside

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_LEASE_S = 5.0
"""A writer that shows nothing for so many seconds is taken for lost. Longer than a writer holds the GIL: a second writer
does no harm, but it wastes time."""


class FinalSave:
    """The part of one rank. ``own``: the name of its group's start; ``may_write``: the rank may be the writer;
    ``number``: that of the save among those with this path, ascending: (committed steps, number among those at that
    step); ``groups``: number of live groups, 0 if it is not known."""

    def __init__(
        self,
        agreement: CoordinationClient,
        path: Path,
        own: str,
        may_write: bool,
        number: tuple[int, int] = (0, 0),
        groups: int = 0,
    ) -> None:
        self._agreement, self._path, self._save = agreement, path, list(number)
        self._saved = f"final/{path}/saved"
        self._keys = f"final/{path}/{number[0]}.{number[1]}"
        self._waiter = Waiter(own, _LEASE_S, time.monotonic(), may_write, groups=groups)
        self._number, self._owner = -1, ""
        self._error: Exception | None = None

    def save(self, write: Callable[[Path], object]) -> None:
        """Return when the model is saved, by this group or another one. Raises ``CheckpointError``, or the exception of
        ``write`` in this group, when no group could write it."""
        # no limit: a writer that shows nothing for 5 s is lost, and a rank that cannot write waits twice as long
        while True:
            self._waiter, action = look(self._waiter, self._is_saved(), self._newest(), time.monotonic())
            if action == "done":
                if self._error is not None:
                    _log.warning(f"this group could not save {self._path}, another one has: {self._error}")
                return
            if action == "fail":
                raise self._error or CheckpointError(f"no group could save {self._path}; see the logs of the groups")
            if action == "write":
                self._write(write)
            elif action == "claim":
                self._agreement.settle(f"{self._keys}/claim/{self._number + 1}", self._waiter.own)
            else:
                time.sleep(_LOOK_EVERY_S)  # the policy ends this loop: it gives up two leases after the last claim

    def _is_saved(self) -> bool:
        """Return whether this save, or a later one, is complete: a writer that was frozen must not replace a later file."""
        newest = self._agreement.get(self._saved)
        return newest is not None and newest >= self._save

    def _newest(self) -> Claim | None:
        while (owner := self._agreement.get(f"{self._keys}/claim/{self._number + 1}")) is not None:
            self._number, self._owner = self._number + 1, owner
        if self._number < 0:
            return None
        heartbeats = self._agreement.get(f"{self._keys}/heartbeats/{self._number}") or 0
        return Claim(
            self._number, self._owner, heartbeats, self._agreement.get(f"{self._keys}/failed/{self._number}") or ""
        )

    def _write(self, write: Callable[[Path], object]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{self._waiter.own}-{secrets.token_hex(8)}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with beside(self._show, "final save"):
                write(temporary)
                if not self._is_saved():
                    _replace(self._path, temporary)
        except Exception as error:
            self._error = error
            self._agreement.put(f"{self._keys}/failed/{self._number}", f"{type(error).__name__}: {error}")
        else:
            if not self._is_saved():
                self._agreement.put(self._saved, self._save)
            for left in self._path.parent.glob(glob.escape(f".{self._path.name}.") + "*.tmp"):
                _remove(left)  # of writers that are lost
        finally:
            _remove(temporary)

    def left(self) -> list[str]:
        """Return the keys that the store still has of this save alone when it has ended."""
        kinds = ("claim", "heartbeats", "failed")
        return [f"{self._keys}/{kind}/{n}" for n in range(self._number + 1) for kind in kinds]

    def _show(self, over: threading.Event) -> None:
        """Thread: show that this group is writing."""
        client, heartbeats = self._agreement.clone(), 0
        with contextlib.suppress(StoreError):  # the training thread finds that out itself
            # no limit: a thread of its own; whoever has started it tells it to stop
            while not over.wait(_LEASE_S / 8):
                heartbeats += 1
                client.put(f"{self._keys}/heartbeats/{self._number}", heartbeats)


def _replace(path: Path, temporary: Path) -> None:
    """Give ``temporary`` the name ``path``. An older file is replaced in one step; an older directory is moved aside."""
    if not path.is_dir():
        temporary.replace(path)
        return
    aside = temporary.with_suffix(".old")
    path.rename(aside)
    temporary.rename(path)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
