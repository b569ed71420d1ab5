"""Kills at moments nobody chose: three of four groups, at random times, over and over."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from megatron_ft.faults import inject
from tests import support

STEPS = 40


def kill_at_random(run: support.Run, victim: int, after: int, rng: random.Random, bystander: int | None) -> None:
    """Kill some moment after that step; a bystander is descheduled meanwhile, as on a busy machine."""
    support.wait_for_step(run, after)
    time.sleep(rng.random() * 0.1)  # the moment inside the step is the point of these tests
    frozen = None if bystander is None else inject.pid_of(run.directory, bystander)
    if frozen is not None:
        os.kill(frozen, signal.SIGSTOP)
        time.sleep(rng.random() * 0.05)
    inject.kill(run.directory, victim, "a random moment")
    if frozen is not None:
        time.sleep(rng.random() * 0.3)
        os.kill(frozen, signal.SIGCONT)


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory, data_dir) -> support.Run:
    run = support.start(tmp_path_factory.mktemp("long") / "run", data_dir, steps=STEPS)
    run.check()
    return run


@pytest.mark.parametrize("descheduled", [False, True], ids=["", "with a bystander descheduled"])
@pytest.mark.parametrize("seed", range(3))
def test_random_kills(tmp_path, data_dir, long_reference, seed, descheduled):
    """Three of four groups die at random moments of random steps, nobody else is lost. The record says when."""
    rng = random.Random(seed)
    victims = rng.sample(range(support.GROUPS), 3)
    gate = support.Gate(tmp_path, STEPS - 1)
    run = support.start(tmp_path / "run", data_dir, steps=STEPS, script=gate.script)
    after = 0
    for number, victim in enumerate(victims):
        after += rng.randint(1, 9)
        bystander = rng.choice(sorted(set(range(support.GROUPS)) - set(victims[: number + 1])))
        kill_at_random(run, victim, after, rng, bystander if descheduled else None)
    gate.open()
    run.check(long_reference)
    assert {line["group"] for line in run.events("fault")} == set(victims)
