"""The hard cases of the step protocol as stories, told step by step in a :class:`tests.world.World`.

Groups A B C D are 0 1 2 3. The transcripts next to this file are what the core does with them, in words to read;
``python -m tests.golden.stories`` writes them anew, and the difference is what a reviewer looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_ft.core import recovery
from megatron_ft.core.recovery import Job
from tests.world import World

HERE = Path(__file__).parent
A, B, C, D = range(4)
JOB = Job(shards=4, per_shard=1, buckets=4, steps=2)


def told(story: Callable[[World], None]) -> str:
    """The transcript of a story: its first line says what happens, the rest is what everybody did."""
    log: list[str] = []
    world = World(JOB, log=log)
    world.play(until=lambda: all(isinstance(g.action, recovery.Compute) for g in world.alive.values()))
    log.clear()
    story(world)
    world.play()
    world.check_end()
    title = " ".join((story.__doc__ or "").split())
    return "\n".join([title, "", *log, "", *_summary(world)]) + "\n"


def _summary(world: World) -> list[str]:
    lines = []
    for me, group in sorted((world.ended | world.alive).items()):
        how = "ends" if me in world.alive else "is gone"
        if group.state.stopped:
            how = f"stops: {group.state.stopped}"
        lines.append(f"group {me} {how} after {len(group.committed)} committed steps")
    return lines


def everybody_reduces(world: World) -> None:
    """All have computed and started all their all-reduces; nobody has seen one finish."""
    world.play(until=lambda: all(isinstance(g.action, recovery.Reduce) for g in world.alive.values()))
    for me in (A, B, C):
        world.act(me)  # they arrive; D still has not, so nothing can finish
    world.arrive(D)


def see(world: World, me: int, buckets: int) -> None:
    for _ in range(buckets):
        assert world.act(me)


def everybody_hears(world: World) -> None:
    for me in sorted(world.alive):
        while world.pending(me):
            world.notice(me)


def until_view(world: World, epoch: int) -> None:
    """Everybody alive adopts the view of ``epoch`` and does nothing more."""
    everybody_hears(world)
    while any(g.state.view.epoch < epoch for g in world.alive.values()):
        for me, group in sorted(world.alive.items()):
            if group.state.view.epoch < epoch:
                world.act(me)


def case_01(world: World) -> None:
    """Hard case 1: D dies before its first bucket; no bucket is final, D's microbatch is patched into all."""
    world.kill(D)


def case_02(world: World) -> None:
    """Hard case 2: D dies after bucket 0 is final everywhere; it keeps D's part, the patch counts in 1 to 3 only."""
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 1)
    world.kill(D)


def case_03(world: World) -> None:
    """Hard case 3: D dies inside bucket 1; A saw it finish, B and C did not: they take it from A."""
    everybody_reduces(world)
    see(world, A, 2), see(world, B, 1), see(world, C, 1)
    world.kill(D)


def case_04(world: World) -> None:
    """Hard case 4: as 3, and A dies before anyone took bucket 1: it is unfinished again, patched for D and A."""
    case_03(world)
    until_view(world, 1)
    world.kill(A)


def case_05(world: World) -> None:
    """Hard case 5: D dies after everyone has every bucket, before the gates: committed without patch."""
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 4)
    world.kill(D)


def case_06(world: World) -> None:
    """Hard case 6: A has passed its gate and computes step 1, B and C are in 0: they take A's state."""
    everybody_reduces(world)
    see(world, A, 4)
    world.act(A)
    see(world, B, 2), see(world, C, 1)
    world.kill(D)


def case_07(world: World) -> None:
    """Hard case 7: as 6, and A dies before it handed its state over: B and C patch step 0 themselves."""
    case_06(world)
    until_view(world, 1)
    world.kill(A)


def case_09(world: World) -> None:
    """Hard case 9: C dies while it computes D's patch: each microbatch is counted once all the same."""
    world.kill(D)
    until_view(world, 1)
    world.play(until=lambda: isinstance(world.alive[A].action, recovery.Compute) and world.alive[A].action.patch)
    world.kill(C)


def case_10(world: World) -> None:
    """Hard case 10: two groups die in the same millisecond: one view change."""
    everybody_reduces(world)
    world.kill(C)
    world.kill(D)


def case_11(world: World) -> None:
    """Hard case 11: D is suspected but alive: it finds itself outside and commits nothing."""
    everybody_reduces(world)
    world.accuse(D)


def case_14(world: World) -> None:
    """Hard case 14: the winner of the compare-and-set dies right after writing: its view stands."""
    world.kill(D)
    everybody_hears(world)
    while 1 not in world.views:
        world.act(A)
    world.kill(A)


def case_20(world: World) -> None:
    """Hard case 20: D dies during its optimizer update, the others have done theirs: nobody else is touched."""
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 4)
    for me in (A, B, C):
        world.act(me)
    world.kill(D)


def case_28(world: World) -> None:
    """Hard case 28: the last step is committed, then D dies: the run ends with success."""
    world.play()
    world.kill(D)


def case_26(world: World) -> None:
    """Hard case 26: D is dead and asks for a seat again; C dies at the boundary where D enters: one view for both."""
    world.kill(D)
    until_view(world, 1)
    world.ask(D)
    world.play(until=lambda: isinstance(world.alive[A].action, recovery.Reduce))
    world.kill(C)


def case_27(world: World) -> None:
    """Hard case 27: all but one die, then two come back: the run never stopped, the plan spreads again."""
    for group in (B, C, D):
        world.kill(group)
    world.ask(B), world.ask(C)


def case_25(world: World) -> None:
    """Hard case 25: D gets its seat and dies before it has the state: the others go on without it."""
    world.kill(D)
    until_view(world, 1)
    world.ask(D)
    world.play(until=lambda: 2 in world.views)
    world.kill(D)


def case_wipe_out(world: World) -> None:
    """Wipe-out: D has just entered and has no state yet when A, B and C die: it stops with the reason."""
    world.kill(D)
    until_view(world, 1)
    world.ask(D)
    world.play(until=lambda: 2 in world.views)
    for group in (A, B, C):
        world.kill(group)


STORIES = {name: story for name, story in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    for name, story in STORIES.items():
        (HERE / f"{name}.txt").write_text(told(story))
