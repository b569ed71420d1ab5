"""Fixtures shared by all tests: one prepared dataset, one failure-free reference run."""

from __future__ import annotations

import gc
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# torch's own log lines would come after the test runner's last one. This must be set before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from megatron_ft.data import prepare
from megatron_ft.run.collectives import base
from megatron_ft.utils.auth import secret
from tests import launches, support

_DURATIONS = Path(__file__).parent / "durations.json"
_RECORDED_S = 1.0
"""Shorter tests are left out of the record."""
_SLOW_S = 2.0
"""Tests of ``tests/unit`` that have taken as long are marked slow, as those are whose seconds depend on ``--long``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", default="none", metavar="WHICH", help="tests marked long: none, all, or K/N (every Nth)")
    parser.addoption("--record-durations", action="store_true", help=f"write {_DURATIONS.name} anew")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests that ``--long`` does not name, and begin with the modules whose tests take longest, so that
    no worker still has a long test when the others have none."""
    took = json.loads(_DURATIONS.read_text())
    for item in items:
        if took.get(item.nodeid, 0.0) >= _SLOW_S:
            item.add_marker("slow")
    which = config.getoption("--long")
    long = sorted(item.nodeid for item in items if item.get_closest_marker("long"))
    if which == "none":
        played: set[str] = set()
    elif which == "all":
        played = set(long)
    else:
        first, every = map(int, which.split("/"))
        played = set(long[first % every :: every])
    unplayed = set(long) - played
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in unplayed])
    longest: dict[str, float] = defaultdict(float)
    for test, seconds in took.items():
        module = test.partition("::")[0]
        longest[module] = max(longest[module], seconds)
    items[:] = sorted(
        (item for item in items if item.nodeid not in unplayed),
        key=lambda item: -longest[item.nodeid.partition("::")[0]],
    )


def pytest_collection_finish() -> None:
    """Have the garbage collector leave alone what all tests share, which is far more than a test makes."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


class _Recorder:
    """The seconds that each test has taken, fixtures included. What is recorded of modules that are not played is kept."""

    def __init__(self) -> None:
        self._took: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        modules = {test.partition("::")[0] for test in self._took}
        before = json.loads(_DURATIONS.read_text()).items()
        found = {test: seconds for test, seconds in before if test.partition("::")[0] not in modules}
        found |= {test: round(seconds, 1) for test, seconds in self._took.items() if seconds >= _RECORDED_S}
        _DURATIONS.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: what their imports make stays
    # A deadline is a timed assertion: it would measure how busy the machine is.
    examples = 100 if config.getoption("--long") == "all" else 20
    settings.register_profile("untimed", deadline=None, max_examples=examples)
    settings.load_profile("untimed")
    config.pluginmanager.register(launches.Counter(config))
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


# Tests that use a part of a run in this process share one secret; a run that a test starts makes its own.
secret.here = lambda: support.SECRET


_forgotten: list[Any] = []
"""What tests have closed and a library has not ended: its destructor would wait, so it lives until the tests end."""


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """End every run with the test that started it, and free the communicators that the test has closed; it sees none that
    another test has closed."""
    before = len(support.started)
    base._closed = []
    yield
    support.end_from(before)
    base.sweep()
    _forgotten.extend(base._closed)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset prepared from the text that ships with the package."""
    out = tmp_path_factory.mktemp("data") / "small"
    text = support.ROOT / "megatron_ft" / "data" / "addresses.txt"
    prepare(out, [text], vocab_size=512, log=lambda line: None)
    return out


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> support.Run:
    """The failure-free run that every other run is compared with."""
    run = support.start(tmp_path_factory.mktemp("reference") / "run", data_dir)
    run.check()
    return run
