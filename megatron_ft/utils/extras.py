"""Libraries that only some parts need: each belongs to an extra of the package (pyproject.toml)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ft.errors import ConfigError

EXTRAS = {
    "accelerate": "hf",
    "datasets": "data",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "networkx": "train",
    "numba": "exact",
    "ortools": "train",
    "pyarrow": "data",
    "safetensors": "train",
    "sentencepiece": "data",
    "tokenizers": "data",
    "torch": "train",
    "transformers": "hf",
    "yaml": "yaml",
}
"""The extra that installs a module."""


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'megatron_ft[{extra}]'"


def version(package: str, without: str = "none") -> str:
    """Return the version that pip has installed, without importing the package; ``without`` when there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return without


@contextmanager
def needed() -> Iterator[None]:
    """Raise ``ConfigError`` with the command that installs it when a module of ``EXTRAS`` is missing in the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise ConfigError(f"{module} is not installed here; run: {install(EXTRAS[module])}") from None
