"""Lists of hosts in Slurm's notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.errors import LaunchError
from megatron_ft.utils import hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("gpu-[007,009-011],x[1-2]y[3]", "gpu-007 gpu-009 gpu-010 gpu-011 x1y3 x2y3"),
        ("r[1-2]n[08-10].pod", "r1n08.pod r1n09.pod r1n10.pod r2n08.pod r2n09.pod r2n10.pod"),
        ("n[9-11]", "n9 n10 n11"),
        ("a-b.c,d_e", "a-b.c d_e"),
    ],
)
def test_ranges_keep_their_digits(text, names):
    assert hostlist.expand(text) == names.split()


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "n[1-2", "n1]", "n[]", "n[2-1]", "n[x]", "n[1-]", "n[[1]]", "a b", "n[1-99999999]"]
)
def test_another_notation_is_refused_with_its_text(text):
    with pytest.raises(LaunchError, match="is not a list of hosts such as"):
        hostlist.expand(text)


@given(st.lists(st.tuples(st.sampled_from(["a", "gpu-", "x1y"]), st.integers(0, 200), st.integers(0, 20)), min_size=1))
def test_every_number_of_a_range_is_there_once(ranges):
    text = ",".join(f"{name}[{first:03}-{first + more:03}]" for name, first, more in ranges)
    assert hostlist.expand(text) == [
        f"{name}{i:03}" for name, first, more in ranges for i in range(first, first + more + 1)
    ]
