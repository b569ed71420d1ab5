"""A real Slurm cluster for tests (``tools/slurm_lab.py``): ``cluster = slurm.lab(3)`` makes a fixture of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tools.slurm_lab import Lab, missing

needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing())


def lab(nodes: int, scope: str = "module", **shape: Any):
    """A fixture: a lab of that many nodes, up as long as ``scope`` lasts; skips where there can be none. ``shape``: its
    other options."""

    @pytest.fixture(scope=scope)
    def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        why = missing(shape.get("plain", False), shape.get("accounting", False))
        if why:
            pytest.skip(why)
        with Lab(tmp_path_factory.mktemp("slurm") / "lab", nodes, **shape) as cluster:
            yield cluster

    return up
