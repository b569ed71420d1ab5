"""The skeleton of a state, which travels as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_ft.errors import EngineError
from megatron_ft.run.collectives.state_transfer import flatten, unflatten


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(0.1), np.int64(2**60), np.bool_(True), np.uint8(7)])
def test_a_number_of_numpy_arrives_with_its_type(number):
    """A learning rate of ``np.linspace``; arithmetic with it is that of its type."""
    skeleton, tensors = flatten({"lr": number})
    found = unflatten(json.loads(json.dumps(skeleton)), lambda *_: None)["lr"]
    assert type(found) is type(number) and found == number and not tensors


def test_a_number_that_json_does_not_hold_is_refused_with_its_place():
    with pytest.raises(EngineError, match=r"state\.lr is a complex64"):
        flatten({"lr": np.complex64(1)})
