"""The global random number generators: seeding, and the code of the package that must leave them alone."""

from __future__ import annotations

import ast
import random

import numpy as np
import pytest
import torch

from megatron_ft.data import generators
from megatron_ft.run.evaluation import Evaluation
from tests.sources import MODULES, nodes


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_seed_decides_what_every_generator_draws_next():
    generators.seed(2**62 + 5)
    first = draws()
    assert generators.drawn(2**62 + 5) == ["random", "numpy.random", "torch"]
    assert draws() == first
    generators.seed_again()
    assert draws() == first
    generators.seed(2**62 + 6)
    assert all(one != other for one, other in zip(draws(), first, strict=True))
    generators.seed(3)
    np.random.rand()
    assert generators.drawn(3) == ["numpy.random"]
    assert generators.drawn(3) == []


def test_all_devices_are_seeded_once_cuda_is_in_use(monkeypatch):
    devices = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(devices))
    generators.seed(11)
    first = [torch.rand(1, generator=device) for device in devices]
    assert generators.drawn(11) == ["torch.cuda"]
    assert [torch.rand(1, generator=device) for device in devices] == first


def test_the_package_draws_nothing_from_the_generators_of_the_users_code():
    """Its threads run beside that code: a store's client that waits for a random time would change a batch."""
    found = []
    for file in MODULES:
        for node in nodes(file):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="random"), attr=name)):
                    found.append((file.name, name))
                case ast.Call(
                    func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="np"), attr="random"), attr=name)
                ):
                    found.append((file.name, name))
    made = {"Random", "SystemRandom", "default_rng"}
    allowed = {("generators.py", name) for name in ("seed", "getstate", "get_state")} | {("forkserver.py", "seed")}
    assert {one for one in found if one[1] not in made} <= allowed


def test_a_gaussian_that_was_kept_is_forgotten():
    """numpy keeps every second number of a normal distribution."""
    generators.seed(1)
    first = np.random.standard_normal()
    generators.seed(1)
    assert np.random.standard_normal() == first == pytest.approx(1.62434536)


def test_an_evaluation_draws_the_same_for_a_batch_whichever_group_computes_it():
    def fn(batch: torch.Tensor) -> dict[str, float]:
        return {"drawn": sum(draws())}

    one = Evaluation(fn, torch.arange(20), 4, None, "held-out", 5, "key")
    alone = one.compute([range(8, 12)])
    both = one.compute([range(4, 8), range(8, 12)])
    assert both["drawn"] - one.compute([range(4, 8)])["drawn"] == pytest.approx(alone["drawn"])
