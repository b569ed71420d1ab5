"""What has to be the same on all hosts: versions, and what kind of machine it is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

import megatron_ft
from megatron_ft.doctor.local import OK, Finding

NONE = "none"
NEEDED = frozenset({"python", "torch", "megatron_ft", "NCCL", "GPUs"})
"""Hosts that differ in these do not make a run together; in others they may."""
_DRIVER = Path("/sys/module/nvidia/version")


def here(findings: Sequence[Finding]) -> dict[str, str]:
    """Of this host; ``findings`` are its own."""
    found = {finding.what: finding.details for finding in findings if finding.state == OK}
    own = f"{megatron_ft.__version__}, code {_digest(Path(megatron_ft.__file__).parent)}"
    packages = {name: _package(name) for name in ("torch", "numpy", "deepspeed")}
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "megatron_ft": own,
        **packages,
        "NCCL": found.get("NCCL", NONE),
        "GPUs": found.get("CUDA", NONE),
        "NVIDIA driver": _driver(),
    }


def _package(name: str) -> str:
    """Not imported: that it can be is another finding."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NONE


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        return NONE


def _digest(directory: Path) -> str:
    """Of the code: two checkouts can have one version."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
