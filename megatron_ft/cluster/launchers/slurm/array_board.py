"""State that the elements of a Slurm array job share: files with the heartbeat of each element and with their decisions.

``core.lifecycle.array_policy`` interprets them. Failures assumed: a writer is killed at any moment (files are written
atomically); clocks of hosts differ (a heartbeat counts when it changes, by the reader's clock); the file system does not
respond for a while (``OSError``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_ft import codec
from megatron_ft.core.lifecycle.array_policy import Decision, ElementId, Heartbeat
from megatron_ft.utils import shared_file

SILENT_S = 30.0


class ArrayState:
    """The files of one array, ``heartbeat-ELEMENT.json`` and ``decision-NUMBER.json``, as one of its elements sees them."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._seen: dict[ElementId, tuple[str, float, bool]] = {}
        self._count = 0
        self.decisions: list[Decision] = []
        run_dir = directory.parent.parent
        run_dir.mkdir(parents=True, exist_ok=True)
        for place in (directory.parent, directory):
            shared_file.make_directory(place)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Writes the heartbeat of this element."""
        self._count += 1
        said = {**codec.encode_fields(heartbeat), "count": self._count}
        shared_file.write_json(self._directory / f"heartbeat-{heartbeat.element}.json", said)

    def last(self, element: ElementId) -> Heartbeat | None:
        """Returns the last heartbeat of an element, which may be from an earlier start."""
        text = self._text(element)
        return None if not text else _heartbeat(text)

    def read_heartbeats(
        self, elements: Iterable[ElementId]
    ) -> tuple[dict[ElementId, Heartbeat], dict[ElementId, Heartbeat]]:
        """Returns the heartbeats of live elements, and those of elements that are not known to be live or silent yet.

        An element is live when its heartbeat has changed, and silent when it has not changed for ``SILENT_S``.
        """
        heard, unsure = dict[ElementId, Heartbeat](), dict[ElementId, Heartbeat]()
        for element in elements:
            text, now = self._text(element), self._clock()
            before, since, changed = self._seen.get(element, ("", now, False))
            if text != before:
                self._seen[element] = (text, now, bool(before))
            elif now - since > SILENT_S:
                continue
            _, _, changed = self._seen.get(element, (text, since, changed))
            if text:
                (heard if changed else unsure)[element] = _heartbeat(text)
        return heard, unsure

    def first(self, elements: Iterable[ElementId]) -> ElementId | None:
        """Returns the first element that is not silent. Reads no further files than needed: arrays are large."""
        return next((element for element in elements if any(self.read_heartbeats([element]))), None)

    def read(self) -> list[Decision]:
        """Returns all decisions in order."""
        while True:
            try:
                raw = json.loads(shared_file.read_record(self._path(len(self.decisions))))
            except FileNotFoundError:
                return self.decisions
            del raw["kind"]  # for people: no two kinds have the same fields
            decision: Decision = codec.decode(Decision, raw)  # type: ignore[arg-type]  # a union is decoded, too
            self.decisions.append(decision)

    def write(self, decision: Decision) -> None:
        """Writes the decision that follows those that were read. Only the first one with its number counts; :meth:`read`
        returns it."""
        said = {"kind": type(decision).__name__.lower(), **codec.encode_fields(decision)}
        shared_file.create(self._path(len(self.decisions)), json.dumps(said) + "\n")

    def _path(self, number: int) -> Path:
        return self._directory / f"decision-{number:04d}.json"

    def _text(self, element: ElementId) -> str:
        try:
            return shared_file.read_record(self._directory / f"heartbeat-{element}.json").decode()
        except FileNotFoundError:
            return ""


def _heartbeat(text: str) -> Heartbeat:
    raw = json.loads(text)
    del raw["count"]
    return codec.decode(Heartbeat, raw)
