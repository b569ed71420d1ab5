"""The agent's part of a run directory (docs/run-record.md): an empty place for the record, and atomic file updates."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config.rank_env import CLAIMS
from megatron_ft.errors import LaunchError
from megatron_ft.record import history, run_state
from megatron_ft.types import Exit
from megatron_ft.utils import process_status, shared_file

RANKS = "ranks"
"""The directory in which each host writes its own list; all of them also update ``ranks.json``."""
STORE = "store.json"
CLOSING = "closing"
"""The event by which an agent reports every few seconds that scripts still run after the last step."""
PROGRESS = ("view", "step")
"""The events that show that a run goes on."""
EARLIER = "earlier"
"""The directory for the records of earlier starts, each in a directory of its own: 0001, 0002, ..."""
NOTHING, UNFINISHED, ANY = "nothing", "unfinished", "any"
"""Values of ``aside`` in :func:`prepare`: the records that may be put there."""
_END_S = 2.0
"""Seconds in which the processes of a run whose agent was killed have to end."""
_ALL = (
    *("config.json", "ranks.json", STORE, CLAIMS, RANKS, "history.jsonl", "timeline", "logs", "faults"),
    *("tensorboard", "wandb", "megatron_lm"),
)


def prepare(path: Path, overwrite: bool, aside: str = NOTHING, private: bool = False) -> Path:
    """Make an empty place for the record, in a directory that the caller has locked (``host.run_lock``).

    Raises ``LaunchError`` rather than mix two runs.

    Args:
        aside: which record of an earlier start is put aside, because the run goes on from checkpoints.
        private: give the directory mode 0700.
    """
    if overwrite:
        _await_end(path)
        for name in (*_ALL, *(part.name for part in history.files(path))):
            if (path / name).is_dir() and not (path / name).is_symlink():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink(missing_ok=True)
    recorded = run_state.read(path)
    if not recorded.empty and aside != NOTHING and (aside == ANY or recorded.end is None):
        _put_aside(path)
        recorded = run_state.RunState()
    if recorded.end is not None:
        raise LaunchError(
            f"--run-dir {path} already holds a finished run (last step {recorded.end['step']}); choose another directory, "
            f"or pass --overwrite to delete that run"
        )
    if not recorded.empty:
        raise LaunchError(
            f"--run-dir {path} already holds a run that did not reach its end; to go on with one, have it save checkpoints "
            f"(fault_tolerance.checkpoint.directory). Choose another directory, or pass --overwrite to delete that run"
        )
    try:
        make(path, private)
    except OSError as error:
        raise LaunchError(f"--run-dir {path} cannot be created: {error.strerror}; choose another directory") from None
    return path.resolve()


def make(path: Path, private: bool) -> None:
    """Make the directories of a record. Raises ``OSError``."""
    path.mkdir(parents=True, exist_ok=True)
    if private:
        path.chmod(0o700)
    for name in ("logs", "timeline", RANKS):
        shared_file.make_directory(path / name)


def _await_end(path: Path) -> None:
    """Wait for the ranks of an earlier start whose agent has ended. Raises ``LaunchError`` if one of them lives on."""
    deadline = time.monotonic() + _END_S
    while living := [rank for rank in read(path / "ranks.json") if _lives(rank)]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"--run-dir {path} is that of a run whose rank {living[0]['position']} of group {living[0]['group']} lives "
                f"(pid {living[0]['pid']}); wait for it to end, or choose another directory"
            )
        time.sleep(0.05)


def _put_aside(path: Path) -> None:
    """Move the record of an earlier start aside, complete. Raises ``LaunchError`` while that run lives."""
    _await_end(path)
    shared_file.make_directory(path / EARLIER)
    number = 1 + max((int(place.name) for place in (path / EARLIER).iterdir() if place.name.isdigit()), default=0)
    room = path / EARLIER / f"{number:04d}"
    room.mkdir()
    for name in dict.fromkeys((*_ALL, *(part.name for part in history.files(path)))):
        if (path / name).exists():
            os.replace(path / name, room / name)


def starts_of(path: Path) -> list[Path]:
    """Return the directories with the records of all starts of a job, the oldest first and ``path`` last."""
    return [*sorted((path / EARLIER).glob("*")), path]


def living(path: Path) -> list[dict[str, Any]]:
    """Return the listed ranks that live, or that are on another host."""
    here = socket.gethostname()
    return [r for r in read(path / "ranks.json") if r["host"].partition("(")[0] != here or _lives(r)]


def _lives(rank: dict[str, Any]) -> bool:
    """Return True if a rank of this host is alive and not a zombie."""
    if rank["host"].partition("(")[0] != socket.gethostname():  # the address is appended where hosts have the same name
        return False
    return process_status.lives(rank["pid"], rank["start"])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of ranks; none while it is being replaced."""
    try:
        return json.loads(shared_file.read_record(path))
    except FileNotFoundError:
        return []  # the file is being replaced


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Replace ``config.json``. Only its owner may write to it, whatever the umask: ``join`` runs the command in it. Raises
    ``OSError``."""
    shared_file.write_json(run_dir / "config.json", config, mode=0o644)


def write_ranks(run_dir: Path, living: list[dict[str, Any]], host: int) -> None:
    """List the living ranks of this host, and of all hosts. Raises ``OSError``.

    Agents write at the same time. An agent that finds the parts changed since it read them writes the whole list again,
    so the last agent to write has seen all parts.
    """
    shared_file.write_json(run_dir / RANKS / f"{host}.json", living)
    written, listed = None, _listed(run_dir)
    while listed != written:
        shared_file.write_json(run_dir / "ranks.json", listed)
        written, listed = listed, _listed(run_dir)


def _listed(run_dir: Path) -> list[dict[str, Any]]:
    return [rank for path in sorted((run_dir / RANKS).glob("*.json")) for rank in read(path)]


def log(run_dir: Path, group: int, position: int) -> Path:
    """Return the file with the output of that rank, of all its group's starts."""
    return run_dir / "logs" / f"g{group}.p{position}.log"


