"""Real runs for the integration tests: the example's training script, small, launched by the real command."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.record import history, invariants, presence
from megatron_ft.record.run_record import RunRecord
from megatron_ft.run import injection_points
from megatron_ft.types import Microbatch
from megatron_ft.utils import file_descriptors, shared_file
from megatron_ft.utils.auth.secret import Secret
from tests import warm

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "pretrain_gpt" / "train.py"
GROUPS, PER_GROUP, STEPS = 4, 4, 8
SMALL = ("--layers", 2, "--width", 64, "--seq-len", 32, "--lr", 3e-4)
"""A model for runs of a hundred steps: at a larger learning rate the rounding of sums in another order adds up to 1e-5."""
SECRET = Secret("0123456789abcdef" * 4)
"""The secret that tests use in their own process."""
TIMEOUT_S = 120.0
HEARTBEAT_TIMEOUT_S = 5.0
"""For runs on several hosts that are all on this machine. The product waits for this time while ranks start, which keeps
hosts busy; here others always do, and an agent without a processor for a second must not be taken for a lost host."""


def first_of(cases: Mapping[str, object], *names: str) -> list[object]:
    """Return parameters for ``pytest.mark.parametrize``: all cases, those that are not named only in ``make
    test-long``."""
    assert names and set(names) <= set(cases), names
    marks = {name: () if name in names else (pytest.mark.long,) for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


def needs_engine(name: str) -> None:
    """Skip a test of an engine whose library is not installed."""
    for word, module in (("megatron", "megatron.core"), ("deepspeed", "deepspeed"), ("zero", "deepspeed")):
        if word in name.lower():
            pytest.importorskip(module, reason=f"{module} is not installed")


def command(*arguments: object) -> list[str]:
    """Return the command line of the console script, run by this interpreter."""
    return [sys.executable, "-m", "megatron_ft.cli", *map(str, arguments)]


class Command:
    """``megatron-ft`` with these arguments, forked (``tests.warm``); what it prints is captured."""

    def __init__(self, *arguments: object, env: Mapping[str, str] = os.environ, cwd: Path = ROOT) -> None:
        self._said = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]  # noqa: SIM115
        self.process = warm.launch(*arguments, env=env, cwd=cwd, stdout=self._said[0], stderr=self._said[1])

    def finish(self) -> subprocess.CompletedProcess:
        """Wait for its end."""
        try:
            code = self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
        for said in self._said:
            said.seek(0)
        printed = [said.read() for said in self._said]
        for said in self._said:
            said.close()
        return subprocess.CompletedProcess(self.process.args, code, *printed)


def ft(*arguments: object, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess:
    """Run ``megatron-ft`` to its end and capture what it prints."""
    return Command(*arguments, env=env).finish()


@dataclass
class Run:
    """One launched job."""

    directory: Path
    process: subprocess.Popen | warm.Launched
    groups: int = GROUPS
    exact: bool = False
    """Its sums are exact: a reference must have the same bits."""

    def strike(self, *holds: injection_points.Breakpoint) -> list[float]:
        return inject.strike(self.directory, list(holds), TIMEOUT_S, lambda: self.process.poll() is None)

    def strike_in_step(self, *holds: injection_points.Breakpoint) -> list[float]:
        """Strike as :meth:`strike` does, once all groups have got to the step of the first hold. The frozen group may
        be the first there: the others could lose it in the step before, and make that step without it."""
        await_held(self, holds[0].group, holds[0].position)
        for group in self.live:
            wait_for(lambda group=group: group == holds[0].group or committed(self, group) >= holds[0].step - 1, self)
        return self.strike(*holds)

    @property
    def live(self) -> list[int]:
        """The groups of the newest view."""
        return (self.events("view") or [{"live": range(self.groups)}])[-1]["live"]

    def finish(self) -> str:
        """Wait for the end; return what the launcher printed."""
        output, _ = self.process.communicate(timeout=TIMEOUT_S)
        return output

    @property
    def history(self) -> list[dict]:
        return history.read(self.directory)

    def events(self, event: str) -> list[dict]:
        return [line for line in self.history if line["event"] == event]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("logs/*")))

    def check(self, reference: Run | None = None, code: int = 0) -> str:
        """Check that the run reached its end and kept every promise; on failure show all there is to see. Return what
        it printed."""
        output = self.finish()
        assert self.process.returncode == code, f"exit code {self.process.returncode}\n{output}\n{self.logs()}"
        found = invariants.check_history(
            self.history, self.groups * PER_GROUP, reference and reference.history, self.exact
        )
        assert not found, "\n".join([*found, output, *map(str, self.history), self.logs()])
        return output


def write_config(path: Path, engine: Mapping[str, object] | None = None, **changes) -> Path:
    """The config of the test job; ``changes`` replace keys of the fault_tolerance section, ``engine`` adds others."""
    section = {"bucket_mb": 0.1, "rejoin": {"enabled": False}, **changes}
    own = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": PER_GROUP, "gradient_clipping": 1.0}
    # As a whole: an agent that was started with it may be reading it.
    shared_file.write_json(path, {**own, "fault_tolerance": section, **(engine or {})})
    return path


def start(
    directory: Path,
    data: Path,
    holds: Sequence[injection_points.Breakpoint] = (),
    steps: int = STEPS,
    extra: Sequence[str] = (),
    preexec_fn: Callable[[], None] | None = None,
    warm_start: bool = True,
    script: Path = SCRIPT,
    groups: int = GROUPS,
    own: Sequence[object] = ("--layers", 2, "--width", 64, "--seq-len", 32),
    **changes,
) -> Run:
    """Launch the small job in the background; ``changes`` are settings, ``extra`` options of the launcher, ``own`` those of
    the script. ``warm_start``: the launcher is forked (``tests.warm``), unless it has a ``preexec_fn``."""
    # A hold freezes a rank until a test strikes it: on a busy machine longer than the detector would wait.
    # On a busy machine some group is always slow: with another share of the work than these tests expect.
    changes["detector"] = {"stopped_timeout_s": TIMEOUT_S, "straggler_factor": 0, **changes.get("detector", {})}
    config = write_config(directory.with_suffix(".json"), **changes)
    job = ["--data", data, "--steps", steps, "--seed", 1, *own]
    own = ["--groups", groups, "--config", config, "--run-dir", directory]
    arguments = ["launch", *own, *extra, script, "--", *job]
    env = {**os.environ, **injection_points.to_env(list(holds))}
    if warm_start and preexec_fn is None:
        process = warm.launch(*arguments, env=env)
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command(*arguments), **pipes, cwd=ROOT, env=env, preexec_fn=preexec_fn)
    started.append(process)
    return Run(directory, process, groups, exact=changes.get("reduction") == "exact")


started: list[subprocess.Popen[str] | warm.Launched] = []
"""The launchers that :func:`start` has started in this process and :func:`end_from` has not ended."""


def end_from(number: int) -> None:
    """Close the pipes of these launchers, beginning with that one, and end those that a failed test has left behind: they
    would slow down what follows."""
    left = [process for process in started[number:] if process.poll() is None]
    for process in left:
        process.terminate()
    for process in left:
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in started[number:]:
        if process.stdout:
            process.stdout.close()
    del started[number:]


def outcome(run: Run) -> tuple[list[float], str]:
    """Return the losses of all steps and the digest of the parameters."""
    (end,) = run.events("end")
    losses = {line["step"]: line["loss"] for line in run.events("step")}
    return [losses[step] for step in sorted(losses)], end["params_sha256"]


def disagreements(record: RunRecord) -> list[str]:
    """Return where the timeline's picture contradicts the ``step`` lines. A group that two steps of one view name was
    a member when the first of them was committed; a group that a step does not name was none."""
    found, drawn = [], presence.stages(record)
    for one, following in itertools.pairwise(record.steps):
        members = {group for group, own in drawn.items() for stage in own
                   if stage.state == "member" and stage.start < one["t"] <= stage.end}  # fmt: skip
        live = set(one["live"])
        if members - live or (one["epoch"] == following["epoch"] and live - members):
            found.append(f"step {one['step']} was made by groups {sorted(live)}, drawn are {sorted(members)}")
    return found


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    """Wait until a condition about a live run is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        over = run.process.poll() is not None  # asked first: what has become true just before the end counts
        if condition():
            return
        assert not over and time.monotonic() < deadline, run.logs()
        time.sleep(0.02)


