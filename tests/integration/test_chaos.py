"""Kills at moments nobody chose: three of four groups, at random times, over and over."""

from __future__ import annotations

import random
import time

import pytest

from megatron_ft.faults import inject
from tests import support

STEPS = 40


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory, data_dir) -> support.Run:
    run = support.start(tmp_path_factory.mktemp("long") / "run", data_dir, steps=STEPS)
    run.check()
    return run


@pytest.mark.parametrize("seed", range(4))
def test_random_kills(tmp_path, data_dir, long_reference, seed):
    """Each victim dies a random moment after a random step; a replay needs the seed and luck, the record says when."""
    rng = random.Random(seed)
    victims = rng.sample(range(support.GROUPS), 3)
    run = support.start(tmp_path / "run", data_dir, steps=STEPS)
    after = 0
    for victim in victims:
        after += rng.randint(1, 9)
        support.wait_for_step(run, after)
        time.sleep(rng.random() * 0.2)  # the moment inside the step is the point of this test
        inject.kill(run.directory, victim, f"a random moment, seed {seed}")
    run.check(long_reference)
    assert {line["group"] for line in run.events("fault")} == set(victims)