def what_is_not_saved(end: Mapping[str, Any]) -> str:
    """Return the part of its end that a run has not saved, "" when nothing is missing. ``end``: the ``end`` line."""
    step = end.get("step", -1) + 1
    if "saved" not in end or end["saved"] == step:
        return ""
    newest = "no checkpoint is complete, a later start begins anew"
    if end["saved"] is not None:
        newest = f"the newest checkpoint is of step {end['saved']}: start again to go on from there"
    return f"{run_state.steps_made(end)}, but step {step} is not saved; {newest}"


def what_failed_after(end: Mapping[str, Any], ended: Sequence[tuple[Path, Exit, signal.Signals | None]]) -> str:
    """Return the same for scripts that failed after the last step. ``ended``: log and exit of each of these ranks, and
    the signal that had told the launcher to stop by then."""
    if not ended:
        return ""
    log, death, signalled = ended[0]
    steps = run_state.steps_made(end) if "step" in end else "the last step is done"
    if signalled is not None and death.signal is not None:
        stopped = f"{signalled.name} stopped the run before the script of group {death.group} had ended"
        return f"{steps}, but {stopped}: its final model may be missing [output in {log}]"
    what = death.detail or death
    return f"{steps}, but after that the script of group {death.group} failed: {what} [output in {log}]"


def config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of the run recorded there (``config.json``); empty while there is none that can be read."""
    found = shared_file.read_json(run_dir / "config.json")
    return found if isinstance(found, dict) else {}


def size(run_dir: Path) -> tuple[int, int]:
    """Return a run's number of groups and of ranks in each. Raises ``LaunchError`` if the directory has no run."""
    found = config(run_dir)
    if not {"groups", "ranks_per_group"} <= found.keys():
        raise LaunchError(f"{run_dir} holds no run (no config.json that can be read); give the --run-dir of a launch")
    return found["groups"], found["ranks_per_group"]


def launch_of(run_dir: Path) -> str:
    """Return the ``--job-id`` of the launch recorded there; "" if there is none."""
    return str(config(run_dir).get("job", ""))


def what_is_saved(recorded: run_state.RunState) -> str:
    """Return the point from which a later start goes on, for a run with checkpoints."""
    if recorded.saved is None:
        return "; no checkpoint is complete, a later start begins anew"
    return f"; the checkpoint of step {recorded.saved} is complete: start again to go on from there"