def wait_for_step(run: Run, step: int) -> None:
    """Wait until the history has that step."""
    wait_for(lambda: any(line["step"] >= step for line in run.events("step")), run)


def await_held(run: Run, group: int, position: int = 0) -> int:
    """Wait until that rank is frozen at its point; return its pid."""
    wait_for(lambda: inject.is_frozen(run.directory, group, position), run)
    return inject.pid_of(run.directory, group, position)


def inject_when_ready(
    run: Run, gate: Gate, before: int, schedule: object, *options: object, orders: Iterable[int]
) -> subprocess.CompletedProcess:
    """Run an injector to its end. The gate in front of the step ``before`` is opened when there are orders for these
    groups."""
    injector = Command("inject", run.directory, schedule, *options)
    for group in orders:
        wait_for(injection_points.mailbox(run.directory, group, 0).exists, run)
    gate.open(before)
    return injector.finish()


def kill(pids: Iterable[int]) -> None:
    """Kill all these processes, then wait until each has ended, with every thread of it: none of their resources is
    held any more."""
    ends = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            ends.append(os.pidfd_open(pid))
    for end in ends:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
    await_ends(ends, "a process that was killed does not end")


def await_ends(pidfds: Iterable[int], otherwise: str) -> None:
    """Wait until all these processes have ended, and close their pidfds; fail with the words ``otherwise``."""
    for pidfd in pidfds:
        assert file_descriptors.readable(pidfd, TIMEOUT_S), otherwise
        os.close(pidfd)


