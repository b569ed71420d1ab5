"""The checks of training: a small model, once without failures and once with groups that are killed and stopped."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.doctor.host_orders import Hub
from megatron_ft.doctor.meeting import Message
from megatron_ft.qualify.outcomes import CheckFailed, Found, Measured, NotHere, Qualification
from megatron_ft.qualify.team import ask
from megatron_ft.runlog import history, invariants, verdict

SCRIPT = Path(__file__).with_name("builtin_training.py")
STEPS = 240
PER_GROUP = 2
"""Microbatches of a group in a step."""
_FAULT_STEPS = (20, 80, 140)
"""The steps before which a fault is prepared. They are far apart: while a group is away a step takes a quarter of a
second, and a group comes back within some seconds."""
_POINTS = ("forward", "backward", "reduce", "gate", "update")
_STOP_S = 4.0
_SIZES = {"cpu": (64, 2), "cuda": (1024, 4)}
"""Width and layers of the model."""
_BEGIN_S = 300.0
_LOOK_S = 0.1
_RUN_S, _ENDS_S = 420.0, 60.0
"""Limit of a run, and of its end after that."""
Lines = Sequence[Mapping[str, Any]]


def draw(groups: int, seed: int) -> list[dict[str, Any]]:
    """Return the faults, as ``megatron-ft inject`` reads them: kills and stops of different groups, at random points."""
    rng = random.Random(f"qualify/{seed}")
    victims = rng.sample(range(groups), min(groups, len(_FAULT_STEPS)))
    faults: list[dict[str, Any]] = []
    for number, (group, step) in enumerate(zip(victims, _FAULT_STEPS, strict=False)):
        fault = {"group": group, "step": step + rng.randrange(1, 10), "point": rng.choice(_POINTS)}
        faults.append({"kind": "stop", "duration_s": _STOP_S, **fault} if number == 1 else {"kind": "kill", **fault})
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
        ended = self._train("alone", [])
        lines = self._lines("alone")
        _kept(ended, invariants.check_history(lines, self.groups * PER_GROUP))
        seconds = statistics.median(line["duration_s"] for line in lines if line["event"] == "step")
        return f"{STEPS} steps of {self.groups} groups", [Measured("step", seconds * 1e3, "ms")]

    def _faults(self) -> Found:
        faults = draw(self.groups, self.seed)
        ended = self._train("faults", faults)
        lines, lost = self._lines("faults"), verdict.lost(self._lines("faults"))
        # Whether it has come back is a check of its own.
        unnoticed = [
            f"the {fault['kind']} of group {fault['group']} was not noticed: no view names it as lost"
            for fault in faults
            if fault["kind"] == "stop" and fault["group"] not in lost
        ]
        _kept(ended, verdict.judge(self.directory / "faults") + unnoticed)
        detected = [line["detected_s"] for line in lines if line["event"] == "fault" and "detected_s" in line]
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
        found = invariants.check_history(lines, self.groups * PER_GROUP, reference)
        if found:
            raise CheckFailed("; ".join(found))
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

    def _train(self, name: str, faults: Sequence[Message]) -> dict[int, Message]:
        """Run the script, and return how each host's launcher ended."""
        run_dir, gates = self.directory / name, self.directory / f"{name}.gate"
        config = self.directory / f"{name}.json"
        section = {"bucket_mb": 0.25 if self.device == "cpu" else 25}
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": PER_GROUP}
        config.write_text(json.dumps({**batch, "fault_tolerance": section}), encoding="utf-8")
        width, layers = _SIZES[self.device]
        own = ["--steps", STEPS, "--device", self.device, "--width", width, "--layers", layers, "--gates", gates]
        own += ["--shut", *_FAULT_STEPS[: len(faults)]]
        hosts = self.hub.present
        orders = {}
        for number, host in enumerate(hosts):
            place = ["--hosts", len(hosts), "--host-rank", number]
            if len(hosts) > 1:
                place += ["--job-id", f"{self.job}.{name}", "--address", self.hub.cards[host]["address"]]
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
            env = {"OMP_NUM_THREADS": "1"}
            orders[host] = {"do": "launch", "words": [*map(str, words), str(SCRIPT), "--", *map(str, own)], "env": env}
        ask(self.hub, orders, _BEGIN_S)
        began = self._await_begin(run_dir)
        refused = []
        for step, fault in zip(_FAULT_STEPS, faults, strict=False) if began else ():
            # One after the other: the injectors of all hosts share a lock in the run's directory.
            host = self._host_of(run_dir, fault["group"])
            ask(self.hub, {host: {"do": "inject", "run_dir": str(run_dir), "fault": fault}}, _BEGIN_S)
            Path(f"{gates}.{step}").touch()
            injected = ask(self.hub, {host: {"do": "injected", "limit_s": _BEGIN_S}}, _BEGIN_S)[host]
            if not injected["done"]:
                refused.append(f"the {fault['kind']} of group {fault['group']} was not injected: {injected['said']}")
        finish = {"do": "finish", "limit_s": _RUN_S if began else 0.0}
        ended = ask(self.hub, dict.fromkeys(hosts, finish), _RUN_S + _ENDS_S)
        if not began:
            said = " / ".join(line for one in ended.values() for line in one["said"].splitlines()[-2:])
            raise CheckFailed(f"no step within {_BEGIN_S:g} s: {said}")
        if refused:
            raise CheckFailed("; ".join(refused))
        return ended

    def _host_of(self, run_dir: Path, group: int) -> int:
        """Return the host of a group. Agents list their ranks when all of them have started."""
        deadline = time.monotonic() + _BEGIN_S
        order = {"do": "housed", "run_dir": str(run_dir)}
        while time.monotonic() < deadline:
            said = ask(self.hub, dict.fromkeys(self.hub.present, order), _BEGIN_S)
            for host, one in said.items():
                if group in one["groups"]:
                    return host
            time.sleep(_LOOK_S)
        raise CheckFailed(f"group {group} has no rank that lives")

    def _await_begin(self, run_dir: Path) -> bool:
        deadline = time.monotonic() + _BEGIN_S
        while time.monotonic() < deadline:
            lines = history.read(run_dir) if run_dir.is_dir() else []
            if any(line["event"] in ("begin", "stop", "end") for line in lines):
                return any(line["event"] == "begin" for line in lines)
            time.sleep(_LOOK_S)
        return False


def _kept(ended: Mapping[int, Message], found: Sequence[str]) -> None:
    """Raise ``CheckFailed`` unless every launcher ended with 0 and no promise is broken."""
    broken = [f"host {host}: the run did not end in time" for host, one in ended.items() if one["code"] is None]
    broken += [
        f"host {host}: the run ended with exit code {one['code']}: {' / '.join(one['said'].splitlines()[-2:])}"
        for host, one in ended.items()
        if one["code"]
    ]
    if broken or found:
        raise CheckFailed("; ".join([*broken, *found]))
