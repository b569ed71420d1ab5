"""A host that joins an existing run: with groups of its own (the run grows), or without ranks, as a spare.

The run directory describes the run; the control store gives numbers to the host and its groups, so several hosts may
come at once. After that it is a host like the others.

Failures it assumes: the run may be over, or its store away; then nothing is started, and the reason is reported.
"""

from __future__ import annotations

import json
import os
import pwd
import shlex
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ft.config.schema import RunConfig
from megatron_ft.config.store_address import EtcdAddress, is_etcd
from megatron_ft.errors import ConfigError, LaunchError, StoreError
from megatron_ft.host.operator_requests import STORE_KEY, host_key, store_address
from megatron_ft.host.peers import MEET_TIMEOUT_S, Place
from megatron_ft.host.spare_host import start_key
from megatron_ft.record import run_state
from megatron_ft.run.store import ControlStore
from megatron_ft.types import GroupId
from megatron_ft.utils import net, wait_notice
from megatron_ft.utils.auth import secret
from megatron_ft.utils.console import say
from megatron_ft.utils.net import local_address

_STORE_TIMEOUT_S, _PROBE_S = 5.0, 2.0
_LOOK_S = 0.2
_MOVES_S = 10.0
"""Seconds to ask a control store that does not answer: it may be about to be taken over by another host."""
_ONLY_JOB = Place().job
FIRST = 1
"""The first start of a group that is added; start 0 is that of groups that have begun the run together."""


@dataclass(frozen=True)
class Running:
    """A run as its directory describes it.

    Attributes:
        store: address of the control store.
        job: name of the launch.
        hosts: number of hosts that began the run; ``host`` is the name of the first.
        command: the training script and its arguments.
    """

    run_dir: Path
    run_id: str
    store: str
    job: str
    hosts: int
    host: str
    config: RunConfig
    command: tuple[str, ...]
    directory: Path
    """The directory where it was started: the command's paths are relative to it."""
    owner: int
    """User id of the owner of the file that names the command."""
    writers: str = ""
    """The users other than its owner that may write to that file, as the letters of ``chmod``: "g", "o", "go" or none."""

    def open(self, timeout_s: float = _STORE_TIMEOUT_S) -> ControlStore:
        """Return a client of its control store at the address known when this was read. Raises ``StoreError``, and
        ``LaunchError`` for the run of another user."""
        return ControlStore(self.store, self.run_id, timeout_s, secret=secret.load(self.run_dir))


@dataclass(frozen=True)
class Newcomer:
    """This host in that run. ``groups``: the groups it adds, none for a spare; ``host_records``: addresses of the first
    hosts; ``claims``: the keys it has written on the control store, to be put back if the store forgets."""

    running: Running
    place: Place
    groups: tuple[GroupId, ...]
    host_records: Mapping[int, Mapping[str, Any]]
    claims: Mapping[str, Any] = field(default_factory=dict)


