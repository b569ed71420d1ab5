"""Every sample of an evaluation counts once, whichever groups are lost or slow while it is computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.scheduling.evaluation_division import Division, collects, next_chunk

divisions = st.builds(
    Division,
    groups=st.sets(st.integers(0, 20), min_size=1, max_size=8).map(lambda groups: tuple(sorted(groups))),
    samples=st.integers(1, 200),
    batch=st.integers(1, 20),
)


@given(divisions)
def test_the_chunks_are_all_samples_once_and_each_group_has_nearly_as_many(division):
    batches = [batch for chunk in range(division.chunks) for batch in division.batches_of(chunk)]
    assert batches == list(range(division.batches))
    samples = [sample for batch in batches for sample in division.samples_of(batch)]
    assert samples == list(range(division.samples))
    owned = [sum(division.owner(c) == group for c in range(division.chunks)) for group in division.groups]
    assert max(owned) - min(owned) <= 1


@given(divisions, st.data())
def test_every_chunk_is_published_once_whatever_dies(division, data):
    """Groups take turns in any order; a group may die after it has chosen a chunk, known to the others or not."""
    living, lost = list(division.groups), set()
    published: dict[int, int] = {}
    computed: list[int] = []
    for _ in range(10 * division.chunks + 10):
        if len(published) == division.chunks:
            break
        me = data.draw(st.sampled_from(living))
        late = data.draw(st.booleans())
        chunk = next_chunk(division, me, published, lost, late)
        if chunk is None:
            assert not late
            continue
        assert chunk not in published
        assert late or division.owner(chunk) == me or division.owner(chunk) in lost
        if len(living) > 1 and data.draw(st.integers(0, 4)) == 0:
            living.remove(me)
            if data.draw(st.booleans()):
                lost.add(me)
            continue
        computed.append(chunk)
        published.setdefault(chunk, me)
    for me in living:  # the last living groups finish, once they have waited
        while (chunk := next_chunk(division, me, published, lost, late=True)) is not None:
            published.setdefault(chunk, me)
    assert published.keys() == set(range(division.chunks))


@given(divisions)
def test_without_a_loss_no_chunk_is_computed_twice(division):
    for me in division.groups:
        own = {chunk for chunk in range(division.chunks) if division.owner(chunk) == me}
        done: set[int] = set()
        while (chunk := next_chunk(division, me, done, (), late=False)) is not None:
            done.add(chunk)
        assert done == own


@given(divisions, st.data())
def test_one_living_group_adds_up_as_long_as_the_losses_are_known(division, data):
    lost = data.draw(st.sets(st.sampled_from(division.groups), max_size=len(division.groups) - 1))
    assert sum(collects(division, group, lost) for group in division.groups if group not in lost) == 1


@given(divisions, st.data())
def test_the_chunks_of_a_lost_group_are_taken_over_by_different_groups(division, data):
    victim = data.draw(st.sampled_from(division.groups))
    others = [group for group in division.groups if group != victim] or [99]  # one that is not among them
    left = {chunk for chunk in range(division.chunks) if division.owner(chunk) == victim}
    done = set(range(division.chunks)) - left
    taken = {next_chunk(division, group, done, {victim}, late=False) for group in others} - {None}
    assert taken <= left and len(taken) == min(len(left), len(others))
