"""The time from a fault to the commit of the interrupted step, beside torchft 0.2.0; both train the same model.

    python benchmarks/recovery.py [--trials 20] [--default-trials 5] [--faults kill stop cut] [--sizes 4 50] [--quick]
    python benchmarks/recovery.py --hogs MINUTES

A trial starts four groups of one rank, lets them train, and strikes one at a random moment: SIGKILL, SIGSTOP, or the link
of its host is cut (every group on a host of its own, in network namespaces; that needs root and ip). Trials of the systems
alternate. Gradients have 4 MB or 50 MB; computing takes a few milliseconds.

Ours, with default settings, from the run record: from the ``inject`` line, written right before the fault, to the ``step``
line of the step that the first ``recovery`` line names, less the time of the patched microbatches (timeline, the slowest
survivor). torchft: from the fault to the first commit of any survivor in which the victim has no part, and what became of
the interrupted step: ``discarded``, or committed ``short`` of the victim's samples; ``split`` if survivors differ. Of both
also the *delay*: the time by which the interrupted step, or its successor, ended later than a failure-free one. Two
settings: its defaults (only with the smallest gradients: it waits for timeouts, whatever the size), and tight ones
(recovery_torchft.TIGHTEST; ``--hogs`` shows which of them hold on a busy machine). It is installed into an environment of
its own on first use.

All takes about an hour and a quarter, ``--quick`` a minute or two without writing results. ``--hogs`` lets two processes
burn CPU beside four groups for that long, on one host and then on four, and counts who was given up for nothing; then it
does the same with torchft at several settings, which shows how tight they can be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import common
import recovery_ours
import recovery_torchft

from megatron_ft.errors import FTError

sys.path.insert(0, str(common.ROOT))
from tests import netlab

OURS, TIGHTEST, DEFAULTS = "ours, defaults", "torchft, tightest", "torchft, defaults"
LIMIT_S = {"kill": 0.2, "stop": 1.5, "cut": 1.5}
LEAST_RATIO = 5.0
"""The least ratio of the time of torchft with its tightest settings to ours, for kills."""


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # namespaces and runs are cleaned up
    if options.hogs:
        import recovery_hogs

        return recovery_hogs.main(options.hogs, no_hosts(), beside=not options.alone)
    results, skipped, loads = {}, {}, [os.getloadavg()[0]]
    for fault in options.faults:
        if fault == "cut" and no_hosts():
            skipped[fault] = no_hosts()
            print(f"cut: skipped, {skipped[fault]}", flush=True)
            continue
        for megabytes in options.sizes:
            results[fault, megabytes] = compare(fault, megabytes, options, loads)
    verdicts = report(results)
    if options.quick:
        return None
    load = {"median": statistics.median(loads), "largest": max(loads)}
    measured = {**common.about("recovery", " ".join(sys.argv)), "load_average_1m": load}
    rows = [
        {
            "fault": fault,
            "megabytes": megabytes,
            "system": system,
            **summary(trials),
            "measured": measured,
            "trials": trials,
        }
        for (fault, megabytes), systems in results.items()
        for system, trials in systems.items()
    ]
    verdicts, rows = _with_others(verdicts, rows, set(results))
    settings = {TIGHTEST: recovery_torchft.TIGHTEST, DEFAULTS: "none given"}
    more = {"skipped": skipped, "torchft_settings": settings, "verdicts": verdicts, "results": rows}
    path = common.save("recovery", more)
    print(f"load average while measuring: median {statistics.median(loads):.1f}, largest {max(loads):.1f}")
    print(f"raw numbers in {path}")


def _with_others(verdicts: list[dict], rows: list[dict], mine: set[tuple[str, int]]) -> tuple[list[dict], list[dict]]:
    """Merge the new measurements with those of other faults and sizes by an earlier command."""
    path = common.RESULTS / "recovery.json"
    if not path.exists():
        return verdicts, rows
    before = json.loads(path.read_text())
    once = {name: value for name, value in before.items() if name not in ("verdicts", "results")}
    others = [{"measured": once, **row} for row in before["results"] if (row["fault"], row["megabytes"]) not in mine]
    said = tuple(f"{fault}, {megabytes} MB:" for fault, megabytes in mine)
    return [v for v in before["verdicts"] if not v["asked"].startswith(said)] + verdicts, others + rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--default-trials", type=int, default=5, help="of torchft with its defaults")
    parser.add_argument("--faults", nargs="+", default=list(LIMIT_S), choices=list(LIMIT_S))
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 50], metavar="MB", help="of the gradients")
    parser.add_argument(
        "--quick", action="store_true", help="two trials of each fault, 4 MB, without torchft's defaults"
    )
    parser.add_argument("--hogs", type=float, metavar="MINUTES", help="instead: who is given up on a busy machine?")
    parser.add_argument(
        "--alone", action="store_true", help="with --hogs: without torchft, which takes nine minutes more"
    )
    options = parser.parse_args()
    if options.quick:
        options.trials, options.default_trials, options.sizes = 2, 0, [4]
    return options


def no_hosts() -> str:
    """Return why there can be no hosts in network namespaces here; empty if there can."""
    import pytest

    try:
        netlab.require()
    except pytest.skip.Exception as reason:
        return str(reason)
    return ""


# --- measuring --------------------------------------------------------------------------------------------------------


def compare(fault: str, megabytes: int, options: argparse.Namespace, loads: list[float]) -> dict[str, list[dict]]:
    """Run all trials of a fault with gradients of a size, the systems in turn."""
    found: dict[str, list[dict]] = {}
    for number in range(options.trials):
        systems = [OURS, TIGHTEST]
        if number < options.default_trials and megabytes == min(options.sizes):
            systems.append(DEFAULTS)
        for system in systems:
            result = attempt(system, fault, megabytes, number)
            loads.append(os.getloadavg()[0])
            found.setdefault(system, []).append({**result, "load": loads[-1]})
            print(f"{fault} {megabytes} MB {number + 1}/{options.trials} {system}: {_brief(result)}", flush=True)
    return found


def attempt(system: str, fault: str, megabytes: int, number: int) -> dict:
    """Run one trial; a failed trial is a result, too."""
    # With hosts, the first host has the store, or the lighthouse.
    victim = 1 + number % (recovery_ours.GROUPS - 1) if fault == "cut" else number % recovery_ours.GROUPS
    lab = netlab.Lab(recovery_ours.GROUPS) if fault == "cut" else None
    try:
        with tempfile.TemporaryDirectory() as directory:
            what = (Path(directory), fault, megabytes, victim, number)
            if system == OURS:
                return recovery_ours.trial(*what, lab)
            settings = recovery_torchft.TIGHTEST if system == TIGHTEST else recovery_torchft.DEFAULTS
            return recovery_torchft.trial(*what, settings, lab)
    except (RuntimeError, FTError) as error:
        return {"group": victim, "error": str(error)}
    finally:
        if lab is not None:
            lab.close()


def cost(trial: dict) -> float | None:
    """Return the seconds from the fault to the commit, without patch compute; None: no commit followed."""
    return trial.get("beyond_patch_s", trial.get("fault_to_commit_s"))


def fate(trial: dict) -> str:
    """Return what became of the interrupted step."""
    if "error" in trial:
        return "failed"
    if "microbatches" in trial:
        return "kept" if trial["microbatches"] == trial["of_microbatches"] else "short"
    return trial["interrupted_step"]


def summary(trials: list[dict]) -> dict:
    costs = [cost(trial) for trial in trials if cost(trial) is not None]
    return {
        "n": len(trials),
        "reached": len(costs),
        "median_s": statistics.median(costs) if costs else None,
        "largest_s": max(costs, default=None),
        "median_delay_s": statistics.median([t["delay_s"] for t in trials if t.get("delay_s") is not None] or [0.0]),
        "median_stall_s": statistics.median([trial["stall_s"] for trial in trials if "stall_s" in trial] or [0.0]),
        "interrupted_step": dict(Counter(map(fate, trials))),
        "false_alarms": sum(trial.get("false_alarms", 0) for trial in trials),
    }


# --- output -----------------------------------------------------------------------------------------------------------


def report(results: dict[tuple[str, int], dict[str, list[dict]]]) -> list[dict]:
    """Print the table; return the goals, and whether they were met."""
    verdicts = []
    columns = f"{'reached':>8}{'median s':>10}{'largest s':>10}{'delay s':>9}{'stall s':>9}"
    print(f"\n{'fault':6}{'MB':>4}  {'system':18}{columns}  interrupted step")
    for (fault, megabytes), systems in results.items():
        for system, trials in systems.items():
            row = summary(trials)
            step = ", ".join(f"{name} {count}" for name, count in row["interrupted_step"].items())
            numbers = "".join(f"{_seconds(row[name]):>10}" for name in ("median_s", "largest_s"))
            reached = f"{row['reached']}/{row['n']}"
            numbers += "".join(f"{_seconds(row[name]):>9}" for name in ("median_delay_s", "median_stall_s"))
            print(f"{fault:6}{megabytes:>4}  {system:18}{reached:>8}{numbers}  {step}")
        verdicts += judge(fault, megabytes, systems)
    for verdict in verdicts:
        print(f"{'ok  ' if verdict['met'] else 'MISS'} {verdict['asked']}: {verdict['found']}")
    return verdicts


def judge(fault: str, megabytes: int, systems: dict[str, list[dict]]) -> list[dict]:
    ours, theirs = (summary(systems[system]) for system in (OURS, TIGHTEST))
    where = f"{fault}, {megabytes} MB"
    complete = ours["reached"] == ours["n"] and set(ours["interrupted_step"]) == {"kept"}
    median = ours["median_s"]
    verdicts = [
        {
            "asked": f"{where}: at most {LIMIT_S[fault]} s, and the step kept",
            "found": f"{_seconds(median)} s, {ours['interrupted_step']}",
            "met": complete and median <= LIMIT_S[fault],
        }
    ]
    if fault == "kill":
        # With the patch: torchft computes nothing for the lost group, and its time is all of it.
        whole = statistics.median([t["fault_to_commit_s"] for t in systems[OURS] if "error" not in t] or [float("inf")])
        ratio = None if theirs["median_s"] is None else theirs["median_s"] / whole
        verdicts.append(
            {
                "asked": f"{where}: at least {LEAST_RATIO:g} times faster than torchft at its tightest, patch included",
                "found": "torchft did not get there" if ratio is None else f"{ratio:.1f} times",
                "met": complete and ratio is not None and ratio >= LEAST_RATIO,
            }
        )
        mine, other = ours["median_delay_s"], theirs["median_delay_s"]
        verdicts.append(
            {
                "asked": f"{where}: delays the run at least {LEAST_RATIO:g} times less than torchft at its tightest",
                "found": f"{_seconds(mine)} s and {_seconds(other)} s more than a step without a fault, patch included",
                "met": complete and theirs["reached"] and mine * LEAST_RATIO <= other,
            }
        )
    return verdicts


def _brief(result: dict) -> str:
    return result.get("error") or f"{_seconds(cost(result))} s, step {fate(result)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"took {(time.monotonic() - started) / 60:.1f} min")
