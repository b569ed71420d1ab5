"""The hard cases of the step protocol as stories, told step by step in a :class:`tests.world.World`.

Groups A B C D are 0 1 2 3. The transcripts next to this file are what the core does with them, in words to read;
``python -m tests.golden.stories`` writes them anew, and the difference is what a reviewer looks at.

A story is a generator. What comes before its ``yield`` is what happens; then everybody follows the protocol until
nothing moves any more, and what comes after it says how it must have ended: who committed what, above all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_ft.core import recovery
from megatron_ft.core.recovery import Job
from megatron_ft.core.replication import consecutive
from megatron_ft.core.scheduler import fetched, microbatches_of_step
from megatron_ft.types import Microbatch
from tests.world import Group, World

HERE = Path(__file__).parent
A, B, C, D, E = range(5)
JOB = Job(shards=4, per_shard=1, buckets=4, steps=2)

Story = Callable[[World], Iterator[None]]


def in_job(**changed: object) -> Callable[[Story], Story]:
    """The story plays in a job that differs from ``JOB``."""

    def mark(story: Story) -> Story:
        story.job = Job(**{**vars(JOB), **changed})
        return story

    return mark


def told(story: Story) -> str:
    """The transcript of a story: what happens in a sentence, what everybody did, how it ended."""
    log: list[str] = []
    world = World(getattr(story, "job", JOB), log=log)
    world.play(until=lambda: all(isinstance(g.action, recovery.Compute) for g in world.alive.values()))
    log.clear()
    telling = story(world)
    next(telling)
    world.say("-- from here on everybody follows the protocol --")
    world.play()
    world.check_end()
    _exactly_the_step(world)
    assert next(telling, "over") == "over", "a story yields once"
    title = " ".join((story.__doc__ or "").split())
    return "\n".join([title, "", *_legend(world), "", *log, "", *_summary(world)]) + "\n"


def _legend(world: World) -> list[str]:
    groups = sorted(world.ended | world.alive)
    return [
        f"({' '.join('ABCDEF'[g] for g in groups)} are the groups {' '.join(map(str, groups))}.",
        " 1/3.0 is step 1, shard 3, microbatch 0; a patch is the work of a lost group; have [0, 2]: the buckets of that",
        " step that the group has seen finished; final: the buckets that are not reduced again.)",
    ]


def _summary(world: World) -> list[str]:
    lines = []
    for me, group in sorted((world.ended | world.alive).items()):
        how = "ends" if me in world.alive else "is gone"
        if group.state.stopped:
            how = f"stops: {group.state.stopped}"
        steps = len(group.committed)
        lines.append(f"group {me} {how} after {steps} committed step{'' if steps == 1 else 's'}")
    return lines


def _exactly_the_step(world: World) -> None:
    """Whatever any group committed, in person or as a state it took, is the sum over the step's N*G microbatches."""
    for group in (*world.ended.values(), *world.alive.values()):
        for step, buckets in enumerate(group.committed):
            whole = frozenset(microbatches_of_step(step, world.job.shards, world.job.per_shard))
            assert buckets == (whole,) * world.job.buckets


# --- words to tell with -----------------------------------------------------------------------------------------------


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
    """Everybody who can adopts the view of ``epoch``, or stops because of it, and does nothing more."""
    everybody_hears(world)
    late = [me for me in sorted(world.alive) if me not in world.frozen]
    for _ in range(1000):
        late = [me for me in late if world.alive[me].state.view.epoch < epoch and not world.alive[me].state.stopped]
        if not late:
            return
        for me in late:
            world.act(me)
    raise AssertionError(f"groups {late} never see view {epoch}")


def d_is_lost(world: World) -> None:
    """D has died before its first bucket, and the others stand in view 1."""
    world.kill(D)
    until_view(world, 1)


# --- words to judge with ----------------------------------------------------------------------------------------------


def committed(world: World, **steps: int) -> None:
    """How many steps each group has committed; groups that are not named do not exist."""
    found = {"ABCDEF"[me]: len(group.committed) for me, group in (world.ended | world.alive).items()}
    assert found == steps, found


def patches(world: World) -> list[str]:
    """Who computed which microbatches of a lost group."""
    return [line for line in world.log if "(patch)" in line]


