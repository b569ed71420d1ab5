"""Every ending of a run before its last step: exit code, whether the job starts again, and the loss that is named."""

from dataclasses import replace

import pytest

from megatron_ft.core.lifecycle import restart_policy, run_ending
from megatron_ft.core.lifecycle.run_ending import Loss, conclude, noted, starts_again
from megatron_ft.errors import (
    WIPED_OUT,
    ConfigError,
    GroupLeft,
    InvariantBroken,
    RunStopped,
    StartOver,
    StoreError,
    WipedOut,
)
from megatron_ft.types import Exit, View

BOTH = View(1, (0, 1), "both are members")
ALONE = View(1, (0,), "group 1 is lost")
ADMITTED = View(2, (0, 1), "group 1 asks to join", joined=(1,), incarnations={1: 1})
NO_MEMBER = View(3, (), "no live group has the model state any more (wipe-out)")
KILLED, TOLD = "SIGKILL", "SIGTERM"
GIVEN_UP = "given up"


def lost(group, how, incarnation=0, words="", state=True, view=BOTH):
    """Return the loss of a start that ended with a signal or an exit code, or was given up."""
    if how == GIVEN_UP:
        return Loss(group, incarnation, 0, "died", None, f"group {group} has stopped", state=state, given_up=True)
    code, name = (None, how) if isinstance(how, str) else (how, None)
    exit_ = Exit(group, 0, 100 + group, "node1", name, code, words)
    kind = restart_policy.kind_of(exit_, incarnation, restart_policy.Seats(view))
    return Loss(group, incarnation, 0, kind, code, str(exit_), words, state)


def on_its_way(group, how=StartOver.exit_code, words="its donors are lost"):
    """Return the loss of a start that came back and never had the complete state."""
    return lost(group, how, incarnation=1, words=words, state=False)


FAILS = lost(0, 1, words="ValueError: x")
SAME = lost(1, 1, words="ValueError: x")
OUT = "group 1 is outside view 1"
POISON = "groups 0 and 1 died computing the same microbatch 3/1.0"

