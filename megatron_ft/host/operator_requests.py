"""Requests of an operator to a live run, from outside of it: one group leaves in order, or the whole run stops.

A request goes through the control store, like everything about membership: it reaches the group on any host, and comes
from any host that sees the run directory and the store.

Failures it assumes: the run may be over, or its store away; then no request is made, and the reason is reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ft.config.rank_env import CLAIMS
from megatron_ft.core.lifecycle.checkpoint_protocol import Stops
from megatron_ft.core.protocol import signals
from megatron_ft.errors import LaunchError
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.run.store import ControlStore, Log, LogAway, watcher
from megatron_ft.utils import shared_file
from megatron_ft.utils.auth import secret

STORE_KEY = "store_address"
"""The key of the store's address in the run directory's config.json."""
_STORE_TIMEOUT_S = 5.0
_LOOK_S = 0.05


def host_key(host: int) -> str:
    """Return the key of the host record of one of the first hosts: its name, and how its agent is reached."""
    return f"host/{host}"


def leave(run_dir: Path, group: int, why: str, patience_s: float) -> None:
    """Ask ``group`` to leave after the step it works on; returns when it has announced that it will.

    Raises ``LaunchError`` when there is no such run, or no such group in it, or it does not answer; ``StoreError``.
    """
    live = _live(run_dir)
    if group not in live:
        there = " ".join(map(str, live)) or "none yet"
        raise LaunchError(f"group {group} is not in the run; its groups are: {there}")
    tail = history.Tail(run_dir)
    _leaves(tail, group)
    watcher.announce(_store(run_dir), signals.LeaveRequested(group, why))
    deadline = time.monotonic() + patience_s
    while not (said := _leaves(tail, group)):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"group {group} was asked to leave and has not said anything for {patience_s:g} s; it does so between two "
                f"microbatches: see {run_dir}/logs/g{group}.p0.log"
            )
        time.sleep(_LOOK_S)
    print(f"group {group} leaves after step {said[-1]['after']}")


def stop(run_dir: Path, why: str) -> None:
    """Tell the whole run to stop; with checkpoints it saves once more first. Returns when it has been told.

    Raises ``LaunchError`` when there is no such run, or it does not train yet; ``StoreError``.
    """
    live = _live(run_dir)
    if not live:
        raise LaunchError(f"the run in {run_dir} has made no step yet; end its launchers")
    watcher.announce(_store(run_dir), Stops(tuple(live), why))


def _live(run_dir: Path) -> list[int]:
    """Return the groups of the newest view in the record; none before the first step."""
    if not (run_dir / "config.json").is_file():
        raise LaunchError(f"{run_dir} holds no run; give the --run-dir of a launch")
    recorded = run_state.read(run_dir)
    if recorded.over:
        raise LaunchError(f"the run in {run_dir} is over; no agent of it is left to ask")
    return list(recorded.live)


def store_address(run_dir: Path, run: Mapping[str, Any]) -> str:
    """Return the present address of a run's control store. ``run``: the content of its config.json.

    In a run that keeps a claim log, the log decides: the host that takes the store over may be lost before it has
    written to config.json. Raises ``LaunchError`` for a run whose store no client of this version can reach.
    """
    known = run[STORE_KEY]
    if "+own://" in known:
        raise LaunchError(
            f"the run in {run_dir} is of an earlier version and has started an etcd of its own; use that version, or end "
            f"its launchers and start it again from its checkpoint"
        )
    if not (run_dir / CLAIMS).is_dir():
        return known
    try:
        claims = Log(run_dir, run["run_id"], secret.load(run_dir)).read()
    except (LogAway, LaunchError):
        return known
    return claims[-1].address if claims else known


def write_store_address(run_dir: Path, address: str, say: Callable[[str], None]) -> None:
    """Write the store's new address for commands from outside: ``join``, ``stop``, ``leave``, the next supervisor."""
    path = run_dir / "config.json"
    try:
        raw = json.loads(shared_file.read_record(path))
        run_directory.write_config(run_dir, {**raw, STORE_KEY: address})
    except (OSError, ValueError) as error:
        say(f"{path} still has the store's old address: {error}")


def _store(run_dir: Path) -> ControlStore:
    try:
        run = json.loads(shared_file.read_record(run_dir / "config.json"))
        address = store_address(run_dir, run)
        store = ControlStore(address, run["run_id"], _STORE_TIMEOUT_S, secret=secret.load(run_dir))
    except (OSError, ValueError, KeyError) as error:
        raise LaunchError(f"{run_dir} holds no run ({error}); give the --run-dir of a launch") from None
    store.check_begun()
    return store


def _leaves(tail: history.Tail, group: int) -> list[dict]:
    """Return the leave records of that group since the last call."""
    return [line for line in tail.each() if line["event"] == "leave" and line["group"] == group]
