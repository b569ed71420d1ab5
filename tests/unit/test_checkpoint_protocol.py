"""When to save, which groups write, and how a group reacts to an order: decisions without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ft.core.lifecycle import checkpoint_protocol
from megatron_ft.core.lifecycle.checkpoint_protocol import CheckpointSchedule, Saves, Stops
from megatron_ft.core.protocol import signals
from megatron_ft.record import invariants
from megatron_ft.types import View

ORDER = Saves(at=12, epoch=3, attempt="r.e3.0.1", writers=(0, 2), by=0)
VIEW = View(epoch=3, live=(0, 1, 2, 3), reason="")


def test_at_the_boundary_every_group_saves_and_before_it_none_does():
    assert checkpoint_protocol.answer(ORDER, 2, 11, VIEW, True, since=0) is None
    assert checkpoint_protocol.answer(ORDER, 2, 12, VIEW, True, since=0) == ""


@pytest.mark.parametrize(
    ("step", "epoch", "has_state", "since", "words"),
    [
        (13, 3, True, 0, "group 2 heard of it in step 13 only"),
        (12, 4, True, 0, "epoch 3 ended before step 12"),
        (11, 4, True, 0, "epoch 3 ended before step 12"),
        (12, 3, False, 3, "has no state yet"),
        (12, 4, True, 4, "those that were there before"),
    ],
)
def test_a_group_that_cannot_save_reports_why(step, epoch, has_state, since, words):
    """The epoch counts: a step can be committed in two versions, and their parts must never come together."""
    view = View(epoch=epoch, live=(0, 1, 2, 3), reason="")
    assert words in checkpoint_protocol.answer(ORDER, 2, step, view, has_state, since)


def test_an_order_of_an_epoch_that_is_not_known_here_yet_waits():
    assert checkpoint_protocol.answer(ORDER, 2, 11, View(epoch=2, live=(0, 1, 2, 3), reason=""), True, since=0) is None


def test_writers_are_spread_and_those_that_failed_are_left_out_while_there_are_others():
    domains = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert checkpoint_protocol.writers((0, 1, 2, 3, 4, 5), domains, ()) == (0, 2, 4, 5)
    assert checkpoint_protocol.writers((0, 1, 2, 3), domains, {0, 2}) == (1, 3)
    assert checkpoint_protocol.writers((0, 1), {}, {0, 1}) == (0, 1)
    assert ORDER.part_of(2) == 1 and ORDER.part_of(1) is None


def test_a_writer_or_a_witness_that_is_left_out_or_has_come_back_is_not_waited_for():
    order = replace(ORDER, witnesses=(1,))
    assert checkpoint_protocol.lost_voices(order, View(4, (0, 1, 3), "")) == (2,)
    assert checkpoint_protocol.lost_voices(order, View(4, (0, 1, 2), "", joined=(2,))) == (2,)
    assert checkpoint_protocol.lost_voices(order, View(4, (0, 2, 3), "")) == (1,)
    assert checkpoint_protocol.lost_voices(order, View(4, (0, 1, 2), "")) == ()


def test_three_groups_are_compared_where_there_are_three_and_all_after_a_tie_of_some():
    assert checkpoint_protocol.witnesses((0, 1, 2, 3), (2,), False) == (0, 1)
    assert checkpoint_protocol.witnesses((0, 1, 2, 3), (0, 2), False) == (1,)
    assert checkpoint_protocol.witnesses((0, 1), (0,), False) == (1,)
    assert checkpoint_protocol.witnesses((0, 1, 2, 3, 4), (0, 1, 2, 3), False) == ()
    assert checkpoint_protocol.witnesses((0, 1, 2, 3, 4), (0, 1, 2, 3), True) == (4,)
    assert signals.from_json(signals.to_json(replace(ORDER, witnesses=(1,)))).voices == (0, 2, 1)


def test_the_job_stops_when_every_live_group_was_told():
    assert not checkpoint_protocol.stopping({0, 1}, VIEW)
    assert checkpoint_protocol.stopping({0, 1, 2, 3, 7}, VIEW)


def test_a_group_that_enters_a_stopping_job_is_told_too():
    grown = View(epoch=4, live=(0, 1, 2, 3, 5), reason="", joined=(5,))
    assert checkpoint_protocol.told_too({0, 1, 2, 3}, grown) == {5} and checkpoint_protocol.stopping(
        {0, 1, 2, 3, 5}, grown
    )
    assert not checkpoint_protocol.told_too({0, 1, 2}, grown), "one host of several was told"
    assert not checkpoint_protocol.told_too({0, 1, 2, 3}, VIEW)


def test_a_configured_period_is_kept_and_failures_bring_the_next_try_nearer():
    rhythm = CheckpointSchedule(setting=600.0)
    assert rhythm.wait_s(0.0, 10.0) == 595.0  # the boundary nearest to it
    assert rhythm.lost(late=False).wait_s(0.0, 0.0) == checkpoint_protocol.AGAIN_S
    assert rhythm.lost(late=False).lost(late=False).wait_s(0.0, 0.0) == 2 * checkpoint_protocol.AGAIN_S
    many = rhythm
    for _ in range(50):
        many = many.lost(late=True)
    assert many.wait_s(0.0, 0.0) == 600.0 and many.margin == checkpoint_protocol.MARGIN[1]
    assert many.saved(1.0, 2.0).wait_s(0.0, 0.0) == 600.0


def test_an_automatic_period_follows_the_cost_of_a_save_and_the_uptime_of_jobs():
    first = CheckpointSchedule()
    assert first.period_s(0.0) == checkpoint_protocol.FIRST_S
    cheap, dear = first.saved(0.01, 1.0), first.saved(1.0, 1.0)
    assert cheap.period_s(0.0) < dear.period_s(0.0)
    often = dear.resumed({"ran_s": 7200.0, "ends": 20})
    assert often.period_s(0.0) < dear.period_s(0.0)
    assert first.saved(0.001, 500.0).period_s(0.0) >= 500.0, "one at a time"


def test_an_end_that_was_planned_is_no_failure():
    rhythm = CheckpointSchedule(ran_s=100.0, ends=2)
    assert rhythm.to_json(50.0, planned=True) == {"ran_s": 150.0, "ends": 2}
    assert CheckpointSchedule().resumed(rhythm.to_json(50.0, planned=False)).ends == 3


@pytest.mark.parametrize("signal", [ORDER, Stops((0, 1), "SIGTERM")])
def test_the_words_travel_with_the_notices(signal):
    there = signals.from_json(signals.to_json(signal))
    assert there == signal and signals.classify(there) == signal
    assert not signals.ends(signal, VIEW, 12)


def test_several_starts_are_one_history():
    def start(first, last, *more):
        steps = [{"event": "step", "step": step, "loss": float(first)} for step in range(first, last)]
        return [*([{"event": "resume", "step": first}] if first else []), *steps, *more]

    whole = invariants.joined([start(0, 5), start(3, 6), start(0, 0), start(6, 8, {"event": "end", "step": 7})])
    assert [(line["step"], line["loss"]) for line in whole if line["event"] == "step"] == [
        *((step, 0.0) for step in range(3)), *((step, 3.0) for step in range(3, 6)), (6, 6.0), (7, 6.0)
    ]  # fmt: skip
    assert whole[-1]["event"] == "end"
