"""Property tests of the protocol core: random worlds, every step exact, every live group finishes."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ft.core.recovery import Job
from tests.world import World


@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 5),
    per_shard=st.integers(1, 4),
    buckets=st.integers(1, 4),
    steps=st.integers(1, 4),
    kills=st.integers(0, 4),
    joins=st.integers(0, 3),
    cuts=st.integers(0, 3),
    leaves=st.integers(0, 2),
)
@settings(max_examples=500, deadline=None)
@example(seed=0, groups=4, per_shard=4, buckets=2, steps=4, kills=3, joins=0, cuts=0, leaves=0)
@example(seed=1, groups=4, per_shard=4, buckets=2, steps=4, kills=3, joins=3, cuts=2, leaves=1)
def test_every_step_is_exact_whoever_dies_or_enters(seed, groups, per_shard, buckets, steps, kills, joins, cuts, leaves):
    world = World(Job(groups, per_shard, buckets, steps), seed)
    world.run(kills, joins, cuts if groups > 1 else 0, leaves)
    world.check_end()


def test_the_random_worlds_reach_the_hard_cases():
    """The property above is worth something only if its worlds really visit the rare states."""
    log: list[str] = []
    for seed in range(150):
        World(Job(4, 2, 3, 3), seed, log).run(kills=3, joins=2, cuts=1, leaves=1)
    text = "\n".join(log)
    rarities = ("takes the state of", "takes bucket", "(patch)", "reports step 3 have []", "have [0, 1, 2]", "joined [5]")
    for rare in (*rarities, "hears nothing"):
        assert rare in text, f"no world reached: {rare}"
