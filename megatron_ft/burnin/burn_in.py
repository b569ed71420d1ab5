"""``megatron-ft burn-in``: runs a Slurm job under ``supervise``, injects one fault after the other, and checks the result.

A whole step is killed with ``scancel``; other faults are injected by ``megatron-ft inject`` in a step on the node.
Failures assumed: the run ends at any moment, and a fault is refused or finds no process; the verdict lists such faults.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.agent import run_lock
from megatron_ft.burnin import strikes as plan
from megatron_ft.burnin import verdict
from megatron_ft.burnin.verdict import Case
from megatron_ft.errors import LaunchError
from megatron_ft.launchers.slurm import commands
from megatron_ft.runlog import history
from megatron_ft.runlog.live_run import uses_etcd
from megatron_ft.types import given
from megatron_ft.utils import atomic_file, terminal
from megatron_ft.utils.tables import Column, FittedTable

_LOOK_S = 0.2
_INJECT_S = 60.0


def run(options: argparse.Namespace, asked: argparse.Namespace) -> int:
    """``asked``: the parsed options of ``launch``. Raises ``FTError``."""
    return BurnIn(options, asked).run()


class BurnIn:
    """One burn-in; arguments as for :func:`run`. Raises ``FTError``, outside of a Slurm job, too."""

    def __init__(self, options: argparse.Namespace, asked: argparse.Namespace) -> None:
        strikes = plan.draw(options.faults, options.seed, options.every_s, options.kinds or plan.DEFAULT)
        self.cases = [Case(strike) for strike in strikes]
        self._options, self._asked, self._slurm = options, asked, commands.job(os.environ)
        self._run_dir: Path = asked.run_dir.resolve()
        self._tail = history.Tail(self._run_dir)
        self._lines: list[dict[str, Any]] = []
        self._job: subprocess.Popen | None = None

    def run(self) -> int:
        """Returns 0 when the run is over and kept every promise, else 1."""
        run_lock.check_free(self._run_dir, f"{self._slurm.id}.")
        # Injected faults must not drain a node.
        own = ["--failures-per-node", str(len(self.cases) + 1), "--stop-before-s", "30"]
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # the supervisor is ended below
        self._job = _start(["supervise", *own, "launch", *self._asked.words])
        try:
            for case in self.cases:
                self._strike(case)
            code = self._job.wait()
        finally:
            if given(self._job).poll() is None:
                self._job.terminate()
                self._job.wait()
        return self._conclude(code)

    def _strike(self, case: Case) -> None:
        self._await(lambda: self._went_on(self._since()), self._options.patience_s)
        self._await(lambda: False, case.strike.after_s)
        if self._over():
            case.refused = "the run was over; give it more steps"
            return
        case.victim = plan.choose(case.strike, self._at(), self._spared())
        if case.victim is None:
            case.refused = "no node can be lost: all ranks are on the node with the control store"
            return
        case.at, case.mark, strike = time.time(), len(self._lines), case.strike
        _say(f"fault {strike.number}: {plan.KINDS[strike.kind]}: {_whom(case)}")
        try:
            getattr(self, f"_{strike.kind}")(case)
        except LaunchError as error:
            case.refused = str(error)
        if case.refused:
            _say(f"fault {strike.number} was not injected: {case.refused}")
            return
        self._await(lambda: self._answered(case), self._options.patience_s)
        case.why = next((why for group, why in self._lost(case).items() if group in case.victim.groups), "")
        if self._answered(case):
            views = [line["t"] for line in self._lines if line["event"] == "view"]
            case.back_s = views[-1] - case.at
            _say(f"fault {strike.number}: all groups are members again after {case.back_s:.1f} s")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _rank(self, case: Case) -> None:
        victim = given(case.victim)
        fault = {"kind": "kill", "group": victim.groups[0], "position": victim.position, "after_s": 0}
        self._inject(case, fault | ({"point": case.strike.point} if case.strike.point else {}))

    def _agent(self, case: Case) -> None:
        self._inject(case, {"kind": "agent", "after_s": 0})

    def _inject(self, case: Case, *faults: Mapping[str, Any]) -> None:
        number, node = case.strike.number, given(case.victim).node
        schedule = self._run_dir / f"burn-in-{number}.json"
        schedule.write_text(json.dumps({"seed": number, "faults": faults}), encoding="utf-8")
        command = ["inject", str(self._run_dir), str(schedule), "--min-survivors", "0"]
        log = self._run_dir / "burn-in.log"
        command = [sys.executable, "-m", "megatron_ft.cli", *command]
        srun = commands.start_step(self._slurm, node, f"burn-in/{number}", command, log)
        try:
            srun.wait(_INJECT_S + self._options.freeze_s)
        except subprocess.TimeoutExpired:
            srun.kill()
            srun.wait()
        self._read()
        if not any(line["event"] == "inject" for line in self._lines[case.mark :]):
            case.refused = f"megatron-ft inject has injected nothing; see {log}.{node}"

    def _freeze(self, case: Case) -> None:
        """Stops agent and ranks at once; the injector resumes them, also when it is ended."""
        held = {"how": "stop", "after_s": 0, "duration_s": self._options.freeze_s}
        self._inject(
            case, {"kind": "agent", **held}, {"kind": "rack", "groups": list(given(case.victim).groups), **held}
        )

    def _step(self, case: Case) -> None:
        """Kills all processes of the newest step on the node."""
        steps, node = commands.steps(self._slurm.id) or {}, given(case.victim).node
        named = sorted((name.split("/"), number) for name, number in steps.items() if name.startswith("mft/"))
        own = [number for (_, _, its, _), number in named if its == node]
        if not own:
            raise LaunchError(f"Slurm lists no step of this run on {node}")
        fields = {"group": None, "position": None, "pid": None, "signal": "SIGKILL", "point": None}
        history.append(self._run_dir, "inject", kind="step", host=node, **fields)
        case.refused = commands.kill_step(own[-1])

    # --- observing ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for line in self._tail.new():
            self._lines.append(line)

    def _over(self) -> bool:
        last = next((line["event"] for line in reversed(self._lines) if line["event"] in ("start", "end", "stop")), "")
        return given(self._job).poll() is not None or last in ("end", "stop")

    def _await(self, condition: Callable[[], bool], patience_s: float) -> None:
        """Waits for ``condition``, the end of the run or ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self._read()
            if self._over() or condition():
                return
            time.sleep(_LOOK_S)

    def _since(self) -> float:
        return next((line["t"] for line in reversed(self._lines) if line["event"] == "view"), 0.0)

    def _went_on(self, since: float) -> bool:
        """Returns True when all groups are members and have committed a step together."""
        stepped = any(line["event"] == "step" and line["t"] >= since for line in self._lines)
        return stepped and verdict.whole(self._lines, self._asked.groups)

    def _lost(self, case: Case) -> dict[int, str]:
        return verdict.lost(self._lines[case.mark :])

    def _answered(self, case: Case) -> bool:
        noticed = any(group in given(case.victim).groups for group in self._lost(case))
        return noticed and verdict.whole(self._lines, self._asked.groups)

    def _at(self) -> dict[tuple[int, int], str]:
        """Returns the node of each rank."""
        listed = atomic_file.read_json(self._run_dir / "ranks.json") or []
        listed.sort(key=lambda rank: rank["incarnation"])  # a lost host leaves old entries
        named = {(rank["group"], rank["position"]): _node(rank["host"], self._slurm.nodes) for rank in listed}
        return {rank: node for rank, node in named.items() if node}

    def _spared(self) -> list[str]:
        """Returns the node with an embedded store."""
        if uses_etcd(self._run_dir):
            return []
        config = json.loads((self._run_dir / "config.json").read_text(encoding="utf-8"))
        return [_node(config["host"], self._slurm.nodes)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def _conclude(self, code: int) -> int:
        found = verdict.judge(self._run_dir, code, self.cases, self._options.reference)
        console = terminal.console(markup=False, highlight=False)
        _table(self.cases).show(console)
        done = sum(not case.refused for case in self.cases)
        for message in found:
            print(terminal.printable(f"NOT KEPT: {message}"), flush=True)
        words = "every promise was kept" if not found else f"{len(found)} promises were not kept"
        print(f"burn-in: {done} of {len(self.cases)} faults, {words}", flush=True)
        return 1 if found else 0


def _table(cases: Sequence[Case]) -> FittedTable:
    rows = []
    for case in cases:
        where = "" if case.victim is None else _whom(case)
        back = "" if case.back_s is None else f"{case.back_s:.1f} s"
        rows.append((str(case.strike.number), case.strike.kind, where, back, case.refused or case.why))
    columns = [Column(name) for name in ("#", "fault", "where", "recovered after", "reason in the run record")]
    return FittedTable("burn-in", columns, rows, "burn-in: no fault was injected")


def _whom(case: Case) -> str:
    victim = given(case.victim)
    groups = victim.groups
    return f"group{'s' * (len(groups) > 1)} {' '.join(map(str, groups))} on {victim.node}"


def _node(host: str, nodes: Sequence[str]) -> str:
    """Returns Slurm's name of a host; "" if the host is not a node of the job."""
    name = host.partition("(")[0]
    return next((node for node in nodes if node in (name, name.partition(".")[0])), "")


def _start(command: Sequence[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "megatron_ft.cli", *command], stdin=subprocess.DEVNULL)


def _say(line: str) -> None:
    print(terminal.printable(f"burn-in: {line}"), flush=True)
