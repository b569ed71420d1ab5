"""The digest of a batch: equal for equal content, another one for whatever else training would see."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from megatron_ft.data.batch_digest import digest, leaves


@dataclasses.dataclass
class Pair:
    tokens: object
    label: object = 1


class Graph:
    def __init__(self, x):
        self.x, self._cached_at = x, object()


class Opaque:
    __slots__ = ("x",)


Row = namedtuple("Row", "a b")


def batches(number: float, dtype=torch.float32):
    tensor = torch.tensor([[1.0, number]], dtype=dtype)
    itself: list = [number]
    itself.append(itself)
    return {
        "tensor": tensor,
        "bfloat16, transposed": tensor.bfloat16().t(),
        "scalar": torch.tensor(number),
        "array": np.array([number]),
        "array of objects": np.array([number, None], dtype=object),
        "number": number,
        "numpy's number": np.float64(number),
        "text": f"text {number}",
        "nested": {"b": [1, (tensor, None)], "a": b"bytes"},
        "a mapping like BatchEncoding": UserDict(input_ids=[number]),
        "a named tuple": Row(1, number),
        "a data class": Pair(tensor),
        "attributes": Graph(tensor),
        "a set": {number, 1.0, "x"},
        "itself": itself,
    }


@pytest.mark.parametrize("kind", batches(0.0))
def test_equal_batches_have_equal_digests_and_others_do_not(kind):
    one, same, other = (digest(leaves(batches(number)[kind])) for number in (2.0, 2.0, 3.0))
    assert one == same != other
    assert 0 < one < 2**48


def test_dtype_shape_type_and_missing_parts_count_and_the_order_of_keys_does_not():
    zeros = torch.zeros(4)
    found = [
        zeros,
        zeros.double(),
        zeros.view(2, 2),
        zeros.numpy(),
        [0.0] * 4,
        {"x": zeros},
        {"y": zeros},
        [zeros, zeros],
    ]
    assert len({digest(leaves(one)) for one in found}) == len(found)
    assert digest(leaves({"a": 1, "b": 2})) == digest(leaves({"b": 2, "a": 1}))
    assert leaves({"x": zeros})[1][:2] == ("['x']", "tensor float32 [4]")


def test_what_is_unknown_counts_with_its_type_only():
    assert digest(leaves([Opaque(), iter(())])) == digest(leaves([Opaque(), iter(())]))
    assert digest(leaves(torch.zeros(2, 2).to_sparse())) == digest(leaves(torch.ones(2, 2).to_sparse()))
