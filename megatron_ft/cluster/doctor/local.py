"""``megatron-ft doctor`` on one machine: tests what training needs by using it, and says how to get what is missing."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ft.cluster.doctor import disk
from megatron_ft.cluster.doctor.doctor_report import BROKEN, MISSING, OK, WARN, Finding, rate, table
from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives import nccl_watchdog
from megatron_ft.utils import extras

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_GLOO_TEST = """
import os, sys, torch, torch.distributed as dist
from megatron_ft.utils import lifeline
parent = os.getpid()
rank = int(os.fork() == 0)
if rank == 1:
    lifeline.end_with(parent)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
x = torch.ones(1000)
dist.all_reduce(x)
assert float(x.sum()) == 2000.0
os._exit(0 if rank == 1 or os.wait()[1] == 0 else 1)
"""
_DEADLINE_S = 120.0
"""Includes the import of torch, which takes a minute from a slow file system."""
_TORCH_FACTS = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
nccl = dist.is_available() and dist.is_nccl_available()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda or "",
    "threads": torch.get_num_threads(),
    "gpus": [{"name": g.name, "memory_bytes": g.total_memory, "capability": f"{g.major}.{g.minor}"} for g in gpus],
    "nccl": list(torch.cuda.nccl.version()) if cuda and nccl else [],
    "built_with_nccl": nccl,
}))
"""


def run_doctor(console: Console, as_json: bool = False, directory: Path | None = None) -> int:
    """Prints the findings. Returns 0 when everything that training needs works, else 1.

    Args:
        console: where to print.
        as_json: print JSON instead of a table.
        directory: a directory to test, too.
    """
    with Console(stderr=True).status("checking") as status:  # on a terminal only
        findings = examine(lambda name: status.update(f"checking {name}"))
        if directory is not None:
            status.update(f"checking directory {directory}")
            findings += _directory(directory)
    bad = [finding for finding in findings if finding.needed and finding.state != OK]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1), file=console.file)
    else:
        rows = [(f.what, f.shown_state, f.details, f.remedy) for f in findings]
        table("megatron-ft doctor", ("what", "state", "details", "remedy"), rows).show(console)
        console.print(verdict(bad), soft_wrap=True, markup=False, highlight=False)
    return 1 if bad else 0


def verdict(bad: Sequence[Finding]) -> str:
    """Return the last line. ``bad``: findings without which training cannot start."""
    if not bad:
        return "ready: training can start on this machine"
    states = {state: [finding.what for finding in bad if finding.state == state] for state in (MISSING, BROKEN)}
    said = [f"{state}: {', '.join(names)}" for state, names in states.items() if names]
    remedies = dict.fromkeys(finding.remedy for finding in bad if finding.remedy)
    return f"not ready; {'; '.join([*said, *remedies])}"


