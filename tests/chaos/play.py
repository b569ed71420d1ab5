"""Play one run: launch it by the real command, inject its schedule, wait for its end, and look at its leftovers.

A run that does not end is not waited for: the stacks of its threads are written down (where ``py-spy`` is installed),
then it is ended. Nothing is judged here.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.cluster.faults import process_lookup
from megatron_ft.cluster.faults.injector import Case, Injector
from megatron_ft.cluster.faults.schedule import Schedule
from megatron_ft.errors import FTError
from megatron_ft.record import history
from megatron_ft.run import injection_points
from megatron_ft.utils import file_descriptors
from tests import engine_kills, netlab, support, warm
from tests.chaos.plan import SILENCE_LIMIT_S, STOPPED_LIMIT_S, Job, Plan

SCRIPT = Path(__file__).with_name("train.py")
_EXAMPLES = support.ROOT / "examples"
ENGINES: dict[str, tuple[Path, dict[str, object], dict[str, object], list[object]]] = {
    "fsdp": (_EXAMPLES / "pretrain_gpt_fsdp" / "train.py", {}, {"inner_shards": 2}, []),
    "torch-pipeline": (_EXAMPLES / "pretrain_gpt_native3d" / "train.py", {"pipeline": {"stages": 2}}, {}, []),
    "tp": (_EXAMPLES / "pretrain_gpt_native3d" / "train.py", {"tensor_parallel": {"autotp_size": 2}}, {}, []),
    "megatron": (
        _EXAMPLES / "pretrain_gpt_megatron" / "train.py",
        {},
        {"inner_shards": 2},
        ["--preload", "megatron.core.models.gpt,megatron.core.optimizer"],
    ),
}
"""Engines with groups of two ranks that compute together: script, settings, those of ``fault_tolerance``, options of the
launcher."""
HANGS_S = 150.0
"""A run that takes longer hangs. It takes 5 to 20 s, and the longest timeout inside of it is 60 s."""
_STARTS_WITHIN_S = 60.0
_DISK_MB = 8
_ENDS_WITHIN_S = 20.0
"""The time until the end of a launcher after SIGTERM, and of a process whose parent has ended."""


@dataclass
class Played:
    """The outcome of a run. ``code``: of the launcher, None when it was ended because it hung; ``stops``: seconds that
    a stop or a cut lasted, by number of the fault; ``stood``: the same, from when the rank froze itself at its
    point; ``left``: processes that outlived it; ``codes``: of each host's launcher."""

    plan: Plan
    directory: Path
    code: int | None
    seconds: float
    cases: list[Case] = field(default_factory=list)
    stops: dict[int, float] = field(default_factory=dict)
    stood: dict[int, float] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    trouble: str = ""

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def history(self) -> list[dict]:
        return history.read(self.run_dir)


def missing(plan: Plan) -> str:
    """Return what this machine lacks for that run; empty when it can be played. (Where no disk can be mounted, none is
    filled.)"""
    if plan.job.hosts == 1:
        return ""
    if shutil.which("nft") is None and shutil.which("iptables") is None:
        return "cutting links needs nft or iptables"
    return netlab.missing()


