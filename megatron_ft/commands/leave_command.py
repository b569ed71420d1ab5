"""The command ``megatron-ft leave``: a group of a live run leaves in order."""

from __future__ import annotations

import argparse
from pathlib import Path


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft leave``."""
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("group", type=int, help="its number")
    parser.add_argument("--why", default="asked by megatron-ft leave", metavar="TEXT", help="for the record")
    parser.add_argument(
        "--patience-s", type=float, default=600.0, metavar="S", help="how long its answer is waited for (default: 600)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Have the group leave. Returns the exit code; raises ``FTError``."""
    from megatron_ft.host import operator_requests

    operator_requests.leave(options.run_dir, options.group, options.why, options.patience_s)
    return 0
