"""Check any run's history for the invariants that hold whatever dies: for tests, ``report --check`` and simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_ft.types import Microbatch, View

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-6

Lines = Sequence[Mapping[str, Any]]


def check_history(lines: Lines, microbatches: int, reference: Lines | None = None, exact: bool = False) -> list[str]:
    """Return the violations of a finished run, in words; empty without any.

    Args:
        lines: its ``history.jsonl``, parsed.
        microbatches: number of microbatches per step, N*G.
        reference: the history of a failure-free run of the same job and seed. Default: no comparison.
        exact: True if both have ``reduction`` "exact": losses and parameters must have the same bits.
    """
    ends = [line for line in lines if line["event"] == "end"]
    if len(ends) != 1:
        return [f"{len(ends)} end lines, there must be 1"]
    found = _check_steps(lines, first_step(lines), ends[0]["step"], microbatches)
    found += _check_views(lines)
    found += _check_survivors(lines)
    if reference is not None:
        found += _check_bits(lines, reference) if exact else _check_reference(lines, reference)
    return found


def losses(lines: Lines) -> dict[int, float]:
    """Return the loss by step."""
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def largest_loss_difference(lines: Lines, reference: Lines) -> float:
    """Return the largest relative difference of losses over the common steps; infinite if there are none."""
    return largest_difference(losses(lines), losses(reference))


def largest_difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return the same for losses by step."""
    common = mine.keys() & theirs.keys()
    return max((abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in common), default=float("inf"))


def first_step(lines: Lines) -> int:
    """Return the first step of a run, which is not 0 for a run that goes on from a checkpoint."""
    return next((line["step"] for line in lines if line["event"] == "resume"), 0)


def joined(starts: Sequence[Lines]) -> list[Mapping[str, Any]]:
    """Return one history of a job that was started several times; a step made again replaces the former one."""
    found: list[Mapping[str, Any]] = []
    for lines in starts:
        if any(line["event"] in ("step", "end") for line in lines):  # else it was ended before it had made anything
            begins = first_step(lines)
            found = [line for line in found if line["event"] == "step" and line["step"] < begins]
            found += [line for line in lines if line["event"] != "resume"]
    return found


def _check_steps(lines: Lines, first: int, last: int, microbatches: int) -> list[str]:
    counts = Counter(line["step"] for line in lines if line["event"] == "step")
    found = [f"step {step} has {counts[step]} lines" for step in range(first, last + 1) if counts[step] != 1]
    found += [f"step {step} is not of this run" for step in counts if not first <= step <= last]
    found += [
        f"step {line['step']} counts {line['microbatches']} microbatches, not {line.get('of_microbatches', microbatches)}"
        for line in lines
        if line["event"] == "step" and line["microbatches"] != line.get("of_microbatches", microbatches)
    ]
    return found


def _check_views(lines: Lines) -> list[str]:
    epochs = [line["epoch"] for line in lines if line["event"] == "view"]
    return [] if epochs == list(range(len(epochs))) else [f"views are {epochs}, not one each in order"]


def _check_survivors(lines: Lines) -> list[str]:
    prints = {line["group"]: line["params_sha256"] for line in lines if line["event"] == "survivor"}
    return [] if len(set(prints.values())) == 1 else [f"the survivors' parameters differ: {prints}"]


def _check_reference(lines: Lines, reference: Lines) -> list[str]:
    found = []
    if losses(lines).keys() != {step for step in losses(reference) if step >= first_step(lines)}:
        found.append("the steps are not those of the reference")
    loss = largest_loss_difference(lines, reference)
    if loss > LOSS_TOLERANCE:
        found.append(f"the loss differs by {loss:.2e} from the reference, more than {LOSS_TOLERANCE:g}")
    mine, theirs = (next(line["params_norm"] for line in side if line["event"] == "end") for side in (lines, reference))
    if abs(mine - theirs) / theirs > NORM_TOLERANCE:
        found.append(f"params_norm is {mine!r}, the reference has {theirs!r}: more than {NORM_TOLERANCE:g} apart")
    return found


def _check_bits(lines: Lines, reference: Lines) -> list[str]:
    mine, theirs = losses(lines), {s: loss for s, loss in losses(reference).items() if s >= first_step(lines)}
    other = [step for step in sorted(mine.keys() | theirs.keys()) if mine.get(step) != theirs.get(step)]
    found = [f"the losses of steps {other} are not those of the reference, to the bit"] if other else []
    ends = [next(line["params_sha256"] for line in side if line["event"] == "end") for side in (lines, reference)]
    return found + ([] if ends[0] == ends[1] else ["the parameters are not those of the reference, to the bit"])


