"""Hunt for a history that breaks the protocol: ``python -m megatron_ft.proof.explore --seeds 100000``.

Every seed is one scenario. The first that fails is told with its violations, shrunk to the smallest list of faults that
still fails, and printed with the command that replays it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ft.proof.scenario import (
    DRAWN,
    EACH,
    Scenario,
    draw,
    draw_fail_over,
    draw_impure,
    draw_of,
    draw_on_devices,
    draw_wiped_out,
)
from megatron_ft.proof.simulated_cluster import History, play
from megatron_ft.types import listed

_CHUNK = 500
COMMAND = "python -m megatron_ft.proof.explore"

Draw = Callable[[int], Scenario]
_KINDS: dict[str, tuple[Draw, str]] = {
    "fail-over": (draw_fail_over, "the control store can fail over"),
    "impure": (draw_impure, "groups come back with another state"),
    "wiped-out": (draw_wiped_out, "all others die while groups are on their way back"),
}
"""Options that ask for histories of one kind."""


def explore(
    seeds: range, jobs: int, told: Callable[[int], None] = lambda seed: None, draw: Draw = draw
) -> tuple[int | None, Counter]:
    """Play the scenarios of these seeds in order; the first seed that fails, None if none does, and how histories ended.

    ``draw`` makes a scenario of a seed. With several ``jobs`` the result is the same; ``told`` hears how far it has come.
    """
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    ends: Counter = Counter()
    for chunk, (failed, some) in zip(chunks, _results(chunks, jobs, draw), strict=False):
        ends += some
        if failed is not None:
            return failed, ends
        told(chunk[-1])
    return None, ends


def _results(chunks: Sequence[range], jobs: int, draw: Draw) -> Iterator[tuple[int | None, Counter]]:
    play_chunk = partial(_play_chunk, draw)
    if jobs == 1:
        yield from map(play_chunk, chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(play_chunk, chunks)
        finally:
            pool.shutdown(cancel_futures=True)


def _play_chunk(draw: Draw, seeds: range) -> tuple[int | None, Counter]:
    ends: Counter = Counter()
    for seed in seeds:
        try:
            history = play(draw(seed))
        except Exception as error:
            error.add_note(f"megatron_ft: while playing the history of seed {seed}")
            raise
        ends[history.lines[-1]["reason"]] += 1
        if history.violations:
            return seed, ends
    return None, ends


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The same scenario with as few faults as still make it fail: leaves out ever smaller parts of the list."""
    size = len(scenario.faults)
    while size:
        for start in range(0, len(scenario.faults), size):
            shorter = replace(scenario, faults=scenario.faults[:start] + scenario.faults[start + size :])
            if fails(shorter):
                scenario = shorter
                break
        else:
            size = size // 2 if size > 1 else 0
        size = min(size, len(scenario.faults))
    return scenario


def command(scenario: Scenario, draw: Draw = draw) -> str:
    """Returns the command that replays this scenario."""
    whole, which = draw(scenario.seed), ""
    if isinstance(draw, partial) and draw.func is draw_on_devices:
        which, draw = " --device", draw.args[0]
    if isinstance(draw, partial):
        which += f" --policy {draw.args[0]}"
    which += "".join(f" --{kind}" for kind, (of, _) in _KINDS.items() if of is draw)
    kept = [index for index, fault in enumerate(whole.faults) if fault in scenario.faults]
    if len(kept) == len(whole.faults):
        return f"{COMMAND}{which} --seed {scenario.seed}"
    return f"{COMMAND}{which} --seed {scenario.seed} --faults {','.join(map(str, kept)) or 'none'}"


def tell(history: History) -> Iterator[str]:
    """A history for people, a line each; then what is wrong with it."""
    yield str(history.scenario)
    for line in history.lines:
        yield f"{line['t']:9.3f}  {_sentence(line)}"
    if history.resumed:
        yield "the job goes on from the newest state that was saved"
    for line in history.resumed:
        yield f"{line['t']:9.3f}  {_sentence(line)}"
    yield from (f"VIOLATION {violation}" for violation in history.violations)
    yield f"fingerprint {history.fingerprint}"


