"""Shared by the benchmarks: where raw results go, and what they say about the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def about(name: str, command: str) -> dict[str, Any]:
    """What a result says of itself: which benchmark, by which command, when, of which commit, on which machine."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return {
        "benchmark": name,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def save(name: str, result: dict) -> Path:
    """Write the raw numbers with machine, commit and command; returns the path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    path = RESULTS / f"{name}.json"
    text = json.dumps({**about(name, command), **result}, indent=1)
    # A list of numbers goes on one line: there can be thousands in it.
    path.write_text(re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: " ".join(found[0].split()), text) + "\n")
    return path


def prepare_data(out: Path) -> Path:
    """The default corpus, once."""
    subprocess.run(
        [sys.executable, "-m", "megatron_ft.cli", "prepare", "--out", str(out)], check=True, cwd=ROOT, stdout=sys.stderr
    )
    return out


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"
