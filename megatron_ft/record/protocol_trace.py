"""A run directory as the protocol sees it: the job, and the decisions with the lines of the record that contain them.

Fields and events that this version does not know are ignored. Missing or damaged parts are reported before the record
is used, so a torn record is never taken for a wrong decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from megatron_ft.config.schema import RunConfig, job_of, placement_of
from megatron_ft.core.detection import stragglers
from megatron_ft.core.protocol.machine import Job
from megatron_ft.errors import FTError
from megatron_ft.record import history
from megatron_ft.types import GroupId, View

_NEEDED = {
    "resume": ("step",),
    "begin": ("steps", "microbatches", "buckets"),
    "recovery": ("step", "epoch", "patched", "patched_by", "unhosted", "buckets_kept", "buckets_redone", "state_from"),
    "step": ("step", "epoch", "live", "microbatches"),
    "discarded": ("step", "attempt"),
}
_MOST = 10**6
"""A limit above the groups of any run; a damaged number must not take all memory."""
_NUMBERS = ("step", "epoch", "steps", "microbatches", "buckets", "per_shard", "attempt")
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""The exceptions that reading a value of the wrong shape raises."""


class RecordError(FTError):
    """The run directory holds no record that can be replayed: missing, damaged, or of another version."""


class Line(NamedTuple):
    """A line of the history, with its number in the file (from 1)."""

    number: int
    fields: Mapping[str, Any]


class ViewLine(NamedTuple):
    """A view and the number of its line in the record."""

    number: int
    view: View


@dataclass(frozen=True)
class Record:
    """The decisions of a run. ``views[e]`` is the view of epoch e; ``ended`` is False for a run that was cut off. The
    run began with ``groups`` groups and step ``first``."""

    job: Job
    views: tuple[ViewLine, ...]
    recoveries: tuple[Line, ...]
    steps: tuple[Line, ...]
    ended: bool
    torn: int = 0
    groups: int = 0
    first: int = 0
    discards: frozenset[tuple[int, int]] = frozenset()
    """Steps and attempts whose sums were discarded before the update."""

    @property
    def measured(self) -> dict[int, dict[GroupId, float]]:
        """By step, the seconds per microbatch of each group that computed, or numbers that lead to the same decisions
        (``core.detection.stragglers.brief``); empty in a run that did not measure."""
        return {line.fields["step"]: _measured(line.fields) for line in self.steps}

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Steps from which a shard has another number of microbatches, and that number; empty if the script set none."""
        found: dict[int, int] = {}
        for line in self.steps:
            if "per_shard" in line.fields:
                found.setdefault(line.fields["step"], line.fields["per_shard"])
        return tuple(sorted(found.items()))

    @classmethod
    def load(cls, run_dir: Path) -> Record:
        """Read a run directory. Raises ``RecordError`` (or ``ConfigError`` for settings that contradict themselves)."""
        if not run_dir.is_dir():
            raise RecordError(f"{run_dir} is not a directory; give the --run-dir of a launch")
        run = _config(run_dir / "config.json")
        path = run_dir / history.FILE
        if len(history.files(run_dir)) > 1:
            return cls.of(run, map(Line, count(1), history.lines(run_dir)), str(path))
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
        """Return the record of a run with these lines; ``path`` is for messages."""
        by_event: dict[str, list[Line]] = {}
        for line in lines:
            by_event.setdefault(str(line.fields["event"]), []).append(line)
        for event, needed in _NEEDED.items():
            for line in by_event.get(event, ()):
                _check(line, needed, path)
        first = by_event["resume"][0].fields["step"] if "resume" in by_event else 0
        return cls(
            job=_job(run, by_event.get("begin"), first, path),
            views=_views(by_event.get("view", ()), path),
            recoveries=tuple(by_event.get("recovery", ())),
            steps=tuple(by_event.get("step", ())),
            ended="end" in by_event,
            torn=torn,
            groups=run.groups,
            first=first,
            discards=frozenset((f["step"], f["attempt"]) for _, f in by_event.get("discarded", ())),
        )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist; give the --run-dir of a launch") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def _config(path: Path) -> RunConfig:
    """Return the settings that the run was launched with; the file also has the command, which does not matter here."""
    data = _bytes(path)
    try:
        raw = json.loads(data)
        run = RunConfig.from_json(
            {f.name: raw[f.name] for f in fields(RunConfig) if f.name in raw or f.name != "shards"}
        )
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
    for name in (*needed, *(name for name in ("per_shard",) if name in line.fields)):
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
        sound = sound and all(s >= 0 and 0 <= n <= _MOST for s, n in line.fields.get("measured_rest", ()))
        sound = sound and all(map(_whole, (n for _, n in line.fields.get("measured_rest", ()))))
    except _DAMAGE:
        sound = False
    if not sound:
        raise RecordError(
            f"{path} line {line.number}: measured is {measured!r}; it must give the seconds of a microbatch for each "
            f"group, the line is damaged or of another version (docs/run-record.md has the fields)"
        )


def _measured(fields: Mapping[str, Any]) -> dict[GroupId, float]:
    named = {int(group): float(seconds) for group, seconds in (fields.get("measured") or {}).items()}
    return stragglers.whole(named, fields.get("measured_rest", ()))


def _job(run: RunConfig, begins: list[Line] | None, first: int, path: str) -> Job:
    """Return the job as the groups of the run had it."""
    if not begins:
        raise RecordError(f"{path} has no 'begin' line: the run ended before its first step, nothing was decided")
    begin = begins[0].fields
    if begin["microbatches"] != run.microbatches:
        raise RecordError(
            f"{path} line {begins[0].number} says {begin['microbatches']} microbatches in every step, config.json "
            f"{run.microbatches}; put the two files of one run together"
        )
    return job_of(run, placement_of(run), buckets=begin["buckets"], steps=begin["steps"], first=first)


def _views(lines: Iterable[Line], path: str) -> tuple[ViewLine, ...]:
    """Return one view of each epoch, in order; a later copy of a line is the same line again."""
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
        reported = (number for one in view.reports for number in (one.group, one.step, *one.reduced_buckets))
        damage = "" if all(map(_whole, reported)) else "a number in its reports is of the wrong kind"
    except _DAMAGE as error:
        damage = _what(error)
    if damage:
        raise RecordError(
            f"{path} line {line.number} is not a view of this version ({damage}); replay a run with the version that "
            f"made it"
        )
    return view


def _what(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
