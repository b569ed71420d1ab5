"""The replication manager: the groups that host (prefetch) each shard (SPARe, arXiv 2603.00357, section 4).

Shard j of N is hosted by r groups; a group's r shards are its *stack*, its own shard first. SPARe's Theorem 4.1 needs
that *any two shards share at most one host*. Intuition: the deaths that exhaust one shard then cost every other shard
one host at most, so no small set of failures takes many shards out, and the load of the dead spreads over many
survivors. Stacks made by cyclic rotation (group i hosts i + o mod N for r offsets o) have it exactly when all
differences of the offsets are distinct mod N: a *cyclic Golomb ruler*, or Sidon set. The paper's text takes consecutive
offsets, which do not have it.

Failures assumed: whole groups, singly, and whole failure domains (rack, switch), against which ``domain_aware`` spreads
the hosts of a shard. A shard without a live host is a wipe-out to SPARe; to quotas it is a slower read of the dataset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, islice, product
from math import floor, gcd, isqrt, log, log2

import numpy as np
from numpy.typing import NDArray

from megatron_ft.errors import ConfigError
from megatron_ft.types import GroupId

Shard = int
Ints = NDArray[np.int64]
Stacks = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class _Rotation(Sequence[tuple[int, ...]]):
    """Rows made on demand: row i is i + o mod N for each offset o. A table of ``full(10_000)`` would have 10^8 entries."""

    groups: int
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return self.groups

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]  # no slices
        row = range(self.groups)[index]
        return tuple((row + o) % self.groups for o in self.offsets)


@dataclass(frozen=True)
class Placement:
    """The hosts of every shard. Every group hosts ``redundancy`` shards, and every shard has as many hosts.

    Attributes:
        groups: number N of groups, and of shards.
        redundancy: number r of shards of a group, and of hosts of a shard.
        kind: name of the construction.
        stacks: ``stacks[g]`` are the shards of group g, its own first.
        hosts: ``hosts[s]`` are the groups that host shard s, its own first.
        offsets: the set that generates both (group i hosts i + o mod N); empty if no single set does.
        warnings: properties that were asked for and are impossible, for people.
    """

    groups: int
    redundancy: int
    kind: str
    stacks: Stacks
    hosts: Stacks
    offsets: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once, because plans are looked up by their placement in every step."""
        return hash((self.groups, self.kind, self.stacks))

    def stack(self, group: GroupId) -> tuple[Shard, ...]:
        """Return the shards that ``group`` hosts, and so has to prefetch; it may be a group beyond the first N."""
        return self.stacks[group % self.groups]

    def is_host(self, group: GroupId, shard: Shard) -> bool:
        return self.redundancy == self.groups or group % self.groups in self.hosts[shard]

    def unhosted(self, live: Collection[GroupId]) -> tuple[Shard, ...]:
        """Return the shards that no group of ``live`` hosts."""
        if self.redundancy == self.groups:
            return () if live else tuple(range(self.groups))
        alive = np.zeros(self.groups, dtype=bool)
        alive[[group % self.groups for group in live]] = True
        return tuple(np.flatnonzero(~alive[self.host_table].any(axis=1)).tolist())

    def wiped_out(self, live: Collection[GroupId]) -> bool:
        """Return whether some shard has no surviving host: SPARe's wipe-out (section 4)."""
        return bool(self.unhosted(live))

    @cached_property
    def host_table(self) -> Ints:
        """The hosts of every shard, shape [N, r]."""
        return np.array(list(self.hosts))


def golomb(groups: int, redundancy: int) -> Placement:
    """Place by cyclic rotation with Golomb offsets (SPARe, section 4, Theorem 4.1): two shards share at most one host."""
    return cyclic(groups, golomb_offsets(groups, redundancy), "golomb")


def consecutive(groups: int, redundancy: int) -> Placement:
    """Place by cyclic rotation with offsets 0..r-1, as SPARe's text (section 4) describes it: a baseline."""
    _check(groups, redundancy)
    return cyclic(groups, tuple(range(redundancy)), "consecutive")


