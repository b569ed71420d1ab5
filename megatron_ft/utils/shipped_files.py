"""The documents, examples and sbatch files that are installed with the package (setup.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_ft.errors import LaunchError

NAMES = ("docs", "examples", "slurm")
_PACKAGE = Path(__file__).parents[1]


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
