"""Shared by the benchmarks: where raw results go, and what they say about the machine."""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.utils.process_status import process_status

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def give_secret() -> None:
    """Give this process a secret. Parts of a run that are measured by themselves have no launcher that would give them
    one."""
    os.environ.setdefault("MEGATRON_FT_SECRET", "a-benchmark-keeps-nothing-secret")


def about(name: str, command: str) -> dict[str, Any]:
    """Return the metadata of a result: the benchmark, its command, the time, the commit, the machine, and the paths of
    the repository on which the result depends. ``dirty``: tracked files that differed from the commit, without results.
    """
    import torch

    sys.path.insert(0, str(Path(__file__).parent))  # the tests that measure call this function, too
    import evidence

    return {
        "benchmark": name,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "dirty": dirty(ROOT),
        "depends_on": evidence.depends_on(name),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def commit() -> str:
    """Return the present commit."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def dirty(root: Path) -> list[str]:
    """Return the tracked files with changes that are not committed, but for results and documents, which are written to by
    benchmarks."""
    words = ["git", "diff", "--name-only", "HEAD", "--", ".", f":!{RESULTS.relative_to(ROOT)}", ":!docs"]
    return subprocess.run(words, capture_output=True, text=True, cwd=root).stdout.split()


def save(name: str, result: dict) -> Path:
    """Write the raw numbers with machine, commit and command; returns the path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    path = RESULTS / f"{name}.json"
    text = json.dumps({**about(name, command), **result}, indent=1)
    # A list of numbers goes on one line: it can have thousands of elements.
    path.write_text(re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: " ".join(found[0].split()), text) + "\n")
    return path


def prepare_data(out: Path) -> Path:
    """Prepare the default corpus, once."""
    subprocess.run(
        [sys.executable, "-m", "megatron_ft.cli", "prepare", "--out", str(out)], check=True, cwd=ROOT, stdout=sys.stderr
    )
    return out


def launch(groups: int, config: Path, run_dir: Path, *job: object) -> list[str]:
    """Return the command that launches a run; ``job``: more options, the script and its arguments."""
    words = ["--groups", groups, "--config", config, "--run-dir", run_dir, *job]
    return [sys.executable, "-m", "megatron_ft.cli", "launch", *map(str, words)]


def environment() -> dict[str, str]:
    """Return the environment of a run whose ranks have a thread each and can import what is here."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}


def storages(gradients: bool = False) -> dict[int, int]:
    """Return the bytes of all storages of tensors, by address; with ``gradients`` also of those that only a tensor refers
    to."""
    import torch

    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    if gradients:
        tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    local = [(one.to_local() if hasattr(one, "to_local") else one).untyped_storage() for one in tensors]
    return {one.data_ptr(): one.nbytes() for one in local}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def cpu_s(pid: int) -> float:
    return process_status(pid).cpu_ticks / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Callable[[], object], within_s: float, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s:g} s; is this machine busy?")
        time.sleep(every_s)


def of(lines: list[dict], event: str) -> list[dict]:
    return [line for line in lines if line["event"] == event]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"
