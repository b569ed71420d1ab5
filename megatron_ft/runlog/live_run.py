"""What an injector reads of a live run: its growing history, and its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_ft.config import ETCD, OWN_ETCD
from megatron_ft.errors import LaunchError
from megatron_ft.runtime import history


class Growing:
    """What the injector needs of the history; :meth:`read` takes in what was added."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / history.FILE
        self._offset = 0
        self.started: float | None = None
        self.begun = self.over = False
        self.committed = -1
        self._injected: dict[str, list[dict[str, Any]]] = {}

    def of(self, key: str) -> list[dict[str, Any]]:
        """The lines of one fault."""
        return self._injected.get(key, [])

    def read(self) -> None:
        """Take in the whole lines that were added."""
        try:
            if self._path.stat().st_size <= self._offset:
                return
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in filter(None, map(history.parse, whole.splitlines())):
            self._take_in(line)

    def _take_in(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "start":
                self.started, self.over = self.started or line["t"], False
            case "begin":
                self.begun = True
            case "step":
                self.committed = max(self.committed, line["step"])
            case "end" | "stop":
                self.over = True
            case "inject" if "fault" in line:
                self._injected.setdefault(line["fault"], []).append(line)


def uses_etcd(run_dir: Path) -> bool:
    """Whether the run's control store is not one process of its host 0."""
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        setting = config["fault_tolerance"]["store"]
        return setting == OWN_ETCD or setting.startswith(ETCD)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_size(run_dir: Path) -> tuple[int, int]:
    """Groups, and ranks of each, of the run in a directory. Raises ``LaunchError`` when it holds none."""
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        return config["groups"], config["ranks_per_group"]
    except (OSError, ValueError, KeyError, TypeError):
        raise LaunchError(
            f"{os.fspath(run_dir)} holds no run (no config.json that can be read); give the --run-dir of a launch"
        ) from None
