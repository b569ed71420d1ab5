"""Where the elements of a Slurm array job tell each other what they do, and what they have decided: files in a directory
that all of them see. Only ``core.elements`` knows what they mean.

Failures it assumes: whoever writes may be killed at any moment (a file is there whole or not at all); clocks of hosts differ
(who is heard is known from beats that change, by the reader's own clock); the file system is away for a while (``OSError``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ft.core.elements import Beat, Begin, Decision, ElementId, Over, Requeue
from megatron_ft.launch import record

SILENT_S = 30.0
_KINDS = {"begin": Begin, "requeue": Requeue, "over": Over}


class Board:
    """Of one array, seen by one of its elements. Files are ``beat-ELEMENT.json`` and ``decision-NUMBER.json``."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._seen: dict[ElementId, tuple[str, float, bool]] = {}
        self._count = 0
        self.decisions: list[Decision] = []
        directory.mkdir(parents=True, exist_ok=True)

    def beat(self, beat: Beat) -> None:
        """Say that this element is there."""
        self._count += 1
        record.replace(self._directory / f"beat-{beat.element}.json", {**asdict(beat), "count": self._count})

    def last(self, element: ElementId) -> Beat | None:
        """What an element has said, its last start included."""
        text = self._text(element)
        return None if not text else _beat(text)

    def look(self, elements: Iterable[ElementId]) -> tuple[dict[ElementId, Beat], dict[ElementId, Beat]]:
        """Beats of those that are heard, and of those not heard yet who have not been looked at for ``SILENT_S``."""
        heard, unsure = {}, {}
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
        """The first of them that is not silent. It alone is looked at, when it is well: arrays are large."""
        return next((element for element in elements if any(self.look([element]))), None)

    def read(self) -> list[Decision]:
        """All decisions, in order."""
        while True:
            try:
                raw = json.loads(self._path(len(self.decisions)).read_text(encoding="utf-8"))
            except FileNotFoundError:
                return self.decisions
            self.decisions.append(_decision(raw))

    def write(self, decision: Decision) -> None:
        """The first under its number counts; what has become of it says :meth:`read`."""
        path = self._path(decision.number)
        kind = next(name for name, its in _KINDS.items() if isinstance(decision, its))
        temporary = path.with_suffix(f".{os.uname().nodename}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"kind": kind, **asdict(decision)}) + "\n", encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()

    def _path(self, number: int) -> Path:
        return self._directory / f"decision-{number:04d}.json"

    def _text(self, element: ElementId) -> str:
        try:
            return (self._directory / f"beat-{element}.json").read_text(encoding="utf-8")
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