def _sentence(line: dict[str, Any]) -> str:
    again = f" (start {line['incarnation']})" if line.get("incarnation") else ""
    who = f"group {line.get('group')}{again}"
    match line["event"]:
        case "fault":
            return f"FAULT {line['what'].split(': ', 1)[1]}"
        case "view":
            lost = "".join(f", lost {group} ({why})" for group, why in line["lost"].items())
            joined = f", joined {listed(line['joined'])}" if line["joined"] else ""
            live = listed(line["live"]) or "none"
            return f"view {line['epoch']}, step {line['step']}: live {live}{lost}{joined}; {line['reason']}"
        case "adopt" | "enter":
            return f"{who} {line['event']}s view {line['view']['epoch']}"
        case "state":
            return f"{who} takes the state of step {line['step']} from group {line['source']}"
        case "commit":
            return f"{who} commits step {line['step']} under view {line['epoch']}, model {line['params'][:8]}"
        case "kept":
            return f"{who} saves the state of step {line['step']}: no member is left"
        case "unsaved":
            return f"{who} cannot save the state of step {line['step']}: {line['why']}"
        case "dead":
            return f"{who} is dead"
        case "stop":
            return f"{who} stops: {line['reason']}"
        case "claim":
            fenced = " ".join(f"{group}.{start}" for group, start in line["fenced"])
            what = f"fences {fenced}" if fenced else f"the store is at {line['address']}"
            return f"claim {line['number']} by host {line['by']}: {what} ({line['reason']})"
    return " ".join([line["event"], *(f"{key} {value}" for key, value in line.items() if key not in ("t", "event"))])


def main(arguments: Sequence[str] | None = None) -> int:
    """0: nothing found; 1: a violation; 2: misuse."""
    options = _options().parse_args(arguments)
    of: Draw = _KINDS[options.kind][0] if options.kind else draw
    if options.policy:
        of = partial(draw_of, options.policy)
    if options.device:
        of = partial(draw_on_devices, of)
    if options.seed is not None:
        return _replay(of, options.seed, options.faults)
    started = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    failed, ends = explore(seeds, options.jobs, lambda seed: _progress(seed, seeds, started), of)
    taken_s = time.monotonic() - started
    played = sum(ends.values())
    summary = ", ".join(f"{count} {reason}" for reason, count in ends.most_common())
    if options.out:
        result = {"first": seeds.start, "seeds": len(seeds), "violations": int(failed is not None), "ends": dict(ends)}
        result |= {"seconds": round(taken_s, 1), "jobs": options.jobs, "command": " ".join([COMMAND, *sys.argv[1:]])}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if failed is None:
        print(f"{played} histories, seeds {seeds.start} to {seeds.stop - 1}: no violation ({summary}; {taken_s:.0f} s)")
        return 0
    print(f"seed {failed} fails, after {played} histories; replay it with: {command(of(failed), of)}")
    smallest = shrink(of(failed), lambda scenario: bool(play(scenario).violations))
    print(f"shrunk from {len(of(failed).faults)} faults to {len(smallest.faults)}: {command(smallest, of)}\n")
    print("\n".join(tell(play(smallest))))
    return 1


def _replay(draw: Draw, seed: int, faults: list[int] | None) -> int:
    scenario = draw(seed)
    if faults is not None:
        if faults and max(faults) >= len(scenario.faults):
            last = len(scenario.faults) - 1
            print(f"--faults {max(faults)}: the faults of seed {seed} are numbered from 0 to {last}", file=sys.stderr)
            return 2
        scenario = replace(scenario, faults=tuple(scenario.faults[index] for index in sorted(set(faults))))
    history = play(scenario)
    print("\n".join(tell(history)))
    return 1 if history.violations else 0


def _progress(seed: int, seeds: range, started: float) -> None:
    done = seed - seeds.start + 1
    if sys.stderr.isatty() or done % 20_000 == 0:
        rate = done / (time.monotonic() - started)
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{done} of {len(seeds)} histories, {rate:.0f} a second", end=end, file=sys.stderr, flush=True)


def _whole_number(text: str) -> int:
    value = int(text) if text.isdigit() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return value


def _numbers(text: str) -> list[int]:
    return [] if text == "none" else [_whole_number(part) for part in text.split(",")]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_whole_number, default=10_000, help="how many histories (default 10000)")
    parser.add_argument("--first", type=_whole_number, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--jobs", type=_whole_number, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    parser.add_argument("--seed", type=_whole_number, help="replay this one, with its transcript")
    kind = parser.add_mutually_exclusive_group()
    for name, (_, what) in _KINDS.items():
        kind.add_argument(
            f"--{name}", action="store_const", dest="kind", const=name, help=f"only histories in which {what}"
        )
    kind.add_argument(
        "--policy",
        choices=(*DRAWN, EACH),
        help="histories with this policy, or with one that each seed draws (default: stacked_quota)",
    )
    parser.add_argument("--device", action="store_true", help="on devices in all histories (default: in a fourth)")
    parser.add_argument("--faults", type=_numbers, help="with --seed: only these of its faults, e.g. 0,3; or none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
