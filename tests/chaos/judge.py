"""The promises of every chaos run, whatever was injected; each check returns its violations in words.

After a silent error of a gradient (``nan``, ``bitflip``) the losses are not promised; the promises are those of the
policy for gradients that are not finite (``run.nonfinite``), and that all survivors have the same model to the bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from signal import SIGSTOP, SIGTERM
from typing import Any

from megatron_ft.cluster.faults.injector import Case
from megatron_ft.cluster.faults.schedule import RAISING
from megatron_ft.core.detection.link_detector import AGREED
from megatron_ft.core.detection.rank_health import LOOK_S
from megatron_ft.core.scheduling.policies import DROP
from megatron_ft.errors import NOT_SAVED, WIPED_OUT, FTError, RunStopped
from megatron_ft.proof.replay import replay
from megatron_ft.record import invariants
from megatron_ft.record.protocol_trace import Record
from megatron_ft.run.injection_points import reached_file
from tests.chaos.plan import SILENCE_LIMIT_S, STOPPED_LIMIT_S, Job, is_long, takes
from tests.chaos.play import Played

_SLACK_S = LOOK_S
"""The delay that a look of the agent adds at most; a stop that comes so close to the limit may be either."""
_BEATS_S = 0.3
"""The time by which a silence is longer than the cut: the heartbeats before and after it, and the next look."""

Lines = list[dict[str, Any]]


def judge(played: Played, reference: Lines) -> list[str]:
    """Return the violations of one run; empty when every promise was kept."""
    lines, job = played.history, played.plan.job
    found = _before(played, lines, reference) + _replayed(played) + _left(played)
    if has_stopped(lines):
        return found + _stop(played, lines)
    if (view := wipe_out(lines)) is not None:
        return found + _wiped_out(played, view)
    comparable = reference if _first(played, job) is None and job.policy != DROP else None
    whole, shrunk = _whole_steps(lines, job) if job.policy == DROP else (lines, [])
    found += _end(played) + shrunk + invariants.check_history(whole, job.groups * job.per_group, comparable, job.exact)
    if not any(line["event"] == "end" for line in lines):
        return found
    found += _survivors(lines) + _innocent(played, lines) + _said_so(played, lines) + _one_end(played, lines)
    return found + _policy(played, lines)


def _whole_steps(lines: Lines, job: Job) -> tuple[Lines, list[str]]:
    """Return a history under ``drop`` as if its steps had all microbatches, and the steps with another number than the
    shards of some of the living groups."""
    found, whole, before = [], [], job.groups
    for line in lines:
        if line["event"] == "step":  # a group that had given all is lost before the others have committed
            count, most = line["microbatches"], job.per_group * max(before, len(line["live"]))
            before = len(line["live"])
            if not 0 < count <= most or count % job.per_group:
                found.append(f"step {line['step']} counts {count} microbatches of {len(line['live'])} groups")
            line = {**line, "microbatches": job.groups * job.per_group}
        whole.append(line)
    return whole, found


def has_stopped(lines: Lines) -> bool:
    """Return whether the run has stopped because that is its policy for gradients that are not finite."""
    return any(line["event"] == "stop" and "nonfinite is 'stop'" in line["reason"] for line in lines)


def wipe_out(lines: Lines) -> dict[str, Any] | None:
    """Return the view after which no group may go on under the run's policy; None if there is none."""
    stops = [line for line in lines if line["event"] == "stop" and "wipe-out" in line["reason"]]
    return [line for line in lines if line["event"] == "view" and line["lost"]][-1] if stops else None


def _wiped_out(played: Played, view: dict[str, Any]) -> list[str]:
    """Check that the run stopped for a shard without a living host, and that the job can be started again."""
    run = Record.load(played.run_dir).job
    assert run.placement is not None
    hosts = [set(able) & set(view["live"]) for able in run.placement.hosts]
    found = (
        [] if run.policy.wipes_out and not all(hosts) else [f"it is wiped out, but view {view['epoch']} has all shards"]
    )
    if played.code != WIPED_OUT:
        found.append(f"it is wiped out, but the launcher ended with exit code {played.code}")
    return found


def lost(lines: Lines) -> dict[int, str]:
    """Return the lost groups of all views, with the reasons."""
    return {int(group): why for line in lines if line["event"] == "view" for group, why in line["lost"].items()}


