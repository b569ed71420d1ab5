"""Finds the place of this host among several from a hostfile or from the launcher's environment.

The functions set the options ``hosts``, ``host_rank``, ``store``, ``job_id``, ``address`` and ``target``.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from megatron_ft.agent.etcd import binary
from megatron_ft.config.schema import AUTO, EMBEDDED, OWN_ETCD, RunConfig, is_embedded
from megatron_ft.config.store_address import is_etcd
from megatron_ft.errors import LaunchError
from megatron_ft.launchers import detect, hostfile
from megatron_ft.utils import net
from megatron_ft.utils.console import say


def with_store(options: argparse.Namespace, run: RunConfig) -> RunConfig:
    """Moves ``--store auto|embedded|etcd|etcd://...`` into the configuration; otherwise ``--store`` is an address.

    Raises ``ConfigError``.
    """
    if options.store not in (AUTO, EMBEDDED, OWN_ETCD) and not is_etcd(options.store or ""):
        return run
    settings = replace(run.fault_tolerance, store=options.store)
    settings.check()
    options.store = None
    return replace(run, fault_tolerance=settings)


def from_hostfile(options: argparse.Namespace, run: RunConfig) -> None:
    """Reads the hostfile. Raises ``LaunchError`` when it does not fit the run or lacks this host."""
    path = options.hostfile
    if options.hosts is not None or options.store is not None:
        raise LaunchError("--hosts and --store cannot be combined with --hostfile; leave them out")
    found = hostfile.read(path)
    hostfile.check(path, found, run, options.spare_hosts)
    options.hosts = len(found)
    if options.host_rank is None:
        options.host_rank = hostfile.own_rank(path, found)
    if options.hosts > 1:
        embedded = is_embedded(run.fault_tolerance.store)
        if embedded and not options.port:
            raise LaunchError(f"--port is missing; give a free port of {found[0].name} for the control store")
        options.store = net.joined(found[0].address or found[0].name, options.port) if embedded else None
        if options.address is None and 0 <= options.host_rank < len(found):
            options.address = found[options.host_rank].address
        other = found[0 if options.host_rank else 1]
        options.target = other.address or other.name


def from_surroundings(options: argparse.Namespace) -> None:
    """Does nothing without a launcher. Raises ``LaunchError`` for several processes per host."""
    found = detect.find(os.environ)
    if found is None:
        return
    say(f"host {found.host_rank} of {found.hosts} (found: {found.what})")
    options.hosts, options.host_rank, options.target = found.hosts, found.host_rank, found.target
    options.job_id = options.job_id or found.job or None
    for name in detect.FOR_ITS_OWN_RANKS:
        os.environ.pop(name, None)


def check_store(options: argparse.Namespace, run: RunConfig) -> None:
    """Raises ``LaunchError`` when this host cannot run the configured control store."""
    if run.fault_tolerance.store == OWN_ETCD:
        binary.check(options.hosts or 1, options.host_rank or 0)