def outside(world: World, me: int) -> Group:
    """The group lives, and knows that it must not go on."""
    group = world.alive[me]
    assert "outside view" in group.state.stopped
    return group


# --- one group is lost ------------------------------------------------------------------------------------------------


def case_01(world: World) -> Iterator[None]:
    """Hard case 1: D dies before its first bucket; no bucket is final, D's microbatch is patched into all."""
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert not world.views[1].final and patches(world) == ["0 computes 0/3.0 (patch)"]


def case_02(world: World) -> Iterator[None]:
    """Hard case 2: D dies after bucket 0 is final everywhere; it keeps D's part, the patch counts in 1 to 3 only."""
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 1)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert set(world.views[1].final) == {0} and not world.views[1].missing
    assert (1, 0, 0) not in world.arrived and (1, 0, 1) in world.arrived, "bucket 0 is not reduced again"


def d_dies_inside_bucket_1(world: World) -> None:
    everybody_reduces(world)
    see(world, A, 2), see(world, B, 1), see(world, C, 1)
    world.kill(D)


def case_03(world: World) -> Iterator[None]:
    """Hard case 3: D dies inside bucket 1; A saw it finish, B and C did not: they take it from A."""
    d_dies_inside_bucket_1(world)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert world.views[1].missing == {1: (B, C)} and world.views[1].final[1] == A


def case_04(world: World) -> Iterator[None]:
    """Hard case 4: as 3, and A dies before anyone took bucket 1: it is unfinished again, patched for D and A."""
    d_dies_inside_bucket_1(world)
    until_view(world, 1)
    world.kill(A)
    yield
    committed(world, A=0, B=2, C=2, D=0)
    assert set(world.views[2].final) == {0} and len(patches(world)) == 2


def case_05(world: World) -> Iterator[None]:
    """Hard case 5: D dies after everyone has every bucket, before the gates: committed without patch."""
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 4)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert not patches(world) and set(world.views[1].final) == {0, 1, 2, 3}


def a_has_passed_its_gate(world: World) -> None:
    everybody_reduces(world)
    see(world, A, 4)
    world.act(A)
    see(world, B, 2), see(world, C, 1)
    world.kill(D)


def case_06(world: World) -> Iterator[None]:
    """Hard case 6: A has passed its gate and computes step 1, B and C are in 0: they take A's state."""
    a_has_passed_its_gate(world)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    view = world.views[1]
    assert (view.step, view.source, view.behind) == (1, A, (B, C)) and not any("0/3.0 (patch)" in p for p in patches(world))


def case_06_complete(world: World) -> Iterator[None]:
    """Hard case 6, B holds every bucket of step 0 too: it commits by itself, only C takes A's state."""
    everybody_reduces(world)
    see(world, A, 4)
    world.act(A)
    see(world, B, 4), see(world, C, 1)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert world.views[1].behind == (C,) and "1 commits step 0" in world.log


def case_07(world: World) -> Iterator[None]:
    """Hard case 7: as 6, and A dies before it handed its state over: B and C patch step 0 themselves."""
    a_has_passed_its_gate(world)
    until_view(world, 1)
    world.kill(A)
    yield
    committed(world, A=1, B=2, C=2, D=0)
    assert sum(line.endswith("commits step 0") for line in world.log) == 3, "A before it died, B and C by themselves"


def case_09(world: World) -> Iterator[None]:
    """Hard case 9: C dies while D's patch is computed: each microbatch is counted once all the same."""
    d_is_lost(world)
    world.play(until=lambda: isinstance(world.alive[A].action, recovery.Compute) and world.alive[A].action.patch)
    world.kill(C)
    yield
    committed(world, A=2, B=2, C=0, D=0)
    assert sorted(line.split()[2] for line in patches(world)) == ["0/2.0", "0/3.0"]


def case_20(world: World) -> Iterator[None]:
    """Hard case 20: D dies during its optimizer update, the others have done theirs: nobody else is touched."""
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 4)
    for me in (A, B, C):
        world.act(me)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert not world.views[1].behind and not world.views[1].missing


def case_28(world: World) -> Iterator[None]:
    """Hard case 28: the last step is committed, then D dies: the run ends with success."""
    world.play()
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=2)
    assert not any(group.state.stopped for group in world.alive.values())


