"""A run directory as what the protocol needs to know of it: the job, and the decisions with the lines they stand in.

Fields and events that this version does not know are ignored; what is missing or damaged is said before anything is
made of it, so nobody takes a torn record for a wrong decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ft.config import DROP, RunConfig, placement_of
from megatron_ft.core.recovery import Job
from megatron_ft.errors import FTError
from megatron_ft.runtime import history
from megatron_ft.types import GroupId, View

_NEEDED = {
    "resume": ("step",),
    "begin": ("steps", "microbatches", "buckets"),
    "recovery": ("step", "epoch", "patched", "patched_by", "unhosted", "buckets_kept", "buckets_redone", "state_from"),
    "step": ("step", "epoch", "live", "microbatches"),
}
_NUMBERS = ("step", "epoch", "steps", "microbatches", "buckets")
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What reading a value of the wrong shape raises."""


class RecordError(FTError):
    """The run directory holds no record that can be replayed: missing, damaged, or of another version."""


class Line(NamedTuple):
    """A line of the history, with its number in the file (from 1)."""

    number: int
    fields: Mapping[str, Any]


class ViewLine(NamedTuple):
    number: int
    view: View


@dataclass(frozen=True)
class Record:
    """What a run has decided. ``views[e]`` is the one of epoch e; ``ended`` is False for a run that was cut off. It began
    with ``groups`` groups and step ``first``."""

    job: Job
    views: tuple[ViewLine, ...]
    recoveries: tuple[Line, ...]
    steps: tuple[Line, ...]
    ended: bool
    torn: int = 0
    groups: int = 0
    first: int = 0

    @property
    def measured(self) -> dict[int, dict[GroupId, float]]:
        """By step, the seconds per microbatch of each group that computed; empty in a run that did not measure."""
        lines = ((line.fields["step"], line.fields.get("measured") or {}) for line in self.steps)
        return {step: {int(group): float(s) for group, s in seconds.items()} for step, seconds in lines}

    @classmethod
    def load(cls, run_dir: Path) -> Record:
        """Raises ``RecordError`` (or ``ConfigError`` for settings that contradict themselves)."""
        if not run_dir.is_dir():
            raise RecordError(f"{run_dir} is not a directory; give the --run-dir of a launch")
        run = _config(run_dir / "config.json")
        path = run_dir / history.FILE
        data = _bytes(path)
        raw = data[: data.rfind(b"\n") + 1].splitlines()
        try:
            parsed = [history.parse(line) for line in raw]
        except RecursionError:
            raise RecordError(f"{path} is not a history: a line of it nests deeper than JSON can be read") from None
        lines = [Line(number, found) for number, found in enumerate(parsed, start=1) if found is not None]
        return cls.of(run, lines, str(path), torn=sum(map(bool, raw)) - len(lines))

    @classmethod
    def of(cls, run: RunConfig, lines: Iterable[Line], path: str = history.FILE, torn: int = 0) -> Record:
        """The record of a run with these lines; ``path`` is for messages."""
        by_event: dict[str, list[Line]] = {}
        for line in lines:
            by_event.setdefault(str(line.fields["event"]), []).append(line)
        for event, needed in _NEEDED.items():
            for line in by_event.get(event, ()):
                _check(line, needed, path)
        return cls(
            job=_job(run, by_event.get("begin"), path),
            views=_views(by_event.get("view", ()), path),
            recoveries=tuple(by_event.get("recovery", ())),
            steps=tuple(by_event.get("step", ())),
            ended="end" in by_event,
            torn=torn,
            groups=run.groups,
            first=by_event["resume"][0].fields["step"] if "resume" in by_event else 0,
        )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist; give the --run-dir of a launch") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def _config(path: Path) -> RunConfig:
    """The settings the run was launched with; the file also says what was launched, which does not matter here."""
    data = _bytes(path)
    try:
        raw = json.loads(data)
        run = RunConfig.from_json({f.name: raw[f.name] for f in fields(RunConfig) if f.name in raw or f.name != "shards"})
        run.fault_tolerance.check()
    except RecursionError:
        raise RecordError(f"{path} is not a config: it nests deeper than JSON can be read") from None
    except _DAMAGE as error:
        raise RecordError(
            f"{path} is not a config of this version ({_what(error)}); replay a run with the version that made it"
        ) from None
    sizes = {"groups": run.groups, "microbatches_per_group": run.microbatches_per_group}
    for name, value in sizes.items():
        if not _whole(value) or value < 1:
            raise RecordError(f"{path}: {name} is {value!r}; it must be a whole number >= 1, the file is damaged")
    return run


