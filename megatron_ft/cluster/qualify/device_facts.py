"""What one host has, for the document of a qualification."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess

from megatron_ft.cluster.doctor import local
from megatron_ft.cluster.doctor.meeting import Message
from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives import nccl_watchdog

_SMI_S = 20.0


def facts() -> Message:
    """Return versions, GPUs, MIG slices, and the settings of NCCL's watchdog or the reason why they are refused; only
    ``failed`` where torch does not work."""
    found, trouble = local.torch_facts()
    if trouble:
        return {"failed": trouble}
    try:
        added, refused = nccl_watchdog.environment(os.environ), ""
    except ConfigError as error:
        added, refused = {}, str(error)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **found,
        "mig": _slices() if found["gpus"] else [],
        "watchdog": added,
        "watchdog_refused": refused,
        "nccl_settings": {
            name: value for name, value in sorted(os.environ.items()) if "NCCL_" in name and name != "NCCL_PSK"
        },
    }


def _slices() -> list[str]:
    """Return the names of the MIG slices, by which CUDA_VISIBLE_DEVICES selects them."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_S).stdout
    except subprocess.TimeoutExpired:
        return []
    return slices_in(said)


def slices_in(listed: str) -> list[str]:
    """Return the MIG slices in what ``nvidia-smi -L`` prints."""
    return re.findall(r"UUID: (MIG-[0-9a-zA-Z/-]+)\)", listed)
