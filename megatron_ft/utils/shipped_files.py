"""The documents, examples and sbatch files that are installed with the package (setup.py)."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from megatron_ft.errors import LaunchError

NAMES = ("docs", "examples", "slurm")
_PACKAGE = Path(__file__).parents[1]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft examples``."""
    parser.add_argument("--copy", type=Path, metavar="DIR", help="write all of them into this new directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List or copy the files. Returns the exit code; raises ``LaunchError``."""
    if options.copy is None:
        print(listed())
    else:
        copy(options.copy)
        print(f"{options.copy} has {', '.join(NAMES)}; read {options.copy}/examples/README.md first")
    return 0


def root() -> Path:
    """Return the directory that has ``NAMES``: in the installed package, or the checkout."""
    shipped = _PACKAGE / "shipped"
    return shipped if shipped.is_dir() else _PACKAGE.parent


def listed() -> str:
    """Return what there is, and how to get it."""
    text = (root() / "examples" / "README.md").read_text(encoding="utf-8").rstrip()
    return f"{text}\n\nThese files are in {root()}; megatron-ft examples --copy DIR writes them into a new directory."


def copy(directory: Path) -> None:
    """Write all files into a new or empty directory.

    Raises:
        LaunchError: the directory is not empty, or is a file.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise LaunchError(f"{directory} exists already and is not an empty directory; name a new one")
    for name in NAMES:
        shutil.copytree(root() / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "site.env"))