def play(plan: Plan, directory: Path, data: Path) -> Played:
    """Play one run, in a directory of its own that is made anew."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "run").mkdir(parents=True)
    (directory / "schedule.json").write_text(json.dumps(plan.schedule.to_json(), indent=1))
    started = time.monotonic()
    played = Played(plan, directory, None, 0.0)
    with _small_disk(played.run_dir) if plan.fills_disk else nullcontext(), _network(plan.job) as lab:
        with _Limit(_launch(plan.job, directory, data, lab), directory) as limit:
            try:
                _inject(played, lab)
            except (FTError, OSError) as error:
                played.trouble = f"the injector: {error}"
            codes = [launcher.wait() for launcher in limit.launchers]
        played.code = None if limit.passed else codes[0]
        played.codes = codes
        played.seconds = time.monotonic() - started
        played.left = _left_behind(played.run_dir)
    return played


def reference(job: Job, directory: Path, data: Path) -> list[dict]:
    """Return the history of the same job without failures, on one host and one rank per group; played once, then read
    again."""
    directory = directory / "reference-{}x{}x{}-{}".format(*job.key)
    if not (directory / "done").exists():
        # Another engine has other sums: its reference has groups of as many ranks.
        plain = Job(*job.key[:3], job.bucket_mb, job.ranks if job.engine else 1, exact=job.exact, engine=job.engine)
        played = play(Plan(0, plain, 0, Schedule(())), directory, data)
        if played.code != 0:
            raise RuntimeError(f"the run without failures ended with {played.code}; see {directory}")
        (directory / "done").touch()
    return history.read(directory / "run")


@contextmanager
def _small_disk(run_dir: Path) -> Iterator[None]:
    """Make the run directory a file system of its own, which can be filled; its contents stay. Needs root, else does
    nothing."""
    small = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(run_dir)]
    if subprocess.run(small, capture_output=True).returncode:
        yield
        return
    kept = run_dir.with_name("kept")
    try:
        yield
    finally:
        shutil.copytree(run_dir, kept, symlinks=True)
        subprocess.run(["umount", "--lazy", str(run_dir)], check=True)
        run_dir.rmdir()
        kept.rename(run_dir)


@contextmanager
def _network(job: Job) -> Iterator[netlab.Lab | None]:
    """Make hosts of their own, where the job has several."""
    if job.hosts == 1:
        yield None
        return
    lab = netlab.Lab(job.hosts)
    try:
        yield lab
    finally:
        lab.close()


def _launch(job: Job, directory: Path, data: Path, lab: netlab.Lab | None) -> list[warm.Launched]:
    """Start a launcher for each host."""
    config = directory / "config.json"
    detector = {"stopped_timeout_s": STOPPED_LIMIT_S, "heartbeat_timeout_s": SILENCE_LIMIT_S}
    changes = {"detector": detector, "nonfinite": job.nonfinite, "store": "embedded", **job.settings}
    script, engine, section, extra = ENGINES.get(job.engine, (SCRIPT, {}, {}, []))
    support.write_config(config, engine, bucket_mb=job.bucket_mb, **changes, **section)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"gradient_accumulation_steps": job.per_group}))
    options = [
        "--groups",
        job.groups,
        "--ranks-per-group",
        job.ranks,
        "--config",
        config,
        "--run-dir",
        directory / "run",
    ]
    size = engine_kills.MEGATRON_SMALL if job.engine == "megatron" else ("--layers", 2, "--width", 64, "--seq-len", 32)
    own = ["--data", data, "--steps", job.steps, "--seed", 1, *size]
    launchers = []
    for host in range(job.hosts):
        where = [] if lab is None else ["--hosts", job.hosts, "--host-rank", host, "--store", f"{lab.address(0)}:29500"]
        arguments = ["launch", *where, *options, *extra, script, "--", *own]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (directory / f"launcher{host or ''}.log").open("wb") as output:
            start = warm.launch if lab is None else functools.partial(warm.launch_on_host, lab, host)
            launchers.append(start(*arguments, env=env, stdout=output))
    return launchers


def _inject(played: Played, lab: netlab.Lab | None) -> None:
    plan = played.plan
    if not plan.schedule.faults:
        return
    said: dict[int, float] = {}
    froze: dict[int, float] = {}

    def say(line: str) -> None:
        words = line.split()
        if words[0] == "undone:":
            said[int(words[1])] = time.time()
        if (
            words[0] == "injected:"
            and (fault := plan.schedule.faults[int(words[1]) - 1]).kind == "stop"
            and fault.point
        ):
            with suppress(OSError):  # the rank has reported it right before
                reached = injection_points.reached_file(played.run_dir, fault.group, fault.position or 0)
                froze[int(words[1])] = reached.stat().st_mtime
        with (played.directory / "injector.log").open("a") as log:
            log.write(f"{time.time():.3f} {line}\n")

    names = {} if lab is None else {f"host{host}": lab.namespace(host) for host in lab.hosts}
    schedule = plan.placed(played.run_dir, names)
    if lab is not None:
        _await_ranks(played)
    job = plan.job
    injector = Injector(played.run_dir, schedule, job.groups, job.ranks, min_survivors=0, say=say)
    try:
        injector.run()
    finally:
        for case, fault in zip(injector.cases, plan.schedule.faults, strict=True):
            case.fault = fault  # as it was drawn: a reader of a result has no use for a temporary directory
        played.cases = injector.cases
    begun = {line.get("fault"): line["t"] for line in played.history if line["event"] == "inject"}
    numbers = {case.number: case.key for case in injector.cases}
    played.stops = {
        number: until - begun[numbers[number]] for number, until in said.items() if numbers[number] in begun
    }
    played.stood = {number: until - froze[number] for number, until in said.items() if number in froze}


def _await_ranks(played: Played) -> None:
    """Wait until the agents of all hosts have listed their ranks: the injector takes the first rank's agent for the
    run's."""
    deadline = time.monotonic() + _STARTS_WITHIN_S
    job = played.plan.job
    while len(process_lookup.ranks(played.run_dir)) < job.groups * job.ranks and time.monotonic() < deadline:
        time.sleep(0.02)


