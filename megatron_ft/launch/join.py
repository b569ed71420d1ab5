"""A host that comes to a run that is there already: with groups of its own (the run grows), or idle, as a spare.

What there is to know says the run directory; which number the host gets, and which numbers its groups, says the control
store, so several may come at once. From then on it is a host like the others.

Failures it assumes: the run may be over, or its store away; then nothing is started, and the reason is said.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.config import EMBEDDED, OWN_ETCD, RunConfig
from megatron_ft.errors import ConfigError, LaunchError, StoreError
from megatron_ft.launch.addresses import local_address
from megatron_ft.launch.ask import STORE_KEY
from megatron_ft.launch.hosts import MEET_TIMEOUT_S, Place, announced_store, boot_store
from megatron_ft.launch.spare import start_key
from megatron_ft.runtime import history
from megatron_ft.runtime import store as store_module
from megatron_ft.runtime.store import ControlStore
from megatron_ft.types import GroupId

_STORE_TIMEOUT_S, _PROBE_S = 5.0, 2.0
_LOOK_S = 0.2
_ONLY_JOB = Place().job
FIRST = 1
"""The first start of a group that is added: 0 are those that have begun the run together."""


@dataclass(frozen=True)
class Running:
    """A run as its directory tells."""

    run_dir: Path
    run_id: str
    store: str
    job: str
    hosts: int
    host: str
    config: RunConfig
    command: tuple[str, ...]
    directory: Path
    """From where it was started: the command's paths are seen from there."""


@dataclass(frozen=True)
class Newcomer:
    """This host in that run. ``groups``: those it adds, none for a spare; ``cards``: how the first hosts are reached;
    ``claims``: what it has written on the control store, to be put back should that forget."""

    running: Running
    place: Place
    groups: tuple[GroupId, ...]
    cards: Mapping[int, Mapping[str, Any]]
    claims: Mapping[str, Any] = field(default_factory=dict)


def find(run_dir: Path, patience_s: float = 0.0, run_id: str | None = None) -> Running:
    """The run in that directory; with ``run_id``, that one, which may have to come yet. Raises ``LaunchError``."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = _read(run_dir)
            if run_id in (None, found.run_id):
                return found
            why = f"the run there is {found.run_id}, not {run_id}"
        except (OSError, ValueError, KeyError) as error:
            why = str(error)
        except ConfigError as error:
            raise LaunchError(f"{run_dir}/config.json: {error}; do all hosts have the same megatron_ft?") from None
        if time.monotonic() >= deadline:
            raise LaunchError(f"{run_dir} holds no run that could be joined ({why}); give the --run-dir of a launch")
        time.sleep(_LOOK_S)


def _read(run_dir: Path) -> Running:
    raw = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    own = {name: raw.pop(name) for name in ("run_id", STORE_KEY, "job", "hosts", "host", "command", "directory")}
    return Running(
        run_dir=run_dir.resolve(),
        run_id=own["run_id"],
        store=own[STORE_KEY],
        job=own["job"],
        hosts=own["hosts"],
        host=own["host"],
        config=RunConfig.from_json(raw),
        command=tuple(own["command"]),
        directory=Path(own["directory"]),
    )


def without_spares(hosts: int, rank: int, spares: int) -> tuple[int, bool]:
    """How many of the launch's hosts begin the run, and whether this one is a spare. Raises ``LaunchError``."""
    if not 0 <= spares < hosts or not 0 <= rank < hosts:
        raise LaunchError(
            f"--spare-hosts is {spares}, --hosts is {hosts} and --host-rank is {rank}; at least one host must not be spare, "
            f"and hosts are numbered from 0"
        )
    return hosts - spares, rank >= hosts - spares


def await_launch(run_dir: Path, store: str | None, job: str | None, config: RunConfig) -> Running:
    """The run that host 0 is about to begin, once its groups may be joined. Raises ``LaunchError`` if it does not."""
    setting = config.fault_tolerance.store
    if setting == OWN_ETCD:
        return _await_started(_await_own(run_dir, job or _ONLY_JOB))
    address = setting if setting != EMBEDDED else store
    if address is None:
        if job is None:
            raise LaunchError("--store is missing; a spare host needs HOST:PORT of host 0 as the others do, or --job-id")
        address = announced_store(run_dir, job)
    boot = boot_store(address, job or _ONLY_JOB, MEET_TIMEOUT_S)
    run = boot.wait("run", MEET_TIMEOUT_S)
    boot.close()
    if run is None:
        raise LaunchError(f"store {address}: host 0 has begun no run within {MEET_TIMEOUT_S:g} s; start it")
    return _await_started(find(run_dir, MEET_TIMEOUT_S, run["run_id"]))


