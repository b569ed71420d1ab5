"""Play one run: launch it by the real command, inject its schedule, wait for its end, and see what it leaves behind.

A run that does not end is not waited for: its threads' stacks are written down (where ``py-spy`` is installed), then it is
ended. Nothing is judged here.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.errors import FTError
from megatron_ft.faults import processes
from megatron_ft.faults.execute import Case, Injector
from megatron_ft.faults.schedule import Schedule
from megatron_ft.runtime import history
from tests import support
from tests.chaos.plan import STOPPED_LIMIT_S, Job, Plan

SCRIPT = Path(__file__).with_name("train.py")
HANGS_S = 150.0
"""A run that takes longer hangs. It takes 5 to 20 s, and the longest timeout inside of it is 60 s."""
_ENDS_WITHIN_S = 20.0
"""After SIGTERM to the launcher, and of a process whose parent has ended."""


@dataclass
class Played:
    """What became of a run. ``code``: of the launcher, None when it was ended because it hung; ``stops``: seconds that a
    stop lasted, by number of the fault; ``left``: processes that outlived it."""

    plan: Plan
    directory: Path
    code: int | None
    seconds: float
    cases: list[Case] = field(default_factory=list)
    stops: dict[int, float] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    trouble: str = ""

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def history(self) -> list[dict]:
        return history.read(self.run_dir)


def play(plan: Plan, directory: Path, data: Path) -> Played:
    """One run, in a directory of its own that is made anew."""
    started = time.monotonic()
    launcher = _launch(plan.job, directory, data)
    played = Played(plan, directory, None, 0.0)
    (directory / "schedule.json").write_text(json.dumps(plan.schedule.to_json(), indent=1))
    with _Limit(launcher, directory) as limit:
        try:
            _inject(played)
        except FTError as error:
            played.trouble = f"the injector: {error}"
        code = launcher.wait()
    played.code = None if limit.passed else code
    played.seconds = time.monotonic() - started
    played.left = _left_behind(played.run_dir)
    return played


def reference(job: Job, directory: Path, data: Path) -> list[dict]:
    """The history of the same job without failures; played once, then read again."""
    directory = directory / "reference-{}x{}x{}".format(*job.key)
    if not (directory / "done").exists():
        played = play(Plan(0, job, 0, Schedule(())), directory, data)
        if played.code != 0:
            raise RuntimeError(f"the run without failures ended with {played.code}; see {directory}")
        (directory / "done").touch()
    return history.read(directory / "run")


def _launch(job: Job, directory: Path, data: Path) -> subprocess.Popen:
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "run").mkdir(parents=True)
    config = directory / "config.json"
    detector = {"stopped_timeout_s": STOPPED_LIMIT_S}
    support.write_config(config, bucket_mb=job.bucket_mb, detector=detector)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"gradient_accumulation_steps": job.per_group}))
    arguments = ["launch", "--groups", job.groups, "--config", config, "--run-dir", directory / "run", SCRIPT, "--"]
    arguments += ["--data", data, "--steps", job.steps, "--seed", 1, "--layers", 2, "--width", 64, "--seq-len", 32]
    with (directory / "launcher.log").open("wb") as output:
        return subprocess.Popen(
            support.command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=support.ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _inject(played: Played) -> None:
    plan = played.plan
    if not plan.schedule.faults:
        return
    said: dict[int, float] = {}

    def say(line: str) -> None:
        words = line.split()
        if words[0] == "undone:":
            said[int(words[1])] = time.time()
        with (played.directory / "injector.log").open("a") as log:
            log.write(f"{time.time():.3f} {line}\n")

    injector = Injector(played.run_dir, plan.schedule, plan.job.groups, 1, min_survivors=0, say=say)
    played.cases = injector.cases
    injector.run()
    begun = {line.get("fault"): line["t"] for line in played.history if line["event"] == "inject"}
    numbers = {case.number: case.key for case in injector.cases}
    played.stops = {number: until - begun[numbers[number]] for number, until in said.items() if numbers[number] in begun}


class _Limit:
    """Ends a run that hangs, so that whoever waits for its processes goes on; and one that nobody waits for any more."""

    def __init__(self, launcher: subprocess.Popen, directory: Path) -> None:
        self._launcher, self._directory = launcher, directory
        self._timer = threading.Timer(HANGS_S, self._hangs)
        self.passed = False

    def __enter__(self) -> _Limit:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._launcher.poll() is None:  # an error, or Ctrl-C: no run goes on without its campaign
            self._end()

    def _hangs(self) -> None:
        if self._launcher.poll() is None:
            self.passed = True
            self._write_stacks()
            self._end()

    def _end(self) -> None:
        self._launcher.send_signal(signal.SIGCONT)
        self._launcher.terminate()
        try:
            self._launcher.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # its ranks end with it

    def _write_stacks(self) -> None:
        tool = Path(sys.executable).with_name("py-spy")
        pids = [self._launcher.pid, *(rank.pid for rank in processes.ranks(self._directory / "run"))]
        with (self._directory / "stacks.txt").open("wb") as output:
            for pid in pids if tool.exists() else ():
                subprocess.run([tool, "dump", "--nonblocking", "--pid", str(pid)], stdout=output, stderr=output)


def _left_behind(run_dir: Path) -> list[int]:
    """Processes of the run that have not ended some time after it; these are ended here."""
    try:
        run_id = json.loads((run_dir / "config.json").read_text())["run_id"]
    except (OSError, ValueError, KeyError):
        return []
    left = [pid for pid in _of_run(run_id) if not _ends(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _of_run(run_id: str) -> list[int]:
    mark, found = f"MEGATRON_FT_RUN_ID={run_id}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _ends(pid: int) -> bool:
    """Whether it ends by itself: the kernel may still be busy with what was killed."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], _ENDS_WITHIN_S)[0])
    finally:
        os.close(descriptor)
