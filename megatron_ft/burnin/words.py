"""The options of ``megatron-ft burn-in``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add(parser: argparse.ArgumentParser, act: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--faults", type=int, default=8, metavar="N", help="how many (default: 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is drawn (default: 0)")
    parser.add_argument("--every-s", type=float, default=30.0, metavar="S", help="mean time between them (default: 30)")
    parser.add_argument("--kinds", type=_names, help="default: rank,agent,step,freeze; also: down")
    parser.add_argument("--freeze-s", type=float, default=5.0, metavar="S", help="how long a node is frozen (default: 5)")
    parser.add_argument("--patience-s", type=float, default=120.0, metavar="S", help="until all are back (default: 120)")
    parser.add_argument("--reference", type=Path, metavar="RUN_DIR", help="a failure-free run, to compare the losses with")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help="launch and its options, without those of hosts")
    parser.set_defaults(run=act)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
