"""``megatron-ft doctor`` on one machine: what works, what is missing, how to get it. It tries things, not versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_ft.core.pairs import rate
from megatron_ft.doctor import disk
from megatron_ft.launch import etcd_binary

OK, WARN, MISSING, BROKEN = "ok", "warn", "missing", "broken"
COLOURS = {OK: "green", WARN: "yellow", MISSING: "yellow", BROKEN: "red"}

_GLOO_TEST = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
x = torch.ones(1000)
dist.all_reduce(x)
assert float(x.sum()) == 2000.0
print("ok", flush=True)
os._exit(0)
"""
_GLOO_DEADLINE_S = 120.0
"""With the import of torch, which takes a minute where its files are not in memory yet."""
_IMPORT_DEADLINE_S = 120.0
_TORCH_FACTS = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps({
    "version": torch.__version__,
    "built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
    "threads": torch.get_num_threads(),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and nccl else "",
    "built_with_nccl": nccl,
}))
"""


@dataclass(frozen=True)
class Finding:
    """One line. ``needed``: the main job does not run without it."""

    what: str
    state: str
    details: str
    remedy: str = ""
    needed: bool = False


def run_doctor(console: Console, as_json: bool = False, directory: Path | None = None) -> int:
    """Print the findings; returns 0 when everything the main job needs works, else 1. ``directory``: to be tried, too."""
    findings = [*examine(), *([] if directory is None else [_directory(directory)])]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1), file=console.file)
    else:
        console.print(_table(findings))
    return 1 if any(finding.needed and finding.state != OK for finding in findings) else 0


def examine() -> list[Finding]:
    """All findings, in the order in which a reader wants them."""
    checks: list[Callable[[], list[Finding]]] = [_machine, _torch, _gloo, _base, _engines, _extras, _etcd, _slurm]
    return [finding for check in checks for finding in check()]


def _table(findings: list[Finding]) -> Table:
    table = Table(title="megatron-ft doctor", title_justify="left")
    for name in ("what", "state", "details", "how to get it"):
        table.add_column(name)
    for finding in findings:
        state = f"[{COLOURS[finding.state]}]{finding.state}[/]"
        table.add_row(finding.what, state, escape(finding.details), escape(finding.remedy))
    return table


def _machine() -> list[Finding]:
    python = platform.python_version()
    good = sys.version_info >= (3, 11)
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        Finding("python", OK if good else BROKEN, python, "" if good else "Python 3.11 or newer", needed=True),
        Finding("machine", OK, f"{os.cpu_count()} cores, {memory:.0f} GiB, /dev/shm {shm:.1f} GiB free"),
        _clock(),
    ]


def _clock() -> Finding:
    """Whether the kernel calls the wall clock synchronised: with several hosts, the record's times are compared."""
    details = f"monotonic resolution {time.get_clock_info('monotonic').resolution:g} s"
    ask = getattr(ctypes.CDLL(None), "ntp_gettime", None)
    if ask is None:
        return Finding("clock", OK, f"{details}; this system does not say whether it is synchronised")
    unsynchronised = 5  # TIME_ERROR of <sys/timex.h>; the buffer is larger than the struct it fills
    if ask(ctypes.create_string_buffer(256)) in (unsynchronised, -1):
        return Finding("clock", MISSING, f"{details}; not synchronised", "chrony or ntpd; only with several hosts")
    return Finding("clock", OK, f"{details}; synchronised")


def _base() -> list[Finding]:
    names = ("numpy", "scipy", "sentencepiece", "datasets", "matplotlib", "rich")
    return [_package(name, f"pip install {name}", needed=True) for name in names]


def _package(name: str, remedy: str, needed: bool = False, module: str | None = None) -> Finding:
    """Import it: an installed package that cannot be imported is broken."""
    module = module or name
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return Finding(name, MISSING, "", remedy, needed)
    _, trouble = _try(f"import {module}")
    if trouble:
        return Finding(name, BROKEN, trouble, f"reinstall: {remedy}", needed)
    return Finding(name, OK, _version(name), "", needed)


def _try(code: str) -> tuple[str, str]:
    """Run it in a process of its own: (output, what went wrong or ""). Compiled packages can crash or hang."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_IMPORT_DEADLINE_S:g} s"
    if done.returncode == 0:
        return done.stdout, ""
    return "", (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def _version(name: str) -> str:
    """The installed version; empty for a package that was not installed by pip."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch() -> list[Finding]:
    """torch itself, and what it says about GPUs."""
    remedy = "pip install torch (CPU machines: a CPU wheel)"
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", MISSING, "", remedy, needed=True)]
    output, trouble = _try(_TORCH_FACTS)
    if trouble:
        return [Finding("torch", BROKEN, trouble, f"reinstall: {remedy}", needed=True)]
    facts = json.loads(output.splitlines()[-1])
    details = f"{facts['version']}, built for {facts['built_for']}, {facts['threads']} threads"
    return [Finding("torch", OK, details, needed=True), _cuda(facts), _nccl(facts)]


def _cuda(facts: dict[str, Any]) -> Finding:
    devices = facts["devices"]
    if not devices:
        return Finding("CUDA", MISSING, "no usable GPU; runs use the CPU", "a GPU, its driver, a CUDA torch")
    return Finding("CUDA", OK, ", ".join(f"{devices.count(name)} x {name}" for name in sorted(set(devices))))


