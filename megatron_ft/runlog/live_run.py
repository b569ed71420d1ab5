"""An injector's view of a live run: its growing history, and its configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_ft.config.store_address import is_etcd
from megatron_ft.errors import LaunchError
from megatron_ft.runlog import run_directory, run_state


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
    return is_etcd(run_directory.config(run_dir).get("fault_tolerance", {}).get("store", ""))


def run_size(run_dir: Path) -> tuple[int, int]:
    """Return a run's number of groups and of ranks in each. Raises ``LaunchError`` if the directory has no run."""
    config = run_directory.config(run_dir)
    if not {"groups", "ranks_per_group"} <= config.keys():
        raise LaunchError(
            f"{os.fspath(run_dir)} holds no run (no config.json that can be read); give the --run-dir of a launch"
        )
    return config["groups"], config["ranks_per_group"]
