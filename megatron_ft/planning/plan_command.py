"""The command ``megatron-ft plan``: prints a table or JSON, and writes a picture and a config section."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from megatron_ft.errors import ConfigError
from megatron_ft.planning import config_section, inputs, plan_tables, verified_share
from megatron_ft.planning.cluster import Cluster
from megatron_ft.planning.estimate import Recommendation, recommend
from megatron_ft.planning.presets import PRESETS


def cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster that the options describe. Raises ``ConfigError``."""
    if options.plot:
        from megatron_ft.planning import plan_plots  # its import takes half a second, which a table does not need

        plan_plots.check_path(options.plot)
    flags = {name: getattr(options, name) for name in inputs.NAMES}
    return inputs.cluster(options.preset, options.file, flags, options.values)


def show(cluster: Cluster, options: argparse.Namespace, refused: Callable[[config_section.Section], str | None]) -> int:
    """Print and write what the options ask for. ``refused`` returns the config's reason against a section, or None."""
    redundancy = inputs.redundancy(options.redundancy)
    plan = recommend(cluster, redundancy)
    pasted, hints = config_section.choose(cluster, plan, refused)
    source = PRESETS[options.preset].source if options.preset else None
    if options.plot:
        from megatron_ft.planning import plan_plots

        plan_plots.plan_plot(cluster, plan, options.plot)
    if options.out:
        _write(options.out, pasted, hints)
    share = inputs.share(options.wrong_share)
    if options.json:
        verified = None if share is None else [asdict(one) for one in verified_share.choices(cluster, share)]
        print(json.dumps(plan_tables.as_json(cluster, plan, pasted, hints, source, verified), indent=2))
    else:
        _print(Console(), cluster, plan, pasted, hints, source)
        if share is not None:
            Console().print(verified_share.table(cluster, share))
        for what, path in (("picture", options.plot), ("section", options.out)):
            if path:
                print(f"{what}: {path}")
    return 0


def _print(
    console: Console,
    cluster: Cluster,
    plan: Recommendation,
    pasted: config_section.Section | None,
    hints: list[str],
    source: str | None,
) -> None:
    console.print(plan_tables.cluster_table(cluster))
    if source:
        console.print(f"[dim]{escape(source)}[/dim]")
    plan_tables.policy_table(cluster, plan).show(console)
    console.print(f"\n[bold]Recommended:[/bold] {escape(plan.reason)}\n")
    if pasted is not None:
        console.print("For the config:")
        print(json.dumps(pasted, indent=2))  # not through rich, which would break lines
    for hint in hints:
        console.print(f"# {escape(hint)}", soft_wrap=True)


def _write(path: Path, pasted: config_section.Section | None, hints: list[str]) -> None:
    if pasted is None:
        raise ConfigError(f"there is no section to write to {path}: {hints[0]}")
    path.write_text(json.dumps(pasted, indent=2) + "\n", encoding="utf-8")
