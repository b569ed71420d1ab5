"""The replication manager against brute force, and against the claims of SPARe (arXiv 2603.00357, section 4)."""

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.core.replication import placement as replication
from megatron_ft.core.replication.placement import (
    consecutive,
    cyclic,
    domain_aware,
    full,
    golomb,
    golomb_offsets,
    is_golomb,
    largest_redundancy,
    shared_hosts,
)
from megatron_ft.errors import ConfigError

PUBLISHED = (0, 1, 8, 11, 68, 77, 94, 116, 121, 156, 158, 179, 194, 208, 212, 228, 240, 253, 259, 283)


def racks(*sizes):
    return [f"rack{i}" for i, size in enumerate(sizes) for _ in range(size)]


def differences_are_distinct(groups, offsets):
    found = [(a - b) % groups for a in offsets for b in offsets if a != b]
    return len(found) == len(set(found))


def shared_by_counting(placement):
    """The definition of ``shared_hosts``, pair by pair."""
    hosts = [set(placement.hosts[shard]) for shard in range(placement.groups)]
    return max((len(a & b) for a, b in combinations(hosts, 2)), default=0)


def hosts_per_domain(placement, domains):
    """Return the smallest and largest number of hosts any shard has in each domain."""
    counts = {d: [sum(domains[g] == d for g in hosts) for hosts in placement.hosts] for d in domains}
    return {d: (min(count), max(count)) for d, count in counts.items()}


@cache
def in_domains(seed):
    """One of the placements whose search takes most of the time; all tests draw from the same few."""
    chance = random.Random(seed)
    groups, redundancy = chance.randint(1, 14), chance.randint(1, 3)
    return domain_aware([chance.randint(0, 4) for _ in range(groups)], min(redundancy, groups))


@st.composite
def placements(draw):
    kind = draw(st.sampled_from(["golomb", "consecutive", "full", "domains"]))
    if kind == "domains":
        return in_domains(draw(st.integers(0, 30)))
    groups = draw(st.integers(1, 14))
    redundancy = draw(st.integers(1, groups))
    if kind == "golomb":
        offsets = golomb_offsets(groups, min(redundancy, largest_redundancy(groups)), draw(st.integers(0, 50)))
        return cyclic(groups, offsets, "golomb")
    if kind == "consecutive":
        return consecutive(groups, redundancy)
    return full(groups)


# --- offsets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", range(1, 65))
def test_differences_of_offsets_are_distinct_for_every_feasible_redundancy(groups):
    """SPARe section 4, premise of Theorem 4.1."""
    for redundancy in range(1, largest_redundancy(groups) + 1):
        offsets = golomb_offsets(groups, redundancy)
        assert len(offsets) == redundancy and offsets[0] == 0 and max(offsets) < groups
        assert differences_are_distinct(groups, offsets)


@pytest.mark.parametrize("groups, largest", [(200, 12), (600, 20), (1000, 24)])
def test_differences_of_offsets_are_distinct_at_the_published_sizes(groups, largest):
    """SPARe section 4; its simulation has N = 200, 600, 1000 and redundancies up to 20."""
    for redundancy in range(1, largest + 1):
        assert differences_are_distinct(groups, golomb_offsets(groups, redundancy))


@given(groups=st.integers(2, 2000), choice=st.integers(0, 10**6), data=st.data())
@settings(max_examples=60)
def test_every_choice_is_a_golomb_ruler_that_starts_at_0(groups, choice, data):
    """SPARe section 4: shifts and multiples by units keep the property."""
    redundancy = data.draw(st.integers(1, max(1, int((groups / 3) ** 0.5))))
    offsets = golomb_offsets(groups, redundancy, choice)
    assert offsets[0] == 0 and differences_are_distinct(groups, offsets)


@given(st.integers(1, 40), st.data())
def test_is_golomb_is_what_its_definition_says(groups, data):
    """SPARe section 4, premise of Theorem 4.1: all pairwise differences distinct mod N."""
    offsets = sorted(data.draw(st.sets(st.integers(0, groups - 1), min_size=1, max_size=6)))
    assert is_golomb(groups, offsets) == differences_are_distinct(groups, offsets)


@given(st.integers(1, 130))
@settings(max_examples=25)
def test_the_largest_redundancy_is_possible_and_one_more_is_not(groups):
    largest = largest_redundancy(groups)
    assert differences_are_distinct(groups, golomb_offsets(groups, largest)) and largest * (largest - 1) <= groups - 1
    with pytest.raises(ConfigError, match=f"at most {largest}|1 <= redundancy <= groups"):
        golomb_offsets(groups, largest + 1)


def test_choices_are_different_offsets():
    assert len({golomb_offsets(600, 9, choice) for choice in range(40)}) >= 20


def test_offsets_are_the_same_when_computed_again_from_nothing():
    def everything():
        return [golomb_offsets(n, r, s) for n, r, s in [(50, 5, 0), (128, 9, 3), (600, 20, 7)]]

    before = everything()
    for function in vars(replication).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    assert everything() == before


