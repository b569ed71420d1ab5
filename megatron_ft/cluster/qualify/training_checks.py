"""The checks of training: a small model, once without failures and once with groups that are killed and stopped."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.cluster.doctor.host_orders import Hub
from megatron_ft.cluster.qualify.outcomes import CheckFailed, Found, Measured, NotHere, Qualification
from megatron_ft.cluster.qualify.team import ask
from megatron_ft.proof import verdict
from megatron_ft.record import history, invariants
from megatron_ft.run import injection_points
from megatron_ft.run.injection_points import Breakpoint

SCRIPT = Path(__file__).with_name("builtin_training.py")
STEPS = 240
PER_GROUP = 2
"""Microbatches of a group in a step."""
_FAULT_STEPS = (20, 80, 140)
"""The steps a little after which a fault strikes. They are far apart: while a group is away a step takes a quarter of a
second, and a group comes back within some seconds."""
_POINTS = ("forward", "backward", "reduce", "gate", "update")
_SIZES = {"cpu": (64, 2), "cuda": (1024, 4)}
"""Width and layers of the model."""
_RUN_S, _ENDS_S = 600.0, 60.0
"""Limit of a run, and of its end after that."""
Lines = Sequence[Mapping[str, Any]]


def draw(groups: int, seed: int) -> list[dict[str, Any]]:
    """Return the faults: kills and stops of different groups, at random points."""
    rng = random.Random(f"qualify/{seed}")
    victims = rng.sample(range(groups), min(groups, len(_FAULT_STEPS)))
    faults: list[dict[str, Any]] = []
    for number, (group, step) in enumerate(zip(victims, _FAULT_STEPS, strict=False)):
        fault = {"group": group, "step": step + rng.randrange(1, 10), "point": rng.choice(_POINTS)}
        faults.append({"kind": "stop" if number == 1 else "kill", **fault})
    return faults


@dataclass
class TrainingChecks:
    """Runs on all hosts.

    Attributes:
        hub: the connections to all hosts.
        groups: number of groups.
        device: "cpu" or "cuda".
        directory: new and empty; all hosts share it.
        job: name of the qualification, which no other one has.
        seed: of the faults.
    """

    hub: Hub
    groups: int
    device: str
    directory: Path
    job: str
    seed: int = 0

    def run(self, qualification: Qualification) -> None:
        """Make the checks, in the order of the table."""
        if not qualification.make("training.alone", self._alone):
            qualification.skip("training", "the run without failures has failed (training.alone)")
            return
        if qualification.make("training.faults", self._faults):
            qualification.make("training.rejoin", self._rejoin)
            qualification.make("training.losses", self._losses)
        qualification.make("training.memory", self._memory)
        qualification.skip("training", "the run with faults has failed (training.faults)")

    def _lines(self, name: str) -> Lines:
        return history.read(self.directory / name)

    def _alone(self) -> Found:
        self._train("alone", [])
        lines = self._lines("alone")
        _refuse(invariants.check_history(lines, self.groups * PER_GROUP))
        seconds = statistics.median(line["duration_s"] for line in lines if line["event"] == "step")
        return f"{STEPS} steps of {self.groups} groups", [Measured("step", seconds * 1e3, "ms")]

    def _faults(self) -> Found:
        faults = draw(self.groups, self.seed)
        self._train("faults", faults)
        lines, lost = self._lines("faults"), verdict.lost(self._lines("faults"))
        struck = {line["group"] for line in lines if line["event"] == "inject"}
        _refuse(f"group {fault['group']} has not got to its fault" for fault in faults if fault["group"] not in struck)
        # Whether it has come back is a check of its own.
        unnoticed = [
            f"the {fault['kind']} of group {fault['group']} was not noticed: no view names it as lost"
            for fault in faults
            if fault["kind"] == "stop" and fault["group"] not in lost
        ]
        _refuse(verdict.judge(self.directory / "faults") + unnoticed)
        detected = [line["detected_s"] for line in lines if line["event"] == "fault" and line["detected_s"] is not None]
        stalls = [line["stall_s"] for line in lines if line["event"] == "recovery" and line["patched"]]
        numbers = [Measured("longest detection", max(detected, default=0.0), "s")]
        if stalls:
            numbers.append(Measured("longest stall of a step", max(stalls), "s"))
        said = ", ".join(f"{fault['kind']} of group {fault['group']} ({fault['point']})" for fault in faults)
        return f"{said}; each of {STEPS} steps counted {self.groups * PER_GROUP} microbatches", numbers

    def _rejoin(self) -> Found:
        lines = self._lines("faults")
        if verdict.absent(lines):
            live = next(line["live"] for line in reversed(lines) if line["event"] == "view")
            raise CheckFailed(f"only groups {live} of {self.groups} are members at the end; see {self.directory}")
        away: dict[str, float] = {}
        back = []
        for line in lines:
            if line["event"] == "view":
                away |= dict.fromkeys(line["lost"], line["t"])
                back += [line["t"] - away[str(group)] for group in line["joined"] if str(group) in away]
        return f"{len(back)} times, while the others trained", [
            Measured("longest absence", max(back, default=0.0), "s")
        ]

    def _losses(self) -> Found:
        lines, reference = self._lines("faults"), self._lines("alone")
        _refuse(invariants.check_history(lines, self.groups * PER_GROUP, reference))
        difference = invariants.largest_loss_difference(lines, reference)
        return f"at most {invariants.LOSS_TOLERANCE:g} apart is allowed", [
            Measured("largest difference", difference, "")
        ]

    def _memory(self) -> Found:
        logged = [line for line in self._lines("alone") if line["event"] == "log"]
        found = [line["values"] for line in logged if "layer_bytes_per_parameter" in line["values"]]
        if not found:
            raise NotHere("no GPU, whose memory torch would count; docs/engines.md has the bytes of each engine")
        reason = f"beside parameters and optimizer state, gradients included, of {found[0]['parameters']} parameters"
        return reason, [Measured("layer", found[0]["layer_bytes_per_parameter"], "bytes per parameter")]

    def _train(self, name: str, faults: Sequence[Mapping[str, Any]]) -> None:
        """Run the script on all hosts. Raises ``CheckFailed`` unless every launcher ends with 0."""
        run_dir, config = self.directory / name, self.directory / f"{name}.json"
        section = {"bucket_mb": 0.25 if self.device == "cpu" else 25}
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": PER_GROUP}
        config.write_text(json.dumps({**batch, "fault_tolerance": section}), encoding="utf-8")
        width, layers = _SIZES[self.device]
        own = ["--steps", STEPS, "--device", self.device, "--width", width, "--layers", layers]
        holds = [Breakpoint(fault["group"], fault["step"], fault["point"]) for fault in faults]
        env = {"OMP_NUM_THREADS": "1", **injection_points.to_env(holds)}
        hosts = self.hub.present
        orders = {}
        for number, host in enumerate(hosts):
            place = ["--hosts", len(hosts), "--host-rank", number]
            if len(hosts) > 1:
                place += ["--job-id", f"{self.job}.{name}", "--address", self.hub.host_records[host]["address"]]
            words = [
                "launch",
                "--groups",
                self.groups,
                "--config",
                config,
                "--run-dir",
                run_dir,
                "--tee",
                "none",
                *place,
            ]
            orders[host] = {
                "do": "train",
                "words": [*map(str, words), str(SCRIPT), "--", *map(str, own)],
                "env": env,
                "run_dir": str(run_dir),
                "faults": faults,
                "limit_s": _RUN_S,
            }
        for host, ended in ask(self.hub, orders, _RUN_S + _ENDS_S).items():
            if ended["code"] != 0:
                how = "did not end in time" if ended["code"] is None else f"ended with exit code {ended['code']}"
                raise CheckFailed(f"host {host}: the run {how}: {ended['said']}")


def _refuse(found: Iterable[str]) -> None:
    """Raise ``CheckFailed`` if something was found."""
    if told := "; ".join(found):
        raise CheckFailed(told)