def woken_before_the_end(played: Played, lines: Lines) -> list[int]:
    """Return the frozen groups that went on, left out by then, while the others were still training."""
    end = next((line["t"] for line in lines if line["event"] == "end"), time.time())
    views = {int(group): line["t"] for line in lines if line["event"] == "view" for group in line["lost"]}
    found, job = [], played.plan.job
    for case in played.cases:
        begun = next((line["t"] for line in lines if line.get("fault") == case.key), None)
        if begun is not None and is_long(case.fault) and case.number in played.stops:
            woken = begun + played.stops[case.number]
            found += [group for group in takes(case.fault, job) if views.get(group, woken) < woken < end]
    return found


def _end(played: Played) -> list[str]:
    found = [played.trouble] if played.trouble else []
    if played.code is None:
        return [*found, f"it hung and was ended after {played.seconds:.0f} s"]
    allowed = (0, NOT_SAVED) if _struck_after_the_end(played) else (0,)
    if played.code not in allowed:
        found.append(f"the launcher ended with exit code {played.code}")
    view = next((line for line in reversed(played.history) if line["event"] == "view"), {"live": []})
    return found + [
        f"the launcher of host {host} ended with exit code {code}, it had a group that reached the end"
        for host, code in enumerate(played.codes)
        if host and code not in allowed and played.plan.job.groups_of(host) & set(view["live"])
    ]


def _struck_after_the_end(played: Played) -> bool:
    """Return whether a group was killed when all steps were done: it could have been writing its final model."""
    said = " ".join(line["reason"] for line in played.history if line["event"] == "not_saved")
    struck = [
        group for case in played.cases if case.state == "injected" for group in takes(case.fault, played.plan.job)
    ]
    return any(f"the script of group {group} failed" in said for group in struck)


def _left(played: Played) -> list[str]:
    return [f"process {pid} of the run is left" for pid in played.left]


def _replayed(played: Played) -> list[str]:
    try:
        result = replay(Record.load(played.run_dir))
    except FTError as error:
        return [f"replay: {error}"]
    found = [
        f"replay: {decision.what}: {difference.name}: recorded {difference.recorded}, core decides {difference.decided}"
        for decision in result.different
        for difference in decision.differences
    ]
    return found + ([f"replay stopped: {result.stopped}"] if result.stopped else [])


def _survivors(lines: Lines) -> list[str]:
    """Check that the members of the last view, and no others, are there at the end; a group that is lost after its
    line was there."""
    ends = next(number for number, line in enumerate(lines) if line["event"] == "end")
    live = [line["live"] for line in lines[:ends] if line["event"] == "view"][-1]
    there = sorted(line["group"] for line in lines if line["event"] == "survivor")
    return [] if there == sorted(live) else [f"the survivors are {there}, the last view has {sorted(live)}"]


def _innocent(played: Played, lines: Lines) -> list[str]:
    """Check that no group is lost without a fault that may take it."""
    may_be: set[int] = set()
    for case in injected(played):
        may_be |= takes(case.fault, played.plan.job)
        lasted_s = played.stops.get(case.number, 0.0)  # this machine may have been too busy to begin or end it in time
        stood_s = max(lasted_s, played.stood.get(case.number, 0.0))
        if case.fault.kind == "stop" and stood_s > STOPPED_LIMIT_S - _SLACK_S:
            may_be.add(case.fault.group)
        if case.fault.kind == "cut" and lasted_s > AGREED * SILENCE_LIMIT_S - _BEATS_S:
            may_be |= takes(replace(case.fault, duration_s=max(lasted_s, SILENCE_LIMIT_S)), played.plan.job)
    may_be |= _held_in_vain(played)
    return [
        f"group {group} is lost, it should not be: {why}" for group, why in lost(lines).items() if group not in may_be
    ]


def _held_in_vain(played: Played) -> set[int]:
    """Return the groups with a rank that froze at a point where others should have, too, and did not: perhaps for too
    long."""
    found = set()
    for case in played.cases:
        for group, position in case.fault.targets(played.plan.job.ranks) if case.state == "missed" else ():
            with suppress(OSError, ValueError):
                reached = json.loads(reached_file(played.run_dir, group, position).read_text())
                found |= {group} if reached["fault"] == case.key else set()
    return found


def injected(played: Played) -> Iterator[Case]:
    return (case for case in played.cases if case.state == "injected")


def _one_end(played: Played, lines: Lines) -> list[str]:
    """Check that a cut link costs one of its two hosts."""
    job = played.plan.job
    gone = [group for group, why in lost(lines).items() if "cut off" in why]
    hosts = {host for host in range(job.hosts) if job.groups_of(host) & set(gone)}
    return [f"hosts {sorted(hosts)} are cut off, only one can be"] if len(hosts) > 1 else []


