"""Which of several hosts this is, where the command's options do not say it: a hostfile does, or what has started it.

Both put what they find in place of the options ``hosts``, ``host_rank``, ``store`` and ``job_id``.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from megatron_ft.config import EMBEDDED, ETCD, OWN_ETCD, RunConfig
from megatron_ft.errors import LaunchError
from megatron_ft.launch import addresses, etcd_binary, hostfile, surroundings


def with_store(options: argparse.Namespace, run: RunConfig) -> RunConfig:
    """The run with the store of ``--store etcd`` or ``--store etcd://...``, which then is no address any more. Raises
    ``ConfigError``."""
    if options.store != OWN_ETCD and not (options.store or "").startswith(ETCD):
        return run
    settings = replace(run.fault_tolerance, store=options.store)
    settings.check()
    options.store = None
    return replace(run, fault_tolerance=settings)


def from_hostfile(options: argparse.Namespace, run: RunConfig) -> None:
    """Raises ``LaunchError`` for a file that does not fit the run, or this host."""
    path = options.hostfile
    if options.hosts is not None or options.store is not None:
        raise LaunchError("--hostfile says what --hosts and --store say; leave these out")
    found = hostfile.read(path)
    hostfile.check(path, found, run, options.spare_hosts)
    options.hosts = len(found)
    if options.host_rank is None:
        options.host_rank = hostfile.own_rank(path, found)
    if options.hosts > 1:
        embedded = run.fault_tolerance.store == EMBEDDED
        if embedded and not options.port:
            raise LaunchError(f"--port is missing; it is a free port of {found[0].name}, for the control store")
        options.store = addresses.joined(found[0].address or found[0].name, options.port) if embedded else None
        if options.address is None and 0 <= options.host_rank < len(found):
            options.address = found[options.host_rank].address
        other = found[0 if options.host_rank else 1]
        options.target = other.address or other.name


def from_surroundings(options: argparse.Namespace) -> None:
    """Raises ``LaunchError`` for several processes on a host; does nothing where nothing is found."""
    found = surroundings.find(os.environ)
    if found is None:
        return
    said = f"megatron_ft: host {found.host_rank} of {found.hosts} (found: {found.what})"
    print(said, file=sys.stderr, flush=True)
    options.hosts, options.host_rank, options.target = found.hosts, found.host_rank, found.target
    options.job_id = options.job_id or found.job or None
    for name in surroundings.FOR_ITS_OWN_RANKS:
        os.environ.pop(name, None)


def check_store(options: argparse.Namespace, run: RunConfig) -> None:
    """Whether the run can have the store it asks for: before anything is started. Raises ``LaunchError``."""
    if run.fault_tolerance.store == OWN_ETCD:
        etcd_binary.check(options.hosts or 1, options.host_rank or 0)
