"""The command ``megatron-ft join``: more groups for a live run, or a spare host."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ft.commands import launch_command
from megatron_ft.utils import lifeline


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft join``."""
    parser.add_argument("run_dir", type=Path, help="of the run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--groups", type=int, metavar="K", help="number of groups to add on this node")
    what.add_argument("--spare", action="store_true", help="wait for a host that is lost, and take its groups over")
    parser.add_argument("--address", metavar="ADDR", help="by which others reach this host (default: found)")
    parser.add_argument("--entered-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    launch_command.preload_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Join the run, until it ends. Returns the exit code; raises ``FTError``."""
    lifeline.ignore_save_signals()
    from megatron_ft.host import join

    return launch_command.join_as(options, join.find(options.run_dir), options.groups or 0, options.entered_fd)