def _said_so(played: Played, lines: Lines) -> list[str]:
    """Check that a rank that was not killed, but whose group is lost, has found that out and ended by itself.

    The rank was frozen and is awake again, or was told to leave, or another rank of its group is gone. A rank that has
    committed every step and finds the run ended has nothing to report.
    """
    found, job = [], played.plan.job
    ways_out = ("outside view", "has left", "was left out", "is left out of the run", f"step {job.steps - 1} ")
    full = any(case.fault.kind == "disk_full" for case in injected(played))  # then a report may be missing
    for group, why in lost(lines).items():
        for position in range(job.ranks):
            if full or "cut off" in why or _may_die(played, group, position):
                continue
            log = (played.run_dir / "logs" / f"g{group}.p{position}.log").read_text(errors="replace")
            if not any(words in log for words in ways_out):
                found.append(
                    f"rank {position} of lost group {group} lived, and did not say that it is out: {log[-300:]!r}"
                )
    return found


def _may_die(played: Played, group: int, position: int) -> bool:
    """Return whether this rank may have ended at a fault of its own: killed, raising, or held at a point for a kill."""
    ranks = played.plan.job.ranks
    for case in played.cases:
        fault = case.fault
        deadly = fault.kind in (*RAISING, "nan", "bitflip") or fault.signal not in (None, SIGSTOP, SIGTERM)
        if fault.kind != "store" and deadly and (group, position) in fault.targets(ranks):
            return True
    return False


# --- gradients that are not finite ------------------------------------------------------------------------------------


def _corruptions(played: Played, *kinds: str) -> list[Case]:
    return [case for case in injected(played) if case.fault.kind in (kinds or ("nan", "bitflip"))]


def _first(played: Played, job: Job) -> int | None:
    """Return the first step that an error may have got into; under recompute no NaN does."""
    kinds = ("bitflip",) if job.nonfinite == "recompute" else ()
    return min((case.fault.step for case in _corruptions(played, *kinds)), default=None)


def _before(played: Played, lines: Lines, reference: Lines) -> list[str]:
    """Check that the losses before the first error are those of the run without failures."""
    first = _first(played, played.plan.job)
    if not first or played.plan.job.policy == DROP:
        return []
    sound = [line for line in lines if line["event"] == "step" and line["step"] < first]
    loss = invariants.largest_loss_difference(sound, reference)
    if played.plan.job.exact and loss:
        return [f"the loss differs by {loss:.2e} before the first error, with exact reduction"]
    return [f"the loss differs by {loss:.2e} before the first error"] if not loss <= invariants.LOSS_TOLERANCE else []


def _stop(played: Played, lines: Lines) -> list[str]:
    """Check that the run stops only for a reason, in all groups, and names the group that caused it."""
    found = [] if played.plan.job.nonfinite == "stop" else ["it stopped, which is not its policy"]
    if not _corruptions(played):
        found.append("it stopped, but no gradient was corrupted")
    if played.code != RunStopped.exit_code:
        found.append(f"it stopped, but the launcher ended with exit code {played.code}")
    if any(line["event"] == "end" for line in lines):
        found.append("it stopped, and has an end")
    named = {(line["group"], line["step"]) for line in lines if line["event"] == "nonfinite"}
    hit = {(case.fault.group, case.fault.step) for case in _corruptions(played)}
    return found + ([] if named and named <= hit else [f"it names {sorted(named)}, corrupted were {sorted(hit)}"])


def _policy(played: Played, lines: Lines) -> list[str]:
    """Check a run that has reached its end against its policy."""
    policy, nans, gone = played.plan.job.nonfinite, _corruptions(played, "nan"), lost(lines)
    if policy == "stop":  # the others know nothing of a group that was lost in that step
        # Sums that were discarded had no part in an update, and the step was computed again without the NaN.
        again = {line["step"] for line in lines if line["event"] == "discarded"}
        stayed = [case.fault.group for case in nans if case.fault.group not in gone and case.fault.step not in again]
        return [f"a gradient of group {group} was NaN, and it did not stop" for group in stayed]
    if policy == "recompute":
        flips = [case.fault.step for case in _corruptions(played, "bitflip")]
        sure = [case for case in nans if all(step > case.fault.step for step in flips)]
        return [f"group {case.fault.group} had a NaN, and stayed" for case in sure if case.fault.group not in gone]
    named = {(line["group"], line["step"]) for line in lines if line["event"] == "nonfinite"}
    return [
        f"group {case.fault.group} had a NaN in step {case.fault.step}, and is not named"
        for case in nans
        if case.fault.group not in gone and (case.fault.group, case.fault.step) not in named
    ]
