"""Versions and hardware that should be equal on all hosts of a run."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

import megatron_ft
from megatron_ft.cluster.doctor.doctor_report import OK, Finding
from megatron_ft.utils import extras

NONE = "none"
NEEDED = frozenset({"python", "torch", "megatron_ft", "NCCL", "GPUs"})
"""Hosts that differ in one of these cannot take part in one run; a difference in the others is a warning."""
_DRIVER = Path("/sys/module/nvidia/version")


def here(findings: Sequence[Finding]) -> dict[str, str]:
    """Returns name -> version for this host; NCCL and GPUs are taken from its local ``findings``."""
    found = {finding.what: finding.details for finding in findings if finding.state == OK}
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "megatron_ft": f"{megatron_ft.__version__}, code {_digest(Path(megatron_ft.__file__).parent)}",
        **{name: extras.version(name) for name in ("torch", "numpy", "deepspeed")},
        "NCCL": found.get("NCCL", NONE),
        "GPUs": found.get("CUDA", NONE),
        "NVIDIA driver": _driver(),
    }


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        return NONE


def _digest(directory: Path) -> str:
    """Returns a digest of the source code: two checkouts can have the same version number."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
