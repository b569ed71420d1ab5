"""State that the elements of a Slurm array job share: files with the beat of each element and with their decisions.

``core.lifecycle.array_policy`` interprets them. Failures assumed: a writer is killed at any moment (files are written
atomically); clocks of hosts differ (a beat counts when it changes, by the reader's clock); the file system does not
respond for a while (``OSError``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ft.core.lifecycle.array_policy import Beat, Begin, Decision, ElementId, Over, Requeue
from megatron_ft.utils import shared_file

SILENT_S = 30.0
_KINDS = {"begin": Begin, "requeue": Requeue, "over": Over}


class ArrayState:
    """The files of one array, ``beat-ELEMENT.json`` and ``decision-NUMBER.json``, as one of its elements sees them."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._seen: dict[ElementId, tuple[str, float, bool]] = {}
        self._count = 0
        self.decisions: list[Decision] = []
        run_dir = directory.parent.parent
        run_dir.mkdir(parents=True, exist_ok=True)
        for place in (directory.parent, directory):
            shared_file.make_directory(place)

    def beat(self, beat: Beat) -> None:
        """Writes the beat of this element."""
        self._count += 1
        shared_file.write_json(self._directory / f"beat-{beat.element}.json", {**asdict(beat), "count": self._count})

    def last(self, element: ElementId) -> Beat | None:
        """Returns the last beat of an element, which may be from an earlier start."""
        text = self._text(element)
        return None if not text else _beat(text)

    def read_beats(self, elements: Iterable[ElementId]) -> tuple[dict[ElementId, Beat], dict[ElementId, Beat]]:
        """Returns the beats of live elements, and those of elements that are not known to be live or silent yet.

        An element is live when its beat has changed, and silent when it has not changed for ``SILENT_S``.
        """
        heard, unsure = dict[ElementId, Beat](), dict[ElementId, Beat]()
        for element in elements:
            text, now = self._text(element), self._clock()
            before, since, changed = self._seen.get(element, ("", now, False))
            if text != before:
                self._seen[element] = (text, now, bool(before))
            elif now - since > SILENT_S:
                continue
            _, _, changed = self._seen.get(element, (text, since, changed))
            if text:
                (heard if changed else unsure)[element] = _beat(text)
        return heard, unsure

    def first(self, elements: Iterable[ElementId]) -> ElementId | None:
        """Returns the first element that is not silent. Reads no further files than needed: arrays are large."""
        return next((element for element in elements if any(self.read_beats([element]))), None)

    def read(self) -> list[Decision]:
        """Returns all decisions in order."""
        while True:
            try:
                raw = json.loads(shared_file.read_record(self._path(len(self.decisions))))
            except FileNotFoundError:
                return self.decisions
            self.decisions.append(_decision(raw))

    def write(self, decision: Decision) -> None:
        """Writes a decision. Only the first one with a given number counts; :meth:`read` returns it."""
        path = self._path(decision.number)
        kind = next(name for name, its in _KINDS.items() if isinstance(decision, its))
        shared_file.create(path, json.dumps({"kind": kind, **asdict(decision)}) + "\n")

    def _path(self, number: int) -> Path:
        return self._directory / f"decision-{number:04d}.json"

    def _text(self, element: ElementId) -> str:
        try:
            return shared_file.read_record(self._directory / f"beat-{element}.json").decode()
        except FileNotFoundError:
            return ""


def _beat(text: str) -> Beat:
    raw = json.loads(text)
    raw.pop("count")
    return Beat(**raw)


def _decision(raw: dict[str, Any]) -> Decision:
    kind = _KINDS[raw.pop("kind")]
    if kind is Begin:
        raw["hosts"] = tuple(raw["hosts"])
    if kind is Requeue:
        raw["restarts"] = {int(element): count for element, count in raw["restarts"].items()}
    return kind(**raw)
