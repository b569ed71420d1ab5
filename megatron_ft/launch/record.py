"""The agent's part of a run directory (docs/run-record.md): an empty place for the record, and files replaced at once."""

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

from megatron_ft.errors import WIPED_OUT, LaunchError
from megatron_ft.runtime import history
from megatron_ft.types import Exit

RANKS = "ranks"
"""Each host writes its own list there, and all of them to ``ranks.json``."""
STORE = "store.json"
ETCD = "etcd"
"""Where the hosts of a run with an etcd of its own find each other, and say what runs of it."""
EARLIER = "earlier"
"""Where the records of the starts before go, each to a directory of its own: 0001, 0002, ..."""
NOTHING, UNFINISHED, ANY = "nothing", "unfinished", "any"
"""What may be put there."""
_END_S = 2.0
"""So long the processes of a run whose agent was killed may take to end."""
_ALL = ("config.json", "ranks.json", STORE, ETCD, RANKS, "history.jsonl", "timeline", "logs", "faults")
_ALL += ("tensorboard", "wandb")


def prepare(path: Path, overwrite: bool, aside: str = NOTHING) -> Path:
    """An empty place for the record. Raises ``LaunchError`` rather than mix two runs.

    ``aside``: which record of an earlier start makes room, because the run goes on from checkpoints.
    """
    if path.exists() and not path.is_dir():
        raise LaunchError(f"--run-dir {path} is a file; give a directory")
    if overwrite:
        for name in _ALL:
            if (path / name).is_dir():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink(missing_ok=True)
    lines = history.read(path)
    if lines and aside != NOTHING and (aside == ANY or not any(line["event"] == "end" for line in lines)):
        _put_aside(path)
        lines = []
    ends = [line for line in lines if line["event"] == "end"]
    if ends:
        raise LaunchError(
            f"--run-dir {path} already holds a finished run (last step {ends[-1]['step']}); choose another directory, or "
            f"pass --overwrite to delete that run"
        )
    if lines:
        raise LaunchError(
            f"--run-dir {path} already holds a run that did not reach its end; to go on with one, have it save checkpoints "
            f"(fault_tolerance.checkpoint.directory). Choose another directory, or pass --overwrite to delete that run"
        )
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "timeline").mkdir(exist_ok=True)
        (path / RANKS).mkdir(exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--run-dir {path} cannot be created: {error.strerror}; choose another directory") from None
    return path.resolve()


def _put_aside(path: Path) -> None:
    """Move the record of an earlier start away; nothing of it is lost. Raises ``LaunchError`` while that run lives."""
    deadline = time.monotonic() + _END_S
    while living := [rank for rank in read(path / "ranks.json") if _lives(rank)]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"--run-dir {path} is that of a run whose rank {living[0]['position']} of group {living[0]['group']} lives "
                f"(pid {living[0]['pid']}); wait for it to end, or choose another directory"
            )
        time.sleep(0.05)
    (path / EARLIER).mkdir(exist_ok=True)
    number = 1 + max((int(place.name) for place in (path / EARLIER).iterdir() if place.name.isdigit()), default=0)
    room = path / EARLIER / f"{number:04d}"
    room.mkdir()
    for name in _ALL:
        if (path / name).exists():
            os.replace(path / name, room / name)


def _lives(rank: dict[str, Any]) -> bool:
    """Whether a rank of this host is there; a zombie is not."""
    if rank["host"] != socket.gethostname():
        return False
    try:
        fields = Path(f"/proc/{rank['pid']}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == rank["start"]


def replace(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old or the new file, never half of one."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []  # replaced in this moment


def write_ranks(run_dir: Path, living: list[dict[str, Any]], host: int) -> None:
    """List the living ranks of this host, and of all. Raises ``OSError``.

    Agents do so at the same time: who finds that the parts have changed since it read them writes the whole once more, so
    the last one to write has seen them all.
    """
    replace(run_dir / RANKS / f"{host}.json", living)
    written, listed = None, _listed(run_dir)
    while listed != written:
        replace(run_dir / "ranks.json", listed)
        written, listed = listed, _listed(run_dir)


def _listed(run_dir: Path) -> list[dict[str, Any]]:
    """What all hosts have listed so far."""
    return [rank for path in sorted((run_dir / RANKS).glob("*.json")) for rank in read(path)]


def has_committed(run_dir: Path, group: int, incarnation: int) -> bool:
    """Whether that start of a group has had a part in a step, as far as the record tells."""
    starts: dict[int, int] = {}  # epoch -> which start of the group is its member, if one is
    for line in history.read(run_dir):
        if line["event"] == "view":
            starts[line["epoch"]] = line.get("incarnations", {}).get(str(group), 0)
        elif line["event"] == "step" and group in line["live"] and starts.get(line["epoch"], 0) == incarnation:
            return True
    return False


def why(
    last_step: int | None, signalled: signal.Signals | None, ended: Sequence[tuple[Path, Exit]], idle: bool
) -> tuple[int, str]:
    """Exit code and reason of a run that has not got to its end. ``ended``: log and end of each rank of this host, in
    order; ``idle``: it had none to run."""
    where = "before the first step" if last_step is None else f"after step {last_step}"
    if signalled is not None:
        return 128 + signalled, f"stopped by {signalled.name} {where}"
    if not ended and idle:
        return WIPED_OUT, f"no group is left {where}; this host had nothing to do"
    if not ended:
        return 1, f"the agent failed {where}"
    log, death = ended[-1]
    same = {other.detail for _, other in ended}
    code = WIPED_OUT if death.signal else death.code or 1
    if len(same) == 1 and death.detail:
        return code, f"{death.detail} [all groups, {where}; output in {log}]"
    if death.code == 0:
        return 1, f"the script ended by itself {where}, before its session.steps() did; output in {log}"
    return code, f"no group is left {where}; the last was group {death.group}: {death}; output in {log}"


def outcome(line: Mapping[str, Any], before: int | None) -> int | None:
    """A run's exit code after that line of its record, None while it goes on; ``before``: after the line before."""
    return {"start": None, "end": 0, "stop": line.get("exit_code")}.get(line["event"], before)


def launch_of(run_dir: Path) -> str:
    """The ``--job-id`` of the launch that is recorded there; "" if there is none."""
    try:
        return str(json.loads((run_dir / "config.json").read_text(encoding="utf-8")).get("job", ""))
    except (OSError, ValueError):
        return ""


def what_is_saved(lines: Sequence[dict[str, Any]]) -> str:
    """From where a later start goes on, of a run with checkpoints."""
    saved = [line["step"] for line in lines if line["event"] in ("checkpoint", "resume")]
    if not saved:
        return "; no checkpoint is complete, a later start begins anew"
    return f"; the checkpoint of step {saved[-1]} is complete: start again to go on from there"