# --- several at once --------------------------------------------------------------------------------------------------


def case_10(world: World) -> Iterator[None]:
    """Hard case 10: two groups die in the same millisecond: one view change."""
    everybody_reduces(world)
    world.kill(C)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=0, D=0)
    assert sorted(world.views) == [0, 1] and set(world.views[1].lost) == {C, D}


def case_10_apart(world: World) -> Iterator[None]:
    """Hard case 10: as before, but of C's death A and B hear later than of D's: never two views of one epoch."""
    everybody_reduces(world)
    world.kill(D)
    for me in (A, B):
        world.notice(me)
    assert world.alive[A].state.reported and world.alive[B].state.reported
    world.kill(C)
    yield
    committed(world, A=2, B=2, C=0, D=0)
    assert sorted(world.views) == [0, 1] and set(world.views[1].lost) == {C, D}, "the second death was in time for the view"


@in_job(shards=6, per_shard=2, buckets=1, placement=consecutive(6, 2))
def case_10_rack(world: World) -> Iterator[None]:
    """Hard case 10: a rack of three neighbours dies at once. Two of its shards lose both their hosts: who gets those
    microbatches reads them from the dataset, the others go to hosts; the step stays whole."""
    for group in (D, E, 5):
        world.kill(group)
    yield
    committed(world, A=2, B=2, C=2, D=0, E=0, F=0)
    assert world.job.placement.unhosted(world.views[1].live) == (4, 5)
    reads = {m.shard for me in (A, B, C) for m in _patched_by(world, me) if _has_to_read(world, me, m)}
    assert reads == {4, 5} and {m.shard for m in _patched_by(world, C)} >= {3}, "C hosts shard 3"


@in_job(placement=consecutive(4, 2))
def case_stack_host(world: World) -> Iterator[None]:
    """Redundancy 2, shard j is hosted by the groups j and j - 1: D dies, and its microbatch goes to C, who has it."""
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert patches(world) == ["2 computes 0/3.0 (patch)"] and not _has_to_read(world, C, Microbatch(0, 3, 0))


@in_job(placement=consecutive(4, 2))
def case_stack_unhosted(world: World) -> Iterator[None]:
    """Redundancy 2, C and D die: shard 2 goes to B, who hosts it; shard 3 has no live host any more, so anybody takes
    it. SPARe would call that a wipe-out; here it is a slower read."""
    world.kill(C)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=0, D=0)
    assert world.job.placement.unhosted((A, B)) == (3,)
    assert sorted(patches(world)) == ["0 computes 0/3.0 (patch)", "1 computes 0/2.0 (patch)"]
    assert _has_to_read(world, A, Microbatch(0, 3, 0))


def _has_to_read(world: World, me: int, microbatch: Microbatch) -> bool:
    return bool(fetched([microbatch], me, world.job.placement))


def _patched_by(world: World, me: int) -> list[Microbatch]:
    names = [line.split()[2].replace("/", ".").split(".") for line in patches(world) if line.startswith(f"{me} ")]
    return [Microbatch(*map(int, name)) for name in names]


def case_27(world: World) -> Iterator[None]:
    """Hard case 27: all but one die, then two come back: the run never stopped, the plan spreads again."""
    for group in (B, C, D):
        world.kill(group)
    world.back(B, A), world.back(C, A)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert world.views[1].live == (A,) and world.views[2].live == (A, B, C) and not world.views[2].behind


# --- not dead, or not quite -------------------------------------------------------------------------------------------


