"""ReCoVer's headline (arXiv 2605.11215) again: tokens against checkpoint-restart while half of 512 GPUs are lost.

    python examples/reproduce_recover/reproduce.py [--step-s 4] [--checkpoint-s 5] [--quick] [--out FOLDER]

Writes CSV and PNG, prints at which cost of a restart the published numbers come out. See README.md here for what is assumed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_ft.errors import ConfigError
from megatron_ft.plan import Cluster
from megatron_ft.plan.setting import Failures, RestartFinds, Setting
from megatron_ft.plan.training_run import simulate

Row = dict[str, Any]
GPUS, REPLICA, MICROBATCHES, LOSSES = 512, 8, 128, 32
EFFECTIVE = 2.23
"""Published: effective throughput over checkpoint-restart's, after successive failures (3D)."""
READINGS: tuple[RestartFinds, ...] = ("survivors", "divisor")
MASKING = ("recover", "stacked_quota")
RESTARTS_S = (0, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 160, 200, 250, 300)


@dataclass(frozen=True)
class Experiment:
    """One published experiment. ``tokens``: published, over checkpoint-restart's at the same ``gpu_hours``."""

    name: str
    gpu_hours: float
    tokens: float

    @property
    def gap_s(self) -> float:
        """The time between two losses, if they come at equal distances and the last stretch is as long as the
        others."""
        return self.gpu_hours * 3600 / sum(GPUS - REPLICA * lost for lost in range(LOSSES + 1))

    @property
    def duration_s(self) -> float:
        return self.gap_s * (LOSSES + 1)

    def losses(self, trial: int) -> tuple[tuple[float, int], ...]:
        """One replica after the other, at random times: at equal distances restarts would fall into step with them."""
        times = np.sort(np.random.default_rng(trial).uniform(0, self.duration_s, LOSSES))
        return tuple((float(at), lost) for lost, at in enumerate(times))


EXPERIMENTS = (Experiment("3D", 234.0, 1.749), Experiment("HSDP", 1338.0, 1.474))


def main() -> None:
    options = _options()
    restarts_s = RESTARTS_S[::5] if options.quick else RESTARTS_S
    trials = 2 if options.quick else options.trials
    try:
        work = [(e, finds, restart_s) for e in EXPERIMENTS for finds in READINGS for restart_s in restarts_s]
        rows = [headline(*each, options, trials) for each in track(work, "simulating", console=Console(stderr=True))]
        explained = {(e.name, finds): crossing(rows, e, finds) for e in EXPERIMENTS for finds in READINGS}
        after = [row for finds in READINGS for row in losses(finds, explained["3D", finds], options, trials)]
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "recover_headline.csv", rows)
    if after:
        write(options.out / "recover_losses.csv", after)
    draw(rows, explained, options.out / "recover_headline.png")
    console = Console(width=max(Console().width, 120))
    if options.quick:
        console.print("--quick: few points and trials only show that everything works; the numbers are rough.")
    console.print(_shown(explained, after))
    print(f"CSV and PNG: {options.out}/recover_*")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-s", type=float, default=4.0, help="a step of all 64 replicas (default 4)")
    parser.add_argument("--checkpoint-s", type=float, default=5.0, help="what a checkpoint costs (default 5)")
    parser.add_argument("--detection-s", type=float, default=5.0, help="until a loss is known (default 5)")
    parser.add_argument("--trials", type=int, default=10, help="runs per point; only durations jitter (default 10)")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder (default docs/results)")
    options = parser.parse_args()
    if options.trials < 1:
        parser.error(f"--trials is {options.trials}; it must be at least 1")
    return options


# --- simulating -------------------------------------------------------------------------------------------------------


def steps(
    experiment: Experiment, policy: str, restart_s: float, options: argparse.Namespace, trials: int, *,
    finds: RestartFinds = "survivors", until_s: float | None = None,
) -> float:  # fmt: skip
    """Return the mean number of steps committed by ``until_s``. A step has the same tokens whichever group computes
    it."""
    cluster = Cluster(
        gpus=GPUS,
        gpus_per_group=REPLICA,
        microbatches=MICROBATCHES,
        mtbf_s=experiment.gap_s,
        step_s=options.step_s,
        steps=1_000_000,
        restart_s=float(restart_s),
        checkpoint_s=options.checkpoint_s,
        detection_s=options.detection_s,
        rejoin_s=None,
    )
    settings = [
        Setting(
            cluster=cluster,
            failures=Failures(trace=experiment.losses(trial)),
            redundancy=8,  # the most that 64 groups can host on a Golomb placement
            restart_finds=finds,
            duration_s=until_s or experiment.duration_s,
        )
        for trial in range(trials)
    ]
    return mean(simulate(setting, policy, trial).steps for trial, setting in enumerate(settings))


