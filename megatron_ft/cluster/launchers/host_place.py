"""Finds the place of this host among several from a hostfile or from the launcher's environment.

The functions set the options ``hosts``, ``host_rank``, ``store``, ``job_id``, ``address`` and ``target``.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

from megatron_ft.cluster.launchers import detect, hostfile
from megatron_ft.config import launch_environment
from megatron_ft.config.schema import STORE_WORDS, RunConfig, store_setting
from megatron_ft.config.store_address import is_etcd
from megatron_ft.errors import LaunchError
from megatron_ft.utils import net, wait_notice
from megatron_ft.utils.console import say

MEET_TIMEOUT_S = 300.0
_NOTICE_S, _LOOK_S = 10.0, 1.0


def with_store(options: argparse.Namespace, run: RunConfig) -> RunConfig:
    """Moves ``--store embedded|etcd://...`` into the configuration; otherwise ``--store`` is an address.

    Raises ``ConfigError``.
    """
    if options.store not in STORE_WORDS and not is_etcd(options.store or ""):
        return run
    settings = replace(run.fault_tolerance, store=store_setting("--store", options.store))
    options.store = None
    return replace(run, fault_tolerance=settings)


def from_hostfile(options: argparse.Namespace, embedded: bool = True, by_file: bool = False) -> list[hostfile.Host]:
    """Reads the hostfile, and returns its hosts. Raises ``LaunchError`` when it lacks this host.

    ``embedded``: the hosts meet at a port of host 0; ``by_file``: or by a file, if there is no ``--port``.
    """
    path = options.hostfile
    if options.hosts is not None or options.store is not None:
        raise LaunchError("--hosts and --store cannot be combined with --hostfile; leave them out")
    found = hostfile.read(path)
    options.hosts = len(found)
    if options.host_rank is None:
        options.host_rank = hostfile.own_rank(path, found)
    if options.hosts > 1:
        if embedded and not options.port and not by_file:
            raise LaunchError(f"--port is missing; give a free port of {found[0].name}, where the hosts meet")
        if embedded and options.port:
            options.store = net.joined(found[0].address or found[0].name, options.port)
        if options.address is None and 0 <= options.host_rank < len(found):
            options.address = found[options.host_rank].address
        other = found[0 if options.host_rank else 1]
        options.target = other.address or other.name
    return found


def from_surroundings(options: argparse.Namespace, embedded: bool = True) -> None:
    """Does nothing without a launcher, and replaces no option that is given.

    ``embedded``: whether the hosts meet at a port of host 0. Raises ``LaunchError`` where the hosts cannot be told apart.
    """
    found = detect.find(os.environ)
    if found is None:
        return
    job = f", job {found.job}" if found.name == launch_environment.SRUN else ""
    say(f"host {found.host_rank} of {found.hosts} (found: {found.name}{job})")
    options.hosts, options.host_rank = found.hosts, found.host_rank
    options.target = detect.target(found, os.environ)
    options.job_id = options.job_id or found.job or None
    port = options.port or found.port
    if options.store is None and embedded and found.first is not None and port:
        options.store = net.joined(_first(found.first, found.host_rank, options.address), port)
    for name in detect.FOR_ITS_OWN_RANKS:
        os.environ.pop(name, None)


def _first(first: str, rank: int | None, address: str | None) -> str:
    """Returns the name of host 0, once it has an address: in Kubernetes a name may get it after its pods have begun."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return first
    if rank == 0 and first == "localhost":  # what older training operators tell the first pod
        return address or net.own_address(None)
    line = f"host {rank} waits for the address of {first}, the name of host 0"
    deadline = time.monotonic() + MEET_TIMEOUT_S
    with wait_notice.notices(lambda: line, _NOTICE_S):
        while not net.of(first) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    return first


def check_address(options: argparse.Namespace) -> None:
    """Raises ``LaunchError`` where this host does not find host 0, or no address of its own for the other hosts: before
    any process is started."""
    if (options.hosts or 1) == 1 or options.address is not None:
        return
    where = None if options.store is None else net.split(options.store)
    if where is not None:
        net.address_for(where[0], options.host_rank, options.target)
    elif options.host_rank == 0:
        net.own_address(options.target)


def check_rank(options: argparse.Namespace) -> None:
    """Raises ``LaunchError`` for several hosts without the number of this one: each would be host 0."""
    if (options.hosts or 1) > 1 and options.host_rank is None:
        raise LaunchError(
            f"--hosts is {options.hosts} and --host-rank is missing; give each host its own number, from 0 to "
            f"{options.hosts - 1}"
        )