# --- histories in which each commit names its group (the simulated world's)
# --------------------------------------------

_COUNTER_BITS = 8
DIFFERS = "its state differs"
"""The reason for which a group stops whose state is not the right one, or when it is not known which is."""
WRONG = "wrong "
"""Begins the model of a simulated group that is not what the steps of its run make."""


def contribution(microbatch: Microbatch, shards: int, most: int) -> int:
    """Return a stand-in for the gradient of one microbatch: a number whose digit of that microbatch is 1.

    Sums of such numbers count every microbatch of two neighbouring steps separately, so a sum tells its parts.

    Args:
        microbatch: the microbatch.
        shards: number of shards.
        most: the largest number of microbatches that a shard has in any step.
    """
    position = (microbatch.step % 2 * most + microbatch.index) * shards + microbatch.shard
    return 1 << (_COUNTER_BITS * position)


def complete_sum(step: int, shards: int, per_shard: int, most: int) -> int:
    """Return the sum in which every microbatch of ``step`` counts once, and nothing else does."""
    ones = sum(1 << (_COUNTER_BITS * position) for position in range(shards * per_shard))
    return ones << (_COUNTER_BITS * (step % 2 * shards * most))


def check_commits(lines: Lines) -> list[str]:
    """Return the violations of a history with ``adopt``, ``commit`` and ``state`` lines, in words."""
    checks: list[Callable[[Lines], Iterable[str]]]
    checks = [_once_each, _one_gradient, _one_speed, _one_view_an_epoch, _right_view, _in_step, _good_stops, _an_end]
    checks += [_whole_checkpoints, _shrunk, _no_step_after_a_wipe_out, _right_groups_stay, _wrong_groups_stay_out]
    return [violation for check in checks for violation in check(lines)]


def _of(lines: Lines, *events: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["event"] in events]


def _who(line: Mapping[str, Any]) -> str:
    again = f" (start {line['incarnation']})" if line["incarnation"] else ""
    return f"group {line['group']}{again}"


def wiped_out(begin: Mapping[str, Any], view: View) -> bool:
    """Return whether no group may go on under ``view``, by the policy of the simulated history that ``begin`` opens.

    ``begin["hosts"]``: for each shard the groups that can compute it; "everybody" if no loss can be borne; None: any group
    computes any shard."""
    hosts = begin.get("hosts")
    if hosts is None or not view.lost:
        return False
    return hosts == "everybody" or any(not set(able) & set(view.live) for able in hosts)


def _once_each(lines: Lines) -> Iterator[str]:
    """Every committed step counts every microbatch exactly once, in every bucket."""
    shards, sizes = lines[0]["groups"], lines[0]["microbatches"]
    for line in _of(lines, "commit") if not lines[0].get("shrinks") else ():
        expected = complete_sum(line["step"], shards, sizes[line["step"]], max(sizes))
        for bucket, got in enumerate(line["sums"]):
            if got != expected:
                yield f"{_who(line)} commits step {line['step']} with bucket {bucket}: {_in_words(got, expected)}"


