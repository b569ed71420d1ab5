"""A burn-in: ``supervise`` runs the job of an allocation, this strikes it, one fault after the other, and judges.

All of ours on a node is killed with Slurm's own means (``scancel`` of the step); what is more precise ``megatron-ft inject``
does, in a step of its own there.

Failures it assumes: the run can be over at any moment, a strike may be refused or find nobody: the verdict says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ft.burnin import plan, verdict
from megatron_ft.burnin.verdict import Case
from megatron_ft.config import EMBEDDED
from megatron_ft.errors import LaunchError
from megatron_ft.launch import slurm
from megatron_ft.runtime import history

_LOOK_S = 0.2
_INJECT_S = 60.0


@dataclass(frozen=True)
class Options:
    """``launch``: arguments of ``megatron-ft launch``; ``embedded``: its store ends with host 0's agent."""

    launch: Sequence[str]
    run_dir: Path
    groups: int
    spares: int
    embedded: bool
    strikes: Sequence[plan.Strike]
    freeze_s: float
    patience_s: float
    reference: Path | None = None


def run(options: argparse.Namespace, asked: argparse.Namespace) -> int:
    """``asked``: what is to be launched. Raises ``FTError``."""
    settings = asked.settings.fault_tolerance
    burn_in = BurnIn(
        Options(
            launch=asked.words,
            run_dir=asked.run_dir.resolve(),
            groups=asked.groups,
            spares=asked.spare_hosts,
            embedded=settings.store == EMBEDDED,
            strikes=plan.draw(options.faults, options.seed, options.every_s, options.kinds or plan.DEFAULT),
            freeze_s=options.freeze_s,
            patience_s=options.patience_s,
            reference=options.reference,
        )
    )
    return burn_in.run()