def _check(line: Line, needed: Iterable[str], path: str) -> None:
    for name in needed:
        value = line.fields.get(name)
        if name not in line.fields or name in _NUMBERS and not (_whole(value) and value >= 0):
            said = f"says {name} {value!r}" if name in line.fields else f"lacks {name!r}"
            raise RecordError(
                f"{path} line {line.number}: this {line.fields['event']!r} line {said}; it is damaged or of another "
                f"version (docs/run-record.md has the fields)"
            )
    measured = line.fields.get("measured") or {}
    try:
        sound = all(int(group) >= 0 and float(seconds) >= 0 for group, seconds in measured.items())
    except _DAMAGE:
        sound = False
    if not sound:
        raise RecordError(
            f"{path} line {line.number}: measured is {measured!r}; it must give the seconds of a microbatch for each "
            f"group, the line is damaged or of another version (docs/run-record.md has the fields)"
        )


def _job(run: RunConfig, begins: list[Line] | None, path: str) -> Job:
    """The job as ``runtime.leader`` sets it up."""
    if not begins:
        raise RecordError(f"{path} has no 'begin' line: the run ended before its first step, nothing was decided")
    begin = begins[0].fields
    if begin["microbatches"] != run.microbatches:
        raise RecordError(
            f"{path} line {begins[0].number} says {begin['microbatches']} microbatches in every step, config.json "
            f"{run.microbatches}; put the two files of one run together"
        )
    settings = run.fault_tolerance
    return Job(
        shards=run.shards,
        per_shard=run.microbatches_per_group,
        buckets=begin["buckets"],
        steps=begin["steps"],
        min_groups=settings.min_groups,
        report_timeout_s=settings.detector.report_timeout_s,
        straggler_factor=settings.detector.straggler_factor,
        straggler_steps=settings.detector.straggler_steps,
        placement=placement_of(run),
        drop=settings.policy == DROP,
    )


def _views(lines: Iterable[Line], path: str) -> tuple[ViewLine, ...]:
    """One of each epoch, in order; a later copy of a line is the same line again."""
    found: dict[int, ViewLine] = {}
    for line in lines:
        view = _view(line, path)
        if view.epoch in found and found[view.epoch].view != view:
            raise RecordError(
                f"{path} line {line.number} is another view of epoch {view.epoch} than line {found[view.epoch].number}, "
                f"which cannot be: these are the lines of two runs"
            )
        if view.epoch != len(found) and view.epoch not in found:
            raise RecordError(f"{path} line {line.number} is view {view.epoch}, but view {len(found)} is missing")
        found.setdefault(view.epoch, ViewLine(line.number, view))
    if not found:
        raise RecordError(f"{path} has no 'view' line; nothing was decided in this run, or the file is damaged")
    return tuple(found.values())


def _view(line: Line, path: str) -> View:
    try:
        view = View.from_json(line.fields)
        damage = "" if _sound(view) else "a value of it is of the wrong kind"
    except _DAMAGE as error:
        damage = _what(error)
    if damage:
        raise RecordError(
            f"{path} line {line.number} is not a view of this version ({damage}); replay a run with the version that "
            f"made it"
        )
    return view


def _sound(view: View) -> bool:
    """Reports are followed, live groups looked up, reasons read: they must be what they seem."""
    numbers = [view.epoch, view.step, *view.live, *view.joined, *view.incarnations.values()]
    for report in view.reports:
        numbers += [report.group, report.step, *report.have]
    return all(map(_whole, numbers)) and all(isinstance(why, str) for why in (view.reason, *view.lost.values()))


def _what(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
