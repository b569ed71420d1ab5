"""``megatron-ft doctor``: what works on this machine, what is missing, and how to get it. It tries things, not versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

OK, MISSING, BROKEN = "ok", "missing", "broken"

_GLOO_TEST = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
x = torch.ones(1000)
dist.all_reduce(x)
assert float(x.sum()) == 2000.0
print("ok", flush=True)
os._exit(0)
"""
_GLOO_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One line. ``needed``: the main job does not run without it."""

    what: str
    state: str
    details: str
    remedy: str = ""
    needed: bool = False


def run_doctor(console: Console, as_json: bool = False) -> int:
    """Print the findings; returns 0 when everything the main job needs works, else 1."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        console.print(_table(findings))
    return 1 if any(finding.needed and finding.state != OK for finding in findings) else 0


def examine() -> list[Finding]:
    """All findings, in the order in which a reader wants them."""
    checks: list[Callable[[], list[Finding]]] = [_machine, _base, _torch, _gloo, _cuda, _engines, _extras, _slurm]
    return [finding for check in checks for finding in check()]


def _table(findings: list[Finding]) -> Table:
    table = Table(title="megatron-ft doctor", title_justify="left")
    for name in ("what", "state", "details", "how to get it"):
        table.add_column(name)
    colours = {OK: "green", MISSING: "yellow", BROKEN: "red"}
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(finding.what, state, finding.details, finding.remedy)
    return table


def _machine() -> list[Finding]:
    python = platform.python_version()
    good = sys.version_info >= (3, 11)
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        Finding("python", OK if good else BROKEN, python, "" if good else "Python 3.11 or newer", needed=True),
        Finding("machine", OK, f"{os.cpu_count()} cores, {memory:.0f} GiB, /dev/shm {shm:.1f} GiB free"),
    ]


def _base() -> list[Finding]:
    names = ("numpy", "scipy", "sentencepiece", "datasets", "matplotlib", "rich")
    return [_package(name, f"pip install {name}", needed=True) for name in names]


def _package(name: str, remedy: str, needed: bool = False, module: str | None = None) -> Finding:
    """Import it: an installed package that cannot be imported is broken."""
    if importlib.util.find_spec(module or name) is None:
        return Finding(name, MISSING, "", remedy, needed)
    try:
        importlib.import_module(module or name)
        return Finding(name, OK, importlib.metadata.version(name), "", needed)
    except Exception as error:  # whatever somebody else's package raises at import is the finding
        return Finding(name, BROKEN, f"{type(error).__name__}: {error}", f"reinstall: {remedy}", needed)


def _torch() -> list[Finding]:
    return [_package("torch", "pip install torch (CPU machines: a CPU wheel)", needed=True)]


def _gloo() -> list[Finding]:
    """Two real processes and an all-reduce between them over loopback."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("gloo", MISSING, "comes with torch", "install torch", needed=True)]
    with tempfile.TemporaryDirectory() as directory:
        outcomes = _all_reduce_between_two(f"{directory}/rendezvous")
    bad = [outcome for outcome in outcomes if outcome]
    if bad:
        return [Finding("gloo", BROKEN, bad[0], "check that loopback and GLOO_SOCKET_IFNAME are usable", needed=True)]
    return [Finding("gloo", OK, "two processes, all-reduce over loopback", needed=True)]


def _all_reduce_between_two(rendezvous: str) -> list[str]:
    """What went wrong in each process; empty strings when nothing did."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _GLOO_TEST, str(rank), rendezvous],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=_GLOO_DEADLINE_S)
            outcomes.append("" if output.strip() == "ok" else (errors.strip().splitlines() or ["no output"])[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            outcomes.append(f"no answer within {_GLOO_DEADLINE_S:g} s")
    return outcomes


def _cuda() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch
    import torch.distributed as dist

    findings = []
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        findings.append(Finding("CUDA", OK, f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"))
    else:
        findings.append(Finding("CUDA", MISSING, "no usable GPU; runs use the CPU", "a GPU, its driver, a CUDA torch"))
    if dist.is_nccl_available():
        findings.append(Finding("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version()))))
    else:
        findings.append(Finding("NCCL", MISSING, "this torch was built without it", "a CUDA build of torch"))
    return findings


def _engines() -> list[Finding]:
    later = "this version has no adapter for it"
    return [
        Finding("engine torch_native", OK, "plain PyTorch, groups of 1 rank, gloo"),
        Finding("engine deepspeed", MISSING, f"{later}; {_version('deepspeed')}"),
        Finding("engine megatron", MISSING, f"{later}; {_version('megatron-core')}"),
    ]


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)} is installed"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"


def _extras() -> list[Finding]:
    track = "pip install 'megatron_ft[track]'"
    return [_apex(), _package("tensorboard", track), _package("wandb", track)]


def _apex() -> Finding:
    """NVIDIA's apex has compiled optimizers; the package called apex on PyPI is something else."""
    remedy = "optional; build NVIDIA's from source: github.com/NVIDIA/apex (never `pip install apex`)"
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", MISSING, "torch's fused optimizers are used", remedy)
    if importlib.util.find_spec("amp_C") is None or importlib.util.find_spec("apex.optimizers") is None:
        return Finding("apex", BROKEN, "installed, but not NVIDIA's or without its CUDA extensions", remedy)
    return Finding("apex", OK, "NVIDIA's, with FusedAdam")


def _slurm() -> list[Finding]:
    found = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name)]
    if len(found) == 3:
        return [Finding("Slurm", OK, ", ".join(found))]
    return [Finding("Slurm", MISSING, f"found: {', '.join(found) or 'nothing'}", "only needed on a cluster")]