def committed(run: Run, group: int) -> int:
    """Return the last step with which the group has updated its model, from the group's own record; -1 before the
    first."""
    try:
        text = (run.directory / "timeline" / f"g{group}.p0.jsonl").read_text()
    except FileNotFoundError:
        return -1
    lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return max((line["step"] for line in lines if any(phase == "update" for phase, *_ in line["spans"])), default=-1)


def changed_script(path: Path, change: str, script: Path = SCRIPT) -> Path:
    """Return a training script that runs after ``lines``, which may import modules and replace parts of the script."""
    start_it = f"""
import runpy, sys
sys.path.insert(0, {str(script.parent)!r})
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    path.write_text(change + start_it)
    return path


_GATE = """
import os, time
from pathlib import Path
from megatron_ft.run.session import Session
HERE, SHUT, SLOWER_S, LONGEST_S = Path({here!r}), {shut!r}, {slower_s!r}, {longest_s!r}
passes = Session.train_step
def train_step(self, *arguments, **options):
    step, began = self._role.step, time.monotonic()
    until = began + (LONGEST_S if step in SHUT else SLOWER_S * step)
    if step in SHUT:
        (HERE / f"waits.{{step}}.{{os.getpid()}}").touch()
    while not ((HERE / "open").exists() or (HERE / f"open.{{step}}").exists()) and time.monotonic() < until:
        time.sleep(0.005)
    return passes(self, *arguments, **options)
Session.train_step = train_step
"""


class Gate:
    """A training script that a test holds back: no run is over before its test has done, and seen, what it is about.

    Every rank waits in front of the steps ``shut`` until :meth:`open`, with a generous limit in case the test has
    failed. With ``slowly``, the number of the run's steps, each step waits for a little longer than the one before, and
    all together wait for minutes: the early steps come soon enough for a group to come back in, and the last ones are
    far away.
    """

    def __init__(self, directory: Path, *shut: int, slowly: int = 0, script: Path = SCRIPT) -> None:
        self._directory = directory / "gate"
        self._directory.mkdir(exist_ok=True)  # a job that goes on has its gate in the same place
        longest_s = 2 * TIMEOUT_S
        slower_s = 2 * longest_s / slowly**2 if slowly else 0.0
        change = _GATE.format(here=str(self._directory), shut=shut, slower_s=slower_s, longest_s=longest_s)
        self.script = changed_script(self._directory / "train.py", change, script)

    def open(self, step: int | None = None) -> None:
        """Open the gate in front of that step, or of all."""
        (self._directory / ("open" if step is None else f"open.{step}")).touch()

    def waiting(self, step: int) -> int:
        """Return the number of ranks that have come to that step."""
        return len(list(self._directory.glob(f"waits.{step}.*")))


def check_exactly_once(assignment: Mapping[int, Sequence[Microbatch]], expected: Iterable[Microbatch]) -> None:
    """Raise ``AssertionError`` unless every expected microbatch is assigned exactly once and nothing else is."""
    seen = [microbatch for own in assignment.values() for microbatch in own]
    assert len(seen) == len(set(seen)), f"assigned twice: {sorted(m for m in set(seen) if seen.count(m) > 1)}"
    assert set(seen) == set(expected), f"assigned and expected differ: {sorted(set(seen) ^ set(expected))}"
