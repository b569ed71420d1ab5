"""An injector's view of a live run: its growing history, and its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_ft.config.store_address import is_etcd
from megatron_ft.errors import LaunchError
from megatron_ft.runlog import run_state
from megatron_ft.utils import shared_file


class Growing(run_state.Watched):
    """The state of a live run, with the lines of the faults that were ordered."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._ordered: dict[str, list[dict[str, Any]]] = {}

    def of(self, key: str) -> list[dict[str, Any]]:
        """Return the lines of one fault."""
        return self._ordered.get(key, [])

    def take(self, line: dict[str, Any]) -> None:
        super().take(line)
        if line["event"] == "inject" and "fault" in line:
            self._ordered.setdefault(line["fault"], []).append(line)


def uses_etcd(run_dir: Path) -> bool:
    """Return True if the run's control store is etcd, not one process of its host 0."""
    try:
        config = json.loads(shared_file.read_record(run_dir / "config.json"))
        return is_etcd(config["fault_tolerance"]["store"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_size(run_dir: Path) -> tuple[int, int]:
    """Return a run's number of groups and of ranks in each. Raises ``LaunchError`` if the directory has no run."""
    try:
        config = json.loads(shared_file.read_record(run_dir / "config.json"))
        return config["groups"], config["ranks_per_group"]
    except (OSError, ValueError, KeyError, TypeError):
        raise LaunchError(
            f"{os.fspath(run_dir)} holds no run (no config.json that can be read); give the --run-dir of a launch"
        ) from None
