"""The command ``megatron-ft stop``: a live run saves and ends."""

from __future__ import annotations

import argparse
from pathlib import Path


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft stop``."""
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("--why", default="asked by megatron-ft stop", metavar="TEXT", help="for the record")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tell the run to stop. Returns the exit code; raises ``FTError``."""
    from megatron_ft.host import operator_requests

    operator_requests.stop(options.run_dir, options.why)
    return 0
