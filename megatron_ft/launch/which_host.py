"""Which of several hosts this is, where the command's options do not say it: a hostfile does, or what has started it.

Both put what they find in place of the options ``hosts``, ``host_rank``, ``store`` and ``job_id``.
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_ft.config import EMBEDDED, RunConfig
from megatron_ft.errors import LaunchError
from megatron_ft.launch import addresses, hostfile, surroundings


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
