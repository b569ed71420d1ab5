"""Blends of Megatron's corpora, in an unchanged script of Megatron-LM."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ft.data.indexed import write
from tests import support
from tests.megatron_lm import runs

BUILT = "Build and save the "


def _data(path, kind):
    """Write three corpora; return the arguments that name them."""
    generator = np.random.default_rng(1)
    for name in "abc":
        write(path / name, [generator.integers(0, 255, generator.integers(20, 90)) for _ in range(60)])
    a, b, c = (path / name for name in "abc")
    if kind == "split":
        return ("--data-path", 0.7, a, 0.3, b, "--split", "80,10,10")
    return ("--train-data-path", 0.6, a, 0.4, b, "--valid-data-path", c, "--test-data-path", c)


@pytest.mark.parametrize("kind", support.first_of({"split": "split", "a path for each": "paths"}, "split"))
def test_blends_are_read_as_by_plain_megatron_and_indexed_once(tmp_path, megatron, kind):
    """With an empty directory for the index; each is built by one rank of one group."""
    own = _data(tmp_path, kind)
    run = runs.start(tmp_path / "run", megatron, 1, *own, "--data-cache-path", tmp_path / "ours")
    reference = runs.plain(megatron, 2, *own, "--data-cache-path", tmp_path / "theirs")
    said = runs.said(run)
    assert runs.differences(reference, said) == [], run.logs()
    built = ["".join(one.logs).count(BUILT) for one in (reference, said)]
    assert built[0] == built[1] > 0
