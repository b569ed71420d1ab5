"""``megatron-ft plan``: from its options to a table, JSON, a picture and a section to paste."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from megatron_ft.errors import ConfigError
from megatron_ft.planner import inputs, section, tables
from megatron_ft.planner.cluster import Cluster
from megatron_ft.planner.estimate import Recommendation, recommend
from megatron_ft.planner.presets import PRESETS


def cluster(options: argparse.Namespace) -> Cluster:
    """What is asked about, checked."""
    if options.plot:
        from megatron_ft.planner import plots  # half a second that a table does not need

        plots.check_path(options.plot)
    flags = {name: getattr(options, name) for name in inputs.NAMES}
    return inputs.cluster(options.preset, options.file, flags, options.values)


def show(cluster: Cluster, options: argparse.Namespace, refused: Callable[[section.Section], str | None]) -> int:
    """Print and write all that is asked for. ``refused``: the config's reason against a section, None for none."""
    plan = recommend(cluster, inputs.redundancy(options.redundancy))
    pasted, hints = section.choose(cluster, plan, refused)
    source = PRESETS[options.preset].source if options.preset else None
    if options.plot:
        from megatron_ft.planner import plots

        plots.plan_plot(cluster, plan, options.plot)
    if options.out:
        _write(options.out, pasted, hints)
    if options.json:
        print(json.dumps(tables.as_json(cluster, plan, pasted, hints, source), indent=2))
    else:
        _print(Console(), cluster, plan, pasted, hints, source)
        for what, path in (("picture", options.plot), ("section", options.out)):
            if path:
                print(f"{what}: {path}")
    return 0


def _print(
    console: Console,
    cluster: Cluster,
    plan: Recommendation,
    pasted: section.Section | None,
    hints: list[str],
    source: str | None,
) -> None:
    console.print(tables.cluster_table(cluster))
    if source:
        console.print(f"[dim]{escape(source)}[/dim]")
    console.print(tables.policy_table(cluster, plan))
    console.print(f"\n[bold]Take[/bold] {escape(plan.reason)}\n")
    if pasted is not None:
        console.print("For the config:")
        print(json.dumps(pasted, indent=2))  # not through rich, which would break lines
    for hint in hints:
        console.print(f"# {escape(hint)}", soft_wrap=True)


def _write(path: Path, pasted: section.Section | None, hints: list[str]) -> None:
    if pasted is None:
        raise ConfigError(f"there is no section to write to {path}: {hints[0]}")
    path.write_text(json.dumps(pasted, indent=2) + "\n", encoding="utf-8")
