"""The hyperparameters of optimizers: read, put in place in another group, compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from megatron_ft.run.engines import hyperparameters
from megatron_ft.run.engines.hyperparameters import Hyperparameters


def optimizer(**options) -> torch.optim.Optimizer:
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "kind": "head", "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, **{"lr": 0.1, **options})


def wired(values):
    return json.loads(json.dumps(values))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1), np.float32(0.1)], ids=["number", "tensor", "numpy"])
def test_values_are_the_same_in_another_optimizer(rate):
    one, other = optimizer(), optimizer(betas=(0.1, 0.2), lr=torch.tensor(0.7) if torch.is_tensor(rate) else 0.7)
    for group in one.param_groups:
        group["lr"] = rate
    tensor = other.param_groups[0]["lr"]
    mine, theirs = Hyperparameters([one]), Hyperparameters([other])
    assert hyperparameters.checksum(mine.read()) != hyperparameters.checksum(theirs.read())
    theirs.write(wired(mine.read()))
    assert theirs.read() == mine.read() and other.param_groups[0]["betas"] == (0.9, 0.999)
    assert hyperparameters.checksum(mine.read()) == hyperparameters.checksum(theirs.read())
    assert other.param_groups[0]["lr"] is tensor or not torch.is_tensor(rate), "a captured graph has the tensor"


def test_no_bit_of_a_value_is_lost_and_each_counts():
    one = optimizer()
    found = Hyperparameters([one])
    before = hyperparameters.checksum(found.read())
    one.param_groups[1]["weight_decay"] = np.nextafter(0.3, 1)
    assert hyperparameters.checksum(found.read()) != before
    assert wired(found.read()) == found.read()
    assert 1 <= before < 2**48 and hyperparameters.checksum(None) == 0


def test_a_step_is_made_with_the_values_that_hooks_have_set_last_or_with_those_that_are_given():
    one, seen = optimizer(), []
    found = Hyperparameters([one])
    one.register_step_post_hook(lambda *_: seen.append(one.param_groups[0]["lr"]))
    for number in range(3):  # a hook that is added later comes later
        one.register_step_pre_hook(lambda *_, number=number: one.param_groups[0].update(lr=float(number)))
        with found.step():
            one.step()
            one.param_groups[0]["lr"] = 9.0  # a scheduler of the engine
        assert (found.made[0]["lr"], found.left[0]["lr"]) == (number, 9.0)
    given = found.read()
    given[0]["lr"] = 5.0
    with found.step(given):
        one.step()
    assert seen == [0.0, 1.0, 2.0, 5.0] and found.made == given


def test_names_say_which_value_of_which_group_it_is():
    said = hyperparameters.named(Hyperparameters([optimizer()]).read())
    assert said["lr of parameter group 0"] == 0.1 and said["kind of parameter group 1"] == "head"
    assert not any("params" in name for name in said)


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group["betas"].append(0.5),
        lambda group: group["lr"].fill_(0.2),
        lambda group: group.update(weight_decay=True),
        lambda group: group.update(eps=-0.0),
        lambda group: group.update(kind=object()),
        lambda group: group.pop("eps"),
    ],
)
def test_every_change_of_a_value_is_read_also_within_a_list_or_a_tensor_or_of_its_type_only(change):
    one = optimizer(lr=torch.tensor(0.1), eps=0.0, weight_decay=1)
    one.param_groups[0]["betas"], one.param_groups[0]["kind"] = [0.9, 0.99], "body"
    found = Hyperparameters([one])
    before = found.read()
    change(one.param_groups[0])
    fresh = Hyperparameters([one]).read()
    assert hyperparameters.checksum(found.read()) == hyperparameters.checksum(fresh) != hyperparameters.checksum(before)
    assert found.read() == fresh


def test_a_numpy_number_becomes_a_python_one_before_a_step():
    """Otherwise Adam would divide in fp32 in the group whose script sets it, and in fp64 in one that follows."""
    one = optimizer(lr=np.float32(0.1))
    assert Hyperparameters([one]).read()[0]["lr"] == float(np.float32(0.1))
    assert type(one.param_groups[0]["lr"]) is float
