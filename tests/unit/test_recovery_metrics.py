"""The account of an interrupted step: the microbatches that each group took over, those in memory, and those of shards
without a living host."""

from __future__ import annotations

from dataclasses import replace

from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.replication import placement
from megatron_ft.core.scheduling import assignment
from megatron_ft.record import history
from megatron_ft.record.history import History
from megatron_ft.run.recovery_metrics import RecoveryMetrics

PLACEMENT = placement.golomb(4, 2)  # group i hosts the shards i and i + 1
JOB = machine.Job(shards=4, per_shard=2, buckets=1, steps=9, placement=PLACEMENT)


def interrupted(me: int, *lost: int) -> machine.GroupState:
    """Return group ``me`` in step 0, right after ``lost`` are found dead: of shard 2, host 1 takes one and 0 or 3 the
    other."""
    state = machine.start(me, JOB, first_view(4))
    view = replace(state.view, epoch=1, live=tuple(g for g in range(4) if g not in lost))
    return replace(state, view=view, plan=assignment.patch_plan(state.plan, lost, PLACEMENT))


def account(run_dir, group: int, writer: bool = True) -> RecoveryMetrics:
    shared = History(run_dir)
    shared.set_writer(writer)
    return RecoveryMetrics(shared, group)


def events(run_dir, event: str) -> list[dict]:
    return [line for line in history.read(run_dir) if line["event"] == event]


def go_on(account: RecoveryMetrics, state: machine.GroupState, prefetched=lambda microbatch: True) -> None:
    account.noticed()
    account.adopted(state.view)
    for microbatch in state.plan.of(state.me):
        account.computed(microbatch, microbatch in state.plan.patched, prefetched(microbatch), 0.0)
    account.resumed(state)


def test_a_patch_names_microbatches_in_memory_and_others(tmp_path):
    state = interrupted(3, 1, 2)
    go_on(account(tmp_path, 3, writer=False), state, prefetched=lambda microbatch: microbatch.index == 0)
    (line,) = events(tmp_path, "patch")
    assert {key: line[key] for key in ("step", "epoch", "group")} == {"step": 0, "epoch": 1, "group": 3}
    assert (line["prefetched"], line["fetched"]) == (["0/2.0"], ["0/2.1"])


def test_a_group_that_takes_nothing_over_writes_no_patch(tmp_path):
    go_on(account(tmp_path, 3), interrupted(3, 2))
    assert not events(tmp_path, "patch")
    (line,) = events(tmp_path, "recovery")
    assert (line["patched"], line["patched_by"], line["unhosted"]) == (2, {"0": 1, "1": 1}, 1)


def test_microbatches_of_groups_that_do_not_host_them_are_counted(tmp_path):
    """Shard 2 is hosted by groups 2 and 1; with both gone a group takes it that does not host it."""
    go_on(account(tmp_path, 0), interrupted(0, 1, 2))
    (line,) = events(tmp_path, "recovery")
    assert (line["patched"], line["unhosted"]) == (4, 2)


def test_each_resumption_accounts_for_new_microbatches_only(tmp_path):
    """A second group is lost in the same step: the first patch is neither written nor counted again."""
    mine = account(tmp_path, 1)
    first = interrupted(1, 2)
    go_on(mine, first)
    second = replace(
        first, view=replace(first.view, epoch=2, live=(1, 3)), plan=assignment.patch_plan(first.plan, (0,), PLACEMENT)
    )
    mine.noticed()
    mine.adopted(second.view)
    mine.resumed(second)
    assert [line["prefetched"] for line in events(tmp_path, "patch")] == [["0/2.0"]]
    assert [(line["epoch"], line["patched"]) for line in events(tmp_path, "recovery")] == [(1, 2), (2, 2)]


def test_a_step_committed_elsewhere_leaves_no_patch_to_the_next(tmp_path):
    """The gradient of the patch never counted: the group took the state of those that were ahead."""
    mine, state = account(tmp_path, 1), interrupted(1, 2)
    mine.noticed()
    mine.adopted(state.view)
    mine.computed(state.plan.of(1)[-1], True, True, 0.0)
    mine.begin_step()
    mine.resumed(replace(state, step=1))
    assert not events(tmp_path, "patch")
