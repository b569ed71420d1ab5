"""The megatron-core whose loop is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm import runs


@pytest.fixture(scope="session")
def megatron() -> Path:
    """The directory that has ``megatron.core`` and ``megatron.training``."""
    return runs.unpacked()
