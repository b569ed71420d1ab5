"""Trackers (TensorBoard, wandb) in a process of their own: ``python -m megatron_ft.report.tracker --run-dir DIR ...``.

The process reads only the run record, so a tracker that fails, hangs or is killed has no effect on training. When the
agent starts the process again, it writes all values anew from the first line of the record.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from megatron_ft.errors import ConfigError, FTError
from megatron_ft.report.follow import looks
from megatron_ft.runlog.run_state import RunState
from megatron_ft.utils import extras, lifeline, process_name


class Tracker(Protocol):
    """Destination of scalars."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes event files to ``run_dir/tensorboard``."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), flush_secs=10)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes a wandb run to ``run_dir/wandb``; offline unless the user has set ``WANDB_MODE``."""

    def __init__(self, run_dir: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        # By default its logs, caches and settings go to the home directory, which other runs share and which may be full.
        for kind in ("CACHE", "CONFIG", "DATA"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str((run_dir / "wandb" / kind.lower()).resolve()))
        import wandb  # it reads the environment when it is imported

        self._run = wandb.init(project="megatron_ft", name=run_dir.name, dir=str(run_dir))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
"""By the name of the package that each of them needs."""


_OF_STEPS = ("loss", "duration_s", "gradient_norm", "learning_rate")
"""Fields of a step's line that are scalars; runs of earlier versions have only the first two."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a tracker that is unknown or not installed. It is called before any process starts."""
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(f"tracker {name!r} is not known; known are: {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; {extras.install('track')}")


def scalars(event: Mapping[str, Any], failures: int) -> tuple[int, dict[str, float]] | None:
    """Return the step and the scalars of an event, or None. ``failures`` is the number of faults so far."""
    if event["event"] == "step":
        counts = {"live_groups": float(len(event["live"])), "failures": float(failures)}
        found = {name: event[name] for name in _OF_STEPS if event.get(name) is not None}
        if "tokens" in event and event["duration_s"]:
            found["tokens_per_s"] = event["tokens"] / event["duration_s"]
        return event["step"], {**found, **counts}
    if event["event"] == "log":
        return event["step"], {name: value for name, value in event["values"].items() if not isinstance(value, str)}
    if event["event"] == "recovery":
        return event["step"], {"stall_s": event["stall_s"], "patched_microbatches": float(event["patched"])}
    return None


def main() -> int:
    """Follow the run record and send it to the trackers named by ``--track``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--track", required=True)
    options = parser.parse_args()
    lifeline.ignore_save_signals()
    process_name.take(f"tracker {options.track} {options.run_dir}", "ft-tracker")
    names = options.track.split(",")
    try:
        check_trackers(names)
    except FTError as error:
        print(f"megatron_ft tracker: {error}", file=sys.stderr)
        return error.exit_code
    run(options.run_dir, names)
    return 0


def run(run_dir: Path, names: Iterable[str]) -> None:
    """Feed the trackers until the run or its agent has ended. A tracker that fails is dropped with a line on stderr."""
    agent = os.getppid()
    state = RunState()
    trackers: dict[str, Tracker] = {}
    for name in names:
        _guarded(name, trackers, lambda name=name: trackers.update({name: _TRACKERS[name](run_dir)}))
    for event in chain.from_iterable(looks(run_dir, lambda: state.over or os.getppid() != agent)):
        state.take(event)
        found = scalars(event, state.failures)
        for name, one in list(trackers.items()) if found else []:
            _guarded(name, trackers, lambda one=one, found=found: one.log(*found))
    for name, one in list(trackers.items()):
        _guarded(name, trackers, one.close)


def _guarded(name: str, trackers: dict[str, Tracker], action: Any) -> None:
    try:
        action()
    except Exception as error:  # the outermost guard around code of another project
        trackers.pop(name, None)
        print(f"megatron_ft tracker: {name} failed and is dropped: {error!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
