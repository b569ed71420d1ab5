"""A series of runs, and its summary."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from megatron_ft.data import prepare
from megatron_ft.record import invariants
from tests import support
from tests.chaos import judge as judge_module
from tests.chaos import play as play_module
from tests.chaos.plan import SILENCE_LIMIT_S, draw, draw_exact, draw_for, draw_with
from tests.chaos.play import Played

_TEXT = support.ROOT / "megatron_ft" / "data" / "addresses.txt"


def run(
    seed: int, directory: Path, keep: bool = False, policy: str = "", exact: bool = False, engine: str = ""
) -> dict[str, Any]:
    """Play the run of that seed, with a policy, and judge it. Its directory stays if it broke a promise
    (``directory/seed-SEED``). ``exact``: with exact reduction, and then the bits are compared."""
    if engine:
        plan = draw_for(engine, seed, policy, exact)
    else:
        plan = draw_exact(seed, policy) if exact else draw_with(policy, seed) if policy else draw(seed)
    why = play_module.missing(plan)
    if why:
        return {"seed": seed, "kind": plan.job.kind, "skipped": why, "violations": [], "faults": []}
    data = prepared(directory)
    reference = play_module.reference(plan.job, directory, data)
    played = play_module.play(plan, directory / f"seed-{seed}", data)
    violations = judge_module.judge(played, reference)
    result = _result(played, reference, violations)
    (played.directory / "result.json").write_text(json.dumps(result, indent=1))
    if not (keep or violations):
        shutil.rmtree(played.directory)
    return result


def prepared(directory: Path) -> Path:
    """Prepare the samples that all runs train on, once."""
    data = directory / "data"
    if not data.exists():
        prepare(data, [_TEXT], vocab_size=512, log=lambda line: None)
    return data


def _result(played: Played, reference: list[dict], violations: list[str]) -> dict[str, Any]:
    lines, job = played.history, played.plan.job
    return {
        "seed": played.plan.seed,
        "kind": job.kind,
        "engine": job.engine,
        "outcome": outcome(lines),
        "groups": job.groups,
        "ranks": job.ranks,
        "hosts": job.hosts,
        "nonfinite": job.nonfinite,
        "policy": {"policy": "stacked_quota", **job.settings},
        "promoted": sum(line.get("promoted", 0) for line in lines if line["event"] == "recovery"),
        "per_group": job.per_group,
        "steps": job.steps,
        "bucket_mb": job.bucket_mb,
        "seconds": round(played.seconds, 1),
        "violations": violations,
        "lost": {str(group): why for group, why in judge_module.lost(lines).items()},
        "views": sum(line["event"] == "view" for line in lines),
        "recoveries": sum(line["event"] == "recovery" for line in lines),
        "rebalanced": sum(line["event"] == "stragglers" for line in lines),
        "largest_loss_difference": None
        if job.kind == "numbers"
        else invariants.largest_loss_difference(lines, reference),
        "woken_before_the_end": judge_module.woken_before_the_end(played, lines),
        "steps_without_agent": _steps_without_agent(played, lines),
        "faults": [{**case.fault.to_json(), "state": case.state, "note": case.note} for case in played.cases],
    }


def outcome(lines: list[dict]) -> str:
    """Return how the run ended."""
    if any(line["event"] == "end" for line in lines):
        return "end"
    if judge_module.wipe_out(lines) is not None:
        return "wiped out"
    return "stopped, as its policy asks" if judge_module.has_stopped(lines) else "none"


def _steps_without_agent(played: Played, lines: list[dict]) -> int:
    """Return the number of steps that were committed while the agent, and with it the store, stood still."""
    stops = {case.key: played.stops[case.number] for case in played.cases if case.number in played.stops}
    spans = [
        (line["t"], line["t"] + stops[line["fault"]]) for line in lines if _is_agents(line) and line["fault"] in stops
    ]
    return sum(any(a < line["t"] < b for a, b in spans) for line in lines if line["event"] == "step")


def _is_agents(line: dict) -> bool:
    return line["event"] == "inject" and line.get("kind") in ("store", "agent")


# --- output for people ------------------------------------------------------------------------------------------------


def describe(seed: int) -> Iterator[str]:
    """Describe the run of that seed, before it is played."""
    plan = draw(seed)
    job = plan.job
    said = (
        f"seed {seed}: {job.kind}, {job.groups} groups x {job.per_group}, {job.ranks} ranks each, {job.hosts} hosts, "
    )
    yield said + f"{job.steps} steps, buckets of {job.bucket_mb} MiB, nonfinite {job.nonfinite}"
    yield from (f"  {number} {_fault(fault.to_json())}" for number, fault in enumerate(plan.schedule.faults, 1))


def tell(result: dict[str, Any], directory: Path) -> Iterator[str]:
    """Return a line for a run that kept its promises, and all there is to know of one that did not."""
    if "skipped" in result:
        yield f"seed {result['seed']}: {result['kind']}: skipped: {result['skipped']}"
        return
    injected = sum(fault["state"] == "injected" for fault in result["faults"])
    said = (
        f"seed {result['seed']}: {result['kind']}, {result['groups']} groups x {result['ranks']} ranks: {injected} of "
    )
    said += (
        f"{len(result['faults'])} faults, lost {sorted(result['lost'])}, {result['outcome']}, {result['seconds']:.0f} s"
    )
    if not result["violations"]:
        yield f"{said}: kept"
        return
    yield f"{said}: VIOLATED"
    yield from (f"  violation: {violation}" for violation in result["violations"])
    yield from (f"  {fault['state']}: {_fault(fault)}" for fault in result["faults"])
    policy = result["policy"].get("standby", result["policy"]["policy"])
    exact = " --exact" if result["policy"].get("reduction") == "exact" else ""
    engine = f" --engine {result['engine']}" if result.get("engine") else ""
    yield f"  again: python -m tests.chaos{exact}{engine} --seed {result['seed']} --policy {policy}"
    yield f"  kept: {directory}/seed-{result['seed']}"


def _fault(fault: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value}" if name != "kind" else str(value) for name, value in fault.items() if name != "state"
    )


# --- output for machines ----------------------------------------------------------------------------------------------


def summary(results: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Return the record of a campaign."""
    played = [result for result in results if "skipped" not in result]
    faults = [fault for result in played for fault in result["faults"]]
    kinds = {
        kind: dict(Counter(f["state"] for f in faults if _kind(f) == kind)) for kind in sorted(set(map(_kind, faults)))
    }
    struck = [fault for fault in faults if fault["state"] == "injected"]
    engine = next((result["engine"] for result in results if result.get("engine")), "")
    name = f"chaos_{engine.replace('-', '_')}" if engine else "chaos_exact" if "--exact" in command else "chaos"
    return {
        **common.about(name, command),
        "runs": len(played),
        "faults": len(struck),
        "violated": [result["seed"] for result in played if result["violations"]],
        "skipped": {str(result["seed"]): result["skipped"] for result in results if "skipped" in result},
        "runs_by_kind": dict(Counter(_run_kind(result) for result in played)),
        "outcomes": dict(Counter(result["outcome"] for result in played)),
        "kinds": kinds,
        "points": dict(Counter(fault["point"] for fault in struck if "point" in fault)),
        "at_followers": sum(fault.get("position") in (1, "all") for fault in struck),
        "promoted": sum(result["promoted"] for result in played),
        "groups_lost": sum(len(result["lost"]) for result in played),
        "views": sum(result["views"] for result in played),
        "rebalanced": sum(result["rebalanced"] for result in played),
        "largest_loss_difference": max((r["largest_loss_difference"] or 0.0 for r in played), default=0.0),
        "woken_before_the_end": sum(len(result["woken_before_the_end"]) for result in played),
        "steps_without_agent": sum(result["steps_without_agent"] for result in played),
        "seconds": round(sum(result["seconds"] for result in played), 1),
        "results": results,
    }


def _run_kind(result: dict[str, Any]) -> str:
    kind = f"numbers, {result['nonfinite']}" if result["kind"] == "numbers" else result["kind"]
    return f"{kind}, {result['ranks']} ranks" if result["ranks"] > 1 else kind


def _kind(fault: dict[str, Any]) -> str:
    if fault["kind"] == "rack":
        return f"rack {fault['how']}"
    if fault["kind"] in ("store", "agent"):
        return f"{fault['kind']} {fault.get('how', 'kill')}"
    if fault["kind"] == "cut" and "share" in fault:
        return "loss of packets"
    if fault["kind"] == "cut":
        way = "cut" if fault.get("direction", "both") == "both" else "cut one way"
        return f"{way}, {'long' if fault['duration_s'] > SILENCE_LIMIT_S else 'short'}"
    if fault["kind"] == "stop":
        return "stop, long" if fault["duration_s"] > play_module.STOPPED_LIMIT_S else "stop, short"
    return fault["kind"]