def find(run_dir: Path, patience_s: float = 0.0, run_id: str | None = None) -> Running:
    """Return the run in that directory, within ``patience_s``; with ``run_id``, only that run. Raises ``LaunchError``."""
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
    with (run_dir / "config.json").open(encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        raw = json.load(file)
    store = store_address(run_dir, raw)
    del raw[STORE_KEY]
    command, directory = tuple(raw.pop("command")), Path(raw.pop("directory"))
    own = {name: raw.pop(name) for name in ("run_id", "job", "hosts", "host")}
    return Running(
        run_dir=run_dir.resolve(),
        store=store,
        config=RunConfig.from_json(raw),
        command=command,
        directory=directory,
        owner=status.st_uid,
        writers="g" * bool(status.st_mode & stat.S_IWGRP) + "o" * bool(status.st_mode & stat.S_IWOTH),
        **own,
    )


def check_owner(running: Running, user: int) -> None:
    """Refuse to run, as ``user``, another user's command. root's commands are trusted, and root is only warned.

    Raises ``LaunchError``.
    """
    path = running.run_dir / "config.json"
    if running.writers:
        whose = "every user" if "o" in running.writers else "every user of its group"
        raise LaunchError(
            f"{whose} may write to {path}, and its command would run as you; look at it, then run chmod "
            f"{running.writers}-w {shlex.quote(str(path))}"
        )
    if running.owner in (user, 0):
        return
    whose = f"{path} belongs to user {_name_of(running.owner)}, and its command would run as {_name_of(user)}"
    if user != 0:
        raise LaunchError(f"{whose}; join as the user who has started the run")
    say(f"warning: {whose}: {' '.join(running.command)}")


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def without_spares(hosts: int, rank: int, spares: int) -> tuple[int, bool]:
    """Return how many of the launch's hosts begin the run, and whether this one is a spare. Raises ``LaunchError``."""
    if not 0 <= spares < hosts or not 0 <= rank < hosts:
        raise LaunchError(
            f"--spare-hosts is {spares}, --hosts is {hosts} and --host-rank is {rank}; at least one host must not be spare, "
            f"and hosts are numbered from 0"
        )
    return hosts - spares, rank >= hosts - spares


def await_launch(run_dir: Path, store: str | None, job: str | None, config: RunConfig) -> Running:
    """Return the run that host 0 is about to begin, or has begun, once its groups may be joined. Raises ``LaunchError``
    if it does not begin."""
    etcd = is_etcd(config.fault_tolerance.store)
    if not etcd and store is None and job is None:
        raise LaunchError("--store is missing; a spare host needs HOST:PORT of host 0 as the others do, or --job-id")
    awaited = ["host 0 to begin the run"]
    line = lambda: f"this spare host waits for {awaited[-1]} in {run_dir}"  # noqa: E731
    with wait_notice.notices(line, config.fault_tolerance.detector.stall_notice_s):
        return _begun(run_dir, job or _ONLY_JOB, etcd, awaited.append)


def _begun(run_dir: Path, job: str, etcd: bool, awaits: Callable[[str], None]) -> Running:
    """Return the run of that launch once its groups may be joined; ``awaits`` is told which host has not come.

    The store of an earlier launch's run does not answer. The control store may move to another host at any moment, so
    each wait there is no longer than a probe.
    """
    found, deadline = "", time.monotonic() + MEET_TIMEOUT_S
    while True:
        why = "the run there is that of another launch"
        try:
            running = find(run_dir)
            if running.job == job and is_etcd(running.store) == etcd:
                store = running.open(_PROBE_S)
                try:
                    store.check_begun()
                    if found != running.run_id:
                        found, deadline = running.run_id, time.monotonic() + MEET_TIMEOUT_S
                    absent = (rank for rank in range(running.hosts) if store.wait(host_key(rank), _PROBE_S) is None)
                    if (host := next(absent, None)) is None:
                        return running
                    awaits(f"host {host} of the run")
                finally:
                    store.close()
                if time.monotonic() > deadline:
                    return running  # the hosts that wait for a missing host name it
        except (LaunchError, StoreError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"host 0 has begun no run in {run_dir} within {MEET_TIMEOUT_S:g} s ({why}); start it, with the same "
                f"--job-id and a run directory that all hosts see"
            )
        time.sleep(_LOOK_S)


def ranks_here(newcomer: Newcomer) -> int:
    """Return the largest number of ranks this host is to run."""
    config = newcomer.running.config
    added = len(newcomer.groups) * config.ranks_per_group
    return added or max(1, config.groups * config.ranks_per_group // newcomer.running.hosts)


def enter(running: Running, groups: int, address: str | None) -> Newcomer:
    """Take numbers for this host and for ``groups`` new groups on it. Raises ``LaunchError`` when there is no room, or
    no run, and ``StoreError`` when its store does not answer: another exit code, as the run may be about to restart."""
    check_owner(running, os.geteuid())
    if run_state.read(running.run_dir).over:
        raise LaunchError(f"the run in {running.run_dir} is over; there is nothing to join")
    rejoin = running.config.fault_tolerance.rejoin
    if not rejoin.enabled:
        raise LaunchError(
            f"the run in {running.run_dir} has fault_tolerance.rejoin.enabled false: no group can join it"
        )
    deadline = time.monotonic() + _MOVES_S
    while True:
        try:
            return _numbered(running, groups, address or _own_address(running))
        except StoreError as error:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the run in {running.run_dir} cannot be joined since {_MOVES_S:g} s: {error}"
                ) from None
            time.sleep(_LOOK_S)
        running = find(running.run_dir, run_id=running.run_id)  # it names the store's present address


def _numbered(running: Running, groups: int, address: str) -> Newcomer:
    """Return the same as :func:`enter`. Raises ``StoreError`` when the store does not answer, also half way."""
    store = running.open(_PROBE_S)
    try:
        store.check_begun()
        host_records: dict[int, Any] = {rank: store.get(host_key(rank)) for rank in range(running.hosts)}
        if None in host_records.values():
            raise StoreError("it is only just starting; try again when it has made a step")
        number = running.hosts
        while not store.claim(number_key(number), socket.gethostname())[1]:
            number += 1
        claims: dict[str, Any] = {number_key(number): socket.gethostname()}
        for group in range(running.config.groups, running.config.max_groups):
            key = start_key(group, FIRST, 0)
            if len(claims) <= groups and store.create(key, number) == number:
                claims[key] = number
    finally:
        store.close()
    taken = tuple(int(key.split("/")[1].partition(".")[0]) for key in list(claims)[1:])
    if len(taken) < groups:
        raise LaunchError(
            f"there is room for {running.config.max_groups} groups in this run (fault_tolerance.rejoin.max_groups), and no "
            f"number is left for {groups - len(taken)} of {groups} more; add fewer --groups, or start the run with more room"
        )
    place = Place(running.hosts, number, address, running.store, running.job)
    return Newcomer(running, place, taken, host_records, claims)


def number_key(host: int) -> str:
    """Return the key by which a later host claims that number."""
    return f"late/{host}"


def _own_address(running: Running) -> str:
    if is_etcd(running.store):
        return net.address_for(EtcdAddress.parse(running.store).endpoints[0][0], 0)
    host = running.store.rpartition(":")[0].strip("[]")
    if net.names_this_machine(host) and running.host != socket.gethostname():
        raise LaunchError(
            f"the control store of that run is at {running.store}, which only {running.host} itself can reach; start a run "
            f"that other hosts may join with --address, the address of its host"
        )
    return local_address(host)
