"""The checkers of histories of commits; planted bugs in tests/sim show that they find real ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.scheduling.assignment import microbatches_of_step
from megatron_ft.record.invariants import check_commits, check_nobody_left_out, complete_sum, contribution
from megatron_ft.types import Microbatch, View


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.data())
def test_a_sum_is_complete_only_with_every_microbatch_of_the_step_once(step, shards, per_shard, more, data):
    ids, most = microbatches_of_step(step, shards, per_shard), per_shard + more
    complete = sum(contribution(m, shards, most) for m in ids)
    assert complete == complete_sum(step, shards, per_shard, most)
    one = contribution(data.draw(st.sampled_from(ids)), shards, most)
    other = contribution(Microbatch(step + 1, *data.draw(st.sampled_from(ids))[1:]), shards, most)
    assert len({complete, complete - one, complete + one, complete - one + other, complete + other}) == 5


def history(*more, views=(), steps=1):
    """Two groups that enter and commit step 0; more lines after that, more views at the start."""
    view = first_view(2).to_json()
    lines = [{"event": "begin", "groups": 2, "microbatches": [1] * 10, "min_groups": 1}, {"event": "view", **view}]
    lines += [{"event": "view", **later.to_json()} for later in views]
    lines += [{"event": "enter", "group": group, "incarnation": 0, "view": view} for group in (0, 1)]
    lines += [commit(group) for group in (0, 1)]
    end = {"event": "end", "t": 1.0, "reason": "finished", "members": []}
    return [*lines, *more, *([] if more and more[-1]["event"] == "end" else [end])]


def line(event, **fields):
    return {"event": event, "group": fields.pop("group", 0), "incarnation": 0, **fields}


def commit(group, step=0, params="a", epoch=0, incarnation=0, sums=None, speeds=None):
    sums = [complete_sum(step, 2, 1, 1)] if sums is None else sums
    fields = {"group": group, "incarnation": incarnation, "epoch": epoch, "step": step}
    return {"event": "commit", **fields, "params": params, "sums": sums, "speeds": speeds}


SECOND = View(1, (0,), "1 is lost", step=1, lost={1: "killed"})


def test_a_good_history_has_no_violation():
    assert check_commits(history(commit(0, 1, "b"), commit(1, 1, "b"))) == []
    assert check_nobody_left_out(history()) == []


@pytest.mark.parametrize(
    "lines, words",
    [
        (
            history(commit(0, 1, sums=[3])),
            "bucket 0: number 0 counts 3, not 0, number 2 counts 0, not 1, number 3 counts",
        ),
        (history(commit(0, 1, "b"), commit(1, 1, "c")), "before step 2 the model is ['b', 'c']"),
        (
            history(commit(0, 1, "b", speeds={1: 2.0}), commit(1, 1, "b", speeds={})),
            "group 1 commits step 1 with the speeds {}, others with {1: 2.0}",
        ),
        (history(commit(0, 2, "b")), "group 0 commits step 2, it is at 1"),
        (history(commit(0, 1, "b"), commit(0, 2, "c")), "group 0 commits step 2, group 1 is at 1"),
        (history(commit(1, 1, "b", incarnation=3)), "group 1 (start 3) commits step 1 outside of view 0"),
        (history(commit(1, 2, "b"), views=[SECOND]), "group 1 commits step 2 under view 0, view 1 is at 1"),
        (history(views=[SECOND, SECOND]), "view 1 is written when 2 are there"),
        (
            history(line("adopt", view=replace(SECOND, step=0).to_json()), views=[SECOND]),
            "group 0 adopts a view 1 that does not stand",
        ),
        (
            history(line("stop", epoch=0, reason="why", synced=True), views=[SECOND]),
            "group 0 stops although it has a seat: why",
        ),
        (history(line("end", t=9.0, reason="stuck", members=[[0, "Reduce"]])), "no progress: [[0, 'Reduce']] at 9.0"),
    ],
)
def test_a_violation_is_named(lines, words):
    assert any(words in violation for violation in check_commits(lines)), check_commits(lines)


def test_a_living_group_that_is_left_out_is_named():
    stop = line("stop", group=1, epoch=0, reason="group 1 is outside view 1: why", synced=True)
    assert check_nobody_left_out(history(stop)) == ["group 1 lives and is left out: group 1 is outside view 1: why"]
