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
from megatron_ft.errors import WIPED_OUT, InvariantBroken, LaunchError, StoreError, WipedOut
from megatron_ft.runlog import history
from megatron_ft.types import Exit, given
from megatron_ft.utils import atomic_file, process_status

RANKS = "ranks"
"""The directory in which each host writes its own list; all of them also update ``ranks.json``."""
STORE = "store.json"
ETCD = "etcd"
"""The place where the hosts of a run with an etcd of its own find each other, and report its members."""
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
    *("config.json", "ranks.json", STORE, CLAIMS, ETCD, RANKS, "history.jsonl", "timeline", "logs", "faults"),
    *("tensorboard", "wandb"),
)


def prepare(path: Path, overwrite: bool, aside: str = NOTHING, private: bool = False) -> Path:
    """Make an empty place for the record, in a directory that the caller has locked (``agent.run_lock``).

    Raises ``LaunchError`` rather than mix two runs.

    Args:
        aside: which record of an earlier start is put aside, because the run goes on from checkpoints.
        private: give the directory mode 0700.
    """
    if overwrite:
        _await_end(path)
        for name in (*_ALL, *(part.name for part in history.files(path))):
            if (path / name).is_dir():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink(missing_ok=True)
    recorded = history.summary(path)
    if not recorded.empty and aside != NOTHING and (aside == ANY or not recorded.ended):
        _put_aside(path)
        recorded = history.Summary()
    if recorded.ended:
        assert recorded.end is not None
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
        path.mkdir(parents=True, exist_ok=True)
        if private:
            path.chmod(0o700)
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "timeline").mkdir(exist_ok=True)
        (path / RANKS).mkdir(exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--run-dir {path} cannot be created: {error.strerror}; choose another directory") from None
    return path.resolve()


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
    (path / EARLIER).mkdir(exist_ok=True)
    number = 1 + max((int(place.name) for place in (path / EARLIER).iterdir() if place.name.isdigit()), default=0)
    room = path / EARLIER / f"{number:04d}"
    room.mkdir()
    for name in dict.fromkeys((*_ALL, *(part.name for part in history.files(path)))):
        if (path / name).exists():
            os.replace(path / name, room / name)


def starts_of(path: Path) -> list[Path]:
    """Return the directories with the records of all starts of a job, the oldest first and ``path`` last."""
    return [*sorted((path / EARLIER).glob("*")), path]


def _lives(rank: dict[str, Any]) -> bool:
    """Return True if a rank of this host is alive and not a zombie."""
    if rank["host"].partition("(")[0] != socket.gethostname():  # the address is appended where hosts have the same name
        return False
    return process_status.lives(rank["pid"], rank["start"])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of ranks; none while it is being replaced."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []  # the file is being replaced


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Replace ``config.json``. Only its owner may write to it, whatever the umask: ``join`` runs the command in it. Raises
    ``OSError``."""
    atomic_file.write_json(run_dir / "config.json", config, mode=0o644)


def write_ranks(run_dir: Path, living: list[dict[str, Any]], host: int) -> None:
    """List the living ranks of this host, and of all hosts. Raises ``OSError``.

    Agents write at the same time. An agent that finds the parts changed since it read them writes the whole list again,
    so the last agent to write has seen all parts.
    """
    atomic_file.write_json(run_dir / RANKS / f"{host}.json", living)
    written, listed = None, _listed(run_dir)
    while listed != written:
        atomic_file.write_json(run_dir / "ranks.json", listed)
        written, listed = listed, _listed(run_dir)


def _listed(run_dir: Path) -> list[dict[str, Any]]:
    return [rank for path in sorted((run_dir / RANKS).glob("*.json")) for rank in read(path)]


def why(
    last_step: int | None, signalled: signal.Signals | None, ended: Sequence[tuple[Path, Exit]], idle: bool
) -> tuple[int, str]:
    """Return exit code and reason of a run that did not reach its end.

    ``ended``: log and exit of each rank of this host, in order; ``idle``: the host had no rank to run."""
    where = _where(last_step)
    if signalled is not None:
        return 128 + signalled, f"stopped by {signalled.name} {where}"
    if not ended and idle:
        return WIPED_OUT, f"no group is left {where}; this host had nothing to do"
    if not ended:
        return 1, f"the agent failed {where}"
    broken, wiped_out, storeless = (
        [(log, death) for log, death in ended if death.code == kind.exit_code]
        for kind in (InvariantBroken, WipedOut, StoreError)
    )
    if last_step is None:
        storeless = []  # there may never have been a store at that address
    # Ranks that stopped as a consequence have other exit codes.
    log, death = (broken or wiped_out or storeless or ended)[-1]
    if broken or wiped_out:
        return given(death.code), f"{death.detail} [all groups, {where}; output in {log}]"
    same = {other.detail for _, other in ended}
    # Without a control store all groups are lost at once, and the run can be started again.
    code = WIPED_OUT if death.signal or storeless else death.code or 1
    if len(same) == 1 and death.detail:
        return code, f"{death.detail} [all groups, {where}; output in {log}]"
    if death.code == 0:
        return 1, f"the script ended by itself {where}, before its session.steps() did; output in {log}"
    return code, f"no group is left {where}; the last was group {death.group}: {death}; output in {log}"


def why_given_up(last_step: int | None, log: Path, reason: str) -> tuple[int, str]:
    """Return exit code and reason of a run whose agents gave up the last groups. The run can be started again."""
    return (
        WIPED_OUT,
        f"no group is left {_where(last_step)}: all were given up, one because it {reason}; output in {log}",
    )


def _where(last_step: int | None) -> str:
    return "before the first step" if last_step is None else f"after step {last_step}"


def outcome(line: Mapping[str, Any], before: int | None) -> int | None:
    """Return a run's exit code after that line of its record, None while it goes on; ``before``: the code before it."""
    stated = line.get("exit_code")
    return {"start": None, "end": 0, "stop": stated, "not_saved": stated}.get(line["event"], before)


def what_is_not_saved(end: Mapping[str, Any]) -> str:
    """Return the part of its end that a run has not saved, "" when nothing is missing. ``end``: the ``end`` line."""
    step = end.get("step", -1) + 1
    if "saved" not in end or end["saved"] == step:
        return ""
    newest = "no checkpoint is complete, a later start begins anew"
    if end["saved"] is not None:
        newest = f"the newest checkpoint is of step {end['saved']}: start again to go on from there"
    return f"all {step} steps are done, but step {step} is not saved; {newest}"


def what_failed_after(end: Mapping[str, Any], ended: Sequence[tuple[Path, Exit, signal.Signals | None]]) -> str:
    """Return the same for scripts that failed after the last step. ``ended``: log and exit of each of these ranks, and
    the signal that had told the launcher to stop by then."""
    if not ended:
        return ""
    log, death, signalled = ended[0]
    steps = f"all {end['step'] + 1} steps are" if "step" in end else "the last step is"
    if signalled is not None and death.signal is not None:
        stopped = f"{signalled.name} stopped the run before the script of group {death.group} had ended"
        return f"{steps} done, but {stopped}: its final model may be missing [output in {log}]"
    what = death.detail or death
    return f"{steps} done, but after that the script of group {death.group} failed: {what} [output in {log}]"


def launch_of(run_dir: Path) -> str:
    """Return the ``--job-id`` of the launch recorded there; "" if there is none."""
    try:
        return str(json.loads((run_dir / "config.json").read_text(encoding="utf-8")).get("job", ""))
    except (OSError, ValueError):
        return ""


def what_is_saved(recorded: history.Summary) -> str:
    """Return the point from which a later start goes on, for a run with checkpoints."""
    if recorded.saved is None:
        return "; no checkpoint is complete, a later start begins anew"
    return f"; the checkpoint of step {recorded.saved} is complete: start again to go on from there"
