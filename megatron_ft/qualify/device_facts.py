"""What one host has, as JSON on the standard output: ``python -m megatron_ft.qualify.device_facts``.

It runs in a process of its own, because asking CUDA makes a context, which the processes that are started later must not
inherit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.collectives import nccl_watchdog
from megatron_ft.errors import ConfigError

_SMI_S = 20.0


def facts() -> dict[str, Any]:
    """Return versions, GPUs, MIG slices, and the settings of NCCL's watchdog or the reason why they are refused."""
    cuda = torch.cuda.is_available()
    gpus = [_gpu(number) for number in range(torch.cuda.device_count())] if cuda else []
    try:
        added, refused = nccl_watchdog.environment(os.environ), ""
    except ConfigError as error:
        added, refused = {}, str(error)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": list(torch.cuda.nccl.version()) if cuda and dist.is_nccl_available() else [],
        "gpus": gpus,
        "mig": _slices() if gpus else [],
        "watchdog": added,
        "watchdog_refused": refused,
        "nccl_settings": {
            name: value for name, value in sorted(os.environ.items()) if "NCCL_" in name and name != "NCCL_PSK"
        },
    }


def _gpu(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
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


if __name__ == "__main__":
    print(json.dumps(facts()))
