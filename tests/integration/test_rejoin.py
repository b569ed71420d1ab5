"""Lost groups come back while the others train on: nothing is counted twice or never, and all end with the same bits."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_ft.faults import inject
from megatron_ft.runtime.points import Hold
from tests import deepspeed_kills, support

REJOIN = {"enabled": True, "restarts_per_hour": 100}
STEPS = 150
SMALL = ("--layers", 2, "--width", 64, "--seq-len", 32, "--lr", 1e-4)


def start(directory, data_dir, holds=(), **options) -> support.Run:
    return support.start(directory, data_dir, holds, **{"steps": STEPS, "rejoin": REJOIN, "own": SMALL, **options})


@pytest.fixture(scope="module")
def reference(tmp_path_factory, data_dir) -> support.Run:
    run = start(tmp_path_factory.mktemp("reference") / "run", data_dir)
    run.check()
    return run


def back(run: support.Run, group: int) -> list[int]:
    """The starts of the group with which it has come back."""
    return [line["incarnation"] for line in run.events("rejoined") if line["group"] == group]


def kill(run: support.Run, group: int, position: int = 0) -> None:
    inject.kill(run.directory, group, "anywhere", position=position)


def await_back(run: support.Run, group: int, incarnation: int) -> None:
    support.wait_for(lambda: incarnation in back(run, group), run)


def check(run: support.Run, reference: support.Run) -> None:
    """Every promise is kept, and every group is there at the end."""
    run.check(reference)
    assert [line["group"] for line in run.events("survivor")] == list(range(run.groups))
    assert run.events("step")[-1]["live"] == list(range(run.groups))


def test_groups_come_back_again_and_again(tmp_path, data_dir, reference):
    """Also the one that writes the record, two at once, and one for the second time."""
    run = start(tmp_path / "run", data_dir)
    support.wait_for_step(run, 3)
    for victims, incarnation in [((2,), 1), ((0,), 1), ((1, 3), 1), ((2,), 2)]:
        for victim in victims:
            kill(run, victim)
        for victim in victims:
            await_back(run, victim, incarnation)
    check(run, reference)
    entries = [line for line in run.events("view") if line["joined"]]
    assert len(entries) >= 4 and all(line["behind"] == [] for line in entries), "nobody is held up by an entry"
    assert {line["incarnation"] for line in run.events("restart") if line["group"] == 2} == {1, 2}


def test_what_can_happen_on_the_way_back(tmp_path, data_dir, reference):
    """It is killed while it receives; then a donor is, while it sends: who comes back begins again with others, in the same
    process. Another group is frozen on its way, for many steps: nobody waits for it."""
    holds = [Hold(1, None, "follow", incarnation=number) for number in (1, 2)]
    run = start(tmp_path / "run", data_dir, [*holds, Hold(3, None, "follow", incarnation=1)])
    support.wait_for_step(run, 3)
    kill(run, 1)
    run.strike(holds[0])
    support.wait_for(lambda: len(run.events("restart")) == 2, run)
    frozen = support.await_held(run, 1)
    kill(run, 2)
    support.wait_for(lambda: len(run.events("recovery")) >= 2, run)
    os.kill(frozen, signal.SIGCONT)
    await_back(run, 1, 2)
    await_back(run, 2, 1)
    kill(run, 3)
    frozen = support.await_held(run, 3)
    support.wait_for_step(run, run.events("step")[-1]["step"] + 10)
    os.kill(frozen, signal.SIGCONT)
    await_back(run, 3, 1)
    check(run, reference)
    assert back(run, 1) == [2]


def test_a_group_of_two_ranks_comes_back(tmp_path, data_dir, reference):
    """Each rank follows those of its own position; one that dies takes the other along, and both come back."""
    run = start(tmp_path / "run", data_dir, extra=["--ranks-per-group", 2], groups=4)
    support.wait_for_step(run, 3)
    kill(run, 1, position=1)
    await_back(run, 1, 1)
    kill(run, 1, position=0)
    await_back(run, 1, 2)
    check(run, reference)


def test_a_pipeline_comes_back(tmp_path, data_dir):
    """The optimizer's state is in parts at the ranks of the group (ZeRO-1)."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    options = {"steps": 60, "rejoin": REJOIN, "engine": {"zero_optimization": {"stage": 1}}, "own": ("--lr", 1e-4)}
    alone = deepspeed_kills.start(tmp_path / "alone", data_dir, **options)
    alone.check()
    holds = [Hold(1, 4, "forward", position=1), Hold(0, 8, "begin"), Hold(1, None, "warm", incarnation=1)]
    run = deepspeed_kills.start(tmp_path / "run", data_dir, holds, **options)
    run.strike(holds[0])
    # One group alone would be done before the other has made its pipeline again.
    for frozen in [support.await_held(run, group) for group in (0, 1)]:
        os.kill(frozen, signal.SIGCONT)
    await_back(run, 1, 1)
    check(run, alone)