def headline(
    experiment: Experiment, finds: RestartFinds, restart_s: float, options: argparse.Namespace, trials: int
) -> Row:
    """Compute the headline. Lost GPUs are lost to every policy at the same second, so equal time is equal GPU-hours."""
    base = steps(experiment, "restart", restart_s, options, trials, finds=finds)
    row: Row = {"experiment": experiment.name, "checkpoint_restart": finds, "restart_s": restart_s}
    row |= {"gap_s": round(experiment.gap_s, 1), "steps_restart": round(base, 1)}
    for policy in MASKING:
        done = steps(experiment, policy, restart_s, options, trials)
        row |= {f"steps_{policy}": round(done, 1), f"{policy}_over_restart": round(done / base, 3) if base else ""}
    return row | {"published": experiment.tokens}


def crossing(rows: Sequence[Row], experiment: Experiment, finds: RestartFinds) -> float | None:
    """Return the cost of a restart at which the published tokens come out; None if there is none on the curve."""
    here = [r for r in rows if (r["experiment"], r["checkpoint_restart"]) == (experiment.name, finds)]
    curve = [(row["recover_over_restart"], row["restart_s"]) for row in here if row["recover_over_restart"] != ""]
    ratios = np.maximum.accumulate([ratio for ratio, _ in curve])
    if not ratios[0] <= experiment.tokens <= ratios[-1]:
        return None
    return float(np.interp(experiment.tokens, ratios, [restart_s for _, restart_s in curve]))


def losses(finds: RestartFinds, restart_s: float | None, options: argparse.Namespace, trials: int) -> list[Row]:
    """Tokens so far and tokens since the loss before, each over checkpoint-restart's, after each loss (3D)."""
    if restart_s is None:
        return []
    experiment, rows, before = EXPERIMENTS[0], [], (0.0, 0.0)
    for lost in range(LOSSES + 1):
        until_s = experiment.gap_s * (lost + 1)
        masked = steps(experiment, "recover", restart_s, options, trials, until_s=until_s)
        base = steps(experiment, "restart", restart_s, options, trials, finds=finds, until_s=until_s)
        window = (masked - before[0], base - before[1])
        rows.append(
            {
                "checkpoint_restart": finds,
                "restart_s": round(restart_s, 1),
                "lost_replicas": lost,
                "so_far": round(masked / base, 3) if base else "",
                "of_this_stretch": round(window[0] / window[1], 3) if window[1] > 0 else "",
            }
        )
        before = (masked, base)
    return rows


# --- showing ----------------------------------------------------------------------------------------------------------


def write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _shown(explained: dict[tuple[str, str], float | None], after: Sequence[Row]) -> Table:
    title = "Tokens of ReCoVer over checkpoint-restart's at equal GPU-hours, and which cost of a restart explains them"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("experiment", "restarts with", "a loss every", "published", "explained by", "best of the stretches"):
        shown.add_column(name, no_wrap=True)
    for experiment in EXPERIMENTS:
        for finds in READINGS:
            found = explained[experiment.name, finds]
            ratios = [
                r["of_this_stretch"] for r in after if r["checkpoint_restart"] == finds and r["of_this_stretch"] != ""
            ]
            best = f"{max(ratios):.2f} (published {EFFECTIVE})" if experiment.name == "3D" and ratios else ""
            cost = "no cost of a restart" if found is None else f"a restart of {found:.0f} s"
            shown.add_row(experiment.name, finds, f"{experiment.gap_s:.0f} s", f"{experiment.tokens:.3f}", cost, best)
    return shown


def draw(rows: Sequence[Row], explained: dict[tuple[str, str], float | None], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(EXPERIMENTS), figsize=(10, 4))
    for each, experiment in zip(axes, EXPERIMENTS, strict=True):
        for finds, colour in zip(READINGS, ("#0072B2", "#D55E00"), strict=True):
            here = [r for r in rows if (r["experiment"], r["checkpoint_restart"]) == (experiment.name, finds)]
            # Both policies have the same tokens nearly everywhere: the second is a broad line below the first one.
            for policy, line in zip(
                MASKING, ({"marker": "."}, {"linewidth": 6, "alpha": 0.3, "zorder": 1}), strict=True
            ):
                points = [
                    (r["restart_s"], r[f"{policy}_over_restart"]) for r in here if r[f"{policy}_over_restart"] != ""
                ]
                label = f"{policy}, restart with {'the ' if finds == 'survivors' else 'a '}{finds}"
                each.plot(*zip(*points, strict=True), color=colour, label=label, **line)
            if (found := explained[experiment.name, finds]) is not None:
                mark = {"color": colour, "markersize": 10, "markeredgewidth": 2, "linestyle": ""}
                each.plot(found, experiment.tokens, marker="x", label="fitted cost of a restart", **mark)
        each.axhline(experiment.tokens, color="grey", linewidth=1, label="published")
        each.set_ylim(1, 4)
        title = f"{experiment.name}: {experiment.gpu_hours:.0f} GPU-hours, a loss every {experiment.gap_s:.0f} s"
        each.set_title(title, fontsize=10)
        each.set_xlabel("cost of a restart, s")
        each.grid(alpha=0.25)
    axes[0].set_ylabel("tokens / checkpoint-restart's")
    axes[0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