def case_11(world: World) -> Iterator[None]:
    """Hard case 11: D is suspected but alive: it finds itself outside and commits nothing."""
    everybody_reduces(world)
    world.accuse(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    outside(world, D)


def case_11_complete(world: World) -> Iterator[None]:
    """Hard case 11: D is suspected but alive, and has seen every bucket finish: no update all the same; the others, who
    have seen none, do its part of the step again."""
    everybody_reduces(world)
    see(world, D, 4)
    world.accuse(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    outside(world, D)
    assert not world.views[1].final and patches(world) == ["0 computes 0/3.0 (patch)"], "D's word does not count"


def case_11_again(world: World) -> Iterator[None]:
    """Hard case 11: D, suspected but alive, has found itself outside; started anew it gets a seat like anybody else."""
    world.accuse(D)
    until_view(world, 1)
    outside(world, D)
    world.kill(D)
    world.back(D)
    yield
    committed(world, A=2, B=2, C=2, D=2)
    assert world.views[2].joined == (D,) and world.views[2].incarnations == {D: 1}


def case_12(world: World) -> Iterator[None]:
    """Hard case 12: the link between A and B is cut, both reach the store. Both say so, nobody else misses anybody: one
    of them leaves, never both."""
    everybody_reduces(world)
    world.miss((A,), (B,))
    world.miss((B,), (A,))
    everybody_hears(world)
    assert sorted(world.views) == [0], "nobody leaves before everybody could have said something"
    world.wait(6)
    yield
    committed(world, A=2, B=0, C=2, D=2)
    outside(world, B)
    assert list(world.views[1].lost) == [B]


def case_12_healed(world: World) -> Iterator[None]:
    """Hard case 12, and the link comes back before anybody had to leave: the step is reduced again by everybody."""
    everybody_reduces(world)
    world.miss((A,), (B,))
    everybody_hears(world)
    world.miss((A,), (B,), heard=True)
    everybody_hears(world)
    yield
    committed(world, A=2, B=2, C=2, D=2)
    assert world.views[1].live == (A, B, C, D)


def case_13_observer(world: World) -> Iterator[None]:
    """Hard case 13, with agents that hear: A reaches the store but no other host. It says first that all of them are
    silent; two of the others say the same of it. It is A that leaves, and A that says so."""
    everybody_reduces(world)
    for other in (B, C, D):
        world.miss((A,), (other,))
    world.miss((C,), (A,))
    world.miss((B,), (A,))
    everybody_hears(world)
    world.wait(6)
    yield
    committed(world, A=0, B=2, C=2, D=2)
    outside(world, A)
    assert list(world.views[1].lost) == [A] and len(world.views) == 2


def case_12_host(world: World) -> Iterator[None]:
    """A whole host, with C and D on it, is gone: nobody waits for a report, and A and B, on one host, do all the work."""
    everybody_reduces(world)
    world.freeze(C)
    world.freeze(D)
    world.miss((A, B), (C, D))
    for me in (A, B):
        world.notice(me)
    world.wait(6)
    until_view(world, 1)
    world.thaw(C)
    world.thaw(D)
    yield
    committed(world, A=2, B=2, C=0, D=0)
    assert sorted(world.views[1].lost) == [C, D]


def case_13(world: World) -> Iterator[None]:
    """Hard case 13: A is cut off from everybody and believes it is the others who died; they reach the store first, so
    A's own view loses, and it leaves."""
    everybody_reduces(world)
    world.freeze(A)
    world.accuse(A)
    until_view(world, 1)
    world.thaw(A)
    world.say("0 hears nothing of 1, 2 and 3 and takes them for dead")
    for other in (B, C, D):
        world.feed(A, recovery.Died(other, f"no heartbeat from group {other}"))
    yield
    committed(world, A=0, B=2, C=2, D=2)
    outside(world, A)
    assert world.views[1].live == (B, C, D)


def case_leave(world: World) -> Iterator[None]:
    """D is told to leave (a maintenance notice) in the middle of step 0. It finishes the step; the others go on without
    it, nothing is computed twice and nothing patched in step 0. C hears of it late, when it has begun step 1."""
    everybody_reduces(world)
    world.leave(D)
    for me in (A, B, D):
        world.notice(me)
    yield
    committed(world, A=2, B=2, C=2, D=1)
    outside(world, D)
    assert len(world.views) == 2 and world.views[1].step == 1


def case_15(world: World) -> Iterator[None]:
    """Hard case 15: D dies, C is stuck in something and does not report. It is waited for, then left out with that
    reason; when it goes on, it finds itself outside."""
    everybody_reduces(world)
    world.freeze(C)
    world.kill(D)
    everybody_hears(world)
    world.wait(59)
    assert sorted(world.views) == [0], "59 s are within report_timeout"
    world.wait(5)
    until_view(world, 1)
    world.thaw(C)
    yield
    committed(world, A=2, B=2, C=0, D=0)
    outside(world, C)
    assert world.views[1].lost[C] == "no report within 60 s of the end of epoch 0"


def case_15_in_time(world: World) -> Iterator[None]:
    """Hard case 15: as before, but C goes on after 30 s: it was waited for, and nobody but D is left out."""
    everybody_reduces(world)
    world.freeze(C)
    world.kill(D)
    everybody_hears(world)
    world.wait(30)
    world.thaw(C)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert world.views[1].live == (A, B, C)


def case_18(world: World) -> Iterator[None]:
    """Hard case 18: D is frozen, taken for dead and started anew. When its old process wakes up, minutes later, it is
    fenced by its incarnation: it has no say, no seat and no step."""
    world.freeze(D)
    world.accuse(D)
    until_view(world, 1)
    world.back(D)
    world.play(until=lambda: D in world.ghosts and world.alive[D].state.synced)
    ghost = world.wake_ghost(D)
    assert "outside view 1" in ghost.state.stopped and not ghost.committed
    yield
    committed(world, A=2, B=2, C=2, D=2)
    assert world.views[2].incarnations == {D: 1} and not world.alive[D].state.stopped


def case_18_same_view(world: World) -> Iterator[None]:
    """Hard case 18: as before, and one view both leaves the old D out and lets the new one in: the old one reads that
    group 3 is live, in another incarnation than its own, and stops."""
    world.freeze(D)
    world.back(D)
    world.accuse(D)
    world.play(until=lambda: D in world.ghosts)
    view = world.views[1]
    assert D in view.live and D in view.lost and view.incarnations == {D: 1}
    ghost = world.wake_ghost(D)
    assert "outside view 1" in ghost.state.stopped and not ghost.committed
    yield
    committed(world, A=2, B=2, C=2, D=2)


def case_reset(world: World) -> Iterator[None]:
    """A connection resets although nobody died: a new epoch with everybody in it, nothing is patched, and what was
    finished stays finished."""
    everybody_reduces(world)
    see(world, A, 2)
    world.reset(B)
    yield
    committed(world, A=2, B=2, C=2, D=2)
    assert world.views[1].live == (A, B, C, D) and not world.views[1].lost and not patches(world)
    assert set(world.views[1].final) == {0, 1}


# --- the store, and views under attack --------------------------------------------------------------------------------


def case_14(world: World) -> Iterator[None]:
    """Hard case 14: the winner of the compare-and-set dies right after writing: its view stands."""
    world.kill(D)
    everybody_hears(world)
    while 1 not in world.views:
        world.act(A)
    world.kill(A)
    yield
    committed(world, A=0, B=2, C=2, D=0)
    assert world.views[1].live == (A, B, C) and world.views[2].live == (B, C), "its death is the next epoch"


def case_16(world: World) -> Iterator[None]:
    """Hard case 16: the store is unreachable. A fault-free step does not notice; then D dies: the others see their
    connections reset, and nobody commits, splits or leaves until the store is back."""
    world.store_away()
    world.play(until=lambda: all(len(group.committed) == 1 for group in world.alive.values()))
    everybody_reduces(world)
    world.kill(D)
    for me in (A, B, C):
        world.feed(me, recovery.Broke(0, "connection reset"))
    world.wait(300)
    world.play()
    assert sorted(world.views) == [0] and all(len(group.committed) == 1 for group in world.alive.values())
    world.store_back()
    yield
    committed(world, A=2, B=2, C=2, D=1)
    assert world.views[1].live == (A, B, C), "five minutes without a store are not held against anybody"


# --- coming back ------------------------------------------------------------------------------------------------------


def case_23(world: World) -> Iterator[None]:
    """Hard case 23: E comes on top of four groups, and a step has four microbatches: E has none, reduces zeros and
    keeps step."""
    world.back(E)
    yield
    committed(world, A=2, B=2, C=2, D=2, E=2)
    assert not any(line.startswith("4 computes") for line in world.log)
    assert world.arrived[1, 1, 0][E] == frozenset() and "4 commits step 1" in world.log


def d_has_a_seat_again(world: World, *donors: int) -> None:
    """D has died and come back, and the next view lets it in; what its donors added to the model since is on its way."""
    d_is_lost(world)
    world.back(D, *donors)
    world.held.add(D)
    world.play(until=lambda: 2 in world.views)
    view = world.views[2]
    assert (view.step, view.joined, view.behind) == (1, (D,), ()), "it gets its seat at the boundary, and nobody waits"


def d_is_there_again(world: World) -> None:
    """It has started over, and follows B."""
    world.play(until=lambda: D not in world.alive and len(world.alive) == len(world.views[max(world.views)].live))
    world.held.discard(D)
    world.back(D, B)


def case_25(world: World) -> Iterator[None]:
    """Hard case 25: D gets its seat and dies before it has the state: the others go on without it."""
    d_has_a_seat_again(world, A)
    world.kill(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert world.views[2].joined == (D,) and world.views[3].live == (A, B, C)


def case_25_waiting(world: World) -> Iterator[None]:
    """Hard case 25: D dies while it waits for its seat: it never enters, and nobody was held up."""
    d_is_lost(world)
    world.back(D)
    world.kill_seeker(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert max(world.views) == 1


def case_25_withdrawn(world: World) -> Iterator[None]:
    """Hard case 25: D asks for a seat and dies. A and B have heard it ask when they come to the boundary, and end the
    epoch; C has heard by then that D is dead, and nothing that would make it do so: it is told."""
    d_is_lost(world)
    world.back(D)
    for me in (A, B):
        world.notice(me)
    world.kill_seeker(D)
    while world.pending(C):
        world.notice(C)
    while not (world.alive[A].state.reported and world.alive[B].state.reported):
        for me in (A, B, C):
            world.act(me)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    assert world.views[2].live == (A, B, C) and world.views[2].step == 1 and not world.views[2].behind


@in_job(steps=3)
def case_25_source(world: World) -> Iterator[None]:
    """Hard case 25: D follows A and B and gets its seat. A dies, and its part of what step 0 comes to never arrives: D
    cannot get to the others' state. It starts over, follows B and enters one step later."""
    d_has_a_seat_again(world, A, B)
    world.kill(A)
    world.lose(D, A)
    d_is_there_again(world)
    yield
    committed(world, A=1, B=3, C=3, D=3)
    assert "D has to start over" in "".join(world.log).replace("group 3 has", "D has")
    assert world.views[max(world.views)].incarnations == {D: 2}


def case_25_sent(world: World) -> Iterator[None]:
    """Hard case 25: D follows A and gets its seat, and A dies; everything that D needed was sent before. It arrives, and D
    goes on with what A had committed, which is what all have committed."""
    d_has_a_seat_again(world, A)
    world.kill(A)
    world.held.discard(D)
    yield
    committed(world, A=1, B=2, C=2, D=2)
    assert world.entries == {"entered": 1, "followed": 1}


@in_job(steps=3)
def case_25_alone(world: World) -> Iterator[None]:
    """Hard cases 7 and 25: E follows A, and A commits step 0 before anybody else has seen a bucket of it. E has all of that
    step and asks for a seat; A dies, and the others make step 0 again. E does not get a seat with a step that is lost: it
    starts over with what B has."""
    world.come(E, A)
    world.seek(E), world.seek(E)
    everybody_reduces(world)
    see(world, A, 4)
    world.act(A)
    while world.seek(E):
        pass
    assert world.seekers[E].asked and world.seekers[E].stands == 1
    world.kill(A)
    world.play(until=lambda: E not in world.seekers)
    world.back(E, B)
    yield
    committed(world, A=1, B=3, C=3, D=3, E=3)
    versions = {"ABCDE"[me]: group.done[0][0].epoch for me, group in (world.ended | world.alive).items()}
    assert versions == {"A": 0, "B": 1, "C": 1, "D": 1, "E": 1}, "the epoch in which step 0 was made"


def case_25_slow(world: World) -> Iterator[None]:
    """Hard case 25: D gets its seat and then hangs; after report_timeout the others go on without it, and when it wakes
    up it finds itself outside."""
    d_has_a_seat_again(world, A)
    world.freeze(D)
    world.play()
    world.reset(A)
    world.play()
    world.wait(61)
    until_view(world, 3)
    world.thaw(D)
    yield
    committed(world, A=2, B=2, C=2, D=0)
    outside(world, D)


def case_26(world: World) -> Iterator[None]:
    """Hard case 26: D has come back and asked for a seat; C dies at the boundary where D enters: one view for both."""
    d_is_lost(world)
    world.back(D)
    world.play(until=lambda: all(g.state.reported and g.state.step == 1 for g in world.alive.values()))
    world.kill(C)
    yield
    committed(world, A=2, B=2, C=1, D=2)
    assert any(set(view.lost) == {C} and view.joined == (D,) for view in world.views.values())


def case_26_two(world: World) -> Iterator[None]:
    """Hard case 26: C and D have died and both ask for a seat: one view lets both in, with the same committed state."""
    world.kill(C)
    world.kill(D)
    until_view(world, 1)
    world.back(C, A), world.back(D, A, B)
    yield
    committed(world, A=2, B=2, C=2, D=2)
    assert world.views[2].joined == (C, D) and not world.views[2].behind and max(world.views) == 2
    assert world.entries == {"entered": 2, "beside another": 2, "followed": 2}


@in_job(steps=3)
def case_26_behind(world: World) -> Iterator[None]:
    """Hard cases 6 and 26: E asks for a seat. A has passed its gate, B and C are a step behind, and D dies: the view has a
    state to hand over, so E does not enter with it. It does one boundary later."""
    world.back(E, A)
    a_has_passed_its_gate(world)
    yield
    committed(world, A=3, B=3, C=3, D=0, E=3)
    first, second = world.views[1], world.views[2]
    assert (first.behind, first.joined) == ((B, C), ()) and (second.step, second.joined) == (2, (E,))


@in_job(steps=3)
def case_26_complete(world: World) -> Iterator[None]:
    """Hard cases 6 and 26: E follows B and asks for a seat. A has committed step 0, the others hold all its buckets and are
    about to; a connection resets. Nobody is behind, and E does not enter all the same: A dies at once, and the step goes
    back to the one of which E has no bucket. E enters when all have committed it."""
    world.back(E, B)
    everybody_reduces(world)
    for me in (A, B, C, D):
        see(world, me, 4)
    world.act(A)
    world.reset(C)
    until_view(world, 1)
    assert world.views[1].step == 1 and not world.views[1].behind and not world.views[1].joined
    world.kill(A)
    until_view(world, 2)
    assert world.views[2].step == 0 and set(world.views[2].final) == {0, 1, 2, 3}
    yield
    committed(world, A=1, B=3, C=3, D=3, E=3)
    assert (world.views[3].step, world.views[3].joined) == (1, (E,))


@in_job(steps=3)
def case_26_late(world: World) -> Iterator[None]:
    """Hard case 26: E asks for a seat, and who should have heard of it at the boundary after step 0 has not. A hears it in
    the middle of step 1: it ends the epoch, because others might have. B has seen a bucket finish, so E gets its seat one
    boundary later; the bucket stays, and nobody is left behind."""
    world.back(E, A)
    while not all(isinstance(g.action, recovery.Reduce) and g.action.step == 1 for g in world.alive.values()):
        for me in (A, B, C, D):
            if world.alive[me].state.step == 0 or not isinstance(world.alive[me].action, recovery.Reduce):
                world.act(me)
    for me in (A, B, C, D):
        world.arrive(me)
    see(world, B, 1)
    everybody_hears(world)
    yield
    committed(world, A=3, B=3, C=3, D=3, E=3)
    first, second = world.views[1], world.views[2]
    assert (first.step, set(first.final), first.joined, first.behind) == (1, {0}, (), ())
    assert (second.step, second.joined, second.behind) == (2, (E,), ())


# --- the end ----------------------------------------------------------------------------------------------------------


def case_wipe_out(world: World) -> Iterator[None]:
    """Wipe-out: D has just entered and has no state yet when A, B and C die: it stops with the reason."""
    d_has_a_seat_again(world, A)
    for group in (A, B, C):
        world.kill(group)
    yield
    assert "no live group has the model state any more (wipe-out)" in outside(world, D).state.stopped
    assert not world.alive[D].committed


def case_wipe_out_accused(world: World) -> Iterator[None]:
    """Wipe-out: everybody is taken for dead, A wrongly: it stops instead of going on alone against the others' word."""
    world.accuse(A)
    for group in (B, C, D):
        world.kill(group)
    yield
    committed(world, A=0, B=0, C=0, D=0)
    assert "outside view 1" in world.alive[A].state.stopped and world.views[1].live == ()


@in_job(min_groups=3)
def case_min_groups(world: World) -> Iterator[None]:
    """Too few are left: with min_groups 3 the loss of D is masked, that of C too stops A and B with the reason."""
    d_is_lost(world)
    world.play(until=lambda: all(len(group.committed) == 1 for group in world.alive.values()))
    world.kill(C)
    yield
    committed(world, A=1, B=1, C=1, D=0)
    why = "only groups 0 1 are left of 4, min_groups is 3"
    assert [world.alive[me].state.stopped for me in (A, B)] == [why, why]


def shares(world: World, me: int) -> dict[int, int]:
    """How many microbatches of its present step each group has, as ``me`` plans it."""
    plan = world.alive[me].state.plan
    return {group: len(plan.of(group)) for group in plan.assignment}


SLOW = {"per_shard": 3, "straggler_steps": 1}


@in_job(**SLOW)
def case_slow(world: World) -> Iterator[None]:
    """D takes three times as long as the others: from the next step on it computes one microbatch of twelve."""
    world.rates = {D: 3.0}
    world.play(until=lambda: all(group.state.step == 1 for group in world.alive.values()))
    assert all(shares(world, me) == {A: 4, B: 4, C: 3, D: 1} for me in (A, B, C, D))
    yield
    committed(world, A=2, B=2, C=2, D=2)


@in_job(**SLOW)
def case_slow_behind(world: World) -> Iterator[None]:
    """D is slow, which shows in step 0; A has committed that and computes step 1 by a plan that spares D, when C dies: B
    and D take A's state, and with it the knowledge of who is slow."""
    world.rates = {D: 3.0}
    everybody_reduces(world)
    see(world, A, 4)
    for _ in range(1 + 4):  # it updates, and computes four microbatches of step 1
        world.act(A)
    see(world, B, 2)
    world.kill(C)
    until_view(world, 1)
    world.play(until=lambda: all(group.state.step == 1 and group.state.connected for group in world.alive.values()))
    yield
    committed(world, A=2, B=2, C=0, D=2)
    assert all(world.alive[me].state.speeds.slow == {D: 3.0} for me in (A, B, D))
    assert "0 computes 1/3.1" in world.log and sum(line.startswith("3 computes 1/3.") for line in world.log) == 1


@in_job(**SLOW, steps=4)
def case_slow_joins(world: World) -> Iterator[None]:
    """D is slow, C dies and comes back: it enters with step 2, gets its share of step 3, and plans like those who have seen
    how slow D is."""
    world.rates = {D: 3.0}
    world.kill(C)
    world.play(until=lambda: all(group.state.step == 1 for group in world.alive.values()))
    world.back(C)
    yield
    committed(world, A=4, B=4, C=4, D=4)
    assert world.alive[C].state.speeds.slow == {D: 3.0}
    assert [sum(line.startswith(f"{me} computes 3/") for line in world.log) for me in (A, B, C, D)] == [4, 4, 3, 1]


def case_deadly(world: World) -> Iterator[None]:
    """Nobody survives computing microbatch 0/3.0. D dies of it, then A, who took it over; B and C do not try it: all
    stop, with the reason."""
    world.poison = Microbatch(0, 3, 0)
    yield
    committed(world, A=0, B=0, C=0, D=0)
    for me in (B, C):
        why = world.alive[me].state.stopped
        assert "groups 0 and 3 died computing the same microbatch 0/3.0" in why and "look at the samples" in why


STORIES = {name: story for name, story in list(globals().items()) if name.startswith("case_")}


def main() -> None:
    """Write all transcripts anew, and remove those whose story is gone."""
    for old in HERE.glob("case_*.txt"):
        if old.stem not in STORIES:
            old.unlink()
    for name, story in STORIES.items():
        (HERE / f"{name}.txt").write_text(told(story))


if __name__ == "__main__":
    main()
