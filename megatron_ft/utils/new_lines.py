"""The lines that are added to a file while others write it."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.utils import shared_file


class NewLines:
    """The lines of ``path`` after its first ``at`` bytes. A file that cannot be read has none for now."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path, self._at, self._rest = path, at, b""

    def read(self, last: bool = False) -> list[str]:
        """Return the lines that are complete now and were not at the last call. ``last``: no more is written, and a last
        line without a newline is complete, too."""
        try:
            with shared_file.open_record(self._path) as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return [line.decode(errors="replace") for line in lines]
