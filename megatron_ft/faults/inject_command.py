"""``megatron-ft inject``: read or draw a schedule, show what it would do, or do it."""

from __future__ import annotations

import argparse
import json
import signal
import time

from rich.console import Console
from rich.table import Table

from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.faults import mix, surroundings
from megatron_ft.faults import schedule as schedule_module
from megatron_ft.faults.execute import Case, Injector
from megatron_ft.faults.live import run_size
from megatron_ft.faults.schedule import Schedule

_POLL_S = 0.02


def run(options: argparse.Namespace) -> int:
    """Exit code 0 when all was injected (or shown), 1 when something was refused or not reached. Raises ``FTError``."""
    given = _given(options)
    groups, ranks_per_group = _size(options)
    drawn = given or mix.draw(options.mix, options.seed, groups, options.every_s)
    drawn.check(groups, ranks_per_group)
    if options.write is not None:
        options.write.write_text(json.dumps(drawn.to_json(), indent=1) + "\n", encoding="utf-8")
    console = Console(markup=False, highlight=False)
    if options.dry_run:
        console.print(_preview(drawn, groups, options.min_survivors))
        return 0
    for number, fault in enumerate(drawn.faults, 1):
        try:
            surroundings.check(fault)
        except ConfigError as error:
            raise ConfigError(f"fault {number}: {error}") from None
    injector = Injector(
        options.run_dir,
        drawn,
        groups,
        ranks_per_group,
        min_survivors=options.min_survivors,
        start_timeout_s=options.start_timeout_s,
        say=lambda line: print(line, flush=True),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever ends it, it leaves nothing frozen, cut or filled
        signal.signal(number, signal.default_int_handler)
    try:
        injector.run()
    except KeyboardInterrupt:
        console.print(summary(injector.cases))
        raise
    console.print(summary(injector.cases))
    return 0 if all(case.state in ("injected", "before") for case in injector.cases) else 1


def summary(cases: list[Case]) -> Table:
    """What was injected, and what was not and why."""
    count = sum(case.state in ("injected", "before") for case in cases)
    table = Table(title=f"{count} of {len(cases)} faults injected")
    for name in ("#", "fault", "who", "when", "what became of it"):
        table.add_column(name)
    for case in cases:
        words = {"before": "injected before", "missed": "not reached"}.get(case.state, case.state)
        fault = case.fault
        table.add_row(str(case.number), fault.kind, fault.whom(), fault.when(), f"{words}: {case.note}")
    return table


def _given(options: argparse.Namespace) -> Schedule | None:
    if (options.schedule is None) == (options.mix is None):
        raise ConfigError("give either a schedule or --mix N, so that it is clear what to inject")
    if options.min_survivors < 0:
        raise ConfigError(f"--min-survivors is {options.min_survivors}; it must be at least 0")
    if options.groups is not None and not options.dry_run:
        raise ConfigError("--groups is for --dry-run only; a live run says itself how many groups it has")
    return None if options.schedule is None else schedule_module.load(options.schedule)


def _size(options: argparse.Namespace) -> tuple[int, int]:
    """Of the run, which may be about to start."""
    if options.groups is not None:
        return options.groups, 1
    deadline = time.monotonic() + (0.0 if options.dry_run else options.start_timeout_s)
    while True:
        try:
            return run_size(options.run_dir)
        except LaunchError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def _preview(drawn: Schedule, groups: int, min_survivors: int) -> Table:
    """Counted as if nobody came back: what a live run would refuse can be less, never more."""
    table = Table(title=f"dry run: {len(drawn.faults)} faults, {groups} groups, nothing is touched")
    for name in ("#", "when", "fault", "who", "what would happen", "groups left"):
        table.add_column(name)
    living = frozenset(range(groups))
    for number, fault in enumerate(drawn.faults, 1):
        takes = fault.takes(groups)
        left = living - takes
        if takes and len(left) < min_survivors:
            effect = f"refused: it would leave {len(left)}, --min-survivors is {min_survivors}"
        elif takes and not takes & living:
            effect = "nothing, unless it has come back: it is lost by then"
        else:
            effect, living = _effect(fault), left
        table.add_row(str(number), fault.when(), fault.kind, fault.whom(), effect, str(len(living)))
    return table


def _effect(fault: schedule_module.Fault) -> str:
    lasting = "" if fault.duration_s is None else f" for {fault.duration_s:g} s"
    if fault.signal is not None:
        held = "frozen there, then " if fault.point else ""
        return f"{held}{fault.signal.name}{lasting}"
    return {
        "exception": "an exception in the training thread",
        "oom": "torch.OutOfMemoryError in the training thread",
        "gil": f"the GIL is held{lasting}",
        "slow": f"computes {fault.factor or 1:g} times as long, {fault.steps or 1} steps",
        "nan": f"NaN as {fault.what or 'gradient'} of a microbatch",
        "bitflip": "one bit of a gradient is flipped",
        "cut": f"{(fault.share or 1):.0%} of the packets lost, {fault.direction or 'both'}{lasting}",
        "disk_full": f"the file system is filled{lasting}",
    }[fault.kind]