def _in_words(got: int, expected: int) -> str:
    """Return the counters that differ from the expected ones: ``position: count``."""
    size = -(-max(got.bit_length(), expected.bit_length()) // _COUNTER_BITS)
    pairs = zip(got.to_bytes(size, "little"), expected.to_bytes(size, "little"), strict=True)
    return ", ".join(f"number {i} counts {a}, not {b}" for i, (a, b) in enumerate(pairs) if a != b)


def _one_gradient(lines: Lines) -> list[str]:
    """All groups that commit a step, or take its state, then have the same model."""
    models: dict[tuple[int, int], set[str]] = {}
    # Where the batch shrinks, a step that is made again under another view is another one.
    shrinks = bool(lines[0].get("shrinks"))
    for line in _of(lines, "commit") if shrinks else _of(lines, "commit", "state"):
        if line["params"].startswith(WRONG):
            continue
        after = line["step"] + (line["event"] == "commit")
        epoch = line["epoch"] if shrinks else 0
        if after:
            models.setdefault((after, epoch), set()).add(line["params"])
    return [f"before step {step} the model is {sorted(found)}" for (step, _), found in models.items() if len(found) > 1]


def _whole_checkpoints(lines: Lines) -> Iterator[str]:
    """All parts of an attempt to save have one state, that of its step, and were copied from it in one epoch."""
    committed: dict[int, set[str]] = {}
    for line in _of(lines, "commit"):
        committed.setdefault(line["step"] + 1, set()).add(line["params"])
    attempts: dict[str, list[Mapping[str, Any]]] = {}
    for line in _of(lines, "part"):
        attempts.setdefault(line["attempt"], []).append(line)
    for attempt, parts in attempts.items():
        if any(line["params"].startswith(WRONG) for line in parts):
            continue  # its writers' checksums differ, and no checkpoint is made of them
        if len({(line["step"], line["epoch"], line["params"]) for line in parts}) > 1:
            yield f"checkpoint {attempt} has parts of different states: {parts}"
        for line in parts:
            if line["params"] not in committed.get(line["step"], ()):
                yield f"checkpoint {attempt} of step {line['step']} has a part of another state, from {_who(line)}"


def _one_speed(lines: Lines) -> Iterator[str]:
    """All groups that commit a step under the same view have planned it with the same measured speeds."""
    known: dict[tuple[int, int], Any] = {}
    for line in _of(lines, "commit"):
        speeds = line.get("speeds")
        first = known.setdefault((line["epoch"], line["step"]), speeds)
        if speeds != first:
            yield f"{_who(line)} commits step {line['step']} with the speeds {speeds}, others with {first}"


def _one_view_an_epoch(lines: Lines) -> Iterator[str]:
    """No two views have the same epoch: each is written once, in order, and every group adopts the one that stands."""
    written: dict[int, View] = {}
    for line in _of(lines, "view"):
        if line["epoch"] != len(written):
            yield f"view {line['epoch']} is written when {len(written)} are there"
        written.setdefault(line["epoch"], View.from_json(line))
    for line in _of(lines, "adopt", "enter"):
        view = View.from_json(line["view"])
        if view != written.get(view.epoch):
            yield f"{_who(line)} adopts a view {view.epoch} that does not stand"


def _right_view(lines: Lines) -> Iterator[str]:
    """A group that commits has a seat in its view, and goes no further than that view's successor does."""
    views = {line["epoch"]: View.from_json(line) for line in _of(lines, "view")}
    for line in _of(lines, "commit"):
        view, later = views[line["epoch"]], views.get(line["epoch"] + 1)
        if not view.seats(line["group"], line["incarnation"]):
            yield f"{_who(line)} commits step {line['step']} outside of view {view.epoch}"
        if later is not None and later.live and line["step"] > later.step:
            yield (
                f"{_who(line)} commits step {line['step']} under view {view.epoch}, view {later.epoch} is at {later.step}"
            )


def _in_step(lines: Lines) -> Iterator[str]:
    """Every incarnation commits step after step, and the living members of a view are never more than one apart."""
    views = {line["epoch"]: View.from_json(line) for line in _of(lines, "view")}
    at: dict[tuple[int, int], int] = {}
    gone: set[tuple[int, int]] = set()
    for line in _of(lines, "enter", "commit", "state", "dead", "stop"):
        me = (line["group"], line["incarnation"])
        if line["event"] == "enter":
            if line["view"]["step"] == 0 or not line["view"]["epoch"]:  # all have the initial model, or the checkpoint
                at[me] = line["view"]["step"]
        elif line["event"] in ("dead", "stop"):
            gone.add(me)
        elif line["event"] == "state":
            at[me] = line["step"]
        else:
            if at.get(me) != line["step"]:
                yield f"{_who(line)} commits step {line['step']}, it is at {at.get(me)}"
            at[me] = line["step"] + 1
            view = views[line["epoch"]]
            seats = set(view.members) & at.keys()
            behind = sorted(seat for seat in seats - gone if at[seat] < line["step"])
            yield from (f"{_who(line)} commits step {line['step']}, group {g} is at {at[g, n]}" for g, n in behind)


def _good_stops(lines: Lines) -> Iterator[str]:
    """A group stops only because a view leaves it out or is too small to go on with, or before it had the model."""
    views = {line["epoch"]: View.from_json(line) for line in _of(lines, "view")}
    for line in _of(lines, "stop"):
        view = views.get(line["epoch"] + 1)
        if view is None or not view.seats(line["group"], line["incarnation"]) or line["reason"] == DIFFERS:
            continue
        if len(view.live) >= lines[0]["min_groups"] and line["synced"] and not wiped_out(lines[0], view):
            yield f"{_who(line)} stops although it has a seat: {line['reason']}"


def _shrunk(lines: Lines) -> Iterator[str]:
    """Where the batch shrinks, a committed step counts every shard once or not at all, the same in all buckets."""
    shards, sizes = lines[0]["groups"], lines[0]["microbatches"]
    for line in _of(lines, "commit") if lines[0].get("shrinks") else ():
        per_shard, most = sizes[line["step"]], max(sizes)
        whole = [
            sum(contribution(Microbatch(line["step"], shard, i), shards, most) for i in range(per_shard))
            for shard in range(shards)
        ]
        left = line["sums"][0] - sum(part for part in whole if part & line["sums"][0] == part)
        if left or len(set(line["sums"])) > 1:
            yield f"{_who(line)} commits step {line['step']} with parts of shards: {line['sums']}"


def _no_step_after_a_wipe_out(lines: Lines) -> list[str]:
    """No group commits a step under a view by which none may go on."""
    views = {line["epoch"]: View.from_json(line) for line in _of(lines, "view")}
    ended = {epoch for epoch, view in views.items() if wiped_out(lines[0], view)}
    return [
        f"{_who(line)} commits step {line['step']} after the wipe-out of view {line['epoch']}"
        for line in _of(lines, "commit")
        if line["epoch"] in ended
    ]


def _right_groups_stay(lines: Lines) -> list[str]:
    """No group with the right state leaves because others hold another one; a tie ends all of them."""
    left = (line for line in _of(lines, "differs") if not line["tied"] and not line["params"].startswith(WRONG))
    return [f"{_who(line)} leaves in step {line['step']} although its state is right" for line in left]


def _wrong_groups_stay_out(lines: Lines) -> Iterator[str]:
    """A group that enters with another state does not commit that step beside a living group with the right one. If no such
    group lives any more, no state is left to compare with."""
    gone = {(line["group"], line["incarnation"]): line["t"] for line in _of(lines, "dead", "stop") if "t" in line}
    entered = {(line["group"], line["incarnation"]): line["view"]["step"] for line in _of(lines, "enter")}
    taken = {(line["group"], line["incarnation"], line["step"]): line["params"] for line in _of(lines, "state")}
    right = defaultdict[int, set[tuple[int, int]]](set)
    for line in _of(lines, "commit"):
        if not line["params"].startswith(WRONG):
            right[line["step"]].add((line["group"], line["incarnation"]))
    for line in _of(lines, "commit"):
        seat, step = (line["group"], line["incarnation"]), line["step"]
        enters = line["incarnation"] and entered.get(seat) == step and taken.get((*seat, step), "").startswith(WRONG)
        if enters and any(gone.get(other, line["t"]) >= line["t"] for other in right[step]):
            yield f"{_who(line)} enters in step {step} with another state"


def check_nobody_left_out(lines: Lines) -> list[str]:
    """No view leaves out a living group that has the model; for histories without a reason to do so."""
    left_out = [line for line in _of(lines, "stop") if line["synced"] and "outside view" in line["reason"]]
    return [f"{_who(line)} lives and is left out: {line['reason']}" for line in left_out]


def check_last_states(lines: Lines, resumed: Lines) -> list[str]:
    """Return the violations of what groups on their way back save when no member is left (``kept``), and of the job that
    goes on from it (``resumed``)."""
    found = []
    for line in _of(lines, "kept"):
        parts = {part["rank"] for part in _of(lines, "part") if part["attempt"] == line["attempt"]}
        lacking = sorted(set(range(line["ranks"])) - parts)
        if lacking:
            found.append(
                f"{_who(line)} publishes the state of step {line['step']} without a part of the ranks {lacking}"
            )
        later = [one for one in _of(lines, "commit") if one["epoch"] > line["epoch"] and one["t"] > line["t"]]
        found += [f"{_who(line)} saves the last state, and {_who(one)} commits step {one['step']}" for one in later[:1]]
    if resumed:
        begin, end = resumed[0], resumed[-1]
        newest = max(line["step"] for line in _of(lines, "kept"))
        first = min((line["step"] for line in _of(resumed, "commit")), default=begin["steps"])
        if first != newest or end["reason"] != "finished":
            found.append(f"the job goes on from step {first}, {newest} is saved, and ends: {end['reason']}")
        found += check_commits(resumed)
        if not begin.get("shrinks"):
            found += _one_gradient([begin, *lines, *resumed])
    return found


def check_deaths(lines: Lines) -> list[str]:
    """No process with a seat dies except by a fault, at its moment; one that stops by itself says why (``stop``)."""
    struck = {line["t"] for line in _of(lines, "fault")}
    seated = {(line["group"], line["incarnation"]) for line in _of(lines, "enter")}
    dead = (line for line in _of(lines, "dead") if (line["group"], line["incarnation"]) in seated)
    return [f"{_who(line)} dies at {line['t']}, and no fault has struck it" for line in dead if line["t"] not in struck]


def _an_end(lines: Lines) -> list[str]:
    """After the faults stop, every living group reaches the end within the bound."""
    end = lines[-1]
    return [f"no progress: {end['members']} at {end['t']}"] if end.get("reason") == "stuck" else []