class _Limit:
    """End a run that hangs, so that a thread that waits for its processes goes on; and a run that is not waited for
    any more."""

    def __init__(self, launchers: list[warm.Launched], directory: Path) -> None:
        self.launchers, self._directory = launchers, directory
        self._timer = threading.Timer(HANGS_S, self._hangs)
        self.passed = False

    def __enter__(self) -> _Limit:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._end()  # after an error, or Ctrl-C: no run goes on without its campaign

    def _hangs(self) -> None:
        if self._living():
            self.passed = True
            self._write_stacks()
            self._end()

    def _living(self) -> list[warm.Launched]:
        return [launcher for launcher in self.launchers if launcher.poll() is None]

    def _end(self) -> None:
        for launcher in self._living():
            launcher.send_signal(signal.SIGCONT)
            launcher.terminate()
        for launcher in self._living():
            try:
                launcher.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                launcher.kill()  # its ranks end with it

    def _write_stacks(self) -> None:
        tool = Path(sys.executable).with_name("py-spy")
        ours = [*self._living(), *process_lookup.ranks(self._directory / "run")]
        with (self._directory / "stacks.txt").open("wb") as output:
            for pid in [process.pid for process in ours] if tool.exists() else ():
                subprocess.run([tool, "dump", "--nonblocking", "--pid", str(pid)], stdout=output, stderr=output)


def _left_behind(run_dir: Path) -> list[int]:
    """Return the processes of the run that have not ended some time after it; they are ended here."""
    try:
        run_id = json.loads((run_dir / "config.json").read_text())["run_id"]
    except (OSError, ValueError, KeyError):
        return []
    left = [pid for pid in _of_run(run_id, run_dir) if not _ends(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _of_run(run_id: str, run_dir: Path) -> list[int]:
    """Return the run's ranks, by their environment; agents, keepers and stores by their command line."""
    mark, path, found = f"MEGATRON_FT_RUN_ID={run_id}".encode(), str(run_dir).encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (mark in _words(entry / "environ") or path in _words(entry / "cmdline")):
                found.append(int(entry.name))
    return found


def _words(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\0")


def _ends(pid: int) -> bool:
    """Return whether the process ends by itself: the kernel may still be busy with a killed one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return file_descriptors.readable(descriptor, _ENDS_WITHIN_S)
    finally:
        os.close(descriptor)
