"""Runs one after the other, and what they add up to."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from megatron_ft.data import prepare
from megatron_ft.faults import checkers
from tests import support
from tests.chaos import judge as judge_module
from tests.chaos import play as play_module
from tests.chaos.plan import draw
from tests.chaos.play import Played

_TEXT = support.ROOT / "megatron_ft" / "data" / "fallback.txt"


def run(seed: int, directory: Path, keep: bool = False) -> dict[str, Any]:
    """Play the run of that seed and judge it. Its directory stays if it broke a promise (``directory/seed-SEED``)."""
    data = prepared(directory)
    plan = draw(seed)
    reference = play_module.reference(plan.job, directory, data)
    played = play_module.play(plan, directory / f"seed-{seed}", data)
    violations = judge_module.judge(played, reference)
    result = _result(played, reference, violations)
    (played.directory / "result.json").write_text(json.dumps(result, indent=1))
    if not (keep or violations):
        shutil.rmtree(played.directory)
    return result


def prepared(directory: Path) -> Path:
    """The samples all runs train on, made once."""
    data = directory / "data"
    if not data.exists():
        prepare(data, [_TEXT], vocab_size=512, log=lambda line: None)
    return data


def _result(played: Played, reference: list[dict], violations: list[str]) -> dict[str, Any]:
    lines, job = played.history, played.plan.job
    return {
        "seed": played.plan.seed,
        "groups": job.groups,
        "per_group": job.per_group,
        "steps": job.steps,
        "bucket_mb": job.bucket_mb,
        "seconds": round(played.seconds, 1),
        "violations": violations,
        "lost": {str(group): why for group, why in judge_module.lost(lines).items()},
        "views": sum(line["event"] == "view" for line in lines),
        "recoveries": sum(line["event"] == "recovery" for line in lines),
        "largest_loss_difference": checkers.largest_loss_difference(lines, reference),
        "woken_before_the_end": judge_module.woken_before_the_end(played, lines),
        "steps_without_agent": _steps_without_agent(played, lines),
        "faults": [{**case.fault.to_json(), "state": case.state, "note": case.note} for case in played.cases],
    }


def _steps_without_agent(played: Played, lines: list[dict]) -> int:
    """Steps that were committed while the agent, and with it the store, stood still."""
    stops = {case.key: played.stops[case.number] for case in played.cases if case.number in played.stops}
    spans = [(line["t"], line["t"] + stops[line["fault"]]) for line in lines if _is_agents(line) and line["fault"] in stops]
    return sum(any(a < line["t"] < b for a, b in spans) for line in lines if line["event"] == "step")


def _is_agents(line: dict) -> bool:
    return line["event"] == "inject" and line.get("kind") in ("store", "agent")


# --- for people -------------------------------------------------------------------------------------------------------


def describe(seed: int) -> Iterator[str]:
    """The run of that seed, before it is played."""
    plan = draw(seed)
    job = plan.job
    yield f"seed {seed}: {job.groups} groups x {job.per_group}, {job.steps} steps, buckets of {job.bucket_mb} MiB"
    yield from (f"  {number} {_fault(fault.to_json())}" for number, fault in enumerate(plan.schedule.faults, 1))


def tell(result: dict[str, Any], directory: Path) -> Iterator[str]:
    """A line for a run that kept its promises; all there is to know of one that did not."""
    injected = sum(fault["state"] == "injected" for fault in result["faults"])
    said = f"seed {result['seed']}: {injected} of {len(result['faults'])} faults, lost {sorted(result['lost'])} of "
    said += f"{result['groups']}, {result['seconds']:.0f} s"
    if not result["violations"]:
        yield f"{said}: kept"
        return
    yield f"{said}: VIOLATED"
    yield from (f"  violation: {violation}" for violation in result["violations"])
    yield from (f"  {fault['state']}: {_fault(fault)}" for fault in result["faults"])
    yield f"  again: python -m tests.chaos --seed {result['seed']}"
    yield f"  kept: {directory}/seed-{result['seed']}"


def _fault(fault: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" if name != "kind" else str(value) for name, value in fault.items() if name != "state")


# --- for machines -----------------------------------------------------------------------------------------------------


def summary(results: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """What is written down of a campaign."""
    faults = [fault for result in results for fault in result["faults"]]
    kinds = {kind: dict(Counter(f["state"] for f in faults if _kind(f) == kind)) for kind in sorted(set(map(_kind, faults)))}
    struck = [fault for fault in faults if fault["state"] == "injected"]
    return {
        **common.about("chaos", command),
        "runs": len(results),
        "faults": len(struck),
        "violated": [result["seed"] for result in results if result["violations"]],
        "kinds": kinds,
        "points": dict(Counter(fault["point"] for fault in struck if "point" in fault)),
        "groups_lost": sum(len(result["lost"]) for result in results),
        "views": sum(result["views"] for result in results),
        "largest_loss_difference": max(result["largest_loss_difference"] for result in results),
        "woken_before_the_end": sum(len(result["woken_before_the_end"]) for result in results),
        "steps_without_agent": sum(result["steps_without_agent"] for result in results),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "results": results,
    }


def _kind(fault: dict[str, Any]) -> str:
    if fault["kind"] == "rack":
        return f"rack {fault['how']}"
    if fault["kind"] == "stop":
        return "stop, long" if fault["duration_s"] > play_module.STOPPED_LIMIT_S else "stop, short"
    return fault["kind"]