def _nccl(facts: dict[str, Any]) -> Finding:
    if not facts["built_with_nccl"]:
        return Finding("NCCL", MISSING, "this torch was built without it", "a CUDA build of torch")
    if not facts["nccl"]:
        return Finding("NCCL", MISSING, "torch was built with it, but there is no usable GPU", "a GPU and its driver")
    return Finding("NCCL", OK, facts["nccl"])


def _gloo() -> list[Finding]:
    """Two real processes and an all-reduce between them over loopback."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("gloo", MISSING, "comes with torch", "install torch", needed=True)]
    with tempfile.TemporaryDirectory() as directory:
        outcomes = _all_reduce_between_two(f"{directory}/rendezvous")
    bad = [outcome for outcome in outcomes if outcome]
    if bad:
        return [Finding("gloo", BROKEN, bad[0], "check that the loopback interface is up", needed=True)]
    return [Finding("gloo", OK, "two processes, all-reduce over loopback", needed=True)]


def _all_reduce_between_two(rendezvous: str) -> list[str]:
    """What went wrong in each process; empty strings when nothing did. One deadline holds for both."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + _GLOO_DEADLINE_S
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _GLOO_TEST, str(rank), rendezvous],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **loopback},
        )
        for rank in range(2)
    ]
    outcomes = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            outcomes.append("" if output.strip() == "ok" else (errors.strip().splitlines() or ["no output"])[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            outcomes.append(f"no answer within {_GLOO_DEADLINE_S:g} s")
    return outcomes


def _engines() -> list[Finding]:
    return [
        Finding("engine torch_native", OK, "plain PyTorch: session.wrap"),
        _deepspeed(),
        Finding("engine megatron", MISSING, "not in this version yet"),
        _fused(),
    ]


def _deepspeed() -> Finding:
    """Its pipeline engine is used beyond what is documented: what is imported here is what ``session.deepspeed`` imports."""
    name, remedy = "engine deepspeed", "optional; pip install 'megatron_ft[deepspeed]'"
    if importlib.util.find_spec("deepspeed") is None:
        return Finding(name, MISSING, "", remedy)
    _, trouble = _try("from megatron_ft.engines.deepspeed import build")
    if trouble:
        return Finding(name, BROKEN, f"deepspeed {_version('deepspeed')}: {trouble}", remedy)
    return Finding(name, OK, f"deepspeed {_version('deepspeed')}: session.deepspeed")


def _fused() -> Finding:
    """Which optimizer and norms ``megatron_ft.engines.fused`` gives here."""
    output, trouble = _try("import json; from megatron_ft.engines import fused; print(json.dumps(fused.which()))")
    if trouble:
        return Finding("fused kernels", BROKEN, trouble, "reinstall torch")
    found = json.loads(output.splitlines()[-1])
    return Finding("fused kernels", OK, ", ".join(f"{what}: {whose}" for what, whose in found.items()))


def _extras() -> list[Finding]:
    track = "pip install 'megatron_ft[track]'"
    return [
        _package("tensorboard", track),
        _package("wandb", track),
        _package("megatron-core", "optional; pip install megatron-core", module="megatron.core"),
        _apex(),
        _package("transformers", "optional; pip install transformers"),
    ]


def _apex() -> Finding:
    """NVIDIA's apex has compiled optimizers; the package called apex on PyPI is something else."""
    remedy = (
        "optional; PyPI's `apex` is another project, build NVIDIA's where CUDA's compiler is: "
        "git clone https://github.com/NVIDIA/apex && cd apex && "
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
    )
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", MISSING, "torch's fused optimizers are used", remedy)
    _, trouble = _try("import torch, amp_C; from apex.optimizers import FusedAdam")
    if trouble:
        return Finding("apex", BROKEN, f"not NVIDIA's, or without its CUDA extensions: {trouble}", remedy)
    return Finding("apex", OK, "NVIDIA's, with FusedAdam")


def _etcd() -> list[Finding]:
    """A node can be started here: by a run with a store of its own on several hosts."""
    use = 'only needed for "store": "etcd", with which a run starts its own'
    try:
        return [Finding("etcd", OK, etcd_binary.find()[1])]
    except etcd_binary.EtcdMissing as error:
        return [Finding("etcd", MISSING, f"{error}; {use}", etcd_binary.INSTALL)]
    except etcd_binary.EtcdUnusable as error:
        return [Finding("etcd", BROKEN, f"{error}; {use}", error.remedy)]


def _directory(directory: Path) -> Finding:
    name, remedy = f"directory {directory}", "a directory that can be written"
    found = disk.try_out(directory)
    if "trouble" in found:
        return Finding(name, BROKEN, found["trouble"], remedy, needed=True)
    speed = f"written at {rate(found['write_bytes_s'])}, read at {rate(found['read_bytes_s'])}"
    return Finding(name, OK, f"{found['free_bytes'] / 1e9:.1f} GB free, {speed}", needed=True)


def _slurm() -> list[Finding]:
    found = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name)]
    if len(found) == 3:
        return [Finding("Slurm", OK, ", ".join(found))]
    return [Finding("Slurm", MISSING, f"found: {', '.join(found) or 'nothing'}", "only needed on a cluster")]