def examine(begun: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Returns all findings, the most important ones first. ``begun`` is called with the name of each check."""
    checks: dict[str, Callable[[], list[Finding]]] = {
        "the machine": _machine,
        "torch": _torch,
        "gloo": _gloo,
        "libraries": _base,
        "engines": _engines,
        "optional libraries": _extras,
        "Slurm": _slurm,
    }
    findings = []
    for name, check in checks.items():
        begun(name)
        findings += check()
    return findings


def _machine() -> list[Finding]:
    python = platform.python_version()
    good = sys.version_info >= (3, 11)
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        Finding("python", OK if good else BROKEN, python, "" if good else "install Python 3.11 or newer", needed=True),
        Finding("machine", OK, f"{os.cpu_count()} cores, {memory:.0f} GiB, /dev/shm {shm:.1f} GiB free"),
        _clock(),
        *_interfaces(),
    ]


def _interfaces() -> list[Finding]:
    """gloo ends with an obscure error when the variable names an interface that this machine lacks."""
    there = [name for _, name in socket.if_nameindex()]
    setting = os.environ.get(_GLOO_INTERFACE, "")
    unknown = [name for name in setting.split(",") if name and name not in there]
    if not unknown:
        return []
    text = f"{_GLOO_INTERFACE}={setting}: this host has no {', '.join(unknown)}; it has {', '.join(sorted(there))}"
    return [Finding("interface", BROKEN, text, f"correct {_GLOO_INTERFACE} or unset it", needed=True)]


def _clock() -> Finding:
    """Asks the kernel whether the clock is synchronised; the run record compares times of several hosts."""
    details = f"monotonic resolution {time.get_clock_info('monotonic').resolution:g} s"
    ask = getattr(ctypes.CDLL(None), "ntp_gettime", None)
    if ask is None:
        return Finding("clock", OK, f"{details}; this system does not report whether it is synchronised")
    unsynchronised = 5  # TIME_ERROR of <sys/timex.h>; the buffer is larger than the struct it fills
    if ask(ctypes.create_string_buffer(256)) in (unsynchronised, -1):
        return Finding(
            "clock", MISSING, f"{details}; not synchronised", "run chrony or ntpd; needed with several hosts only"
        )
    return Finding("clock", OK, f"{details}; synchronised")


def _base() -> list[Finding]:
    names = ("numpy", "scipy", "matplotlib", "rich", "ortools", "networkx")
    remedies = {
        name: extras.install(extras.EXTRAS[name]) if name in extras.EXTRAS else f"pip install {name}" for name in names
    }
    return [_package(name, remedies[name], needed=True) for name in names]


def _package(name: str, remedy: str, needed: bool = False) -> Finding:
    """Imports the package: one that is installed and cannot be imported is broken."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, MISSING, "", remedy, needed)
    _, trouble = _try(f"import {name}")
    if trouble:
        return Finding(name, BROKEN, trouble, f"reinstall: {remedy}", needed)
    return Finding(name, OK, extras.version(name, ""), "", needed)


def _try(code: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """Runs the code in its own process, because compiled packages can crash or hang. Returns its output and the error."""
    command, own = [sys.executable, "-c", code, *arguments], {**os.environ, **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, env=own)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_DEADLINE_S:g} s"
    if done.returncode == 0:
        return done.stdout, ""
    return "", (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]


def torch_facts() -> tuple[dict[str, Any], str]:
    """Return what torch has, and the error if there is no answer. It is asked in a process of its own: asking CUDA makes a
    context, which processes that are started later must not inherit."""
    output, trouble = _try(_TORCH_FACTS)
    return ({} if trouble else json.loads(output.splitlines()[-1])), trouble


def _torch() -> list[Finding]:
    """Imports torch and asks it for GPUs and NCCL."""
    remedy = extras.install("train")
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", MISSING, "", remedy, needed=True)]
    facts, trouble = torch_facts()
    if trouble:
        return [Finding("torch", BROKEN, trouble, f"reinstall: {remedy}", needed=True)]
    built_for = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU"
    details = f"{facts['torch']}, built for {built_for}, {facts['threads']} threads"
    return [Finding("torch", OK, details, needed=True), _cuda(facts), _nccl(facts), _nccl_environment()]


def _nccl_environment() -> Finding:
    """Shows what ``launch`` sets for its ranks, so that NCCL's watchdog reports a failure and does not end the process."""
    name = "NCCL environment"
    try:
        added = nccl_watchdog.environment(os.environ)
    except ConfigError as error:
        return Finding(name, BROKEN, str(error), "unset the variables; launch refuses to start with them", needed=True)
    own = sorted(f"{key}={os.environ[key]}" for key in nccl_watchdog.names() if key in os.environ)
    details = "ranks get " + " ".join(f"{key}={value}" for key, value in added.items()) if added else "nothing is added"
    return Finding(name, OK, f"{details}; your own values stay: {' '.join(own)}" if own else details)


def _cuda(facts: dict[str, Any]) -> Finding:
    devices = [gpu["name"] for gpu in facts["gpus"]]
    if not devices:
        return Finding(
            "CUDA",
            MISSING,
            "no usable GPU; training uses the CPU",
            "install a GPU, its driver and a CUDA build of torch",
        )
    return Finding("CUDA", OK, ", ".join(f"{devices.count(name)} x {name}" for name in sorted(set(devices))))


def _nccl(facts: dict[str, Any]) -> Finding:
    if not facts["built_with_nccl"]:
        return Finding("NCCL", MISSING, "this torch was built without it", "install a CUDA build of torch")
    if not facts["nccl"]:
        return Finding(
            "NCCL", MISSING, "torch was built with it, but there is no usable GPU", "install a GPU and its driver"
        )
    return Finding("NCCL", OK, ".".join(map(str, facts["nccl"])))


def _gloo() -> list[Finding]:
    """Runs an all-reduce between two processes over the loopback interface."""
    if importlib.util.find_spec("torch") is None:
        return [Finding("gloo", MISSING, "it is a part of torch", extras.install("train"), needed=True)]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with tempfile.TemporaryDirectory() as directory:
        _, trouble = _try(_GLOO_TEST, f"{directory}/rendezvous", OMP_NUM_THREADS="1", **{_GLOO_INTERFACE: loopback})
    if trouble:
        return [Finding("gloo", BROKEN, trouble, "check that the loopback interface is up", needed=True)]
    return [Finding("gloo", OK, "two processes, all-reduce over loopback", needed=True)]


def _engines() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    return [Finding("engine torch_native", OK, "plain PyTorch: session.wrap"), _deepspeed(), _fused()]


def _deepspeed() -> Finding:
    """Imports what ``session.deepspeed`` imports, which includes undocumented parts of DeepSpeed."""
    name, remedy = "engine deepspeed", extras.install("deepspeed")
    if importlib.util.find_spec("deepspeed") is None:
        return Finding(name, MISSING, "", remedy)
    _, trouble = _try("from megatron_ft.run.engines.deepspeed import build")
    version = f"deepspeed {extras.version('deepspeed', '')}"
    if trouble:
        return Finding(name, BROKEN, f"{version}: {trouble}", remedy)
    return Finding(name, OK, f"{version}: session.deepspeed")


def _fused() -> Finding:
    """Asks ``megatron_ft.run.engines.fused`` for the optimizer and norms that it uses on this machine."""
    output, trouble = _try("import json; from megatron_ft.run.engines import fused; print(json.dumps(fused.which()))")
    if trouble:
        return Finding("fused kernels", BROKEN, trouble, "reinstall torch")
    found = json.loads(output.splitlines()[-1])
    return Finding("fused kernels", OK, ", ".join(f"{what}: {whose}" for what, whose in found.items()))


def _extras() -> list[Finding]:
    return [
        *(_package(name, f"to prepare text: {extras.install('data')}") for name in ("sentencepiece", "datasets")),
        *(_package(name, f"for --track: {extras.install('track')}") for name in ("tensorboard", "wandb")),
        _apex(),
        _package("transformers", "pip install transformers"),
    ]


def _apex() -> Finding:
    """NVIDIA's apex has compiled optimizers; the package named apex on PyPI is another project."""
    remedy = (
        "PyPI's `apex` is another project, so build NVIDIA's with the CUDA compiler: "
        "git clone https://github.com/NVIDIA/apex && cd apex && "
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
    )
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", MISSING, "torch's fused optimizers are used", remedy)
    _, trouble = _try("import torch, amp_C; from apex.optimizers import FusedAdam")
    if trouble:
        return Finding("apex", BROKEN, f"it is not NVIDIA's, or lacks the CUDA extensions: {trouble}", remedy)
    return Finding("apex", OK, "NVIDIA's, with FusedAdam")


def _directory(directory: Path) -> list[Finding]:
    name, remedy = f"directory {directory}", "give a directory that can be written"
    found = disk.try_out(directory)
    if "error" in found:
        return [Finding(name, BROKEN, found["error"], remedy, needed=True)]
    speed = f"written at {rate(found['write_bytes_s'])}, read at {rate(found['read_bytes_s'])}"
    findings = [Finding(name, OK, f"{found['free_bytes'] / 1e9:.1f} GB free, {speed}", needed=True)]
    if found["no_links"]:
        findings.append(Finding("hard links", WARN, f"{directory} has none: {found['no_links']}", disk.LINKS))
    return findings


def _slurm() -> list[Finding]:
    found = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name)]
    if len(found) == 3:
        return [Finding("Slurm", OK, ", ".join(found))]
    return [Finding("Slurm", MISSING, f"found: {', '.join(found) or 'nothing'}", "needed on a Slurm cluster only")]