class BurnIn:
    """One. Raises ``LaunchError`` outside of a Slurm job."""

    def __init__(self, options: Options, environ: Mapping[str, str] = os.environ) -> None:
        self._options, self._slurm = options, slurm.job(environ)
        self._tail = history.Tail(options.run_dir)
        self._lines: list[dict[str, Any]] = []
        self._job: subprocess.Popen | None = None
        self._downs = 0
        self.cases = [Case(strike) for strike in options.strikes]

    def run(self) -> int:
        """Until the run is over; 0 only if every promise was kept."""
        # A node that is struck again and again is not broken: it is not to be drained.
        own = ["--failures-per-node", str(len(self.cases) + 1), "--stop-before-s", "30"]
        self._job = _start(["supervise", *own, "launch", *self._options.launch])
        try:
            for case in self.cases:
                self._strike(case)
            code = self._job.wait()
        finally:
            if self._job.poll() is None:
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
            case.refused = "there is nobody who could be struck: all ranks are on the node with the control store"
            return
        case.at, case.mark, strike = time.time(), len(self._lines), case.strike
        _say(f"fault {strike.number}: {plan.KINDS[strike.kind]}: {_whom(case)}")
        try:
            getattr(self, f"_{strike.kind}")(case)
        except LaunchError as error:
            case.refused = str(error)
        if case.refused:
            _say(f"fault {strike.number} was not done: {case.refused}")
            return
        self._await(lambda: self._answered(case), self._options.patience_s)
        case.why = next((why for group, why in self._lost(case).items() if group in case.victim.groups), "")
        if self._answered(case):
            views = [line["t"] for line in self._lines if line["event"] == "view"]
            case.back_s = views[-1] - case.at
            _say(f"fault {strike.number}: all groups are there again after {case.back_s:.1f} s")

    # --- what is done -------------------------------------------------------------------------------------------------

    def _rank(self, case: Case) -> None:
        fault = {"kind": "kill", "group": case.victim.groups[0], "position": case.victim.position, "after_s": 0}
        self._inject(case, fault | ({"point": case.strike.point} if case.strike.point else {}))

    def _agent(self, case: Case) -> None:
        self._inject(case, {"kind": "agent", "after_s": 0})

    def _inject(self, case: Case, *faults: Mapping[str, Any]) -> None:
        number = case.strike.number
        schedule = self._options.run_dir / f"burn-in-{number}.json"
        schedule.write_text(json.dumps({"seed": number, "faults": faults}), encoding="utf-8")
        command = ["inject", str(self._options.run_dir), str(schedule), "--min-survivors", "0"]
        log = self._options.run_dir / "burn-in.log"
        command = [sys.executable, "-m", "megatron_ft.cli", *command]
        srun = slurm.start_step(self._slurm, case.victim.node, f"burn-in/{number}", command, log)
        try:
            srun.wait(_INJECT_S + self._options.freeze_s)
        except subprocess.TimeoutExpired:
            srun.kill()
            srun.wait()
        self._read()
        if not any(line["event"] == "inject" for line in self._lines[case.mark :]):
            case.refused = f"megatron-ft inject has done nothing there; it says why in {log}.{case.victim.node}"

    def _freeze(self, case: Case) -> None:
        """Agent and ranks at once; the injector has them go on, also when it is ended."""
        held = {"how": "stop", "after_s": 0, "duration_s": self._options.freeze_s}
        self._inject(case, {"kind": "agent", **held}, {"kind": "rack", "groups": list(case.victim.groups), **held})

    def _step(self, case: Case) -> None:
        """All processes of our newest step there."""
        steps, node = slurm.steps(self._slurm.id) or (), case.victim.node
        named = sorted((step.name.split("/"), step.id) for step in steps if step.name.startswith("mft/"))
        own = [number for (_, _, its, _), number in named if its == node]
        if not own:
            raise LaunchError(f"Slurm lists no step of ours on {node}")
        fields = {"group": None, "position": None, "pid": None, "signal": "SIGKILL", "point": None}
        history.append(self._options.run_dir, "inject", kind="step", host=node, **fields)
        case.refused = slurm.kill_step(own[-1])

    def _down(self, case: Case) -> None:
        if self._downs >= self._options.spares:
            raise LaunchError(f"a node that was down cannot return to its job; {self._downs} spare ones were used up so")
        node = case.victim.node
        refused = slurm.down(node, "megatron_ft burn-in")
        if refused:
            case.refused, case.excused = f"not permitted: {refused}", True
            return
        self._downs += 1
        slurm.resume(node)

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for line in self._tail.new():
            self._lines.append(line)

    def _over(self) -> bool:
        last = next((line["event"] for line in reversed(self._lines) if line["event"] in ("start", "end", "stop")), "")
        return self._job.poll() is not None or last in ("end", "stop")

    def _await(self, condition: Callable[[], bool], patience_s: float) -> None:
        """Or until the run is over."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self._read()
            if self._over() or condition():
                return
            time.sleep(_LOOK_S)

    def _since(self) -> float:
        return next((line["t"] for line in reversed(self._lines) if line["event"] == "view"), 0.0)

    def _went_on(self, since: float) -> bool:
        """All groups are there, and have made a step together."""
        stepped = any(line["event"] == "step" and line["t"] >= since for line in self._lines)
        return stepped and verdict.whole(self._lines, self._options.groups)

    def _lost(self, case: Case) -> dict[int, str]:
        return verdict.lost(self._lines[case.mark :])

    def _answered(self, case: Case) -> bool:
        noticed = any(group in case.victim.groups for group in self._lost(case))
        return noticed and verdict.whole(self._lines, self._options.groups)

    def _at(self) -> dict[tuple[int, int], str]:
        """The node of each rank."""
        try:
            listed = json.loads((self._options.run_dir / "ranks.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        listed.sort(key=lambda rank: rank["incarnation"])  # a host that was lost has not taken back what it had listed
        named = {(rank["group"], rank["position"]): _node(rank["host"], self._slurm.nodes) for rank in listed}
        return {rank: node for rank, node in named.items() if node}

    def _spared(self) -> list[str]:
        """Whoever has an embedded store."""
        if not self._options.embedded:
            return []
        config = json.loads((self._options.run_dir / "config.json").read_text(encoding="utf-8"))
        return [_node(config["host"], self._slurm.nodes)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def _conclude(self, code: int) -> int:
        found = verdict.judge(self._options.run_dir, code, self.cases, self._options.reference)
        console = Console(markup=False, highlight=False)
        console.print(_table(self.cases))
        done = sum(not case.refused for case in self.cases)
        for message in found:
            print(f"NOT KEPT: {message}", flush=True)
        words = "every promise was kept" if not found else f"{len(found)} promises were not kept"
        print(f"burn-in: {done} of {len(self.cases)} faults, {words}", flush=True)
        return 1 if found else 0


def _table(cases: Sequence[Case]) -> Table:
    table = Table(title="burn-in")
    for name in ("#", "fault", "where", "all groups again after", "what the run said"):
        table.add_column(name)
    for case in cases:
        where = "" if case.victim is None else _whom(case)
        back = "" if case.back_s is None else f"{case.back_s:.1f} s"
        table.add_row(str(case.strike.number), case.strike.kind, where, back, case.refused or case.why)
    return table


def _whom(case: Case) -> str:
    groups = case.victim.groups
    return f"group{'s' * (len(groups) > 1)} {' '.join(map(str, groups))} on {case.victim.node}"


def _node(host: str, nodes: Sequence[str]) -> str:
    """Slurm's name of a host that calls itself so; empty if there is none."""
    name = host.partition("(")[0]
    return next((node for node in nodes if node in (name, name.partition(".")[0])), "")


def _start(command: Sequence[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "megatron_ft.cli", *command], stdin=subprocess.DEVNULL)


def _say(line: str) -> None:
    print(f"burn-in: {line}", flush=True)