def _await_own(run_dir: Path, job: str) -> Running:
    """That of a launch with an etcd of its own, which is known from the run directory only. What an earlier launch has left
    there has no store that answers."""
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while True:
        why = "the run there is that of another launch"
        try:
            running = find(run_dir)
            if running.job == job and running.store.startswith(store_module.OWN_ETCD):
                boot = boot_store(running.store, job, _PROBE_S)
                run = boot.get("run")
                boot.close()
                if run is not None and run["run_id"] == running.run_id:
                    return running
        except (LaunchError, StoreError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"host 0 has begun no run in {run_dir} within {MEET_TIMEOUT_S:g} s ({why}); start it, with the same "
                f"--job-id and a run directory that all hosts see"
            )
        time.sleep(_LOOK_S)


def _await_started(running: Running) -> Running:
    """Once its groups may be joined."""
    run_store = ControlStore(running.store, running.run_id, _STORE_TIMEOUT_S)
    for rank in range(running.hosts):
        run_store.wait(f"host/{rank}", MEET_TIMEOUT_S)  # who has not come by then is named by the hosts that wait for it
    run_store.close()
    return running


def ranks_here(newcomer: Newcomer) -> int:
    """How many this host is to run, at most."""
    config = newcomer.running.config
    added = len(newcomer.groups) * config.ranks_per_group
    return added or max(1, config.groups * config.ranks_per_group // newcomer.running.hosts)


def enter(running: Running, groups: int, address: str | None) -> Newcomer:
    """Numbers for this host and for so many new groups on it. Raises ``LaunchError`` when there is no room, or no run."""
    if any(line["event"] in ("end", "stop") for line in history.read(running.run_dir)):
        raise LaunchError(f"the run in {running.run_dir} is over; there is nothing to join")
    rejoin = running.config.fault_tolerance.rejoin
    if not rejoin.enabled:
        raise LaunchError(f"the run in {running.run_dir} has fault_tolerance.rejoin.enabled false: nobody can come to it")
    address = address or _own_address(running)
    store = ControlStore(running.store, running.run_id, _STORE_TIMEOUT_S)
    try:
        store.check_begun()
        cards = {rank: store.get(f"host/{rank}") for rank in range(running.hosts)}
        if None in cards.values():
            raise LaunchError(f"the run in {running.run_dir} is only just starting; try again when it has made a step")
        number, name = _claim_number(store, running.hosts)
        claims: dict[str, Any] = {name: socket.gethostname()}
        for group in range(running.config.groups, running.config.room):
            key = start_key(group, FIRST, 0)
            if len(claims) <= groups and store.create(key, number) == number:
                claims[key] = number
    except StoreError as error:
        raise LaunchError(f"the run in {running.run_dir} cannot be reached: {error}") from None
    finally:
        store.close()
    taken = tuple(int(key.split("/")[1].partition(".")[0]) for key in list(claims)[1:])
    if len(taken) < groups:
        raise LaunchError(
            f"there is room for {running.config.room} groups in this run (fault_tolerance.rejoin.max_groups), and no number "
            f"is left for {groups - len(taken)} of {groups} more; add fewer --groups, or start the run with more room"
        )
    place = Place(running.hosts, number, address, running.store, running.job)
    return Newcomer(running, place, taken, cards, claims)


def _claim_number(store: ControlStore, hosts: int) -> tuple[int, str]:
    number = hosts
    while not store.claim(f"late/{number}", socket.gethostname())[1]:
        number += 1
    return number, f"late/{number}"


def _own_address(running: Running) -> str:
    if running.config.fault_tolerance.store != EMBEDDED:
        first = running.store.partition("://")[2].split(",")[0]
        return local_address(first.rpartition(":")[0].strip("[]"))
    host = running.store.rpartition(":")[0].strip("[]")
    if _is_loopback(host) and running.host != socket.gethostname():
        raise LaunchError(
            f"the control store of that run is at {running.store}, which only {running.host} itself can reach; start a run "
            f"that other hosts may join with --address, the address of its host"
        )
    return local_address(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
