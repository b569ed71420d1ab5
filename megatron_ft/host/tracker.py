"""Trackers (TensorBoard, wandb) in a process of their own: ``python -m megatron_ft.host.tracker --run-dir DIR ...``.

The process reads only the run record, so a tracker that fails, hangs or is killed has no effect on training. When the
agent starts the process again, it writes all values anew from the first line of the record.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from megatron_ft.errors import ConfigError, FTError
from megatron_ft.integrations.megatron_lm.writers import ABOUT, MEGATRON_LM
from megatron_ft.record import history, run_directory
from megatron_ft.record.follow import looks
from megatron_ft.record.run_state import RunState
from megatron_ft.utils import extras, lifeline, process_name


class Tracker(Protocol):
    """Destination of scalars of a step; with Megatron-LM's names, of what its loop has logged at a time."""

    def log(self, at: Any, values: Mapping[str, Any]) -> None: ...

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


class MegatronLMTensorBoard:
    """Writes what Megatron-LM's loop has given its ``SummaryWriter`` to the directory of ``--tensorboard-dir``."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._writer: Any = None

    def log(self, t: float, told: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._open(told["iteration"])
        self._add(t, told)

    def _open(self, iteration: int) -> None:
        """Begin a new file with what earlier starts of the job have logged before ``iteration``, in place of their
        files."""
        from torch.utils.tensorboard import SummaryWriter

        about, job = _about(self._run_dir), _job(self._run_dir)
        options = about["tensorboard"]
        for old in Path(options["log_dir"]).glob(f"events.out.tfevents.*.{job}"):
            old.unlink()
        self._writer = SummaryWriter(**options, flush_secs=10, filename_suffix=f".{job}")
        for name, text, step in about["texts"]:
            self._writer.add_text(name, text, step)
        for t, told in _earlier(self._run_dir, iteration):
            self._add(t, told)

    def _add(self, t: float, told: Mapping[str, Any]) -> None:
        for x, values in told["tensorboard"]:
            for name, value in values.items():
                self._writer.add_scalar(name, value, x, walltime=t)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MegatronLMWandb:
    """Writes what Megatron-LM's loop has given wandb to the run that ``--wandb-project`` and ``--wandb-exp-name`` name."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._run: Any = None

    def log(self, t: float, told: Mapping[str, Any]) -> None:
        if self._run is None:
            import wandb

            options = _about(self._run_dir)["wandb"]
            os.makedirs(options["dir"], exist_ok=True)
            # A tracker that begins anew, and a job that goes on, have the same run, which takes no step twice.
            self._run = wandb.init(**options, id=_job(self._run_dir), resume="allow")
        for step, values in told["wandb"]:
            self._run.log(values, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _about(run_dir: Path) -> Mapping[str, Any]:
    """Return what groups have written before their first values."""
    return json.loads((run_dir / MEGATRON_LM / ABOUT).read_text(encoding="utf-8"))


def _job(run_dir: Path) -> str:
    """Return a name that all starts of a job have, and no other job."""
    lines = chain.from_iterable(map(history.lines, run_directory.starts_of(run_dir)))
    return next(line["run_id"] for line in lines if line["event"] == "start")


def _earlier(run_dir: Path, iteration: int) -> list[tuple[float, Mapping[str, Any]]]:
    """Return what earlier starts have logged before an iteration; of one that was made again, its last time."""
    found: list[tuple[float, Mapping[str, Any]]] = []
    for start in run_directory.starts_of(run_dir)[:-1]:
        new = list(filter(None, map(of_megatron_lm, history.lines(start))))
        begins = new[0][1]["iteration"] if new else sys.maxsize
        found = [one for one in found if one[1]["iteration"] < begins] + new
    return [one for one in found if one[1]["iteration"] < iteration]


_TRACKERS = {
    **{"tensorboard": TensorBoardTracker, "wandb": WandbTracker},
    **{f"{MEGATRON_LM}.tensorboard": MegatronLMTensorBoard, f"{MEGATRON_LM}.wandb": MegatronLMWandb},
}
"""By the name of the package that each of them needs; those of Megatron-LM have what its loop logs."""
_SWITCHES = {"--tensorboard-dir": f"{MEGATRON_LM}.tensorboard", "--wandb-project": f"{MEGATRON_LM}.wandb"}
"""Arguments of Megatron-LM that ask for a tracker."""


_OF_STEPS = ("loss", "duration_s", "gradient_norm", "learning_rate")
"""Fields of a step's line that are scalars; runs of earlier versions have only the first two."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ``ConfigError`` for a tracker that is unknown or not installed. It is called before any process starts."""
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(f"tracker {name!r} is not known; known are: {', '.join(_TRACKERS)}")
        package = name.rpartition(".")[2]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed; {extras.install('track')}")


def asked_for(words: Sequence[str]) -> list[str]:
    """Return the trackers for which arguments of Megatron-LM ask."""
    names = {word.partition("=")[0] for word in words}
    return [tracker for name, tracker in _SWITCHES.items() if name in names]


def of_megatron_lm(event: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]] | None:
    """Return the time and what Megatron-LM's loop has logged in a step, or None."""
    told = event["values"].get(MEGATRON_LM) if event["event"] == "log" else None
    return None if told is None else (event["t"], json.loads(told))


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
        found, told = scalars(event, state.failures), of_megatron_lm(event)
        for name, one in list(trackers.items()):
            if what := told if name.startswith(MEGATRON_LM) else found:
                _guarded(name, trackers, lambda one=one, what=what: one.log(*what))
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