def full(groups: int) -> Placement:
    """Place every shard at every group."""
    _check(groups, 1)
    return cyclic(groups, tuple(range(groups)), "full")


def sets(groups: int, redundancy: int) -> Placement:
    """Place the shards of each set of ``redundancy`` neighbours at all of them (replication). It divides ``groups``."""
    _check(groups, redundancy)
    if groups % redundancy:
        raise ConfigError(f"redundancy is {redundancy}; it must divide the number of groups, {groups}")
    first = (group // redundancy * redundancy for group in range(groups))
    stacks = tuple(
        (group, *(other for other in range(start, start + redundancy) if other != group))
        for group, start in enumerate(first)
    )
    return Placement(groups, redundancy, "sets", stacks, stacks)


def domain_aware(domains: Sequence[Hashable], redundancy: int) -> Placement:
    """Spread the hosts of each shard over failure domains; ``domains[g]`` is the rack or switch of group g.

    First, the hosts of a shard share a domain as little as possible: not at all exactly if the largest domain holds at
    most N / r groups, because its groups have r places each and every shard may use one of them. Second, two shards
    share at most one host (SPARe, section 4) where that is possible. ``warnings`` name the properties that were impossible.
    """
    groups, number = len(domains), {domain: i for i, domain in enumerate(dict.fromkeys(domains))}
    _check(groups, redundancy)
    label = np.array([number[domain] for domain in domains])
    order, offsets = _spread_ring(label, redundancy)
    if np.array_equal(order, np.arange(groups)) and is_golomb(groups, offsets) or redundancy == groups:
        placement = cyclic(groups, offsets, "domain_aware")
    else:
        stacks = order[(np.argsort(order)[:, None] + np.array(offsets)) % groups].tolist()
        if not is_golomb(groups, offsets) and groups * redundancy**2 <= 4_000_000:  # in memory and time
            stacks = _Exchange(stacks, label).run()
        placement = Placement(groups, redundancy, "domain_aware", tuple(map(tuple, stacks)), _transpose(stacks))
    return replace(placement, warnings=_warnings(placement, label))


def shared_hosts(placement: Placement) -> int:
    """Return the largest number of hosts that any two shards share; SPARe's Theorem 4.1 requires at most 1."""
    N, r = placement.groups, placement.redundancy
    if r == N:
        return r if N > 1 else 0
    if placement.offsets:
        o = np.array(placement.offsets)
        return int(np.bincount((o[:, None] - o).ravel() % N)[1:].max(initial=0))
    from scipy.sparse import csr_array  # 0.2 s that a rank does not need at its start

    shards = np.repeat(np.arange(N), r)
    hosting = csr_array((np.ones(N * r, dtype=np.int64), (shards, np.ravel(placement.hosts))), shape=(N, N))
    overlap = hosting @ hosting.T
    overlap.setdiag(0)
    return int(overlap.max())


def cyclic(groups: int, offsets: tuple[int, ...], kind: str = "cyclic") -> Placement:
    """Place by cyclic rotation (SPARe, section 4) with these offsets, 0 first: group i hosts the shards i + o (mod N)."""
    hosts = _Rotation(groups, tuple(-o % groups for o in offsets))
    return Placement(groups, len(offsets), kind, _Rotation(groups, offsets), hosts, offsets)


def _check(groups: int, redundancy: int) -> None:
    if not 1 <= redundancy <= groups:
        rule = "1 <= redundancy <= groups must hold"
        raise ConfigError(f"redundancy is {redundancy} and groups is {groups}; {rule}: lower redundancy or add groups")


# --- offsets: cyclic Golomb rulers ------------------------------------------------------------------------------------


def golomb_offsets(groups: int, redundancy: int, choice: int = 0) -> tuple[int, ...]:
    """Return ``redundancy`` offsets, 0 first, whose pairwise differences are distinct mod ``groups`` (SPARe, section 4).

    A ruler stays one when it is shifted or multiplied by a unit mod N. Choice 0 is the unit that keeps the offsets
    farthest apart, so neighbouring groups (often of one rack) share few shards; higher ones are the next best.
    """
    _check(groups, redundancy)
    family = _family(groups, redundancy)
    if not len(family):
        rule = f"differences distinct mod {groups} need r * (r - 1) <= N - 1 = {groups - 1} and a known construction"
        raise ConfigError(f"redundancy is {redundancy}; {rule}: take at most {largest_redundancy(groups)}")
    row = family[choice % len(family)]
    return tuple((row - row[0]).tolist())


@lru_cache(maxsize=1024)
def largest_redundancy(groups: int) -> int:
    """Return the largest redundancy for which :func:`golomb_offsets` finds offsets."""
    _check(groups, 1)
    bound = (1 + isqrt(4 * groups - 3)) // 2
    return next(r for r in range(bound, 0, -1) if _base(groups, r))


def optimal_redundancy(groups: int) -> int:
    """Return SPARe's near-optimal redundancy r* = floor(log2 N + gamma_Euler / ln 2) (section 4), between 1 and N."""
    _check(groups, 1)
    return max(1, min(groups, floor(log2(groups) + np.euler_gamma / log(2))))


@lru_cache(maxsize=256)
def _family(groups: int, redundancy: int) -> Ints:
    """Return the base ruler times units mod N, one sorted row each, widest smallest gap first; no rows if none exists."""
    base = _base(groups, redundancy)
    if not base:
        return np.empty((0, redundancy), dtype=np.int64)
    units = [u for u in range(1, groups // 2 + 1) if gcd(u, groups) == 1] or [1]
    rows = np.sort(np.outer(units[:4096], base) % groups, axis=1)
    gaps = np.diff(rows, axis=1, append=rows[:, :1] + groups).min(axis=1)
    return rows[np.argsort(-gaps, kind="stable")]


@lru_cache(maxsize=4096)
def _base(groups: int, redundancy: int) -> tuple[int, ...]:
    """Return some cyclic Golomb ruler mod ``groups``; empty if none is found."""
    if redundancy * (redundancy - 1) > groups - 1:
        return ()
    if 2 * _ruler(redundancy)[-1] < groups:  # no two differences can then meet around the ring
        return _ruler(redundancy)
    if groups == redundancy * (redundancy - 1) + 1 and _is_prime(redundancy - 1):
        return tuple(_singer(redundancy - 1)[0, :redundancy].tolist())
    if groups > 256:  # the rulers above are beyond what climbing finds
        return ()
    found = _climb(np.arange(groups), tuple(range(redundancy)))  # every group a domain of its own
    return found if is_golomb(groups, found) else ()


@lru_cache(maxsize=1024)
def _ruler(marks: int) -> tuple[int, ...]:
    """Return a short integer Golomb ruler: the tightest run of marks in a Singer set of the next primes.

    It is optimal (as published) for 12, 14, 18 to 21 and 24 marks, and at most a quarter longer for others up to 26.
    """
    candidates = []
    for q in islice(filter(_is_prime, range(max(marks - 1, 2), 4 * marks + 8)), 3):
        rows = _singer(q)
        spans = rows[:, marks - 1 : marks + q] - rows[:, : q + 1]
        row, first = divmod(int(spans.argmin()), q + 1)
        candidates.append(tuple((rows[row, first : first + marks] - rows[row, first]).tolist()))
    return min(candidates, key=lambda ruler: ruler[-1])


@lru_cache(maxsize=32)
def _singer(q: int) -> Ints:
    """Return Singer's difference set (q prime) times every unit, each row sorted and unrolled over two turns.

    The set consists of the zeros of a linear recurrence of order 3 over GF(q) that runs through all v = q*q + q + 1
    points of the plane: q + 1 residues whose differences are all the non-zero residues mod v.
    """
    v = q * q + q + 1
    for a, b, c in product(range(q), range(q), range(1, q)):
        x, y, z, zeros = 0, 0, 1, []
        for i in range(v):
            if x == 0:
                zeros.append(i)
            x, y, z = y, z, (a * z + b * y + c * x) % q
        if len(zeros) == q + 1 and is_golomb(v, zeros):
            units = [u for u in range(1, v // 2 + 1) if gcd(u, v) == 1]
            rows = np.sort(np.outer(units, zeros) % v, axis=1)
            return np.concatenate([rows, rows + v], axis=1)
    raise AssertionError(f"no Singer set for q = {q}: is it a prime?")


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, isqrt(n) + 1))


def is_golomb(groups: int, offsets: Sequence[int]) -> bool:
    """Return whether all pairwise differences are distinct mod ``groups`` (SPARe, section 4, premise of Theorem 4.1)."""
    return _repeats(groups, offsets) == 0


def _repeats(groups: int, offsets: Sequence[int]) -> int:
    o = np.array(offsets)
    return len(o) * (len(o) - 1) + 1 - len(np.unique((o[:, None] - o) % groups))


def _climb(ring: Ints, offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Move one offset at a time to a random place, if no more differences repeat and the crowding stays."""
    groups, least, numbers = len(ring), _crowding(ring, offsets), _numbers()
    repeats = _repeats(groups, offsets)
    for _ in range(4000):
        if repeats == 0:
            break
        k, mark = 1 + next(numbers) % (len(offsets) - 1), next(numbers) % groups
        moved = (*offsets[:k], mark, *offsets[k + 1 :])
        if mark not in offsets and (now := _repeats(groups, moved)) <= repeats and _crowding(ring, moved) == least:
            offsets, repeats = moved, now
    return tuple(sorted(offsets))


def _numbers() -> Iterator[int]:
    """Yield numbers of a linear congruential generator: the same on every machine and with every library version."""
    state = 0
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


# --- failure domains --------------------------------------------------------------------------------------------------


def _crowding(ring: Ints, offsets: Sequence[int]) -> int:
    """Return the number of pairs of hosts of one shard in one domain, over all shards.

    ``ring`` has the domains around the ring.
    """
    hosts = (np.arange(len(ring))[:, None] - np.array(offsets)) % len(ring)
    count = _per_domain(ring[hosts])
    return int((count * (count - 1) // 2).sum())


def _per_domain(host_labels: Ints) -> Ints:
    """Return the number of hosts of each shard in each domain, from the domains ``host_labels[s]`` of its hosts."""
    return np.bincount((host_labels + (host_labels.max() + 1) * np.arange(len(host_labels))[:, None]).ravel())


def _rings(label: Ints, redundancy: int) -> Iterator[tuple[Ints, tuple[int, ...]]]:
    """Yield orders of the groups around the ring, each with offsets of the least crowding.

    If every domain is one arc, evenly spaced offsets put floor(n r / N) or ceil(n r / N) hosts of a shard into a domain
    of n groups: no placement does better. If domains of equal size alternate, neighbouring offsets do the same.
    """
    sizes, order = np.bincount(label), np.argsort(label, kind="stable")
    yield order, tuple(k * len(label) // redundancy for k in range(redundancy))
    if (sizes == sizes[0]).all():
        yield order.reshape(len(sizes), -1).T.ravel(), tuple(range(redundancy))


def _spread_ring(label: Ints, redundancy: int) -> tuple[Ints, tuple[int, ...]]:
    """Return a ring order and offsets on it with the least crowding and, if possible, no difference twice."""
    groups, found = len(label), []
    for order, start in _rings(label, redundancy):
        least = _crowding(label[order], start)
        for choice in range(min(len(_family(groups, redundancy)), 64)):
            offsets = golomb_offsets(groups, redundancy, choice)
            if _crowding(label[order], offsets) == least:
                return order, offsets
        found.append((order, _climb(label[order], start)))
    return min(found, key=lambda ring: _repeats(groups, ring[1]))


class _Exchange:
    """Hill climbing by exchanges: group g gives shard s to h and takes x from it.

    Domains do not get more crowded, and pairs of hosts that the same two shards share get fewer, in ``budget`` trials.
    """

    def __init__(self, stacks: list[list[int]], label: Ints, budget: int = 30_000) -> None:
        self.stacks, self.label, self.budget = stacks, label.tolist(), budget
        self.hosts = [set(row) for row in _transpose(stacks)]
        self.shared = Counter(pair for stack in stacks for pair in combinations(sorted(stack), 2))
        self.numbers = _numbers()

    def run(self) -> list[list[int]]:
        """Try exchanges for pairs of shards that share more than one host until there are none, or the budget ends."""
        while self.budget > 0 and (pairs := [pair for pair, count in self.shared.items() if count > 1]):
            for s, t in islice(pairs, self.budget):
                self.budget -= 1
                common = sorted(self.hosts[s] & self.hosts[t] - {s})
                if self.shared[s, t] > 1:
                    self._try(common[next(self.numbers) % len(common)], s)
        return self.stacks

    def _try(self, g: GroupId, s: Shard) -> None:
        h = next(self.numbers) % len(self.stacks)
        x = self.stacks[h][next(self.numbers) % len(self.stacks[h])]
        if x == h or g in self.hosts[x] or h in self.hosts[s] or self._crowds(g, h, s) + self._crowds(h, g, x) > 0:
            return
        if self._swap(g, s, h, x) > 0:
            self._swap(g, x, h, s)

    def _crowds(self, old: GroupId, new: GroupId, shard: Shard) -> int:
        """Return the growth in pairs of hosts of ``shard`` that share a domain when ``new`` takes the place of ``old``."""
        a, b = self.label[old], self.label[new]
        return 0 if a == b else 1 + sum((self.label[host] == b) - (self.label[host] == a) for host in self.hosts[shard])

    def _swap(self, g: GroupId, s: Shard, h: GroupId, x: Shard) -> int:
        """Exchange, and return the growth in pairs of hosts that the same two shards share."""
        grown = 0
        for group, old, new in ((g, s, x), (h, x, s)):
            stack = self.stacks[group]
            stack[stack.index(old)] = new
            self.hosts[old].remove(group)
            self.hosts[new].add(group)
            for y in stack:
                if y != new:
                    before, after = (min(old, y), max(old, y)), (min(new, y), max(new, y))
                    self.shared[before] -= 1
                    grown += self.shared[after] - self.shared[before]
                    self.shared[after] += 1
        return grown


def _transpose(stacks: Sequence[Sequence[int]]) -> Stacks:
    """Return the hosts of each shard, its own group first."""
    hosts: list[list[int]] = [[] for _ in stacks]
    for group, stack in enumerate(stacks):
        for shard in stack:
            hosts[shard].append(group)
    return tuple((shard, *(group for group in row if group != shard)) for shard, row in enumerate(hosts))


def _warnings(placement: Placement, label: Ints) -> tuple[str, ...]:
    """Return the properties that ``domain_aware`` could not give, with the numbers."""
    N, r, size, found = placement.groups, placement.redundancy, int(np.bincount(label).max()), []
    if (worst := int(_per_domain(label[np.array(list(placement.hosts))]).max())) > 1:
        found.append(
            f"up to {worst} hosts of one shard share a failure domain: one per domain needs redundancy * largest domain"
            f" <= groups, here {r} * {size} = {r * size} > {N} ({label.max() + 1} domains); spread as evenly as possible:"
            f" lower the redundancy to {N // size} or use smaller domains"
        )
    if (overlap := shared_hosts(placement)) > 1:
        why = "none found" if r * (r - 1) < N else f"impossible, r * (r - 1) = {r * (r - 1)} > N - 1 = {N - 1}"
        found.append(f"some shards share {overlap} hosts; at most 1 (the Golomb property) within these domains: {why}")
    return tuple(found)