# name: losses in order, newest view, what else is known; exit code, the group that is named
TABLE = {
    # members, and no group that comes back
    "all are killed": ([lost(1, KILLED), lost(0, KILLED)], BOTH, {}, WIPED_OUT, 0),
    "all are killed without rejoin": ([lost(1, KILLED), lost(0, KILLED)], BOTH, {"returns": False}, WIPED_OUT, 0),
    "all are given up": ([lost(1, GIVEN_UP), lost(0, GIVEN_UP)], BOTH, {}, WIPED_OUT, 0),
    "all are told to end before they can leave": ([lost(1, TOLD), lost(0, TOLD)], BOTH, {}, GroupLeft.exit_code, 0),
    "all leave": ([lost(1, 5, words="asked"), lost(0, 5, words="asked")], BOTH, {}, GroupLeft.exit_code, 0),
    "one leaves, the last is killed": ([lost(1, 5), lost(0, KILLED)], BOTH, {}, WIPED_OUT, 0),
    "the script ends": ([lost(1, 0), lost(0, 0)], BOTH, {}, 1, 0),
    "the script fails everywhere": ([SAME, FAILS], BOTH, {}, 1, 0),
    "the script fails in other words": ([lost(1, 1, words="KeyError: 1"), FAILS], BOTH, {"returns": False}, 1, 0),
    "the script exits with a code": ([lost(1, 9, words="exit 9"), lost(0, 9, words="exit 9")], BOTH, {}, 9, 0),
    "refused settings": ([lost(0, ConfigError.exit_code, words="no such key")], BOTH, {"last_step": None}, 2, 0),
    "the policy is wiped out, and a rank of a lost group ends last": (
        [lost(0, WipedOut.exit_code, words="no live group hosts shard 1"), lost(1, RunStopped.exit_code, words=OUT)],
        BOTH,
        {},
        WIPED_OUT,
        0,
    ),
    "the states differ": ([lost(0, 10, words="the states differ"), lost(1, 3, words=OUT)], BOTH, {}, 10, 0),
    "the states differ while a group follows": ([lost(0, 10, words="differ"), on_its_way(1, 10)], ADMITTED, {}, 10, 1),
    "a microbatch kills every group": ([lost(1, KILLED), lost(0, 3, words=POISON)], BOTH, {}, 3, 0),
    "min_groups": ([lost(1, KILLED), lost(0, 3, words="min_groups is 2")], BOTH, {}, 3, 0),
    "min_groups while a group comes back": (
        [lost(1, KILLED), lost(0, 3, words="min_groups is 2"), on_its_way(1)],
        BOTH,
        {},
        3,
        0,
    ),
    "the store is away": ([lost(0, 4, words="no store"), lost(1, 3, words=OUT)], BOTH, {}, WIPED_OUT, 0),
    "the store was never there": ([lost(0, 4, words="no store")], BOTH, {"last_step": None}, StoreError.exit_code, 0),
    "left out, and then the others are killed": (
        [lost(0, KILLED), lost(1, 3, words=OUT, view=ALONE)],
        ALONE,
        {},
        WIPED_OUT,
        0,
    ),
    "a member's state is wrong, and no other has one": ([lost(0, 6, words="differs")], ALONE, {}, WIPED_OUT, 0),
    # groups on their way back
    "killed while a group starts": ([lost(1, KILLED), lost(0, KILLED)], ALONE, {}, WIPED_OUT, 0),
    "killed while a group follows": ([lost(1, KILLED), lost(0, KILLED), on_its_way(1)], ALONE, {}, WIPED_OUT, 0),
    "killed after a group is admitted": ([lost(1, KILLED), lost(0, KILLED), on_its_way(1)], ADMITTED, {}, WIPED_OUT, 0),
    "the admitted group writes the view without members": (
        [lost(1, KILLED), lost(0, KILLED), on_its_way(1, WipedOut.exit_code)],
        NO_MEMBER,
        {},
        WIPED_OUT,
        0,
    ),
    "the group that follows is killed last": (
        [lost(1, KILLED), lost(0, KILLED), on_its_way(1, KILLED)],
        ADMITTED,
        {},
        WIPED_OUT,
        0,
    ),
    "given up while a group follows": ([lost(1, KILLED), lost(0, GIVEN_UP), on_its_way(1)], ADMITTED, {}, WIPED_OUT, 0),
    "fails while a group follows": ([lost(1, KILLED), FAILS, on_its_way(1)], ADMITTED, {}, WIPED_OUT, 0),
    "fails while a group waits for its start": ([lost(1, KILLED), FAILS], ALONE, {}, WIPED_OUT, 0),
    "fails while one that failed otherwise follows": (
        [lost(1, 1, words="CUDA error"), FAILS, on_its_way(1)],
        ADMITTED,
        {},
        WIPED_OUT,
        0,
    ),
    "fails as the one that follows had": ([SAME, FAILS, on_its_way(1)], ADMITTED, {}, 1, 0),
    "fails, and the other one does not come back": ([lost(1, KILLED), FAILS], ALONE, {"refused": {1}}, 1, 0),
    "fails without rejoin": ([lost(1, KILLED), FAILS], ALONE, {"returns": False}, 1, 0),
    "leaves while a group follows": ([lost(1, KILLED), lost(0, 5), on_its_way(1)], ADMITTED, {}, WIPED_OUT, 0),
    "the script ends while a group follows": ([lost(1, KILLED), lost(0, 0), on_its_way(1)], ADMITTED, {}, 1, 0),
    # hosts without groups
    "a spare host hears of all losses": ([SAME, FAILS], BOTH, {"idle": True}, 1, 0),
    "a spare host has heard nothing": ([], BOTH, {"idle": True}, WIPED_OUT, None),
    "an agent fails": ([], BOTH, {}, 1, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_ending_follows_from_what_happened_to_all_groups(name):
    losses, view, more, code, group = TABLE[name]
    ending = conclude(losses, **{"last_step": 7, "members": view.members, **more})
    assert ending.code == code and starts_again(ending.code) == (code == WIPED_OUT), ending
    assert (ending.cause.group if ending.cause else None) == group, ending
    assert ("before the first step" if more.get("last_step", 7) is None else "after step 7") in ending.reason, ending


def test_a_row_for_every_exit_code_of_a_rank():
    codes = {loss.code for losses, *_ in TABLE.values() for loss in losses}
    kinds = (RunStopped, WipedOut, StartOver, InvariantBroken, GroupLeft, StoreError, ConfigError)
    assert codes >= {None, 0, 1, *(kind.exit_code for kind in kinds)}


def test_the_message_names_the_loss_that_took_the_last_complete_state():
    ending = conclude([lost(1, KILLED), lost(0, KILLED), on_its_way(1)], last_step=26, members=ADMITTED.members)
    assert ending.reason == (
        "no group is left after step 26; the last with the complete state was group 0: rank 0 on node1 (pid 100) ended "
        "with SIGKILL; on their way back: groups 1"
    )


def test_which_losses_are_kept():
    first, second = lost(1, KILLED), lost(1, KILLED, incarnation=2)
    assert noted([first], replace(first, code=3)) == (first,), "the first loss of a rank counts"
    other_rank = replace(first, position=1, code=4)
    assert noted([first], other_rank) == (first, other_rank)
    given_up = lost(1, GIVEN_UP)
    assert noted([given_up], other_rank) == (given_up,), "exit codes after a start was given up have no meaning"
    assert noted([first, FAILS], second) == (FAILS, second), "an earlier start of the group does not matter any more"
    assert noted([first], on_its_way(1)) == (first, on_its_way(1))
    ending = run_ending.conclude([first, other_rank], last_step=1, members=BOTH.members)
    assert ending.cause in (first, other_rank)


@pytest.mark.parametrize("code", [None, *range(12), 129, 130, 137, 143])
def test_a_job_starts_again_after_a_wipe_out_and_after_no_other_end(code):
    assert starts_again(code) == (code in (None, WIPED_OUT))
