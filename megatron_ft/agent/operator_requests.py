"""What an operator asks a live run for, from outside of it: that a group leaves in order, or that all of it stops.

The request goes through the control store, like everything that concerns who is there: it reaches the group on whatever host
it is, and comes from any host that sees the run directory and the store.

Failures it assumes: the run may be over, or its store away; then nothing is asked for, and the reason is said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ft.core import detector
from megatron_ft.core.saving import Stops
from megatron_ft.errors import LaunchError
from megatron_ft.runtime import history, watcher
from megatron_ft.runtime.store import ControlStore

STORE_KEY = "store_address"
"""Of the run directory's config.json."""
_STORE_TIMEOUT_S = 5.0
_LOOK_S = 0.05


def leave(run_dir: Path, group: int, why: str, patience_s: float, say: Callable[[str], None] = print) -> None:
    """Ask ``group`` to leave after the step it works on; returns when it has said that it will.

    Raises ``LaunchError`` when there is no such run, or no such group in it, or it does not answer; ``StoreError``.
    """
    live = _live(run_dir)
    if group not in live:
        there = " ".join(map(str, live)) or "none yet"
        raise LaunchError(f"group {group} is not in the run; its groups are: {there}")
    known = len(_leaves(run_dir, group))
    watcher.announce(_store(run_dir), detector.Dismissed(group, why))
    deadline = time.monotonic() + patience_s
    while len(said := _leaves(run_dir, group)) == known:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"group {group} was asked to leave and has not said anything for {patience_s:g} s; it does so between two "
                f"microbatches: see {run_dir}/logs/g{group}.p0.log"
            )
        time.sleep(_LOOK_S)
    say(f"group {group} leaves after step {said[-1]['after']}")


def stop(run_dir: Path, why: str) -> None:
    """Tell the whole run to stop; with checkpoints it saves once more first. Returns when it has been told.

    Raises ``LaunchError`` when there is no such run, or it trains not yet; ``StoreError``.
    """
    live = _live(run_dir)
    if not live:
        raise LaunchError(f"the run in {run_dir} has made no step yet; end its launchers")
    watcher.announce(_store(run_dir), Stops(tuple(live), why))


def _live(run_dir: Path) -> list[int]:
    """The groups of the newest view in the record; none before the first step."""
    if not (run_dir / "config.json").is_file():
        raise LaunchError(f"{run_dir} holds no run; give the --run-dir of a launch")
    lines = history.read(run_dir)
    if any(line["event"] in ("end", "stop") for line in lines):
        raise LaunchError(f"the run in {run_dir} is over; there is nobody to be asked")
    return next((line["live"] for line in reversed(lines) if line["event"] == "view"), [])


def _store(run_dir: Path) -> ControlStore:
    try:
        run = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        store = ControlStore(run[STORE_KEY], run["run_id"], _STORE_TIMEOUT_S)
    except (OSError, ValueError, KeyError) as error:
        raise LaunchError(f"{run_dir} holds no run ({error}); give the --run-dir of a launch") from None
    store.check_begun()
    return store


def _leaves(run_dir: Path, group: int) -> list[dict]:
    return [line for line in history.read(run_dir) if line["event"] == "leave" and line["group"] == group]