def test_the_first_choice_keeps_hosts_out_of_each_others_neighbourhood():
    """Neighbouring groups are often of one rack: the offsets of N=600 r=8 are far more than a rack of 4 apart."""
    offsets = (*golomb_offsets(600, 8), 600)
    assert min(b - a for a, b in zip(offsets, offsets[1:], strict=False)) > 8


def test_the_published_offsets_for_redundancy_20_are_valid():
    """The r = 20 of SPARe's N = 600 has offsets: an integer ruler shorter than N / 2."""
    assert is_golomb(600, PUBLISHED)
    assert not is_golomb(566, PUBLISHED)  # the difference 283 is its own inverse there


@pytest.mark.parametrize("groups, largest", [(7, 3), (13, 4), (31, 6), (57, 8), (6, 2), (12, 3), (200, 12), (600, 20)])
def test_largest_redundancy_of_perfect_and_of_published_sizes(groups, largest):
    """At N = r (r - 1) + 1 every difference is used (Singer); r (r - 1) <= N - 1 bounds all."""
    assert largest_redundancy(groups) == largest


@pytest.mark.parametrize(
    "groups, redundancy, words",
    [
        (20, 6, ["redundancy is 6", "r * (r - 1) <= N - 1 = 19", "at most 4"]),
        (600, 25, ["redundancy is 25", "N - 1 = 599", "at most 20"]),
        (5, 6, ["redundancy is 6", "groups is 5", "1 <= redundancy <= groups"]),
        (5, 0, ["redundancy is 0", "1 <= redundancy <= groups"]),
        (0, 1, ["groups is 0", "add groups"]),
    ],
)
def test_an_impossible_redundancy_is_named_with_the_rule_and_the_remedy(groups, redundancy, words):
    with pytest.raises(ConfigError) as caught:
        golomb_offsets(groups, redundancy)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- what holds for every placement -----------------------------------------------------------------------------------


@given(placements())
@settings(max_examples=80)
def test_every_group_hosts_r_shards_and_every_shard_has_r_hosts_own_first(placement):
    """SPARe section 4, stacking: the stack of a group begins with its own shard."""
    for i in range(placement.groups):
        stack, hosts = placement.stack(i), placement.hosts[i]
        assert len(set(stack)) == len(stack) == len(set(hosts)) == len(hosts) == placement.redundancy
        assert stack[0] == hosts[0] == i
        assert all(i in placement.stack(host) for host in hosts)
    assert len(placement.stacks) == len(placement.hosts) == placement.groups


@given(placements())
@settings(max_examples=60)
def test_is_host_agrees_with_the_stacks(placement):
    everywhere = range(placement.groups)
    assert all(placement.is_host(g, s) == (s in placement.stacks[g]) for g in everywhere for s in everywhere)


@given(st.integers(1, 30), st.data())
def test_cyclic_rotation_is_the_published_rule(groups, data):
    """SPARe section 4: shard j stands on the groups j - o (mod N) for the offsets o, and nowhere else."""
    offsets = (0, *sorted(data.draw(st.sets(st.integers(1, groups - 1)) if groups > 1 else st.just(set()))))
    placement = cyclic(groups, offsets)
    for shard in range(groups):
        assert set(placement.hosts[shard]) == {(shard - o) % groups for o in offsets}
        assert set(placement.stack(shard)) == {(shard + o) % groups for o in offsets}


@given(placements(), st.data())
@settings(max_examples=80)
def test_unhosted_and_wipe_out_agree_with_brute_force(placement, data):
    """SPARe section 4: a wipe-out is a shard without surviving host."""
    live = data.draw(st.sets(st.integers(0, placement.groups + 2)))
    without = tuple(s for s in range(placement.groups) if not any(s in placement.stack(g) for g in live))
    assert placement.unhosted(live) == without
    assert placement.wiped_out(live) == bool(without)


@given(placements())
@settings(max_examples=60)
def test_shared_hosts_agrees_with_counting(placement):
    assert shared_hosts(placement) == shared_by_counting(placement)


@pytest.mark.parametrize("groups, redundancy", [(7, 3), (57, 8), (64, 5), (200, 12), (600, 20)])
def test_any_two_shards_share_at_most_one_host(groups, redundancy):
    """SPARe section 4, premise of Theorem 4.1."""
    assert shared_by_counting(golomb(groups, redundancy)) <= 1


def test_consecutive_offsets_lack_the_golomb_property():
    """SPARe section 4: its text takes offsets 0..r-1, with which neighbouring shards share r - 1 hosts."""
    assert shared_hosts(consecutive(600, 8)) == 7


def test_group_i_hosts_the_shards_i_plus_offset():
    """SPARe section 4, cyclic rotation: shard j is on groups j - o (mod N)."""
    placement = golomb(30, 4)
    assert placement.stacks[29] == tuple((29 + o) % 30 for o in placement.offsets)
    assert placement.hosts[0] == tuple(-o % 30 for o in placement.offsets)


def test_full_placement_of_ten_thousand_groups_is_not_written_out():
    placement = full(10_000)
    assert placement.wiped_out([]) and not placement.wiped_out([17]) and placement.is_host(3, 9_999)
    assert placement.unhosted(range(4, 10_000)) == ()


