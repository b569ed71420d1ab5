"""Counts the real runs that the tests launch: these take nearly all of the suite's time."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

MOST = 120
"""By the tests that are not marked long. A test that launches another run replaces one that did."""

count = 0
_counts = True


def note(arguments: Sequence[object]) -> bool:
    """Count a command line if it launches a run; the further hosts of a run do not count. Return whether it counts."""
    global count
    words = [*map(str, arguments)]
    first = "--host-rank" not in words or words[words.index("--host-rank") + 1] == "0"
    counts = _counts and first and "launch" in words
    count += counts
    return counts


def refused() -> None:
    """Take back a launch that was counted: it, or its script, was refused."""
    global count
    count -= 1


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and not isinstance(arguments[1], str | bytes | os.PathLike):
        note(arguments[1])


class Counter:
    """The plugin that adds up the counts of all workers, shows the sum, and fails a suite that launches too many."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._sum = config, 0
        sys.addaudithook(_hear)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        global _counts
        _counts = item.get_closest_marker("long") is None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._sum += getattr(node, "workeroutput", {}).get("launches", 0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["launches"] = count
        elif self._launched() > MOST:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"runs launched by tests that are not long: {self._launched()} (at most {MOST})")

    def _launched(self) -> int:
        return count + self._sum
