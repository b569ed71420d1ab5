"""How the first hosts of a launch find each other where there is no store yet: through the run directory they share.

Host 0 writes a card there with a random token. Each other host answers with a card that repeats the token; when all are
there, host 0 writes a list of them. A host goes on when it finds its own card in that list. So files of an earlier
launch are ignored, even if that launch had the same name: no other host has answered with these cards.

Failures it assumes: files of earlier launches, in any state; hosts that come late or never; files seen late by other hosts.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.errors import LaunchError
from megatron_ft.runlog import run_directory
from megatron_ft.utils import atomic_file

_ALL = "all.json"
_LOOK_S = 0.1


def first_address(run_dir: Path, timeout_s: float) -> str:
    """Return host 0's address, by which a host finds its own; it may be an earlier launch's. Raises ``LaunchError``."""
    deadline = time.monotonic() + timeout_s
    while (found := _read(_card(run_dir, 0))) is None:
        if time.monotonic() > deadline:
            raise LaunchError(_absent(0, run_dir, timeout_s))
        time.sleep(_LOOK_S)
    return str(found["address"])


def meet(run_dir: Path, rank: int, hosts: int, card: Mapping[str, Any], timeout_s: float) -> dict[int, dict[str, Any]]:
    """Return the cards of all hosts of this launch, once they have come. ``card`` must have this host's ``address``.

    Raises ``LaunchError`` naming a host that has not come.
    """
    deadline = time.monotonic() + timeout_s
    own = {**card, "nonce": uuid.uuid4().hex}
    if rank == 0:
        return _gather(run_dir, hosts, {**own, "token": own["nonce"]}, deadline, timeout_s)
    while True:
        first, said = _read(_card(run_dir, 0)), _read(run_dir / run_directory.ETCD / _ALL)
        if first is not None and own.get("token") != first["token"]:
            answer = {**own, "token": first["token"]}
            with contextlib.suppress(FileNotFoundError):  # host 0 is moving an earlier launch's away
                atomic_file.write_json(_card(run_dir, rank), answer)
                own = answer
        if said is not None and said["cards"].get(str(rank)) == own:
            return {int(number): other for number, other in said["cards"].items()}
        if time.monotonic() > deadline:
            who = 0 if first is None else None
            raise LaunchError(_absent(who, run_dir, timeout_s))
        time.sleep(_LOOK_S)


def _gather(
    run_dir: Path, hosts: int, own: Mapping[str, Any], deadline: float, timeout_s: float
) -> dict[int, dict[str, Any]]:
    (run_dir / run_directory.ETCD).mkdir(exist_ok=True)
    (run_dir / run_directory.ETCD / _ALL).unlink(missing_ok=True)
    atomic_file.write_json(_card(run_dir, 0), own)
    cards = {0: dict(own)}
    while True:
        for rank in range(1, hosts):
            found = None if rank in cards else _read(_card(run_dir, rank))
            if found is not None and found.get("token") == own["token"]:
                cards[rank] = found
        if len(cards) == hosts:
            atomic_file.write_json(run_dir / run_directory.ETCD / _ALL, {"cards": cards})
            return cards
        if time.monotonic() > deadline:
            raise LaunchError(_absent(next(rank for rank in range(hosts) if rank not in cards), run_dir, timeout_s))
        time.sleep(_LOOK_S)


def _absent(rank: int | None, run_dir: Path, timeout_s: float) -> str:
    who = "another host of this launch" if rank is None else f"host {rank}"
    return (
        f"{who} has not come to {run_dir} within {timeout_s:g} s; start the launcher there, with the same config and a run "
        f"directory that all hosts see"
    )


def _card(run_dir: Path, rank: int) -> Path:
    return run_dir / run_directory.ETCD / f"{rank}.json"


def _read(path: Path) -> dict[str, Any] | None:
    found = atomic_file.read_json(path)
    return found if isinstance(found, dict) else None