def test_a_group_beyond_the_first_n_hosts_what_its_number_mod_n_does():
    placement = consecutive(6, 3)
    assert placement.stack(8) == placement.stack(2) and placement.is_host(8, 4) and not placement.is_host(8, 1)


def test_equal_placements_compare_equal():
    assert golomb(40, 4) == golomb(40, 4) != consecutive(40, 4)


def deaths_until_wipe_out(placement, order):
    """Return the number of lost groups when a shard has lost its last host; racks of 4 die one after the other."""
    live = set(range(placement.groups))
    for rack in order:
        live -= set(range(4 * rack, 4 * rack + 4))
        if placement.wiped_out(live):
            break
    return placement.groups - len(live)


def test_golomb_endures_several_times_the_rack_failures_of_consecutive():
    """SPARe section 4 beyond its own failures: N=600 r=8, racks of 4 neighbours (noted: 46 against 268 groups)."""
    orders = [np.random.Generator(np.random.PCG64(seed)).permutation(150).tolist() for seed in range(20)]
    spread, near = golomb(600, 8), consecutive(600, 8)
    endured = np.mean([deaths_until_wipe_out(spread, order) for order in orders])
    assert endured > 200 and endured > 3 * np.mean([deaths_until_wipe_out(near, order) for order in orders])


# --- failure domains --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "domains, redundancy",
    [
        (racks(*[4] * 4), 4),
        (racks(*[4] * 6), 5),
        ([g % 6 for g in range(24)], 4),
        (racks(*[6] * 5), 5),
        (racks(*[20] * 10), 10),
        (racks(*[4] * 150), 10),
        (racks(*[60] * 10), 10),
        (racks(*[32] * 31, 8), 10),
        (racks(2, 5, 3, 4, 6, 1, 3), 4),
        (racks(7, 9, 10, 4, 8, 10, 2, 5, 5), 5),
    ],
    ids=lambda value: f"{len(set(value))} domains" if isinstance(value, list) else str(value),
)
def test_no_two_hosts_in_one_domain_and_at_most_one_shared_host(domains, redundancy):
    """SPARe section 4 (Golomb) and, not in the paper, racks of equal, unequal, neighbouring and mixed-up groups."""
    placement = domain_aware(domains, redundancy)
    assert max(high for _, high in hosts_per_domain(placement, domains).values()) <= 1
    assert shared_hosts(placement) <= 1 and placement.warnings == ()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_hosts_are_spread_as_evenly_as_any_placement_can(sizes, redundancy, shuffle):
    """A domain of n groups has n * r of the N * r places: floor(n r / N) or ceil(n r / N) for each shard."""
    domains = racks(*sizes)
    shuffle.shuffle(domains)
    groups, redundancy = len(domains), min(redundancy, len(domains))
    for domain, (low, high) in hosts_per_domain(domain_aware(domains, redundancy), domains).items():
        share = domains.count(domain) * redundancy
        assert low >= share // groups and high <= -(-share // groups)


@pytest.mark.parametrize("domains, redundancy, worst", [(racks(4, 4), 3, 2), (racks(6), 2, 2), (racks(1, 1, 8), 3, 3)])
def test_impossible_spreading_is_warned_of_with_numbers(domains, redundancy, worst):
    largest = max(domains.count(d) for d in domains)
    warning = domain_aware(domains, redundancy).warnings[0]
    assert warning.startswith(f"up to {worst} hosts of one shard share a failure domain")
    assert f"{redundancy} * {largest} = {redundancy * largest} > {len(domains)}" in warning


def test_a_lost_golomb_property_is_warned_of_and_domains_are_kept():
    """SPARe section 4 needs r (r - 1) <= N - 1; four hosts of eight groups cannot have it."""
    placement = domain_aware(racks(2, 2, 2, 2), 4)
    assert max(high for _, high in hosts_per_domain(placement, racks(2, 2, 2, 2)).values()) == 1
    assert placement.warnings == (
        f"some shards share {shared_hosts(placement)} hosts; at most 1 (the Golomb property) within these domains: "
        "impossible, r * (r - 1) = 12 > N - 1 = 7",
    )


def test_every_group_in_a_domain_of_its_own_is_plain_golomb():
    assert domain_aware(range(40), 5).stacks == golomb(40, 5).stacks


def test_domain_placements_are_the_same_every_time():
    domains = racks(2, 5, 3, 4, 6, 1, 3)
    assert domain_aware(domains, 5) == domain_aware(domains, 5) != domain_aware(domains[::-1], 5)


@pytest.mark.parametrize("redundancy", [2, 6, 10])
def test_a_whole_domain_is_endured(redundancy):
    """The reason for all this: any one rack may die, at any redundancy from 2 on, if it is not too large."""
    domains = racks(*[10] * 10)
    placement = domain_aware(domains, redundancy)
    assert not any(placement.wiped_out([g for g in range(100) if domains[g] != dead]) for dead in set(domains))
