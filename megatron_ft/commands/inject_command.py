"""``megatron-ft inject``: reads or draws a schedule, and shows or injects its faults."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Collection
from pathlib import Path

from megatron_ft.cluster.faults import host_faults, mix
from megatron_ft.cluster.faults import schedule as schedule_module
from megatron_ft.cluster.faults.injector import DONE, Case, Injector
from megatron_ft.cluster.faults.schedule import Schedule
from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.record import run_directory
from megatron_ft.run import injection_points
from megatron_ft.utils import shared_file, terminal
from megatron_ft.utils.tables import Column, FittedTable

_POLL_S = 0.02


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft inject``."""
    parser.add_argument("run_dir", type=Path, help="run directory of a live run on this host")
    parser.add_argument("schedule", type=Path, nargs="?", help="schedule, JSON or YAML (docs/fault-injection.md)")
    parser.add_argument(
        "--mix", type=int, metavar="N", help="instead: draw N faults among the living groups, from now on"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of --mix (default: 0)")
    parser.add_argument(
        "--every-s", type=float, default=30.0, metavar="S", help="with --mix: mean time between faults (default: 30)"
    )
    parser.add_argument("--write", type=Path, metavar="JSON", help="write the schedule to this file")
    parser.add_argument(
        "--min-survivors", type=int, default=1, metavar="K", help="refuse a fault that leaves fewer groups (default: 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the faults and inject nothing")
    parser.add_argument(
        "--groups", type=int, metavar="N", help="with --dry-run: number of groups, if there is no run yet"
    )
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="time to wait for the run to start (default: 60)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0 when all faults were injected (or shown), 1 when one was refused or not reached. Raises ``FTError``."""
    given = _given(options)
    groups, ranks_per_group = _size(options)
    drawn = given or mix.draw(options.mix, options.seed, groups, options.every_s)
    drawn.check(groups, ranks_per_group)
    if given is not None or options.dry_run:
        _write(options, drawn)
    console = terminal.console(markup=False, highlight=False)
    if options.dry_run:
        _preview(drawn, groups, options.min_survivors).show(console)
        return 0
    for number, fault in enumerate(drawn.faults, 1):
        try:
            host_faults.check(fault)
        except ConfigError as error:
            raise ConfigError(f"fault {number}: {error}") from None
    injector = Injector(
        options.run_dir,
        drawn if given is not None else lambda age_s, living: _draw(options, age_s, living),
        groups,
        ranks_per_group,
        min_survivors=options.min_survivors,
        start_timeout_s=options.start_timeout_s,
        say=lambda line: print(terminal.printable(line), flush=True),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # run() undoes faults when it is interrupted
        signal.signal(number, signal.default_int_handler)
    try:
        injector.run()
    except KeyboardInterrupt:
        summary(injector.cases).show(console)
        raise
    summary(injector.cases).show(console)
    return 0 if all(case.state in ("injected", "before") for case in injector.cases) else 1


def _draw(options: argparse.Namespace, age_s: float, living: Collection[int]) -> Schedule:
    """Draws the mix for a run of that age with these living groups.

    It is saved in the run directory, so that the same command continues with the same faults after a crash.
    """
    kept = options.run_dir / injection_points.DIRECTORY / f"mix.{options.mix}.{options.seed}.{options.every_s:g}.json"
    run_id = run_directory.config(options.run_dir).get("run_id")
    with contextlib.suppress(OSError, ValueError, LookupError):
        found = json.loads(shared_file.read_record(kept))
        if found["run_id"] == run_id:
            drawn = Schedule.from_json(found["schedule"])
            _write(options, drawn)
            return drawn
    drawn = mix.draw(options.mix, options.seed, living, options.every_s, since_s=age_s)
    shared_file.write_json(kept, {"run_id": run_id, "schedule": drawn.to_json()})
    _write(options, drawn)
    return drawn


def _write(options: argparse.Namespace, drawn: Schedule) -> None:
    if options.write is not None:
        options.write.write_text(json.dumps(drawn.to_json(), indent=1) + "\n", encoding="utf-8")


def summary(cases: list[Case]) -> FittedTable:
    """Returns the table of injected faults, and of the others with the reason."""
    count = sum(case.state in ("injected", "before") for case in cases)
    rows = [
        (str(c.number), c.fault.kind, c.fault.whom(), c.fault.when(), f"{DONE.get(c.state, c.state)}: {c.note}")
        for c in cases
    ]
    columns = [Column(name) for name in ("#", "fault", "target", "when", "result")]
    return FittedTable(f"{count} of {len(cases)} faults injected", columns, rows, "the schedule has no faults")


def _given(options: argparse.Namespace) -> Schedule | None:
    if (options.schedule is None) == (options.mix is None):
        raise ConfigError("give either a schedule or --mix N")
    if options.min_survivors < 0:
        raise ConfigError(f"--min-survivors is {options.min_survivors} and must be at least 0")
    if options.groups is not None and not options.dry_run:
        raise ConfigError("--groups needs --dry-run; the number of groups of a live run is known")
    return None if options.schedule is None else schedule_module.load(options.schedule)


def _size(options: argparse.Namespace) -> tuple[int, int]:
    """Returns groups and ranks per group of the run, which may be about to start."""
    if options.groups is not None:
        return options.groups, 1
    deadline = time.monotonic() + (0.0 if options.dry_run else options.start_timeout_s)
    while True:
        try:
            return run_directory.size(options.run_dir)
        except LaunchError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def _preview(drawn: Schedule, groups: int, min_survivors: int) -> FittedTable:
    """Returns the table of the faults if lost groups do not return. A live run refuses the same faults or fewer."""
    rows = []
    living = frozenset(range(groups))
    for number, fault in enumerate(drawn.faults, 1):
        takes = fault.takes(groups)
        left = living - takes
        if takes and len(left) < min_survivors:
            effect = f"refused: it would leave {len(left)} groups, --min-survivors is {min_survivors}"
        elif takes and not takes & living:
            effect = "none, unless the group has returned by then"
        else:
            effect, living = _effect(fault), left
        rows.append((str(number), fault.when(), fault.kind, fault.whom(), effect, str(len(living))))
    columns = [Column(name) for name in ("#", "when", "fault", "target", "effect", "groups left")]
    title = f"dry run: {len(drawn.faults)} faults, {groups} groups, nothing is injected"
    return FittedTable(title, columns, rows, "dry run: the schedule has no faults")


def _effect(fault: schedule_module.Fault) -> str:
    lasting = "" if fault.duration_s is None else f" for {fault.duration_s:g} s"
    if fault.signal is not None:
        held = "frozen there, then " if fault.point else ""
        return f"{held}{fault.signal.name}{lasting}"
    return {
        "exception": "an exception in the training thread",
        "oom": "torch.OutOfMemoryError in the training thread",
        "gil": f"the GIL is held{lasting}",
        "slow": f"computing takes {fault.factor or 1:g} times as long, for {fault.steps or 1} steps",
        "nan": f"NaN as {fault.what or 'gradient'} of a microbatch",
        "bitflip": "one bit of a gradient is flipped",
        "cut": f"{(fault.share or 1):.0%} of the packets lost, {fault.direction or 'both'}{lasting}",
        "disk_full": f"the file system is filled{lasting}",
    }[fault.kind]
