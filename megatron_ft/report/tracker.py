"""Trackers (TensorBoard, wandb) in a process of their own: ``python -m megatron_ft.report.tracker --run-dir DIR ...``.

The process is fed by the run record alone. Whatever a tracker does (fail, hang, be killed), training never knows. When
the agent has to start it again it writes everything anew from the first line: the record is the truth.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ft.errors import ConfigError, FTError
from megatron_ft.report.follow import follow

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Where scalars go."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in ``run_dir/tensorboard``."""

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
    """A wandb run in ``run_dir/wandb``; offline unless the user has set ``WANDB_MODE``."""

    def __init__(self, run_dir: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        # Its debug logs, caches and settings would go to the home directory, which other runs share or which is full.
        for kind in ("CACHE", "CONFIG", "DATA"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str((run_dir / "wandb" / kind.lower()).resolve()))
        import wandb  # after the environment: it reads it when it is imported

        self._run = wandb.init(project="megatron_ft", name=run_dir.name, dir=str(run_dir))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}


def check_trackers(names: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a tracker that is not known or not installed, before any process is started."""
    for name in names:
        if name not in _PACKAGES:
            raise ConfigError(f"tracker {name!r} is not known; known are: {', '.join(_PACKAGES)}")
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ConfigError(f"{name} is not installed; pip install 'megatron_ft[track]'")


def scalars(event: Mapping[str, Any], failures: int) -> tuple[int, dict[str, float]] | None:
    """The step and the numbers an event adds to the trackers, or None. ``failures`` is how many faults came before."""
    if event["event"] == "step":
        counts = {"live_groups": float(len(event["live"])), "failures": float(failures)}
        return event["step"], {"loss": event["loss"], "duration_s": event["duration_s"], **counts}
    if event["event"] == "recovery":
        return event["step"], {"stall_s": event["stall_s"], "patched_microbatches": float(event["patched"])}
    return None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--track", required=True)
    options = parser.parse_args()
    names = options.track.split(",")
    try:
        check_trackers(names)
    except FTError as error:
        print(f"megatron_ft tracker: {error}", file=sys.stderr)
        return error.exit_code
    run(options.run_dir, names)
    return 0


def run(run_dir: Path, names: Iterable[str]) -> None:
    """Feed the trackers until the run is over or its agent is gone. One that fails is dropped, and a line says so."""
    agent = os.getppid()
    over, failures = threading.Event(), 0
    trackers: dict[str, Tracker] = {}
    for name in names:
        _guarded(name, trackers, lambda name=name: trackers.update({name: _TRACKERS[name](run_dir)}))
    for event in follow(run_dir, lambda: over.is_set() or os.getppid() != agent):
        if event["event"] in ("end", "stop"):
            over.set()
        failures += event["event"] == "fault"
        found = scalars(event, failures)
        for name, one in list(trackers.items()) if found else []:
            _guarded(name, trackers, lambda one=one, found=found: one.log(*found))
    for name, one in list(trackers.items()):
        _guarded(name, trackers, one.close)


def _guarded(name: str, trackers: dict[str, Tracker], action: Any) -> None:
    try:
        action()
    except Exception as error:  # the outermost guard around somebody else's code: record it, drop the tracker
        trackers.pop(name, None)
        print(f"megatron_ft tracker: {name} failed and is dropped: {error!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
