"""Fixtures shared by all tests: one prepared dataset, one failure-free reference run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# torch's own log lines would come after the test runner's last one. This must be set before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from megatron_ft.auth import secret
from megatron_ft.collectives import base
from megatron_ft.data import prepare
from tests import support

# Tests that use a part of a run in this process share one secret; a run that a test starts makes its own.
secret.here = lambda: support.SECRET

# A deadline is a timed assertion: it would measure how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
    text = support.ROOT / "megatron_ft" / "data" / "fallback.txt"
    prepare(out, [text], vocab_size=512, log=lambda line: None)
    return out


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> support.Run:
    """The failure-free run that every other run is compared with."""
    run = support.start(tmp_path_factory.mktemp("reference") / "run", data_dir)
    run.check()
    return run
