"""A short run of a training script, in a directory of its own, whose record is read by a command.

Failures it assumes: the script fails; its last lines are shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.config import rank_command, rank_env
from megatron_ft.errors import LaunchError
from megatron_ft.record import history
from megatron_ft.utils import shared_file

_SHOWN = 15
"""Lines of a failed run's output that a message shows."""


@dataclass(frozen=True)
class Script:
    """What each rank runs (``config.rank_command``), and the directory in which it is started."""

    command: Sequence[str]
    directory: Path


def play(
    script: Script, config: Mapping[str, Any], where: Path, *, groups: int, ranks: int | None, audit: rank_env.Audit
) -> tuple[int, list[dict[str, Any]]]:
    """Run the script in ``where``, and return the exit code and the run's record.

    ``config``: as a config file has it. Raises ``LaunchError`` if the run ended before its first step."""
    path = where / "config.json"
    shared_file.write_json(path, dict(config))
    size = [] if ranks is None else ["--ranks-per-group", str(ranks)]
    # The check runs here alone, also in a job of several hosts.
    options = ["--hosts", "1", "--groups", str(groups), *size, "--config", str(path)]
    options += ["--run-dir", str(where / "run"), "--tee", "none"]
    words = [sys.executable, "-m", "megatron_ft", "launch", *options, *rank_command.launch_words(script.command)]
    env = {**os.environ, rank_env.AUDIT: audit.to_env()}
    # no limit: a run of a few steps, with the limits of every run; Ctrl-C ends both
    done = subprocess.run(
        words, cwd=script.directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = history.read(where / "run") if (where / "run").is_dir() else []
    if not any(line["event"] == "begin" for line in lines):
        said = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-_SHOWN:])
        name = rank_command.shown(script.command)
        raise LaunchError(f"{name} ended with exit code {done.returncode} before its first step:\n{said}")
    return done.returncode, lines
