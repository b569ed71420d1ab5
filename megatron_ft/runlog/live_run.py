"""An injector's view of a live run: its growing history, and its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_ft.config.schema import OWN_ETCD
from megatron_ft.config.store_address import is_etcd
from megatron_ft.errors import LaunchError
from megatron_ft.runlog import history


class Growing:
    """The parts of the history that the injector needs; :meth:`read` takes in added lines."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = history.Tail(run_dir)
        self.started: float | None = None
        self.begun = self.over = False
        self.committed = -1
        self._injected: dict[str, list[dict[str, Any]]] = {}

    def of(self, key: str) -> list[dict[str, Any]]:
        """Return the lines of one fault."""
        return self._injected.get(key, [])

    def read(self) -> None:
        """Take in the whole lines that were added."""
        for line in self._tail.each():
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
    """Return True if the run's control store is etcd, not one process of its host 0."""
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        setting = config["fault_tolerance"]["store"]
        return setting == OWN_ETCD or is_etcd(setting)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_size(run_dir: Path) -> tuple[int, int]:
    """Return a run's number of groups and of ranks in each. Raises ``LaunchError`` if the directory has no run."""
    try:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        return config["groups"], config["ranks_per_group"]
    except (OSError, ValueError, KeyError, TypeError):
        raise LaunchError(
            f"{os.fspath(run_dir)} holds no run (no config.json that can be read); give the --run-dir of a launch"
        ) from None
