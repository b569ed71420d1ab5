"""What the ranks of a group compute together next, as position 0 decides it (``run.engines.rounds``), and which passes of a
pipeline's schedule count (``run.engines.staged``)."""

from __future__ import annotations

import queue
from unittest.mock import MagicMock, call

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.run.engines import rounds
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Listed
from megatron_ft.run.engines.staged import Staged
from megatron_ft.types import Microbatch

numbers = st.integers(0, 1000)
listeds = st.builds(
    Listed, st.builds(Microbatch, numbers, numbers, numbers), st.booleans(), st.integers(-2, 9), st.booleans()
)


@given(st.lists(listeds, max_size=7, unique_by=lambda one: one.microbatch), st.integers(1, 4))
def test_all_ranks_of_a_group_have_the_same_rounds(listed, most):
    control = MagicMock()
    said = queue.SimpleQueue()
    control.send_words.side_effect = lambda position, words: said.put(words)
    control.receive_words.side_effect = lambda position: [*said.get_nowait(), 0, 0]
    work = MagicMock()
    work.listed.return_value, work.closes.return_value = listed, True
    decided = list(rounds.rounds(Layout(shards=2), control, work, most))
    assert [one for found in decided for one in found.listed] == listed
    assert [found.last for found in decided] == [False] * (len(decided) - 1) + [True] * bool(decided)
    assert list(rounds.rounds(Layout(shard=1, shards=2), control, work, most)) == decided


class Bare(Staged):
    """Two stages of one rank, without a model."""

    __abstractmethods__ = frozenset()

    def __init__(self, *run) -> None:
        self._of_stage, self._work = [[0, 1], [2]], MagicMock()
        self._begin_run(*run)


def test_microbatches_that_only_fill_the_schedule_are_not_counted():
    listed, ready = [Listed(Microbatch(0, 0, index), False) for index in range(3)], MagicMock()
    engine = Bare(listed, ready, 1)
    for index in range(3):
        for stage in (1, 0):
            engine._on_backward(stage, index)
    assert engine._work.computed.call_args_list == [call(one) for one in listed[:2]]
    assert ready.call_args_list == [call(2), call(0), call(1)]
